"""`GatewayConfig`: what `triolet serve` is started with, beside the engine's own `EngineConfig`.

As there: one frozen value, the same from keywords, flags (`--max-lanes`) or the environment (`TRIOLET_MAX_LANES`); a
default stands beside its reason, and only what is honoured is a field.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from triolet.config.fields import Configuration, option, seconds, text, texts, whole
from triolet.errors import ConfigError

METRICS_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")  # what a name at Prometheus may begin with


def _count(text: str, *, default: int | None) -> Any:
    """A field with a whole number from 1 on, or none where that is the default."""
    return option(text, default=default, validator=whole(1, optional=default is None))


def _seconds(text: str, *, default: float | None) -> Any:
    """A field with seconds, or none where that is the default."""
    return option(text, default=default, validator=seconds(optional=default is None))


def _metrics_prefix(_config: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not METRICS_PREFIX.fullmatch(value):
        raise ConfigError(attribute.name, "letters, digits, _ and :, the first no digit", value)


@attrs.frozen(kw_only=True)
class GatewayConfig(Configuration):
    """How the server listens, whom it lets in, and what one of them may take.

    Raises:
        ConfigError: a field of the wrong type or out of range; names the field, the rule and what came.
    """

    # ------------------------------------------------------------------------------------- listening

    host: str = option(
        # A model that anybody in the network can use should be somebody's decision.
        "Address to listen on.",
        default="127.0.0.1",
        validator=text(),
    )
    port: int = option("Port to listen on; 0 picks a free one.", default=8000, validator=whole(0))
    certfile: str | None = option(
        "Certificate chain, PEM; with it the server speaks TLS.", default=None, validator=text(optional=True)
    )
    keyfile: str | None = option(
        "Private key of the certificate, PEM, if it is not in the same file.",
        default=None,
        validator=text(optional=True),
    )

    # ------------------------------------------------------------------------------------ who may enter

    api_keys: tuple[str, ...] = option(
        "Bearer keys; without any, the engine's.", default=(), validator=texts, is_secret=True
    )
    allowed_origins: tuple[str, ...] = option(
        # A browser sends the page's origin along and asks nobody: without a check, every page that a user visits could
        # talk to the server on the user's own machine.
        "Origins of web pages that may connect, beside the server's own; * is any.",
        default=(),
        validator=texts,
    )
    allowed_hosts: tuple[str, ...] = option(
        # Against DNS rebinding: a foreign name that suddenly points to this machine is not in the list.
        "Names in the Host header that are answered; by default any where there are keys or the address is not "
        "this machine's own, and otherwise only this machine's names; * is any.",
        default=(),
        validator=texts,
    )

    # ------------------------------------------------------------------------------------------ how many

    max_connections: int = _count(
        # 20 KiB each, and a file descriptor, of which most systems grant this many when asked.
        "Connections at the same time.",
        default=16_384,
    )
    max_connections_per_address: int | None = _count(
        # None: behind a reverse proxy all of them come from one address.
        "Connections at the same time from one address; by default as many as there may be.",
        default=None,
    )
    max_connections_per_key: int | None = _count(
        "Connections at the same time with one key; by default as many as there may be.",
        default=None,
    )
    max_active_per_key: int | None = _count(
        "Responses at the same time for one key; by default as many as the engine takes.",
        default=None,
    )
    max_active_responses: int = _count(
        "Responses at the same time on one WebSocket; others wait their turn.",
        default=16,  # OpenAI's
    )
    max_lanes: int = _count(
        "Named lanes of one WebSocket.",
        default=32,  # OpenAI's
    )
    max_queued_responses: int = _count(
        # Four turns in each of OpenAI's 32 lanes, twice; a client that is further ahead of its answers is not reading.
        "Responses that may wait on one WebSocket; one more is refused.",
        default=256,
    )
    max_body_bytes: int = option(
        # 262144 tokens of text are 1.7 MB; twice that leaves room for escapes, tools and schemas.
        "Longest body of an HTTP request, in bytes.",
        default=4 * 2**20,
        validator=whole(1024),
    )
    max_message_bytes: int = option(
        # The same request as over HTTP.
        "Longest message of a client on a WebSocket, in bytes.",
        default=4 * 2**20,
        validator=whole(1024),
    )
    max_input_bytes: int = option(
        # 16 of the longest bodies; a body takes about five times its length while it is parsed.
        "Bodies and messages that are being read and parsed at the same time, in bytes; a longer one waits its turn "
        "with 503. The first 16 KiB of each are not counted.",
        default=64 * 2**20,
        validator=whole(1024),
    )
    max_input_bytes_per_client: int = option(
        # A quarter of the whole: no single client can use it up.
        "The same for one API key or, without keys, for one address; over it 429.",
        default=16 * 2**20,
        validator=whole(1024),
    )
    max_json_values: int = _count(
        # A prompt of token ids has one value per token.
        "Values and keys in one body or message.",
        default=2**18,
    )
    max_json_members: int = _count(
        # Messages of a chat, tools, token ids in logit_bias: each costs work in the event loop.
        "Keys of one JSON object, and objects or lists in one JSON list.",
        default=2048,
    )
    max_json_depth: int = _count(
        # Twice the depth that schemas may have.
        "JSON objects and lists inside each other.",
        default=128,
    )
    max_message_fragments: int = _count(
        # 4 MiB in fragments of 1 KiB, the smallest that libraries and proxies make.
        "Fragments that one WebSocket message may be cut into.",
        default=4096,
    )
    max_frames_per_second: int = _count(
        # One longest message in the smallest fragments; a frame costs about 20 us.
        "WebSocket frames of a client that are read in one second, of any kind; with more it is disconnected.",
        default=5000,
    )
    max_pings_per_second: int = _count(
        # A client that keeps a connection open sends one every 20 s.
        "Pings and pongs of a client that are read in one second; with more it is disconnected.",
        default=100,
    )

    # ------------------------------------------------------------------------------------------ how long

    handshake_timeout: float = _seconds(
        "Seconds that a client has for the head of its request.", default=10.0
    )
    ping_interval: float = _seconds(
        # The openai SDK's own, and shorter than the idle limit of the usual proxies (60 s).
        "Seconds between two pings to a client on a WebSocket; after two without an answer it is disconnected.",
        default=20.0,
    )
    write_timeout: float = _seconds(
        # Longer than any hiccup of a network that recovers; until then what it missed is joined, not lost.
        "Seconds after which a client that takes nothing of what is sent to it is disconnected.",
        default=20.0,
    )
    close_timeout: float = _seconds(
        "Seconds that a client has to answer the end of a WebSocket.", default=2.0
    )
    connection_lifetime: float | None = _seconds(
        "Seconds after which a WebSocket is ended; none is never.",
        default=None,
    )
    grace_period: float = _seconds(
        # Kubernetes kills after 30 s; this leaves it the time to say goodbye.
        "Seconds that running responses have to finish after SIGTERM.",
        default=25.0,
    )
    resume_grace: float = _seconds(
        "Seconds that a resumable response waits for its client to come back.", default=30.0
    )
    snapshot: str | None = option(
        # None: what clients have asked and been answered lies in it.
        "File in which the server leaves its resumable responses at its end, for the next one to go on with; by "
        "default they end with it.",
        default=None,
        validator=text(optional=True),
    )

    # ------------------------------------------------------------------------------------------ memory

    max_stored_responses: int = _count(
        "Responses that are remembered for previous_response_id and GET; the oldest goes first.", default=1024
    )
    max_stored_bytes: int = _count(
        # Over the limit, the key that holds most loses its oldest: one key cannot evict the responses of another one.
        "Memory for remembered responses, in bytes.",
        default=64 * 2**20,
    )
    max_connection_stored_bytes: int = _count(
        # A quarter of the memory for all: a client that stores nothing still continues its own chats.
        "Memory for responses with store=false, in bytes, of all WebSockets together; they last as long as their "
        "connection.",
        default=64 * 2**20,
    )

    # --------------------------------------------------------------------------------------- numbers

    metrics_prefix: str = option(
        "Of the names at /metrics; vllm: makes dashboards for vLLM work.",
        default="triolet:",
        validator=_metrics_prefix,
    )
