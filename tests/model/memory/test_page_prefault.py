"""Pages of a KV cache that are in memory before a step needs them: which, how many, and until when."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.tiny import make_model
from triolet.config.engine import EngineConfig
from triolet.model.interface import LayerCacheSpec, ModelSpec
from triolet.model.loading.runner import load_runner
from triolet.model.memory import page_prefault
from triolet.model.memory.kv_cache import LARGE_PAGE_BYTES, _zeros, allocate_kv_cache
from triolet.model.memory.page_prefault import (
    AT_ONCE_BYTES,
    MADV_DONTNEED,
    MADV_POPULATE_WRITE,
    PagePrefault,
    _advise,
    prefault_pages,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages come as they come")

PAGE = os.sysconf("SC_PAGE_SIZE")
NUM_BLOCKS, BLOCK_BYTES = 64, 2**18


def make_tensor() -> Tensor:
    return _zeros((NUM_BLOCKS, BLOCK_BYTES // 4, 1, 1), torch.float32, torch.device("cpu"))


def num_resident(tensor: Tensor, first: int, last: int) -> int:
    """Pages of these blocks that are in memory."""
    size = (last - first) * BLOCK_BYTES
    present = (ctypes.c_ubyte * math.ceil(size / PAGE))()
    address = ctypes.c_void_p(tensor.data_ptr() + first * BLOCK_BYTES)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), present) == 0
    return sum(page & 1 for page in present)


def is_resident(tensor: Tensor, first: int, last: int) -> bool:
    return num_resident(tensor, first, last) == (last - first) * BLOCK_BYTES // PAGE


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it has not come true in a hundred seconds")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "triolet-kv-pages"}


@pytest.fixture
def num_threads() -> Callable[[], int]:
    """How many there are beside those that other tests' models have."""
    gc.collect()
    others = threads()
    return lambda: len(threads() - others)


def test_a_cache_that_is_collected_in_its_own_thread_ends_the_thread() -> None:
    pages = page_prefault._Pages([torch.zeros(4, 4096)], 2**20, 2**20, 1.0, 1.0)
    errors = list[BaseException]()

    def work() -> None:
        try:
            page_prefault._end(pages, thread)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


def test_as_much_as_is_asked_for_is_in_memory_ahead_of_what_is_used_and_no_more() -> None:
    tensors = [make_tensor(), make_tensor()]
    pages = PagePrefault(tensors, min_bytes=2 * 16 * BLOCK_BYTES, max_bytes=2 * 16 * BLOCK_BYTES)
    wait_for(lambda: all(is_resident(tensor, 0, 16) for tensor in tensors))
    assert all(
        num_resident(tensor, 24, NUM_BLOCKS) == 0 for tensor in tensors
    )  # large pages are eight blocks
    pages.reach(15)
    pages.rest()
    wait_for(lambda: all(is_resident(tensor, 0, 32) for tensor in tensors))
    assert all(num_resident(tensor, 40, NUM_BLOCKS) == 0 for tensor in tensors)
    pages.reach(3)  # nothing new
    pages.reach(NUM_BLOCKS - 1)
    pages.rest()
    wait_for(lambda: all(is_resident(tensor, 0, NUM_BLOCKS) for tensor in tensors))
    pages.close()


def test_what_is_in_memory_ahead_grows_with_what_is_used() -> None:
    tensor = make_tensor()
    pages = PagePrefault([tensor], min_bytes=8 * BLOCK_BYTES, max_bytes=24 * BLOCK_BYTES)
    for highest, ahead in ((0, 9), (15, 32), (31, 56)):
        pages.reach(highest)
        pages.rest()
        wait_for(lambda ahead=ahead: is_resident(tensor, 0, ahead))  # type: ignore[misc]
        assert num_resident(tensor, ahead + 8, NUM_BLOCKS) == 0  # large pages are eight blocks
    pages.close()


def test_while_steps_are_computed_however_long_only_as_many_are_touched_as_are_used() -> None:
    tensor = make_tensor()
    pages = PagePrefault([tensor], quiet_s=0.2)
    pages.reach(7)
    wait_for(lambda: is_resident(tensor, 0, 16))
    time.sleep(0.6)  # a step
    at_once = AT_ONCE_BYTES // BLOCK_BYTES + 8  # large pages are eight blocks
    assert num_resident(tensor, 16 + at_once, NUM_BLOCKS) == 0
    pages.rest()
    wait_for(lambda: is_resident(tensor, 0, NUM_BLOCKS))
    pages.close()


def test_while_steps_are_computed_it_rests_nine_times_as_long_as_each_page_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [make_tensor(), make_tensor()]
    spans: list[tuple[float, float]] = []  # of the pages: from when until when

    def advise(address: int, size: int, advice: int) -> int:
        began_s = time.monotonic()
        time.sleep(0.01)
        spans.append((began_s, time.monotonic()))
        return 0

    monkeypatch.setattr(page_prefault, "_advise", advise)
    monkeypatch.setattr(page_prefault, "AT_ONCE_BYTES", 8 * BLOCK_BYTES)  # a large page
    pages = PagePrefault(layers, quiet_s=60.0)
    pages.reach(31)
    wait_for(lambda: len(spans) >= 6)
    pages.close()
    for (began_s, ended_s), (next_s, _) in pairwise(spans):
        assert next_s - ended_s >= 8 * (ended_s - began_s)


