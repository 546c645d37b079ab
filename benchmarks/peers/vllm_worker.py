"""vLLM's CPU build as a peer: its engine in this process, stepped without pause; compiled, as is its default.

Not for running by hand: `peers.peer.Peer` starts it with the Python that has vLLM installed. vLLM's own advice for CPUs
is followed: OpenMP threads bound to all cores, Intel's OpenMP preloaded where it is installed. The engine runs inside
the process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): on two cores, a process for the scheduler takes time from the model.
"""

from __future__ import annotations

import os
import time
from typing import Any

from line_protocol import Jobs, Run, Timer, serve


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Load the model."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch  # installed beside vLLM, not here
    import vllm  # type: ignore[import-not-found,unused-ignore]

    began = time.perf_counter()
    arguments = vllm.EngineArgs(
        model=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        max_num_seqs=options["max_num_seqs"],
        kv_cache_memory_bytes=options["kv_cache_bytes"],
        disable_log_stats=True,
        seed=0,
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    facts = {"version": vllm.__version__, "torch": torch.__version__, "load_s": time.perf_counter() - began}
    return facts, lambda jobs: run(vllm, engine, jobs)


def run(vllm: Any, engine: Any, jobs: Jobs) -> dict[str, Any]:
    """Run all requests, each at its arrival time: what arrives during a step is in the next one."""
    timer = Timer([due_s for _, _, due_s in jobs])
    while (is_busy := engine.has_unfinished_requests()) or timer.awaits_more:
        for row in timer.arrivals(is_idle=not is_busy):
            prompt, num_tokens, _ = jobs[row]
            params = vllm.SamplingParams(
                temperature=0,
                max_tokens=num_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
            )
            engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            timer.note(int(output.request_id), list(output.outputs[0].token_ids))
    return timer.figures()


if __name__ == "__main__":
    serve(start)
