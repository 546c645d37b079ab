"""sentence-transformers as a peer: `encode` of lists of texts, with its default batches.

Not for running by hand: `peers.peer.Peer` starts it with the Python that has sentence-transformers installed.
"""

from __future__ import annotations

import os
import time
from typing import Any

from line_protocol import Run, serve


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Load the model; what runs takes texts, and returns the seconds and the first embedding."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import sentence_transformers  # type: ignore[import-not-found,unused-ignore]
    import torch  # installed beside it, not here

    began = time.perf_counter()
    dtype = getattr(torch, options["dtype"])
    model = sentence_transformers.SentenceTransformer(
        options["model"], device="cpu", model_kwargs={"torch_dtype": dtype}
    )
    load_s = time.perf_counter() - began
    facts = {"version": sentence_transformers.__version__, "torch": torch.__version__, "load_s": load_s}

    def run(texts: Any) -> dict[str, Any]:
        began = time.perf_counter()
        vectors = model.encode(texts, show_progress_bar=False)
        return {"elapsed_s": time.perf_counter() - began, "first": [float(each) for each in vectors[0]]}

    return facts, run


if __name__ == "__main__":
    serve(start)
