"""Tables of figures in docs/, made from benchmarks/results/*.jsonl.

A result file only grows: each run of a benchmark appends its lines. A table shows the latest run of each case on each
machine, and every row names the machine, the commit and the number of rounds that it was measured with, so that rows of
different ones cannot be taken for each other. What a line does not hold is shown as "not recorded".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from tests.source_tree import ROOT

Line = dict[str, Any]
Run = list[Line]

RESULTS = ROOT / "benchmarks" / "results"
NOT_RECORDED = "not recorded"
# The files of weights that llama.cpp has for triolet's kinds.
SAME_WEIGHTS = {"bfloat16": {"none": "bf16", "int8": "q8_0"}, "float32": {"none": "f32"}}


def lines_of(name: str) -> list[Line]:
    """Read a result file, oldest line first."""
    source = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in source.splitlines()]


def runs_of(lines: Iterable[Line], *fields: str) -> list[Run]:
    """Group lines that follow each other, agree in `fields`, and name no engine with the same weights twice."""
    runs: list[Run] = []
    for line in lines:
        side = _side(line)
        same = runs and all(runs[-1][0].get(field) == line.get(field) for field in ("cpu", *fields, "commit"))
        if same and side not in map(_side, runs[-1]):
            runs[-1].append(line)
        else:
            runs.append([line])
    return runs


def _side(line: Line) -> tuple[Any, ...]:
    return line.get("engine"), line.get("quantization"), line.get("side")


def latest(lines: Iterable[Line], *fields: str) -> list[Line]:
    """Return the last line of each combination of `fields` on each machine, in the order in which these came first."""
    return list({tuple(line.get(field) for field in ("cpu", *fields)): line for line in lines}.values())


# ---------------------------------------------------------------------------------------------- cells


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _recorded(value: object) -> str:
    return NOT_RECORDED if value is None else str(value)


def _both(line: Line | None, name: str, digits: int = 0) -> str:
    return "" if line is None else _number(line[name], digits)


def _weights(line: Line) -> str:
    kind = line["quantization"]
    return str(line["dtype"]) if kind == "none" else f"{kind}, {line['dtype']}"


def _source(line: Line) -> tuple[str, str, str]:
    return _machine(line), _recorded(line["commit"]), _recorded(line.get("rounds"))


SOURCE = ("machine", "commit", "rounds")


def _machine(line: Line) -> str:
    """Return a machine's name in a row: its maker and the instructions that the kernels used there."""
    maker, target = line["cpu"].partition(" ")[0].removesuffix("(R)"), line.get("cpu_target")
    return f"{maker}, {target}" if target else str(maker)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], used: Iterable[Line]) -> list[str]:
    """Return a table of Markdown, under a sentence that names the machine of the lines that it uses."""
    machines = sorted(
        {
            f"{line['cpu']}, {line['num_cpus']} CPUs, {line['threads']} threads, torch {line['torch']}, "
            f"Python {line['python']}"
            for line in used
        }
    )
    body = [(*SOURCE, *head), tuple("---" for _ in (*SOURCE, *head)), *rows]
    return [f"Machine: {'; '.join(machines)}.", "", *("| " + " | ".join(row) + " |" for row in body)]


# --------------------------------------------------------------------------------------------- tables


def _throughput_runs() -> list[Run]:
    return runs_of(lines_of("throughput"), "model", "workload", "dtype", "rounds", "floor")


def _of(run: Run, engine: str, quantization: str | None = None) -> Line | None:
    lines = [line for line in run if line["engine"] == engine]
    same = [line for line in lines if line.get("quantization") in (quantization, None)]
    return same[0] if same else None


def _rate_of(line: Line) -> str:
    """Return the name of a line's rate: that of a prompt counts its own tokens."""
    return "total_tokens_per_s" if line["workload"].startswith("prompt-") else "output_tokens_per_s"


def _gap(line: Line | None) -> str:
    """Return the milliseconds between tokens; an answer of one token has none."""
    has_gaps = line is not None and _rate_of(line) == "output_tokens_per_s"
    return _both(line, "itl_ms", 1) if has_gaps else "–"


def _case(line: Line) -> tuple[Any, ...]:
    return line["cpu"], _machine(line), line["model"], line["workload"], line["dtype"], line["quantization"]


