"""Long lists of pooled requests over HTTP: bounded in the engine, and refused with a time when it is full."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, assert_all_blocks_back
from tests.server.routes.harness import MODEL, Answer, serving
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.pooling_params import PoolingInfo

WISH = {"model": MODEL, "input": ["HI"] * 2048}


class PoolingExecutor(FakeExecutor):
    """A runner of a model with embeddings."""

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        info = await super().start(on_progress)
        return attrs.evolve(info, pooling=PoolingInfo(tasks=("embed",), size=2))


@pytest.mark.slow
async def test_two_thousand_inputs_never_fill_the_engine_and_a_full_one_says_when_to_come_back(
    autojump_clock: MockClock,
) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_queued_requests": 8, "max_num_batched_tokens": 64}
    async with (
        serving(PoolingExecutor(64, 4), with_gateway=False, **limits) as scene,
        trio.open_nursery() as nursery,
    ):
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await scene.post("/v1/embeddings", WISH))

        nursery.start_soon(ask)
        await trio.sleep(3.5 * STEP_S)
        assert scene.engine.statistics().num_requests_live == 8
        leaving = scene.call("POST", "/v1/embeddings", WISH)
        nursery.start_soon(leaving.run)
        await trio.sleep(0.1 * STEP_S)
        assert scene.engine.statistics().num_requests_live == 16
        refused = await scene.post("/v1/embeddings", WISH)
        assert refused.error[:2] == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        leaving.leave()
        while not answers:
            await trio.sleep(STEP_S)
            assert scene.engine.statistics().num_requests_live <= 16
        assert [one["index"] for one in answers[0].json["data"]] == list(range(2048))
        assert_all_blocks_back(scene.engine)
