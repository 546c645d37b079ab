"""`triolet bench serve`: arrivals and figures on virtual time, and every route over loopback."""

from __future__ import annotations

import itertools
import math

import pytest
import trio
from click.testing import CliRunner
from trio.testing import MockClock

from tests.e2e.test_serving import serving_whole
from triolet.cli import main
from triolet.cli.load_test.measure import Load, measure, summary
from triolet.cli.load_test.run import ServeBenchmark, report, target_at
from triolet.cli.load_test.targets import Route, ServerTarget, Timeline
from triolet.client.address import ServerAddress, ServerError


def test_arrivals_have_the_rate_and_are_the_same_for_every_server() -> None:
    load = Load(num_prompts=4000, input_len=3, rate=5.0)
    due = load.due_times()
    assert due == load.due_times()
    assert due[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    # A Poisson process: mean and deviation of the gaps are both 1 / rate.
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.2, rel=0.08)
    assert Load(num_prompts=3, input_len=3, rate=math.inf).due_times() == [0.0] * 3


def test_rounds_have_other_prompts_of_the_same_length() -> None:
    load = Load(num_prompts=20, input_len=30, rate=1.0)
    assert load.prompts("0") == load.prompts("0")
    assert not set(load.prompts("0")) & set(load.prompts("1"))
    assert {len(prompt.split()) for prompt in load.prompts("1")} == {30}


async def test_requests_are_sent_when_due_and_failures_are_counted_apart(autojump_clock: MockClock) -> None:
    async def ask(prompt: str, timeline: Timeline) -> None:
        await trio.sleep(2.0)  # longer than the gaps: a closed loop would send the second one later
        if prompt == "bad":
            raise ServerError("no room")
        for _ in range(5):
            timeline.arrived(trio.current_time())
            await trio.sleep(0.1)
        timeline.num_prompt_tokens, timeline.num_output_tokens = 7, 5
        timeline.end_s = trio.current_time()

    num_changes = 0

    def change(_: object) -> None:
        nonlocal num_changes
        num_changes += 1

    timelines = await measure(ask, ["a", "bad", "b"], [0.0, 0.5, 1.0], change)
    assert [one.sent_s - timelines[0].sent_s for one in timelines] == pytest.approx([0.0, 0.5, 1.0])
    assert num_changes == 6
    found = summary(timelines)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"no room": 1})
    assert found["duration_s"] == pytest.approx(3.5)
    assert found["output_throughput"] == pytest.approx(10 / 3.5, abs=1e-3)
    for key, expected_ms in (("ttft_ms", 2000), ("itl_ms", 100), ("tpot_ms", 100), ("e2e_ms", 2500)):
        assert found[key] == dict.fromkeys(("p50", "p90", "p99"), pytest.approx(expected_ms))
    lines = report({"url": "u", "route": "chat", "model": "m", "rate": 2.0, **found})
    assert lines[0] == "u · chat · m · 2 a second"
    assert lines[-1].split() == ["failed", "1", "times:", "no", "room"]


async def test_every_route_is_read_to_its_end_with_the_servers_counts() -> None:
    async with serving_whole() as (engine, _, _, port):
        address = ServerAddress.of(f"127.0.0.1:{port}")
        for route in Route:
            target = ServerTarget(url="", address=address, route=route, model=engine.model_name, output_len=3)
            timeline = Timeline(trio.current_time())
            await target.ask("Hello", timeline)
            assert timeline.num_output_tokens == 3, route
            assert (timeline.num_prompt_tokens, timeline.error) == (5, None)
            assert timeline.end_s is not None
            assert timeline.piece_s
        unknown = ServerTarget(url="", address=address, route=Route.CHAT, model="other", output_len=3)
        with pytest.raises(ServerError, match="answers 404"):
            await unknown.ask("Hello", Timeline(0.0))


@pytest.mark.parametrize(
    ("url", "route"), [("ws://127.0.0.1:9", Route.WEBSOCKET), ("127.0.0.1:9", Route.COMPLETIONS)]
)
async def test_the_url_chooses_the_route_and_a_named_model_need_not_be_listed(url: str, route: Route) -> None:
    benchmark = ServeBenchmark(
        urls=(url,),
        route=Route.COMPLETIONS,
        rates=(1.0,),
        load=Load(num_prompts=1, input_len=1, rate=1.0),
        output_len=1,
        ignores_eos=True,
        model="m",
    )
    target = await target_at(benchmark, url)  # nothing listens there
    assert (target.model, target.route) == ("m", route)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "Missing option '--url'"),
        (("--url", "ftp://x"), "--url must be a URL"),
        (("--url", "ws://x", "--rate", "nan"), "--rate must be a number above 0"),
        (("--url", "http://127.0.0.1:9"), "cannot connect to http://127.0.0.1:9/v1"),
    ],
)
def test_a_wrong_command_line_or_server_is_one_line(arguments: tuple[str, ...], error: str) -> None:
    found = CliRunner().invoke(main, ["bench", "serve", *arguments])
    assert error in found.output
    assert found.exit_code in (1, 2)
