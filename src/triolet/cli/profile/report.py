"""Workload of `triolet profile`, and the table of its trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import trio

from triolet.cli.bench import Work, measure
from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.config.engine import EngineConfig
from triolet.core.profile import PhaseSum, phase_sums

_NOTES = {
    "plan": "choose the requests and tokens of the step",
    "compute": "hand over, input and forward pass",
    "hand over": "  from the plan to the runner",
    "prepare": "  input of the forward pass",
    "forward": "  forward pass; the argmax, too, where the kernels have it",
    "sample": "choose tokens from the logits",
    "deliver": "from the runner to the journal",
    "detokenize": "beside the next step: tokens to text",
}


def table(sums: Sequence[PhaseSum]) -> list[str]:
    """Return the lines of the table: a row for each phase, with what is inside of it below."""
    named = {one.name: one for one in sums}
    steps = named["step"]
    rows = [f"{'':12}{'total, ms':>12}{'mean, ms':>12}{'share':>8}"]
    order = ("plan", "compute", "hand over", "prepare", "forward", "sample", "deliver")
    for name in (*order, "step", "detokenize"):
        one = named[name]
        mean_ms = one.total_us / 1e3 / steps.count if steps.count else 0.0
        rows.append(
            f"{name:12}{one.total_us / 1e3:12,.2f}{mean_ms:12,.3f}{one.share:8.1%}  {_NOTES.get(name, '')}".rstrip()
        )
    return rows


def figures(sums: Sequence[PhaseSum]) -> dict[str, Any]:
    """Return the sums by name, milliseconds and shares."""
    return {
        one.name.replace(" ", "_"): {"total_ms": round(one.total_us / 1e3, 3), "share": round(one.share, 4)}
        for one in sums
    }


def run(work: Work, config: EngineConfig, *, as_json: bool) -> None:
    """Record the work, after a short warm-up round, and print where the time of its steps went."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            engine = await opened(stack, config)
            few = min(work.num_prompts, work.concurrency, 2)
            await measure(engine, attrs.evolve(work, num_prompts=few, concurrency=few, seed=work.seed + 1))
            await engine.start_profile()
            await measure(engine, work)
            path = Path(await engine.stop_profile())
        text = await trio.to_thread.run_sync(lambda: path.read_text(encoding="utf-8"))
        sums = phase_sums(json.loads(text)["traceEvents"])
        num_steps = next(one.count for one in sums if one.name == "step")
        if as_json:
            facts = {"model": engine.model_name, **attrs.asdict(work), "steps": num_steps, "trace": str(path)}
            print(json.dumps({**facts, "phases": figures(sums)}, ensure_ascii=False), flush=True)
            return
        prompts = f"{work.num_prompts} prompts of {work.input_len} tokens"
        head = f"{engine.model_name}: {prompts}, answers of {work.output_len}, {work.concurrency} at a time"
        lines = [head, f"{num_steps} steps", *table(sums), f"trace: {path}"]
        sys.stdout.write("\n".join(lines) + "\n")

    Interrupts().run(body)
