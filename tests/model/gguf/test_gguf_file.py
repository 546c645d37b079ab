"""GGUF files are read as gguf-py writes them; whatever is wrong with one is an error that names file and place."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.tiny import make_model
from tests.scale import num_cases
from triolet.errors import ModelError, ModelFileError, UnsupportedModel
from triolet.model.gguf.config import (
    ARCHITECTURES,
    open_checkpoint,
    read_decoder_config,
    read_gguf_defaults,
    stored_dtype,
)
from triolet.model.gguf.file import GgufArray, GgufFile
from triolet.model.gguf.ggml_types import REFUSED, TYPES
from triolet.model.gguf.tokenizer import HUGGINGFACE, SPLITS, read_gguf_tokenizer


def write(path: Path, alignment: int | None = None) -> Path:
    """A file with one of each kind of key, and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "héllo")
    writer.add_array("a.texts", ["", "x", "▁yes"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_tensor("one.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    blocks = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("two.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_keys_of_all_types_are_read(tmp_path: Path) -> None:
    read = GgufFile.open(write(tmp_path / "model.gguf")).metadata
    arrays = {key: read[key] for key in ("a.texts", "a.ints", "a.floats")}
    texts, ints, floats = arrays.values()
    assert isinstance(texts, GgufArray) and isinstance(ints, GgufArray) and isinstance(floats, GgufArray)
    assert (texts.texts(), ints.numbers(), floats.numbers()) == (["", "x", "▁yes"], [1, -2, 3], [0.5, 2.0])
    assert {key: value for key, value in read.items() if key not in arrays} == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -100,
        "a.u16": 60_000,
        "a.i16": -30_000,
        "a.u32": 4_000_000_000,
        "a.i32": -2_000_000_000,
        "a.u64": 2**63,
        "a.i64": -(2**62),
        "a.f32": float(np.float32(0.1)),
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "héllo",
    }


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_tensors_lie_where_gguf_py_reads_them(alignment: int | None, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", alignment)
    ours = GgufFile.open(path).tensors
    for theirs in gguf.GGUFReader(path).tensors:
        tensor = ours[theirs.name]
        assert (tensor.begin, tensor.num_bytes) == (theirs.data_offset, theirs.n_bytes)
        assert tensor.shape == tuple(reversed(theirs.shape.tolist()))
        assert tensor.type.name == theirs.tensor_type.name


def test_version_2_is_read_as_version_3(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert len(GgufFile.open(path).tensors) == 2


# ---------------------------------------------------------------------------------- wrong by hand


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def entry(name: str, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return struct.pack("<Q", len(name)) + name.encode() + shape + struct.pack("<IQ", kind, offset)


def file_of(
    keys: list[bytes], entries: list[bytes], data: bytes = bytes(64), *, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(entries), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(keys + entries)
    return head + bytes(-len(head) % 32) + data


ARRAY_OF_TEXTS = struct.pack("<IQ", 8, 3) + struct.pack("<Q", 1) + b"x"
WRONG = {
    "empty": (b"", "is truncated: it is empty"),
    "other": (b"PK\x03\x04" + bytes(60), "is not a GGUF file"),
    "short": (b"GGUF" + bytes(2), "is truncated: the version takes 4 bytes of which 2 are there"),
    "version": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "this is of version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "this is big-endian"),
    "tensor-count": (file_of([], [], counts=(2**60, 0)), "tensor count must be at most 65536; got 1152921504606846976"),
    "key-count": (file_of([], [], counts=(0, 5000)), "it is too short for its key count, 5000"),
    "key-length": (file_of([struct.pack("<Q", 2**40)], []), "key 0 must have 1 to 65535 bytes"),
    "key-utf-8": (file_of([key("a", 4, bytes(4)).replace(b"a", b"\xff")], []), "key 0 must be UTF-8"),
    "key-twice": (file_of([key("a", 4, bytes(4))] * 2, []), "key 'a' is there twice"),
    "key-type": (file_of([key("a", 99, bytes(8))], []), "a has the type 99, which GGUF does not have"),
    "text-length": (file_of([key("a", 8, struct.pack("<Q", 2**50))], []), "is truncated: a takes"),
    "array-length": (file_of([key("a", 9, struct.pack("<IQ", 4, 2**61))], []), "is truncated: a takes"),
    "array-texts": (file_of([key("a", 9, ARRAY_OF_TEXTS)], [], b"\xff" * 8), "is truncated: it ends within a"),
    "array-of-arrays": (file_of([key("a", 9, struct.pack("<IQ", 9, 1))], []), "array of strings or numbers"),
    "alignment": (file_of([key("general.alignment", 4, struct.pack("<I", 24))], []), "must be a power of two"),
    "dimensions": (file_of([], [entry("t", (1,) * 5)]), "tensor 't' must have 1 to 4 dimensions; got 5"),
    "empty-tensor": (file_of([], [entry("t", (0,))]), "dimensions of tensor 't' must be at least 1"),
    "blocks": (file_of([], [entry("t", (33,), 8)]), "the first a multiple of 32 (Q8_0); got [33]"),
    "size": (file_of([], [entry("t", (2**63, 2**63))]), "is truncated: tensor 't' ends at byte"),
    "offset": (file_of([], [entry("t", (4,), 0, 2**62)]), "is truncated: tensor 't' ends at byte"),
    "offset-alignment": (file_of([], [entry("t", (4,), 0, 4)]), "offset of tensor 't' must be a multiple of 32; got 4"),
    "overlap": (file_of([], [entry("t", (16,)), entry("u", (4,), 0, 32)]), "tensors 't' and 'u' overlap"),
    "tensor-twice": (file_of([], [entry("t"), entry("t", offset=32)]), "tensor 't' is there twice"),
    "known-type": (file_of([], [entry("t", (256,), 16)]), "tensor 't' is of type IQ2_XXS, which is not supported"),
    "unknown-type": (file_of([], [entry("t", (4,), 77)]), "tensor 't' is of type 77, which is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_what_is_wrong(name: str, tmp_path: Path) -> None:
    data, message = WRONG[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises((ModelFileError, UnsupportedModel)) as raised:
        GgufFile.open(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_a_file_cut_off_anywhere_is_truncated(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    # the last tensor ends before the padding of the file
    end = max(
        tensor.begin + tensor.num_bytes for tensor in GgufFile.open(tmp_path / "model.gguf").tensors.values()
    )
    for length in range(0, end, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"truncated|too short"):
            GgufFile.open(path)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.gguf: is missing"):
        GgufFile.open(tmp_path / "model-00001-of-00002.gguf")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        write(tmp_path / f"model-0000{part}-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"split.no must be 0; got None"):
        GgufFile.open(tmp_path / "model-00001-of-00002.gguf")


def test_one_part_under_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of([key("split.count", 2, struct.pack("<H", 3))], []))
    with pytest.raises(ModelFileError, match="is one of 3 parts, so its name must end in -00001-of-00003"):
        GgufFile.open(path)


# ------------------------------------------------------------------------------------------- fuzz


def write_whole_model(path: Path) -> bytes:
    """The smallest file that makes a model, with a tokenizer of either kind of key."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("llama")
    writer.add_eos_token_id(1)
    writer.add_token_list(["<unk>", "</s>", "▁", "a", "▁a", "aa"])
    writer.add_token_scores([0.0, 0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([2, 3, 1, 1, 1, 1])
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (6, 32), "output_norm": (32,)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
            "ffn_norm": (32,), "ffn_gate": (32, 32), "ffn_up": (32, 32), "ffn_down": (32, 32),
        }.items()
    }  # fmt: skip
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.Q4_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ones(shape, np.float32), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def mutated(whole: bytes, header_bytes: int, generator: random.Random) -> bytes:
    """One to three changes in the header: a byte, a word of a telling size, bytes doubled, or the end cut off."""
    data = bytearray(whole)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(min(header_bytes, len(data)))
        match generator.randrange(5):
            case 0:
                data[at] = generator.randrange(256)
            case 1:
                sizes = (0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1, len(data), len(data) - at)
                data[at : at + 8] = struct.pack("<Q", generator.choice(sizes))
            case 2:
                kinds = (0, 1, 7, 8, 9, 12, 13, 39, 255, 2**31, 2**32 - 1)
                data[at : at + 4] = struct.pack("<I", generator.choice(kinds))
            case 3:
                data[at:at] = data[at : at + generator.randint(1, 40)]
            case _:
                if generator.random() < 0.2:
                    del data[generator.randrange(1, len(data)) :]
    return bytes(data)


def load_all_of(path: Path) -> None:
    """Everything that loading reads from a file, but for the decoder itself."""
    from triolet.model.architectures.weight_map import check_fit, plan_tensors

    file = GgufFile.open(path)
    config = read_decoder_config(file)
    read_gguf_defaults(file)
    read_gguf_tokenizer(file)
    checkpoint = open_checkpoint(file, config, stored_dtype(file))
    check_fit(config, plan_tensors(config, checkpoint.tensors), checkpoint)
    for name in checkpoint.tensors:
        checkpoint.read(name)


SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
FUZZED: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"mlp_only_layers": [], "num_experts": 2, "moe_intermediate_size": 32},
    "gemma3": {"layer_types": ["sliding_attention"]},
    "phi3": {"pad_token_id": 0},
    "gpt-oss": {"num_local_experts": 2},
}


def small_file(family: str, path: Path) -> None:
    if family == "llama":
        write_whole_model(path)
        return
    folder = make_model(family, path.parent / family, **SMALL, **FUZZED[family])

    def scaled(writer: gguf.GGUFWriter) -> None:
        is_phi = family == "phi3"
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE if is_phi else gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        for length in ("short", "long") if is_phi else ():
            writer.add_tensor(f"rope_factors_{length}.weight", np.array([1.0, 2.0], dtype=np.float32))

    write_gguf(folder, path, "Q8_0", metadata=scaled, with_tokenizer=True)


def fuzz(family: str, tmp_path: Path, count: int, seed: int) -> None:
    path = tmp_path / "model.gguf"
    small_file(family, path)
    load_all_of(path)
    whole = path.read_bytes()
    header_bytes = min(tensor.begin for tensor in GgufFile.open(path).tensors.values())
    generator = random.Random(seed)
    num_refused = 0
    for index in range(count):
        path.write_bytes(mutated(whole, header_bytes, generator))
        try:
            load_all_of(path)
        except ModelError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"mutation {index} of seed {seed}: {error!r}") from error
    assert count / 4 < num_refused < count, "most mutations must be refused, and some must not matter"


@pytest.mark.parametrize(("family", "count"), [("llama", 1400), *((family, 200) for family in FUZZED)])
def test_no_mutation_of_a_file_does_more_than_a_typed_error(family: str, count: int, tmp_path: Path) -> None:
    fuzz(family, tmp_path, count, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("llama", 94_000), *((family, 2000) for family in FUZZED)])
def test_no_one_of_very_many_mutations_does_more_than_a_typed_error(
    family: str, count: int, tmp_path: Path
) -> None:
    fuzz(family, tmp_path, num_cases(count), seed=1)


def test_opening_a_hostile_file_takes_no_more_memory_than_the_file_has_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_whole_model(path)
    generator = random.Random(2)
    whole = path.read_bytes() + bytes(2**20)  # so that what Python itself needs does not matter
    header_bytes = 1000
    for _ in range(200):
        path.write_bytes(mutated(whole, header_bytes, generator))
        tracemalloc.start()
        try:
            GgufFile.open(path)
        except ModelError:
            pass
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes < len(whole)


def test_the_documentation_lists_the_architectures_types_and_pre_tokenizers_that_there_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = page[page.index("## GGUF files") : page.index("## dtypes and devices")]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {name for first, _ in rows for name in re.findall(r"`([^`]+)`", first)}
    refused = {name for first, what in rows if "refused" in what for name in re.findall(r"`([^`]+)`", first)}
    supported = {kind.name for kind in TYPES.values()} | set(ARCHITECTURES) | {"gpt2", "llama", "gemma4"}
    supported |= {HUGGINGFACE, "tokenizer.huggingface.json"}
    assert refused == set(REFUSED.values())
    assert listed == supported | refused
    (pre_tokenizers,) = (what for first, what in rows if "`gpt2`" in first)
    assert re.findall(r"`([^`]+)`", pre_tokenizers) == list(SPLITS)
