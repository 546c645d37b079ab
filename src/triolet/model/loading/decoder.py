"""Building of a native decoder from its checkpoint: of the CPU's kernels where they have it, of torch otherwise."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from triolet.config.choices import FP8_ACTIVATIONS, INT8_ACTIVATIONS
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.errors import ConfigError
from triolet.kernels.cpu.library import kernels
from triolet.model.architectures.decoder_config import DTYPES, DecoderConfig
from triolet.model.architectures.kv_format import KV_DTYPES, NO_SCALES, KvFormat, read_kv_scales
from triolet.model.architectures.tensor_plans import TensorPlan
from triolet.model.architectures.weight_map import WeightReader, WeightSource, check_fit, plan_tensors
from triolet.model.backends.cpu.plan import adapter_packing, build_cpu_decoder, can_plan, can_quantise
from triolet.model.backends.layers.scaled_linear import with_rounded_inputs
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.backends.torch_loading import build_decoder
from triolet.model.cuda.staging import PinnedStaging
from triolet.model.cuda.step_device import CudaDevice
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.gguf.checkpoint import GgufCheckpoint
from triolet.model.interface import CausalModel
from triolet.model.loading.options import AUTO, LoadOptions, not_quantised
from triolet.model.quantized.checkpoint import QuantizedCheckpoint

if TYPE_CHECKING:
    from triolet.kernels.cpu.gemm.lora import CppAdapter
    from triolet.model.adapters import AdapterBank, LayerPairs, Weights
    from triolet.model.weights_cache import WeightsCache

logger = logging.getLogger(__name__)


@attrs.frozen(eq=False, kw_only=True)
class DecoderLoad:
    """Load of a native decoder.

    Args:
        parsed: what the decoder consists of.
        checkpoint: has its weights.
        dtype: that it computes in.
        options: settings of the load.
        files: that the weights are made of; with other contents, what was packed from them is packed again.
        kv_format: of the KV cache on a GPU; None for the model's dtype.
        on_progress: told how many bytes were read.
    """

    parsed: DecoderConfig
    checkpoint: WeightSource
    dtype: torch.dtype
    options: LoadOptions
    files: Sequence[Path]
    kv_format: KvFormat | None
    on_progress: OnProgress | None

    def build(self) -> tuple[CausalModel, AdapterBank[Any] | None]:
        """Read the weights; return the decoder and the LoRA adapters of its layers, if it has any.

        Raises:
            ConfigError: `quantization` or `enable_lora` is not possible with this model or device.
            WeightsMismatch: the files do not fit the model.
        """
        plans = plan_tensors(self.parsed, self.checkpoint.tensors)
        # Names and shapes come first: they take no time, and the weights may take minutes.
        check_fit(self.parsed, plans, self.checkpoint)
        place, quantization = self.options.place, self.options.quantization
        staging = PinnedStaging(CudaDevice(place)) if place.type == "cuda" else None
        reader = WeightReader(self.checkpoint, plans, self.dtype, place, self._report, staging)
        if can_plan(self.parsed, self.dtype, place) and (
            quantization is None or can_quantise(self.parsed, quantization)
        ):
            return self._build_for_cpu(plans, reader)
        return self._build_in_torch(plans, reader)

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        if self.on_progress is not None:
            self.on_progress(LoadProgress("weights", done_bytes, total_bytes))

    def _build_for_cpu(
        self, plans: dict[str, TensorPlan], reader: WeightReader
    ) -> tuple[CausalModel, AdapterBank[CppAdapter] | None]:
        adapters: AdapterBank[CppAdapter] | None = None
        if self.options.adapter_limits is not None:
            adapters = self._adapter_bank(plans, adapter_packing(self.parsed))
            # Read again for an adapter that needs the norms of its rows; what was packed cannot tell them.
            again = WeightReader(self.checkpoint, plans, self.dtype, reader.device)
            for layer in {module.layer for module in adapters.support.modules}:
                adapters.add_layer(layer, functools.partial(_stored_layer, again, layer))
        cache = self._open_cache()
        quantization = self.options.quantization
        decoder = build_cpu_decoder(
            self.parsed,
            reader,
            max_model_len=self.options.max_model_len,
            quantization=quantization,
            adapters=adapters,
            cache=cache,
            calibration=self.options.calibration,
        )
        if quantization == INT8_ACTIVATIONS and not decoder.has_blocks:
            rule = "one of none, int8, int4 for a model without quantised weights that the kernels keep"
            raise ConfigError("quantization", rule, quantization)
        if cache is not None:
            source = self.checkpoint
            kept = source.kept if isinstance(source, GgufCheckpoint | QuantizedCheckpoint) else set[str]()
            kept |= cache.kept  # what the file has was not read again
            cache.save(kept)
        return decoder, adapters

    def _build_in_torch(
        self, plans: dict[str, TensorPlan], reader: WeightReader
    ) -> tuple[CausalModel, AdapterBank[LayerPairs] | None]:
        options, parsed = self.options, self.parsed
        has_adapters = options.adapter_limits is not None
        build = functools.partial(
            build_decoder, parsed, reader, max_model_len=options.max_model_len, kv_format=self.kv_format
        )
        if options.quantization == FP8_ACTIVATIONS:
            if has_adapters:
                raise ConfigError("enable_lora", f"false with quantization {FP8_ACTIVATIONS}", True)
            return _with_rounded_inputs(build()), None
        if options.quantization is not None:
            raise not_quantised(options.quantization)
        if not has_adapters:
            return build(), None
        if parsed.is_recurrent:
            rule = f"false for {parsed.architecture}, of which most layers are recurrent"
            raise ConfigError("enable_lora", rule, True)
        # imported here because most engines have no adapters
        from triolet.model.adapters import LayerAdapters

        adapters = self._adapter_bank(plans, _unpacked)
        return build(adapters=LayerAdapters(adapters)), adapters

    def _adapter_bank(
        self, plans: dict[str, TensorPlan], pack: Callable[[LayerPairs], Weights]
    ) -> AdapterBank[Weights]:
        from triolet.model.adapters import AdapterBank, adapter_support

        limits = self.options.adapter_limits
        assert limits is not None, "it is asked for with adapters only"
        return AdapterBank(
            adapter_support(self.parsed, plans, limits.max_lora_rank),
            pack,
            max_adapters=limits.max_cpu_loras,
            dtype=DTYPES.get(limits.lora_dtype, self.dtype),
            device=self.options.place,
        )

    def _open_cache(self) -> WeightsCache | None:
        folder = self.options.weights_cache
        if folder is None or (loaded := kernels()) is None:
            return None
        # imported here because most engines have no cache
        from triolet.model.weights_cache import weights_cache

        # A model without an output head has its embedding packed in place of it.
        kernels_digest = hashlib.sha256(loaded.path.read_bytes()).hexdigest()  # they decide the packed order
        settings = (loaded.target.name, self.dtype, self.options.quantization, self.parsed.tied_head)
        return weights_cache(folder, self.files, kernels_digest, *settings)


def _unpacked(pairs: LayerPairs) -> LayerPairs:
    return pairs


def _stored_layer(reader: WeightReader, layer: str) -> tuple[Tensor, Tensor | None]:
    name = layer if f"{layer}.weight" in reader else "embedding"  # a tied head
    return reader[f"{name}.weight"], reader.get(f"{layer}.bias")


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


def kv_format_of(
    kv_cache_dtype: str, parsed: DecoderConfig, checkpoint: Checkpoint | None = None
) -> KvFormat | None:
    """Return the format of the KV cache on a GPU; None for the model's dtype.

    Args:
        kv_cache_dtype: see `LoadOptions`.
        parsed: the decoder.
        checkpoint: may have scales for keys and values.

    Raises:
        ConfigError: the decoder's cache cannot be in float8.
    """
    if kv_cache_dtype == AUTO:
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
