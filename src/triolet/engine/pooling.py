"""Pooled requests: the scope of one, and many of them with a bounded number in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import trio

from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, pooled_output
from triolet.core.request.prompt import Prompt
from triolet.engine.submission import Submission
from triolet.engine.token_stream import TokenStream
from triolet.errors import InvalidPrompt


class PoolingStream:
    """Stream of the one output of a pooled request; made by `Engine.encode`. Leaving its scope aborts the request."""

    def __init__(self, submission: Submission, stream: TokenStream) -> None:
        self._submission, self._stream = submission, stream

    @property
    def request_id(self) -> str:
        """Id that the caller gave, or that the engine made."""
        return self._submission.request_id

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def close(self) -> None:
        """Abort the request, as leaving the scope does. Synchronous, and harmless when repeated."""
        self._stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PoolingRequestOutput[PoolingOutput]:
        await self._stream.__anext__()
        return pooled_output(self._submission.entries[0])

    async def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Wait for the output, and return it, also if it was read before.

        Raises:
            RequestFailed: the request could not be finished, or ended early: by a deadline, `abort` or a shutdown.
            EngineDead: the engine has died.
        """
        async for _ in self._stream:
            pass
        return pooled_output(self._submission.entries[0])


def is_one_prompt(prompts: object) -> bool:
    """Return False for a list of texts or of lists of token ids, which are several prompts."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence) or not prompts:
        return True
    return not all(isinstance(prompt, str) for prompt in prompts) and not all(
        isinstance(prompt, Sequence) and not isinstance(prompt, str) for prompt in prompts
    )


async def encode_all(
    encode: Callable[[Prompt], PoolingStream], prompts: Sequence[Prompt], most: int
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the outputs of several prompts, in their order. The first failure ends the others, and is raised.

    Args:
        encode: makes the stream of a prompt.
        most: requests in the engine at one time, so that a long list does not fill its queue.
    Raises:
        InvalidPrompt: there is no prompt.
    """
    if not prompts:
        raise InvalidPrompt("prompts must hold at least one prompt; got none", field="prompt", got=prompts)
    outputs: dict[int, PoolingRequestOutput[PoolingOutput]] = {}
    failures: list[Exception] = []

    async def work(left: Iterator[tuple[int, Prompt]], scope: trio.CancelScope) -> None:
        try:
            for place, prompt in left:
                async with encode(prompt) as stream:
                    outputs[place] = await stream.output()
        except Exception as error:  # raised again below, without the nursery's group around it
            failures.append(error)
            scope.cancel()

    left: Any = enumerate(prompts)
    async with trio.open_nursery() as nursery:
        for _ in range(min(most, len(prompts))):
            nursery.start_soon(work, left, nursery.cancel_scope)
    if failures:
        raise failures[0]
    return [outputs[place] for place in range(len(prompts))]
