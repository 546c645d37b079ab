"""Converter of a Hugging Face folder of llama's or qwen3's architecture to one GGUF file, for llama.cpp; without torch.

    python benchmarks/peers/gguf_model.py FOLDER [f32 | bf16 | q4_0 | q8_0 | q4_k_m]

Only what models of random weights need: no tokenizer goes into the file, so it takes token ids only. Matrices are
written in the requested type, vectors in float32, as llama.cpp's own converter does.

Source: the GGUF and safetensors formats; llama.cpp's names of tensors. Rotary embeddings of its `llama` rotate
neighbouring pairs of a head's dimensions where Hugging Face's rotate halves: rows of queries and keys are reordered for
that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
RECIPES = {"q4_k_m": 15}
"""Mixtures of types, which llama.cpp alone chooses and rounds: its `LLAMA_FTYPE_MOSTLY_...`."""

AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, weights: str) -> Path:
    """Write `folder`/model-`weights`.gguf unless it is there.

    Args:
        folder: with config.json and model.safetensors.
        weights: a type that gguf-py rounds to, or a key of RECIPES.
    """
    path = folder / f"model-{weights}.gguf"
    if path.exists():
        return path
    if weights in RECIPES:
        return _quantised(convert(folder, "f32"), path, RECIPES[weights])
    import gguf  # type: ignore[import-not-found,unused-ignore]  # beside llama.cpp, not here

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path.with_suffix(".part"), config["model_type"])
    _describe(writer, config)
    kind = gguf.GGMLQuantizationType[weights.upper()]
    for name, tensor in _tensors(folder / "model.safetensors"):
        target, ordered = _renamed(name), _reordered(name, tensor, config)
        used = kind if ordered.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(target, gguf.quantize(ordered, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".part").rename(path)


def _quantised(whole: Path, path: Path, recipe: int) -> Path:
    """Let llama.cpp round a float32 file."""
    import llama_cpp as api  # type: ignore[import-not-found,unused-ignore]  # as above

    params = api.llama_model_quantize_default_params()
    params.ftype = recipe
    part = path.with_suffix(".part")
    if code := api.llama_model_quantize(str(whole).encode(), str(part).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantise {whole}: {code}")
    return part.rename(path)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _renamed(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in AROUND:
        return f"{AROUND[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _reordered(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    if config["model_type"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    num_heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    rows, columns = tensor.shape
    halves = tensor.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).copy()


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and float32 arrays of a safetensors file, one after the other."""
    import numpy as np  # of the environment that has llama.cpp

    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        yield name, values.reshape(entry["shape"])


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), *(sys.argv[2:] or ["f32"])))
