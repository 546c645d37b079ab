"""`triolet route`: a router as a program."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from triolet.client.address import ServerAddress
from triolet.config.server import GatewayConfig
from triolet.router.service import Router
from triolet.server.transport.serving_process import prepare_to_serve
from triolet.server.transport.shutdown import StopSignals

FIRST_CHECKS_S = 5.0  # that the URL is not told while some engine has not answered


def run(addresses: Sequence[ServerAddress], config: GatewayConfig) -> None:
    """Route until a signal comes: the first one drains, the second one ends the program at once.

    Args:
        addresses: of the engines.
        config: where to listen, the access rules, and the limits on clients.
    Raises:
        ConfigError: the address or port cannot be used.
        SystemExit: with 130 after a Ctrl-C; SIGTERM ends the program with 0.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    prepare_to_serve()
    signals = StopSignals()
    trio.run(serve, Router(addresses, config), signals, restrict_keyboard_interrupt_to_checkpoints=True)
    signals.raise_for_interrupt()


async def serve(router: Router, signals: StopSignals) -> None:
    """Serve until a signal has come and the router has drained.

    Raises:
        ConfigError: the address or port cannot be used.
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        url: str = await nursery.start(router.run)
        await router.engines.wait_for_first_checks(FIRST_CHECKS_S)
        print(url, flush=True)  # noqa: T201  for the program that started this one
        await signals.came.wait()
        await router.drain()
        nursery.cancel_scope.cancel()