def beside_transformers() -> list[str]:
    """Return throughput beside transformers: the latest run of each case on each machine."""
    pairs = {}
    for run in _throughput_runs():
        for ours in (line for line in run if line["engine"] == "triolet"):
            if theirs := _of(run, "transformers", ours["quantization"]):
                pairs[_case(ours)] = (ours, theirs)
    rows = [
        (
            *_source(ours),
            ours["model"],
            ours["workload"],
            _weights(ours),
            _number(ours[_rate_of(ours)]),
            _number(theirs[_rate_of(ours)]),
            _number(ours[_rate_of(ours)] / theirs[_rate_of(ours)], 1),
            _number(ours["floor"]),
            f"{_number(ours['ttft_ms'])} / {_number(theirs['ttft_ms'])}",
            f"{_gap(ours)} / {_gap(theirs)}",
            _recorded(ours.get("others_cpus")),
        )
        for ours, theirs in pairs.values()
    ]
    head = ("model", "workload", "weights", "triolet", "transformers", "times", "floor")
    times = ("first token, ms", "between tokens, ms", "others' CPUs")
    return table((*head, *times), rows, [line for pair in pairs.values() for line in pair])


def beside_peers() -> list[str]:
    """Return throughput beside vLLM and llama.cpp: all runs of the latest commit that has the case.

    A row is one run: figures of peers that were measured in another run stand in a row of their own.
    """
    cases: dict[tuple[Any, ...], list[tuple[Line, Line | None, Line | None]]] = {}
    for run in _throughput_runs():
        for ours in (line for line in run if line["engine"] == "triolet"):
            same_weights = SAME_WEIGHTS[ours["dtype"]].get(ours["quantization"])
            # vLLM's lines are of plain weights: they are no peer of int8.
            vllm = _of(run, "vllm") if ours["quantization"] == "none" else None
            llama = _of(run, "llama.cpp", same_weights)
            if vllm or llama:
                trios = cases.setdefault(_case(ours), [])
                if trios and trios[-1][0]["commit"] != ours["commit"]:
                    trios.clear()
                trios.append((ours, vllm, llama))
    used = [trio for trios in cases.values() for trio in trios]
    rows = [
        (
            *_source(ours),
            ours["model"],
            ours["workload"],
            _weights(ours),
            *(_both(line, _rate_of(ours)) for line in (ours, vllm, llama)),
            _number(ours["floor"]),
            " / ".join(_both(line, "ttft_ms") or "–" for line in (ours, vllm, llama)),
            " / ".join(_gap(line) for line in (ours, vllm, llama)),
            _recorded(ours.get("others_cpus")),
        )
        for ours, vllm, llama in used
    ]
    head = ("model", "workload", "weights", "triolet", "vLLM", "llama.cpp", "floor")
    times = ("first token, ms: triolet / vLLM / llama.cpp", "between tokens, ms", "others' CPUs")
    return table((*head, *times), rows, [line for trio in used for line in trio if line])


def quantized_throughput() -> list[str]:
    """Return throughput of int8 and int4: of each model the latest run of triolet alone."""
    runs = {
        (run[0]["cpu"], run[0]["model"]): run
        for run in _throughput_runs()
        if {line["engine"] for line in run} == {"triolet"}
        and any(line["quantization"] != "none" for line in run)
    }
    used = [line for run in runs.values() for line in run]
    rows = [
        (
            *_source(line),
            line["model"],
            line["workload"],
            _weights(line),
            _number(line["output_tokens_per_s"]),
            _number(line["ttft_ms"]),
            _number(line["itl_ms"], 1),
            _recorded(line.get("others_cpus")),
        )
        for line in used
    ]
    head = (
        "model",
        "workload",
        "weights",
        "tokens/s",
        "first token, ms",
        "between tokens, ms",
        "others' CPUs",
    )
    return table(head, rows, used)


def answers() -> list[str]:
    """Return latency of single answers beside the peers."""
    lines = [line for line in lines_of("latency") if "engine" in line]
    used = latest(lines, "model", "dtype", "what", "engine")
    rows = [
        (
            *_source(line),
            line["what"],
            line["engine"],
            " / ".join(_number(line[f"ttft_{part}"], 1) for part in ("p50", "p90", "p99")),
            " / ".join(_number(line[f"itl_{part}"], 1) for part in ("p50", "p90", "p99")),
            str(line["num_ttft"]),
            _recorded(line.get("others_cpus")),
        )
        for line in used
    ]
    head = ("requests", "engine", "first token", "between tokens", "answers", "others' CPUs")
    return table(head, rows, used)


