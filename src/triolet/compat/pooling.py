"""Pooled requests of vLLM's faces: their numbers are torch tensors."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from triolet.core.journal import JournalEntry
from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, pooled_output
from triolet.core.request.pooling_params import PoolingParams
from triolet.errors import InvalidRequest, RequestFailed

OLD_TASKS = {"encode": "token_embed", "score": "classify", "reward": "token_classify"}


def with_tensor(output: PoolingRequestOutput[PoolingOutput]) -> PoolingRequestOutput[PoolingOutput]:
    """Return an output of the engine with its numbers as a tensor, float32."""
    data = output.outputs.data
    tensor = torch.frombuffer(data, dtype=torch.float32) if len(data) else torch.empty(0)
    return attrs.evolve(output, outputs=PoolingOutput(tensor.view(data.shape)))


def pooled_tensor(entry: JournalEntry) -> PoolingRequestOutput[PoolingOutput]:
    """Return the output of a pooled request that has ended; without numbers, and with an error, if it has failed."""
    try:
        return with_tensor(pooled_output(entry))
    except RequestFailed as failure:
        return PoolingRequestOutput(
            request_id=entry.request.request_id,
            outputs=PoolingOutput(None),
            prompt_token_ids=entry.request.prompt_token_ids,
            error=entry.failure or failure.reason,
        )


def params_of_task(params: Any, task: str | None) -> PoolingParams:
    """Return parameters with the task of a call.

    Raises:
        InvalidRequest: the parameters are no `PoolingParams`, or of another task.
    """
    params = PoolingParams() if params is None else params
    if not isinstance(params, PoolingParams):
        raise InvalidRequest(
            f"pooling_params must be PoolingParams; got {type(params).__name__}", field="pooling_params"
        )
    if task is None:
        return params
    task = OLD_TASKS.get(task, task)
    if params.task not in (None, task):
        raise InvalidRequest(
            f"task of pooling_params must be {task} or None; got {params.task}",
            field="task",
            got=params.task,
        )
    return attrs.evolve(params, task=task)
