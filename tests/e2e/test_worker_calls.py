"""Calls into the worker of a real model, the same on every runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triolet

HERE = "tests.e2e.test_worker_calls"


class Extension:
    """Methods that a program adds to the worker."""

    def embed_plus(self: Any, tensor: torch.Tensor, text: str) -> dict[str, Any]:
        return {text: (self.rank, tensor + 1), "vocab": self.model.spec.vocab_size}


def vocabulary(model: Any) -> int:
    size: int = model.spec.vocab_size
    return size


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
async def test_an_extension_answers_with_tensors_between_the_steps(runner: str) -> None:
    fields: dict[str, Any] = {"runner": runner, "worker_extension": f"{HERE}:Extension", "num_kv_blocks": 64}
    async with triolet.open_engine(**fields) as engine:
        params = triolet.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        expected = (await engine.complete("Hello!", params)).outputs[0].token_ids
        async with engine.generate("Hello!", params) as stream:
            await stream.__anext__()
            [answer] = await engine.collective_rpc(
                "embed_plus", args=(torch.arange(3.0),), kwargs={"text": "sum"}
            )
            assert await engine.apply_model(f"{HERE}:vocabulary") == [engine.model_info.vocab_size]
            async for output in stream:
                last = output
        assert last.outputs[0].token_ids == expected
        rank, tensor = answer["sum"]
        assert (rank, tensor.tolist(), answer["vocab"]) == (0, [1.0, 2.0, 3.0], engine.model_info.vocab_size)
