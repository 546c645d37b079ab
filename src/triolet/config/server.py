"""`GatewayConfig`: the server's options, which `triolet serve` takes beside those of `EngineConfig`.

Like that one it is a frozen value, equal whether it came from keywords, flags (`--max-lanes`) or the environment
(`TRIOLET_MAX_LANES`), and every field is honoured.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from triolet.config.fields import (
    Configuration,
    each_matching,
    keys,
    matching,
    option,
    seconds,
    text,
    texts,
    whole,
)
from triolet.errors import ConfigError

# Any other entry would equal no Origin header, and would allow nothing.
ORIGIN: Final = r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]A-Z\"'*]+)(:[0-9]{1,5})?"


def _count(sentence: str, *, default: int | None) -> Any:
    """Return a field for a whole number from 1 on; it is optional where the default is None."""
    return option(sentence, default=default, rule=whole(1, optional=default is None))


def _seconds(sentence: str, *, default: float | None) -> Any:
    """Return a field for a number of seconds; it is optional where the default is None."""
    return option(sentence, default=default, rule=seconds(optional=default is None))


@attrs.frozen(kw_only=True)
class GatewayConfig(Configuration):
    """Configuration of the server: addresses, access, limits per client, and timeouts.

    Raises:
        ConfigError: a field of the wrong type or out of range; names the field, the rule and what came.
    """

    # ------------------------------------------------------------------------------------- listening

    host: str = option(
        # opening the model to the network must be a decision
        "Address to listen on.",
        default="127.0.0.1",
        rule=text(),
    )
    port: int = option("Port to listen on; 0 picks a free one.", default=8000, rule=whole(0))
    uds: str | None = option(
        "Path of a Unix socket to listen on, in place of host and port.",
        default=None,
        rule=text(optional=True),
    )
    certfile: str | None = option(
        "Certificate chain, PEM; turns on TLS.", default=None, rule=text(optional=True)
    )
    keyfile: str | None = option(
        "Private key of the certificate, PEM, if it is not in the same file.",
        default=None,
        rule=text(optional=True),
    )

    # --------------------------------------------------------------------------------------- access

    api_keys: tuple[str, ...] = option(
        "API keys, separated by commas; without any, the engine's.",
        default=(),
        rule=keys(),
        is_secret=True,
    )
    priority_keys: tuple[str, ...] = option(
        # where there are keys, each could otherwise put its requests before those of all others
        "Further API keys, separated by commas, whose requests may have a priority below 0.",
        default=(),
        rule=keys(),
        is_secret=True,
    )
    allowed_origins: tuple[str, ...] = option(
        # without this check, every web page that a user visits could use the server on the user's own machine
        "Origins of web pages that may connect, beside the server's own, as scheme://host[:port]; * allows all.",
        default=(),
        rule=each_matching(ORIGIN, "* or scheme://host[:port] without capitals, as browsers write it"),
    )
    allowed_hosts: tuple[str, ...] = option(
        # against DNS rebinding: a foreign name that is made to point to this machine is not in the list
        "Names in the Host header that are answered, beside --host and this machine's own; * allows all. By default "
        "all if there are keys, otherwise none; with a --host that other machines reach, all addresses too.",
        default=(),
        rule=texts(),
    )

    # --------------------------------------------------------------------------------------- limits

    max_connections: int = _count(
        # 20 KiB each, and a file descriptor; most systems allow this many
        "Most connections at the same time.",
        default=16_384,
    )
    max_connections_per_address: int | None = _count(
        # None: behind a reverse proxy all connections come from one address
        "Most connections at the same time from one address; by default no limit of its own.",
        default=None,
    )
    max_connections_per_key: int | None = _count(
        "Most connections at the same time with one API key; by default no limit of its own.",
        default=None,
    )
    max_active_per_key: int | None = _count(
        "Most active responses for one API key; by default no limit of its own.",
        default=None,
    )
    max_active_responses: int = _count(
        "Most active responses on one WebSocket; further ones wait.",
        default=16,  # OpenAI's
    )
    max_lanes: int = _count(
        "Most named lanes of one WebSocket.",
        default=32,  # OpenAI's
    )
    max_queued_responses: int = _count(
        # eight turns in each of OpenAI's 32 lanes; a client that is further ahead of its answers does not read
        "Most responses that may wait on one WebSocket; one more is refused.",
        default=256,
    )
    max_body_bytes: int = option(
        # 262144 tokens of text are 1.7 MB; twice that leaves room for escapes, tools and schemas.
        "Longest body of an HTTP request, in bytes.",
        default=4 * 2**20,
        rule=whole(1024),
    )
    max_message_bytes: int = option(
        # The same request as over HTTP.
        "Longest message of a client on a WebSocket, in bytes.",
        default=4 * 2**20,
        rule=whole(1024),
    )
    max_input_bytes: int = option(
        # 16 of the longest bodies; a body takes about five times its length while it is parsed.
        "Bodies and messages that are being read and parsed at the same time, in bytes; a longer one waits its turn "
        "with 503. The first 16 KiB of each are not counted.",
        default=64 * 2**20,
        rule=whole(1024),
    )
    max_input_bytes_per_client: int = option(
        # A quarter of the whole: no single client can use it up.
        "The same for one API key or, without keys, for one address; over it 429.",
        default=16 * 2**20,
        rule=whole(1024),
    )
    max_json_values: int = _count(
        # A prompt of token ids has one value per token.
        "Values and keys in one body or message.",
        default=2**18,
    )
    max_json_members: int = _count(
        # Messages of a chat, tools, stop texts, token ids in logit_bias: each costs memory and work in the event loop.
        "Keys of one JSON object, and items of one JSON list; a list of numbers may be longer down to the third level.",
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

    # --------------------------------------------------------------------------------------- timeouts

    handshake_timeout: float = _seconds(
        "Seconds within which a client must send the head of its request.", default=10.0
    )
    ping_interval: float = _seconds(
        # the openai SDK's, and shorter than the idle limit of the usual proxies (60 s)
        "Seconds between two pings to a WebSocket client; after two unanswered ones it is disconnected.",
        default=20.0,
    )
    write_timeout: float = _seconds(
        # longer than the usual interruption of a network; deltas are joined meanwhile, not lost
        "Seconds after which a client that accepts no data is disconnected.",
        default=20.0,
    )
    close_timeout: float = _seconds(
        "Seconds within which a client must answer the close frame of a WebSocket.", default=2.0
    )
    connection_lifetime: float | None = _seconds(
        "Seconds after which a WebSocket is closed; none: never.",
        default=None,
    )
    grace_period: float = _seconds(
        # Kubernetes kills after 30 s; the rest is for the closing handshakes
        "Seconds that active responses have to finish after SIGTERM.",
        default=25.0,
    )
    resume_grace: float = _seconds(
        "Seconds that a resumable response is kept after its client has disconnected.", default=30.0
    )
    snapshot: str | None = option(
        # None: the file would hold prompts and answers
        "File to which the server saves unfinished resumable responses when it stops, and from which the next one "
        "resumes them; by default they end with the server.",
        default=None,
        rule=text(optional=True),
    )
    journal: str | None = option(
        # None: the file would hold prompts and answers
        "File to which the server writes its resumable responses while it runs, and from which the next one resumes "
        "them after it was killed; by default they end with the server. It takes the place of --snapshot.",
        default=None,
        rule=text(optional=True),
    )

    lora_dir: str | None = option(
        # None: the routes read folders of the server
        "Folder below which `/v1/load_lora_adapter` may load LoRA adapters, with an operator's key; by default that "
        "route and `/v1/unload_lora_adapter` are not there.",
        default=None,
        rule=text(optional=True),
    )

    # ----------------------------------------------------------------------------------------- memory

    max_stored_responses: int = _count(
        "Most responses stored for previous_response_id and GET; the oldest are dropped first.", default=1024
    )
    max_stored_bytes: int = _count(
        # Over the limit, the key that holds most loses its oldest: one key cannot evict the responses of another one.
        "Memory for remembered responses, in bytes.",
        default=64 * 2**20,
    )
    max_resumable_bytes: int = _count(
        # A token takes 1.5 KB: 90,000 tokens of streams that can still be resumed.
        "Memory for the logged events of resumable responses, in bytes; beyond it the key that holds most loses the "
        "log of its oldest finished response, or its largest log.",
        default=128 * 2**20,
    )
    max_resumable_bytes_per_key: int = _count(
        # A quarter of the whole: no single key can use it up.
        "The same for one API key.",
        default=32 * 2**20,
    )
    max_connection_stored_bytes: int = _count(
        # A quarter of the memory for all: a client that stores nothing still continues its own chats.
        "Memory for responses with store=false, in bytes, of all WebSockets together; they last as long as their "
        "connection.",
        default=64 * 2**20,
    )

    # ----------------------------------------------------------------------------------------- models

    max_loaded_models: int | None = _count(
        "With several models: most that are loaded beside the first one; by default no limit.", default=None
    )
    max_model_bytes: int | None = option(
        # KV caches come on top: they have limits of their own.
        "With several models: most bytes of the weights that are loaded beside the first model's; by default no limit. "
        "A model whose size is not known counts nothing.",
        default=None,
        rule=whole(1, optional=True),
    )
    model_idle: float | None = _seconds(
        # ollama's
        "With several models: seconds without a request after which a model is unloaded; none: never.",
        default=300.0,
    )

    # ---------------------------------------------------------------------------------------- metrics

    metrics_prefix: str = option(
        "Prefix of the metric names at /metrics; with vllm: dashboards made for vLLM work.",
        default="triolet:",
        rule=matching(r"[a-zA-Z_:][a-zA-Z0-9_:]*", "letters, digits, _ and :, the first no digit"),
    )

    def __attrs_post_init__(self) -> None:
        fields = attrs.fields_dict(type(self))
        if self.uds is not None and (self.host, self.port) != (
            fields["host"].default,
            fields["port"].default,
        ):
            raise ConfigError("uds", "given without host and port, whose place it takes", self.uds)
