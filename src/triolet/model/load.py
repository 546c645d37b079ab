"""Loading a model: from its name to something that the runner can call.

An architecture that the native decoder knows is loaded natively, without importing transformers; any other
is left to the transformers backend. Which one it was stands in the model's `spec`, and in the log.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from triolet.config.choices import FP8_ACTIVATIONS, INT8_ACTIVATIONS, STORED_METHODS
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.core.request.model_info import GenerationDefaults
from triolet.core.request.pooling_params import EMBED, TOKEN_EMBED
from triolet.errors import ConfigError
from triolet.kernels.cpu.library import kernels
from triolet.model.architectures.decoder_config import (
    DTYPES,
    DecoderConfig,
    architecture_of,
    checkpoint_dtype,
    read_config,
)
from triolet.model.architectures.families import is_bidirectional, native_family, parse_decoder_config
from triolet.model.architectures.kv_format import KV_DTYPES, NO_SCALES, KvFormat, read_kv_scales
from triolet.model.architectures.language_part import language_config, language_name
from triolet.model.architectures.tensor_plans import TensorPlan
from triolet.model.architectures.weight_map import (
    WeightReader,
    WeightSource,
    check_fit,
    head_name,
    plan_tensors,
)
from triolet.model.backends.cpu.plan import adapter_packing, build_cpu_decoder, can_plan, can_quantise
from triolet.model.backends.layers.scaled_linear import with_rounded_inputs
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.backends.torch_loading import build_decoder
from triolet.model.cuda.staging import PinnedStaging
from triolet.model.cuda.step_device import CudaDevice
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.generation_config import read_generation_defaults
from triolet.model.folder.hub import resolve_folder
from triolet.model.folder.pooling_config import ENCODER_ENDINGS, PoolingConfig, read_pooling_config
from triolet.model.gguf.checkpoint import GgufCheckpoint
from triolet.model.gguf.config import (
    describe_types,
    open_checkpoint,
    read_decoder_config,
    read_gguf_defaults,
    read_pooling_method,
    stored_dtype,
)
from triolet.model.gguf.file import GgufFile
from triolet.model.interface import CausalModel
from triolet.model.pooling import (
    DEEP_HEAD,
    Pooler,
    Scores,
    classifier_token_ids,
    load_pooler,
    read_token_scores,
    token_scores_of,
)
from triolet.model.quantized.checkpoint import QuantizedCheckpoint, check_method, open_quantized
from triolet.model.quantized.stacked_experts import StackedExperts, open_stacked_experts

if TYPE_CHECKING:
    from triolet.kernels.cpu.gemm.lora import CppAdapter
    from triolet.model.adapters import AdapterBank, LayerPairs, Weights
    from triolet.model.backends.encoder import EncoderModel
    from triolet.model.parallel.group import Group
    from triolet.model.weights_cache import WeightsCache

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class AdapterLimits:
    """Limits of the LoRA adapters of an engine, under the names of the fields of `EngineConfig`."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str


