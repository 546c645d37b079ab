"""Rounds of `triolet bench serve`: every rate against every server, with a progress bar and a report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import triolet
from triolet.cli.backends.remote import RemoteBackend
from triolet.cli.failures import CommandFailure
from triolet.cli.interrupts import Interrupts
from triolet.cli.load_test.measure import Load, measure, summary
from triolet.cli.load_test.targets import Route, ServerTarget, Timeline
from triolet.cli.screen import Screen
from triolet.client.address import ServerAddress, ServerError

REPORTED: Final = {
    "time to first token": "ttft_ms",
    "time per output token": "tpot_ms",
    "between pieces": "itl_ms",
    "whole answer": "e2e_ms",
}


@attrs.frozen(kw_only=True)
class ServeBenchmark:
    """What is to be measured."""

    urls: tuple[str, ...]  # ws and wss mean the WebSocket, http and https the route
    route: Route  # over HTTP
    rates: tuple[float, ...]  # requests a second
    load: Load
    output_len: int  # tokens in each answer
    ignores_eos: bool
    model: str | None = None  # by default the first one of each server
    api_key: str | None = attrs.field(default=None, repr=False)


def run(benchmark: ServeBenchmark, *, as_json: bool) -> None:
    """Measure, and print a report or one JSON object per line.

    Raises:
        CommandFailure: in a round no request was answered.
        ServerError: a server cannot be reached.
    """
    results: list[dict[str, Any]] = []

    async def body(interrupts: Interrupts) -> None:
        # All servers are asked first: a wrong address ends the run before the long part of it.
        for target in [await target_at(benchmark, url) for url in benchmark.urls]:
            await _warm_up(target)
            for rate in benchmark.rates:
                results.append(await _round(benchmark, target, rate, salt=str(len(results))))
                _print(results[-1], as_json=as_json)

    Interrupts().run(body)
    if failed := [result["url"] for result in results if not result["completed"]]:
        raise CommandFailure(f"no request to {', '.join(dict.fromkeys(failed))} was answered")


async def target_at(benchmark: ServeBenchmark, url: str) -> ServerTarget:
    """Return the server at a URL, with its route and the name of its model.

    Raises:
        ServerError: it cannot be asked for its models.
    """
    address = ServerAddress.of(url, benchmark.api_key)
    # A model that is named need not be listed: some servers load what is asked for, or have no list.
    model = benchmark.model or (await RemoteBackend.open(address)).model
    return ServerTarget(
        url=url,
        address=address,
        route=Route.WEBSOCKET if url.startswith("ws") else benchmark.route,
        model=model,
        output_len=benchmark.output_len,
        ignores_eos=benchmark.ignores_eos,
    )


async def _warm_up(target: ServerTarget) -> None:
    """Send one request that does not count; its failure ends the run."""
    try:
        await target.ask("Hello", Timeline(0.0))
    except ServerError as error:
        if "ignore_eos" in str(error):
            raise CommandFailure(f"{error}; --no-ignore-eos leaves the field out") from error
        raise


async def _round(benchmark: ServeBenchmark, target: ServerTarget, rate: float, salt: str) -> dict[str, Any]:
    load = attrs.evolve(benchmark.load, rate=rate)
    with _progress(f"{target.url} · {target.route.value} · {_shown(rate)}", load.num_prompts) as show:
        timelines = await measure(target.ask, load.prompts(salt), load.due_times(), show)
    return {
        "url": target.url,
        "route": target.route.value,
        "model": target.model,
        "rate": None if rate == float("inf") else rate,
        "num_prompts": load.num_prompts,
        "input_len": load.input_len,
        "output_len": target.output_len,
        "ignore_eos": target.ignores_eos,
        "seed": load.seed,
        "client": f"triolet {triolet.__version__}",
        **summary(timelines),
    }


@contextmanager
def _progress(description: str, total: int) -> Iterator[Any]:
    """Show a bar on a terminal in this context; gives the function that moves it."""
    if sys.stderr is None or not Screen.of(sys.stderr).colour:
        yield lambda timelines: None
        return
    bar = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[live]} live"),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total, live=0)

        def show(timelines: Sequence[Timeline]) -> None:
            over = sum(one.end_s is not None or one.error is not None for one in timelines)
            bar.update(task, completed=over, live=len(timelines) - over)

        yield show


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    text = json.dumps(result, ensure_ascii=False) if as_json else "\n".join([*report(result), ""])
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(result: dict[str, Any]) -> list[str]:
    """Return the lines of the printed report on one round."""
    rate = float("inf") if result["rate"] is None else result["rate"]
    lines = [
        f"{result['url']} · {result['route']} · {result['model']} · {_shown(rate)}",
        f"{'requests':26}{result['completed']:,} answered, {result['failed']:,} failed",
        f"{'duration, s':26}{result['duration_s']:,.2f}",
        f"{'tokens':26}{result['prompt_tokens']:,} of prompts, {result['output_tokens']:,} of answers",
        f"{'requests/s':26}{result['request_throughput']:,.2f}",
        f"{'output tokens/s':26}{result['output_throughput']:,.1f}",
    ]
    for name, key in REPORTED.items():
        if result[key]:
            values = " · ".join(f"{share} {value:,.1f}" for share, value in result[key].items())
            lines.append(f"{name + ', ms':26}{values}")
    return lines + [f"{'failed':26}{count} times: {sentence}" for sentence, count in result["errors"].items()]


def _shown(rate: float) -> str:
    return "all at once" if rate == float("inf") else f"{rate:g} a second"
