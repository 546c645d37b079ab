"""What one hostile client costs another one: named attacks on a real server, watched from a process of their own.

    python benchmarks/attacks.py [--seconds 5] [--only NAME ...] [--list] [--output FILE]
    python benchmarks/attacks.py --together 60 [--settle 30] [--apart] [--first] [--only NAME ...] [--output FILE]
    python benchmarks/attacks.py --stalled [--rounds 3] [--output FILE]

For each attack a fresh `triolet serve` with triolet-nano is started on loopback. One process attacks with one API key.
A second process, with another key, asks `/health` every 10 ms and reads the same greedy chat again and again; its text
must be the one of a quiet server. One JSON line per attack: what the attacker got (statuses, close codes), percentiles
and maximum of the latency of `/health` and of the whole chat in milliseconds, whether every stream was exact, the texts
that differ, and the server's memory. `load_before` is what other programs put on the machine: the load average of the
minute before. `loop` is how long task steps held the server's event loop meanwhile: `longest_ms` by the wall clock,
`longest_quiet_ms` without what a step waited for a processor, `longest_work_ms` in processor time, which leaves out the
wait for Python's lock, too, the tasks of these steps, and how many were over 10 ms. On a quiet machine none should be.
`sleeper_late_ms` is how late a process was meanwhile that does nothing but sleep for 2 ms, on the core where it was
later: what the machine itself, or the host of a virtual one, has delayed everything by. A latency of `/health` below it
is not the server's.

The server keeps no standby process: one that starts amid an attack would be taken for memory that the attack costs.

`--together` runs all attacks at the same time on one server, each in a thread of the attacking process. One JSON line:
the same values, what each attack got, and the memory of the server and of its child processes (proportional set size,
MiB) before, at the end, and some seconds after it. What a server holds by its limits is no growth: the KV cache is full
before the attacks, and stored responses and logs of resumable ones (docs/server.md) have `STORES_BYTES` each.

`--stalled` compares 8 clients that read beside 50 that do not with 8 that read beside 50 that read, in turn on servers
of their own. One JSON line: the gaps between the events of the 8 in milliseconds, the ratio of their 99th percentiles,
the memory at the end, and how long the server takes to end after SIGTERM with a grace period of 5 s while 50 clients
do not read and 20 requests are half sent.

Attackers run with the lowest priority (nice 19) and connect from another address of loopback: they stand for clients
on other machines, which take no processor time from the server. On a quiet machine no latency should be above 100 ms.
A busy machine shows its own delays as well: the attack `nothing` is the baseline. With `--apart` the attackers have one
core for themselves, and the server and the other client have the others, as if they were on two machines. With
`--first` the attackers and the server's own processes, its model among them, have a processor only while the server
wants none (SCHED_IDLE of sched(7)): `longest_ms` is then the wall clock of a machine that is quiet but for the server.
`host_late_ms` is how late a real-time process was meanwhile that does nothing but sleep: above 2 ms the machine was not
quiet, and an attack alone with a step of over 10 ms is run again, up to five times in all (`not_quiet` has what the
runs before saw).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from triolet.workers.priority import lower_priority

if TYPE_CHECKING:
    from host_clock import HostClock

MODEL = "triolet-nano"
ATTACKER, WITNESS = "attacker-key", "witness-key"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 20"}],
    "temperature": 0,
    "stream": True,
}
ELSEWHERE = "127.0.0.2"  # the address of the attacker, which stands for another machine; Linux answers to it
THEIR_CORE = (
    "ATTACKERS_CORE"  # variable that names the core of the attackers, if they have one for themselves
)
HEALTH_EVERY_S = 0.01
MAX_TRIES = 5  # of one attack on a machine that shall be quiet
SLEEP_S = 0.002  # of the process that does nothing else
TIMEOUT_S = 5.0  # of one call of a socket
STREAM_TIMEOUT_S = 60.0  # of one that waits for text: one that comes late is late, and not wrong
FIRST = "SERVER_FIRST"  # variable that is set if the server comes before all other processes
KV_CACHE_BYTES = 64 * 2**20
STORES_BYTES = 4 * 2**20
NUM_PROMPT_TOKENS = 1000  # of the prompts that fill the KV cache
# In the command lines of the processes that the server starts.
PROGRAMS = {
    "grammars": b"triolet.workers.grammar",
    "runner": b"triolet.workers.runner",
    "fork server": b"triolet.workers.fork_server",
}
TEXT, PING, PONG, CLOSE = 1, 9, 10, 8

# ------------------------------------------------------------------------------------- a plain client


@attrs.define
class Client:
    """Client that sends bytes as it is told and counts what comes back.

    Args:
        port: of the server, on loopback.
        key: API key.
        address: to connect from.
        seen: statuses and close codes, with their numbers.
    """

    port: int
    key: str
    address: str = "127.0.0.1"
    seen: Counter[str] = attrs.field(factory=Counter)

    def connect(self) -> socket.socket:
        """Open a connection."""
        stream = socket.create_connection(
            ("127.0.0.1", self.port), timeout=TIMEOUT_S, source_address=(self.address, 0)
        )
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """Return the head of a request."""
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: localhost",
            f"authorization: Bearer {self.key}",
            *headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Any = b"",
        *,
        to_read: int = 2**20,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """Send one request on a connection of its own and read the response."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connect() as stream:
            stream.settimeout(timeout_s)
            answer = b""
            with suppress(OSError):
                stream.sendall(
                    self.head(method, path, f"content-length: {len(raw)}", "connection: close") + raw
                )
            with suppress(OSError):
                while len(answer) < to_read and (more := stream.recv(2**16)):
                    answer += more
        self.seen[answer[9:12].decode("latin-1") or "no answer"] += 1
        return answer

    def websocket(self) -> socket.socket:
        """Open a WebSocket."""
        stream = self.connect()
        key = base64.b64encode(os.urandom(16)).decode()
        stream.sendall(
            self.head(
                "GET",
                "/v1/responses",
                "connection: Upgrade",
                "upgrade: websocket",
                "sec-websocket-version: 13",
                f"sec-websocket-key: {key}",
            )
        )
        answer = b""
        while b"\r\n\r\n" not in answer and (more := stream.recv(1)):
            answer += more
        return stream

    def send_frames(self, data: bytes) -> None:
        """Send frames on a new WebSocket and read until it is closed or silent."""
        with self.websocket() as stream:
            received = b""
            with suppress(OSError):
                stream.settimeout(TIMEOUT_S)
                stream.sendall(data)
            with suppress(OSError):
                stream.settimeout(1.0)
                until = time.monotonic() + 3.0
                while time.monotonic() < until and (more := stream.recv(2**16)):
                    received = (received + more)[-(2**16) :]
        place = received.rfind(bytes([0x80 | CLOSE]))
        is_closed = 0 <= place < len(received) - 3
        code = int.from_bytes(received[place + 2 : place + 4], "big") if is_closed else "open"
        self.seen[f"closed {code}" if is_closed else "open"] += 1


