"""A worker and an engine meet only if both know the token; any other bytes are refused, and little is read of them."""

from __future__ import annotations

import hmac

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.errors import FrameError, WorkerRefused
from triolet.ipc.handshake import (
    CHALLENGE_BYTES,
    GREETING,
    HEAD_BYTES,
    HELLO,
    MAX_BODY_BYTES,
    MAX_PACKET_BYTES,
    PROOF_BYTES,
    Hello,
    Welcome,
    challenge_of,
    greeting_with,
    length_after,
    refusal_of,
    seal,
    unseal,
    unseal_welcome,
)
from triolet.ipc.messages import LAYOUT

ENGINES, WORKERS = b"e" * CHALLENGE_BYTES, b"w" * CHALLENGE_BYTES
HI = Hello("1.2", LAYOUT, WORKERS, "host", 17, b"g" * 16, 0)


def test_a_hello_is_what_was_sealed() -> None:
    packet = seal(HI, "sesame", ENGINES)
    assert length_after(packet[:HEAD_BYTES], Hello) == len(packet) - HEAD_BYTES
    assert unseal(packet[HEAD_BYTES:], Hello, "sesame", ENGINES) == HI
    assert len(packet) <= MAX_PACKET_BYTES


def test_the_token_is_in_no_packet() -> None:
    assert b"sesame" not in seal(HI, "sesame", ENGINES) + seal(Welcome("", 1), "sesame", ENGINES)


@pytest.mark.parametrize(("token", "challenge"), [("Sesame", ENGINES), ("sesame", WORKERS), ("", ENGINES)])
def test_a_proof_of_another_token_or_for_another_connection_is_none(token: str, challenge: bytes) -> None:
    packet = seal(HI, "sesame", ENGINES)
    with pytest.raises(WorkerRefused, match="both ends must have the same worker token"):
        unseal(packet[HEAD_BYTES:], Hello, token, challenge)


@given(st.integers(0, 8 * (len(seal(HI, "sesame", ENGINES)) - HEAD_BYTES) - 1))
def test_a_packet_with_a_flipped_bit_is_refused_before_it_is_looked_at(bit: int) -> None:
    packet = bytearray(seal(HI, "sesame", ENGINES)[HEAD_BYTES:])
    packet[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WorkerRefused):
        unseal(bytes(packet), Hello, "sesame", ENGINES)


@given(st.binary(max_size=HEAD_BYTES + 10), st.binary(max_size=200))
def test_rubbish_is_no_packet(head: bytes, rest: bytes) -> None:
    if not head.startswith(GREETING):
        with pytest.raises(FrameError):
            challenge_of(head)
    if not head.startswith(HELLO):
        with pytest.raises(FrameError):
            length_after(head, Hello)
    with pytest.raises((FrameError, WorkerRefused)):
        unseal(rest, Hello, "sesame", ENGINES)
    with pytest.raises((FrameError, WorkerRefused)):
        unseal_welcome(rest, "sesame", ENGINES)


def test_a_packet_that_claims_to_be_long_is_refused_by_its_head() -> None:
    head = HELLO + (MAX_BODY_BYTES + 1).to_bytes(2, "big")
    with pytest.raises(FrameError, match=f"at most {MAX_BODY_BYTES} bytes; got {MAX_BODY_BYTES + 1}"):
        length_after(head, Hello)


@pytest.mark.parametrize("fields", [[], ["1.2"], ["1.2", "x", b"", "h", 1, b"", 0], {}, 5])
def test_a_proven_packet_of_another_shape_is_refused(fields: object) -> None:
    body = msgpack.packb(fields)
    proof = hmac.digest(b"sesame", HELLO + ENGINES + body, "sha256")
    with pytest.raises(FrameError, match="must hold a Hello"):
        unseal(body + proof, Hello, "sesame", ENGINES)


def test_an_engine_takes_only_a_worker_of_its_own_version() -> None:
    assert refusal_of(HI, "1.2") == ""
    assert refusal_of(HI, "1.3") == (
        "both ends must run the same version of triolet; the worker runs 1.2, the engine 1.3"
    )
    other = attrs.evolve(HI, layout=LAYOUT ^ 1)
    assert "the worker's messages have layout" in refusal_of(other, "1.2")


def test_a_worker_reads_why_it_is_refused_without_the_token_and_works_for_no_engine_without_it() -> None:
    refusal = seal(Welcome("too \x1b[31mold", 0), "sesame", ENGINES)[HEAD_BYTES:]
    with pytest.raises(WorkerRefused, match=r"^the engine refuses this worker: too \?\[31mold$"):
        unseal_welcome(refusal, "other", ENGINES)
    taken = seal(Welcome("", 2), "sesame", WORKERS + ENGINES)[HEAD_BYTES:]
    assert unseal_welcome(taken, "sesame", WORKERS + ENGINES) == Welcome("", 2)
    for token, challenges in (("other", WORKERS + ENGINES), ("sesame", ENGINES + WORKERS)):
        with pytest.raises(WorkerRefused, match="the engine must prove that it knows the worker token"):
            unseal_welcome(taken, token, challenges)


def test_a_workers_own_proof_is_worth_nothing_as_an_engines() -> None:
    mirrored = seal(HI, "sesame", ENGINES)[HEAD_BYTES:]
    with pytest.raises((FrameError, WorkerRefused)):
        unseal_welcome(mirrored, "sesame", ENGINES)


def test_a_greeting_carries_its_challenge() -> None:
    assert challenge_of(greeting_with(ENGINES)) == ENGINES
    with pytest.raises(FrameError, match="an engine must begin with"):
        challenge_of(b"HTTP/1.1 400 Bad Request\r\n\r\n" + ENGINES)
    assert len(GREETING) == len(HELLO)
    assert PROOF_BYTES == 32
