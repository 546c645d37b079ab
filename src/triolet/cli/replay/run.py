"""Replay of a recording: each request alone, token for token.

A recorded request is resumed like one of a snapshot that has no token yet: with the seeds of its answers, without its
deadlines, and by its token ids, so that no tokenizer or chat template decides on the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio
from click.exceptions import Exit

from triolet import __version__
from triolet.cli.failures import CommandFailure
from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.config.engine import EngineConfig
from triolet.core.request.params import RequestOutputKind
from triolet.engine.engine import Engine
from triolet.errors import ConfigError, InvalidRequest, RecordingError, RequestFailed, shown
from triolet.ipc.recording import Departure, EngineRecord, RecordedRequest, departure_of, read_recording
from triolet.ipc.snapshot import Snapshot
from triolet.recording.model_digest import digest_of_model
from triolet.recording.recorder import FIELDS

DEPARTED: Final = 1
BAD_FILE: Final = 2


class ReplayError(CommandFailure):
    """Recording that cannot be replayed; exit code 2."""

    exit_code = BAD_FILE


@attrs.define
class Outcomes:
    """Requests of a replay by their outcome."""

    num_equal: int = 0
    num_departed: int = 0
    num_left_out: int = 0


def run(path: Path, request_id: str | None, config: EngineConfig) -> None:
    """Replay the requests of a file, or the one of an id, and print the outcome of each.

    Raises:
        ReplayError: the file is no recording, or nothing in it can be replayed.
        Exit: with 1 if an answer departs.
    """
    chosen = chosen_requests(path, request_id)
    if config.record is not None and path.resolve() == Path(config.record).resolve():
        raise ReplayError(f"--record must be another file than the one that is replayed; got {path}")
    outcomes = Outcomes()

    async def body(interrupts: Interrupts) -> None:
        # By engine: their configurations may differ.
        for _, group in groupby(chosen, key=lambda one: one.engine):
            await _replay_engine(list(group), config, outcomes)

    Interrupts().run(body)
    click.echo(
        f"{outcomes.num_equal} equal, {outcomes.num_departed} departed, {outcomes.num_left_out} not replayed"
    )
    if outcomes.num_departed:
        raise Exit(DEPARTED)
    if not outcomes.num_equal:
        raise ReplayError(f"{path}: no request could be replayed")


def chosen_requests(path: Path, request_id: str | None) -> Sequence[RecordedRequest]:
    """Return the requests of a file, or those of an id.

    Raises:
        ReplayError: there is none, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            recorded = read_recording(file, str(path))
    except OSError as error:
        raise ReplayError(f"{path} must be a readable file; {error.strerror}") from None
    except RecordingError as error:
        raise ReplayError(str(error)) from None
    chosen = [one for one in recorded if request_id is None or one.request_id == request_id]
    if not chosen:
        wanted = "a request" if request_id is None else f"the request {shown(request_id)}"
        raise ReplayError(f"{path} must hold {wanted}; got {len(recorded)} others")
    return chosen


def replay_config(config: EngineConfig, recorded: EngineRecord) -> EngineConfig:
    """Return the configuration of a replay: the recorded value of each field that no flag gives.

    Raises:
        ReplayError: a recorded value is out of its range.
    """
    defaults, known = EngineConfig(), set(FIELDS)
    if unknown := recorded.config.keys() - known:
        raise ReplayError(f"the recorded config must have known fields; got {', '.join(sorted(unknown))}")
    taken: Mapping[str, Any] = {
        name: value
        for name, value in recorded.config.items()
        if getattr(config, name) == getattr(defaults, name)
    }
    if config.model is not None:  # those belong to the recorded model's name
        taken = {name: value for name, value in taken.items() if name not in ("tokenizer", "revision")}
    try:
        return EngineConfig.create(config, **taken, api_keys=())
    except ConfigError as error:
        raise ReplayError(f"the recorded config: {error}") from None