def frame(payload: bytes | Any = b"", opcode: int = TEXT, *, fin: bool = True) -> bytes:
    """Return a masked frame; anything but bytes is sent as JSON."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    size = len(data)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 2**16:
        length = b"\xfe" + size.to_bytes(2, "big")
    else:
        length = b"\xff" + size.to_bytes(8, "big")
    return bytes([0x80 * fin | opcode]) + length + b"\0\0\0\0" + data


# ------------------------------------------------------------------------------------------ the attacks

Attack = Callable[[Client], None]
"""One round of an attack; it is repeated until the time is over."""

HELLO = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
CREATE = {"type": "response.create", **HELLO}


TOO_LONG_FOR_A_MESSAGE = {"unknown keys", "logit_bias", "messages of 60 MB", "a text of 60 MB"}
"""Bodies of more than the 4 MiB that a WebSocket message may have."""


def numbered(count: int, item: str) -> bytes:
    """Return `count` items, with their numbers in place of N, separated by commas."""
    return ",".join(item.replace("N", str(number)) for number in range(count)).encode()


def bodies() -> dict[str, Callable[[], bytes]]:
    """Return what makes bodies that are long, wide or deep: all of them together take seconds and 300 MiB."""
    start = json.dumps({**HELLO, "messages": CHAT["messages"]}).encode()[:-1] + b","
    mib = 2**20
    return {
        "unknown keys": lambda: start + numbered(4_000_000, '"N":1') + b"}",
        "few unknown keys": lambda: start + numbered(2000, '"N":1') + b"}",
        "logit_bias": lambda: start + b'"logit_bias":{' + numbered(2_000_000, '"N":1') + b"}}",
        "short logit_bias": lambda: start + b'"logit_bias":{' + numbered(2000, '"N":1') + b"}}",
        "messages of 60 MB": lambda: (
            b'{"model":"x","messages":[' + numbered(1_000_000, json.dumps({"role": "user"})) + b"]}"
        ),
        "a text of 60 MB": lambda: b'{"input":"' + b"x" * 60 * mib + b'"}',
        "a text of 4 MB": lambda: start + b'"user":"' + b"x" * (4 * mib - 200) + b'"}',
        "newlines of 4 MB": lambda: start + b'"user":"' + b"\\n" * (2 * mib - 200) + b'"}',
        "escapes of 4 MB": lambda: start + b'"user":"' + b"\\u0041" * (4 * mib // 6 - 200) + b'"}',
        "emoji of 4 MB": lambda: start + b'"user":"' + "😀".encode() * (mib - 200) + b'"}',
        "quotes of 4 MB": lambda: b'{"input":' + b'"' * (4 * mib - 100),
        "backslashes of 4 MB": lambda: b'{"input":"' + b"\\" * (4 * mib - 100),
        "token ids": lambda: start + b'"prompt":[' + numbered(250_000, "1") + b"]}",
        "floats": lambda: start + b'"prompt":[' + numbered(250_000, "1.25e3") + b"]}",
        "strings": lambda: start + b'"stop":[' + numbered(200_000, '"N"') + b"]}",
        "lists": lambda: start + b'"a":[' + numbered(200_000, "[]") + b"]}",
        "objects": lambda: start + b'"a":[' + numbered(200_000, "{}") + b"]}",
        "deep lists": lambda: start + b'"a":' + b"[" * (4 * mib - 200),
        "deep objects": lambda: b'{"a":' * 800_000,
        "spaces": lambda: b'{"a":' + b" " * (4 * mib - 100) + b"1}",
        "a long number": lambda: b'{"a":' + b"1" * (4 * mib - 100) + b"}",
        "metadata": lambda: start + b'"metadata":{"a":"' + b"x" * 3 * mib + b'"}}',
        "long metadata keys": lambda: start + b'"metadata":{"' + b"x" * 3 * mib + b'":"a"}}',
        "long identifiers": lambda: (
            start + b'"user":"' + b"x" * mib + b'","prompt_cache_key":"' + b"y" * mib + b'"}'
        ),
        "many tools": lambda: (
            start
            + b'"tools":['
            + numbered(2000, '{"type":"function","name":"fN","parameters":{"type":"object"}}')
            + b"]}"
        ),
        "many messages": lambda: (
            start + b'"input":[' + numbered(2000, '{"role":"user","content":"x"}') + b"]}"
        ),
    }


def grammars(number: int = 0) -> dict[str, dict[str, Any]]:
    """Return structured outputs that are costly to compile or to follow; those of another number differ."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, f"b{number}": deep}, "required": ["a"]}
        if len(json.dumps(deep)) > 100_000:
            break
    return {
        "regex that explodes": {"regex": "(a|aa|aaa|aaaa)*" * 12 + f"b{number}"},
        "regex of repeats": {"regex": f"((a{{1,200}}){{1,200}}){{1,200}}{number}"},
        "recursive grammar": {"grammar": f'start: "a{number}" start | start'},
        "grammar of alternatives": {
            "grammar": "start: " + " | ".join(f'"w{word} {number}"' for word in range(5000))
        },
        # 4,096 are allowed: more would be refused before anything is compiled.
        "choices": {"choice": [f"choice {word} of {number}" for word in range(4000)]},
        "deep schema": {"json": deep},
        "schema of references": {
            "json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * (50 + number)}}}
        },
    }