@attrs.frozen(eq=False, kw_only=True)
class LoadedFolder:
    """A model that is ready to run."""

    model: CausalModel
    folder: Path  # where its files, tokenizer included, lie on this machine; a GGUF file has all in one
    generation_defaults: GenerationDefaults  # how its makers want it to be sampled
    generates: bool = True  # whether it has an output head
    pooler: Pooler | None = None  # what it computes for pooled requests
    adapters: AdapterBank[Any] | None = None  # LoRA adapters of its layers


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    convert: str = "auto",
    classifier_from_token: tuple[str, ...] = (),
    adapter_limits: AdapterLimits | None = None,
    weights_cache: str | None = None,
    calibration: str = "auto",
    kv_cache_dtype: str = "auto",
    on_progress: OnProgress | None = None,
    group: Group | None = None,
) -> LoadedFolder:
    """Load a model folder or a GGUF file, or fetch and load a model of the hub.

    Args:
        model: path of a folder or of a GGUF file, or a hub id.
        dtype: `float32`, `bfloat16` or `float16`; `auto` is that of the checkpoint.
        device: such as `cpu` or `cuda`.
        trust_remote_code: lets a model that brings its own Python code run it; a native architecture never
            does.
        revision: of a hub id.
        max_model_len: longest sequence that will be asked for, tokens. A LongRoPE model is good for its
            original length only, unless this asks for more.
        quantization: `int8` or `int4` rounds the weights while they are read, `int8-activations` the activations; the
            method of quantised files is checked. See `EngineConfig`.
        convert: see `EngineConfig`.
        classifier_from_token: see `EngineConfig`.
        adapter_limits: of LoRA adapters; None for a model without them.
        weights_cache: folder of packed weights; None for none.
        calibration: see `EngineConfig`.
        kv_cache_dtype: see `EngineConfig`.
        on_progress: told how many bytes were fetched and read.
        group: of the processes that compute this model together; None for one.

    Raises:
        ConfigError: `dtype`, `max_model_len`, `quantization`, `convert`, `kv_cache_dtype` or `enable_lora` is not
            possible with this model or device.
        ModelError: the model cannot be loaded; the subclass says why. Nothing half-loaded stays.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError("dtype", f"one of auto, {', '.join(DTYPES)}", dtype)
    if kv_cache_dtype != "auto":
        _check_kv_device(kv_cache_dtype, device)
    if quantization == FP8_ACTIVATIONS:
        _check_float8_products(device)
    folder = resolve_folder(model, revision=revision, on_progress=on_progress)
    if torch.device(device).type == "cpu":
        # Compiled now, if it must be: in a first step it would use up some request's time, and before this line it
        # would be for a model that there may not be.
        kernels()
    if classifier_from_token:
        _check_classifier_tokens(classifier_from_token, convert, folder)
    if quantization in STORED_METHODS:
        described = {} if folder.is_file() else read_config(folder)
        check_method(quantization, language_config(described) or described, folder)
        quantization = None  # the files say what is to be done
    # A GGUF file: configuration, tokenizer and weights in one.
    if folder.is_file():
        if group is not None:
            raise ConfigError("tensor_parallel_size", "1 for a GGUF file", group.part.size)
        return _load_gguf(
            folder,
            dtype,
            device,
            max_model_len,
            quantization,
            convert,
            adapter_limits,
            weights_cache,
            calibration,
            kv_cache_dtype,
            on_progress,
        )
    whole = read_config(folder)
    language = language_config(whole)
    config = whole if language is None else language
    if classifier_from_token:
        config, convert = {**config, "classifier_from_token": list(classifier_from_token)}, "classify"
    architecture = architecture_of(config, folder)
    defaults = read_generation_defaults(folder)
    torch_dtype = checkpoint_dtype(config, folder) if dtype == "auto" else DTYPES[dtype]
    pooling = read_pooling_config(folder, config, architecture, convert)
    generates = pooling is None or not pooling.labels
    if group is not None and pooling is not None:
        raise ConfigError("tensor_parallel_size", "1 for a model that is pooled", group.part.size)
    loaded: CausalModel
    adapters: AdapterBank[Any] | None = None
    encoder: EncoderModel | None = None
    asked_tokens = None if pooling is None else pooling.classifier_tokens
    token_ids = classifier_token_ids(folder, asked_tokens) if asked_tokens else None
    token_scores: Scores | None = None
    family = None if is_bidirectional(config) else native_family(architecture, config)
    if family is not None:
        parsed = parse_decoder_config(
            {**config, "architectures": [family]}, folder, max_model_len=max_model_len
        )
        _check_length(max_model_len, parsed.max_position)  # before gigabytes are read
        stored = Checkpoint.open(folder)
        if language is not None:
            stored = stored.renamed(language_name)
            logger.info("%s has the language part of %s only", folder.name, architecture_of(whole, folder))
        stored = stored.unstacked(parsed.names.expert_stacks)
        checkpoint: WeightSource = stored
        kv_format = _kv_format(kv_cache_dtype, parsed, stored)
        quantized: QuantizedCheckpoint | StackedExperts | None = None
        if group is not None:
            if config.get("quantization_config"):
                raise ConfigError("tensor_parallel_size", "1 for quantized weights", group.part.size)
            from triolet.model.parallel.load import load_part

            loaded = load_part(
                parsed, stored, torch_dtype, device, max_model_len, on_progress, group, kv_format
            )
            logger.info("%s runs on %d ranks, %s on %s", architecture, group.part.size, torch_dtype, device)
            return LoadedFolder(model=loaded, folder=folder, generation_defaults=defaults)
        if parsed.names.stacked_experts:
            checkpoint = quantized = open_stacked_experts(stored, config, folder)
        elif config.get("quantization_config"):
            checkpoint = quantized = open_quantized(stored, config, folder)
            if dtype == "auto" and _is_kept_in_bfloat16(parsed, quantized, torch_dtype, device):
                torch_dtype = torch.bfloat16
                logger.info("%s is of float16: in bfloat16 its integers are kept as they are", folder.name)
        if token_ids is not None:
            token_scores = read_token_scores(parsed, checkpoint, token_ids, torch.device(device))
        if family != architecture or (pooling is not None and _has_no_head(parsed, checkpoint)):
            parsed, generates = _without_head(parsed), False
        loaded, adapters = _build(
            parsed,
            checkpoint,
            torch_dtype,
            device,
            max_model_len,
            quantization,
            on_progress,
            adapter_limits,
            _CacheFolder(
                weights_cache,
                [*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("*quant*_config.json")],
            ),
            calibration,
            kv_format,
        )
        if quantized is not None and quantized.num_quantized:
            logger.info(
                "of the %d quantised weights of %s, %d are kept; the others are converted to %s",
                quantized.num_quantized,
                folder.name,
                len(quantized.kept),
                torch_dtype,
            )
    else:
        if kv_cache_dtype != "auto":
            rule = f"auto for {architecture}: a KV cache in float8 needs CUDA and the native decoder"
            raise ConfigError("kv_cache_dtype", rule, kv_cache_dtype)
        if group is not None:
            rule = f"1 for {architecture}, which has no native decoder"
            raise ConfigError("tensor_parallel_size", rule, group.part.size)
        if quantization is not None:
            raise _not_quantised(quantization)
        if adapter_limits is not None:
            raise ConfigError("enable_lora", f"false for {architecture}, which has no native decoder", True)
        # imported here because it takes seconds, and the native path needs none of it
        if pooling is not None and architecture.endswith(ENCODER_ENDINGS):
            from triolet.model.backends.encoder import load_encoder

            loaded = encoder = load_encoder(
                folder, config, torch_dtype, device, trust_remote_code, pooling.max_seq_length
            )
            generates = False
        else:
            from triolet.model.backends.transformers_backend import load_transformers_model

            loaded = load_transformers_model(
                folder, config, torch_dtype, device, trust_remote_code, max_model_len
            )
            if token_ids is not None:
                token_scores = token_scores_of(loaded, token_ids)
    _check_length(max_model_len, loaded.spec.max_position)
    logger.info(
        "%s runs on the %s backend, %s on %s", architecture, loaded.spec.backend, loaded.spec.dtype, device
    )
    return LoadedFolder(
        model=loaded,
        folder=folder,
        generation_defaults=defaults,
        generates=generates,
        adapters=adapters,
        pooler=None
        if pooling is None
        else load_pooler(
            pooling, folder, torch.device(device), loaded.spec.hidden_size, encoder, token_scores
        ),
    )


def _check_classifier_tokens(tokens: tuple[str, ...], convert: str, folder: Path) -> None:
    if len(tokens) != 2:
        raise ConfigError("classifier_from_token", "two tokens, such as no,yes", tokens)
    if convert == "embed" or folder.is_file():
        where = "for a GGUF file" if folder.is_file() else "where convert is embed"
        raise ConfigError("classifier_from_token", f"left out {where}", tokens)


def _is_kept_in_bfloat16(
    parsed: DecoderConfig, quantized: QuantizedCheckpoint, dtype: torch.dtype, device: str
) -> bool:
    """Tell whether a CPU keeps the integers of a folder in bfloat16 that it would convert in the folder's float16."""
    place = torch.device(device)
    return dtype is torch.float16 and quantized.has_blocks and can_plan(parsed, torch.bfloat16, place)


