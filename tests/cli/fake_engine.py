"""An engine that answers from a script; `python -m tests.cli.fake_engine chat` is the command on top of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import trio

import triolet
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import LoadProgress
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.errors import EngineDead, ModelNotFound, PromptTooLong, RequestFailed

Prompt = str | list[dict[str, str]] | dict[str, Any]
STORY = "Once upon a time there was a little fox who wanted to see the other side of the hill. "


@attrs.define
class FakeStream:
    """Outputs of one request, which reads 2 of its 5 tokens and no more before the first one."""

    outputs: AsyncIterator[RequestOutput]

    @property
    def progress(self) -> RequestProgress:
        return RequestProgress(
            status=RequestStatus.RUNNING, queue_position=0, num_prompt_tokens=5, num_computed_tokens=2
        )

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self.outputs


@attrs.frozen
class FakeTokenizer:
    """Tokenizer of a model that thinks; one token is one character, and none is special."""

    template_source: str = ""
    tool_template_source: str = ""
    template_variables: frozenset[str] = frozenset({"enable_thinking"})
    thinking_prompt: str = ""

    def tokenize(self, message: Tokenize) -> Tokenized:
        assert message.prompt is None
        return Tokenized(None, (), (), tuple(tuple(map(ord, mark)) for mark in message.marks))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


@attrs.define
class FakeEngine:
    """Answers `count to N`, `story` and failures by name; echoes the rest. One word is one token.

    Args:
        config: what it was opened with.
        step_s: seconds from one token to the next.
        asked: every prompt that came, in order.
        params: the sampling parameters that came with each.
    """

    config: EngineConfig
    step_s: float = 0.002
    asked: list[Prompt] = attrs.field(factory=list)
    params: list[SamplingParams] = attrs.field(factory=list)
    max_model_len: int = 1024
    reasoning_parser: str | None = None
    tokenizer: FakeTokenizer = attrs.field(factory=FakeTokenizer)

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            folder="/nowhere",
            architecture="LlamaForCausalLM",
            backend="native",
            vocab_size=4096,
            max_position=1024,
            max_model_len=1024,
            num_kv_blocks=64,
            block_size=16,
            dtype="float32",
            device="cpu",
        )

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)

    @asynccontextmanager
    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[FakeStream]:
        self.asked.append(prompt)
        messages: Any = prompt["messages"] if isinstance(prompt, dict) else prompt
        self.params.append(params)
        assert params.output_kind is RequestOutputKind.DELTA
        question = messages if isinstance(messages, str) else messages[-1]["content"]
        if "too long" in question:
            raise PromptTooLong(1100, self.max_model_len)
        if "kill the engine" in question:
            raise EngineDead("the engine gave up after 3 crashes")
        try:
            yield FakeStream(self._outputs(prompt, question, params))
        finally:
            if "stubborn" in question:
                with trio.CancelScope(shield=True):
                    await trio.sleep(60.0)

    def statistics(self) -> SimpleNamespace:
        question = self.asked[-1][-1]["content"] if isinstance(self.asked[-1], list) else self.asked[-1]
        return SimpleNamespace(restarting=("model_runner",) if "restart" in question else ())

    async def _outputs(
        self, prompt: Prompt, question: str, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        pieces = _answer(question)
        limit = len(pieces) + 1 if params.max_tokens is None else params.max_tokens
        start = trio.current_time()
        num_prompt_tokens = 57 if isinstance(prompt, str) else 10 * len(prompt)
        for position, piece in enumerate(
            [*pieces, ""][:limit]
        ):  # the empty one stands for the end-of-sequence token
            await trio.sleep(
                60.0 if "wait" in question else 0.5 if "slow" in question and not position else self.step_s
            )
            if "fail" in question and position == 2:
                raise RequestFailed("r-1", "a step failed twice")
            if "die midway" in question and position == 2:
                raise EngineDead("the engine gave up after 3 crashes")
            at_end, at_limit = position == len(pieces), position == limit - 1
            reason = FinishReason.STOP if at_end else FinishReason.LENGTH if at_limit else None
            yield RequestOutput(
                request_id="r-1",
                prompt=None,
                prompt_token_ids=tuple(range(num_prompt_tokens)),
                outputs=(CompletionOutput(index=0, text=piece, token_ids=(position,), finish_reason=reason),),
                finished=reason is not None,
                metrics=RequestMetrics(
                    num_generation_tokens=position + 1,
                    queued_ts=start,
                    first_token_ts=start + 0.041,
                    last_token_ts=start + 0.041 + position / 92.3,
                ),
                num_cached_tokens=48 if num_prompt_tokens > 48 else 0,
            )


def _answer(question: str) -> list[str]:
    words = question.lower().split()
    if "count" in words:
        numbers = [int(word) for word in words if word.isdigit()]
        return _pieces(", ".join(str(number) for number in range(1, numbers[-1] + 1)) + ".")
    if "story" in words:
        return _pieces(STORY * 40)
    if "ponder" in words:
        return _pieces("<think>Hmm, let me see.</think>\n\nYes.")
    if "nothing" in words:
        return []
    return _pieces(f"You said: {question}")


def _pieces(text: str) -> list[str]:
    """Words with the space before them, as a tokenizer would have it."""
    words = text.split(" ")
    return [words[0], *(f" {word}" for word in words[1:])]


@asynccontextmanager
async def open_fake_engine(
    config: EngineConfig,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
    opened: list[FakeEngine] | None = None,
    step_s: float = 0.002,
) -> AsyncIterator[FakeEngine]:
    """In place of `triolet.open_engine`; every engine is noted in `opened`."""
    if config.model == "missing":
        raise ModelNotFound("missing: neither a folder with a config.json nor a model that the hub knows")
    for done in range(5):
        if on_progress is not None:
            on_progress(LoadProgress("weights", done * 2**20, 4 * 2**20))
        await trio.sleep(60.0 if config.model == "endless" else 0.01)
    engine = FakeEngine(config, step_s=step_s)
    if opened is not None:
        opened.append(engine)
    with trio.CancelScope():  # closed by its own task and in order, as the nursery of an engine has to be
        yield engine


if __name__ == "__main__":
    from triolet.cli import main

    vars(triolet)["open_engine"] = partial(open_fake_engine, step_s=0.02)
    main(prog_name="triolet")
