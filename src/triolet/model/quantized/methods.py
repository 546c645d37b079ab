"""Formats of quantised folders by the name that `quantization_config` gives them."""

from __future__ import annotations

from collections.abc import Callable

from triolet.model.folder.json_fields import Fields
from triolet.model.quantized.auto_round import AutoRound
from triolet.model.quantized.bitsandbytes import BitsAndBytes
from triolet.model.quantized.formats import Awq, CompressedTensors, Fp8, Gptq
from triolet.model.quantized.layer import QuantizedFormat
from triolet.model.quantized.modelopt import FbgemmFp8, ModelOpt

FORMATS: dict[str, Callable[[Fields], QuantizedFormat]] = {
    "gptq": Gptq.of,
    "awq": Awq.of,
    "auto-round": AutoRound.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": Fp8.of,
    "fbgemm_fp8": FbgemmFp8.of,
    "modelopt": ModelOpt.of,
    "bitsandbytes": BitsAndBytes.of,
}
"""By `quant_method` of `quantization_config`."""

ALIASES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
"""Other names of the same formats."""
