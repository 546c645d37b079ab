"""What goes wrong in the runner's process is raised here as if it had gone wrong here."""

from __future__ import annotations

import pytest

from triolet.errors import (
    ConfigError,
    HubUnreachable,
    InvariantViolated,
    ModelError,
    ModelFileError,
    ModelNotFound,
    RemoteCodeRefused,
    ResourceShortage,
    RunnerFailed,
    TrioletError,
    UnsupportedModel,
    WeightsMismatch,
)
from triolet.ipc.failures import MAX_MESSAGE_CHARS, Failure, describe, rebuild
from triolet.ipc.messages import HEADER_BYTES, REPLIES


def across(error: BaseException, otherwise: type[TrioletError] = ModelError) -> TrioletError:
    failure = REPLIES.unpack(REPLIES.pack(describe(error))[HEADER_BYTES:])
    assert isinstance(failure, Failure)
    return rebuild(failure, otherwise)


@pytest.mark.parametrize(
    "error",
    [
        ModelError("no room"),
        ModelNotFound("m is no folder"),
        HubUnreachable("no network"),
        UnsupportedModel("Mamba is not offered"),
        RemoteCodeRefused("m wants to run code"),
        InvariantViolated("row 1 is r's"),
        ModelFileError("m/config.json", "is not JSON"),
        ConfigError("max_model_len", "at most 256, the positions of this model", 512),
        ConfigError("device", "auto or cpu", "cuda"),
        ConfigError("step_timeout", "above 0", None),
        WeightsMismatch(missing=["a", "b"], misshapen=["c must be (1,); got (2,)"]),
        ResourceShortage("memory", "loading the model"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_errors_keep_their_kind_message_and_fields(error: TrioletError) -> None:
    arrived = across(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_value_that_can_not_be_sent_is_shown() -> None:
    arrived = across(ConfigError("dtype", "a name", object))
    assert isinstance(arrived, ConfigError)
    assert arrived.got == "<class 'object'>"


@pytest.mark.parametrize("otherwise", [ModelError, RunnerFailed])
@pytest.mark.parametrize(
    "error", [KeyError("x"), MemoryError(), SystemExit(3), UnicodeError("\ud800")], ids=repr
)
def test_of_other_errors_kind_and_text_are_kept(error: BaseException, otherwise: type[TrioletError]) -> None:
    arrived = across(error, otherwise)
    assert type(arrived) is otherwise
    assert str(arrived) == f"{type(error).__name__}: {error}"


def test_a_long_message_is_cut() -> None:
    assert len(str(across(RuntimeError("x" * 100_000)))) <= MAX_MESSAGE_CHARS + len("RuntimeError: ")


@pytest.mark.parametrize(
    "failure",
    [
        Failure("ConfigError", "text", {}),
        Failure("ConfigError", "text", {"field": "a", "rule": "b", "got": 1, "more": 2}),
        Failure("SystemExit", "text", {}),
        Failure("os.system", "text", {"command": "true"}),
        Failure("", "text", {}),
    ],
    ids=lambda failure: f"{failure.kind}({len(failure.arguments)})",
)
def test_nothing_is_made_but_what_is_known_by_name_and_arguments(failure: Failure) -> None:
    arrived = rebuild(failure, otherwise=ModelError)
    assert type(arrived) is ModelError
    assert str(arrived) == f"{failure.kind}: text"
