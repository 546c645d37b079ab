"""Writers of quantised model folders: each packs random integers one by one and keeps the weight that they stand for.

Nothing of the program is used here: bits are placed in Python integers, and weights are computed by numpy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, NDArray[np.float32]]
"""Tensors of one layer by the name after the module's, and its weight [out, in]."""

Writer = Callable[[np.random.Generator, int, int], Written]


def words_of(values: Sequence[int], bits: int) -> list[int]:
    """One row of unsigned integers as a stream of bits, lowest first, in 32-bit words (signed, as they are stored)."""
    stream = sum(int(value) << (index * bits) for index, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    raw = stream.to_bytes(4 * count, "little")
    return [int.from_bytes(raw[4 * word : 4 * word + 4], "little", signed=True) for word in range(count)]


def packed(rows: NDArray[Any], bits: int) -> torch.Tensor:
    return torch.tensor([words_of(row, bits) for row in rows.tolist()], dtype=torch.int32)


def _scales(dice: np.random.Generator, rows: int, columns: int) -> NDArray[np.float16]:
    return (dice.uniform(0.5, 1.5, (rows, columns)) * 0.004).astype(np.float16)


def gptq(
    bits: int,
    group_size: int,
    *,
    act_order: bool = False,
    version: int = 1,
    zeros_below: int | None = None,
) -> Writer:
    """Layers of GPTQ, with zeros up to `zeros_below` - 1; None for all that there are."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        size = num_in if group_size == -1 else group_size
        num_groups = num_in // size
        q = dice.integers(0, 2**bits, (num_out, num_in))
        # Version 1 stores zero - 1: a zero of 0 does not exist in it.
        zeros = dice.integers(2 - version, zeros_below or 2**bits, (num_out, num_groups))
        scales = _scales(dice, num_groups, num_out)
        groups = np.arange(num_in) // size
        if act_order:
            groups = dice.permutation(groups)
        weight = (q - zeros[:, groups]).astype(np.float32) * scales.T[:, groups].astype(np.float32)
        stored = (zeros - 1 if version == 1 else zeros).T
        tensors = {
            "qweight": packed(q, bits).T.contiguous(),
            "qzeros": packed(stored, bits),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.tensor(groups, dtype=torch.int32),
        }
        return tensors, weight

    return write


def awq(group_size: int) -> Writer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(values: NDArray[Any]) -> torch.Tensor:
        rows, columns = values.shape
        shuffled = values.reshape(rows, columns // 8, 8)[:, :, list(order)].reshape(rows, columns)
        return packed(shuffled, 4)

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        size = num_in if group_size == -1 else group_size
        num_groups = num_in // size
        q, zeros = dice.integers(0, 16, (num_in, num_out)), dice.integers(0, 16, (num_groups, num_out))
        scales = _scales(dice, num_groups, num_out)
        groups = np.arange(num_in) // size
        weight = (q - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)
        tensors = {"qweight": pack(q), "qzeros": pack(zeros), "scales": torch.from_numpy(scales)}
        return tensors, np.ascontiguousarray(weight.T)

    return write


def packed_quantized(bits: int, group_size: int | None, *, symmetric: bool = True) -> Writer:
    """Layers of compressed-tensors' W4A16 and W8A16."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        size = group_size or num_in
        num_groups, half = num_in // size, 2 ** (bits - 1)
        q = dice.integers(-half, half, (num_out, num_in))
        scales = _scales(dice, num_out, num_groups)
        zeros = np.zeros((num_out, num_groups), int)
        if not symmetric:
            zeros = dice.integers(-half, half, (num_out, num_groups))
        groups = np.arange(num_in) // size
        weight = (q - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
        tensors = {
            "weight_packed": packed(q + half, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([num_out, num_in]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed((zeros + half).T, bits).T.contiguous()
        return tensors, weight

    return write


def int_quantized(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
    """Layers of compressed-tensors' W8A8."""
    q = dice.integers(-128, 128, (num_out, num_in)).astype(np.int8)
    scales = _scales(dice, num_out, 1).astype(np.float32)
    weight = q.astype(np.float32) * scales
    return {"weight": torch.from_numpy(q), "weight_scale": torch.from_numpy(scales)}, weight


def _float8(dice: np.random.Generator, num_out: int, num_in: int) -> torch.Tensor:
    return torch.from_numpy(dice.normal(0, 40, (num_out, num_in))).clamp(-448, 448).to(torch.float8_e4m3fn)


def float_quantized(rows: str) -> Writer:
    """Layers of compressed-tensors' FP8, with a scale per tensor, row, group of 32 inputs or block of 32 x 32."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        q = _float8(dice, num_out, num_in)
        sizes = {"tensor": (1, 1), "row": (num_out, 1), "group": (num_out, num_in // 32)}
        shape = sizes.get(rows, (num_out // 32, num_in // 32))
        scales = _scales(dice, *shape)
        scale = torch.from_numpy(scales)
        tensors = {"weight": q, "weight_scale": scale.flatten() if rows == "tensor" else scale}
        spread = scales.repeat(num_out // shape[0], axis=0).repeat(num_in // shape[1], axis=1)
        return tensors, q.to(torch.float32).numpy() * spread.astype(np.float32)

    return write


def fp8_tensor(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
    """Layers of transformers' FP8 without blocks: one scale, and one of a static scheme for activations."""
    tensors, weight = float_quantized("tensor")(dice, num_out, num_in)
    scale = tensors.pop("weight_scale").float().reshape(())
    return {**tensors, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.7)}, weight


def with_input_scale(writer: Writer) -> Writer:
    """The same layers with the scale of a static scheme, which is for activations."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        tensors, weight = writer(dice, num_out, num_in)
        return {**tensors, "input_scale": torch.tensor([0.7])}, weight

    return write


def block_fp8(block: int) -> Writer:
    """Layers of Qwen3-FP8 and DeepSeek; the last blocks may be cut off."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        q = _float8(dice, num_out, num_in)
        scales = _scales(dice, -(-num_out // block), -(-num_in // block)).astype(np.float32)
        spread = np.kron(scales, np.ones((block, block), np.float32))[:num_out, :num_in]
        tensors = {"weight": q, "weight_scale_inv": torch.from_numpy(scales)}
        return tensors, q.to(torch.float32).numpy() * spread

    return write


def auto_round(bits: int, group_size: int) -> Writer:
    """Layers of AutoRound's own packing: GPTQ's words, zeros as they are, and no index of groups."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        tensors, weight = gptq(bits, group_size, version=2)(dice, num_out, num_in)
        del tensors["g_idx"]
        return tensors, weight

    return write


def _float4(dice: np.random.Generator, num_out: int, num_in: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """Return 4-bit floats, two in a byte, and their values."""
    q = dice.integers(0, 16, (num_out, num_in))
    return torch.from_numpy((q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8)), _E2M1[q]


def nvfp4(*, by_modelopt: bool = False) -> Writer:
    """Layers of NVFP4: a float8 scale for each 16 inputs, and one of all, by which compressed-tensors divides."""

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        q, values = _float4(dice, num_out, num_in)
        scale = torch.from_numpy(dice.uniform(100, 400, (num_out, num_in // 16))).to(torch.float8_e4m3fn)
        whole = np.float32(0.00007 if by_modelopt else 14_000.0)
        of_groups = scale.float().numpy()
        of_groups = of_groups * whole if by_modelopt else of_groups / whole
        tensors: Tensors = {"weight_scale": scale, "input_scale": torch.tensor(0.7)}
        if by_modelopt:
            tensors |= {"weight": q, "weight_scale_2": torch.tensor(whole)}
        else:
            tensors |= {"weight_packed": q, "weight_global_scale": torch.tensor([whole])}
        return tensors, values * np.repeat(of_groups, 16, axis=1)

    return write


def mxfp4(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
    """Layers of MXFP4 as compressed-tensors has it: a power of two for each 32 inputs."""
    q, values = _float4(dice, num_out, num_in)
    exponents = dice.integers(117, 121, (num_out, num_in // 32))
    scale = np.exp2(exponents.astype(np.float32) - 127)
    tensors = {"weight_packed": q, "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    return tensors, values * np.repeat(scale, 32, axis=1)


def bnb_4bit(kind: str, *, nested: bool) -> Writer:
    block_size, nested_size, offset = 64, 256, 0.0037

    def write(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
        num_values = num_out * num_in
        codes = np.sort(dice.uniform(-1, 1, 16)).astype(np.float32)
        q = dice.integers(0, 16, num_values)
        num_blocks = -(-num_values // block_size)
        absmax = dice.uniform(0.01, 0.03, num_blocks).astype(np.float32)
        state: dict[str, Any] = {"blocksize": block_size, "shape": [num_out, num_in], "dtype": "float32"}
        tensors: Tensors = {}
        if nested:
            nested_codes = np.sort(dice.uniform(-1, 1, 256)).astype(np.float32)
            stored = dice.integers(0, 256, num_blocks)
            nested_absmax = dice.uniform(0.001, 0.003, -(-num_blocks // nested_size)).astype(np.float32)
            spread = np.repeat(nested_absmax, nested_size)[:num_blocks]
            absmax = nested_codes[stored] * spread + np.float32(offset)
            state |= {"nested_blocksize": nested_size, "nested_offset": offset, "nested_dtype": "float32"}
            tensors = {
                "weight.absmax": torch.from_numpy(stored.astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(nested_absmax),
                "weight.nested_quant_map": torch.from_numpy(nested_codes),
            }
        else:
            tensors = {"weight.absmax": torch.from_numpy(absmax)}
        high, low = q[0::2], q[1::2]
        tensors |= {
            "weight": torch.from_numpy((high * 16 + low).astype(np.uint8)).reshape(-1, 1),
            "weight.quant_map": torch.from_numpy(codes),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        weight = codes[q] * np.repeat(absmax, block_size)[:num_values]
        return tensors, weight.reshape(num_out, num_in)

    return write


def bnb_8bit(dice: np.random.Generator, num_out: int, num_in: int) -> Written:
    q = dice.integers(-127, 128, (num_out, num_in)).astype(np.int8)
    row_absmax = dice.uniform(0.2, 0.6, num_out).astype(np.float32)
    weight = q.astype(np.float32) * row_absmax[:, None] / np.float32(127)
    tensors = {
        "weight": torch.from_numpy(q),
        "SCB": torch.from_numpy(row_absmax),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, weight


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def write_mxfp4_folders(plain: Path, quantized: Path, *, seed: int = 0) -> None:
    """Replace the experts of a gpt-oss folder by random ones: in MXFP4 in `quantized`, and plain in `plain`."""
    dice = np.random.default_rng(seed)
    shutil.copytree(plain, quantized)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_in, num_out = tensor.shape
        q = dice.integers(0, 16, (num_experts, num_out, num_in))
        exponents = dice.integers(122, 126, (num_experts, num_out, num_in // 32))
        scale = np.exp2(exponents.astype(np.float32) - 127)
        weight = _E2M1[q] * np.repeat(scale, 32, axis=2)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(weight.transpose(0, 2, 1)))
        packed_bytes = (q[..., 0::2] | q[..., 1::2] << 4).astype(np.uint8)
        stored[f"{name}_blocks"] = torch.from_numpy(packed_bytes.reshape(num_experts, num_out, -1, 16))
        stored[f"{name}_scales"] = torch.from_numpy(exponents.astype(np.uint8))
        del stored[name]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = MXFP4
    (quantized / "config.json").write_text(json.dumps(config))


def write_folders(
    plain: Path, quantized: Path, writer: Writer, section: dict[str, Any], *, seed: int = 0
) -> None:
    """Replace every linear layer of `plain` by random ones, in the format in `quantized`, and plain in `plain`."""
    dice = np.random.default_rng(seed)
    shutil.copytree(plain, quantized)
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if "layers." in name and name.endswith("proj.weight"):
            parts, weight = writer(dice, *tensor.shape)
            tensors[name] = torch.from_numpy(np.ascontiguousarray(weight))
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = section
    (quantized / "config.json").write_text(json.dumps(config))
