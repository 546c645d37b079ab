"""Names of a server's model: several at a time, its hub id, and none in a request."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor
from tests.server.routes.harness import HELLO, serving
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.pooling_params import PoolingInfo

CHAT = "/v1/chat/completions"
MESSAGES = HELLO["messages"]
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "HELLO", "max_tokens": 2},
    "/v1/responses": {"input": "HELLO", "max_output_tokens": 2},
}
POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": ("embed", {"input": "HELLO"}),
    "/pooling": ("embed", {"input": "HELLO"}),
    "/classify": ("classify", {"input": "HELLO"}),
    "/score": ("embed", {"text_1": "A", "text_2": "B"}),
    "/rerank": ("embed", {"query": "A", "documents": ["B"]}),
}
NAMELESS: tuple[dict[str, Any], ...] = ({}, {"model": None}, {"model": ""})


class PoolingExecutor(FakeExecutor):
    """Runner of a model with a task of pooling."""

    def __init__(self, task: str) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self._task = task

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        info = await super().start(on_progress)
        return attrs.evolve(info, pooling=PoolingInfo(tasks=(self._task,), size=2, labels=("no", "yes")))


async def test_a_model_is_listed_under_all_its_names_and_answers_to_each_with_the_first(
    autojump_clock: MockClock,
) -> None:
    async with serving(model="some/where", served_model_name=("short", "other")) as scene:
        names = [card["id"] for card in (await scene.get("/v1/models")).json["data"]]
        assert names == ["short", "other", "some/where"]
        for name in names:
            assert (await scene.get(f"/v1/models/{name}")).json["id"] == name
            for path, payload in REQUESTS.items():
                assert (await scene.post(path, {**payload, "model": name})).json["model"] == "short"


async def test_the_root_of_a_model_is_its_hub_id_and_never_its_folder() -> None:
    async with serving(model="some/where", served_model_name="short") as scene:
        assert (await scene.get("/v1/models/short")).json["root"] == "some/where"
    async with serving(model="/nowhere/", served_model_name="short") as scene:  # where the fake model lies
        assert (await scene.get("/v1/models/short")).json["root"] == "short"
    async with serving() as scene:
        assert (await scene.get("/v1/models/triolet-nano")).json["root"] == "triolet-nano"


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("fields", NAMELESS, ids=str)
async def test_a_request_without_a_model_is_answered_by_the_servers_own(
    path: str, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with serving(served_model_name=("first", "second")) as scene:
        answer = await scene.post(path, {**REQUESTS[path], **fields})
        assert (answer.status, answer.json["model"]) == (200, "first")
        streamed = await scene.post(path, {**REQUESTS[path], **fields, "stream": True})
        named = [event.get("response", event).get("model", "first") for event in streamed.events]
        assert set(named) == {"first"}


@pytest.mark.parametrize("path", POOLED)
@pytest.mark.parametrize("fields", NAMELESS, ids=str)
async def test_a_pooled_request_without_a_model_is_answered_by_the_servers_own(
    path: str, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    task, payload = POOLED[path]
    async with serving(PoolingExecutor(task), served_model_name="first") as scene:
        answer = await scene.post(path, {**payload, **fields})
        assert (answer.status, answer.json["model"]) == (200, "first")
