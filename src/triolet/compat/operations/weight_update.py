"""An exchange of weights in the parts in which programs for vLLM hand it over, and the name of its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triolet.errors import InvalidRequest, UnsupportedFeature

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]


class WeightUpdate:
    """Tensors between `start_weight_update` and `finish_weight_update`, and the label of the weights in use."""

    def __init__(self) -> None:
        self._collected: dict[str, Any] | None = None
        self._label: tuple[int, str] | None = None  # number of the exchange that it stands for, and the label

    def start(self) -> None:
        """Collect tensors from now on.

        Raises:
            InvalidRequest: an update has begun already.
        """
        if self._collected is not None:
            raise InvalidRequest(
                "start_weight_update must come once before finish_weight_update; it came twice"
            )
        self._collected = {}

    def add(self, request: Any) -> dict[str, Any] | None:
        """Return the tensors that are to be exchanged now; None if they wait for the end of the update.

        Raises:
            UnsupportedFeature: a request of another form than tensors by name.
        """
        tensors = tensors_of(request)
        if self._collected is None:
            return tensors
        self._collected |= tensors
        return None

    def finish(self) -> dict[str, Any]:
        """Return all tensors of the update, and end it.

        Raises:
            InvalidRequest: no update has begun.
        """
        if self._collected is None:
            raise InvalidRequest("finish_weight_update must come after start_weight_update; there was none")
        collected, self._collected = self._collected, None
        return collected

    def set_label(self, version: int, label: object) -> None:
        """Name the weights in use.

        Args:
            version: number of the exchange that they came with.
            label: the name.
        Raises:
            InvalidRequest: the name is no text.
        """
        if not isinstance(label, str):
            raise InvalidRequest(
                f"new_version must be a string; got {type(label).__name__}", field="new_version", got=label
            )
        self._label = version, label

    def label(self, version: int) -> str:
        """Return the name of the weights in use: the number of their exchange, if they were given none."""
        return self._label[1] if self._label is not None and self._label[0] == version else str(version)


def tensors_of(request: Any) -> dict[str, Any]:
    """Return tensors by name.

    Raises:
        UnsupportedFeature: a request in the form of one of vLLM's transfer engines.
    """
    if isinstance(request, Mapping) and not {"update_info", "names"} & request.keys():
        return dict(request)
    if isinstance(request, Iterable) and not isinstance(request, str | bytes | Mapping):
        return dict(request)
    raise UnsupportedFeature(
        "update_weights of a transfer engine is not offered: it takes tensors by the names of the checkpoint",
        field="request",
        got=type(request),
    )
