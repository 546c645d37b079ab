"""`triolet chat`: a conversation at the terminal, or one answer."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import attrs
import click
import trio

from triolet.cli import slash
from triolet.cli.backends.base import ChatBackend, ReplyRequest
from triolet.cli.backends.events import RefusedByServer
from triolet.cli.backends.local import LocalBackend, OtherModels
from triolet.cli.backends.remote import RemoteBackend
from triolet.cli.conversation import ChatFileError, ChatHistory, state_folder, unused_path
from triolet.cli.failures import INTERRUPTED, CommandFailure, one_line
from triolet.cli.interrupts import Interrupts
from triolet.cli.prompt import Key, Prompt, history_in, without_mark
from triolet.cli.reply import EventLines, Reply, ReplyScreen, Unshown
from triolet.cli.screen import Screen
from triolet.cli.slash import ChatState, Next, ThinkMode
from triolet.cli.terminal import quiet_keyboard
from triolet.client.address import ServerAddress, ServerError
from triolet.config.engine import EngineConfig
from triolet.core.request.request import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    TrioletError,
)

FORGIVEN = (InvalidRequest, Overloaded, RequestFailed, RefusedByServer, ServerError)
"""Failures of one request, after which the model and the conversation go on."""

OpenBackend = Callable[[AsyncExitStack], Awaitable[ChatBackend]]


def local(config: EngineConfig, other_models: OtherModels) -> OpenBackend:
    """Return the opener of an engine in this process, and of the models that /model names."""

    async def opened(stack: AsyncExitStack) -> ChatBackend:
        return await LocalBackend.open(stack, config, other_models)

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
    form: StructuredOutputsParams | None = None  # form of every answer; None for text
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
            request = ReplyRequest(
                messages=conversation.messages(), sampling=options.sampling, form=options.form
            )
            screen, reply = Screen.of(sys.stdout), Reply(asked_s=trio.current_time())
            if options.json_events:
                await backend.reply(request, reply, EventLines(screen, Screen.of(sys.stderr)))
            else:
                # A program that reads the answer gets nothing else.
                with ReplyScreen(screen, nursery, shows_reasoning=screen.live) as shown:
                    await backend.reply(request, reply, shown)
            if options.stats:
                Screen.of(sys.stderr).remark(reply.stats_line())
            # The events say it themselves.
            if reply.finish_reason not in (FinishReason.STOP, None) and not options.json_events:
                _tell_cut_off(reply, options.form)

    Interrupts().run(body)


def _tell_cut_off(reply: Reply, form: StructuredOutputsParams | None) -> None:
    """Tell the reader of stderr that an answer is not whole; with a form it is of no use to a program."""
    sentence = f"the reply was cut off after {reply.num_output_tokens} tokens ({reply.finish_reason})"
    if form is not None:
        raise CommandFailure(f"{sentence}, and its form is not complete")
    click.echo(f"triolet: warning: {sentence}", err=True)


def converse(open_backend: OpenBackend, options: ChatOptions) -> None:
    """Run a conversation until the user leaves."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            # Before the engine loads: what is typed meanwhile is read by the first prompt.
            stack.enter_context(quiet_keyboard())
            unsaved = stack.enter_context(Unsaved())
            backend = await open_backend(stack)
            nursery = await stack.enter_async_context(trio.open_nursery())
            state = unsaved.state = ChatState(
                conversation=ChatHistory(options.system),
                defaults=backend.defaults,
                knows_defaults=backend.knows_defaults,
                sampling=dict(options.sampling),
                stats=options.stats,
                model=backend.model,
                can_think=backend.thinking_switch is not None,
            )
            screen = Screen.of(sys.stdout)
            prompt = Prompt(
                colour=screen.colour, commands=tuple(slash.COMMANDS), history=history_in(state_folder())
            )
            await Chat(backend, state, screen, prompt, interrupts, nursery, options).run()

    Interrupts().run(body)


