"""`POST /v1/embeddings`, `/classify` and `/pooling`."""

from __future__ import annotations

import time
import uuid

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput
from triolet.core.request.pooling_params import PoolingParams
from triolet.errors import InvalidRequest, RequestFailed
from triolet.protocol.errors import WireError, wrong
from triolet.protocol.pooling import ClassifyRequest, EmbeddingsRequest, PooledRequest, PoolingRequest
from triolet.server.routes.app_context import AppContext, context_of, owner_of
from triolet.server.routes.request_body import cancel_on_disconnect, read_json


async def embeddings(request: Request) -> Response:
    """Answer the embedding of each input."""
    context = context_of(request)
    body = context.named(await read_json(request, EmbeddingsRequest.of))
    return JSONResponse(body.answer(await pooled(request, context, body, body.params(), body.prompts)))


async def classify(request: Request) -> Response:
    """Answer the scores of the classes for each input."""
    context = context_of(request)
    body = context.named(await read_json(request, ClassifyRequest.of))
    outputs = await pooled(request, context, body, body.params(), body.input.prompts)
    info = context.engine.model_info.pooling
    assert info is not None, "the engine has classified"
    return JSONResponse(body.answer(outputs, info.labels))


async def pooling(request: Request) -> Response:
    """Answer the result of a task for each input."""
    context = context_of(request)
    body = context.named(await read_json(request, PoolingRequest.of))
    outputs = await pooled(request, context, body, body.params(), body.prompts)
    return JSONResponse(body.answer(uuid.uuid4().hex, int(time.time()), outputs))


async def pooled(
    request: Request,
    context: AppContext,
    body: PooledRequest,
    params: PoolingParams,
    prompts: tuple[object, ...],
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the outputs of the prompts of a body; a client that disconnects aborts all of them.

    Raises:
        WireError: the engine refuses one of them, or the model is a prompt adapter.
    """
    arguments = {**context.arguments(request, body), **context.adapter_argument(body.model)}
    if "prompt_adapter" in arguments:
        raise wrong("model", "the model or a LoRA adapter, as prompt adapters only generate", body.model)

    async def work() -> list[PoolingRequestOutput[PoolingOutput]]:
        with context.acquire_slot(owner_of(request)):
            return await context.engine.encode_all(
                prompts,  # type: ignore[arg-type]
                params,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                truncation_side=body.truncation_side,
                **arguments,
            )

    try:
        return await cancel_on_disconnect(request.receive, work)
    except InvalidRequest as error:
        raise body.refusal(error) from error
    except RequestFailed as error:
        if (deadline_s := arguments["deadline"]) is not None and trio.current_time() >= deadline_s:
            raise WireError(
                "The request was not finished in time.", code="request_timeout", status=408
            ) from error
        raise