def loop_delays() -> list[str]:
    """Return how late the loop wakes, and gaps between tokens beside long prompts."""
    lines = [line for line in lines_of("latency") if "engine" not in line]
    used = latest(lines, "model", "dtype", "what", "runner")
    rows = [
        (
            *_source(line),
            f"{line['what']}, {line['model']}",
            line["runner"],
            *(_number(line[name], 1) for name in ("p50", "p99", "floor_p50", "floor_p99")),
            _number(line.get("long_ttft_ms")),
        )
        for line in used
    ]
    return table(("what", "runner", "p50", "p99", "floor p50", "floor p99", "long prompt"), rows, used)


def overhead() -> list[str]:
    """Return what the engine around a model that does nothing takes per step."""
    used = latest(lines_of("overhead"), "runner", "batch")
    rows = [
        (
            *_source(line),
            line["runner"],
            str(line["batch"]),
            _number(line["wall_us"]),
            _number(line["wall_us"] / line["batch"]),
            _number(line["bound_us"]),
        )
        for line in used
    ]
    return table(("runner", "requests", "per step", "per sequence", "bound of the loop"), rows, used)


def bridge() -> list[str]:
    """Return what a token costs on its way to an asyncio program or a thread."""
    used = latest(lines_of("bridge"), "side", "batch")
    rows = [
        (*_source(line), line["side"], str(line["batch"]), _number(line["wall_us"]), _number(line["more_us"]))
        for line in used
    ]
    return table(("read by", "requests", "per token", "more than native"), rows, used)


STARTED = ("triolet", "vllm", "llama.cpp", "transformers", "import torch")


def startup() -> list[str]:
    """Return seconds to the first output and memory: the latest run of each model and set of engines."""
    runs = {
        (run[0]["cpu"], run[0]["model"], run[0].get("dtype"), frozenset(line["engine"] for line in run)): run
        for run in runs_of(lines_of("startup"), "model", "dtype", "rounds")
    }
    rows = []
    for run in runs.values():
        engines = {line["engine"]: line for line in run}
        seconds = [_both(engines.get(name), "first_output_s", 1) or "–" for name in STARTED]
        memory = [_both(engines.get(name), "peak_mib") or "–" for name in STARTED]
        rows.append(
            (
                *_source(run[0]),
                run[0]["model"],
                _recorded(run[0].get("dtype")),
                *seconds,
                " / ".join(memory),
            )
        )
    head = (
        "model",
        "dtype",
        "triolet",
        "vLLM",
        "llama.cpp",
        "transformers",
        "import torch",
        "memory, MiB, in that order",
    )
    return table(head, rows, [line for run in runs.values() for line in run])


def served() -> list[str]:
    """Return the same requests embedded and over HTTP."""
    runs = {
        (run[0]["cpu"], run[0]["clients"]): run
        for run in runs_of(lines_of("serve"), "model", "dtype", "clients")
    }
    rows = []
    for run in runs.values():
        sides = {line["side"]: line for line in run}
        embedded, http = sides["embedded"], sides["http"]
        rows.append(
            (
                *_source(embedded),
                str(embedded["clients"]),
                *(_number(line["tokens_per_s"]) for line in (embedded, http)),
                *(
                    f"{_number(embedded[name], digits)} / {_number(http[name], digits)}"
                    for name, digits in (("ttft_ms", 0), ("itl_ms", 1))
                ),
            )
        )
    head = ("clients", "embedded, tokens/s", "HTTP, tokens/s", "first token, ms", "between tokens, ms")
    return table(head, rows, [line for run in runs.values() for line in run])


def quantization() -> list[str]:
    """Return what int8 and int4 lose."""
    used = latest(lines_of("quantization"), "model", "dtype", "quantization")
    used.sort(
        key=lambda line: (
            line["model"] != "triolet-nano",
            ("none", "int8", "int4").index(line["quantization"]),
        )
    )
    rows = [
        (
            *_source(line),
            line["model"],
            _weights(line),
            f"{line['distance']:.1%}",
            f"{line['divergence']:.1e}",
            f"{line['agreement']:.1%}",
            _number(line["perplexity"], 2),
            _number(line["weights_mib"], 1),
        )
        for line in used
    ]
    head = (
        "model",
        "weights",
        "distance of the logits",
        "divergence, nats",
        "same likeliest token",
        "perplexity",
        "MiB",
    )
    return table(head, rows, used)