def _has_no_head(parsed: DecoderConfig, checkpoint: WeightSource) -> bool:
    head = head_name(parsed.names, checkpoint.tensors)
    return not parsed.tied_head and f"{head}.weight" not in checkpoint.tensors


def _without_head(parsed: DecoderConfig) -> DecoderConfig:
    """Return the decoder of a checkpoint without an output head."""
    # The embedding stands in for the head, which nothing is computed with. The pooler reads the scores' head.
    names = attrs.evolve(parsed.names, ignored=(*parsed.names.ignored, "score.weight", *DEEP_HEAD))
    return attrs.evolve(parsed, tied_head=True, head_bias=False, names=names)


def _build(
    parsed: DecoderConfig,
    checkpoint: WeightSource,
    dtype: torch.dtype,
    device: str,
    max_model_len: int | None,
    quantization: str | None,
    on_progress: OnProgress | None,
    adapter_limits: AdapterLimits | None,
    cache_folder: _CacheFolder,
    calibration: str,
    kv_format: KvFormat | None,
) -> tuple[CausalModel, AdapterBank[Any] | None]:
    plans = plan_tensors(parsed, checkpoint.tensors)
    # Names and shapes come first: they take no time, and the weights may take minutes.
    check_fit(parsed, plans, checkpoint)

    def report(done_bytes: int, total_bytes: int) -> None:
        if on_progress is not None:
            on_progress(LoadProgress("weights", done_bytes, total_bytes))

    place = torch.device(device)
    staging = PinnedStaging(CudaDevice(place)) if place.type == "cuda" else None
    reader = WeightReader(checkpoint, plans, dtype, place, report, staging)
    if can_plan(parsed, dtype, reader.device) and (
        quantization is None or can_quantise(parsed, quantization)
    ):
        packed: AdapterBank[CppAdapter] | None = None
        if adapter_limits is not None:
            packed = _adapter_bank(parsed, plans, adapter_limits, reader, adapter_packing(parsed))
            # Read again for an adapter that needs the norms of its rows; what was packed cannot tell them.
            again = WeightReader(checkpoint, plans, dtype, reader.device)
            for layer in {module.layer for module in packed.support.modules}:
                packed.add_layer(layer, functools.partial(_stored_layer, again, layer))
        cache = cache_folder.open(parsed, dtype, quantization)
        decoder = build_cpu_decoder(
            parsed,
            reader,
            max_model_len=max_model_len,
            quantization=quantization,
            adapters=packed,
            cache=cache,
            calibration=calibration,
        )
        if quantization == INT8_ACTIVATIONS and not decoder.has_blocks:
            rule = "one of none, int8, int4 for a model without quantised weights that the kernels keep"
            raise ConfigError("quantization", rule, quantization)
        if cache is not None:
            kept = (
                checkpoint.kept
                if isinstance(checkpoint, GgufCheckpoint | QuantizedCheckpoint)
                else set[str]()
            )
            kept |= cache.kept  # what the file has was not read again
            cache.save(kept)
        return decoder, packed
    if quantization == FP8_ACTIVATIONS:
        if adapter_limits is not None:
            raise ConfigError("enable_lora", f"false with quantization {FP8_ACTIVATIONS}", True)
        plain = build_decoder(parsed, reader, max_model_len=max_model_len, kv_format=kv_format)
        return _with_rounded_inputs(plain), None
    if quantization is not None:
        raise _not_quantised(quantization)
    if adapter_limits is not None and parsed.is_recurrent:
        rule = f"false for {parsed.architecture}, of which most layers are recurrent"
        raise ConfigError("enable_lora", rule, True)
    if adapter_limits is None:
        return build_decoder(parsed, reader, max_model_len=max_model_len, kv_format=kv_format), None
    # imported here because most engines have no adapters
    from triolet.model.adapters import LayerAdapters

    bank = _adapter_bank(parsed, plans, adapter_limits, reader, _unpacked)
    layers = LayerAdapters(bank)
    return (
        build_decoder(parsed, reader, max_model_len=max_model_len, adapters=layers, kv_format=kv_format),
        bank,
    )


