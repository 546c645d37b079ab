"""Shortages are told from other errors by their errno, their type or their text, and attempts are paced."""

from __future__ import annotations

import errno

import pytest

from triolet.core.recovery.supervision import Backoff, shortage_of, typed_shortages
from triolet.errors import ResourceShortage


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "file descriptors for this process (RLIMIT_NOFILE)"),
        (OSError(errno.ENFILE, ""), "file descriptors on this machine"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "processes or threads"),
        (RuntimeError("can't start new thread"), "processes or threads"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (MemoryError(), "memory"),
        (ImportError("libm.so.6: failed to map segment from shared object"), "memory"),
        (OSError(errno.ENOBUFS, ""), "network buffers"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk space"),
        (OSError(errno.EDQUOT, ""), "disk quota"),
    ],
)
def test_a_shortage_names_its_resource_and_what_it_was_for(error: Exception, resource: str) -> None:
    shortage = shortage_of(error, "a grammar process")
    assert shortage is not None
    assert (shortage.resource, shortage.purpose) == (resource, "a grammar process")
    assert resource in str(shortage)
    assert shortage.__cause__ is error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, ""), RuntimeError("no"), ValueError(), OSError("EMFILE")]
)
def test_other_errors_are_no_shortage(error: Exception) -> None:
    assert shortage_of(error, "anything") is None
    with pytest.raises(type(error)) as raised, typed_shortages("anything"):
        raise error
    assert raised.value is error


def test_a_shortage_is_found_below_the_error_that_it_caused() -> None:
    error = ValueError("config.json cannot be read")
    error.__cause__ = OSError(errno.EMFILE, "")
    with pytest.raises(ResourceShortage, match="RLIMIT_NOFILE"), typed_shortages("loading the model"):
        raise error


def test_a_chain_of_causes_may_be_a_circle() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert shortage_of(one, "anything") is None


def test_a_shortage_stays_the_one_that_it_is() -> None:
    shortage = ResourceShortage("memory", "loading the model")
    with pytest.raises(ResourceShortage) as raised, typed_shortages("anything"):
        raise shortage
    assert raised.value is shortage


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(min_s=0.1, max_s=0.5)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_a_typed_shortage_is_itself_and_gets_no_other_cause() -> None:
    shortage = ResourceShortage("memory", "loading the model")
    assert shortage_of(shortage, "anything") is shortage
    with pytest.raises(ResourceShortage) as raised, typed_shortages("anything"):
        raise shortage
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(("num_above", "is_found"), [(7, True), (8, False)])
def test_the_first_eight_of_a_chain_of_causes_are_looked_at(num_above: int, is_found: bool) -> None:
    error: Exception = MemoryError()
    for _ in range(num_above):
        above = ValueError()
        above.__cause__ = error
        error = above
    assert (shortage_of(error, "anything") is not None) is is_found


def test_pauses_are_a_tenth_of_a_second_to_five_seconds() -> None:
    backoff = Backoff()
    pauses = [backoff.next_s() for _ in range(10)]
    assert (pauses[0], pauses[-1]) == (0.1, 5.0)