def hold(client: Client, payloads: list[bytes], seconds: float = 3.0) -> None:
    """Open connections, send what is given on each, and keep them open without reading."""
    streams = []
    with suppress(OSError):
        for payload in payloads:
            streams.append(client.connect())
            streams[-1].sendall(payload)
    time.sleep(seconds)
    for stream in streams:
        stream.close()
    client.seen["held"] += len(streams)


def drip(client: Client, head: bytes, piece: bytes, count: int = 300) -> None:
    """Send a request piece by piece."""
    with client.connect() as stream, suppress(OSError):
        stream.sendall(head)
        for _ in range(count):
            stream.sendall(piece)
            time.sleep(0.005)
    client.seen["dripped"] += 1


def new_grammars(name: str) -> Attack:
    """Return an attack that sends another grammar of a kind in each round, since the same one is compiled once."""
    numbers = itertools.count()

    def one_round(client: Client) -> None:
        form = grammars(next(numbers))[name]
        client.request("POST", "/v1/responses", {**HELLO, "structured_outputs": form})

    return one_round


def hundred_grammars(client: Client) -> None:
    """Send a hundred different grammars at the same time, and wait for all answers."""
    forms = [
        form for number in range(15) for form in grammars(number + 1000 * client.seen["rounds"]).values()
    ]

    def send(form: dict[str, Any]) -> None:
        with suppress(OSError):
            client.request("POST", "/v1/responses", {**HELLO, "structured_outputs": form}, timeout_s=120.0)

    threads = [threading.Thread(target=send, args=(form,)) for form in forms[:100]]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.seen["seconds"] = max(client.seen["seconds"], round(time.monotonic() - began))


def slow_websockets(client: Client, count: int) -> None:
    """Start long responses on many WebSockets and read none of them."""
    long_one = frame({**CREATE, "max_output_tokens": 1500, "ignore_eos": True})
    streams = []
    with suppress(OSError):
        for _ in range(count):
            stream = client.websocket()
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stream.sendall(long_one * 4)
            streams.append(stream)
    time.sleep(3.0)
    for stream in streams:
        stream.close()
    client.seen["held"] += len(streams)


