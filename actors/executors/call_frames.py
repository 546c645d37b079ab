"""Calls into a worker process as messages: names, plain values and tensors, and no code."""

from __future__ import annotations

import sys

from triolet.core.recovery.supervision import shortage_of, typed_shortages
from triolet.core.worker_call import WorkerCall
from triolet.errors import InvalidRequest, UnsupportedFeature
from triolet.ipc.messages import REQUESTS, CallAnswer, CallWorker
from triolet.ipc.values import pack_value, unpack_value

PURPOSE = "a call into the worker"


def packed_call(call: WorkerCall) -> bytes:
    """Return the frame of a call.

    Raises:
        UnsupportedFeature: the target is a callable of this process.
        InvalidRequest: an argument cannot cross the pipe, or all are too long for it.
        ResourceShortage: there is no memory for the message.
    """
    if not isinstance(call.target, str):
        raise UnsupportedFeature(
            f"{call.name} is not sent to the model runner's process, since code does not cross its pipe: name a method "
            "of worker_extension, or a function as module:function",
            field="method",
            got=call.target,
        )
    try:
        arguments = pack_value([list(call.args), dict(call.kwargs)], _tensor_bytes)
        # A frame that is too long is refused here, while the process still waits.
        return REQUESTS.pack(CallWorker(call.target, call.is_on_model, arguments, call.invalidates))
    except Exception as error:  # torch raises many kinds for tensors that are not plain bytes
        if (shortage := shortage_of(error, PURPOSE)) is not None:
            raise shortage from error
        raise InvalidRequest(
            f"args and kwargs must be plain values and tensors that fit into a message; {error}", field="args"
        ) from error


def value_of(answer: CallAnswer) -> object:
    """Return what a call has returned.

    Raises:
        ResourceShortage: there is no memory for it.
        Exception: it is no value.
    """
    with typed_shortages(PURPOSE):
        return unpack_value(answer.value, _tensor_of)


def _tensor_bytes(value: object) -> bytes | None:
    if "torch" not in sys.modules:  # it takes a second to import, and nothing can be a tensor before
        return None
    from triolet.model.tensor_bytes import tensor_bytes

    return tensor_bytes(value)


def _tensor_of(data: bytes) -> object:
    from triolet.model.tensor_bytes import tensor_of

    return tensor_of(data)
