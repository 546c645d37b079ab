"""Answers bound to a form, from a model with random weights: the form is what makes them JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.garbage import garbage_of, kinds_of
from tests.model.tiny import make_model
from tests.scale import one_in
from tests.source_tree import SRC
from triolet import Engine, FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from triolet.actors import structured_output
from triolet.actors.grammar_requests import GrammarRequests
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.scheduling.scheduler import Scheduler
from triolet.errors import EngineUnhealthy, InvalidParams, RequestFailed, UnsupportedFeature

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
# Each takes more than the second that these tests give it, or more memory.
SLOW = StructuredOutputsParams(json={"properties": {f"p{i}": {"type": "string"} for i in range(2_400)}})
LARGE = StructuredOutputsParams(regex="|".join("a" * length for length in range(1, 1_000)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@asynccontextmanager
async def opened(folder: Path, **fields: Any) -> AsyncGenerator[Engine]:
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256, "runner": "thread"}
    async with triolet.open_engine(model=str(folder), **(settings | fields)) as engine:
        yield engine


def params(form: StructuredOutputsParams | None, seed: int = 0, **fields: Any) -> SamplingParams:
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 120}
    return SamplingParams(structured_outputs=form, seed=seed, **(settings | fields))


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind"]
    assert len(value["name"]) <= 4
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("cat", "dog")


def first(output: RequestOutput) -> tuple[str, FinishReason | None]:
    return output.text, output.finish_reason


@pytest.mark.parametrize("runner", one_in(3, ["inline", "thread", "process"]))
async def test_random_weights_give_json_that_follows_its_schema(folder: Path, runner: str) -> None:
    async with opened(folder, runner=runner) as engine:
        for seed in range(5):
            output = await engine.complete([1, 2, 3], params(JSON, seed))
            assert output.finish_reason is FinishReason.STOP
            assert output.outputs[0].stop_reason is None
            check_json(output.text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    one_in(
        2,
        [
            (StructuredOutputsParams(regex="[0-9]{3}-[a-f]+!"), "[0-9]{3}-[a-f]+!"),
            (StructuredOutputsParams(choice=["red", "green", "blue"]), "red|green|blue"),
            (StructuredOutputsParams(grammar='start: "x" ("y" | "z")'), "x[yz]"),
            (StructuredOutputsParams(grammar='root ::= "x" ("y" | "z")'), "x[yz]"),
        ],
    ),
)
async def test_every_kind_of_form_is_kept(folder: Path, form: StructuredOutputsParams, pattern: str) -> None:
    async with opened(folder, runner="inline") as engine:
        for seed in range(4):
            output = await engine.complete(
                [1, 2, 3], params(form, seed, temperature=0.0 if seed == 0 else 1.0)
            )
            if output.finish_reason is FinishReason.STOP:
                assert re.fullmatch(pattern, output.text)
            else:
                assert output.finish_reason is FinishReason.LENGTH


async def test_any_json_object_is_one(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        form = StructuredOutputsParams(json_object=True)
        output = await engine.complete([1, 2, 3], params(form, max_tokens=20))
        assert output.text.startswith("{")


async def test_four_answers_to_one_prompt_each_follow_the_form(folder: Path) -> None:
    async with opened(folder) as engine:
        output = await engine.complete([1, 2, 3], params(JSON, n=4))
        assert len({completion.text for completion in output.outputs}) > 1
        for completion in output.outputs:
            check_json(completion.text)


async def test_min_tokens_keep_a_form_going_that_could_end(folder: Path) -> None:
    form = StructuredOutputsParams(regex="a+")
    async with opened(folder, runner="inline") as engine:
        output = await engine.complete([1, 2, 3], params(form, min_tokens=7, max_tokens=9))
        assert re.fullmatch("a{7,9}", output.text)
        # A form that has ended cannot go on, whatever is asked.
        output = await engine.complete([1], params(StructuredOutputsParams(choice=["ab"]), min_tokens=7))
        assert first(output) == ("ab", FinishReason.STOP)


async def test_a_stop_string_ends_an_answer_amid_its_form(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        form = StructuredOutputsParams(choice=["one two three"])
        output = await engine.complete([1, 2], params(form, stop=["two"]))
        assert first(output) == ("one ", FinishReason.STOP)
        assert output.outputs[0].stop_reason == "two"


async def test_a_form_ends_an_answer_that_ignores_the_end_of_sequence(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        form = StructuredOutputsParams(choice=["yes", "no"])
        output = await engine.complete([1, 2], params(form, ignore_eos=True))
        assert output.text in ("yes", "no")


async def test_deltas_and_log_probabilities_are_those_of_what_the_form_leaves(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        form, text = StructuredOutputsParams(choice=["ab"]), ""
        deltas = params(form, logprobs=1, output_kind=RequestOutputKind.DELTA)
        async with engine.generate([1, 2], deltas) as stream:
            async for output in stream:
                text += output.text
                for logprobs in output.outputs[0].logprobs or ():
                    assert next(iter(logprobs.values())).logprob == 0.0  # there was one choice
        assert text == "ab"


@pytest.mark.slow
async def test_preempted_answers_are_those_of_answers_alone(folder: Path) -> None:
    async with opened(folder) as engine:
        alone = [first(await engine.complete([i + 1] * 20, params(JSON, i))) for i in range(6)]
    answers: dict[int, tuple[str, FinishReason | None]] = {}
    async with opened(folder, num_kv_blocks=16, block_size=4, max_model_len=64) as engine:

        async def ask(index: int) -> None:
            answers[index] = first(await engine.complete([index + 1] * 20, params(JSON, index)))

        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(ask, index)
        assert engine.statistics().num_preemptions > 0
    assert [answers[index] for index in range(6)] == alone


@pytest.mark.slow
async def test_answers_survive_the_death_of_the_runner(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
    async with opened(folder, runner="process") as engine:
        text, num_outputs = "", 0
        async with engine.generate([1, 2, 3], params(JSON, 5, output_kind=RequestOutputKind.DELTA)) as stream:
            async for output in stream:
                text += output.text
                num_outputs += 1
                if num_outputs in (3, 9):
                    assert engine.model_info.process_id is not None
                    os.kill(engine.model_info.process_id, signal.SIGKILL)
        assert engine.statistics().num_restarts > 0
        assert (text, output.finish_reason) == undisturbed


async def test_an_answer_that_another_engine_takes_up_keeps_its_form(folder: Path) -> None:
    async with opened(folder, runner="inline") as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        async with engine.generate([1, 2, 3], params(JSON, 5)) as stream:
            async for output in stream:
                if len(output.outputs[0].token_ids) == 9:
                    break
            snapshot = engine.snapshot()
    async with opened(folder, runner="inline") as engine:
        [stream] = engine.resume(snapshot).values()
        async with stream:
            outputs = [output async for output in stream]
    assert first(outputs[-1]) == undisturbed


async def test_what_was_found_out_of_an_answer_before_it_grew_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about twice at one place, and the second time the grammar takes its time."""
    guide, set_mask = (
        structured_output.StructuredOutputManager.ask,
        structured_output.StructuredOutputManager._set_mask,
    )
    num_asked = 0

    async def ask(
        self: structured_output.StructuredOutputManager,
        form: StructuredOutputsParams,
        answers: dict[int, Any],
    ) -> None:
        nonlocal num_asked
        num_asked += 1
        await guide(self, form, answers)
        if num_asked == 3:
            assert self.grammars is not None
            late.extend(await self.grammars.guide(form, answers))

    def told(self: structured_output.StructuredOutputManager, guided: Any) -> None:
        set_mask(self, guided)
        if late and guided.position > late[0].position:
            set_mask(self, late.pop())

    late: list[Any] = []
    async with opened(folder, runner="inline") as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        monkeypatch.setattr(structured_output.StructuredOutputManager, "ask", ask)
        monkeypatch.setattr(structured_output.StructuredOutputManager, "_set_mask", told)
        assert first(await engine.complete([1, 2, 3], params(JSON, 5))) == undisturbed
    assert num_asked > 3 and not late