def _check_kv_device(kv_cache_dtype: str, device: str) -> None:
    place = torch.device(device)
    if place.type != "cuda":
        rule = "auto on a CPU: a KV cache in float8 needs CUDA, an NVIDIA GPU"
        raise ConfigError("kv_cache_dtype", rule, kv_cache_dtype)
    if KV_DTYPES[kv_cache_dtype] == torch.float8_e4m3fn and torch.cuda.get_device_capability(place) < (8, 9):
        rule = "auto or fp8_e5m2 on a GPU of compute capability below 8.9, which cannot convert E4M3"
        raise ConfigError("kv_cache_dtype", rule, kv_cache_dtype)


def _check_float8_products(device: str) -> None:
    place = torch.device(device)
    if place.type != "cuda" or torch.cuda.get_device_capability(place) < (8, 9):
        rule = f"another than {FP8_ACTIVATIONS}, which needs an NVIDIA GPU of compute capability 8.9 or above"
        raise ConfigError("quantization", rule, FP8_ACTIVATIONS)


def _with_rounded_inputs(decoder: Decoder) -> Decoder:
    if decoder.spec.dtype != torch.bfloat16:  # what torch's product has for rows with scales of their own
        rule = f"another than {FP8_ACTIVATIONS} in {decoder.spec.dtype}: it is for bfloat16"
        raise ConfigError("quantization", rule, FP8_ACTIVATIONS)
    rounded, count = with_rounded_inputs(decoder)
    if not count:
        rule = f"another than {FP8_ACTIVATIONS} without float8 weights that have a scale for a tensor or an output"
        raise ConfigError("quantization", rule, FP8_ACTIVATIONS)
    logger.info("%d linear layers round their inputs to float8", count)
    return rounded


