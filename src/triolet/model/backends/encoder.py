"""Encoders: transformers' models with attention in both directions, for embeddings, classification and scores.

An encoder computes whole prompts, and keeps nothing of them after the step: there is no KV cache. The prompts of a step
are packed end to end, so that no work is spent on padding. The modelling code, heads included, stays transformers'
own; its attention is exchanged (`packed_attention`). Loading ends with a comparison: a few random tokens, beside
another prompt, must give the hidden states of the model's own eager attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor, nn

from triolet.errors import InvariantViolated, TrioletError, UnsupportedModel
from triolet.model.backends.cpu.linear import use_cpp_linear_layers
from triolet.model.backends.packed_attention import (
    PACKED_ATTENTION,
    PackedStep,
    register_packed_attention,
    window_of,
)
from triolet.model.backends.transformers_attention import INSPECTED_ATTENTION, Inspection
from triolet.model.backends.transformers_backend import (
    check_architecture,
    check_loading_report,
    longest_position,
    read_model,
    read_model_config,
)
from triolet.model.backends.transformers_head import BaseOutput, returning
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.json_fields import Fields
from triolet.model.interface import ForwardBatch, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Tensors of heads that a model without an output head does not have.
_OTHER_HEADS: Final = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "bert.pooler.", "roberta.pooler.")
_CHECKED_TOKENS: Final = (3, 7)  # of the neighbour, and of the sequence that is compared
# Mean difference of the hidden states in units of their standard deviation: what rounding explains.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.12}


@attrs.frozen(eq=False, kw_only=True)
class EncoderModel:
    """A transformers encoder behind the runner's interface."""

    spec: ModelSpec
    model: PreTrainedModel  # in evaluation mode, with packed attention set
    windows: dict[nn.Module, int]  # see `PackedStep`
    first_position: int  # position id of a prompt's first token
    takes_token_types: bool  # whether it tells the two texts of a pair by the types of their tokens

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        arguments: dict[str, Any] = {}
        if self.takes_token_types and batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.token_type_ids[None]
        hidden: Tensor = self.model.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None] + self.first_position,
            packed_step=PackedStep(batch.attention.query_lens_host, self.windows),
            **arguments,
        ).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def classify(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head to one prompt.

        Args:
            hidden: [num_tokens, hidden_size], of the whole prompt.
        Returns:
            [1, num_labels] float32; of a token classification [num_tokens, num_labels].
        """
        base = self.model.base_model
        pooler = getattr(base, "pooler", None)
        pooled = None if pooler is None else pooler(hidden[None])
        # a head that reads the last token passes over padding
        token_id = int(self.model.config.pad_token_id == 0)
        token_ids = torch.full((1, len(hidden)), token_id, dtype=torch.int64, device=hidden.device)
        with returning(base, BaseOutput(hidden[None], pooled)):
            logits: Tensor = self.model(input_ids=token_ids).logits
        return logits.float().flatten(0, -2)

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        raise InvariantViolated("a request that generates must not be admitted: an encoder has no logits")

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        return self.compute_logits(batch.token_ids, batch.logits_indices)


def load_encoder(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool,
    max_length: int | None,
) -> EncoderModel:
    """Load a model folder with transformers' modelling code, and check it over packed prompts.

    Args:
        folder: with config.json and safetensors files.
        config: the content of config.json.
        dtype: of weights and activations.
        device: torch's name of it.
        trust_remote_code: lets transformers read a configuration that needs the folder's code.
        max_length: longest prompt that the folder allows, tokens; None for what the positions allow.

    Raises:
        UnsupportedModel: the architecture, or a feature of it, cannot run over packed prompts.
        ModelFileError: a weights file is missing, truncated or not safetensors.
        WeightsMismatch: tensors are missing, left over or of another shape than the architecture's.
    """
    architecture = check_architecture(Fields(folder / "config.json", config))
    model_class = _encoder_class(architecture)
    model_config = read_model_config(folder, model_class, trust_remote_code)
    Checkpoint.open(folder)  # finds missing and truncated files before anything is allocated
    register_packed_attention()
    model = _read_weights(folder, model_class, model_config, dtype)
    nn.Module.to(model, device)
    first_position = _first_position(model.base_model)
    max_position = longest_position(model_config) - first_position
    encoder = EncoderModel(
        spec=ModelSpec(
            architecture=architecture,
            backend="transformers",
            vocab_size=model_config.vocab_size,
            max_position=min(max_position, max_length or max_position),
            cache_layers=(),
            dtype=dtype,
            hidden_size=model_config.hidden_size,
        ),
        model=model,
        windows=_inspect(model, max_position),
        first_position=first_position,
        takes_token_types=getattr(model_config, "type_vocab_size", 0) > 1,
    )
    _compare_with_own_attention(encoder)
    return encoder


def _encoder_class(architecture: str) -> type[PreTrainedModel]:
    import transformers

    name = architecture.replace("ForMaskedLM", "Model")  # its head gives no embeddings
    model_class: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if model_class is None:
        raise UnsupportedModel(
            f"{architecture} is no encoder that transformers {transformers.__version__} knows"
        )
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(f"{architecture} does not support transformers' attention interface")
    return model_class


def _read_weights(
    folder: Path, model_class: type[PreTrainedModel], model_config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    options: dict[str, Any] = {}
    is_headless = model_class.__name__.endswith("Model")
    # BERT's pooler is no part of an embedding, and many folders do not have it
    if is_headless and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        options["add_pooling_layer"] = False
    model, report = read_model(folder, model_class, model_config, dtype, PACKED_ATTENTION, **options)
    unexpected = [name for name in report["unexpected_keys"] if not name.endswith("position_ids")]
    if is_headless:
        unexpected = [name for name in unexpected if not name.startswith(_OTHER_HEADS)]
    check_loading_report({**report, "unexpected_keys": unexpected})
    return model


def _first_position(base: nn.Module) -> int:
    """Return the position id of a first token: RoBERTa counts from after the id of its padding token."""
    embeddings = getattr(base, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1  # type: ignore[union-attr]
    return 0


def _inspect(model: PreTrainedModel, max_position: int) -> dict[nn.Module, int]:
    """Run two tokens through the model, and return the window of each attention layer."""
    inspection = Inspection()
    model.set_attn_implementation(INSPECTED_ATTENTION)
    tokens = torch.arange(2, device=model.device)
    _hidden_states(model, tokens, inspection=inspection)
    model.set_attn_implementation(PACKED_ATTENTION)
    if not inspection.calls:
        raise UnsupportedModel(
            f"{type(model).__name__} has no layer that uses transformers' attention interface"
        )
    return {
        module: window_of(module, call, len(tokens), max_position)
        for module, call in inspection.calls.items()
    }


def _hidden_states(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    try:
        with torch.inference_mode():
            hidden: Tensor = model.base_model(input_ids=tokens[None], **options).last_hidden_state[0]
    except TrioletError:
        raise
    except Exception as error:  # the modelling code of hundreds of architectures
        raise UnsupportedModel(f"{type(model).__name__} cannot run as an encoder: {error}") from error
    return hidden


def _compare_with_own_attention(encoder: EncoderModel) -> None:
    """Compute a few random tokens as the model does and as we do; leaves the model on our attention and layers."""
    model = encoder.model
    generator = torch.Generator().manual_seed(0)
    # low ids are often special: RoBERTa's positions skip the padding token
    tokens = torch.randint(
        encoder.spec.vocab_size // 2, encoder.spec.vocab_size, (sum(_CHECKED_TOKENS),), generator=generator
    )
    neighbour, sequence = tokens.to(model.device).split(_CHECKED_TOKENS)
    model.set_attn_implementation("eager")
    own = _hidden_states(model, sequence)
    model.set_attn_implementation(PACKED_ATTENTION)
    use_cpp_linear_layers(model.base_model)
    positions = torch.cat([torch.arange(count) for count in _CHECKED_TOKENS]).to(model.device)
    got = _hidden_states(
        model,
        torch.cat([neighbour, sequence]),
        position_ids=positions[None] + encoder.first_position,
        packed_step=PackedStep(_CHECKED_TOKENS, encoder.windows),
    )[len(neighbour) :]
    difference = float((got.float() - own.float()).abs().mean() / own.float().std())
    if not difference <= _TOLERANCE[encoder.spec.dtype]:  # and not `>`: NaN must not pass
        raise UnsupportedModel(
            f"{type(model).__name__} computes other hidden states for packed prompts than by itself: they differ by "
            f"{difference:.2g} standard deviations in the mean"
        )
