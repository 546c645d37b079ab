"""What one hostile client costs another one: named attacks on a real server, watched from a process of their own.

    python benchmarks/attacks.py [--seconds 5] [--only NAME ...] [--list] [--output FILE]

For each attack a fresh `triolet serve` with triolet-nano is started on loopback. One process attacks with one API key.
A second process, with another key, asks `/health` every 10 ms and reads the same greedy chat again and again; its text
must be the one of a quiet server. One JSON line per attack: what the attacker got (statuses, close codes), percentiles
and maximum of the latency of `/health` in milliseconds, whether every stream was exact, and the server's memory.

On a quiet machine no latency should be above 100 ms. A busy machine shows its own delays as well: the attack `nothing`
is the baseline.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import attrs

MODEL = "triolet-nano"
ATTACKER, WITNESS = "attacker-key", "witness-key"
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 20"}],
    "temperature": 0,
    "stream": True,
}
HEALTH_EVERY_S = 0.01
TIMEOUT_S = 5.0  # of one call of a socket
TEXT, PING, PONG, CLOSE = 1, 9, 10, 8

# ------------------------------------------------------------------------------------- a plain client


@attrs.define
class Client:
    """Client that sends bytes as it is told and counts what comes back.

    Args:
        port: of the server, on loopback.
        key: API key.
        seen: statuses and close codes, with their numbers.
    """

    port: int
    key: str
    seen: Counter[str] = attrs.field(factory=Counter)

    def connect(self) -> socket.socket:
        """Open a connection."""
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
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

    def request(self, method: str, path: str, body: bytes | Any = b"", *, to_read: int = 2**20) -> bytes:
        """Send one request on a connection of its own and read the response."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connect() as stream:
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


def grammars() -> dict[str, dict[str, Any]]:
    """Return structured outputs that are costly to compile or to follow."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}, "required": ["a", "b"]}
        if len(json.dumps(deep)) > 100_000:
            break
    return {
        "regex that explodes": {"regex": "(a|aa|aaa|aaaa)*" * 12 + "b"},
        "regex of repeats": {"regex": "((a{1,200}){1,200}){1,200}"},
        "recursive grammar": {"grammar": 'start: "a" start | start'},
        "grammar of alternatives": {
            "grammar": "start: " + " | ".join(f'"w{number}"' for number in range(5000))
        },
        "choices": {"choice": [f"choice {number}" for number in range(5000)]},
        "deep schema": {"json": deep},
        "schema of references": {
            "json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}
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
        made = cache(body) if callable(body) else lambda: body
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
    for name, form in grammars().items():
        found[f"grammar: {name}"] = post("/v1/responses", {**HELLO, "structured_outputs": form})

    def half(client: Client, header: bytes) -> bytes:
        return client.head("POST", "/v1/responses")[:-2] + header + b"\r\n\r\n"

    found |= {
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
        "detokenize": post("/detokenize", {"model": MODEL, "tokens": [1] * 200_000}),
    }
    return found


# ------------------------------------------------------------------------------------------ the processes


def attack(port: int, name: str, seconds: float) -> dict[str, int]:
    """Attack for so long; return what came back."""
    client, one_round = Client(port, ATTACKER), attacks()[name]
    until = time.monotonic() + seconds
    print("ready", flush=True)
    sys.stdin.readline()
    while time.monotonic() < until or not client.seen:
        try:
            one_round(client)
        except OSError as error:
            client.seen[type(error).__name__] += 1
        client.seen["rounds"] += 1
    return dict(client.seen)


def read_chat(client: Client) -> str:
    """Return the text of the greedy chat."""
    answer = client.request("POST", "/v1/chat/completions", CHAT)
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line.strip()) for line in lines]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())
    )


def watch(port: int) -> dict[str, Any]:
    """Ask for the health and read the chat until stdin has a line."""
    client = Client(port, WITNESS)
    expected = read_chat(client)
    latencies: list[float] = []
    texts: list[str] = []
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
            try:
                texts.append(read_chat(client))
            except (OSError, ValueError) as error:
                texts.append(repr(error))

    print("ready", flush=True)
    threads = [threading.Thread(target=work) for work in (ask, chat)]
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    is_over.set()
    for thread in threads:
        thread.join()
    latencies.sort()
    at = {
        f"p{share}": latencies[min(len(latencies) - 1, len(latencies) * share // 100)]
        for share in (50, 99, 100)
    }
    return {
        "health_ms": {name: round(value, 1) for name, value in at.items()},
        "num_health": len(latencies),
        "num_streams": len(texts),
        "exact": bool(expected) and all(text == expected for text in texts),
        "statuses": dict(client.seen),
    }


@contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """Run a server; yield its port and process id."""
    command = [sys.executable, "-m", "triolet", "serve", "--port", "0", "--api-keys", f"{ATTACKER},{WITNESS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().strip().rpartition(":")[2]), process.pid
        finally:
            process.kill()


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


def finish(process: subprocess.Popen[str]) -> Any:
    """Tell a process to go on, and return its result."""
    return json.loads(process.communicate("\n")[0].splitlines()[-1])


def resident_mib(process_id: int) -> float:
    """Return the memory of a process, MiB."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Run one attack against a server of its own."""
    with serving() as (port, process_id), helper("--attack", name, str(port), str(seconds)) as attacker:
        with helper("--watch", str(port)) as witness:
            memory = resident_mib(process_id)
            attacker_seen = finish(attacker)
            result = finish(witness)
        grown = round(resident_mib(process_id) - memory, 1)
    return {"attack": name, **result, "attacker": attacker_seen, "memory_growth_mib": grown}


def main() -> None:
    """Run the attacks that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each attack")
    parser.add_argument("--only", nargs="+", default=[], help="names of attacks, or their beginnings")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks")
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        name, port, seconds = options.attack
        print(json.dumps(attack(int(port), name, float(seconds))))
    elif options.watch:
        print(json.dumps(watch(options.watch)))
    else:
        names = [name for name in attacks() if not options.only or name.startswith(tuple(options.only))]
        if options.list:
            print("\n".join(names))
        else:
            run(names, options.seconds, options.output)


def run(names: list[str], seconds: float, output: Path | None) -> None:
    """Run attacks one after the other, and print a line for each."""
    from common import machine  # imports torch, which the other roles do not need

    for name in names:
        line = json.dumps({"bench": "attacks", **measure(name, seconds), **machine()})
        print(line, flush=True)
        if output is not None:
            with output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
