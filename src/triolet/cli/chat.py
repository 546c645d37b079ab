"""`triolet chat`: a conversation at the terminal, or one answer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import attrs
import trio

from triolet.cli import slash
from triolet.cli.conversation import ChatHistory
from triolet.cli.failures import INTERRUPTED, one_line
from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.cli.prompt import Key, Prompt, history_in, without_mark
from triolet.cli.reply import Reply, receive_on
from triolet.cli.screen import Screen
from triolet.cli.slash import ChatState, Next
from triolet.cli.terminal import quiet_keyboard
from triolet.config.engine import EngineConfig
from triolet.core.request.request import FinishReason
from triolet.errors import InvalidRequest, Overloaded, PromptTooLong, RequestFailed, TrioletError

if TYPE_CHECKING:
    from triolet.engine.engine import Engine

FORGIVEN = (InvalidRequest, Overloaded, RequestFailed)
"""Failures of one request, after which the engine and the conversation go on."""


def answer(
    question: str, system: str | None, sampling: Mapping[str, Any], config: EngineConfig, *, stats: bool
) -> None:
    """Print the reply to one question as it comes; the timings, if wanted, go to stderr."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            engine = await opened(stack, config)
            nursery = await stack.enter_async_context(trio.open_nursery())
            conversation = ChatHistory(system)
            conversation.ask(question)
            params = attrs.evolve(engine.default_sampling_params(), **sampling)
            screen, reply = Screen.of(sys.stdout), Reply(asked_s=trio.current_time())
            await receive_on(screen, nursery, engine, conversation.messages(), params, reply)
            if stats:
                Screen.of(sys.stderr).remark(reply.stats_line())

    Interrupts().run(body)


def converse(system: str | None, sampling: Mapping[str, Any], config: EngineConfig, *, stats: bool) -> None:
    """Run a conversation until the user leaves."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            # Before the engine loads: what is typed meanwhile is read by the first prompt.
            stack.enter_context(quiet_keyboard())
            engine = await opened(stack, config)
            nursery = await stack.enter_async_context(trio.open_nursery())
            state = ChatState(
                conversation=ChatHistory(system),
                defaults=engine.default_sampling_params(),
                sampling=dict(sampling),
                stats=stats,
            )
            screen = Screen.of(sys.stdout)
            prompt = Prompt(colour=screen.colour, commands=tuple(slash.COMMANDS), history=history_in())
            await Chat(engine, state, screen, prompt, interrupts, nursery).run()

    Interrupts().run(body)


@attrs.define
class Chat:
    """Conversation at the terminal."""

    engine: Engine
    state: ChatState
    screen: Screen
    prompt: Prompt
    interrupts: Interrupts
    nursery: trio.Nursery  # for the spinner

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
        info = self.engine.model_info
        parts = (
            self.engine.model_name,
            info.backend,
            info.dtype,
            info.device,
            f"{self.engine.max_model_len} tokens",
        )
        self.screen.remark(" · ".join(parts))
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
        messages, params, scope = self.state.conversation.messages(), self.state.params(), trio.CancelScope()
        with self.interrupts.stopping(scope), scope:
            await receive_on(self.screen, self.nursery, self.engine, messages, params, reply)
        return scope.cancelled_caught

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
        if self.state.stats and reply.token_ids:
            self.screen.remark(reply.stats_line())

    def _why_cut_off(self, reply: Reply) -> str:
        limit = self.state.params().max_tokens
        if limit is not None and len(reply.token_ids) >= limit:
            return f"Cut off at max_tokens = {limit}; /set max_tokens none lifts it."
        return f"Cut off: the context of {self.engine.max_model_len} tokens is full; /clear begins a new conversation."

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
