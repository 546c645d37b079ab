"""`POST /score` and `/rerank`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from triolet.core.output.pooling_outputs import ScoringRequestOutput
from triolet.errors import InvalidRequest
from triolet.protocol.scoring import RerankRequest, ScoreRequest
from triolet.server.routes.app_context import AppContext, context_of
from triolet.server.routes.pooling.embeddings import pooled
from triolet.server.routes.request_body import read_json


async def score(request: Request) -> Response:
    """Answer the scores of pairs of texts."""
    context = context_of(request)
    body = context.named(await read_json(request, ScoreRequest.of))
    scores, outputs = await _scored(request, context, body)
    return JSONResponse(body.answer(uuid.uuid4().hex, int(time.time()), scores, outputs))


async def rerank(request: Request) -> Response:
    """Answer documents in the order of their scores for a query."""
    context = context_of(request)
    body = context.named(await read_json(request, RerankRequest.of))
    scores, outputs = await _scored(request, context, body)
    return JSONResponse(body.answer(uuid.uuid4().hex, scores, outputs))


async def _scored(
    request: Request, context: AppContext, body: ScoreRequest | RerankRequest
) -> tuple[list[ScoringRequestOutput], list[Any]]:
    first, second = body.sides
    try:
        scoring = context.engine.plan_scoring(first, second, body.params(), instruction=body.instruction)
    except InvalidRequest as error:
        raise body.refusal(error) from error
    outputs = await pooled(request, context, body, scoring.params, scoring.prompts)
    return scoring.scores(outputs), outputs
