"""Handshake of a worker that connects to an engine over TCP, before the first frame of `messages`.

    engine --> worker   GREETING | challenge, 32 bytes
    worker --> engine   HELLO    | length, 2 bytes | `Hello`   | proof, 32 bytes
    engine --> worker   WELCOME  | length, 2 bytes | `Welcome` | proof, 32 bytes

A proof is an HMAC-SHA256, keyed with the token that both ends know, over the kind of the message, the challenges so far
and the message itself. So the token never crosses the network, a proof that was overheard is worth nothing for the next
connection, and a worker computes for no engine without the token either: an engine may name code for it to run.

Until the proof has been checked, all that a peer can do is send `MAX_PACKET_BYTES`; the caller bounds the time.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, TypeVar

import attrs
import msgpack

from triolet.errors import FrameError, WorkerRefused, shown
from triolet.ipc.messages import CONVERTER, LAYOUT

# The last byte of each counts the versions of the handshake.
GREETING: Final = b"triolet-engine\x01"
HELLO: Final = b"triolet-worker\x01"
WELCOME: Final = b"triolet-ready \x01"
CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = hashlib.sha256().digest_size
_LENGTH: Final = struct.Struct(">H")
GREETING_BYTES: Final = len(GREETING) + CHALLENGE_BYTES
HEAD_BYTES: Final = len(HELLO) + _LENGTH.size
MAX_BODY_BYTES: Final = 1024
MAX_PACKET_BYTES: Final = HEAD_BYTES + MAX_BODY_BYTES + PROOF_BYTES
MAX_NAME_CHARS: Final = 64  # of a machine's name
MAX_SENTENCE_CHARS: Final = 500


@attrs.frozen
class Hello:
    """What a worker says of itself."""

    version: str  # of triolet
    layout: int  # checksum of the messages
    challenge: bytes
    name: str  # of its machine, for the log
    process_id: int
    group: bytes  # the same for all ranks of one worker
    rank: int


@attrs.frozen
class Welcome:
    """Answer of the engine."""

    refusal: str  # empty: the worker is taken
    num_ranks: int  # processes that the worker is to start, with a connection each


P = TypeVar("P", Hello, Welcome)
_MAGIC: Final[dict[type, bytes]] = {Hello: HELLO, Welcome: WELCOME}


def greeting_with(challenge: bytes) -> bytes:
    """Return the first bytes that an engine sends."""
    return GREETING + challenge


def challenge_of(greeting: bytes) -> bytes:
    """Return the challenge of an engine's greeting.

    Raises:
        FrameError: it is none.
    """
    if not greeting.startswith(GREETING):
        raise FrameError(f"an engine must begin with {GREETING!r}; got {shown(greeting[: len(GREETING)])}")
    return greeting[len(GREETING) :]


def seal(packet: Hello | Welcome, token: str, challenges: bytes) -> bytes:
    """Return the bytes of a packet, with its proof.

    Args:
        challenges: that the other end has sent, and, in a `Welcome`, the engine's own after them.
    """
    body: bytes = msgpack.packb(CONVERTER.unstructure(packet), unicode_errors="surrogatepass")
    magic = _MAGIC[type(packet)]
    return magic + _LENGTH.pack(len(body)) + body + _proof(magic, token, challenges, body)


def length_after(head: bytes, kind: type[P]) -> int:
    """Return how many bytes follow the first `HEAD_BYTES` of a packet.

    Raises:
        FrameError: this is no packet of that kind, or too long a one.
    """
    magic = _MAGIC[kind]
    if not head.startswith(magic):
        raise FrameError(f"a packet must begin with {magic!r}; got {shown(head[: len(magic)])}")
    [length] = _LENGTH.unpack_from(head, len(magic))
    if length > MAX_BODY_BYTES:
        raise FrameError(f"a packet must have at most {MAX_BODY_BYTES} bytes; got {length}")
    return int(length) + PROOF_BYTES


def unseal(rest: bytes, kind: type[P], token: str, challenges: bytes) -> P:
    """Return the packet whose bytes, after its head, are these.

    Raises:
        WorkerRefused: it was sealed with another token.
        FrameError: it is no packet.
    """
    packet, is_proven = _opened(rest, kind, token, challenges)
    if not is_proven or packet is None:
        raise WorkerRefused("both ends must have the same worker token; got a proof of another one")
    return packet


def unseal_welcome(rest: bytes, token: str, challenges: bytes) -> Welcome:
    """Return the answer of an engine, if it takes the worker.

    Raises:
        WorkerRefused: it does not; or it does not know the token.
        FrameError: it is no answer.
    """
    packet, is_proven = _opened(rest, Welcome, token, challenges, needs_proof=False)
    if packet is not None and packet.refusal:  # to be read also by a worker with a wrong token
        sentence = "".join(char if char.isprintable() else "?" for char in packet.refusal)
        raise WorkerRefused(f"the engine refuses this worker: {sentence[:MAX_SENTENCE_CHARS]}")
    if packet is None or not is_proven:
        raise WorkerRefused("the engine must prove that it knows the worker token; it did not")
    return packet


def _opened(
    rest: bytes, kind: type[P], token: str, challenges: bytes, *, needs_proof: bool = True
) -> tuple[P | None, bool]:
    body, proof = rest[:-PROOF_BYTES], rest[-PROOF_BYTES:]
    is_proven = hmac.compare_digest(proof, _proof(_MAGIC[kind], token, challenges, body))
    if needs_proof and not is_proven:  # what is in it is not looked at
        return None, False
    try:
        return CONVERTER.structure(msgpack.unpackb(body, unicode_errors="surrogatepass"), kind), is_proven
    except Exception as error:  # any check may raise anything on a wrong value
        raise FrameError(f"a packet must hold a {kind.__name__}; got {len(body)} bytes: {error}") from error


def refusal_of(hello: Hello, version: str) -> str:
    """Return why a worker that knows the token cannot be taken; an empty text if it can.

    Args:
        version: of the engine.
    """
    if hello.version != version:
        return f"both ends must run the same version of triolet; the worker runs {hello.version}, the engine {version}"
    if hello.layout != LAYOUT:
        return (
            f"both ends must run the same version of triolet; the worker's messages have layout "
            f"{hello.layout:08x}, the engine's {LAYOUT:08x}"
        )
    return ""


def _proof(magic: bytes, token: str, challenges: bytes, body: bytes) -> bytes:
    proof: bytes = hmac.digest(token.encode(errors="surrogatepass"), magic + challenges + body, "sha256")
    return proof
