"""`triolet generate`: continue one prompt and leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio

from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.cli.reply import Reply, ReplyScreen, explain_waiting, receive
from triolet.cli.screen import Screen
from triolet.config.engine import EngineConfig


def run(prompt: str, sampling: Mapping[str, Any], config: EngineConfig, *, as_json: bool) -> None:
    """Print the answer to `prompt` as it comes or, as JSON, at the end."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            engine = await opened(stack, config)
            nursery = await stack.enter_async_context(trio.open_nursery())
            params = attrs.evolve(engine.default_sampling_params(), **sampling)
            reply = Reply(asked_s=trio.current_time())
            if as_json:
                await receive(engine, prompt, params, reply, lambda text: None)
                print(json.dumps(reply.as_json(engine.model_name), ensure_ascii=False), flush=True)
            else:
                with ReplyScreen(Screen.of(sys.stdout), nursery) as shown:
                    explain = explain_waiting(engine, shown.waits_for)
                    await receive(engine, prompt, params, reply, shown.text, explain)

    Interrupts().run(body)
