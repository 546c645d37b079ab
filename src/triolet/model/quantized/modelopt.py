"""Layers of NVIDIA's ModelOpt, in float8 and NVFP4, and of FBGEMM's float8."""

from __future__ import annotations

from typing import ClassVar

import attrs

from triolet.model.folder.json_fields import Fields
from triolet.model.quantized.float4 import float4_layer
from triolet.model.quantized.formats import scaled_layer
from triolet.model.quantized.layer import FLOATS, Module, QuantizedLayer

_CHANGES_INPUTS = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
"""Tensors by which activations are changed before or after the product with the weight."""


@attrs.frozen
class ModelOpt:
    """ModelOpt's folders: float8 with a scale per tensor or row, int8 by row, and NVFP4.

    Activations are not quantised, whatever the folder says of them.

    Source: ModelOpt, `to_quantized_weight` of its export, and `NVFP4QTensor.dequantize`.
    """

    marks: ClassVar[tuple[str, ...]] = ("weight_scale",)
    unused: ClassVar[tuple[str, ...]] = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")

    @classmethod
    def of(cls, fields: Fields) -> ModelOpt:
        """Read `quantization_config`; the tensors say all that is needed."""
        return cls()

    def layer(self, module: Module) -> QuantizedLayer | None:
        weight = module.find("weight")
        if weight is None:
            return None
        for part in _CHANGES_INPUTS:
            if (found := module.find(part)) is not None:
                raise module.wrong(part, "absent: weights alone are supported", list(found.shape))
        if weight.dtype == "U8":
            # Integers of four bits are packed in bytes, too; their scales are no float8.
            module.need("weight_scale", ("F8_E4M3",), None, None)
            return float4_layer(module, packed="weight", tensor_scale="weight_scale_2", divides=False)
        return scaled_layer(module, "weight_scale", ())


@attrs.frozen
class FbgemmFp8:
    """FBGEMM's float8: a scale for each row. Activations are not quantised.

    Source: transformers, `FbgemmFp8Linear`.
    """

    marks: ClassVar[tuple[str, ...]] = ("weight_scale",)
    unused: ClassVar[tuple[str, ...]] = ("input_scale_ub",)

    @classmethod
    def of(cls, fields: Fields) -> FbgemmFp8:
        """Read `quantization_config`; the tensors say all that is needed."""
        return cls()

    def layer(self, module: Module) -> QuantizedLayer:
        num_out, _ = module.need("weight", ("F8_E4M3",), None, None)
        module.need("weight_scale", FLOATS, num_out, 1)
        return scaled_layer(module, "weight_scale", ())
