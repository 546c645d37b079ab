"""Layers of bitsandbytes, and the description of a tensor that it stores beside it."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from triolet.model.folder.json_fields import Fields
from triolet.model.quantized import dequantize
from triolet.model.quantized.layer import FLOATS, Module, Parts, QuantizedLayer

MAX_JSON_BYTES = 65_536  # of the description of one tensor, which has some 200


@attrs.frozen
class BitsAndBytes:
    """bitsandbytes: nf4 and fp4, also with double quantisation, and int8 by row."""

    marks: ClassVar[tuple[str, ...]] = ("weight.absmax", "SCB")
    unused: ClassVar[tuple[str, ...]] = ("weight_format",)  # checked to be that of rows

    @classmethod
    def of(cls, fields: Fields) -> BitsAndBytes:
        """Read `quantization_config`; the tensors say all that is needed."""
        return cls()

    def layer(self, module: Module) -> QuantizedLayer:
        return self._by_row(module) if module.find("SCB") is not None else self._by_block(module)

    def _by_row(self, module: Module) -> QuantizedLayer:
        num_out, num_in = module.need("weight", ("I8",), None, None)
        module.need("SCB", FLOATS, num_out)
        _check_rows(module)
        return module.layer(
            (num_out, num_in),
            ("weight", "SCB"),
            lambda parts: dequantize.bnb_8bit(parts["weight"], parts["SCB"]),
        )

    def _by_block(self, module: Module) -> QuantizedLayer:
        states = [f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
        # Without either, the error names the first of them.
        state_part = next((part for part in states if module.find(part) is not None), states[0])
        # JSON, stored as a tensor of bytes.
        (num_bytes,) = module.need(state_part, ("U8",), None)
        state = _described(module, state_part, num_bytes)
        num_out, num_in = state["shape"]
        # A block may be longer than the weight.
        num_values = num_out * num_in
        block_size = min(state["blocksize"], num_values)
        num_blocks = -(-num_values // block_size)
        # A storage dtype that was chosen for training (`bnb_4bit_quant_storage`) says nothing of the bytes in it.
        module.need("weight", ("U8", "I8", *FLOATS), None, 1)
        stored, num_stored = module.find("weight"), -(-num_values // 2)
        if stored is None or stored.num_bytes != num_stored:
            raise module.wrong("weight", f"of {num_stored} bytes", stored and stored.num_bytes)
        # One value for each of the 16 that four bits can have.
        module.need("weight.quant_map", ("F32",), 16)
        is_nested = module.find("weight.nested_absmax") is not None
        module.need("weight.absmax", ("U8",) if is_nested else ("F32",), num_blocks)
        names = ["weight", "weight.absmax", "weight.quant_map", state_part]
        nested_size = 1
        if is_nested:
            nested_size = min(state["nested_blocksize"], num_blocks)
            module.need("weight.nested_absmax", ("F32",), -(-num_blocks // nested_size))
            module.need("weight.nested_quant_map", ("F32",), 256)
            names += ["weight.nested_absmax", "weight.nested_quant_map"]

        def formula(parts: Parts) -> Tensor:
            absmax = parts["weight.absmax"]
            if is_nested:
                absmax = dequantize.bnb_nested_absmax(
                    absmax,
                    parts["weight.nested_quant_map"],
                    parts["weight.nested_absmax"],
                    state["nested_offset"],
                    nested_size,
                )
            shape, values = (num_out, num_in), parts["weight"].view(torch.uint8)
            return dequantize.bnb_4bit(values, absmax, parts["weight.quant_map"], shape, block_size)

        return module.layer((num_out, num_in), tuple(names), formula)


def _described(module: Module, part: str, num_bytes: int) -> dict[str, Any]:
    """Return bitsandbytes' description of a tensor, checked."""
    # Checked before it is read.
    if num_bytes > MAX_JSON_BYTES:
        raise module.wrong(part, f"at most {MAX_JSON_BYTES} bytes", num_bytes)
    raw = bytes(module.checkpoint.read_raw(module.full(part)).tolist())
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise module.wrong(part, "JSON", raw[:40]) from error
    if not isinstance(state, dict):
        raise module.wrong(part, "a JSON object", raw[:40])
    positive = ("blocksize", *(("nested_blocksize",) if "nested_blocksize" in state else ()))
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    is_good = (
        isinstance(shape, list)
        and len(shape) == 2
        and all(_is_positive(size) for size in (*shape, *(state.get(name) for name in positive)))
        and isinstance(offset, (int, float))
        and abs(offset) <= torch.finfo(torch.float32).max
    )
    if not is_good:
        rule = "an object with shape [out, in], positive block sizes and a finite offset"
        raise module.wrong(part, rule, raw[:80])
    return {"nested_offset": 0.0, "nested_blocksize": 256, **state}


def _check_rows(module: Module) -> None:
    """Check that bitsandbytes' int8 values lie row after row, and not in tiles for one kind of GPU.

    A model that has computed something before it was saved may have them in tiles, in the same shape.
    """
    if module.find("weight_format") is None:
        return
    (kind,) = module.checkpoint.read_raw(module.full("weight_format")).flatten().tolist() or (0,)
    if kind != 0:
        raise module.wrong("weight_format", "0, for rows", kind)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
