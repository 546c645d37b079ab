"""`triolet ps` and `stop`: the models of a running server, with an operator's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
import trio

from triolet.cli.models.hub_cache import size_text
from triolet.client.address import ServerAddress, ServerError
from triolet.client.http import get_json, request

PATH = "/operator/models"


def show_running(address: ServerAddress, *, as_json: bool) -> None:
    """Print the models of a server with their states.

    Raises:
        ServerError: the server cannot be reached, or the key is no operator's.
    """
    answer = trio.run(get_json, address, PATH)
    match answer:
        case {"data": list(models)} if all(isinstance(one, dict) and "id" in one for one in models):
            pass
        case _:
            raise ServerError(f"{address}{PATH} must list models; got something else")
    if as_json:
        for model in models:
            click.echo(json.dumps(model))
        return
    width = max(len(name) for name in ("MODEL", *(one["id"] for one in models)))
    click.echo(f"{'MODEL':<{width}}  {'STATE':<9}  {'REQUESTS':>8}  {'SIZE':>9}  UNLOADED")
    for model in models:
        size = size_text(model["size_bytes"]) if model.get("size_bytes") else ""
        state, num_requests = model.get("state"), model.get("num_requests")
        click.echo(
            f"{model['id']:<{width}}  {state:<9}  {num_requests:>8}  {size:>9}  {_stay(model)}".rstrip()
        )


def stop_model(address: ServerAddress, model: str) -> None:
    """Have a server unload a model.

    Raises:
        ServerError: the server cannot be reached, refuses the key, or has no such model that could be unloaded.
    """
    answer = trio.run(_stop, address, model)
    if not answer.get("stopping"):
        click.echo(f"{model} was not loaded ({answer.get('state')})")
    elif num_requests := answer.get("num_requests"):
        click.echo(f"{model} is unloaded when its {num_requests} requests have ended")
    else:
        click.echo(f"{model} is unloaded")


async def _stop(address: ServerAddress, model: str) -> Mapping[str, Any]:
    async with request(address, f"{PATH}/stop", {"model": model}) as answer:
        body: Mapping[str, Any] = json.loads(await answer.body())
        return body


def _stay(model: Mapping[str, Any]) -> str:
    """Return when a model is unloaded."""
    unloads_in_s = model.get("unloads_in_s")
    if unloads_in_s is not None:
        return f"in {unloads_in_s:.0f} s"
    return "never" if model.get("state") == "loaded" and not model.get("num_requests") else ""
