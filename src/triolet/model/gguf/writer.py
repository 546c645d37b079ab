"""Writer of GGUF files from model folders.

The folder's plan and the file's plan list the same tensors in the same order, so that there is no table of names to
keep. What llama.cpp's converter does to the weights is done here, too: the rows of Llama's query and key projections
are permuted, and Gemma's norms get 1 added.

Metadata is written from the configuration, read back by the program's own reader, and compared with it before any
weight is written: a feature that a file cannot express is an error that names it, and never another model.

Rounding to blocks is gguf-py's, the library of the format, which is bit for bit llama.cpp's reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triolet.core.request.model_info import GenerationDefaults
from triolet.errors import UnsupportedModel
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.rope import RopeContext, build_rope
from triolet.model.architectures.weight_map import WeightSource, plan_tensors
from triolet.model.folder.json_fields import Fields
from triolet.model.gguf.config import WrittenArchitecture, read_decoder_config, written_architecture
from triolet.model.gguf.file import GgufFile
from triolet.model.gguf.library import gguf_library
from triolet.model.gguf.write_tokenizer import WrittenTokenizer

if TYPE_CHECKING:
    import gguf

KINDS = {
    "F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q5_1": "MOSTLY_Q5_1",
    "Q5_0": "MOSTLY_Q5_0", "Q4_1": "MOSTLY_Q4_1", "Q4_0": "MOSTLY_Q4_0",
}  # fmt: skip
"""Types that matrices can be written in, with the format's name for a file of them."""

_COARSE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
_CHUNK_VALUES = 2**22
"""Values rounded at a time: some 100 MB of intermediate arrays."""


@attrs.frozen(eq=False, kw_only=True)
class GgufModel:
    """Model that is to be written."""

    name: str
    config: DecoderConfig
    fields: Fields  # of its config.json: what the metadata needs beyond `config`
    source: WeightSource
    tokenizer: WrittenTokenizer | None
    defaults: GenerationDefaults


@attrs.frozen(eq=False, kw_only=True)
class _Target:
    """One tensor of the file."""

    name: str
    sources: tuple[str, ...]  # tensors of the folder; several are the experts of a stack
    shape: tuple[int, ...]
    kind: str
    num_permuted_heads: int = 0
    offset: float = 0.0
    values: Tensor | None = None  # one that no tensor of the folder has


def write_gguf(model: GgufModel, path: Path, kind: str) -> dict[str, int]:
    """Write a model as one GGUF file.

    Args:
        model: what is written.
        path: the file; it must not exist.
        kind: type of the matrices, one of `KINDS`. The head, and the embedding if it is the head, is at least Q8_0; a
            matrix whose rows do not divide into blocks is F16; vectors and routers are F32.

    Returns:
        Number of tensors of each type.

    Raises:
        UnsupportedModel: a GGUF file cannot express the architecture or one of its features; or a weight is not finite.
    """
    library = gguf_library()
    form = written_architecture(model.config.architecture)
    if form is None:
        raise UnsupportedModel(f"{model.config.architecture} cannot be written as a GGUF file")
    targets = list(_targets(library, model, form, kind))
    _check_expressible(library, model, form, targets, path)
    writer = _writer(library, model, form, kind)
    sizes = [_num_bytes(library, target) for target in targets]
    for target, num_bytes in zip(targets, sizes, strict=True):
        type_ = library.GGMLQuantizationType[target.kind]
        writer.add_tensor_info(target.name, target.shape, np.dtype(np.float32), num_bytes, raw_dtype=type_)
    partial = path.with_name(f"{path.name}.part")
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in targets:
            writer.write_tensor_data(_data(library, target, model.source))
        writer.close()
        # Only a complete file gets the name that was asked for.
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    kinds = [target.kind for target in targets]
    return {name: kinds.count(name) for name in dict.fromkeys(kinds)}


# ---------------------------------------------------------------------------------------------- tensors


def _targets(
    library: ModuleType, model: GgufModel, form: WrittenArchitecture, kind: str
) -> Iterator[_Target]:
    config = model.config
    theirs = plan_tensors(config, model.source.tensors)
    # The plan of the file has a head of its own exactly if the folder's has.
    available = {"token_embd.weight", *(["output.weight"] if "head" in _stems(theirs) else [])}
    ours = plan_tensors(attrs.evolve(config, names=form.names), available)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if form.permutes_heads else {}
    stacks: dict[str, list[str]] = {}
    for key, plan in theirs.items():
        for (source, shape), (name, _) in zip(plan.sources, ours[key].sources, strict=True):
            stem, _, part = name.rpartition(".")
            expert = stem.rpartition(".")[2]
            if "_exps." in name and expert.isdecimal():
                stacks.setdefault(f"{stem.removesuffix('.' + expert)}.{part}", []).append(source)
                continue
            is_norm = stem.endswith("_norm") and part == "weight"
            yield _Target(
                name=name,
                sources=(source,),
                shape=shape,
                kind=_kind_of(library, name, shape, kind, is_tied="head" not in _stems(theirs)),
                num_permuted_heads=heads.get(stem.rpartition(".")[2], 0),
                offset=form.norm_offset if is_norm else 0.0,
            )
    for name, sources in stacks.items():
        shape = (len(sources), *model.source.tensors[sources[0]].shape)
        yield _Target(
            name=name,
            sources=tuple(sources),
            shape=shape,
            kind=_kind_of(library, name, shape, kind, is_tied=False),
        )
    for name, values in _rotary_factors(model).items():
        yield _Target(name=name, sources=(), shape=tuple(values.shape), kind="F32", values=values)


