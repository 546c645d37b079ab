"""A user of `AsyncLLM`: the same program for vLLM's and for ours, in whichever event loop it is run.

As a program of its own it is run by a Python that has vLLM: `python async_user.py FOLDER`, requests in, what was seen
out, a line of JSON each. It imports nothing of this repository.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MAX_MODEL_LEN = 128
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "block_size": 32,
    "enable_prefix_caching": True,
    "seed": 0,
}


async def use(engine: Any, names: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask one after the other, and then look around.

    Args:
        engine: an `AsyncLLM`.
        names: has `SamplingParams` and `RequestOutputKind`.
        requests: see `ask`.
    """
    answers = [await ask(engine, names, f"request-{place}", **one) for place, one in enumerate(requests)]
    tokenizer = engine.get_tokenizer()
    return {
        "answers": answers,
        "check_health": await engine.check_health(),
        "do_log_stats": await engine.do_log_stats(),
        "errored": engine.errored,
        "get_supported_tasks": list(await engine.get_supported_tasks()),
        "is_running": engine.is_running,
        "is_sleeping": await engine.is_sleeping(),
        "is_paused": await engine.is_paused(),
        "is_stopped": engine.is_stopped,
        "is_tracing_enabled": await engine.is_tracing_enabled(),
        "max_model_len": engine.model_config.max_model_len,
        "reset_prefix_cache": await engine.reset_prefix_cache(),
        "tokens": tokenizer.encode("Hällo"),
        "text": tokenizer.decode([72, 101, 256, 255]),
    }


async def ask(
    engine: Any,
    names: Any,
    request_id: str,
    *,
    prompt: Any,
    kind: str = "CUMULATIVE",
    abort_after: int | None = None,
    leave_after: int | None = None,
    **params: Any,
) -> dict[str, Any]:
    """What is seen of one request.

    Args:
        engine: see `use`.
        names: see `use`.
        request_id: its name.
        prompt: as `generate` takes it.
        kind: of its outputs.
        abort_after: outputs after which it is aborted.
        leave_after: outputs after which they are no longer read.
        **params: of sampling.
    """
    outputs: list[Any] = []
    error = None
    try:
        output_kind = getattr(names.RequestOutputKind, kind)
        if (biases := params.get("logit_bias")) is not None:  # JSON makes texts of keys
            params["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
        chosen = names.SamplingParams(**{"temperature": 0, **params}, output_kind=output_kind)
        stream = engine.generate(prompt, chosen, request_id)
        async for output in stream:
            outputs.append(output)
            if len(outputs) == abort_after:
                await engine.abort(request_id)
            if len(outputs) == leave_after:
                break
        await stream.aclose()
    except Exception as problem:
        error = str(problem)
    seen = [shown(output) for output in outputs]
    return {
        "error": error,
        "seen": joined(seen) if kind == "DELTA" else seen[-1:],
        "num_outputs": len(seen) if kind == "FINAL_ONLY" else None,  # of the others a slow reader gets fewer
        "num_unfinished": engine.get_num_unfinished_requests(),
    }


def joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader puts together: the pieces of each answer, and for the rest what was said last."""
    answers: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for piece in delta["outputs"]:
            before = answers.get(piece["index"], {"text": "", "token_ids": [], "logprobs": None})
            answers[piece["index"]] = {
                **piece,
                "text": before["text"] + piece["text"],
                "token_ids": before["token_ids"] + piece["token_ids"],
                "logprobs": (before["logprobs"] or []) + (piece["logprobs"] or []) or None,
            }
    return [{**deltas[-1], "outputs": [answers[index] for index in sorted(answers)]}] if deltas else []


def shown(output: Any) -> dict[str, Any]:
    """All that one output says and that does not depend on the clock."""
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": output.prompt_logprobs and [logprobs_shown(at) for at in output.prompt_logprobs],
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [answer_shown(answer) for answer in output.outputs],
    }


def answer_shown(answer: Any) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "cumulative_logprob": answer.cumulative_logprob and round(answer.cumulative_logprob, 2),
        "logprobs": answer.logprobs and [logprobs_shown(at) for at in answer.logprobs],
        "finish_reason": answer.finish_reason and str(answer.finish_reason),
        "stop_reason": answer.stop_reason,
    }


def logprobs_shown(position: Any) -> Any:
    return position and {
        str(token_id): [round(one.logprob, 2), one.rank, one.decoded_token]
        for token_id, one in position.items()
    }


async def use_vllm(folder: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """With vLLM's engine; its CPU build needs room and threads named."""
    import vllm  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found,unused-ignore]

    class Names:
        pass

    names: Any = Names()
    names.SamplingParams, names.RequestOutputKind = vllm.SamplingParams, RequestOutputKind
    arguments = vllm.AsyncEngineArgs(
        model=folder, **ENGINE, kv_cache_memory_bytes=64 << 20, enforce_eager=True, disable_log_stats=True
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        return await use(engine, names, requests)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    import asyncio

    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(
        json.dumps(asyncio.run(use_vllm(sys.argv[1], json.loads(sys.stdin.readline())))), file=out, flush=True
    )
