"""Routes for operators: health, metrics, version, models, live requests, pause, sleep, weights and adapters.

The routes that change something ask for an operator's key, where there are keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import triolet
from triolet.core.metrics.iteration_stats import ReplicaStatistics
from triolet.core.request.lora import LoRARequest
from triolet.core.request.pooling_params import GENERATE
from triolet.core.tools.answer import thinking_switch_of
from triolet.engine.adapters import register_lora
from triolet.errors import EngineDead, EngineUnhealthy, ModelError, TrioletError, shown
from triolet.observability.prometheus import CONTENT_TYPE
from triolet.protocol.errors import WireError, model_not_found, wrong
from triolet.protocol.responses.session import shutting_down
from triolet.server.models.host import root_of
from triolet.server.responses.generate import adapter_argument
from triolet.server.routes.app_context import AppContext, context_of, owner_of
from triolet.server.routes.request_body import read_json


async def health(request: Request) -> Response:
    """Answer 200 while the engine makes progress, is idle or restarts a part of itself, otherwise 503 (liveness).

    While the server drains the access middleware answers 503 to every route but a few, this one included.
    """
    try:
        context_of(request).engine.check_health()
    except (EngineUnhealthy, EngineDead) as error:
        sentence = (
            str(error)
            if isinstance(error, EngineUnhealthy)
            else "The engine has stopped after repeated failures."
        )  # the cause may contain file names
        raise WireError(sentence, code="unhealthy", status=503, type="server_error") from None
    # A restart is no reason to end the server: the streams wait for it, and would be lost.
    engine = context_of(request).engine
    statistics = engine.statistics()
    content: dict[str, object] = {"status": "ok"}
    if statistics.restarting:
        content = {"status": "restarting", "restarting": statistics.restarting}
    elif engine.is_sleeping or engine.is_paused:
        content = {"status": "sleeping" if engine.is_sleeping else "paused"}
    if statistics.replicas:
        content["replicas"] = [_shown_replica(replica) for replica in statistics.replicas]
    return JSONResponse(content)


def _shown_replica(replica: ReplicaStatistics) -> dict[str, object]:
    absent = "parked" if replica.is_parked else "restarting"
    return {
        "replica": replica.replica,
        "status": "ok" if replica.is_living else absent,
        "running": replica.num_requests_running,
        "waiting": replica.num_requests_waiting,
        "steps": replica.steps,
    }


async def ready(request: Request) -> Response:
    """Answer 200 while new requests are computed at once, otherwise 503 (readiness)."""
    await health(request)
    engine = context_of(request).engine
    if not engine.is_open:
        raise shutting_down()
    statistics = engine.statistics()
    restarting = statistics.restarting
    if any(replica.is_living for replica in statistics.replicas):
        # one of several replicas computes new requests at once: its actors need not be there
        restarting = tuple(actor for actor in restarting if "." not in actor)
    if restarting:
        raise WireError(
            f"The engine is restarting: {', '.join(restarting)}.",
            code="restarting",
            status=503,
            type="server_error",
            retry_after_s=1.0,
        )
    # One that sleeps because it was idle is woken by the next request: it must go on to get some.
    if engine.is_sleeping and not engine.wakes_by_itself:
        raise WireError("The engine sleeps.", code="sleeping", status=503, type="server_error")
    if engine.is_paused:
        raise WireError("Generation is paused.", code="paused", status=503, type="server_error")
    return JSONResponse({"status": "ok"})


async def pause(request: Request) -> Response:
    """Pause generation, for an operator: `?mode=abort|wait|keep&clear_cache=true|false`, as in vLLM."""
    engine = operator_context(request).engine
    query = read_query(request, "mode", "clear_cache")
    await engine.pause_generation(
        query.get("mode", "abort"), clear_cache=_boolean(query, "clear_cache", default=True)
    )
    return JSONResponse({"status": "paused"})


async def resume(request: Request) -> Response:
    """End a pause, for an operator."""
    operator_context(request).engine.resume_generation()
    return JSONResponse({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Answer whether generation is paused, to an operator."""
    return JSONResponse({"is_paused": operator_context(request).engine.is_paused})