def quantized() -> list[str]:
    """Return time and memory of files whose blocks are kept, beside those of plain ones."""
    used = latest(lines_of("quantized"), "model", "weights")
    rows = [
        (
            *_source(line),
            line["model"],
            f"{line['weights']}, {line['dtype']}",
            f"{line['load']:.0f}",
            _number(line["first_cpu_ms"]),
            _number(line["tokens_per_cpu_s"]),
            _number(line["load_s"], 1),
            _number(line["file_mib"]),
            _number(line["rss_mib"]),
        )
        for line in used
    ]
    head = (
        "model",
        "file, activations",
        "other work",
        "prompt of 128, CPU ms",
        "tokens per CPU second",
        "load, s",
        "file, MiB",
        "resident, MiB",
    )
    return table(head, rows, used)


def adapted() -> list[str]:
    """Return what LoRA adapters cost a step."""
    used = latest(lines_of("lora"), "model", "weights", "what", "rows", "adapters", "rank")
    rows = [
        (
            *_source(line),
            line["model"],
            line["weights"],
            "prompts of 128" if line["what"] == "prompt" else "a token each",
            str(line["rows"]),
            f"{line['adapters']} of rank {line['rank']}",
            f"{line['load']:.0f}",
            _number(line["plain_cpu_ms"], 1),
            _number(line["adapted_cpu_ms"], 1),
            f"{line['ratio']:.2f}",
        )
        for line in used
    ]
    head = (
        "model",
        "weights",
        "step",
        "rows",
        "adapters",
        "other work",
        "without, CPU ms",
        "with, CPU ms",
        "ratio",
    )
    return table(head, rows, used)


def embedded() -> list[str]:
    """Return embeddings a second beside those of peers: the latest run of each model and peer on each kind of CPU."""
    lines = [line for line in lines_of("embedding") if line["part"] == "throughput"]
    used = latest(lines, "cpu", "model", "peer")
    rows = [
        (
            *_source(line),
            line["cpu"],
            line["model"],
            f"{line['peer'].removesuffix('-embedding')} {line['peer_version']}",
            _number(line["texts_per_s"], 1),
            _number(line["peer_texts_per_s"], 1),
            _number(line["ratio"], 2),
            _number(line["cpu_ratio"], 2),
            _recorded(line["others_cpus"]),
        )
        for line in used
    ]
    head = ("CPU", "model", "peer", "triolet", "the peer", "times", "times, of CPU time", "others' CPUs")
    return table(head, rows, used)


def beside_embeddings() -> list[str]:
    """Return gaps between a chat's tokens beside embeddings: the latest run on each kind of CPU."""
    lines = [line for line in lines_of("embedding") if line["part"] == "chat"]
    used = latest(lines, "cpu", "model")
    rows = [
        (
            *_source(line),
            line["cpu"],
            line["model"],
            *(
                " / ".join(_number(line[side][share], 1) for share in ("p50", "p99"))
                for side in ("alone_ms", "beside_ms")
            ),
            _number(line["ratio"], 2),
            str(line["embedded_beside"]),
        )
        for line in used
    ]
    head = (
        "CPU",
        "model",
        "alone, p50 / p99 ms",
        "beside, p50 / p99 ms",
        "ratio of the medians",
        "texts beside",
    )
    return table(head, rows, used)


def prefix_store() -> list[str]:
    """Return the time to the first token of a long prompt, in the process that fills a store and in the next one."""
    used = latest(lines_of("prefix_store"), "model", "dtype")
    rows = [
        (
            *_source(line),
            line["model"],
            line["dtype"],
            *(_number(line[side]) for side in ("first_ttft_ms", "second_ttft_ms")),
        )
        for line in used
    ]
    return table(("model of random weights", "dtype", "first process, ms", "second process, ms"), rows, used)


def placements() -> list[str]:
    """Return what it costs to choose a replica, from the loads of the trace with each number of replicas."""
    used = latest((line for line in lines_of("dispatch") if line["policy"] == "triolet"), "replicas")
    rows = [
        (
            *_source(line),
            str(line["replicas"]),
            _number(line["decision_p50_us"], 1),
            _number(round(1e6 / line["decision_p50_us"], -3)),
        )
        for line in used
    ]
    return table(("replicas", "to place a request, µs", "placed a second, at most"), rows, used)


