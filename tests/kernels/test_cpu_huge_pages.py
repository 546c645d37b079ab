"""Memory of packed weights: tensors of a model share mappings, which end with them."""

from __future__ import annotations

import gc
import weakref

import torch

from triolet.kernels.cpu import huge_pages
from triolet.kernels.cpu.huge_pages import huge_page_tensor

MAPPING_BYTES = 16 * 2**20


def test_tensors_of_one_mapping_do_not_overlap_and_are_aligned() -> None:
    sizes = [1, 63, 64, 65, 4096, 100_000, 3]
    tensors = [huge_page_tensor(size, torch.uint8).fill_(number) for number, size in enumerate(sizes)]
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.tolist() == [number] * size
        assert tensor.data_ptr() % 64 == 0


def test_small_tensors_lie_in_the_same_large_pages() -> None:
    mappings = huge_pages._Mappings()
    (first, place), (second, next_place) = mappings.take(1000), mappings.take(1000)
    assert first is second
    assert (place, next_place) == (0, 1024)
    assert len(first) == MAPPING_BYTES


def test_a_tensor_that_does_not_fit_has_whole_large_pages_of_its_own_and_leaves_the_rest_to_others() -> None:
    mappings = huge_pages._Mappings()
    small, _ = mappings.take(1000)
    large, place = mappings.take(MAPPING_BYTES + 1)
    following, next_place = mappings.take(1000)
    assert large is following is not small
    assert place == 0
    assert next_place == MAPPING_BYTES + 64
    assert len(large) == MAPPING_BYTES + 2 * 2**20


def test_a_mapping_ends_with_the_last_tensor_in_it() -> None:
    mappings = huge_pages._Mappings()
    pages, place = mappings.take(8)
    alive = weakref.ref(pages)
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=8, offset=place)
    other, _ = mappings.take(8)
    del pages, other
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None
    assert mappings.take(8)[1] == 0
