"""Metrics as `get_metrics` of vLLM returns them: one object for each set of labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos"


@attrs.frozen
class Metric:
    """Metric of one set of labels.

    Args:
        name: with its prefix, and without an ending such as `_total`.
        labels: values of the labels, by name.
    """

    name: str
    labels: Mapping[str, str]


@attrs.frozen
class Counter(Metric):
    """Count that only grows."""

    value: int


@attrs.frozen
class Vector(Metric):
    """Counts that only grow, by position: the accepted tokens of drafts."""

    values: list[int]


@attrs.frozen
class Gauge(Metric):
    """Value that goes up and down."""

    value: float


@attrs.frozen
class Histogram(Metric):
    """Observations by size.

    Args:
        count: number of observations.
        sum: of what was observed.
        buckets: number of observations up to a limit, by the limit; `+Inf` has all.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(families: Iterable[Family]) -> list[Metric]:
    """Return the metrics of prometheus_client's families; those of other kinds than vLLM's are left out."""
    return [metric for family in families for metric in _metrics_of(family)]


def _metrics_of(family: Family) -> Iterator[Metric]:
    name = family.name
    if family.type == "gauge":
        for sample in family.samples:
            yield Gauge(name, sample.labels, sample.value)
    elif family.type == "counter" and name.endswith(PER_POSITION):
        for labels, values in _grouped(family, "_total", "position").items():
            accepted = [0] * (1 + max(map(int, values)))
            for position, value in values.items():
                accepted[int(position)] = int(value)
            yield Vector(name, dict(labels), accepted)
    elif family.type == "counter":
        for labels, values in _grouped(family, "_total").items():
            yield Counter(name, dict(labels), int(values[""]))
    elif family.type == "histogram":
        counts, sums = _grouped(family, "_count"), _grouped(family, "_sum")
        for labels, buckets in _grouped(family, "_bucket", "le").items():
            observed = {limit: int(value) for limit, value in buckets.items()}
            yield Histogram(name, dict(labels), int(counts[labels][""]), sums[labels][""], observed)


def _grouped(
    family: Any, ending: str, label: str = ""
) -> dict[tuple[tuple[str, str], ...], dict[str, float]]:
    """Return the samples of a name by their other labels, and then by the value of one label."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        if sample.name == family.name + ending:
            others = tuple(item for item in sample.labels.items() if item[0] != label)
            found.setdefault(others, {})[sample.labels.get(label, "")] = sample.value
    return found
