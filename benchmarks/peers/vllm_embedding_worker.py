"""vLLM's CPU build as a peer for embeddings: `LLM.embed` of lists of texts, with its defaults.

Not for running by hand: `peers.peer.Peer` starts it with the Python that has vLLM installed.
"""

from __future__ import annotations

import os
import time
from typing import Any

from line_protocol import Run, serve


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Load the model; what runs takes texts, and returns the seconds and the first embedding."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch  # installed beside vLLM, not here
    import vllm  # type: ignore[import-not-found,unused-ignore]

    began = time.perf_counter()
    model = vllm.LLM(
        model=options["model"], runner="pooling", dtype=options["dtype"], enable_prefix_caching=False, seed=0
    )
    load_s = time.perf_counter() - began
    facts = {"version": vllm.__version__, "torch": torch.__version__, "load_s": load_s}

    def run(texts: Any) -> dict[str, Any]:
        began = time.perf_counter()
        outputs = model.embed(texts, use_tqdm=False)
        return {"elapsed_s": time.perf_counter() - began, "first": list(outputs[0].outputs.embedding)}

    return facts, run


if __name__ == "__main__":
    serve(start)