def _kv_format(
    kv_cache_dtype: str, parsed: DecoderConfig, checkpoint: Checkpoint | None = None
) -> KvFormat | None:
    """Return the format of the KV cache on a GPU, with the scales of the checkpoint; None for the model's dtype."""
    if kv_cache_dtype == "auto":
        return None
    if any(layer.reads_cache_of is not None for layer in parsed.layers):
        rule = f"auto for {parsed.architecture}, of which layers share a cache"
        raise ConfigError("kv_cache_dtype", rule, kv_cache_dtype)
    if any(layer.latent is not None or layer.recurrent is not None for layer in parsed.layers):
        kind = "recurrent layers" if parsed.is_recurrent else "latent attention"
        rule = f"auto for {parsed.architecture}, which has {kind}: a KV cache in float8 needs CUDA and keys and values"
        raise ConfigError("kv_cache_dtype", rule, kv_cache_dtype)
    scales = () if checkpoint is None else read_kv_scales(parsed, checkpoint)
    num_scaled = sum(each != NO_SCALES for each in scales)
    logger.info("the KV cache is in %s; %d layers have scales of the checkpoint", kv_cache_dtype, num_scaled)
    return KvFormat(dtype=KV_DTYPES[kv_cache_dtype], scales=scales)


@attrs.frozen
class _CacheFolder:
    """Folder of packed weights, and the files that a model's are made of."""

    folder: str | None
    sources: list[Path]

    def open(
        self, parsed: DecoderConfig, dtype: torch.dtype, quantization: str | None
    ) -> WeightsCache | None:
        if self.folder is None or (loaded := kernels()) is None:
            return None
        # imported here because most engines have no cache
        from triolet.model.weights_cache import weights_cache

        # A model without an output head has its embedding packed in place of it.
        kernels_digest = hashlib.sha256(loaded.path.read_bytes()).hexdigest()  # they decide the packed order
        settings = (loaded.target.name, dtype, quantization, parsed.tied_head)
        return weights_cache(self.folder, self.sources, kernels_digest, *settings)


