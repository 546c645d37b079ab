"""The engines of a comparison, loaded side by side and measured in turns."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from common import kv_bytes_per_token
from engines import run_peer, run_transformers, run_triolet
from peers.peer import GGUF, Peer
from workloads import Job, Room, Round

import triolet

QUIET_SHARE = 0.05  # of a processor
MAX_PAUSE_S = 10.0


@attrs.frozen(kw_only=True)
class Wanted:
    """Options of a comparison: its engines and its model.

    Args:
        folder: of the model.
        model: its name, a key of MODELS.
        dtype: float32 or bfloat16.
        runner: triolet's.
        quantization: of triolet's weights, one engine for each; llama.cpp has them too, where it has that kind.
        transformers: whether transformers' `generate` takes part.
        vllm: a Python that has vLLM; None leaves it out.
        llama_cpp: a Python that has llama-cpp-python; None leaves it out.
        room: of each engine.
    """

    folder: Path
    model: str
    dtype: str
    runner: str = "thread"
    quantization: Sequence[str] = ("none",)
    transformers: bool = False
    vllm: str | None = None
    llama_cpp: str | None = None
    room: Room = attrs.field(factory=Room)


@attrs.frozen
class Side:
    """One engine of a comparison.

    Args:
        run: through the jobs of a round.
        facts: its version, and what it was told to do differently.
    """

    name: str
    run: Callable[[Sequence[Job]], Awaitable[Round]]
    facts: dict[str, Any]
    peer: Peer | None = None


@asynccontextmanager
async def open_sides(wanted: Wanted) -> AsyncIterator[list[Side]]:
    """Load all requested engines for this scope."""
    async with AsyncExitStack() as stack:
        found = []
        for quantization in wanted.quantization:
            engine = await stack.enter_async_context(
                triolet.open_engine(
                    model=str(wanted.folder),
                    max_num_seqs=wanted.room.max_num_seqs,
                    runner=wanted.runner,
                    quantization=quantization,
                )
            )
            facts = {"quantization": quantization, "runner": wanted.runner}
            found.append(Side("triolet", partial(run_triolet, engine), facts))
        if wanted.transformers:
            found.append(_transformers(wanted.folder))
        for peer, facts in _peers(wanted):
            stack.enter_context(peer)
            facts |= {f"peer_{name}": value for name, value in peer.facts.items() if name != "peak_mib"}
            found.append(Side(peer.engine, partial(run_peer, peer), facts, peer))
        yield found


def _transformers(folder: Path) -> Side:
    import transformers  # not where it isn't asked for

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return Side("transformers", partial(run_transformers, model), {})


def _peers(wanted: Wanted) -> list[tuple[Peer, dict[str, Any]]]:
    num_tokens = wanted.room.num_kv_tokens
    kv_cache_bytes = num_tokens * kv_bytes_per_token(wanted.model, wanted.dtype)
    common = {"model": str(wanted.folder), "dtype": wanted.dtype, "max_num_seqs": wanted.room.max_num_seqs}
    room = {
        "kv_cache_tokens": num_tokens,
        "kv_cache_bytes": kv_cache_bytes,
        "max_model_len": wanted.room.max_tokens,
    }
    peers: list[tuple[Peer, dict[str, Any]]] = []
    if wanted.vllm:
        peers.append((Peer("vllm", wanted.vllm, {**common, **room}), {}))
    if wanted.llama_cpp:
        kinds = [wanted.dtype if kind == "none" else kind for kind in wanted.quantization]
        for weights in (GGUF[kind] for kind in kinds if kind in GGUF):
            peer = Peer("llama.cpp", wanted.llama_cpp, {**common, **room, "weights": weights})
            peers.append((peer, {"quantization": weights}))
    return peers


def peer_pids(found: Sequence[Side]) -> list[int]:
    """Return the ids of all processes that are part of the measurement."""
    return [side.peer.pid for side in found if side.peer is not None]


async def in_turns(
    found: Sequence[Side],
    jobs_of_round: Callable[[int], Sequence[Job]],
    num_rounds: int,
    *,
    warms_up: bool = True,
) -> list[list[Round]]:
    """Measure each engine in every round, in turns. With `warms_up`, a further round, the first one, does not count.

    A turn begins when this process is idle, so that the end of triolet's turn does not disturb the next engine.
    """
    rounds: list[list[Round]] = [[] for _ in found]
    for number in range(0 if warms_up else 1, num_rounds + 1):
        for side, taken in zip(found, rounds, strict=True):
            await _quiet()
            done = await side.run(jobs_of_round(number))
            taken += [done] * (number > 0)
    return rounds


async def _quiet() -> None:
    """Wait until this process is nearly idle."""
    with trio.move_on_after(MAX_PAUSE_S):
        share = 1.0
        while share > QUIET_SHARE:
            before_s, began_s = time.process_time(), time.perf_counter()
            await trio.sleep(0.3)  # longer than an engine waits before it tidies up
            share = (time.process_time() - before_s) / (time.perf_counter() - began_s)
