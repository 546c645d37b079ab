"""Layers of 4-bit floats, two in a byte: NVFP4 and MXFP4 of compressed-tensors, and NVFP4 of ModelOpt.

NVFP4 has a float8 scale for each 16 inputs, and one of the whole weight; MXFP4 a power of two for each 32.

Source: compressed-tensors, `NVFP4PackedCompressor` and `MXFP4PackedCompressor`; ModelOpt, `NVFP4QTensor`.
"""

from __future__ import annotations

from torch import Tensor

from triolet.model.quantized import dequantize
from triolet.model.quantized.layer import Module, Parts, QuantizedLayer

_GROUPS = {"F8_E4M3": 16, "U8": 32}
"""Inputs that share a scale, by its dtype: NVFP4, MXFP4."""


def float4_layer(
    module: Module,
    *,
    packed: str = "weight_packed",
    tensor_scale: str = "weight_global_scale",
    divides: bool = True,
) -> QuantizedLayer:
    """Return a layer of 4-bit floats.

    Args:
        module: has the packed values, [out, in / 2], and `weight_scale`.
        packed: name of the values.
        tensor_scale: name of NVFP4's scale of the whole weight.
        divides: whether scales of groups are divided by that, and not multiplied.
    Raises:
        UnsupportedModel: a tensor is missing or does not fit the others.
    """
    num_out, num_bytes = module.need(packed, ("U8",), None, None)
    num_in = 2 * num_bytes
    _, num_groups = module.need("weight_scale", tuple(_GROUPS), num_out, None)
    scale = module.find("weight_scale")
    assert scale is not None
    size = _GROUPS[scale.dtype]
    if num_in != num_groups * size or num_in < 1:
        raise module.wrong(
            "weight_scale", f"of one column for each {size} of the {num_in} inputs", num_groups
        )
    if scale.dtype == "U8":
        return module.layer(
            (num_out, num_in),
            (packed, "weight_scale"),
            lambda parts: dequantize.mxfp4(
                parts[packed].view(num_out, num_groups, dequantize.MXFP4_BLOCK_BYTES), parts["weight_scale"]
            ),
        )
    whole = module.find(tensor_scale)
    if whole is None or whole.shape not in ((), (1,)):
        module.need(tensor_scale, ("F32",), 1)
    elif whole.dtype != "F32":
        raise module.wrong(tensor_scale, "of dtype F32", whole.dtype)

    def formula(parts: Parts) -> Tensor:
        scales, of_tensor = parts["weight_scale"].float(), parts[tensor_scale].reshape(1)
        return dequantize.float4(parts[packed], scales / of_tensor if divides else scales * of_tensor)

    return module.layer((num_out, num_in), (packed, "weight_scale", tensor_scale), formula)
