"""`triolet chat`: a conversation at the terminal, or one answer."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio

from triolet.cli import slash
from triolet.cli.backends.base import ChatBackend, ReplyRequest, ReplySink
from triolet.cli.backends.events import RefusedByServer
from triolet.cli.backends.local import LocalBackend
from triolet.cli.backends.remote import RemoteBackend
from triolet.cli.client.address import ServerAddress, ServerError
from triolet.cli.conversation import ChatHistory
from triolet.cli.failures import INTERRUPTED, one_line
from triolet.cli.interrupts import Interrupts
from triolet.cli.prompt import Key, Prompt, history_in, without_mark
from triolet.cli.reply import EventLines, Reply, ReplyScreen
from triolet.cli.screen import Screen
from triolet.cli.slash import ChatState, Next
from triolet.cli.terminal import quiet_keyboard
from triolet.config.engine import EngineConfig
from triolet.core.request.request import FinishReason
from triolet.errors import InvalidRequest, Overloaded, PromptTooLong, RequestFailed, TrioletError

FORGIVEN = (InvalidRequest, Overloaded, RequestFailed, RefusedByServer, ServerError)
"""Failures of one request, after which the model and the conversation go on."""

OpenBackend = Callable[[AsyncExitStack], Awaitable[ChatBackend]]


def local(config: EngineConfig) -> OpenBackend:
    """Return the opener of an engine in this process."""

    async def opened(stack: AsyncExitStack) -> ChatBackend:
        return await LocalBackend.open(stack, config)

    return opened


def remote(address: ServerAddress, model: str | None, *, vendor_events: bool) -> OpenBackend:
    """Return the opener of a server, and of one of its models."""

    async def opened(stack: AsyncExitStack) -> ChatBackend:
        backend = await RemoteBackend.open(address, model)
        backend.wants_vendor_events = vendor_events
        return backend

    return opened


@attrs.frozen(kw_only=True)
class ChatOptions:
    """Flags of `triolet chat` beside those of the engine."""

    system: str | None = None  # the system prompt; None for none
    sampling: Mapping[str, Any] = attrs.field(factory=dict)  # values of the user, by field
    stats: bool = True  # True shows a line of timings after each reply
    json_events: bool = False  # True writes the events of the server in place of replies


def answer(question: str, open_backend: OpenBackend, options: ChatOptions) -> None:
    """Print the reply to one question as it comes; the timings, if wanted, go to stderr."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            backend = await open_backend(stack)
            nursery = await stack.enter_async_context(trio.open_nursery())
            conversation = ChatHistory(options.system)
            conversation.ask(question)
            request = ReplyRequest(messages=conversation.messages(), sampling=options.sampling)
            screen, reply = Screen.of(sys.stdout), Reply(asked_s=trio.current_time())
            if options.json_events:
                await backend.reply(request, reply, EventLines(screen, Screen.of(sys.stderr)))
            else:
                # A program that reads the answer gets nothing else.
                with ReplyScreen(screen, nursery, shows_reasoning=screen.live) as shown:
                    await backend.reply(request, reply, shown)
            if options.stats:
                Screen.of(sys.stderr).remark(reply.stats_line())

    Interrupts().run(body)


