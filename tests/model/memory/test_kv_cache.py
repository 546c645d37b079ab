from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.model.tiny import make_model
from triolet.actors.executors.contract import with_kv_cache
from triolet.config.engine import DEFAULT_BLOCK_SIZE, EngineConfig
from triolet.core.kv_cache.cache_groups import CacheGroup
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.errors import ConfigError
from triolet.model.interface import STATE_WINDOW, LayerCacheSpec, LayerStateSpec, ModelSpec
from triolet.model.loading.runner import load_runner
from triolet.model.memory import kv_cache
from triolet.model.memory.kv_cache import (
    allocate_kv_cache,
    available_memory_bytes,
    cache_groups_of,
    kv_block_count,
    windows_of,
)
from triolet.model.memory.state_cache import block_size_of

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


def recurrent_spec(recurrent: tuple[int, ...] = (2, 4, 5)) -> ModelSpec:
    """A layer with attention, 64 bytes per token, and one with a state."""
    state = LayerStateSpec(convolution=(3, 10), recurrent=recurrent)
    return attrs.evolve(
        make_spec(),
        cache_layers=(
            LayerCacheSpec(num_kv_heads=2, head_dim=8),
            LayerCacheSpec(num_kv_heads=0, head_dim=0, state=state),
        ),
    )


STATE_BYTES = 2 * (
    3 * 10 * 2 + 2 * 4 * 5 * 4
)  # two versions: the convolution's in bfloat16, the other in float32


def test_a_block_of_a_recurrent_model_is_counted_with_its_states() -> None:
    block_bytes = 16 * 64 + STATE_BYTES
    for size, expected in ((5 * block_bytes, 5), (6 * block_bytes - 1, 5)):
        assert expected == kv_block_count(
            recurrent_spec(),
            block_size=16,
            num_kv_blocks=None,
            kv_cache_bytes=size,
            max_model_len=100,
            max_num_seqs=8,
        )


def test_the_memory_of_a_recurrent_model_is_what_was_counted_and_the_lengths_of_its_states() -> None:
    spec = recurrent_spec()
    cache = allocate_kv_cache(spec, num_blocks=6, block_size=16, device=CPU)
    tensors = [tensor for layer in cache for tensor in layer.tensors]
    assert [len(tensor) for tensor in tensors] == [6] * 5
    assert sum(tensor.nbytes for tensor in tensors) == 6 * (16 * 64 + STATE_BYTES + 2 * 4)
    assert cache[1].keys.shape == (6, 16, 0, 0)
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize(
    ("recurrent", "longest", "expected"),
    [((2, 4, 5), 1000, 16), ((8, 16, 16), 1000, 512), ((8, 16, 16), 100, 128), ((8, 16, 16), 9, 16)],
)
def test_keys_and_values_of_a_block_take_as_much_memory_as_its_states_unless_no_sequence_is_so_long(
    recurrent: tuple[int, ...], longest: int, expected: int
) -> None:
    assert block_size_of(recurrent_spec(recurrent), longest) == expected


STATES_ALONE = attrs.evolve(
    recurrent_spec(),
    cache_layers=(
        LayerCacheSpec(
            num_kv_heads=0,
            head_dim=0,
            state=LayerStateSpec(convolution=(3, 10), recurrent=(4, 5)),
            window=STATE_WINDOW,
        ),
    )
    * 3,
    takes_cache_groups=True,
)


def test_a_block_of_states_alone_has_the_tokens_of_a_step_unless_no_sequence_is_so_long() -> None:
    assert block_size_of(STATES_ALONE, 10**6) == DEFAULT_BATCHED_TOKENS
    assert block_size_of(STATES_ALONE, 100) == 128


def test_a_sequence_of_states_alone_keeps_two_blocks_however_long_it_is() -> None:
    groups = cache_groups_of(STATES_ALONE, longest=10**6)
    assert groups == (CacheGroup(layers=(0, 1, 2), window=STATE_WINDOW),)
    windows = windows_of(groups)
    assert windows.num_needed(10**6, 16) == 2
    # The token at index 16 reads the state after the one before it, in the block before; the next one does not.
    assert (windows.num_behind(16, 16), windows.num_behind(17, 16)) == (0, 1)


def test_states_beside_layers_with_attention_are_kept_as_long_as_their_keys() -> None:
    attention = LayerCacheSpec(num_kv_heads=2, head_dim=8)
    spec = attrs.evolve(STATES_ALONE, cache_layers=(*STATES_ALONE.cache_layers, attention))
    assert cache_groups_of(spec, longest=10**6) == (CacheGroup(layers=(0, 1, 2, 3)),)


def test_a_model_without_states_has_the_default_block_size() -> None:
    assert block_size_of(make_spec(), 4096) == DEFAULT_BLOCK_SIZE


def spec_with(windows: Sequence[int | None]) -> ModelSpec:
    layers = tuple(LayerCacheSpec(num_kv_heads=2, head_dim=8, window=window) for window in windows)
    return attrs.evolve(make_spec(), cache_layers=layers, takes_cache_groups=True)


