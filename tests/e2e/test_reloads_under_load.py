"""Fifty exchanges of weights under sixteen streams, with kill -9 of the model's process before, in and after them."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import attrs
import pytest
import trio

import triolet
from tests.e2e.test_new_weights import FIELDS, other_weights
from triolet import SamplingParams
from triolet.core.request.params import RequestOutputKind
from triolet.nano import PATH

NUM_STREAMS = 16
NUM_RELOADS = 50
NUM_TOKENS = 200
NUM_BETWEEN = 3 * NUM_STREAMS  # tokens that are read between two exchanges


@attrs.define(eq=False)
class Stream:
    """One answer.

    Args:
        prompt: token ids.
        tokens: each with the version of the weights that its output names.
    """

    prompt: list[int]
    tokens: list[tuple[int, int]] = attrs.field(factory=list)


@attrs.define(eq=False)
class Readers:
    """Sixteen readers, which ask again when an answer has ended."""

    engine: triolet.Engine
    rng: random.Random = attrs.field(factory=lambda: random.Random(1))
    streams: list[Stream] = attrs.field(factory=list)
    num_read: int = 0
    has_stopped: bool = False
    _read: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def run(self) -> None:
        while not self.has_stopped:
            stream = Stream([self.rng.randrange(50, 2000) for _ in range(self.rng.randint(3, 30))])
            self.streams.append(stream)
            params = SamplingParams(
                max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            async with self.engine.generate(stream.prompt, params) as outputs:
                async for output in outputs:
                    [answer] = output.outputs
                    stream.tokens += [(token_id, answer.weight_version) for token_id in answer.token_ids]
                    self.num_read += len(answer.token_ids)
                    self._read.unpark_all()

    async def until_more(self, number: int) -> None:
        until = self.num_read + number
        while self.num_read < until:
            await self._read.park()


def kill(engine: triolet.Engine) -> bool:
    """Whether there was a process to kill."""
    if (process_id := engine.model_info.process_id) is None:
        return False
    os.kill(process_id, signal.SIGKILL)
    return True


@pytest.mark.slow
async def test_no_stream_is_lost_and_no_token_is_of_another_version_than_it_names(tmp_path: Path) -> None:
    other_weights(tmp_path / "other")
    folders = (str(PATH), str(tmp_path / "other"))  # of even and odd versions
    rng, num_kills = random.Random(2), 0
    fields = {**FIELDS, "num_kv_blocks": 512, "max_num_seqs": NUM_STREAMS}
    async with triolet.open_engine(runner="process", **fields) as engine:  # type: ignore[arg-type]
        readers = Readers(engine)
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_STREAMS):
                nursery.start_soon(readers.run)
            for version in range(1, NUM_RELOADS + 1):
                await readers.until_more(NUM_BETWEEN)
                when = ("before", "in", "after", "")[version % 4]
                if when == "before":
                    num_kills += kill(engine)
                async with trio.open_nursery() as exchange:
                    exchange.start_soon(engine.reload_weights, folders[version % 2])
                    if when == "in":
                        await trio.sleep(rng.uniform(0, 0.5))
                        num_kills += kill(engine)
                assert (engine.weight_version, engine.weights_folder) == (version, folders[version % 2])
                if when == "after":
                    num_kills += kill(engine)
            await readers.until_more(NUM_BETWEEN)
            readers.has_stopped = True
        assert num_kills > 20
        assert {version for stream in readers.streams for _, version in stream.tokens} == set(
            range(NUM_RELOADS + 1)
        )
        last = await engine.complete(
            [100, 200, 300], SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
        )
    await check(folders, readers.streams, last)


async def check(folders: tuple[str, str], streams: list[Stream], last: triolet.RequestOutput) -> None:
    """Compute each stretch of each answer again, in fresh engines on the weights that it names."""
    answers = defaultdict[int, list[tuple[list[int], list[int]]]](list)
    for stream in streams:
        tokens = [token_id for token_id, _ in stream.tokens]
        versions = [version for _, version in stream.tokens]
        assert len(tokens) == NUM_TOKENS
        assert versions == sorted(versions)
        for version in set(versions):
            first, number = versions.index(version), versions.count(version)
            answers[version % 2].append((stream.prompt + tokens[:first], tokens[first : first + number]))
    for parity, folder in enumerate(folders):
        async with triolet.open_engine(folder, **FIELDS) as fresh:  # type: ignore[arg-type]
            for prompt, expected in answers[parity]:
                params = SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True)
                [answer] = (await fresh.complete(prompt, params)).outputs
                assert list(answer.token_ids) == expected
            if parity == NUM_RELOADS % 2:
                params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
                again = await fresh.complete([100, 200, 300], params)
                assert again.outputs[0].logprobs == last.outputs[0].logprobs
