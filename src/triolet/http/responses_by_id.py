"""`/v1/responses/{id}/...`: what can be done with a response beside reading it."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from triolet.http.responses import as_json, not_found
from triolet.http.service import owner_of, service_of
from triolet.wire.input_items import input_items, page_of


async def cancel_response(request: Request) -> Response:
    """End a response that is being made, wherever it was asked for; one that is over stays as it is."""
    service, owner = service_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    answer = service.running.cancel(response_id, owner, int(time.time()))
    if answer is None:
        answer = service.answering.find_resumable(response_id, owner)
    if answer is not None:
        return as_json(answer.response())
    if (stored := service.answering.store.get(response_id, owner)) is not None:
        return as_json(stored.response)
    raise not_found("There is no response of that id.")


async def list_input_items(request: Request) -> Response:
    """What a response was asked in, with the turns before: messages, calls and their outputs."""
    service, owner = service_of(request), owner_of(request)
    response_id: str = request.path_params["id"]
    if (stored := service.answering.store.get(response_id, owner)) is not None:
        chat = stored.messages[: stored.num_input]
    else:
        answer = service.running.find(response_id, owner)
        if answer is None:
            answer = service.answering.find_resumable(response_id, owner)
        if answer is None:
            raise not_found("There is no response of that id.")
        chat = answer.chat
    return as_json(page_of(input_items(response_id, chat), request.query_params))
