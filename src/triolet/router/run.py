"""`triolet route`: a router as a program."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence

import trio

from triolet.client.address import ServerAddress
from triolet.config.server import GatewayConfig
from triolet.router.service import Router

FIRST_CHECKS_S = 5.0  # that the URL is not told while some engine has not answered


def run(addresses: Sequence[ServerAddress], config: GatewayConfig) -> None:
    """Route until a signal comes.

    Args:
        addresses: of the engines.
        config: where to listen, and the limits on clients.
    Raises:
        ConfigError: the address or port cannot be used.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    trio.run(_serve, Router(addresses, config), restrict_keyboard_interrupt_to_checkpoints=True)


async def _serve(router: Router) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            url: str = await nursery.start(router.run)
            await router.engines.wait_for_first_checks(FIRST_CHECKS_S)
            print(url, flush=True)  # noqa: T201  for the program that started this one
            async for _ in signals:
                break
            await router.drain()
            nursery.cancel_scope.cancel()