@attrs.define
class Unsaved:
    """Context that writes the conversation to a file if an exception ends it, such as that of a dead engine."""

    state: ChatState | None = None  # None while the model loads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        # Ctrl-C and SIGTERM, which cancel, are the user's own doing.
        if isinstance(error, Exception) and self.state is not None and self.state.conversation.exchanges:
            click.echo(f"triolet: {_kept(self.state)}", err=True)


def _kept(state: ChatState) -> str:
    """Write the conversation to a file of the state folder; return the sentence that says where."""
    path = unused_path(state_folder())
    number = slash.counted(len(state.conversation.exchanges), "exchange")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        state.saved().write(path)
    except (ChatFileError, OSError) as error:
        return f"the conversation, {number}, is lost; {one_line(error)}"
    return f"the conversation, {number}, is saved; in the next chat /load {path} goes on with it"


@attrs.define
class Chat:
    """Conversation at the terminal."""

    backend: ChatBackend
    state: ChatState
    screen: Screen
    prompt: Prompt
    interrupts: Interrupts
    nursery: trio.Nursery  # for the spinner
    options: ChatOptions

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
                await self._answer_to(typed)

    async def _answer_to(self, typed: str) -> None:
        self.state.forks.clear()
        self.state.conversation.ask(without_mark(typed))
        await self._reply()

    def _greet(self) -> None:
        self.screen.remark(" · ".join(self.backend.facts))
        self.screen.remark("/help shows the commands · Ctrl-C stops a reply · Ctrl-D leaves")
        self.screen.say("")

    async def _ask(self, text: str = "", *, in_editor: bool = False) -> str | Key:
        with self.interrupts.waking(self.prompt.interrupt):
            return await self.prompt.ask(text, in_editor=in_editor)

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
        match effect.next:
            case Next.REPLY:
                await self._reply()
            case Next.EDIT:
                await self._edit(effect.argument)
            case Next.FORK:
                await self._fork(int(effect.argument))
            case Next.LIST_MODELS:
                await self._guarded(self._list_models)
            case Next.SWITCH_MODEL:
                await self._guarded(partial(self._switch_model, effect.argument))
            case Next.ASK:
                self.screen.say("")
        return effect.next

    async def _edit(self, question: str) -> None:
        """Open a message in an editor; if it is sent, it takes the place of the last exchange."""
        typed = await self._ask(question, in_editor=True)
        if isinstance(typed, Key) or not typed:
            self.screen.remark("Nothing was sent; the conversation stays as it is.")
            self.screen.say("")
            return
        exchanges = self.state.conversation.exchanges
        replaced, num_before = self.state.conversation.take_back(), len(exchanges)
        await self._answer_to(typed)
        if replaced is not None and len(exchanges) == num_before:  # it got no answer
            exchanges.append(replaced)
            self.screen.remark("The exchange that it was to replace stays.")
            self.screen.say("")

    async def _guarded(self, act: Callable[[], Awaitable[None]]) -> None:
        """Carry something out that Ctrl-C may stop and that may fail."""
        scope = trio.CancelScope()
        try:
            with self.interrupts.stopping(scope), scope:
                await act()
        except (*FORGIVEN, ModelError, ConfigError) as error:
            self.screen.complain(_explained(error))
        except click.ClickException as error:  # of a preset: it ends a command, and not the chat
            self.screen.complain(error.message)
        self.screen.say("")

    async def _list_models(self) -> None:
        for entry in await self.backend.models():
            mark = "*" if entry.is_present else " "
            self.screen.remark(f"{mark} {entry.name}  {entry.remark}".rstrip())

    async def _switch_model(self, name: str) -> None:
        preset = await self.backend.switch(name)
        self.state.model = self.backend.model
        self.state.defaults = self.backend.defaults
        self.state.can_think = self.backend.thinking_switch is not None
        self.screen.remark(" · ".join(self.backend.facts))
        if self.state.thinking.wish is not None and not self.state.can_think:
            self.state.thinking = ThinkMode.AUTO
            self.screen.remark(f"{self.state.model} has no thinking switch; what /think set is undone.")
        if preset is not None:
            for line in slash.take_settings(preset, self.state):
                self.screen.remark(line)

    async def _fork(self, number: int) -> None:
        """Make several replies to the last message at once, and show them side by side."""
        replies = [Reply(asked_s=trio.current_time()) for _ in range(number)]
        failures: list[TrioletError] = []

        async def reply_to(reply: Reply, sampling: Mapping[str, Any]) -> None:
            try:
                await self.backend.reply(self._request(sampling), reply, Unshown())
            except FORGIVEN as error:
                failures.append(error)

        seed = self.state.sampling.get("seed")
        scope, spinner = trio.CancelScope(), self.screen.spinner(self.nursery)
        spinner.reason = lambda: " · ".join(f"{len(reply.text)} characters" for reply in replies)
        with self.interrupts.stopping(scope), scope:
            async with trio.open_nursery() as nursery:
                for offset, reply in enumerate(replies):
                    seeded = {} if seed is None else {"seed": seed + offset}
                    nursery.start_soon(reply_to, reply, {**self.state.sampling, **seeded})
        spinner.stop()
        self.state.forks = [reply.answer for reply in replies if reply.answer]
        self.screen.columns([f"{place}. {text}" for place, text in enumerate(self.state.forks, 1)])
        for error in failures:
            self.screen.complain(_explained(error))
        if self.state.forks:
            self.state.conversation.answer(self.state.forks[0])
            self.state.last_reasoning = next(reply.reasoning for reply in replies if reply.answer)
            self.screen.remark("The conversation goes on with reply 1; /pick N takes another one.")
        self.screen.say("")

    async def _reply(self) -> None:
        reply = Reply(asked_s=trio.current_time())
        try:
            stopped = await self._stream(reply)
        except FORGIVEN as error:
            self.screen.complain(_explained(error))
            # Removed if it has no answer, so that questions and answers alternate.
            self._take_back_if_unanswered()
            if isinstance(error, ServerError) and self.state.conversation.exchanges:
                self.screen.remark("The conversation is still here; /save FILE keeps it for another chat.")
        except BaseException:
            # The chat ends: what there is of a first reply is saved with the conversation.
            if reply.text and self.state.conversation.exchanges[-1].answer is None:
                self.state.conversation.answer(reply.answer)
            raise
        else:
            # What was stopped before its first word is no reply.
            if reply.text or not stopped:
                self.state.conversation.answer(reply.answer)
            self._comment(reply, stopped=stopped)
        self.screen.say("")

    async def _stream(self, reply: Reply) -> bool:
        """Show the reply as it comes; return True if Ctrl-C stopped it."""
        scope = trio.CancelScope()
        with self.interrupts.stopping(scope), scope:
            request = self._request(self.state.sampling)
            if self.options.json_events:
                await self.backend.reply(request, reply, EventLines(self.screen, self.screen))
            else:
                shows = self.state.thinking is not ThinkMode.HIDE
                with ReplyScreen(self.screen, self.nursery, shows_reasoning=shows) as shown:
                    await self.backend.reply(request, reply, shown)
        self.state.last_reasoning = reply.reasoning
        return scope.cancelled_caught

    def _request(self, sampling: Mapping[str, Any]) -> ReplyRequest:
        return ReplyRequest(
            messages=self.state.conversation.messages(),
            sampling=sampling,
            thinks=self.state.thinking.wish,
            form=self.options.form,
        )

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
        if (exchange := self.state.conversation.take_back_unanswered()) is not None:
            files = "; its files go with the next message" if exchange.attached else ""
            self.screen.remark(f"Your message was taken back; the Up key brings it again{files}.")


def _explained(error: TrioletError) -> str:
    if isinstance(error, PromptTooLong):
        return (
            f"The conversation has become too long: {error.num_prompt_tokens} tokens, and the context has "
            f"{error.max_model_len}. /clear begins a new one, /undo takes back the last exchange."
        )
    return one_line(error)
