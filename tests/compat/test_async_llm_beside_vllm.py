"""`AsyncLLM` and vLLM's own, in one run: the same model, the same requests, the same program.

Needs a Python that has vLLM 0.32 (its CPU build will do), named by BENCH_VLLM as for the benchmarks; what it shows is
recorded nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet.compat as names
from tests.compat import async_user
from tests.compat.async_user import ENGINE, MAX_MODEL_LEN
from tests.model.tiny import make_model
from triolet.compat import AsyncEngineArgs, AsyncLLM

VLLM = os.environ.get("BENCH_VLLM")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="BENCH_VLLM names no Python that has vLLM"),
]

TEXT = "Once upon a time"
IDS = {"prompt_token_ids": list(range(50))}
LONG: dict[str, Any] = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True}

REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": TEXT, "max_tokens": 8},
    "the default length": {"prompt": TEXT},
    "deltas": {**LONG, "kind": "DELTA"},
    "the last output alone": {**LONG, "kind": "FINAL_ONLY"},
    "one token": {"prompt": TEXT, "max_tokens": 1},
    "ids": {"prompt": IDS, "max_tokens": 4},
    "ids that are in the cache": {"prompt": IDS, "max_tokens": 4},
    "ids whose cache is not read": {"prompt": IDS, "max_tokens": 4, "skip_reading_prefix_cache": True},
    "ids of another salt": {"prompt": {**IDS, "cache_salt": "a"}, "max_tokens": 4},
    "a mapping": {"prompt": {"prompt": TEXT}, "max_tokens": 4},
    "up to the end of the context": {"prompt": IDS, "max_tokens": None, "ignore_eos": True},
    "log-probabilities": {"prompt": TEXT, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2},
    "log-probabilities in deltas": {
        "prompt": TEXT,
        "max_tokens": 5,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "kind": "DELTA",
    },
    "no log-probabilities but the token's": {"prompt": TEXT, "max_tokens": 5, "logprobs": 0},
    "no text": {**LONG, "detokenize": False},
    "penalties": {**LONG, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "biases": {**LONG, "logit_bias": {"65": 4.0, "66": -3.0}},
    "some tokens": {**LONG, "allowed_token_ids": [65, 66, 67, 90]},
    "bad words": {**LONG, "bad_words": ["A", "b", " c"]},
    "every fourth output": {**LONG, "stream_interval": 4, "kind": "DELTA"},
    "aborted amid": {**LONG, "abort_after": 3, "kind": "DELTA"},
    "left amid": {**LONG, "leave_after": 3},
    "nothing": {"prompt": ""},
    "no ids": {"prompt": {"prompt_token_ids": []}},
    "too long": {"prompt": {"prompt_token_ids": [65] * MAX_MODEL_LEN}},
    "outside the vocabulary": {"prompt": {"prompt_token_ids": [65, 100_000]}},
    "a wrong parameter": {"prompt": TEXT, "temperature": -1},
    "n of a greedy request": {"prompt": TEXT, "n": 2, "max_tokens": 4},
}

# Requests that stop at something that the model says in LONG.
AT_A_TEXT: dict[str, dict[str, Any]] = {
    "a stop string": {},
    "a stop string that is shown": {"include_stop_str_in_output": True},
    "a stop string in deltas": {"kind": "DELTA"},
    "a stop string after some tokens": {"min_tokens": 50},
}
AT_A_TOKEN: dict[str, dict[str, Any]] = {
    "a stop token": {},
    "a stop token with log-probabilities": {"logprobs": 1},
    "a stop token after some tokens": {"min_tokens": 50},
}
NAMES = (*REQUESTS, *AT_A_TEXT, *AT_A_TOKEN)
FACTS = (
    *(
        "check_health",
        "do_log_stats",
        "errored",
        "get_supported_tasks",
        "is_running",
        "is_sleeping",
        "is_paused",
    ),
    *("is_stopped", "is_tracing_enabled", "max_model_len", "reset_prefix_cache", "tokens", "text"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    return make_model("qwen3", path, with_tokenizer=True)


async def with_ours(folder: Path, requests: list[dict[str, Any]]) -> dict[str, Any]:
    arguments = AsyncEngineArgs(str(folder), **ENGINE, num_gpu_blocks_override=256)
    async with AsyncLLM.from_engine_args(arguments) as engine:
        seen = await async_user.use(engine, names, requests)
    known: dict[str, Any] = json.loads(json.dumps(seen))
    return known


def with_vllm(folder: Path, requests: list[dict[str, Any]]) -> dict[str, Any]:
    assert VLLM is not None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [VLLM, async_user.__file__, str(folder)],
        input=json.dumps(requests) + "\n",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seen: dict[str, Any] = json.loads(ran.stdout)
    return seen


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is seen of ours and of vLLM's: of each request by its name, and of the engine."""
    [long] = trio.run(with_ours, folder, [LONG])["answers"][0]["seen"]
    text, token_ids = long["outputs"][0]["text"], long["outputs"][0]["token_ids"]
    stop = re.findall("[!-~]{2}", text[:40])[-1]
    requests = [
        *REQUESTS.values(),
        *({**LONG, "stop": [stop], **fields} for fields in AT_A_TEXT.values()),
        *({**LONG, "stop_token_ids": [token_ids[6]], **fields} for fields in AT_A_TOKEN.values()),
    ]
    seen = trio.run(with_ours, folder, requests), with_vllm(folder, requests)
    named = [{**one, **dict(zip(NAMES, one["answers"], strict=True))} for one in seen]
    return named[0], named[1]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "aborted amid"])
def test_a_request_is_seen_as_it_is_in_vllm(name: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, theirs = (one[name] for one in both)
    errors = (ours.pop("error"), theirs.pop("error"))
    if name == "too long":  # the sentence here is the one of vLLM's HTTP routes, which clients look for
        assert all(f"{MAX_MODEL_LEN}" in sentence and "length" in sentence for sentence in errors)
    elif all(errors):  # the sentence of one may go on
        shorter, longer = sorted(errors, key=len)
        assert longer.startswith(shorter.removesuffix("."))
    else:
        assert errors == (None, None)
    assert ours == rounded(theirs)


def test_an_aborted_request_ends_as_it_does_in_vllm(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """How many tokens there were by then, the clock says."""
    answers = [one["aborted amid"]["seen"][0]["outputs"][0] for one in both]
    assert [answer["finish_reason"] for answer in answers] == ["abort", "abort"]
    assert [one["aborted amid"]["num_unfinished"] for one in both] == [0, 0]
    assert len({tuple(answer["token_ids"][:3]) for answer in answers}) == 1


@pytest.mark.parametrize("name", FACTS)
def test_the_engine_says_of_itself_what_vllms_says(
    name: str, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    ours, theirs = (one[name] for one in both)
    assert ours == theirs


def rounded(seen: Any) -> Any:
    """Log-probabilities to a place that two ways of adding up agree in."""
    match seen:
        case float():
            return pytest.approx(seen, abs=0.011)
        case dict():
            return {key: rounded(value) for key, value in seen.items()}
        case list():
            return [rounded(value) for value in seen]
        case _:
            return seen