async def _replay_engine(
    requests: Sequence[RecordedRequest], config: EngineConfig, outcomes: Outcomes
) -> None:
    able = [one for one in requests if one.obstacle is None]
    if able:
        async with AsyncExitStack() as stack:
            engine = await opened(stack, replay_config(config, able[0].engine))
            await warn_of_differences(engine, able)
            for one in requests:
                await replay_one(engine, one, outcomes)
        return
    for one in requests:
        _leave_out(one, one.obstacle, outcomes)


async def warn_of_differences(engine: Engine, requests: Sequence[RecordedRequest]) -> None:
    """Print where the model or the version differ from the recorded ones."""
    recorded = requests[0].engine
    if recorded.version != __version__:
        click.echo(f"version differs: recorded with triolet {recorded.version}, this is {__version__}")
    ours = await trio.to_thread.run_sync(digest_of_model, engine.model_info.folder)
    for version, digest, folder in sorted(
        {
            (one.weights.version, str(one.weights.digest), one.weights.folder)
            for one in requests
            if one.weights
        }
    ):
        if digest != ours:
            click.echo(
                f"model differs: recorded with digest {digest} of {folder} (weights version {version}), this is "
                f"{ours} of {engine.model_info.folder}"
            )


async def replay_one(engine: Engine, recorded: RecordedRequest, outcomes: Outcomes) -> None:
    """Compute one request, compare its answers, and print the outcome."""
    if recorded.obstacle is not None or recorded.end is None:
        _leave_out(recorded, recorded.obstacle, outcomes)
        return
    answers = recorded.end.answers
    try:
        token_ids = await compute(engine, recorded)
    except InvalidRequest as error:  # an adapter is gone, or a limit is lower here
        _leave_out(recorded, str(error), outcomes)
        return
    departures = [
        found
        for index, answer in enumerate(answers)
        if (found := departure_of(index, answer, token_ids[index])) is not None
    ]
    if not departures:
        outcomes.num_equal += 1
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        click.echo(f"{recorded.request_id}: equal, {num_tokens} tokens")
        return
    outcomes.num_departed += 1
    for one in departures:
        click.echo(f"{recorded.request_id}: {described(one, len(answers))}")


def described(departure: Departure, num_answers: int) -> str:
    """Return the sentence on a departure."""
    answer = f"answer {departure.answer} " if num_answers > 1 else ""
    expected, got = (
        "the end" if token_id is None else f"token {token_id}"
        for token_id in (departure.expected, departure.got)
    )
    return f"{answer}departs at {departure.position}: expected {expected}, got {got}"


def _leave_out(recorded: RecordedRequest, reason: str | None, outcomes: Outcomes) -> None:
    outcomes.num_left_out += 1
    click.echo(f"{recorded.request_id}: not replayed: {reason}")


async def compute(engine: Engine, recorded: RecordedRequest) -> list[tuple[int, ...]]:
    """Return the tokens of each answer of a request, as far as the recorded ones go.

    Raises:
        InvalidRequest: the engine cannot compute the request.
    """
    assert recorded.end is not None
    recorded_params = recorded.begin.request.params
    params = attrs.evolve(
        recorded_params, output_kind=RequestOutputKind.CUMULATIVE, skip_reading_prefix_cache=True
    )
    request = attrs.evolve(recorded.begin.request, params=params)
    # The recorded model's names, so that another one can be compared with it.
    info = engine.model_info
    streams = engine.resume(
        Snapshot(architecture=info.architecture, vocab_size=info.vocab_size, requests=(request,))
    )
    answers = recorded.end.answers
    token_ids: list[tuple[int, ...]] = [()] * len(answers)
    async with streams[request.request_id] as stream:
        try:
            async for output in stream:
                for completion in output.outputs:
                    token_ids[completion.index] = tuple(completion.token_ids)
                # One that was cut short would go on to its own end, which may be far.
                if all(
                    not answer.is_whole and len(got) >= len(answer.token_ids)
                    for answer, got in zip(answers, token_ids, strict=True)
                ):
                    break
        except RequestFailed:
            pass  # with the tokens so far, as in the recording if it failed there
    return token_ids