def _adapter_bank(
    parsed: DecoderConfig,
    plans: dict[str, TensorPlan],
    limits: AdapterLimits,
    reader: WeightReader,
    pack: Callable[[LayerPairs], Weights],
) -> AdapterBank[Weights]:
    from triolet.model.adapters import AdapterBank, adapter_support

    return AdapterBank(
        adapter_support(parsed, plans, limits.max_lora_rank),
        pack,
        max_adapters=limits.max_cpu_loras,
        dtype=DTYPES.get(limits.lora_dtype, reader.dtype),
        device=reader.device,
    )


def _unpacked(pairs: LayerPairs) -> LayerPairs:
    return pairs


def _stored_layer(reader: WeightReader, layer: str) -> tuple[Tensor, Tensor | None]:
    name = layer if f"{layer}.weight" in reader else "embedding"  # a tied head
    return reader[f"{name}.weight"], reader.get(f"{layer}.bias")


def _load_gguf(
    path: Path,
    dtype: str,
    device: str,
    max_model_len: int | None,
    quantization: str | None,
    convert: str,
    adapter_limits: AdapterLimits | None,
    weights_cache: str | None,
    calibration: str,
    kv_cache_dtype: str,
    on_progress: OnProgress | None,
) -> LoadedFolder:
    """Load a GGUF file, which has configuration, weights and tokenizer in one."""
    if convert == "classify":
        raise ConfigError("convert", "auto or embed for a GGUF file", convert)
    file = GgufFile.open(path)
    parsed = read_decoder_config(file, max_model_len=max_model_len)
    _check_length(max_model_len, parsed.max_position)
    defaults = read_gguf_defaults(file)
    torch_dtype = stored_dtype(file) if dtype == "auto" else DTYPES[dtype]
    checkpoint = open_checkpoint(file, parsed, torch_dtype)
    model, adapters = _build(
        parsed,
        checkpoint,
        torch_dtype,
        device,
        max_model_len,
        quantization,
        on_progress,
        adapter_limits,
        _CacheFolder(weights_cache, list({tensor.path for tensor in file.tensors.values()})),
        calibration,
        _kv_format(kv_cache_dtype, parsed),
    )
    logger.info(
        "%s runs on the native backend on %s; its weights, %s",
        parsed.architecture,
        device,
        describe_types(
            file,
            checkpoint.kept,
            f"{torch_dtype} and then {quantization}"
            if quantization in ("int8", "int4")
            else str(torch_dtype),
        ),
    )
    pooler = None
    if convert == "embed":
        pooling = PoolingConfig(tasks=(EMBED, TOKEN_EMBED), method=read_pooling_method(file))
        pooler = load_pooler(pooling, path, torch.device(device), model.spec.hidden_size)
    return LoadedFolder(
        model=model, folder=file.path, generation_defaults=defaults, adapters=adapters, pooler=pooler
    )


def _check_length(max_model_len: int | None, max_position: int) -> None:
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError("max_model_len", f"at most {max_position} tokens for this model", max_model_len)


def _not_quantised(quantization: str) -> ConfigError:
    """Refuse quantization: only the CPU decoder has it."""
    rule = "none for this model: it is for dense ones like Llama, on a CPU, in float32 or bfloat16"
    return ConfigError("quantization", rule, quantization)
