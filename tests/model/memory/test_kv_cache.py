from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triolet.errors import ConfigError
from triolet.model.interface import LayerCacheSpec, ModelSpec
from triolet.model.memory import kv_cache
from triolet.model.memory.kv_cache import allocate_kv_cache, available_memory_bytes, kv_block_count

CPU = torch.device("cpu")
GIB = 2**30


def make_spec(dtype: torch.dtype = torch.bfloat16) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        backend="native",
        vocab_size=100,
        max_position=4096,
        cache_layers=(
            LayerCacheSpec(num_kv_heads=2, head_dim=8),
            LayerCacheSpec(num_kv_heads=1, head_dim=16),
        ),
        dtype=dtype,
    )


BYTES_PER_TOKEN = 128  # of the spec above: keys and values of two layers, 16 numbers of two bytes each


def count(
    *,
    num_kv_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    max_model_len: int = 100,
    max_num_seqs: int = 8,
) -> int:
    return kv_block_count(
        make_spec(),
        block_size=16,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


def test_an_explicit_number_of_blocks_wins() -> None:
    assert count(num_kv_blocks=7, kv_cache_bytes=10**9) == 7


def test_a_size_in_bytes_buys_whole_blocks() -> None:
    assert count(kv_cache_bytes=16 * BYTES_PER_TOKEN * 5 + 1) == 5


def test_a_size_below_one_block_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_bytes must be at least one block of 16 tokens, 2048 bytes; got 2047"
    ):
        count(kv_cache_bytes=2047)


def test_the_default_is_what_all_sequences_could_need() -> None:
    assert count(max_model_len=100, max_num_seqs=8) == 8 * 7


@pytest.mark.parametrize(("available", "spent"), [(8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB)])
def test_the_default_is_cut_to_a_share_of_available_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, spent: int
) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: available)
    assert count(max_model_len=2**30) == spent // (16 * BYTES_PER_TOKEN)


def test_there_is_always_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 0)
    assert count() == 1


def test_every_layer_has_keys_and_values_of_its_own_shape_all_zero() -> None:
    spec = make_spec()
    cache = allocate_kv_cache(spec, num_blocks=5, block_size=16, device=CPU)
    assert [layer.keys.shape for layer in cache] == [(5, 16, 2, 8), (5, 16, 1, 16)]
    assert [layer.values.shape for layer in cache] == [(5, 16, 2, 8), (5, 16, 1, 16)]
    tensors = [tensor for layer in cache for tensor in (layer.keys, layer.values)]
    assert sum(tensor.nbytes for tensor in tensors) == 5 * 16 * spec.kv_bytes_per_token()
    for i, tensor in enumerate(tensors):
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [
        [1.0],
        [2.0],
        [3.0],
        [4.0],
    ]  # no two share memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' account of memory")
def test_a_cache_takes_no_memory_before_it_is_used() -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    cache = allocate_kv_cache(make_spec(), num_blocks=2**17, block_size=16, device=CPU)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in cache) == GIB // 4
    assert resident_pages() - before < 2**12  # 16 MiB


def test_a_cache_that_no_memory_can_hold_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"num_kv_blocks must be small enough for the memory of cpu \(\d+ bytes"
    ):
        allocate_kv_cache(make_spec(), num_blocks=2**55, block_size=16, device=CPU)


def test_available_memory_is_the_machines_or_what_the_container_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:    3000 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 3000 * 1024
    (tmp_path / "memory.max").write_text("1500000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 500_000
    assert available_memory_bytes(tmp_path / "absent", tmp_path) == 500_000
