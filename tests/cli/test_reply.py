"""What is counted of a reply, and how it is told."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import attrs
import pytest
import trio
from trio.testing import MockClock

import triolet
from tests.cli.fake_engine import FakeEngine, open_fake_engine
from triolet.cli.backends.base import ReplyRequest
from triolet.cli.backends.local import LocalBackend
from triolet.cli.conversation import ChatHistory
from triolet.cli.models.chosen import chosen_model, config_of
from triolet.cli.models.presets import Preset
from triolet.cli.reply import Reply, ReplyScreen, Unshown, reason_to_wait
from triolet.cli.screen import Screen
from triolet.cli.slash import ChatState, take_settings
from triolet.config.engine import EngineConfig
from triolet.core.output.output_processor import RequestProgress
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, RequestMetrics, RequestStatus
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import ModelNotFound


def output(text: str, token_ids: tuple[int, ...], **changes: object) -> RequestOutput:
    base = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=tuple(range(57)),
        outputs=(CompletionOutput(index=0, text=text, token_ids=token_ids),),
        finished=False,
        metrics=RequestMetrics(first_token_ts=10.0, last_token_ts=10.0 + 127 / 92.3),
        num_cached_tokens=48,
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


def test_the_stats_line_is_the_one_that_was_promised() -> None:
    reply = Reply(asked_s=5.0)
    reply.add(output("a", (1,)), now=5.041)
    reply.add(output("b", tuple(range(127))), now=7.0)
    assert reply.stats_line() == "TTFT 41 ms · 128 tok · 92.3 tok/s · prompt 57 (48 cached)"


@pytest.mark.parametrize(
    ("status", "position", "computed", "restarting", "reason"),
    [
        ("waiting", 2, 0, (), "waiting, number 3 in line"),
        ("running", 0, 409, (), "reading the prompt 40 %"),
        ("waiting", 0, 999, (), "reading the prompt 99 %"),  # preempted
        ("running", 0, 409, ("model_runner",), "the engine restarts"),
    ],
)
def test_what_a_reply_waits_for_is_told_in_words(
    status: str, position: int, computed: int, restarting: tuple[str, ...], reason: str
) -> None:
    progress = RequestProgress(
        status=RequestStatus(status),
        queue_position=position,
        num_prompt_tokens=1000,
        num_computed_tokens=computed,
    )
    assert reason_to_wait(progress, restarting) == reason


def test_one_token_has_no_pace_and_nothing_cached_is_not_mentioned() -> None:
    reply = Reply(asked_s=5.0)
    reply.add(output("a", (1,), num_cached_tokens=0), now=6.239)
    assert reply.stats_line() == "TTFT 1.24 s · 1 tok · prompt 57"


def test_the_first_output_decides_the_time_to_the_first_token() -> None:
    reply = Reply(asked_s=5.0)
    reply.add(output("", (1,)), now=5.5)
    reply.add(output("a", (2,)), now=9.0)
    assert (reply.ttft_s, reply.total_s) == (0.5, 4.0)


def test_the_json_has_text_ids_reason_usage_and_times() -> None:
    reply = Reply(asked_s=5.0)
    last = CompletionOutput(index=0, text="!", token_ids=(9,), finish_reason=FinishReason.STOP, stop_reason=9)
    reply.add(output("hi", (7, 8)), now=5.25)
    reply.add(output("", (), outputs=(last,), finished=True, metrics=RequestMetrics()), now=6.0)
    assert reply.as_json("tiny") == {
        "model": "tiny",
        "text": "hi!",
        "token_ids": [7, 8, 9],
        "finish_reason": "stop",
        "stop_reason": 9,
        "usage": {"prompt_tokens": 57, "completion_tokens": 3, "cached_tokens": 48},
        "metrics": {"ttft_s": 0.25, "total_s": 1.0, "tokens_per_s": None},
    }


@asynccontextmanager
async def local_backend(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalBackend]:
    monkeypatch.setattr(triolet, "open_engine", open_fake_engine)
    async with AsyncExitStack() as stack:
        yield await LocalBackend.open(stack, EngineConfig())


@pytest.mark.parametrize(
    ("shows", "written"), [(True, "Thinking:\nHmm, let me see.\n\nYes.\n"), (False, "Yes.\n")]
)
async def test_reasoning_is_told_apart_from_the_answer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, shows: bool, written: str
) -> None:
    reply, out = Reply(asked_s=0.0), io.StringIO()
    request = ReplyRequest(messages=[{"role": "user", "content": "ponder this"}])
    async with local_backend(monkeypatch) as backend, trio.open_nursery() as nursery:
        cast(FakeEngine, backend._engine).reasoning_parser = "qwen3"
        with ReplyScreen(Screen.of(out), nursery, shows_reasoning=shows) as shown:
            await backend.reply(request, reply, shown)
    assert (reply.reasoning, reply.answer) == ("Hmm, let me see.", "Yes.")
    assert out.getvalue() == written


async def test_an_engine_is_asked_for_reasoning_and_for_a_form(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ReplyRequest(
        messages=[{"role": "user", "content": "count to 2"}],
        sampling={"max_tokens": 1},
        form=StructuredOutputsParams(json_object=True),
    )
    async with local_backend(monkeypatch) as backend:
        engine = cast(FakeEngine, backend._engine)
        await backend.reply(request, Reply(asked_s=0.0), Unshown())
        assert engine.asked == [request.messages]
        form = engine.params[0].structured_outputs
        assert (form and form.json_object, engine.params[0].max_tokens) == (True, 1)
        assert backend._prompt(attrs.evolve(request, thinks=False)) == {
            "messages": request.messages,
            "tools": None,
            "chat_template_kwargs": {"enable_thinking": False},
        }


async def test_another_model_takes_the_engines_place_and_on_an_error_the_first_is_loaded_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_backend(monkeypatch) as backend, trio.open_nursery() as later:
        later.start_soon(trio.lowlevel.checkpoint)
        await backend.switch("other")
        assert backend.model == "other"
        with pytest.raises(ModelNotFound):
            await backend.switch("missing")
        with trio.move_on_after(30.0) as impatient:
            await backend.switch("endless")
        assert impatient.cancelled_caught
        assert backend.model == "other"
        reply = Reply(asked_s=0.0)
        await backend.reply(ReplyRequest(messages=[{"role": "user", "content": "hello"}]), reply, Unshown())
        assert reply.text == "You said: hello"


async def test_another_model_has_neither_template_nor_fields_of_the_first_ones_preset_but_the_flags_count(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    presets = tmp_path / "presets.toml"
    presets.write_text(
        """
        [presets.poet]
        template = "{{ messages[0].content }}"
        system = "Answer in rhymes."
        sampling = { temperature = 0.9 }
        engine = { block_size = 32, max_num_seqs = 3 }
        """
    )
    monkeypatch.setenv("TRIOLET_CONFIG", str(presets))
    monkeypatch.setattr(triolet, "open_engine", open_fake_engine)
    flags = {"max_num_seqs": "5"}

    def other_models(text: str) -> tuple[Preset, EngineConfig]:
        return (preset := chosen_model(text)), config_of(preset, flags)

    def fields() -> tuple[object, ...]:
        config = cast(FakeEngine, backend._engine).config
        return config.model, config.chat_template, config.block_size, config.max_num_seqs

    async with AsyncExitStack() as stack:
        first = EngineConfig(chat_template="{{ 1 }}", revision="v1", max_num_seqs=5)
        backend = await LocalBackend.open(stack, first, other_models)
        preset = await backend.switch("poet")
        assert (backend.model, fields()) == ("poet", (None, "{{ messages[0].content }}", 32, 5))
        assert preset.system == "Answer in rhymes."
        usual = EngineConfig()
        await backend.switch("other")
        assert fields() == ("other", usual.chat_template, usual.block_size, 5)
        assert cast(FakeEngine, backend._engine).config.revision is None


async def test_models_that_can_be_chosen_are_listed_with_the_presets_and_a_mark_at_the_present_one(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    presets = tmp_path / "presets.toml"
    presets.write_text('[presets.poet]\nmodel = "some/model"\n[presets.wrong]\nmodel = 1\n[presets.plain]\n')
    monkeypatch.setenv("TRIOLET_CONFIG", str(presets))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    async with local_backend(monkeypatch) as backend:
        await backend.switch("/models/mine")
        assert [(one.name, one.remark, one.is_present) for one in await backend.models()] == [
            ("/models/mine", "", True),
            ("triolet-nano", "ships with triolet", False),
            ("poet", "preset of some/model", False),
            ("plain", "preset of triolet-nano", False),
        ]


async def test_a_file_of_presets_that_is_wrong_leaves_the_other_models_in_the_list(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (presets := tmp_path / "presets.toml").write_text("no TOML")
    monkeypatch.setenv("TRIOLET_CONFIG", str(presets))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    async with local_backend(monkeypatch) as backend:
        assert [one.name for one in await backend.models()] == ["triolet-nano"]


def test_a_preset_that_is_gone_on_with_brings_its_sampling_and_its_system_prompt() -> None:
    state = ChatState(conversation=ChatHistory("Old."), defaults=SamplingParams(), sampling={"top_p": 0.5})
    preset = Preset(name="poet", system="Answer in rhymes.", sampling={"temperature": 0.9})
    said = take_settings(preset, state)
    assert said == ("From the next message on with the preset's sampling and system prompt.",)
    assert state.sampling == {"top_p": 0.5, "temperature": 0.9}
    assert state.conversation.system == "Answer in rhymes."
    assert take_settings(Preset(name="other", model="other"), state) == ()