def converse(open_backend: OpenBackend, options: ChatOptions) -> None:
    """Run a conversation until the user leaves."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            # Before the engine loads: what is typed meanwhile is read by the first prompt.
            stack.enter_context(quiet_keyboard())
            backend = await open_backend(stack)
            nursery = await stack.enter_async_context(trio.open_nursery())
            state = ChatState(
                conversation=ChatHistory(options.system),
                defaults=backend.defaults,
                knows_defaults=backend.knows_defaults,
                sampling=dict(options.sampling),
                stats=options.stats,
            )
            screen = Screen.of(sys.stdout)
            prompt = Prompt(colour=screen.colour, commands=tuple(slash.COMMANDS), history=history_in())
            chat = Chat(backend, state, screen, prompt, interrupts, nursery, json_events=options.json_events)
            await chat.run()

    Interrupts().run(body)


@attrs.define
class Chat:
    """Conversation at the terminal."""

    backend: ChatBackend
    state: ChatState
    screen: Screen
    prompt: Prompt
    interrupts: Interrupts
    nursery: trio.Nursery  # for the spinner
    json_events: bool = False

    async def run(self) -> None:
        """Read messages and stream replies until the user leaves."""
        self._greet()
        self.interrupts.conversing = True
        while (typed := await self._ask()) is not Key.END:
            # Twice in a row leaves; once is too easily meant for a reply that has just ended.
            if typed is Key.INTERRUPT:
                self._interrupted_at_the_prompt()
            elif slash.is_command(typed):
                if await self._command(typed) is Next.LEAVE:
                    return
            elif typed:
                self.state.conversation.ask(without_mark(typed))
                await self._reply()

    def _greet(self) -> None:
        self.screen.remark(" · ".join(self.backend.facts))
        self.screen.remark("/help shows the commands · Ctrl-C stops a reply · Ctrl-D leaves")
        self.screen.say("")

    async def _ask(self) -> str | Key:
        with self.interrupts.waking(self.prompt.interrupt):
            return await self.prompt.ask()

    def _interrupted_at_the_prompt(self) -> None:
        if self.interrupts.is_second(trio.current_time()):
            self.interrupts.leave(INTERRUPTED)
        else:
            self.screen.remark("Ctrl-C again, or Ctrl-D, leaves.")

    async def _command(self, text: str) -> Next:
        effect = slash.run(text, self.state)
        for line in effect.say:
            self.screen.remark(line)
        if effect.complaint is not None:
            self.screen.complain(effect.complaint)
        if effect.next is Next.REPLY:
            await self._reply()
        elif effect.next is Next.ASK:
            self.screen.say("")
        return effect.next

    async def _reply(self) -> None:
        reply = Reply(asked_s=trio.current_time())
        try:
            stopped = await self._stream(reply)
        except FORGIVEN as error:
            self.screen.complain(_explained(error))
            # Removed if it has no answer, so that questions and answers alternate.
            self._take_back_if_unanswered()
        else:
            # What was stopped before its first word is no reply.
            if reply.text or not stopped:
                self.state.conversation.answer(reply.text)
            self._comment(reply, stopped=stopped)
        self.screen.say("")

    async def _stream(self, reply: Reply) -> bool:
        """Show the reply as it comes; return True if Ctrl-C stopped it."""
        scope = trio.CancelScope()
        with self.interrupts.stopping(scope), scope:
            if self.json_events:
                await self._receive(reply, EventLines(self.screen, self.screen))
            else:
                with ReplyScreen(self.screen, self.nursery) as shown:
                    await self._receive(reply, shown)
        return scope.cancelled_caught

    async def _receive(self, reply: Reply, sink: ReplySink) -> None:
        request = ReplyRequest(messages=self.state.conversation.messages(), sampling=self.state.sampling)
        await self.backend.reply(request, reply, sink)

    def _comment(self, reply: Reply, *, stopped: bool) -> None:
        if stopped and reply.text:
            self.screen.remark("Stopped; what there is of the reply stays in the conversation.")
        elif stopped:
            self.screen.remark("Stopped before the first word.")
            self._take_back_if_unanswered()
        elif not reply.text:
            self.screen.remark("(an empty reply)")
        if reply.finish_reason is FinishReason.LENGTH:
            self.screen.remark(self._why_cut_off(reply))
        if self.state.stats and reply.num_output_tokens:
            self.screen.remark(reply.stats_line())

    def _why_cut_off(self, reply: Reply) -> str:
        limit = self.state.params().max_tokens
        if limit is not None and reply.num_output_tokens >= limit:
            return f"Cut off at max_tokens = {limit}; /set max_tokens none lifts it."
        length = self.backend.max_model_len
        context = "the context" if length is None else f"the context of {length} tokens"
        return f"Cut off: {context} is full; /clear begins a new conversation."

    def _take_back_if_unanswered(self) -> None:
        exchanges = self.state.conversation.exchanges
        if exchanges and exchanges[-1].answer is None:
            exchanges.pop()
            self.screen.remark("Your message was taken back; the Up key brings it again.")


def _explained(error: TrioletError) -> str:
    if isinstance(error, PromptTooLong):
        return (
            f"The conversation has become too long: {error.num_prompt_tokens} tokens, and the context has "
            f"{error.max_model_len}. /clear begins a new one, /undo takes back the last exchange."
        )
    return one_line(error)
