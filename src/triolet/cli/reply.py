"""Reply of the engine as it streams: text so far, counts and times, and their output as a line or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import trio

from triolet.cli.screen import Screen
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus

if TYPE_CHECKING:
    from triolet.engine.engine import Engine
    from triolet.engine.token_stream import TokenStream

Show = Callable[[str], None]


@attrs.define(kw_only=True)
class Reply:
    """Part of an answer that has arrived."""

    asked_s: float  # time of the request; seconds, `trio.current_time()`
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # From the request to the first output, tokenization and queue included; None before.
    ttft_s: float | None = None
    total_s: float = 0.0
    num_prompt_tokens: int = 0  # of the prompt, after the chat template
    num_cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    metrics: RequestMetrics = attrs.field(factory=RequestMetrics)

    def add(self, output: RequestOutput, now: float) -> None:
        """Append the next output of a stream.

        Args:
            output: of kind `RequestOutputKind.DELTA`.
            now: time of the output, on the clock of `asked_s`.
        """
        answer = output.outputs[0]
        self.text += answer.text
        self.token_ids += answer.token_ids
        self.finish_reason, self.stop_reason = answer.finish_reason, answer.stop_reason
        # The first output comes with the first token.
        if self.ttft_s is None:
            self.ttft_s = now - self.asked_s
        self.total_s = now - self.asked_s
        self.num_prompt_tokens, self.num_cached_tokens = (
            len(output.prompt_token_ids),
            output.num_cached_tokens,
        )
        self.metrics = output.metrics

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of generation after the first token; None with fewer than two tokens."""
        elapsed_s = self.metrics.last_token_ts - self.metrics.first_token_ts
        return (len(self.token_ids) - 1) / elapsed_s if len(self.token_ids) > 1 and elapsed_s > 0 else None

    def stats_line(self) -> str:
        """Return a line such as `TTFT 41 ms · 128 tok · 92.3 tok/s · prompt 57 (48 cached)`."""
        parts = [f"TTFT {_duration(self.ttft_s)}"] if self.ttft_s is not None else []
        parts.append(f"{len(self.token_ids)} tok")
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
                "completion_tokens": len(self.token_ids),
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


async def receive_on(
    screen: Screen,
    nursery: trio.Nursery,
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    reply: Reply,
) -> None:
    """Stream an answer onto a screen, with a spinner, run in `nursery`, until the first text."""
    spinner = screen.spinner(nursery)

    def show(text: str) -> None:
        if text:
            spinner.stop()
            screen.reply(text)

    def explain(stream: TokenStream) -> None:
        spinner.reason = lambda: reason_to_wait(stream.progress, engine.statistics().restarting)

    try:
        await receive(engine, prompt, params, reply, show, explain)
    finally:
        spinner.stop()
        screen.end_reply()


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
