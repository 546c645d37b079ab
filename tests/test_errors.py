"""An error message names the field, the rule and the value."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from triolet import errors
from triolet.errors import (
    MAX_SHOWN_CHARS,
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineUnhealthy,
    FrameError,
    InvalidParams,
    InvalidPrompt,
    InvalidRequest,
    InvariantViolated,
    KernelShapeError,
    ModelError,
    ModelFileError,
    Overloaded,
    ProfileConflict,
    PromptTooLong,
    RecordingError,
    RequestFailed,
    RequestIdInUse,
    ResourceShortage,
    RunnerDied,
    RunnerFailed,
    StreamMisused,
    TrioletError,
    WeightsMismatch,
    WorkerCallError,
    WorkerCallTimeout,
    WorkerRefused,
    WrongEventLoop,
    WrongTrioRun,
    shown,
)

GROUPS: dict[str, tuple[type[TrioletError], ...]] = {
    "the request is wrong": (InvalidRequest,),
    "the set-up is wrong": (ConfigError, ModelError, RecordingError),
    "the engine cannot serve now": (Overloaded, ResourceShortage, EngineClosed, EngineUnhealthy, EngineDead),
    "the request was taken and failed": (RequestFailed,),
    "the call into a worker failed": (WorkerCallError, WorkerCallTimeout),
    "the program that calls us is wrong": (ProfileConflict, StreamMisused, WrongEventLoop, WrongTrioRun),
    "a supervisor mends it": (RunnerDied, RunnerFailed, FrameError, WorkerRefused),
    "we are wrong": (KernelShapeError, InvariantViolated),
}
CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if value.__module__ == errors.__name__ and issubclass(value, BaseException)
]


def test_all_classes_are_seen_here() -> None:
    assert {TrioletError, InvalidParams, WeightsMismatch} <= set(CLASSES)


@pytest.mark.parametrize("error", [error for error in CLASSES if error is not TrioletError])
def test_every_exception_is_in_exactly_one_group(error: type[BaseException]) -> None:
    assert issubclass(error, TrioletError)
    groups = [group for group, members in GROUPS.items() if issubclass(error, members)]
    assert len(groups) == 1, groups


@pytest.mark.parametrize("error", [InvalidRequest, ConfigError, KernelShapeError])
def test_wrong_values_are_value_errors_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PromptTooLong(101, 100),
            (
                "This model's maximum context length is 100 tokens. However, your prompt has 101 tokens, which leaves "
                "no room for an answer. Please shorten the prompt."
            ),
        ),
        (RequestIdInUse("a"), "request_id must not belong to a live request; got 'a'"),
        (ConfigError("block_size", "a power of 2", 3), "block_size must be a power of 2; got 3"),
        (ModelFileError("m/config.json", "not JSON"), "m/config.json: not JSON"),
        (
            WeightsMismatch(missing=["a", "b"], misshapen=["c must be 1"]),
            "the checkpoint does not fit the architecture; missing tensors: a, b; misshapen tensors: c must be 1",
        ),
        (
            WeightsMismatch(unused=["d"]),
            "the checkpoint does not fit the architecture; unused tensors: d",
        ),
        (
            Overloaded("max_queued_requests", 8, 0.25),
            "the engine is full (max_queued_requests=8); retry after 0.2 s",
        ),
        (
            ResourceShortage("memory", "a grammar process"),
            "there is a shortage of memory for a grammar process; retry after 1.0 s",
        ),
        (RequestFailed("r1", "no numbers"), "request r1 failed: no numbers"),
        (
            KernelShapeError("head_dim", new=(2, 64), cache=(2, 32)),
            "head_dim must agree; got new=(2, 64), cache=(2, 32)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_message_names_the_field_the_rule_and_what_came(error: TrioletError, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (InvalidParams("m", field="n", got=0), {"field": "n", "got": 0, "parameter": "n", "value": 0}),
        (InvalidPrompt("m"), {"field": None, "got": None}),
        (PromptTooLong(9, 8), {"field": "prompt", "got": 9, "num_prompt_tokens": 9, "max_model_len": 8}),
        (RequestIdInUse("a"), {"field": "request_id", "got": "a"}),
        (ConfigError("f", "r", 3), {"field": "f", "rule": "r", "got": 3}),
        (ModelFileError("p", "q"), {"path": "p"}),
        (WeightsMismatch(unused=["d"]), {"missing": (), "unused": ("d",), "misshapen": ()}),
        (Overloaded("l", 8, 0.25), {"limit": "l", "bound": 8, "retry_after_s": 0.25}),
        (RequestFailed("a", "b"), {"request_id": "a", "reason": "b"}),
        (KernelShapeError("w", new=1), {"what": "w", "got": {"new": 1}}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_a_message_says_can_be_read_by_a_program(error: TrioletError, facts: dict[str, object]) -> None:
    assert {name: getattr(error, name) for name in facts} == facts


# A value for each annotation of the classes' parameters; most classes take the message, like `Exception`.
EXAMPLES: dict[object, object] = {
    inspect.Parameter.empty: "the message",
    "str": "a",
    "str | None": "b",
    "int": 3,
    "int | None": -9,
    "float": 0.5,
    "bool": True,
    "object": ("c", 4),
    "Sequence[str]": ("d", "e"),
}


def example_of(kind: type[TrioletError]) -> TrioletError:
    """Return an error of a class, with a value for each of its parameters."""
    positional, named = [], {}
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL):
            positional.append(EXAMPLES[parameter.annotation])
        elif parameter.annotation is not parameter.empty:
            named[parameter.name] = EXAMPLES[parameter.annotation]
    return kind(*positional, **named)


def pickled(error: TrioletError) -> TrioletError:
    twin: TrioletError = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    return twin


@pytest.mark.parametrize("copied", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_copy_or_a_pickle_of_an_error_has_its_text_and_fields(
    kind: type[TrioletError], copied: Callable[[TrioletError], TrioletError]
) -> None:
    error = example_of(kind)
    error.add_note("a note")
    twin = copied(error)
    assert twin is not error
    assert (type(twin), str(twin), twin.args, vars(twin)) == (kind, str(error), error.args, vars(error))


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


class Counted:
    def __init__(self) -> None:
        self.num_shown = 0

    def __repr__(self) -> str:
        self.num_shown += 1
        return "1"


def test_a_short_value_is_shown_whole() -> None:
    assert [shown(value) for value in (3, 3.0, "a", ["a"], None)] == ["3", "3.0", "'a'", "['a']", "None"]


def test_a_long_value_is_shown_in_part() -> None:
    assert shown("a" * 78) == f"'{'a' * 78}'"
    assert shown("a" * 79) == f"'{'a' * 76}..."
    assert shown(list(range(10**5))) == repr(list(range(100)))[: MAX_SHOWN_CHARS - 3] + "..."
    assert shown(nested(10**5)) == "[" * (MAX_SHOWN_CHARS - 3) + "..."


def test_only_the_beginning_of_a_long_value_is_made_into_text() -> None:
    counted = Counted()
    shown({"a": [counted] * 10**5})
    assert 0 < counted.num_shown <= MAX_SHOWN_CHARS


@pytest.mark.parametrize("value", [10**5000, [10**5000], Unshowable()], ids=["int", "list", "own"])
def test_a_value_that_has_no_text_does_not_hide_the_error(value: object) -> None:
    assert shown(value) == f"a {type(value).__name__} that cannot be shown"
    assert str(ConfigError("seed", "small", value)).startswith("seed must be small; got a ")