def test_between_steps_it_is_not_quiet() -> None:
    tensor = make_tensor()
    pages = PagePrefault([tensor], quiet_s=60.0)  # a busy machine may stand still for seconds
    for _ in range(50):
        pages.reach(7)
        pages.rest()
        time.sleep(0.01)
    at_once = AT_ONCE_BYTES // BLOCK_BYTES + 8  # large pages are eight blocks
    assert num_resident(tensor, 16 + at_once, NUM_BLOCKS) == 0
    pages.close()


@pytest.mark.parametrize(("num_layers", "blocks"), [(2, 8), (20, 1)])
def test_a_token_of_many_layers_does_not_take_a_large_page_of_each(num_layers: int, blocks: int) -> None:
    spec = ModelSpec(
        architecture="",
        backend="native",
        vocab_size=1,
        max_position=1,
        cache_layers=(LayerCacheSpec(num_kv_heads=1, head_dim=BLOCK_BYTES // 4),) * num_layers,
        dtype=torch.float32,
    )
    cache = allocate_kv_cache(spec, num_blocks=NUM_BLOCKS, block_size=1, device=torch.device("cpu"))
    keys = cache[0].keys
    keys[20] = 1.0
    if num_resident(keys, 0, NUM_BLOCKS) == BLOCK_BYTES // PAGE or keys.data_ptr() % LARGE_PAGE_BYTES:
        pytest.skip("this system has no large pages, or not where the cache begins")
    keys[0] = 1.0
    assert num_resident(keys, 0, 8) == blocks * BLOCK_BYTES // PAGE


def test_what_is_in_a_page_stays() -> None:
    tensor = make_tensor()
    tensor[5] = 7.0
    pages = PagePrefault([tensor])
    wait_for(lambda: is_resident(tensor, 0, NUM_BLOCKS))
    pages.close()
    assert (tensor[5] == 7.0).all() and (tensor[6] == 0.0).all()


def test_an_idle_cache_gives_back_what_was_never_used_and_touches_it_again_after_the_next_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, min_ahead = make_tensor(), 8
    advised: list[tuple[int, int]] = []  # what, and the block that it ends with

    def advise(address: int, size: int, advice: int) -> int:
        result = _advise(address, size, advice)
        advised.append((advice, (address + size - tensor.data_ptr()) // BLOCK_BYTES))
        return result

    monkeypatch.setattr(page_prefault, "_advise", advise)
    pages = PagePrefault([tensor], min_bytes=min_ahead * BLOCK_BYTES, quiet_s=0.01, idle_s=0.1)
    for num_used in (24, 25):
        tensor[:num_used] = 7.0
        advised.clear()
        pages.reach(num_used - 1)
        pages.rest()
        wait_for(lambda: MADV_DONTNEED in dict(advised))
        assert (MADV_POPULATE_WRITE, 2 * num_used) in advised
        assert num_resident(tensor, num_used + min_ahead, NUM_BLOCKS) == 0
        assert is_resident(tensor, 0, num_used) and (tensor[:num_used] == 7.0).all()
    pages.close()


def test_no_page_that_a_step_may_write_is_given_back() -> None:
    tensor = make_tensor()
    pages = PagePrefault([tensor], min_bytes=BLOCK_BYTES, quiet_s=0.0, idle_s=0.0)  # gives back all the time
    for block in range(NUM_BLOCKS):
        pages.reach(block)
        tensor[block] = block + 1.0
        pages.rest()
    time.sleep(0.05)
    pages.close()
    assert tensor[:, 0, 0, 0].tolist() == [block + 1.0 for block in range(NUM_BLOCKS)]
    assert (tensor == tensor[:, :1]).all()


def test_the_thread_ends_with_its_owner_and_lets_go_of_the_cache(num_threads: Callable[[], int]) -> None:
    tensor = make_tensor()
    cache = weakref.ref(tensor)
    pages: PagePrefault | None = PagePrefault([tensor], min_bytes=BLOCK_BYTES)
    assert num_threads() == 1
    del tensor
    assert pages is not None and cache() is not None
    pages = None
    gc.collect()
    assert (num_threads(), cache()) == (0, None)


def test_where_the_system_can_not_do_it_the_thread_ends(
    monkeypatch: pytest.MonkeyPatch, num_threads: Callable[[], int]
) -> None:
    monkeypatch.setattr(page_prefault, "MADV_POPULATE_WRITE", 12345)
    tensor = make_tensor()
    pages = PagePrefault([tensor])
    wait_for(lambda: num_threads() == 0)
    pages.reach(9)
    pages.close()
    assert num_resident(tensor, 0, NUM_BLOCKS) == 0


def test_only_main_memory_is_touched() -> None:
    assert prefault_pages([make_tensor()], torch.device("cuda")) is None
    assert _advise(0, PAGE, MADV_POPULATE_WRITE) != 0  # what is not mapped is told, and nothing happens


def test_a_runner_has_one_and_takes_it_along(tmp_path: Path, num_threads: Callable[[], int]) -> None:
    runner, _ = load_runner(
        EngineConfig(model=str(make_model("llama", tmp_path)), num_kv_blocks=16, block_size=4)
    )
    assert num_threads() == 1
    del runner
    gc.collect()
    assert num_threads() == 0