def attacks() -> dict[str, Attack]:
    """Return all attacks by name."""

    def post(path: str, body: Callable[[], bytes] | bytes | Any) -> Attack:
        made: Callable[[], Any] = cache(body) if callable(body) else lambda: body
        return lambda client: (client.request("POST", path, made()), None)[1]

    def frames(data: bytes) -> Attack:
        return lambda client: client.send_frames(data)

    def message(body: Callable[[], bytes]) -> Attack:
        made = cache(lambda: frame(b'{"type":"response.create",' + body()[1:]))
        return lambda client: client.send_frames(made())

    found: dict[str, Attack] = {"nothing": lambda client: time.sleep(0.2)}
    opened = frame(b"", fin=False)
    for name, piece in {
        "empty fragments": frame(b"", 0, fin=False),
        "fragments of one byte": frame(b"x", 0, fin=False),
        "pings": frame(b"", PING),
        "long pings": frame(b"x" * 125, PING),
        "pongs": frame(b"", PONG),
        "empty messages": frame(b""),
        "messages that are no JSON": frame(b"{"),
        "unknown events": frame({"type": "x"}),
        "cancels": frame({"type": "response.cancel"}),
        "resumes": frame({"type": "response.resume", "response_id": "resp_x"}),
        "steers": frame({"type": "response.steer", "previous_response_id": "x", "input": "y"}),
        "creates": frame(CREATE),
        "creates in many lanes": b"".join(frame({**CREATE, "stream_id": f"s{lane}"}) for lane in range(40)),
        "creates that continue nothing": frame({**CREATE, "previous_response_id": "resp_" + "x" * 60}),
        "creates and cancels": frame(CREATE) + frame({"type": "response.cancel"}),
        "resumable creates": frame({**CREATE, "resumable": True}),
    }.items():
        found[f"frames: {name}"] = frames(
            (opened if "fragments" in name else b"") + piece * (100_000 // len(piece) + 5000)
        )
    for name, body in bodies().items():
        found[f"body: {name}"] = post("/v1/chat/completions" if "message" in name else "/v1/responses", body)
        if name not in TOO_LONG_FOR_A_MESSAGE:
            found[f"message: {name}"] = message(body)
    for name in grammars():
        found[f"grammar: {name}"] = new_grammars(name)

    def half(client: Client, header: bytes) -> bytes:
        return client.head("POST", "/v1/responses")[:-2] + header + b"\r\n\r\n"

    found |= {
        "grammars: a hundred at once": hundred_grammars,
        "half heads": lambda client: hold(client, [b"GET / HTTP/1.1\r\nhost: x\r\n"] * 200),
        "half bodies": lambda client: hold(
            client, [half(client, b"content-length: 4000000") + b"x" * 2_000_000] * 40, 5.0
        ),
        "silent connections": lambda client: hold(client, [b""] * 500),
        "dripping head": lambda client: drip(client, b"GET / HTTP/1.1\r\n", b"a: b\r\n"),
        "dripping body": lambda client: drip(client, half(client, b"content-length: 1000000"), b"x"),
        "body without end": lambda client: drip(
            client, half(client, b"transfer-encoding: chunked"), b"8000\r\n" + b" " * 2**15 + b"\r\n"
        ),
        "slow readers of events": lambda client: hold(
            client,
            [
                half(client, b"content-length: %d" % len(body)) + body
                for body in [json.dumps({**HELLO, "max_output_tokens": 1500, "stream": True}).encode()] * 40
            ],
        ),
        "slow readers on WebSockets": lambda client: slow_websockets(client, 20),
        "pipelined requests": lambda client: hold(client, [client.head("GET", "/v1/models") * 3000], 1.0),
        "stored responses": post("/v1/responses", {**HELLO, "max_output_tokens": 1}),
        "resumable responses": post("/v1/responses", {**HELLO, "max_output_tokens": 1, "resumable": True}),
        "unknown ids": lambda client: (client.request("GET", "/v1/responses/resp_x"), None)[1],
        "cancels by id": post("/v1/responses/resp_x/cancel", b""),
        "metrics": lambda client: (client.request("GET", "/metrics"), None)[1],
        "tokenize": post("/tokenize", {"model": MODEL, "prompt": "hello " * 600_000}),
        # a digit is a token, and so many are listed
        "tokenize as many as are listed": post("/tokenize", {"model": MODEL, "prompt": "7" * 262_144}),
        "detokenize": post("/detokenize", {"model": MODEL, "tokens": [1] * 200_000}),
    }
    return found


# ------------------------------------------------------------------------------------------ the processes


def stand_elsewhere(niceness: int) -> None:
    """Take no processor time that the server wants, as clients on other machines take none."""
    os.setsid()  # where Linux divides processors among sessions first, niceness counts within a session only
    lower_priority(niceness)
    if FIRST in os.environ:
        take_last_place()


def attack(port: int, names: Sequence[str], seconds: float) -> dict[str, dict[str, int]]:
    """Run attacks at the same time, each again and again for so long; return what came back for each."""
    take_all_descriptors()
    if core := os.environ.get(THEIR_CORE):
        os.sched_setaffinity(0, {int(core)})
    known, clients = attacks(), {name: Client(port, ATTACKER, ELSEWHERE) for name in names}
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds

    def repeat(name: str) -> None:
        seen = clients[name].seen
        while time.monotonic() < until or not seen:
            try:
                known[name](clients[name])
            except OSError as error:
                seen[type(error).__name__] += 1
            seen["rounds"] += 1

    threads = [threading.Thread(target=repeat, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: dict(client.seen) for name, client in clients.items()}


def take_all_descriptors() -> None:
    """Raise the limit of file descriptors as far as it goes: some attacks hold hundreds of connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_chat(client: Client) -> str:
    """Return the text of the greedy chat.

    Raises:
        ValueError: the stream has no end; the text so far.
    """
    answer = client.request("POST", "/v1/chat/completions", CHAT, timeout_s=STREAM_TIMEOUT_S)
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.strip()) for line in lines]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())
    )
    if b"data: [DONE]" not in answer:
        raise ValueError(f"no end after {text!r} {answer[:200]!r}")
    return text


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum."""
    values = sorted(values)
    places = {share: min(len(values) - 1, len(values) * share // 100) for share in (50, 99, 100)}
    return {f"p{share}": round(values[place], 1) for share, place in places.items()}


def run_until_told(works: Sequence[Callable[[], None]], is_over: threading.Event) -> None:
    """Run each in a thread; say that they are ready, and set `is_over` when stdin has a line."""
    print("ready", flush=True)
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    is_over.set()
    for thread in threads:
        thread.join()


def sleep_on_each_core() -> dict[str, float]:
    """Sleep until stdin has a line; return how late each sleep ended, ms, on the core where that was later."""
    late: dict[int, list[float]] = {core: [] for core in os.sched_getaffinity(0)}
    is_over = threading.Event()

    def sleep(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        while not is_over.is_set():
            began = time.perf_counter()
            time.sleep(SLEEP_S)
            late[core].append(1e3 * (time.perf_counter() - began - SLEEP_S))

    run_until_told([partial(sleep, core) for core in late], is_over)
    return percentiles(max(late.values(), key=max))


def watch(port: int) -> dict[str, Any]:
    """Ask for the health and read the chat until stdin has a line."""
    client = Client(port, WITNESS)
    expected = read_chat(client)
    latencies: list[float] = []
    texts: list[str] = []
    durations: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            with suppress(OSError):
                client.request("GET", "/health")
            latencies.append(1e3 * (time.perf_counter() - began))
            time.sleep(HEALTH_EVERY_S)

    def chat() -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            try:
                texts.append(read_chat(client))
            except (OSError, ValueError) as error:
                texts.append(repr(error))
            durations.append(1e3 * (time.perf_counter() - began))

    run_until_told([ask, chat], is_over)
    return {
        "health_ms": percentiles(latencies),
        "num_health": len(latencies),
        "stream_ms": percentiles(durations),
        "num_streams": len(texts),
        "exact": bool(expected) and all(text == expected for text in texts),
        "differing_texts": [text for text in texts if text != expected],
        "statuses": dict(client.seen),
    }


@attrs.define
class Serving:
    """Server that runs in a process.

    Args:
        process: of the server.
        port: on loopback.
    """

    process: subprocess.Popen[str]
    port: int

    @property
    def process_id(self) -> int:
        """Return the id of the server's process."""
        return self.process.pid

    def take_loop(self) -> dict[str, Any]:
        """Return how long task steps have held the loop since the last call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def serving(*flags: str, kv_cache_bytes: int = KV_CACHE_BYTES) -> Iterator[Serving]:
    """Run a server whose loop is measured."""
    command = [sys.executable, __file__, "--serve", "--port", "0", "--api-keys", f"{ATTACKER},{WITNESS}"]
    # A small cache is soon touched from end to end; its first use is no growth that an attack has caused.
    command += ["--kv-cache-bytes", str(kv_cache_bytes), "--no-keep-standby", *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            server = Serving(process, int(process.stdout.readline().strip().rpartition(":")[2]))
            if FIRST in os.environ:
                threading.Thread(target=keep_first, args=(server,), daemon=True).start()
            yield server
        finally:
            process.kill()


def keep_first(server: Serving) -> None:
    """Let the server's own processes, old and new, have a processor only while no other program wants it."""
    while server.process.poll() is None:
        for process_id in process_tree(server.process_id)[1:]:
            with suppress(OSError):  # it has ended, or one of its threads has
                for task in Path(f"/proc/{process_id}/task").iterdir():
                    take_last_place(int(task.name))
                if os.getsid(process_id) == process_id:  # see `lower_priority`
                    Path(f"/proc/{process_id}/autogroup").write_text("19")
        time.sleep(0.1)


def take_last_place(task_id: int = 0) -> None:
    """Let a thread, and what it starts, have a processor only while no other program wants it."""
    os.sched_setscheduler(task_id, os.SCHED_IDLE, os.sched_param(0))


def serve(arguments: list[str]) -> None:
    """Run `triolet serve` with an instrument that is asked, by a line on stdin, what it has measured."""
    # Other roles do not need them.
    from task_steps import TaskSteps

    import triolet.cli
    import triolet.engine.engine

    steps = TaskSteps()

    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(steps.take()), flush=True)

    module: Any = triolet.engine.engine
    module.LoopMonitor = lambda: steps
    threading.Thread(target=answer, daemon=True).start()
    triolet.cli.main(["serve", *arguments], prog_name="triolet")


@contextmanager
def helper(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run this program in another role, up to the line in which it says that it is ready."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def attacking(
    port: int, seconds: float, nice: int, *names: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run attacks, so much below this program in priority."""
    return helper("--nice", str(nice), "--attack", str(port), str(seconds), *names)


def leave_a_core() -> None:
    """Leave one core to the attackers; the processes that are started from now on do not use it.

    Raises:
        SystemExit: there is only one.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise SystemExit("--apart needs two cores")
    os.environ[THEIR_CORE] = str(max(cores))
    os.sched_setaffinity(0, cores - {max(cores)})


def finish(process: subprocess.Popen[str]) -> Any:
    """Tell a process to go on, and return its result."""
    return json.loads(process.communicate("\n")[0].splitlines()[-1])


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [root]
    for process_id in found:
        with suppress(OSError):
            for task in Path(f"/proc/{process_id}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def memory_mib(root: int) -> dict[str, float]:
    """Return the memory of a server by program, MiB; pages that several processes share are counted once."""
    kilobytes = Counter[str]()
    for process_id in process_tree(root):
        with suppress(OSError):
            command = Path(f"/proc/{process_id}/cmdline").read_bytes()
            name = next((name for name, part in PROGRAMS.items() if part in command), "server")
            lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
            kilobytes[name] += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    kilobytes["all"] = kilobytes.total()
    return {name: round(count / 1024, 1) for name, count in kilobytes.items()}


def measure(name: str, seconds: float, nice: int) -> dict[str, Any]:
    """Run one attack against a server of its own."""
    if FIRST not in os.environ:
        return measure_once(name, seconds, nice)
    from host_clock import QUIET_MS, host_clock  # other roles do not need it

    before: list[dict[str, Any]] = []
    while True:
        with host_clock() as clock:
            result = measure_once(name, seconds, nice, clock)
        loop, host_late_ms = result["loop"], result["host_late_ms"]
        if not loop["over_10_ms"] or host_late_ms <= QUIET_MS or len(before) == MAX_TRIES - 1:
            return {**result, "not_quiet": before}
        before.append({"host_late_ms": host_late_ms, "longest_ms": loop["longest_ms"]})


def measure_once(name: str, seconds: float, nice: int, clock: HostClock | None = None) -> dict[str, Any]:
    """Run one attack against a server of its own, on a machine that may not be quiet."""
    with serving() as server, attacking(server.port, seconds, nice, name) as attacker:
        with helper("--watch", str(server.port)) as witness, helper("--sleeper") as sleeper:
            memory = memory_mib(server.process_id)["all"]
            server.take_loop()
            if clock is not None:
                clock.take()
            attacker_seen = finish(attacker)
            loop = server.take_loop()
            host = {} if clock is None else {"host_late_ms": clock.take()}
            result = {"sleeper_late_ms": finish(sleeper), **finish(witness)}
        grown = round(memory_mib(server.process_id)["all"] - memory, 1)
    return {
        "attack": name,
        "server_first": FIRST in os.environ,
        **host,
        **result,
        "loop": loop,
        "attacker": attacker_seen[name],
        "memory_growth_mib": grown,
    }


def fill_kv_cache(client: Client) -> None:
    """Have the blocks of the KV cache used once, by prompts that begin differently, until no more are taken."""
    num_free = float("inf")
    for number in itertools.count(10):
        metrics = client.request("GET", "/metrics", to_read=2**24).decode()
        [free] = [line for line in metrics.splitlines() if "kv_blocks{" in line and 'state="free"' in line]
        num_free_before, num_free = num_free, float(free.rpartition(" ")[2])
        if num_free >= num_free_before:
            return
        body = {"model": MODEL, "prompt": [number, *[9] * NUM_PROMPT_TOKENS], "max_tokens": 1}
        client.request("POST", "/v1/completions", body, timeout_s=60.0)


def measure_together(names: Sequence[str], seconds: float, settle_s: float, nice: int) -> dict[str, Any]:
    """Run attacks at the same time against one server."""
    limits = ["--max-stored-bytes", "--max-resumable-bytes", "--max-resumable-bytes-per-key"]
    flags = [word for limit in limits for word in (limit, str(STORES_BYTES))]
    with serving(*flags) as server, attacking(server.port, seconds, nice, *names) as attacker:
        fill_kv_cache(Client(server.port, WITNESS))
        with helper("--watch", str(server.port)) as witness:
            # The first grammar starts the process that all others are copies of, which stays.
            form = {"structured_outputs": {"regex": "a"}}
            Client(server.port, WITNESS).request("POST", "/v1/responses", {**HELLO, **form}, timeout_s=60.0)
            with helper("--sleeper") as sleeper:
                memory = {"before": memory_mib(server.process_id)}
                server.take_loop()
                attackers_seen = finish(attacker)
                loop = server.take_loop()
                memory["at_the_end"] = memory_mib(server.process_id)
                result = {"sleeper_late_ms": finish(sleeper), **finish(witness)}
        time.sleep(settle_s)
        memory["after"] = memory_mib(server.process_id)
    return {
        "mode": "together",
        "seconds": seconds,
        "attackers_nice": nice,
        "attackers_apart": THEIR_CORE in os.environ,
        "server_first": FIRST in os.environ,
        "settle_s": settle_s,
        "num_attacks": len(names),
        **result,
        "loop": loop,
        "memory_mib": memory,
        "memory_ratio": round(memory["after"]["all"] / memory["before"]["all"], 3),
        "attackers": attackers_seen,
    }


# --------------------------------------------------------------------------------- beside stalled clients

NUM_OTHERS, NUM_READERS, NUM_HALF_BODIES = 50, 8, 20
GRACE_S = 5.0
# All 58 fit into the KV cache at the same time, and the others outlast the readers.
NUM_TOKENS = {"others": 600, "readers": 200}


def story(num_tokens: int) -> bytes:
    """Return the body of a streamed response of a fixed length."""
    body = {**HELLO, "max_output_tokens": num_tokens, "ignore_eos": True, "stream": True, "store": False}
    if num_tokens == NUM_TOKENS["others"]:  # more than the buffers between the server and a client take
        body |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    return json.dumps(body).encode()


def open_stream(client: Client, num_tokens: int, *, receive_buffer: int | None = None) -> socket.socket:
    """Ask for a streamed response on a connection of its own."""
    stream = socket.socket()
    if receive_buffer is not None:  # before the connection is made, or the window is large already
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    stream.connect(("127.0.0.1", client.port))
    body = story(num_tokens)
    stream.sendall(client.head("POST", "/v1/responses", f"content-length: {len(body)}") + body)
    return stream


def others(port: int, *, are_reading: bool) -> None:
    """Hold clients that read, or do not, until stdin has a line."""
    take_all_descriptors()
    stand_elsewhere(19)
    client = Client(port, ATTACKER)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with suppress(OSError), open_stream(client, NUM_TOKENS["others"]) as stream:
                stream.settimeout(TIMEOUT_S)
                while not is_over.is_set() and b"data: [DONE]" not in stream.recv(2**16):
                    pass

    streams = []
    if are_reading:
        for _ in range(NUM_OTHERS):
            threading.Thread(target=read, daemon=True).start()
    else:
        streams = [open_stream(client, NUM_TOKENS["others"], receive_buffer=4096) for _ in range(NUM_OTHERS)]
        half = client.head("POST", "/v1/responses", "content-length: 4000") + b"{"
        for _ in range(NUM_HALF_BODIES):
            streams.append(client.connect())
            streams[-1].sendall(half)
    time.sleep(1.0)  # so that all have begun
    print("ready", flush=True)
    sys.stdin.readline()
    is_over.set()
    for stream in streams:
        stream.close()
    print("{}", flush=True)


def readers(port: int) -> list[float]:
    """Read streams at the same time; return the gaps between their events, milliseconds."""
    client = Client(port, WITNESS)
    gaps: list[float] = []

    def read() -> None:
        with open_stream(client, NUM_TOKENS["readers"]) as stream:
            stream.settimeout(60.0)
            last, tail = None, b""
            while b"data: [DONE]" not in tail and (data := stream.recv(2**16)):
                tail = (tail + data)[-64:]
                if b"output_text.delta" in data:
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(1e3 * (now - last))
                    last = now

    threads = [threading.Thread(target=read) for _ in range(NUM_READERS)]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


def beside(kind: str) -> dict[str, Any]:
    """Measure readers beside other clients of a kind, `stalled` or `reading`."""
    flags = ["--grace-period", str(GRACE_S), "--write-timeout", "120", "--max-num-seqs", "64"]
    with serving(*flags, kv_cache_bytes=4 * KV_CACHE_BYTES) as server, ExitStack() as stack:
        port, process_id = server.port, server.process_id
        with helper("--readers", str(port)) as warm:
            finish(warm)
        before = memory_mib(process_id)["all"]
        stack.enter_context(helper(f"--{kind}-clients", str(port)))
        with helper("--readers", str(port)) as process:
            gaps = sorted(finish(process))
        memory = memory_mib(process_id)["all"]
        began = time.monotonic()
        os.kill(process_id, signal.SIGTERM)
        while Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        ended_s = time.monotonic() - began
    return {
        "gap_p50_ms": round(gaps[len(gaps) // 2], 1),
        "gap_p99_ms": round(gaps[len(gaps) * 99 // 100], 1),
        "gap_max_ms": round(gaps[-1], 1),
        "num_gaps": len(gaps),
        "memory_mib": [before, memory],
        "sigterm_s": round(ended_s, 2),
    }


def measure_stalled(num_rounds: int) -> dict[str, Any]:
    """Measure readers beside reading and beside stalled clients, in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {"reading": [], "stalled": []}
    for number in range(num_rounds):
        for kind in sorted(rounds, reverse=number % 2 == 1):  # which one is first changes with each round
            rounds[kind].append(beside(kind))
    p99 = {kind: statistics.median(one["gap_p99_ms"] for one in done) for kind, done in rounds.items()}
    return {
        "mode": "stalled",
        "num_others": NUM_OTHERS,
        "num_readers": NUM_READERS,
        "grace_s": GRACE_S,
        "p99_ratio": round(p99["stalled"] / p99["reading"], 3),
        "sigterm_s": max(one["sigterm_s"] for one in rounds["stalled"]),
        "rounds": rounds,
    }


def main() -> None:
    """Run the attacks that are asked for."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each attack")
    parser.add_argument("--only", nargs="+", default=[], help="names of attacks, or their beginnings")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks")
    parser.add_argument(
        "--together", type=float, metavar="SECONDS", help="run the attacks at the same time, for so long"
    )
    parser.add_argument(
        "--settle", type=float, default=30.0, help="seconds after --together until the memory is read again"
    )
    parser.add_argument("--stalled", action="store_true", help="measure readers beside stalled clients")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of --stalled")
    parser.add_argument(
        "--nice",
        type=int,
        default=19,
        help="niceness of the attackers: they stand for other machines, with no claim to the processors of this one",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="give the attackers a core of their own, and the server the others",
    )
    parser.add_argument(
        "--first",
        action="store_true",
        help="let all other processes have a processor only while the server wants none",
    )
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    parser.add_argument("--attack", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--sleeper", action="store_true", help=argparse.SUPPRESS)
    for role in ("--watch", "--readers", "--stalled-clients", "--reading-clients"):
        parser.add_argument(role, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart:
        leave_a_core()
    if options.first:
        os.environ[FIRST] = "1"
    if options.attack:
        port, seconds, *names = options.attack
        stand_elsewhere(options.nice)
        print(json.dumps(attack(int(port), names, float(seconds))))
    elif options.watch:
        print(json.dumps(watch(options.watch)))
    elif options.sleeper:
        print(json.dumps(sleep_on_each_core()))
    elif options.readers:
        print(json.dumps(readers(options.readers)))
    elif options.stalled_clients or options.reading_clients:
        others(options.stalled_clients or options.reading_clients, are_reading=not options.stalled_clients)
    elif options.stalled:
        report(lambda: measure_stalled(options.rounds), options.output)
    else:
        names = [name for name in attacks() if not options.only or name.startswith(tuple(options.only))]
        if options.list:
            print("\n".join(names))
        elif options.together is not None:
            report(
                lambda: measure_together(names, options.together, options.settle, options.nice),
                options.output,
            )
        else:
            for name in names:
                report(partial(measure, name, options.seconds, options.nice), options.output)


def report(measured: Callable[[], dict[str, Any]], output: Path | None) -> None:
    """Measure, print one JSON line, and add it to the file."""
    from common import machine  # imports torch, which the other roles do not need

    load = os.getloadavg()[0]
    line = json.dumps({"bench": "attacks", **measured(), "load_before": round(load, 2), **machine()})
    print(line, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
