"""Sentences of the documentation that tell what was measured, with their figures from benchmarks/results/.

A figure is a number with a unit. Each one outside of the tables that are made stands in one of these sentences, or is a
limit: what is set, wanted or computed, and not measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.performance_tables import Line, latest, lines_of

FIGURE = re.compile(
    r"(?<![\w.`/-])\d[\d,.]*\s?(?:%|µs\b|us\b|ms\b|s\b|seconds?\b|minutes?\b|[KMG]i?B\b|tokens?/s|times\b|percent\b|nats\b)"
)
NOT_MEASURED = "| not measured |"  # the last cell of a target


def _last(name: str, **fields: object) -> Line:
    """Return the latest line of a result file that has all these fields."""
    return [line for line in lines_of(name) if all(line.get(key) == fields[key] for key in fields)][-1]


def _range(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _kills(tensor_parallel_size: int | None = None) -> Line:
    return _last("crash_recovery", bench="crash_recovery_all", tensor_parallel_size=tensor_parallel_size)


def _death_of_a_process() -> str:
    return f"{_kills()['gone_ms']['p50']:.0f} ms for one with torch in it"


def _answers_after_kills() -> str:
    run = _kills()
    assert run["wrong_answers"] == 0
    loading_ms = run["next_token_ms"]["p50"] - run["loaded_ms"]["p50"]
    return (
        f"`kill -9` of the runner's process, {run['kills']} times, under {run['streams']} streams of triolet-nano in "
        f"float32 | {run['answers']:,} answers, all of them the right ones; the engine knew after "
        f"{run['noticed_ms']['p50']} ms (median; {run['noticed_ms']['max']} at most), the next token came after "
        f"{run['next_token_ms']['p50'] / 1000:.1f} s, all but {loading_ms:.0f} ms of them for loading"
    )


def _answers_after_kills_of_ranks() -> str:
    run = _kills(2)
    assert run["wrong_answers"] == 0
    return (
        f"{run['streams']} streams, {run['kills']} times `kill -9` of a random rank): {run['answers']} answers, none "
        f"wrong; a death was known after {run['noticed_ms']['p50']:.0f} ms (median; {run['noticed_ms']['max']:.0f} at "
        f"most), the next token came after {run['next_token_ms']['p50'] / 1000:.1f} s."
    )


def _gaps_beside_a_death() -> str:
    run = _last("replica_recovery", kills=100)
    assert run["wrong_answers"] == 0
    gaps, calm = run["gap_ms"], run["calm_gap_ms"]
    runs = [line for line in lines_of("replica_recovery") if line["commit"] == run["commit"]]
    here, *elsewhere = (f"{line['longest_of_median']:.1f}" for line in reversed(runs))
    longest = ", ".join([f"{here} times the median", *(f"{one} in another run" for one in elsewhere)])
    return (
        f"{run['kills']} kills under {run['streams']} streams: {run['answers']:,} answers, none wrong. From a kill "
        f"until both replicas lived, two tokens of a stream of the other replica were {gaps['p50']:.0f} ms apart "
        f"(median; {gaps['p99']:.0f} at p99, at most {gaps['max']:.0f}: {longest}); in the second before, "
        f"{calm['p50']:.0f} ms (median; {calm['p99']:.0f} at p99, at most {calm['max']:.0f}). The host took the "
        f"processors away in {run['stolen_gaps']:,} of {run['gaps']:,} gaps; of the others the longest was "
        f"{run['longest_of_median_on_own_time']:.1f} times the median."
    )


def _soak() -> str:
    run = _last("soak", bench="soak_all", requests=1_000_000)
    assert (run["measured_from"], run["missing_blocks"]) == (100_000, 0)
    return f"{run['growth_mib']} MiB more memory than after the first hundred thousand"


def _soak_of_the_server() -> str:
    lines = [line for line in lines_of("soak_server") if line["bench"] == "soak_server"]
    lines = [line for line in lines if line["commit"] == lines[-1]["commit"]]
    server, *others = lines
    [runner] = [line for line in others if line["process"].endswith("runner")]  # there may be a standby, too
    grammars = [line for line in others if line["process"].endswith("grammar")]
    return (
        f"{server['requests']:,} requests of mixed load in {server['minutes']:.0f} minutes on a server with the model "
        f"in a process | private memory of the server {server['start_mb']:.0f} to {server['end_mb']:.0f} MB, of the "
        f"model's process {runner['start_mb']:.0f} to {runner['end_mb']:.0f} MB (weights {runner['weights_mb']:.0f}, "
        f"KV cache {runner['kv_mb']}), of each grammar {_range([line['end_mb'] for line in grammars], 0)} MB; slopes "
        f"{server['slope_mb_per_minute']:.2f}, {runner['slope_mb_per_minute']:.2f} and at most "
        f"{round(max(line['slope_mb_per_minute'] for line in grammars), 2) + 0.0:.2f} MB a minute"  # and no -0.00
    )


def _orphans() -> str:
    serving, loading = (_last("orphans", state=state) for state in ("serving", "loading"))
    assert serving["rounds"] == loading["rounds"]
    return (
        f"`kill -9` of the server, {serving['rounds']} times while it answers and as often while it loads | its other "
        f"processes were gone after {serving['gone_ms']['p50']:.0f} ms (median; {serving['gone_ms']['max']:.0f} at "
        f"most) while it answered, and after {loading['gone_ms']['p50']:.0f} ms ({loading['gone_ms']['max']:.0f}) "
        "while it loaded"
    )


def _hogs(long_prompt: bool, settled: bool = True) -> list[Line]:
    return [
        line
        for line in lines_of("loop_hogs")
        if (line["long_prompt"], line["settled"]) == (long_prompt, settled)
    ]


def _longest_steps() -> str:
    without, beside = (
        {
            "work": max(line["longest_work_ms"] for line in runs),
            "share": max(line["over_10_ms"] / line["task_steps"] for line in runs),
            "wall": max(line["longest_ms"] for line in runs),
        }
        for runs in (_hogs(False), _hogs(True))
    )
    assert beside["work"] < 10
    return (
        f"In processor time no step was over 10 ms: the longest took {without['work']:.1f} ms without the prompt and "
        f"{beside['work']:.1f} ms with it. By the wall clock {100 * without['share']:.1f} and "
        f"{100 * beside['share']:.1f} percent of 27,000 steps were, the longest {without['wall']:.0f} and "
        f"{beside['wall']:.0f} ms"
    )


def _collections() -> str:
    longest = [line["longest_work_ms"] for prompt in (False, True) for line in _hogs(prompt, settled=False)]
    return f"with the libraries that an engine is made of it takes {_range(longest, 0)} ms, now and then."


def _health_under_attack() -> str:
    last = _last("attacks", mode="together", settle_s=30.0)
    runs = [
        line
        for line in lines_of("attacks")
        if line.get("mode") == "together" and line["commit"] == last["commit"]
    ]
    run = max(runs, key=lambda line: line["health_ms"]["p100"])  # the worst of this commit
    health = run["health_ms"]
    assert all(line["exact"] for line in runs)
    return (
        f"with all of them at the same time for {run['seconds']:.0f} s every stream of the other client was exact, and "
        f"its `/health` took {health['p50']:.0f} ms (median), {health['p99']:.0f} ms (99 %) and "
        f"{health['p100']:.0f} ms at most;"
    )


def _health_beside_one_attack() -> str:
    lines = [line for line in lines_of("attacks") if "attack" in line and not line.get("server_first")]
    alone = latest((line for line in lines if line["cpu"] == lines[-1]["cpu"]), "attack")
    worst = max(line["health_ms"]["p100"] for line in alone)
    return f"beside one attack alone {worst:.0f} ms at most."


def _longest_holds() -> str:
    attacks = latest(
        (line for line in lines_of("attacks") if "attack" in line and line.get("server_first")), "attack"
    )
    attack_ms = max(line["loop"]["longest_ms"] for line in attacks)
    requests = _last("long_requests", server_first=True)
    requests_ms = requests["longest_ms"]["longest"]
    assert max(attack_ms, requests_ms) <= 10
    return (
        f"By the wall clock of a quiet machine the longest step of the event loop took {attack_ms:.1f} ms beside one "
        f"of the attacks, and {requests_ms:.1f} ms in {requests['cases']} such requests"
    )


def _fairness() -> str:
    run = _last("fairness")
    return (
        f"{run['beside_p50_ms']:.1f} ms instead of {run['alone_p50_ms']:.1f} ({run['ratio']:.1f} times), Jain's index "
        f"{run['jain']:.2f}."
    )


def _dispatch(policy: str, replicas: int | None = None) -> list[Line]:
    return [
        line
        for line in lines_of("dispatch")
        if line["policy"] == policy and replicas in (line["replicas"], None) and "hit_of_best" in line
    ]


def _rule_of_dispatch() -> str:
    runs = _dispatch("triolet")

    def among(field: str) -> str:
        return _range([run[f"{field}_of_best"] for run in runs], 2)

    return (
        f"{among('hit')} of the prefix hits of the best other rule are found, and the time to the first token is "
        f"{among('ttft_mean')} of the best other one's in the mean, {among('ttft_p90')} at p90 and "
        f"{among('ttft_p99')} at p99."
    )


def _decisions_of_the_engine() -> str:
    few, many = (_dispatch("triolet", replicas)[-1]["decision_p50_us"] for replicas in (8, 64))
    return f"A decision takes {few:.0f} µs among 8 replicas and {many:.0f} µs among 64 (median, on the trace above)"


def _decisions_of_the_router() -> str:
    many = _dispatch("triolet-router", 64)[-1]["decision_p50_us"]
    return f"a decision among 64 engines takes {many:.0f} µs."


def _router() -> str:
    runs = [line for line in lines_of("router") if "router_us_per_event" in line][-3:]
    ours = _range([run["router_us_per_event"] for run in runs], 0)
    engines = _range([run["direct_engine_us_per_event"] for run in runs], 0)
    return (
        f"{len(runs)} rounds: {ours} µs of processor time for each event that it passes on, beside {engines} µs of the "
        "engine that makes it."
    )


def _hop_to_a_process() -> str:
    thread, process = (_last("runner_hop", executor=name, rows=1) for name in ("thread", "process"))
    return f"for some {(process['p50_us'] - thread['p50_us']) / 1000:.1f} ms a step."


SENTENCES: dict[str, tuple[Callable[[], str], ...]] = {
    "docs/faults.md": (
        _death_of_a_process,
        _answers_after_kills,
        _orphans,
        _soak,
        _soak_of_the_server,
        _longest_steps,
        _collections,
    ),
    "docs/performance.md": (_hop_to_a_process,),
    "docs/scale.md": (
        _gaps_beside_a_death,
        _rule_of_dispatch,
        _decisions_of_the_engine,
        _decisions_of_the_router,
        _router,
    ),
    "docs/scheduling.md": (_fairness,),
    "docs/server.md": (_health_under_attack, _health_beside_one_attack, _longest_holds),
    "docs/tensor-parallel.md": (_answers_after_kills_of_ranks,),
}
"""Functions that return what a page says, by the page."""

LIMITS: dict[str, tuple[str, ...]] = {
    "docs/cli.md": ("40 %",),
    "docs/configuration.md": (
        "25 %",
        "4 GiB",
    ),
    "docs/deployment.md": (
        "25 s",
        "20 seconds",
    ),
    "docs/embedding.md": ("60 seconds",),
    "docs/faults.md": (
        "3 s",
        "3 times",
        "2 seconds",
        "0.1 s",
        "0.2 s",
        "5 s",
        "10 s",
        "30 s",
        "10 ms",
    ),
    "docs/gpu.md": ("8 minutes", "32 MiB", "256 MiB"),
    "docs/http.md": (
        "4 MiB",
        "32 KiB",
        "15 seconds",
        "40 %",
    ),
    "docs/lora.md": ("5 seconds",),
    "docs/models.md": ("82 KB",),
    "docs/operations.md": (
        "16 GiB",
        "112 KiB",
    ),
    "docs/performance.md": (
        "0.2 s",
        "1 ms",
        "5 ms",
        "32 MiB",
        "3.5%",
    ),
    "docs/protocol.md": (
        "0.25 s",
        "0.005 s",
        "16 KiB",
    ),
    "docs/scale.md": ("3 s", "5 seconds", "30 s", "20 ms", "120 µs", "1.25 times"),
    "docs/scheduling.md": (
        "1 times",
        "1.5 times",
        "0.25 seconds",
    ),
    "docs/server.md": (
        "1.1 times",
        "20 MB",
        "4 KiB",
        "16 KiB",
        "30 times",
        "30 s",
        "20 s",
        "64 KiB",
        "1.5 KB",
        "16 MiB",
        "256 MiB",
        "4 MiB",
    ),
    "docs/speculation.md": ("7 MB",),
    "docs/structured-outputs.md": ("10 s", "10 minutes"),
}
"""Figures that are set, wanted or computed, by the page."""