def groups_with(windows: Sequence[int | None], *, longest: int = 100, most: int = 8) -> list[CacheGroup]:
    return list(cache_groups_of(spec_with(windows), longest=longest, most=most))


def test_layers_that_all_have_a_window_are_one_group_with_the_widest() -> None:
    assert groups_with([5, 7]) == [CacheGroup(layers=(0, 1), window=7)]


def test_a_window_that_no_sequence_fills_is_none() -> None:
    assert groups_with([100, 200]) == groups_with([None, None]) == [CacheGroup(layers=(0, 1))]


def test_layers_with_and_without_a_window_are_groups_of_the_same_size_full_attention_first() -> None:
    assert groups_with([5, 5, None, 5, 5, None]) == [
        CacheGroup(layers=(2, 5)),
        CacheGroup(layers=(0, 1), window=5),
        CacheGroup(layers=(3, 4), window=5),
    ]
    assert [len(group.layers) for group in groups_with([9, 9, 9, 9, 9, None] * 4)] == [4] * 6


def test_a_model_that_takes_fewer_groups_keeps_all_blocks_of_all_layers() -> None:
    assert groups_with([5, None, 5, None], most=1) == [CacheGroup(layers=(0, 1, 2, 3))]
    spec = attrs.evolve(spec_with([5, None, 5, None]), takes_cache_groups=False)
    assert cache_groups_of(spec, longest=100) == (CacheGroup(layers=(0, 1, 2, 3)),)


def test_layers_at_the_same_place_of_several_groups_are_in_the_same_tensors() -> None:
    windows = [5, None, 5]
    cache = allocate_kv_cache(
        spec_with(windows), num_blocks=4, block_size=2, device=CPU, groups=groups_with(windows)
    )
    assert [layer.group for layer in cache] == [1, 0, 2]  # full attention first
    assert all(layer.keys is cache[0].keys for layer in cache)
    size = 4 * 2 * 2 * 8
    assert cache[0].keys.numel() == cache[0].values.numel() == size


def test_the_blocks_of_all_groups_are_one_pool_of_the_size_that_was_asked_for() -> None:
    windows = [5, None, 5, 5]
    spec, groups = spec_with(windows), groups_with(windows)
    limits: dict[str, Any] = {"groups": groups, "block_size": 4, "max_model_len": 100, "max_num_seqs": 2}
    num_blocks = kv_block_count(spec, num_kv_blocks=None, kv_cache_bytes=10**6, **limits)
    [layer] = {
        cache.keys.data_ptr(): cache
        for cache in allocate_kv_cache(spec, num_blocks=num_blocks, block_size=4, device=CPU, groups=groups)
    }.values()
    block_bytes = layer.keys[0].nbytes + layer.values[0].nbytes
    assert 10**6 - len(groups) * block_bytes < num_blocks * block_bytes <= 10**6
    assert num_blocks % len(groups) == 0
    assert kv_block_count(spec, num_kv_blocks=3, kv_cache_bytes=None, **limits) == 3 * len(groups)


def test_windows_in_five_of_six_layers_leave_less_than_a_fifth_of_a_long_sequence() -> None:
    groups = cache_groups_of(spec_with([512, 512, 512, 512, 512, None] * 4), longest=2**15)
    windows, num_blocks = windows_of(groups), 2**15 // 16
    assert windows.num_needed(2**15, 16) < 0.2 * windows.count * num_blocks
    # Of the memory of one such sequence without windows.
    assert windows.longest(windows.count * num_blocks, 16) > 5 * 2**15


FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 3}


def loaded(folder: Path, config: EngineConfig | None = None, **fields: Any) -> tuple[EngineConfig, ModelInfo]:
    # Calibrated choices are measured, and two measurements need not agree.
    config = config or EngineConfig(
        model=str(folder), device="cpu", block_size=4, calibration="off", **fields
    )
    return config, load_runner(config, lambda told: None)[1]


def test_the_same_memory_holds_longer_sequences_with_windows_in_some_layers(tmp_path: Path) -> None:
    folders = [make_model("gemma3", tmp_path / name, **more) for name, more in (("some", {}), ("none", FULL))]
    infos = [loaded(folder, kv_cache_bytes=50_000)[1] for folder in folders]
    assert [len(info.cache_windows) for info in infos] == [3, 1]
    assert infos[0].max_model_len > 2 * infos[1].max_model_len


SIZES: list[dict[str, Any]] = [{"num_kv_blocks": n} for n in (1, 2, 3, 4, 30)] + [
    {"kv_cache_bytes": n} for n in (10_000, 50_000)
]


@pytest.mark.parametrize("size", [*SIZES, {"max_model_len": 8}, {"max_model_len": 40, "max_num_seqs": 2}])
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_later_load_has_the_cache_groups_and_blocks_of_the_first(
    family: str, size: dict[str, Any], tmp_path: Path
) -> None:
    config, first = loaded(make_model(family, tmp_path), **size)
    _, later = loaded(tmp_path, with_kv_cache(config, first))
    assert later == attrs.evolve(first, max_position=later.max_position)