@pytest.mark.parametrize("victim", ["guidance", "scheduler"])
async def test_answers_survive_the_crash_of_their_guidance_or_of_the_scheduler(
    folder: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seventh and the twentieth time that it does its work, it crashes."""
    places = {
        "guidance": (structured_output.StructuredOutputManager, "sort"),
        "scheduler": (Scheduler, "guide"),
    }
    owner, name = places[victim]
    work, num_calls = getattr(owner, name), 0

    def fragile(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (7, 20):
            raise RuntimeError("boo")
        return work(*arguments)

    async with opened(folder, runner="inline") as engine:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        monkeypatch.setattr(owner, name, fragile)
        assert first(await engine.complete([1, 2, 3], params(JSON, 5))) == undisturbed
        assert engine.statistics().num_restarts == 2


# -------------------------------------------------------------------------------- wrong and hostile forms


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_wrong_form_is_the_callers_error(folder: Path, runner: str) -> None:
    async with opened(folder, runner=runner) as engine:
        for form, message in (
            (
                StructuredOutputsParams(regex="(a"),
                "structured_outputs.regex must be a grammar that can be compiled",
            ),
            (
                StructuredOutputsParams(json={"type": "nosuch"}),
                "structured_outputs.json .* Invalid type: nosuch",
            ),
            (StructuredOutputsParams(grammar="start: x"), 'structured_outputs.grammar .* unknown name: "x"'),
        ):
            with pytest.raises(InvalidParams, match=message):
                await engine.complete([1, 2], params(form))
        assert (await engine.complete([1, 2], params(None, max_tokens=3))).finished
        assert engine.statistics().num_requests_live == 0


RECURSIVE = 'start: "a" start | start'
ALTERNATIVES = "start: " + " | ".join(f'"w{number}"' for number in range(5000))


@pytest.mark.parametrize(
    ("runner", "grammar"),
    # Inline each answer is followed from its beginning at once, which keeps RECURSIVE within the limits.
    one_in(2, [("thread", RECURSIVE), ("thread", ALTERNATIVES), ("inline", ALTERNATIVES)]),
)
async def test_a_grammar_that_fails_while_it_is_followed_is_the_callers_error(
    folder: Path, runner: str, grammar: str
) -> None:
    async with opened(folder, runner=runner, max_grammar_bytes=2**20) as engine:
        with pytest.raises(
            InvalidParams, match=r"structured_outputs\.grammar must be a grammar that can be"
        ) as caught:
            await engine.complete([1, 2], params(StructuredOutputsParams(grammar=grammar)))
        assert caught.value.field == "structured_outputs.grammar"
        assert (await engine.complete([1, 2], params(None, max_tokens=3))).finished
        assert engine.statistics().num_requests_live == 0
        assert engine.statistics().kv_blocks_in_use == 0


@pytest.mark.parametrize(
    ("runner", "form"),
    [
        ("thread", StructuredOutputsParams(regex="(a")),
        ("thread", StructuredOutputsParams(grammar=RECURSIVE)),
        ("inline", StructuredOutputsParams(grammar=ALTERNATIVES)),
    ],
)
async def test_a_request_that_fails_leaves_nothing_of_itself_to_the_garbage_collector(
    folder: Path, runner: str, form: StructuredOutputsParams
) -> None:
    async def fail() -> None:
        with pytest.raises(InvalidParams):
            await engine.complete([1, 2], params(form))

    async with opened(folder, runner=runner, max_grammar_bytes=2**20) as engine:
        assert kinds_of(await garbage_of(fail), "triolet") == set()


async def test_a_form_that_is_too_large_is_refused_with_the_limit(folder: Path) -> None:
    async with opened(folder, runner="inline", max_grammar_bytes=100) as engine:
        with pytest.raises(
            InvalidParams, match=r"must have at most 100 bytes \(max_grammar_bytes\), got 101"
        ):
            await engine.complete([1, 2], params(StructuredOutputsParams(regex="a" * 101)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "limits", "message"),
    [
        (SLOW, {"grammar_timeout": 0.3}, r"structured_outputs.json .* it takes more than 0.3 s"),
        (
            LARGE,
            {"grammar_memory_bytes": 2**24, "grammar_timeout": 30.0},
            "structured_outputs.regex .* too much memory",
        ),
    ],
)
async def test_a_hostile_form_fails_alone_and_stalls_no_other_request(
    folder: Path, form: StructuredOutputsParams, limits: dict[str, Any], message: str
) -> None:
    async with opened(folder, max_grammar_bytes=2**20, **limits) as engine:
        await engine.complete([1, 2], params(JSON))  # the process of grammars has started
        num_tokens_while_compiling, refusals = 0, []

        async def hostile() -> None:
            with pytest.raises(InvalidParams, match=message) as caught:
                await engine.complete([1, 2], params(form))
            refusals.append(caught.value)

        async with trio.open_nursery() as nursery:
            async with engine.generate(
                [1] * 5, params(JSON, 3, output_kind=RequestOutputKind.DELTA)
            ) as bound:
                await anext(aiter(bound))
                nursery.start_soon(hostile)
                await trio.testing.wait_all_tasks_blocked()
                async with engine.generate([1], params(None, max_tokens=30, ignore_eos=True)) as free:
                    async for _ in free:
                        num_tokens_while_compiling += not refusals
                check_json(await bound.text())
        assert len(refusals) == 1
        if form is SLOW:
            assert num_tokens_while_compiling > 3
        check_json((await engine.complete([1, 2], params(JSON, 8))).text)


HOSTILE: dict[str, dict[str, Any]] = {
    "nested quantifiers": {"regex": "(a+)+b"},
    "nested counts": {"regex": "((a{1,100}){1,100}){1,100}"},
    "a large count": {"regex": "a{1,1000000000}"},
    "a far look back": {"regex": ".*a.{1000}"},
    "many alternatives": {"regex": "|".join(f"{n:x}" * 20 for n in range(3_000))},
    "classes of everything": {"regex": r"(\w|\W|\p{L}|\P{L}|.){0,5000}"},
    "deep groups": {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    "a long literal": {"regex": "a" * 100_000},
    "left recursion": {"grammar": 'start: start start | "a"'},
    "endless nothing": {"grammar": 'start: x*\nx: y*\ny: ""'},
    "an ambiguous sum": {"grammar": 'start: e\ne: e "+" e | e "*" e | "1"'},
    "many rules": {
        "grammar": "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(3_000)) + '\nr3000: "b"'
    },
    "deep brackets": {"grammar": "start: " + "(" * 2_000 + '"a"' + ")" * 2_000},
    "unknown notation": {"grammar": "\x01\x02 %%% ::= ???"},
    "references in a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "doubling references": {
        "json": {
            "$defs": {
                **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(24)},
                "d24": {"type": "object"},
            },
            "$ref": "#/$defs/d0",
        }
    },
    "many properties": {"json": {"properties": {f"p{n}": {"type": "string"} for n in range(2_400)}}},
    "many required": {
        "json": {
            "properties": {f"p{n}": {"type": "integer"} for n in range(800)},
            "required": [f"p{n}" for n in range(800)],
        }
    },
    "a long enum": {"json": {"enum": [f"value {n} " * 3 for n in range(4_000)]}},
    "huge bounds": {
        "json": {"type": "array", "minItems": 10**9, "items": {"type": "integer", "minimum": 10**300}}
    },
    "a long string": {"json": {"type": "string", "minLength": 10**9}},
    "a fine grid": {"json": {"type": "number", "multipleOf": 1e-9, "minimum": -1e300, "maximum": 1e300}},
    "a wrong pattern": {"json": {"type": "string", "pattern": "(((("}},
    "a wrong type": {"json": {"type": {"type": "type"}}},
    "nested to the limit": {"json": '{"items": ' * 63 + "{}" + "}" * 63},
}


async def ending(engine: Engine, form: StructuredOutputsParams) -> str:
    """How a request with that form ends: `answer`, or its error's message."""
    try:
        output = await engine.complete([1, 2, 3], params(form, max_tokens=8))
    except (InvalidParams, RequestFailed) as error:
        return str(error)
    return "answer" if output.finished else "nothing"


@pytest.mark.slow
async def test_hostile_forms_end_as_an_answer_or_an_error_and_the_same_engine_goes_on(folder: Path) -> None:
    endings = {}
    async with opened(folder, max_grammar_bytes=2**20, grammar_timeout=1.0) as engine:
        for name, fields in HOSTILE.items():
            with trio.fail_after(300):
                endings[name] = await ending(engine, StructuredOutputsParams(**fields))
                check_json((await engine.complete([1, 2], params(JSON))).text)
            statistics = engine.statistics()
            assert (statistics.num_requests_live, statistics.kv_blocks_in_use, statistics.num_restarts) == (
                0,
                0,
                0,
            )
    assert all(text == "answer" or 30 < len(text) < 500 for text in endings.values()), endings
    assert endings["nested quantifiers"] == "answer"
    assert "must be a grammar that can be compiled" in endings["unknown notation"]


@pytest.mark.slow
async def test_forms_beyond_the_limit_take_the_place_of_the_least_used(folder: Path) -> None:
    async with opened(folder, max_grammars=2) as engine:
        for _ in range(2):
            for word in ("ab", "cd", "ef", "gh"):
                form = StructuredOutputsParams(choice=[word])
                assert (await engine.complete([1], params(form))).text == word


@pytest.mark.slow
async def test_many_forms_at_once_wait_for_each_other(folder: Path) -> None:
    texts: dict[int, str] = {}
    async with opened(folder, max_grammars=2) as engine:

        async def ask(index: int) -> None:
            form = StructuredOutputsParams(choice=[f"word {index}"])
            texts[index] = (await engine.complete([index + 1], params(form))).text

        async with trio.open_nursery() as nursery:
            for index in range(8):
                nursery.start_soon(ask, index)
    assert texts == {index: f"word {index}" for index in range(8)}


@pytest.mark.parametrize("num_times", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_question_that_the_actor_loses_is_found_by_the_watchdog_which_names_it(
    folder: Path, num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, lost, named = GrammarRequests.questions, list[tuple[int, ...]](), list[str]()

    async def questions(self: GrammarRequests) -> tuple[int, ...]:
        asked = await original(self)
        if asked and len(lost) < num_times:
            lost.append(asked)
            await trio.sleep_forever()
        return asked

    async def look(engine: Engine) -> None:
        while True:
            try:
                engine.check_health()
            except EngineUnhealthy as error:
                named.append(error.actor)
            await trio.sleep(0.02)

    async with opened(folder, step_timeout=0.5) as engine, trio.open_nursery() as nursery:
        undisturbed = first(await engine.complete([1, 2, 3], params(JSON, 5)))
        monkeypatch.setattr(GrammarRequests, "questions", questions)
        nursery.start_soon(look, engine)
        if num_times == 1:
            assert first(await engine.complete([1, 2, 3], params(JSON, 5))) == undisturbed
        else:
            with pytest.raises(RequestFailed, match="its grammar gives no answer"):
                await engine.complete([1, 2, 3], params(JSON, 5))
        assert engine.statistics().num_restarts == num_times
        await engine.complete([1], params(None, max_tokens=3))
        nursery.cancel_scope.cancel()
    # The first one counts: on a busy machine the next life, too, may take longer than this limit to begin.
    assert named[0] == "structured_output"


IMPORTS_AT_THE_FIRST_FORM = """
import sys
import trio
import triolet
from triolet import SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams

async def main():
    async with triolet.open_engine(model=sys.argv[1], runner="thread", num_kv_blocks=64) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=3))
        before = set(sys.modules)
        form = StructuredOutputsParams(choice=["ab"])
        output = await engine.complete([1, 2], SamplingParams(structured_outputs=form))
        print(output.text, *(set(sys.modules) - before))

trio.run(main)
"""


@pytest.mark.slow
def test_the_first_form_imports_nothing_into_the_loop(folder: Path) -> None:
    """In a process of its own, since this one has imported everything."""
    command = [sys.executable, "-c", IMPORTS_AT_THE_FIRST_FORM, str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    told = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert told.stdout == "ab\n"


async def test_a_model_without_a_tokenizer_refuses_forms(tmp_path: Path) -> None:
    async with opened(make_model("llama-plain", tmp_path), runner="inline") as engine:
        with pytest.raises(
            UnsupportedFeature, match="structured_outputs must be None: they need a tokenizer"
        ):
            await engine.complete([1, 2], params(JSON))