STREAMS, PACE = 64, 50
"""Streams of an engine and tokens a second of each, in the table of routers."""


def routers() -> list[str]:
    """Return how many cores routers take, computed from the processor time of an event, and what a decision takes."""
    event = lines_of("router")[-1]
    decisions = latest(
        (line for line in lines_of("dispatch") if line["policy"] == "triolet-router"), "replicas"
    )
    rows = [
        (
            *_source(line),
            str(line["replicas"]),
            _number(STREAMS * line["replicas"]),
            _number(STREAMS * line["replicas"] * PACE * event["router_us_per_event"] / 1e6, 1),
            _number(line["decision_p50_us"], 1),
        )
        for line in decisions
    ]
    head = (
        "engines",
        "streams of 50 tokens a second, 64 each",
        "cores for routers",
        "to place a request, µs",
    )
    return table(head, rows, [event, *decisions])


def speculation() -> list[str]:
    """Return tokens per step without and with guesses."""
    runs: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines_of("speculation"):
        runs.setdefault((line["workload"], line["batch"]), {})[line["speculative"]] = line
    names = {"loop": "circles", "free": "nothing repeats"}
    rows = [
        (
            *_source(sides["ngram"]),
            names[workload],
            str(batch),
            *(_number(sides[side]["tokens_per_step"], 2) for side in ("none", "ngram")),
            f"{sides['ngram']['accepted']:.0%}",
        )
        for (workload, batch), sides in runs.items()
    ]
    head = ("answers", "requests at once", "tokens per step without", "with", "guesses that were right")
    return table(head, rows, [line for sides in runs.values() for line in sides.values()])


def quantized_files() -> list[str]:
    """Return what files lose that `triolet quantize` writes."""
    used = latest(lines_of("quantized_files"), "model", "format")
    rows = [
        (
            *_source(line),
            line["model"],
            f"`{line['format']}`",
            ", ".join(_number(line[side] / 1e6, 1) for side in ("bytes_before", "bytes_after")),
            ", ".join(_number(line[side], 3) for side in ("perplexity_before", "perplexity_after")),
            f"{line['divergence_nats']:.1e}",
            f"{line['same_likeliest_token']:.1%}",
        )
        for line in used
    ]
    head = ("model", "format", "MB before, after", "perplexity before, after", "divergence, nats")
    return table((*head, "same likeliest token"), rows, used)


def beside_llama_cpp() -> list[str]:
    """Return speed on a GGUF file beside llama.cpp: the latest run of each case on each machine."""
    case = ("cpu_target", "model", "weights", "dtype", "quantization", "workload")
    lines = lines_of("gguf_file")
    # A run has the two sides of a workload behind each other.
    theirs = {id(ours): other for ours, other in itertools.pairwise(lines) if ours["engine"] == "triolet"}
    used = latest((line for line in lines if id(line) in theirs), *case)
    used.sort(key=lambda line: [str(line[field]) for field in ("cpu", *case)])
    rows = [
        (
            *_source(line),
            f"{line['model']}, {line['weights'].upper()}",
            _weights(line),
            line["workload"],
            _number(line["tokens_per_s"]),
            _number(theirs[id(line)]["tokens_per_s"]),
            _number(line["tokens_per_s_ratio"], 2),
            f"{_number(line['ttft_ms'])} / {_number(theirs[id(line)]['ttft_ms'])}",
        )
        for line in used
    ]
    head = ("file", "activations", "workload", "triolet, tokens/s", "llama.cpp", "times", "first token, ms")
    return table(head, rows, used)


TABLES: dict[str, Callable[[], list[str]]] = {
    "beside_transformers": beside_transformers,
    "quantized_throughput": quantized_throughput,
    "beside_peers": beside_peers,
    "answers": answers,
    "overhead": overhead,
    "bridge": bridge,
    "startup": startup,
    "loop_delays": loop_delays,
    "served": served,
    "quantization": quantization,
    "quantized": quantized,
    "adapted": adapted,
    "embedded": embedded,
    "beside_embeddings": beside_embeddings,
    "prefix_store": prefix_store,
    "placements": placements,
    "routers": routers,
    "speculation": speculation,
    "quantized_files": quantized_files,
    "beside_llama_cpp": beside_llama_cpp,
}