async def sleep(request: Request) -> Response:
    """Put the engine to sleep, for an operator: `?level=0|1|2&mode=abort|wait|keep`, as in vLLM."""
    engine = operator_context(request).engine
    query = read_query(request, "level", "mode")
    level = query.get("level", "1")
    await engine.sleep(int(level) if level in ("0", "1", "2") else level, query.get("mode", "abort"))  # type: ignore[arg-type]
    return JSONResponse({"status": "sleeping", "level": engine.statistics().sleep_level})


async def wake_up(request: Request) -> Response:
    """Wake the engine or a part of it, for an operator: `?tags=weights&tags=kv_cache`, as in vLLM."""
    engine = operator_context(request).engine
    read_query(request, "tags")
    tags = request.query_params.getlist("tags") or None
    is_awake = await engine.wake_up(tags)
    return JSONResponse({"status": "awake" if is_awake else "sleeping", "tags": tags})


async def is_sleeping(request: Request) -> Response:
    """Answer whether the engine sleeps, to an operator."""
    return JSONResponse({"is_sleeping": operator_context(request).engine.is_sleeping})


async def update_weights_from_disk(request: Request) -> Response:
    """Serve with the weights of another folder of the server, for an operator: `{"model_path": PATH}`, as in SGLang."""
    engine = operator_context(request).engine
    body = await _read_fields(request, "model_path", "mode")
    try:
        await engine.reload_weights(body.get("model_path"), mode=body.get("mode", "keep"))  # type: ignore[arg-type]
    except ModelError as error:
        # The files are the operator's own: the sentence may name them.
        raise WireError(str(error), code="weights_refused", param="model_path") from None
    return JSONResponse({"success": True, "message": "", "weight_version": engine.weight_version})


async def weight_info(request: Request) -> Response:
    """Answer which weights are in use, to an operator."""
    engine = operator_context(request).engine
    return JSONResponse({"weight_version": engine.weight_version, "model_path": engine.weights_folder})


