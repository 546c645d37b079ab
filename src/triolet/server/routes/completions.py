"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio
from starlette.requests import Request
from starlette.responses import Response

from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import SamplingParams
from triolet.engine.token_stream import TokenStream
from triolet.protocol.completions import CompletionRequest, Echo, TextChoice, text_completion
from triolet.server.routes.app_context import context_of
from triolet.server.routes.errors import refusals
from triolet.server.routes.generation_route import GenerationHandler
from triolet.server.routes.request_body import read_json
from triolet.server.routes.sse import EventSender


async def completions(request: Request) -> Response:
    """Continue one text or several."""
    context = context_of(request)
    defaults = context.engine.default_sampling_params()

    def planned_body(payload: dict[str, Any]) -> tuple[CompletionRequest, SamplingParams]:
        body = CompletionRequest.of(payload)
        return body, body.params(defaults)

    # Forms of structured outputs may be long, and are checked where the body is parsed.
    body, params = await read_json(request, planned_body)
    body = context.named(body)
    return await _Completion.for_request(request, context, body, params).response(request)


@attrs.define(eq=False)
class _Completion(GenerationHandler[CompletionRequest]):
    ID_PREFIX = "cmpl"

    choices: dict[int, TextChoice] = attrs.field(factory=dict, init=False)

    async def complete(self) -> dict[str, Any]:
        choices = []
        with refusals(self.body), self.context.acquire_slot(self.owner):
            async with AsyncExitStack() as stack:
                # One after the other: all compute meanwhile, and outputs that are not read yet are merged.
                for place, stream in enumerate(await self._enter(stack)):
                    async for output in stream:
                        choices += self._add(place, output)
        self.check_whole(choices)
        return text_completion(**self.frame, choices=choices, usage=self.usage.body())

    async def stream(self, events: EventSender) -> None:
        with refusals(self.body), self.context.acquire_slot(self.owner):
            async with AsyncExitStack() as stack:
                streams = await self._enter(stack)
                await events.start()
                # One stream needs no task beside this one, and has one place in the queue to tell of.
                if len(streams) == 1:
                    self.tell_vendor_events(events, streams[0])
                    async for output in streams[0]:
                        await self._send(events, 0, output)
                else:
                    await self._send_all(events, streams)
        if self.body.includes_usage:
            await events.send(text_completion(**self.frame, choices=[], usage=self.usage.body()))

    def empty_chunk(self) -> dict[str, Any]:
        return text_completion(**self.frame, choices=[], usage=None)

    async def _enter(self, stack: AsyncExitStack) -> list[TokenStream]:
        """Open one stream per prompt; all are admitted, or none."""
        generate = self.context.engine.generate
        return [
            await stack.enter_async_context(generate(prompt, self.params, **self.arguments))
            for prompt in self.body.engine_prompts
        ]

    async def _send_all(self, events: EventSender, streams: list[TokenStream]) -> None:
        """Send the chunks of several prompts as they come; only one task sends."""
        # Without a buffer: readers wait for a slow client, and the engine merges their outputs.
        sending, receiving = trio.open_memory_channel[tuple[int, RequestOutput]](0)
        failed: list[Exception] = []

        async def read(place: int, nursery: trio.Nursery) -> None:
            try:
                async for output in streams[place]:
                    await sending.send((place, output))
            except Exception as error:  # raised again below, without the nursery's group around it
                failed.append(error)
                nursery.cancel_scope.cancel()

        async def read_all() -> None:
            with sending:
                async with (
                    trio.open_nursery() as readers
                ):  # a nursery of its own: a chunk being sent is not cancelled
                    for place in range(len(streams)):
                        readers.start_soon(read, place, readers)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all)
            try:
                async for place, output in receiving:
                    await self._send(events, place, output)
            except Exception as error:  # likewise
                failed.append(error)
                nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]

    async def _send(self, events: EventSender, place: int, output: RequestOutput) -> None:
        self.check_streamed(output)
        for choice in self._add(place, output):
            usage = self.usage.body() if self.body.includes_usage_in_chunks else None
            await events.send(text_completion(**self.frame, choices=[choice], usage=usage))

    def _add(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Add an output; return the choices that changed."""
        n = self.body.n
        if place * n not in self.choices:
            self.usage.add_prompt(output)
            echo = Echo.of(output, self._decode) if self.body.echo else Echo()
            for index in range(place * n, place * n + n):
                self.choices[index] = TextChoice(
                    index=index,
                    num_top=self.body.num_top,
                    echo=echo,
                    generates=self.body.generates,
                    shows_ids=self.body.return_tokens_as_token_ids,
                    prompt_token_ids=output.prompt_token_ids if self.body.return_token_ids else None,
                )
        if self.body.generates:
            self.usage.add(output)
        return [self.choices[place * n + completion.index].add(completion) for completion in output.outputs]

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.context.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)