def _stems(plans: Mapping[str, object]) -> set[str]:
    return {name.partition(".")[0] for name in plans}


def _kind_of(library: ModuleType, name: str, shape: tuple[int, ...], kind: str, *, is_tied: bool) -> str:
    if len(shape) == 1 or name.endswith(".bias") or ".ffn_gate_inp." in name:
        return "F32"
    # Errors of the head change every token's distribution: 4 or 5 bits cost more there than they save.
    if kind in _COARSE and (name == "output.weight" or (is_tied and name == "token_embd.weight")):
        kind = "Q8_0"
    block_values, _ = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[kind]]
    return kind if shape[-1] % block_values == 0 else "F16"


def _num_bytes(library: ModuleType, target: _Target) -> int:
    values, num_bytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[target.kind]]
    return math.prod(target.shape) // int(values) * int(num_bytes)


def _data(library: ModuleType, target: _Target, source: WeightSource) -> NDArray[Any]:
    if target.values is not None:
        return target.values.numpy()
    return np.concatenate(
        [_rounded(library, target, name, source.read(name)) for name in target.sources], axis=0
    )


def _rounded(library: ModuleType, target: _Target, name: str, weight: Tensor) -> NDArray[Any]:
    """Return the blocks of one matrix, as rows of bytes."""
    if heads := target.num_permuted_heads:
        halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
        weight = halves.transpose(1, 2).reshape(weight.shape)
    kind = library.GGMLQuantizationType[target.kind]
    pieces = []
    for rows in weight.split(max(1, _CHUNK_VALUES // max(1, math.prod(weight.shape[1:])))):
        values = rows.float() + target.offset if target.offset else rows.float()
        if not values.isfinite().all():
            raise UnsupportedModel(f"tensor {name!r} must be finite to be rounded; it has infinities or NaNs")
        pieces.append(library.quantize(values.numpy(), kind))
    return np.concatenate(pieces, axis=0)


# --------------------------------------------------------------------------------------------- metadata


def _writer(library: ModuleType, model: GgufModel, form: WrittenArchitecture, kind: str) -> gguf.GGUFWriter:
    writer: gguf.GGUFWriter = library.GGUFWriter(None, form.name)
    writer.add_name(model.name)
    writer.add_file_type(library.LlamaFileType[KINDS[kind]])
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    _add_sizes(writer, model)
    _add_rope(library, writer, model)
    if model.tokenizer is not None:
        model.tokenizer.add_to(writer)
    if model.defaults.top_k is not None:
        writer.add_sampling_top_k(model.defaults.top_k)
    for value, add in (
        (model.defaults.temperature, writer.add_sampling_temp),
        (model.defaults.top_p, writer.add_sampling_top_p),
        (model.defaults.min_p, writer.add_sampling_min_p),
        (model.defaults.repetition_penalty, writer.add_sampling_penalty_repeat),
    ):
        if value is not None:
            add(value)
    return writer


def _add_sizes(writer: gguf.GGUFWriter, model: GgufModel) -> None:
    config, first = model.config, model.config.layers[0]
    writer.add_context_length(model.fields.integer("max_position_embeddings", config.max_position))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(config.layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_vocab_size(config.vocab_size)
    if first.rope is not None:
        writer.add_rope_dimension_count(first.rope.rotary_dim)
    windows = [layer.sliding_window for layer in config.layers]
    if window := next(filter(None, windows), None):
        writer.add_sliding_window(window)
        # Layers with full attention among the others come at regular distances.
        if None in windows and windows[0] is not None:
            writer.add_sliding_window_pattern(windows.index(None) + 1)
    if config.attention_soft_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_soft_cap)
    if config.logit_soft_cap is not None:
        writer.add_final_logit_softcapping(config.logit_soft_cap)
    if moe := next((layer.moe for layer in config.layers if layer.moe is not None), None):
        writer.add_expert_count(moe.num_experts)
        writer.add_expert_used_count(moe.experts_per_token)
        writer.add_expert_feed_forward_length(moe.intermediate_size)
        writer.add_expert_weights_norm(moe.normalize)


def _rope_fields(model: GgufModel) -> tuple[Fields, Fields | None]:
    """Return the rotary parameters of the layers with full attention, and of the others if they have their own."""
    fields = model.fields
    empty = Fields(fields.path, {})
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or empty
    return section.section("full_attention") or section, section.section("sliding_attention")


def _theta(model: GgufModel, parameters: Fields) -> float:
    return parameters.number("rope_theta", model.fields.number("rope_theta", 10_000.0))


def _original_length(model: GgufModel, parameters: Fields) -> int:
    length = model.fields.optional_integer("original_max_position_embeddings")
    return length or parameters.integer("original_max_position_embeddings", model.config.max_position)


def _add_rope(library: ModuleType, writer: gguf.GGUFWriter, model: GgufModel) -> None:
    parameters, local = _rope_fields(model)
    writer.add_rope_freq_base(_theta(model, parameters))
    local_theta = 0.0 if local is None else local.number("rope_theta", 0.0)
    if local_theta := local_theta or model.fields.number("rope_local_base_freq", 0.0):
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local_theta)
    rule = parameters.text("rope_type", parameters.text("type", "default"))
    if rule in ("linear", "yarn"):
        writer.add_rope_scaling_type(library.RopeScalingType(rule))
        writer.add_rope_scaling_factor(parameters.number("factor", 1.0))
    if rule == "yarn":
        writer.add_rope_scaling_orig_ctx_len(_original_length(model, parameters))
        writer.add_rope_scaling_yarn_beta_fast(parameters.number("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(parameters.number("beta_slow", 1.0))
        # A magnitude of the model's own. llama.cpp multiplies YaRN's with this key, and reads no other.
        factor, rope = parameters.number("factor", 1.0), model.config.layers[0].rope
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        if rope is not None and not math.isclose(rope.magnitude, usual, rel_tol=1e-6):
            writer.add_rope_scaling_attn_factors(rope.magnitude / usual)
    if rule in ("longrope", "su"):
        writer.add_rope_scaling_type(library.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(_original_length(model, parameters))
        rope = model.config.layers[0].rope
        writer.add_rope_scaling_attn_factors(1.0 if rope is None else rope.magnitude)


def _rotary_factors(model: GgufModel) -> dict[str, Tensor]:
    """Return the tensors of divisors that Llama 3.1's rule and LongRoPE have in a file."""
    parameters, _ = _rope_fields(model)
    rule = parameters.text("rope_type", parameters.text("type", "default"))
    rope = model.config.layers[0].rope
    if rope is not None and rule == "llama3":
        plain = build_rope(
            Fields(parameters.path, {}),
            RopeContext(
                rotary_dim=rope.rotary_dim,
                theta=_theta(model, parameters),
                max_position=model.config.max_position,
                original_max_position=model.config.max_position,
            ),
        )
        return {"rope_freqs.weight": torch.tensor(plain.frequencies) / torch.tensor(rope.frequencies)}
    if rule in ("longrope", "su"):
        return {
            f"rope_factors_{length}.weight": torch.tensor(
                parameters.numbers(f"{length}_factor"), dtype=torch.float32
            )
            for length in ("long", "short")
        }
    return {}


def _check_expressible(
    library: ModuleType, model: GgufModel, form: WrittenArchitecture, targets: list[_Target], path: Path
) -> None:
    """Write the metadata alone, read it back, and compare.

    Raises:
        UnsupportedModel: the reader makes another configuration of it, named by its first difference.
    """
    writer = _writer(library, model, form, "F32")
    probe = path.with_name(f"{path.name}.probe")
    for target in targets:
        shape = target.shape if target.values is None else tuple(target.values.shape)
        writer.add_tensor_info(target.name, shape, np.dtype(np.float32), 4 * math.prod(shape))
    try:
        writer.write_header_to_file(probe)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        end = probe.stat().st_size
        with probe.open("r+b") as file:
            # A sparse file: the reader compares offsets with its length, and reads rotary factors only.
            file.truncate(end + sum(4 * math.prod(target.shape) + 64 for target in targets))
        opened = GgufFile.open(probe)
        with probe.open("r+b") as file:
            for target in targets:
                if target.values is not None:
                    file.seek(opened.tensors[target.name].begin)
                    file.write(target.values.numpy().tobytes())
        found = read_decoder_config(opened)
    finally:
        probe.unlink(missing_ok=True)
    has_head = any(target.name == "output.weight" for target in targets)
    wanted = attrs.evolve(model.config, tied_head=not has_head)
    skipped = {"architecture", "names", "module_names", "runs_on_cpu_decoder"}
    wanted_fields, found_fields = attrs.asdict(wanted), attrs.asdict(found)
    for field in wanted_fields.keys() - skipped:
        if not _agree(wanted_fields[field], found_fields[field]):
            raise UnsupportedModel(
                f"{model.fields.path}: a GGUF file of the architecture {form.name} cannot express this model: "
                f"its {field} would be another"
            )


def _agree(wanted: Any, found: Any) -> bool:
    """Tell whether two values are the same, but for the float32 of the metadata."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_agree(wanted[key], found.get(key)) for key in wanted)
    if isinstance(wanted, list | tuple):
        return (
            isinstance(found, list | tuple) and len(found) == len(wanted) and all(map(_agree, wanted, found))
        )
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=1e-5)
    return bool(wanted == found)
