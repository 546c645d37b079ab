"""Reply of a model as it streams: text so far, counts and times, and their output on a screen, as a line or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import attrs
import trio

from triolet.cli.screen import DIM, Screen, Spinner
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.request import FinishReason, RequestStatus

if TYPE_CHECKING:
    from triolet.engine.engine import Engine
    from triolet.engine.token_stream import TokenStream

Show = Callable[[str], None]
Reason = Callable[[], str]


@attrs.define(kw_only=True)
class Reply:
    """Part of an answer that has arrived."""

    asked_s: float  # time of the request; seconds, `trio.current_time()`
    text: str = ""
    reasoning: str = ""  # apart from the text
    num_output_tokens: int = 0  # of text and reasoning
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # From the request to the first output, tokenization and queue included; None before.
    ttft_s: float | None = None
    total_s: float = 0.0
    num_prompt_tokens: int = 0  # of the prompt, after the chat template
    num_cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    decode_s: float | None = None  # from the first token to the last; None where it is not known

    def add(self, output: RequestOutput, now: float) -> None:
        """Append the next output of a stream.

        Args:
            output: of kind `RequestOutputKind.DELTA`.
            now: time of the output, on the clock of `asked_s`.
        """
        self.count(output, now)
        self.text += output.outputs[0].text

    def count(self, output: RequestOutput, now: float) -> None:
        """Note everything of an output but its text."""
        answer = output.outputs[0]
        self.token_ids += answer.token_ids
        self.num_output_tokens = len(self.token_ids)
        self.finish_reason, self.stop_reason = answer.finish_reason, answer.stop_reason
        self.arrived(now)  # the first output comes with the first token
        self.num_prompt_tokens, self.num_cached_tokens = (
            len(output.prompt_token_ids),
            output.num_cached_tokens,
        )
        self.decode_s = output.metrics.last_token_ts - output.metrics.first_token_ts

    def arrived(self, now: float) -> None:
        """Note the time of a piece of the reply."""
        if self.ttft_s is None:
            self.ttft_s = now - self.asked_s
        self.total_s = now - self.asked_s

    def start_over(self) -> None:
        """Forget the text: the same question was asked again."""
        self.text = self.reasoning = ""

    @property
    def answer(self) -> str:
        """Text for the conversation: behind reasoning, without the empty lines that follow it."""
        return self.text.lstrip("\n") if self.reasoning else self.text

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of generation after the first token; None with fewer than two tokens."""
        if not self.decode_s or self.decode_s < 0 or self.num_output_tokens < 2:
            return None
        return (self.num_output_tokens - 1) / self.decode_s

    def stats_line(self) -> str:
        """Return a line such as `TTFT 41 ms · 128 tok · 92.3 tok/s · prompt 57 (48 cached)`."""
        parts = [f"TTFT {_duration(self.ttft_s)}"] if self.ttft_s is not None else []
        parts.append(f"{self.num_output_tokens} tok")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts.append(f"prompt {self.num_prompt_tokens}{cached}")
        return " · ".join(parts)

    def as_json(self, model: str) -> dict[str, Any]:
        """Return the reply as an object for programs; seconds, and tokens per second."""
        return {
            "model": model,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_output_tokens,
                "cached_tokens": self.num_cached_tokens,
            },
            "metrics": {
                "ttft_s": _rounded(self.ttft_s),
                "total_s": _rounded(self.total_s),
                "tokens_per_s": _rounded(self.tokens_per_s),
            },
        }


async def receive(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    reply: Reply,
    show: Show,
    on_admission: Callable[[TokenStream], None] = lambda stream: None,
) -> None:
    """Stream an answer into `reply` and pass each piece of text to `show`; cancellation aborts the request."""
    # `show` prints what is new, and nothing twice.
    params = attrs.evolve(params, output_kind=RequestOutputKind.DELTA)
    async with engine.generate(prompt, params) as stream:
        on_admission(stream)
        async for output in stream:
            reply.add(output, trio.current_time())
            show(output.text)


