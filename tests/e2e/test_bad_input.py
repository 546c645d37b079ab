"""Every field of SamplingParams at every value that a stranger may send is refused by name, or served."""

from __future__ import annotations

import math
import resource
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import triolet
from tests.model.tiny import make_model
from tests.scale import one_in
from triolet import Engine, RequestOutputKind, SamplingParams
from triolet.errors import InvalidParams, InvalidRequest, RequestFailed, shown

FIELDS = [field.name for field in attrs.fields(SamplingParams)]
NAN, INF = math.nan, math.inf
MAX_GROWTH_KIB = 300 * 2**10

NUMBERS: list[Any] = [
    *(-(2**63) - 1, -(2**63), -2, -1, 0, 1, 2, 3, 16, 20, 21, 128, 129, 16_384, 16_385),
    *(2**63 - 1, 2**63, 10**400, -2.5, -2.0, -1e-9, 0.0, 5e-324, 1e-6, 0.5, 1.0, 1.0000001, 2.0, 2.5, 1e300),
    *(NAN, INF, -INF, True, False),
]
OTHERS: list[Any] = [*RequestOutputKind, None, "", "a", "\ud800", b"a", object(), int, 1j, "a" * 100_000]
LISTS: list[Any] = [
    *(
        [],
        [""],
        ["a"],
        [None],
        [b"a"],
        [["a"]],
        [0],
        [-1],
        [319],
        [320],
        [2**63],
        [10**400],
        [NAN],
        [True],
        [1.0],
    ),
    *(
        ["a"] * 128,
        ["a"] * 129,
        ["a" * 5000],
        ["ab" * 2000] * 20,
        [1] * 129,
        list(range(65_536)),
        range(10**12),
    ),
]
MAPPINGS: list[Any] = [
    *(
        {},
        {1: NAN},
        {1: INF},
        {1: 1e300},
        {1: -1e300},
        {-1: 1.0},
        {320: 1.0},
        {2**63: 1.0},
        {"1": 1.0},
        {1: "a"},
    ),
    *({None: None}, dict.fromkeys(range(320), -1e300), dict.fromkeys(range(1025), 0.0), {"regex": "("}),
    *(
        {"max_pattern_size": 2, "min_count": 2},
        {"max_pattern_size": 2**63, "min_count": 2},
        {"min_count": -1},
    ),
]
VALUES = [*NUMBERS, *OTHERS, *LISTS, *MAPPINGS]


@asynccontextmanager
async def tiny_engine(folder: Path, **fields: Any) -> AsyncIterator[Engine]:
    small = {"max_model_len": 48, "num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 16}
    async with triolet.open_engine(model=str(folder), dtype="float32", **(small | fields)) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("model"), with_tokenizer=True)


async def outcome(engine: Engine, fields: dict[str, Any]) -> str:
    """What becomes of a request; any other exception than these two is an error of ours."""
    try:
        params = SamplingParams(**({"max_tokens": 3} | fields))
        with trio.fail_after(300):
            output = await engine.complete([1, 2, 3], params)
    except InvalidRequest as error:
        return "refused" if error.field and len(str(error)) < 1000 else f"badly refused: {error}"
    except RequestFailed as error:
        return f"failed: {error.reason}"
    reasons = {answer.finish_reason for answer in output.outputs}
    return "served" if reasons <= {"stop", "length", "repetition"} else f"ended by {reasons}"


@pytest.mark.parametrize(
    "field",
    one_in(6, FIELDS),
)
async def test_a_field_of_any_value_is_refused_by_name_or_served(folder: Path, field: str) -> None:
    seen: dict[str, int] = {}
    async with tiny_engine(folder) as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a temperature that is raised
            for value in VALUES:
                ending = await outcome(engine, {field: value})
                assert ending in ("refused", "served"), f"{field}={shown(value)}: {ending}"
                seen[ending] = seen.get(ending, 0) + 1
        after = await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
        assert after.finish_reason in ("length", "stop")
        statistics = engine.statistics()
        assert (statistics.num_requests_live, statistics.kv_blocks_in_use, statistics.num_restarts) == (
            0,
            0,
            0,
        )
    assert seen["refused"] > 0
    assert seen["served"] > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MAX_GROWTH_KIB


async def test_what_the_operator_allows_is_all_that_is_served(folder: Path) -> None:
    limits = {"max_n": 2, "max_logprobs": 1, "max_stop_strings": 1, "max_logit_bias": 1, "max_bad_words": 1}
    too_much: dict[str, dict[str, Any]] = {
        "max_n": {"n": 3},
        "max_logprobs": {"logprobs": 2},
        "max_stop_strings": {"stop": ["a", "b"]},
        "max_logit_bias": {"logit_bias": {1: 1.0, 2: 1.0}},
        "max_bad_words": {"bad_words": ["a", "b"]},
    }
    async with tiny_engine(folder, **limits) as engine:
        for limit, fields in too_much.items():
            with pytest.raises(InvalidParams, match=limit):
                await engine.complete([1, 2, 3], SamplingParams(**fields))
        assert engine.statistics().num_requests_live == 0
