"""Loading of a model folder: by the native decoder if it knows the architecture, by transformers' code otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from triolet.core.load_progress import OnProgress
from triolet.errors import ConfigError
from triolet.model.architectures.decoder_config import (
    DTYPES,
    DecoderConfig,
    architecture_of,
    checkpoint_dtype,
    read_config,
)
from triolet.model.architectures.families import is_bidirectional, native_family, parse_decoder_config
from triolet.model.architectures.language_part import language_config, language_name
from triolet.model.architectures.weight_map import WeightSource, head_name
from triolet.model.backends.cpu.plan import can_plan
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.generation_config import read_generation_defaults
from triolet.model.folder.pooling_config import ENCODER_ENDINGS, PoolingConfig, read_pooling_config
from triolet.model.interface import CausalModel
from triolet.model.loading.decoder import DecoderLoad, kv_format_of
from triolet.model.loading.options import AUTO, LoadedFolder, LoadOptions, not_quantised
from triolet.model.pooling import (
    DEEP_HEAD,
    Scores,
    classifier_token_ids,
    load_pooler,
    read_token_scores,
    token_scores_of,
)
from triolet.model.quantized.checkpoint import QuantizedCheckpoint, open_quantized
from triolet.model.quantized.stacked_experts import StackedExperts, open_stacked_experts

if TYPE_CHECKING:
    from triolet.model.adapters import AdapterBank
    from triolet.model.backends.encoder import EncoderModel
    from triolet.model.parallel.group import Group

logger = logging.getLogger(__name__)


@attrs.frozen(eq=False, kw_only=True)
class _Built:
    """Model of a folder, and what was made with it."""

    model: CausalModel
    generates: bool  # whether it has an output head
    adapters: AdapterBank[Any] | None = None
    encoder: EncoderModel | None = None  # the model, if it is one
    token_scores: Scores | None = None  # of a folder with `classifier_tokens`


def load_folder(
    path: Path, options: LoadOptions, on_progress: OnProgress | None, group: Group | None
) -> LoadedFolder:
    """Load a model folder.

    Args:
        path: of the folder.
        options: settings of the load.
        on_progress: told how many bytes were read.
        group: of the processes that compute this model together; None for one.

    Raises:
        ConfigError: a field is not possible with this model or device.
        ModelError: the model cannot be loaded; the subclass says why.
    """
    folder = _Folder.read(path, options)
    if group is not None and folder.pooling is not None:
        raise ConfigError("tensor_parallel_size", "1 for a model that is pooled", group.part.size)
    family = None if is_bidirectional(folder.config) else native_family(folder.architecture, folder.config)
    defaults = read_generation_defaults(path)
    if family is None:
        built = folder.load_foreign(group)
    elif group is None:
        built = folder.load_native(family, on_progress)
    else:
        built = folder.load_part(family, on_progress, group)
    spec = built.model.spec
    options.check_length(spec.max_position)
    ranks = "" if group is None else f" and {group.part.size} ranks"
    logger.info(
        "%s runs on the %s backend%s, %s on %s",
        folder.architecture,
        spec.backend,
        ranks,
        spec.dtype,
        options.device,
    )
    pooler = None
    if folder.pooling is not None:
        pooler = load_pooler(
            folder.pooling, path, options.place, spec.hidden_size, built.encoder, built.token_scores
        )
    return LoadedFolder(
        model=built.model,
        folder=path,
        generation_defaults=defaults,
        generates=built.generates,
        adapters=built.adapters,
        pooler=pooler,
    )


@attrs.frozen(eq=False, kw_only=True)
class _Folder:
    """What the files of a folder say of its model, and how it is to be loaded."""

    path: Path
    options: LoadOptions
    config: Mapping[str, Any]  # config.json, or the part of a language model in it
    architecture: str
    whole_architecture: str | None  # of a model of which the language part alone is loaded
    dtype: torch.dtype
    pooling: PoolingConfig | None

    @classmethod
    def read(cls, path: Path, options: LoadOptions) -> _Folder:
        """Read the configuration of a folder."""
        whole = read_config(path)
        language = language_config(whole)
        config = whole if language is None else language
        convert = options.convert
        if options.classifier_from_token:
            config = {**config, "classifier_from_token": list(options.classifier_from_token)}
            convert = "classify"
        architecture = architecture_of(config, path)
        return cls(
            path=path,
            options=options,
            config=config,
            architecture=architecture,
            whole_architecture=None if language is None else architecture_of(whole, path),
            dtype=checkpoint_dtype(config, path) if options.dtype == AUTO else DTYPES[options.dtype],
            pooling=read_pooling_config(path, config, architecture, convert),
        )

    @property
    def _token_ids(self) -> tuple[int, int] | None:
        """Ids of the tokens that stand for the classes, if the pooler scores by their logits."""
        tokens = None if self.pooling is None else self.pooling.classifier_tokens
        return classifier_token_ids(self.path, tokens) if tokens else None

    @property
    def _generates(self) -> bool:
        return self.pooling is None or not self.pooling.labels

    def _parse(self, family: str) -> DecoderConfig:
        parsed = parse_decoder_config(
            {**self.config, "architectures": [family]}, self.path, max_model_len=self.options.max_model_len
        )
        self.options.check_length(parsed.max_position)  # before gigabytes are read
        return parsed

    def _open(self, parsed: DecoderConfig) -> Checkpoint:
        stored = Checkpoint.open(self.path)
        if self.whole_architecture is not None:
            stored = stored.renamed(language_name)
            logger.info("%s has the language part of %s only", self.path.name, self.whole_architecture)
        return stored.unstacked(parsed.names.expert_stacks)

    def load_part(self, family: str, on_progress: OnProgress | None, group: Group) -> _Built:
        """Load a rank's part of a native decoder."""
        from triolet.model.parallel.load import load_part

        parsed, options = self._parse(family), self.options
        stored = self._open(parsed)
        kv_format = kv_format_of(options.kv_cache_dtype, parsed, stored)
        if self.config.get("quantization_config"):
            raise ConfigError("tensor_parallel_size", "1 for quantized weights", group.part.size)
        model = load_part(
            parsed, stored, self.dtype, options.device, options.max_model_len, on_progress, group, kv_format
        )
        return _Built(model=model, generates=True)

    def load_native(self, family: str, on_progress: OnProgress | None) -> _Built:
        """Load a native decoder."""
        parsed, token_ids = self._parse(family), self._token_ids
        stored = self._open(parsed)
        kv_format = kv_format_of(self.options.kv_cache_dtype, parsed, stored)
        quantized = self._open_quantized(parsed, stored)
        checkpoint: WeightSource = stored if quantized is None else quantized
        dtype = self._computed_dtype(parsed, quantized)
        token_scores = (
            None
            if token_ids is None
            else read_token_scores(parsed, checkpoint, token_ids, self.options.place)
        )
        generates = self._generates
        if family != self.architecture or (self.pooling is not None and _has_no_head(parsed, checkpoint)):
            parsed, generates = _without_head(parsed), False
        load = DecoderLoad(
            parsed=parsed,
            checkpoint=checkpoint,
            dtype=dtype,
            options=self.options,
            files=[
                *self.path.glob("*.safetensors"),
                self.path / "config.json",
                *self.path.glob("*quant*_config.json"),
            ],
            kv_format=kv_format,
            on_progress=on_progress,
        )
        model, adapters = load.build()
        if quantized is not None and quantized.num_quantized:
            logger.info(
                "of the %d quantised weights of %s, %d are kept; the others are converted to %s",
                quantized.num_quantized,
                self.path.name,
                len(quantized.kept),
                dtype,
            )
        return _Built(model=model, generates=generates, adapters=adapters, token_scores=token_scores)

    def _open_quantized(
        self, parsed: DecoderConfig, stored: Checkpoint
    ) -> QuantizedCheckpoint | StackedExperts | None:
        if parsed.names.stacked_experts:
            return open_stacked_experts(stored, self.config, self.path)
        if self.config.get("quantization_config"):
            return open_quantized(stored, self.config, self.path)
        return None

    def _computed_dtype(
        self, parsed: DecoderConfig, quantized: QuantizedCheckpoint | StackedExperts | None
    ) -> torch.dtype:
        """Return bfloat16 where a CPU keeps integers in it that it would convert in the folder's float16."""
        is_free = self.options.dtype == AUTO and self.dtype is torch.float16
        if (
            is_free
            and isinstance(quantized, QuantizedCheckpoint)
            and quantized.has_blocks
            and can_plan(parsed, torch.bfloat16, self.options.place)
        ):
            logger.info("%s is of float16: in bfloat16 its integers are kept as they are", self.path.name)
            return torch.bfloat16
        return self.dtype

    def load_foreign(self, group: Group | None) -> _Built:
        """Load a model that the native decoder does not know: an encoder, or one of transformers' code."""
        self._check_foreign(group)
        options, token_ids = self.options, self._token_ids
        # imported here because it takes seconds, and the native path needs none of it
        if self.pooling is not None and self.architecture.endswith(ENCODER_ENDINGS):
            from triolet.model.backends.encoder import load_encoder

            encoder = load_encoder(
                self.path,
                self.config,
                self.dtype,
                options.device,
                options.trust_remote_code,
                self.pooling.max_seq_length,
            )
            return _Built(model=encoder, generates=False, encoder=encoder)
        from triolet.model.backends.transformers_backend import load_transformers_model

        model = load_transformers_model(
            self.path,
            self.config,
            self.dtype,
            options.device,
            options.trust_remote_code,
            options.max_model_len,
        )
        token_scores = None if token_ids is None else token_scores_of(model, token_ids)
        return _Built(model=model, generates=self._generates, token_scores=token_scores)

    def _check_foreign(self, group: Group | None) -> None:
        options, no_decoder = self.options, f"for {self.architecture}, which has no native decoder"
        if options.kv_cache_dtype != AUTO:
            rule = f"auto for {self.architecture}: a KV cache in float8 needs CUDA and the native decoder"
            raise ConfigError("kv_cache_dtype", rule, options.kv_cache_dtype)
        if group is not None:
            raise ConfigError("tensor_parallel_size", f"1 {no_decoder}", group.part.size)
        if options.quantization is not None:
            raise not_quantised(options.quantization)
        if options.adapter_limits is not None:
            raise ConfigError("enable_lora", f"false {no_decoder}", True)


def _has_no_head(parsed: DecoderConfig, checkpoint: WeightSource) -> bool:
    head = head_name(parsed.names, checkpoint.tensors)
    return not parsed.tied_head and f"{head}.weight" not in checkpoint.tensors


def _without_head(parsed: DecoderConfig) -> DecoderConfig:
    """Return the decoder of a checkpoint without an output head."""
    # The embedding stands in for the head, which nothing is computed with. The pooler reads the scores' head.
    names = attrs.evolve(parsed.names, ignored=(*parsed.names.ignored, "score.weight", *DEEP_HEAD))
    return attrs.evolve(parsed, tied_head=True, head_bias=False, names=names)
