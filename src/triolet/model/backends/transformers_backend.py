"""Every causal language model that the native decoder does not know: transformers' code over our paged cache.

The modelling code stays as it is; only its attention is exchanged, by the name in the model's config
(`transformers_attention`). All chunks of a step run as one row, [1, num_tokens], with explicit positions,
and only the rows whose logits are wanted reach the head. What cannot work is refused while the model is
loaded: by its config before any code runs or any weight is read, by its class before the weights are read,
and by looking and measuring afterwards (`transformers_check`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor, nn

from triolet.errors import ModelFileError, RemoteCodeRefused, UnsupportedModel, WeightsMismatch
from triolet.model.backends.own_attention import MAX_PADDING, OwnAttentionModel
from triolet.model.backends.transformers_attention import PAGED_ATTENTION, PagedStep, register_attention
from triolet.model.backends.transformers_check import (
    cache_layers,
    check_positions,
    compare_gathered,
    compare_with_own_attention,
    inspect_layers,
    takes_padding,
)
from triolet.model.backends.transformers_head import compute_logits, decoder_of
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.json_fields import Fields
from triolet.model.interface import CausalModel, ForwardBatch, LayerCacheSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Layers that keep keys and values of every token, or nothing at all. Others keep something of another shape.
_KNOWN_LAYER_TYPES: Final = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse", "moe"}
)

# Names of the longest sequence in configs: most families', MPT's, and what Bloom's checkpoints have.
_LENGTHS: Final = ("max_position_embeddings", "max_seq_len", "seq_length")


@attrs.frozen(eq=False)
class TransformersModel:
    """A transformers model behind the runner's interface (`CausalModel`)."""

    spec: ModelSpec  # what the engine needs to know of it
    model: PreTrainedModel  # the model, in evaluation mode, with paged attention set
    layer_of: Mapping[nn.Module, int]  # each attention module's index in the cache

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        output = decoder_of(self.model)(**self._arguments(batch))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden.to(self.spec.dtype)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return compute_logits(self.model, hidden, rows).to(self.spec.dtype)

    @torch.inference_mode()
    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        output = self.model(**self._arguments(batch), logits_to_keep=batch.logits_indices)
        logits: Tensor = output.logits[0]
        return logits.to(self.spec.dtype)

    def _arguments(self, batch: ForwardBatch) -> dict[str, Any]:
        return {
            "input_ids": batch.token_ids[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
            "paged_step": PagedStep(batch.cache, batch.attention, self.layer_of),
        }


def load_transformers_model(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool,
    max_model_len: int | None = None,
) -> CausalModel:
    """Load a model folder with transformers' modelling code, and check it over a paged cache.

    Args:
        folder: with config.json and safetensors files.
        config: the content of config.json.
        dtype: of weights, activations and KV.
        device: torch's name of it.
        trust_remote_code: whether Python code in the folder may be run.
        max_model_len: longest sequence that will be asked for, tokens.

    Returns:
        The model, on `device`, ready for steps.

    Raises:
        RemoteCodeRefused: the model needs the folder's code and `trust_remote_code` is off; none of it ran.
        UnsupportedModel: the architecture, or a feature of it, cannot run over a paged cache.
        ModelFileError: a weights file is missing, truncated or not safetensors.
        WeightsMismatch: tensors are missing, left over or of another shape than the architecture's.
    """
    fields = Fields(folder / "config.json", config)
    architecture = check_architecture(fields)
    model_class = _model_class(folder, fields, architecture, trust_remote_code)
    model_config = read_model_config(folder, model_class, trust_remote_code)
    max_position = longest_position(model_config, max_model_len)
    Checkpoint.open(folder)  # finds missing and truncated files before anything is allocated
    register_attention()
    own = "sdpa" if model_class._supports_sdpa else "eager"
    problem = _interface_problem(model_class)
    model = _load_weights(
        folder, model_class, model_config, dtype, PAGED_ATTENTION if problem is None else own
    )
    nn.Module.to(model, device)

    def spec_of(layers: Iterable[LayerCacheSpec], backend: str) -> ModelSpec:
        return ModelSpec(
            architecture=architecture,
            backend=backend,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            max_position=max_position,
            cache_layers=tuple(layers),
            dtype=dtype,
            hidden_size=model.config.get_text_config().hidden_size,
        )

    if problem is None:
        try:
            calls = inspect_layers(model, max_position)
        except UnsupportedModel as error:
            problem = str(error)
            model.set_attn_implementation(own)
        else:
            spec = spec_of((call.cache_spec() for call in calls.values()), "transformers")
            paged = TransformersModel(spec, model, {module: index for index, module in enumerate(calls)})
            compare_with_own_attention(model, paged)
            check_positions(model, paged, calls)
            return paged
    try:
        layers = cache_layers(model)
        gathered = OwnAttentionModel(
            spec_of(layers.values(), "transformers, own attention"), model, tuple(layers)
        )
        compare_gathered(model, gathered)
        gathered.max_padding = MAX_PADDING if takes_padding(model, gathered) else 0.0
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{problem}; with its own attention: {error}") from error
    logger.warning("%s runs with its own attention, which is slower: %s", architecture, problem)
    return gathered


def _interface_problem(model_class: type[PreTrainedModel]) -> str | None:
    """Return why a model's attention cannot be exchanged, as far as its class tells."""
    if not model_class._supports_attention_backend:
        return f"{model_class.__name__} does not support transformers' attention interface"
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        return f"{model_class.__name__} has no logits_to_keep: it computes the logits of all tokens or none"
    return None


def check_architecture(fields: Fields) -> str:
    """Return the architecture that the config names; raise if the config rules the model out."""
    quantization = fields.section("quantization_config")
    if quantization is not None and quantization.values:
        method = quantization.text("quant_method", "")
        raise UnsupportedModel(f"quantised checkpoints are not supported; got quant_method={method!r}")
    if fields.flag("is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models are not supported; got is_encoder_decoder=True")
    architectures = fields.texts("architectures") or ()
    if len(architectures) != 1:
        raise UnsupportedModel(f"architectures must name one class; got {list(architectures)!r}")
    return architectures[0]


def _model_class(
    folder: Path, fields: Fields, architecture: str, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return the model's class; raise unless it is causal and its attention can be replaced."""
    auto_map = fields.section("auto_map")
    remote = "" if auto_map is None else auto_map.text("AutoModelForCausalLM", "")
    if remote and trust_remote_code:
        model_class = _remote_class(folder, remote)
    elif remote and not _is_in_library(architecture):
        raise RemoteCodeRefused(
            f"{architecture} runs only with the model's own code (auto_map names {remote!r}); "
            "trust_remote_code must be true; got False"
        )
    else:
        model_class = _library_class(fields.text("model_type", ""), architecture)
    if model_class._is_stateful:
        raise UnsupportedModel(
            f"{architecture} carries a state from token to token, which a paged cache does not hold"
        )
    return model_class


def _is_in_library(architecture: str) -> bool:
    import transformers

    return hasattr(transformers, architecture)


def _library_class(model_type: str, architecture: str) -> type[PreTrainedModel]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    if architecture not in ((names,) if isinstance(names, str) else names):
        raise UnsupportedModel(
            f"{architecture} (model_type={model_type!r}) is no causal language model that "
            f"transformers {transformers.__version__} knows"
        )
    model_class: type[PreTrainedModel] = getattr(transformers, architecture)
    return model_class


def _remote_class(folder: Path, reference: str) -> type[PreTrainedModel]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        model_class: type[PreTrainedModel] = get_class_from_dynamic_module(reference, folder)
    except Exception as error:  # it is the model's code that runs here
        raise ModelFileError(
            folder, f"the code that config.json names ({reference}) cannot be loaded: {error}"
        ) from error
    return model_class


def read_model_config(
    folder: Path, model_class: type[PreTrainedModel], trust_remote_code: bool
) -> PreTrainedConfig:
    """Read the folder's config with transformers; raise if a layer is of a kind that is not supported."""
    from transformers import AutoConfig

    try:
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a config class may raise whatever it likes
        raise ModelFileError(folder / "config.json", f"transformers cannot read it: {error}") from error
    strange = set(getattr(model_config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if strange:
        raise UnsupportedModel(
            f"{model_class.__name__} has layers that keep no plain keys and values: {sorted(strange)}"
        )
    # What a training script may have left on changes what the model returns.
    model_config.return_dict = True
    model_config.output_attentions = model_config.output_hidden_states = False
    return model_config


def longest_position(model_config: PreTrainedConfig, max_model_len: int | None = None) -> int:
    """Return the longest sequence with rotary frequencies that do not depend on its length, tokens.

    LongRoPE turns to other frequencies as soon as one sequence of a batch is longer than the original
    context, for all of the batch and not for what is in the cache; so its original context is the end here.
    Linear biases in the place of positions have no end; where the config names none, it is `max_model_len`.
    """
    text_config = model_config.get_text_config()
    lengths = [getattr(text_config, name, None) for name in _LENGTHS]
    max_position = next((length for length in lengths if length is not None), max_model_len)
    if not isinstance(max_position, int):
        raise UnsupportedModel(
            f"one of {', '.join(_LENGTHS)} must be a whole number, or for a model that generates "
            f"max_model_len be given; got {lengths}"
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    for parameters in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if parameters.get("rope_type") == "longrope":
            max_position = min(max_position, parameters["original_max_position_embeddings"])
    return max_position


def _load_weights(
    folder: Path,
    model_class: type[PreTrainedModel],
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str,
) -> PreTrainedModel:
    """Read the weights, one tensor at a time; every tensor must have its place and every place its tensor."""
    model, report = read_model(folder, model_class, model_config, dtype, attention)
    check_loading_report(report)
    return model


def read_model(
    folder: Path,
    model_class: type[PreTrainedModel],
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str,
    **options: Any,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Read a model with its weights, one tensor at a time; return it, and transformers' report about the tensors.

    Args:
        attention: name of the attention function that it calls.
        options: further arguments of the model's constructor.
    Raises:
        ModelFileError: transformers cannot build it.
    """
    loaded: Any  # a pair, with output_loading_info
    try:
        loaded = model_class.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # so that the report names them all; none is let through
            output_loading_info=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers' or the model's own, about a config or tensors without sense
        raise ModelFileError(
            folder, f"transformers cannot build {model_class.__name__} from it: {error}"
        ) from error
    model: PreTrainedModel = loaded[0]
    model.eval().requires_grad_(False)
    return model, loaded[1]


def check_loading_report(report: Mapping[str, Any]) -> None:
    """Raise if weights are missing, left over or of the wrong shape."""
    # transformers initialises missing weights at random and drops unexpected ones, with a warning only.
    missing, unused = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    misshapen = [
        f"{name} must be {tuple(wanted)}; got {tuple(got)}"
        for name, got, wanted in sorted(report["mismatched_keys"])
    ]
    if missing or unused or misshapen:
        raise WeightsMismatch(missing=missing, unused=unused, misshapen=misshapen)
