"""llama.cpp as a peer, through the Python bindings of its C interface.

Not for running by hand: `peers.peer.Peer` starts it with the Python that has llama-cpp-python and gguf installed. The
model is converted first, if needed. All requests run at once, each a sequence of one context; a batch holds the next
token of every answer and as much of the prompts as there is room for, as in llama.cpp's server. A common beginning of
the prompts is computed once and its cells are shared.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gguf_model import convert
from line_protocol import Jobs, Run, Timer, serve

BATCH = 2048  # tokens in a call, llama.cpp's default
MICRO_BATCH = 512  # of these, tokens computed at once, its default
WORTH_SHARING = 64  # tokens that all prompts begin with


class Context:
    """Loaded model with its cells, and a batch to fill.

    Args:
        api: the module of the bindings.
        options: what the benchmark wants.
    """

    def __init__(self, api: Any, options: dict[str, Any]) -> None:
        self.api = api
        path = convert(Path(options["model"]), options["weights"])
        api.llama_backend_init()
        api.llama_log_set(_silence(api), None)
        params = api.llama_model_default_params()
        # Packed for AMX, 0.3.36 crashed on models of q8_0 and q4_k_m.
        packs_for_amx = b"AMX_INT8 = 1" in api.llama_print_system_info()
        params.use_extra_bufts = not options["weights"].startswith("q") or not packs_for_amx
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.num_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self._options = options
        self._shape: tuple[int, bool] | None = None
        self._context: Any = None

    def clear(self, num_sequences: int, *, shares: bool) -> None:
        """Remove every sequence, and prepare for so many others, with or without a common beginning."""
        self.batch.n_tokens = 0
        if self._shape == (num_sequences, shares):
            self.api.llama_memory_clear(self._memory(), False)
            return
        if self._context is not None:
            self.api.llama_free(self._context)
        params = self.api.llama_context_default_params()
        params.n_ctx = (
            self._options["kv_cache_tokens"] if num_sequences > 1 else self._options["max_model_len"]
        )
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self._options.get("threads") or os.cpu_count() or 1
        params.kv_unified = shares  # its own advice: one buffer only where sequences share a large beginning
        self._context = self.api.llama_init_from_model(self.model, params)
        self._shape = (num_sequences, shares)

    def _memory(self) -> Any:
        return self.api.llama_get_memory(self._context)

    def room(self) -> int:
        """Return how many tokens the batch still takes."""
        return BATCH - int(self.batch.n_tokens)

    def put(self, token_id: int, position: int, row: int, *, wants_logits: bool) -> int:
        """Add a token to the batch; return its place."""
        place = int(self.batch.n_tokens)
        self.batch.token[place] = token_id
        self.batch.pos[place] = position
        self.batch.n_seq_id[place] = 1
        self.batch.seq_id[place][0] = row
        self.batch.logits[place] = wants_logits
        self.batch.n_tokens = place + 1
        return place

    def compute(self) -> None:
        """Compute the batch in one call."""
        if code := self.api.llama_decode(self._context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        self.batch.n_tokens = 0

    def likeliest(self, place: int) -> int:
        """Return the token with the largest logit at a place of the last batch."""
        import numpy as np  # of the environment that has llama.cpp

        logits = self.api.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self.num_vocab,)).argmax())

    def copy(self, source: int, target: int, length: int) -> None:
        """Let `target` begin with the first tokens of `source`."""
        self.api.llama_memory_seq_cp(self._memory(), source, target, 0, length)


def _silence(api: Any) -> Any:
    """Install a log callback that prints nothing; it is referenced as long as the program runs."""
    return _KEPT.setdefault("log", api.llama_log_callback(lambda *_: None))


_KEPT: dict[str, Any] = {}


class Answer:
    """State of one request.

    Args:
        prompt: token ids.
        num_tokens: wanted.
    """

    def __init__(self, prompt: list[int], num_tokens: int) -> None:
        self.prompt = prompt
        self.num_wanted = num_tokens
        self.num_computed = 0
        self.num_given = 0
        self.next_id = 0

    def is_over(self) -> bool:
        """Return True if all requested tokens have been generated."""
        return self.num_given == self.num_wanted

    def put(self, context: Context, row: int) -> int | None:
        """Add its next tokens to the batch; return the place of its logits if this step gives a token."""
        if self.num_given:
            self.num_computed += 1
            return context.put(self.next_id, self.num_computed - 1, row, wants_logits=True)
        place = None
        for _ in range(min(context.room(), len(self.prompt) - self.num_computed)):
            is_last = self.num_computed == len(self.prompt) - 1
            place = context.put(self.prompt[self.num_computed], self.num_computed, row, wants_logits=is_last)
            self.num_computed += 1
        return place if self.num_computed == len(self.prompt) else None


def run(context: Context, jobs: Jobs) -> dict[str, Any]:
    """Run all requests, each at its arrival time: what arrives during a call is in the next one."""
    answers = [Answer(prompt, num_tokens) for prompt, num_tokens, _ in jobs]
    num_shared = _num_shared([answer.prompt for answer in answers])
    context.clear(len(jobs), shares=num_shared >= WORTH_SHARING)
    timer = Timer([due_s for _, _, due_s in jobs])
    if num_shared >= WORTH_SHARING:
        _share(context, answers, num_shared)
    unfinished: list[int] = []
    while unfinished or timer.awaits_more:
        unfinished += timer.arrivals(is_idle=not unfinished)
        # Answers first; prompts get what room is left.
        unfinished.sort(key=lambda row: (answers[row].num_given == 0, row))
        places = {row: answers[row].put(context, row) for row in unfinished if context.room()}
        context.compute()
        for row, place in places.items():
            if place is not None:
                answers[row].next_id = context.likeliest(place)
                answers[row].num_given += 1
                timer.note(row, [answers[row].next_id])
        unfinished = [row for row in unfinished if not answers[row].is_over()]
    return timer.figures()


def _num_shared(prompts: list[list[int]]) -> int:
    """Return how many tokens all prompts begin with, without the last of each, whose logits are needed."""
    if len(prompts) == 1:
        return 0
    shortest = min(map(len, prompts)) - 1
    unlike = (at for at in range(shortest) if len({prompt[at] for prompt in prompts}) > 1)
    return next(unlike, shortest)


def _share(context: Context, answers: list[Answer], length: int) -> None:
    """Compute the common beginning of all prompts once."""
    for begin in range(0, length, BATCH):
        for position in range(begin, min(length, begin + BATCH)):
            context.put(answers[0].prompt[position], position, 0, wants_logits=False)
        context.compute()
    for row, answer in enumerate(answers):
        answer.num_computed = length
        if row:
            context.copy(0, row, length)


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    """Convert and load the model."""
    import llama_cpp as api  # type: ignore[import-not-found,unused-ignore]

    convert(Path(options["model"]), options["weights"])
    began = time.perf_counter()
    context = Context(api, options)
    facts = {
        "version": api.__version__,
        "load_s": time.perf_counter() - began,
        "features": api.llama_print_system_info().decode(),
    }
    return facts, lambda jobs: run(context, jobs)


if __name__ == "__main__":
    serve(start)