@attrs.define(eq=False)
class ReplyScreen:
    """Reply on a screen: a spinner until its first text, reasoning in dim letters, and the answer.

    The spinner runs while the screen is entered and nothing has come, and again after a notice.
    """

    screen: Screen
    nursery: trio.Nursery  # for the spinner
    shows_reasoning: bool = True  # False tells only that the model reasons, in the spinner
    _spinner: Spinner | None = attrs.field(default=None, init=False)
    _reason: Reason = attrs.field(default=lambda: "", init=False)
    _num_reasoning_chars: int = attrs.field(default=0, init=False)
    _has_text: bool = attrs.field(default=False, init=False)
    _is_reasoning: bool = attrs.field(default=False, init=False)  # the last line on the screen is reasoning

    def __enter__(self) -> Self:
        self._spin()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.screen.end_reply()

    def text(self, text: str) -> None:
        if self._num_reasoning_chars and not self._has_text:
            text = text.lstrip("\n")  # which stand between reasoning and answer
        if not text:
            return
        self._has_text = True
        self._stop()
        if self._is_reasoning:
            self._is_reasoning = False
            self.screen.end_reply()
            self.screen.say("")
        self.screen.reply(text)

    def reasoning(self, text: str) -> None:
        self._num_reasoning_chars += len(text)
        if not self.shows_reasoning:
            self.waits_for(lambda: f"thinking, {self._num_reasoning_chars} characters")
            return
        self._stop()
        if not self._is_reasoning:
            self._is_reasoning = True
            self.screen.remark("Thinking:")
            text = text.lstrip("\n")
        self.screen.reply(text, style=DIM)

    def waits_for(self, reason: Reason) -> None:
        self._reason = reason
        if self._spinner is not None:
            self._spinner.reason = reason

    def notice(self, sentence: str) -> None:
        self._stop()
        self.screen.end_reply()
        self.screen.remark(sentence)
        self._spin()

    def starts_over(self) -> None:
        self._has_text, self._is_reasoning, self._num_reasoning_chars = False, False, 0

    def event(self, event: Mapping[str, Any]) -> None:
        """Ignore an event: what it says has come as text, reasoning or a reason to wait."""

    def _spin(self) -> None:
        self._spinner = self.screen.spinner(self.nursery)
        self._spinner.reason = self._reason

    def _stop(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


class Unshown:
    """Reply that is not shown while it comes."""

    def text(self, text: str) -> None:
        """Ignore the text: `Reply` has it."""

    def reasoning(self, text: str) -> None:
        """Ignore the reasoning: `Reply` has it."""

    def waits_for(self, reason: Reason) -> None:
        """Ignore the reason to wait."""

    def notice(self, sentence: str) -> None:
        """Ignore the sentence."""

    def starts_over(self) -> None:
        """Ignore the new beginning: `Reply` has begun anew."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Ignore the event."""


@attrs.frozen
class EventLines(Unshown):
    """Reply as lines of JSON, one for each event of the server; notices go to another screen."""

    screen: Screen
    notices: Screen

    def event(self, event: Mapping[str, Any]) -> None:
        self.screen.out.write(json.dumps(event, ensure_ascii=False) + "\n")  # not wrapped, for other programs
        self.screen.out.flush()

    def notice(self, sentence: str) -> None:
        self.notices.remark(sentence)


def explain_waiting(engine: Engine, waits_for: Callable[[Reason], None]) -> Callable[[TokenStream], None]:
    """Return the function that, called with an admitted stream, tells `waits_for` what its first text waits for."""

    def explain(stream: TokenStream) -> None:
        waits_for(lambda: reason_to_wait(stream.progress, engine.statistics().restarting))

    return explain


def reason_to_wait(progress: RequestProgress, restarting: tuple[str, ...]) -> str:
    """Return what a reply without a token waits for; empty where that is not known.

    Args:
        restarting: actors that are being restarted.
    """
    if restarting:
        return "the engine restarts"
    if progress.status is RequestStatus.WAITING and not progress.num_computed_tokens:
        return f"waiting, number {progress.queue_position + 1} in line"
    share = progress.num_computed_tokens / max(1, progress.num_prompt_tokens)
    return f"reading the prompt {int(100 * share)} %"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