async def load(request: Request) -> Response:
    """Answer how many requests are in the engine."""
    return JSONResponse({"server_load": context_of(request).engine.statistics().num_requests_live})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV that is not in use, for an operator: `?reset_running_requests=true|false`, as in vLLM."""
    engine = operator_context(request).engine
    query = read_query(request, "reset_running_requests", "reset_external")
    if _boolean(query, "reset_external", default=False):
        raise wrong("reset_external", "false: KV is not kept outside of the engine", True)
    is_forced = _boolean(query, "reset_running_requests", default=False)
    return JSONResponse({"success": engine.reset_prefix_cache(reset_running_requests=is_forced)})


async def reset_other_cache(request: Request) -> Response:
    """Answer an operator at once: there is no cache of images or encoders."""
    operator_context(request)
    return Response()


async def collective_rpc(request: Request) -> Response:
    """Call a method of every worker, for an operator: `{"method", "args", "kwargs", "timeout"}`, as in vLLM.

    Results that JSON does not have are answered as texts.
    """
    engine = operator_context(request).engine
    body = await _read_fields(request, "method", "args", "kwargs", "timeout")
    given = {"args": [], "kwargs": {}} | {name: value for name, value in body.items() if value is not None}
    method, args, kwargs, timeout = (given.get(name) for name in ("method", "args", "kwargs", "timeout"))
    if not isinstance(method, str) or not method:
        raise wrong("method", "the name of a method", method)
    if not isinstance(args, list):
        raise wrong("args", "a list", args)
    if not isinstance(kwargs, dict):
        raise wrong("kwargs", "an object", kwargs)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        raise wrong("timeout", "seconds", timeout)
    try:
        results = await engine.collective_rpc(method, timeout, args, kwargs)
    except (TrioletError, trio.Cancelled):
        raise
    except Exception as error:
        # The methods are the operator's own: the sentence may say what they met.
        sentence = f"{method} failed: {type(error).__name__}: {shown(str(error))}"
        raise WireError(sentence, code="worker_call_failed", status=500, type="server_error") from None
    return JSONResponse({"results": [_wire_result(one) for one in results]})


def _wire_result(result: object) -> object:
    if result is None or isinstance(result, dict | list):
        try:
            json.dumps(result, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return str(result)
        return result
    return str(result)


async def start_profile(request: Request) -> Response:
    """Begin to record a profile, for an operator; the route is there only with `profile_dir`."""
    engine = operator_context(request).engine
    await engine.start_profile(read_query(request, "prefix").get("prefix"))
    return JSONResponse({"status": "recording"})


async def stop_profile(request: Request) -> Response:
    """End a profile, for an operator, and answer where its trace is."""
    return JSONResponse({"status": "written", "path": await operator_context(request).engine.stop_profile()})


async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter, for an operator: `{"lora_name", "lora_path", "load_inplace", "model"}`, as in vLLM.

    `lora_path` lies within the server's `lora_dir`; the route is there only with that. `model` is the first one if it
    is left out.
    """
    context = operator_context(request)
    engine = context.engine
    body = await _read_fields(request, "lora_name", "lora_path", "load_inplace", "model")
    _check_adapted_model(context, body)
    # Of all models of the server: a name chooses the model, too.
    served = context.responses_context if context.gateway is None else context.gateway.context
    name, load_inplace = body.get("lora_name"), body.get("load_inplace", False)
    if not name or not body.get("lora_path"):
        param = "lora_path" if name else "lora_name"
        raise WireError(
            "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_value", param=param
        )
    if not isinstance(name, str) or name in served.models:
        raise wrong("lora_name", "a string that is not the name of a model", name)
    if not isinstance(load_inplace, bool):
        raise wrong("load_inplace", "true or false", load_inplace)
    folder = _adapter_folder(context.config.lora_dir or "", body["lora_path"])
    numbers = {lora.lora_name: lora.lora_int_id for lora in engine.loras()}
    if name in served.adapter_names() and not (load_inplace and name in numbers):
        raise WireError(
            f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            code="invalid_value",
            param="lora_name",
        )
    if not folder.is_dir():
        sentence = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
        raise WireError(sentence, code="adapter_not_found", status=404, param="lora_path")
    number = numbers.get(name) or next(
        number for number in context.adapter_numbers if number not in engine.list_loras()
    )
    await register_lora(engine, LoRARequest(name, number, str(folder), load_inplace=load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Forget a LoRA adapter, for an operator: `{"lora_name", "lora_int_id", "model"}`; requests with it go on."""
    context = operator_context(request)
    engine = context.engine
    body = await _read_fields(request, "lora_name", "lora_int_id", "model")
    _check_adapted_model(context, body)
    name, number = body.get("lora_name"), body.get("lora_int_id")
    if not name or not isinstance(name, str):
        raise wrong("lora_name", "the name of an adapter", name)
    loaded = {lora.lora_name: lora.lora_int_id for lora in engine.loras()}
    if name not in loaded or number not in (None, loaded[name]):
        sentence = f"The lora adapter '{name}' cannot be found."
        raise WireError(sentence, code="adapter_not_found", status=404, param="lora_name")
    engine.remove_lora(loaded[name])
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_adapted_model(context: AppContext, body: dict[str, Any]) -> None:
    """Check that `model`, if it is given, is the model of the context; `ModelMiddleware` has chosen that by it.

    Raises:
        WireError: no model has that name.
    """
    if (model := body.get("model")) is not None and model not in context.model_names:
        raise model_not_found(str(model))


def _adapter_folder(allowed: str, path: object) -> Path:
    """Return the folder of an adapter.

    Raises:
        WireError: it is not within the allowed folder, all links followed.
    """
    root = Path(allowed).resolve()
    folder = (root / path).resolve() if isinstance(path, str) and "\0" not in path else None
    if folder is None or folder == root or not folder.is_relative_to(root):
        raise wrong("lora_path", "a folder within the server's lora_dir", path)
    return folder


async def _read_fields(request: Request, *names: str) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        WireError: it is no JSON object, or has another field.
    """
    body: dict[str, Any] = await read_json(request, lambda payload: payload)
    if unknown := sorted(body.keys() - set(names)):
        raise wrong(unknown[0], "left out", body[unknown[0]])
    return body


def operator_context(request: Request) -> AppContext:
    """Return the context of an operator's request.

    Raises:
        WireError: 403, the key is no operator's.
    """
    context = context_of(request)
    context.access.check_operator(owner_of(request))
    return context


def read_query(request: Request, *names: str) -> dict[str, str]:
    """Return the query of a request.

    Raises:
        WireError: there is another name in it.
    """
    query = dict(request.query_params)
    if unknown := sorted(query.keys() - set(names)):
        raise wrong(unknown[0], f"one of {', '.join(names)} as a name in the query", unknown[0])
    return query


def _boolean(query: dict[str, str], name: str, *, default: bool) -> bool:
    value = query.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise wrong(name, "true or false", value)
    return value == "true"


async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    context = context_of(request)
    host = None if context.gateway is None else context.gateway.models
    others = () if host is None else host.metrics
    text = b""
    for pieces in (
        context.metrics.render_in_pieces(*others),
        context.gateway_metrics.render_in_pieces(),
    ):
        for piece in pieces:
            text += piece
            await trio.lowlevel.checkpoint()
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """Answer the version of triolet."""
    return JSONResponse({"version": triolet.__version__})


async def requests(request: Request) -> Response:
    """List the live requests; with keys, those of the same key."""
    context = context_of(request)
    # Prompts are not shown, but ids and lengths of other keys' requests would be.
    host = None if context.gateway is None else context.gateway.models
    engines = [context.engine, *(() if host is None else host.engines)]
    live = [one for engine in engines for one in engine.requests(owner_of(request))]
    return JSONResponse(
        {"object": "list", "data": [{"object": "request", **attrs.asdict(one)} for one in live]}
    )


async def models(request: Request) -> Response:
    """List the served models under all their names."""
    context = context_of(request)
    adapters = [_adapter_card(context, name) for name in context.responses_context.adapter_names()]
    return JSONResponse(
        {"object": "list", "data": [*(_card(context, name) for name in context.model_names), *adapters]}
    )


async def model(request: Request) -> Response:
    """Answer one model by name."""
    context = context_of(request)
    name: str = request.path_params["name"]
    if not name:  # a trailing slash
        return await models(request)
    context.check_model(name, takes_adapters=True)
    is_adapter = name not in context.model_names
    return JSONResponse(_adapter_card(context, name) if is_adapter else _card(context, name))


def _adapter_card(context: AppContext, name: str) -> dict[str, Any]:
    host = None if context.gateway is None else context.gateway.models
    if host is not None and (hosted := host.model_of(name)) is not None:
        card = _card(context, hosted)
        return {**card, "id": name, "root": name, "parent": hosted, "tasks": card["tasks"] and (GENERATE,)}
    # The folder is not shown: with keys, it would tell any client about the disk of the server.
    lora = adapter_argument(context.engine, name).get("lora")
    return {
        "id": name,
        "object": "model",
        "created": context.began_at,
        "owned_by": "triolet",
        "root": name,
        "parent": (lora and lora.base_model_name) or context.engine.model_name,
        "max_model_len": context.engine.max_model_len,
        "tasks": (GENERATE,),
        "thinking_switch": thinking_switch_of(context.engine.tokenizer),
    }


def _card(context: AppContext, name: str) -> dict[str, Any]:
    host = None if context.gateway is None else context.gateway.models
    if host is not None and name in host.names:
        card = {
            "id": name,
            "object": "model",
            "created": context.began_at,
            "owned_by": "triolet",
            "root": name,
        }
        # The rest is known once it has been loaded.
        return {**card, "parent": None, "max_model_len": None, "tasks": None, **host.described(name)}
    # A server of one model has nothing to tell apart.
    state = {} if host is None else host.description_of_first(context.engine)
    return {
        "id": name,
        "object": "model",
        # Clients require it; when the model was made is not known.
        "created": context.began_at,
        "owned_by": "triolet",
        "root": root_of(context.engine),
        "parent": None,
        "max_model_len": context.engine.max_model_len,
        "tasks": context.engine.model_info.tasks,
        "thinking_switch": thinking_switch_of(context.engine.tokenizer),
        **state,
    }
