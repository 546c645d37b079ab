"""Sleep, pauses, weights and calls under vLLM's names: the same answers after them as without."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trio.testing import MockClock

from tests.actors.harness import LetterTokenizer, answer_of, fake_engine, model_info
from tests.core.fake_model import FakeModel
from triolet.compat import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from triolet.config.engine import EngineConfig
from triolet.errors import InvalidRequest, ModelError, UnsupportedFeature, WeightsMismatch
from triolet.nano import PATH

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FIELDS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
    "runner": "thread",
}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]


def make(model: str | None = None) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model, **FIELDS))


def answers(engine: LLMEngine, num_steps: int | None = None) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Step, to the end by default; finish reason and tokens of what has finished."""
    found = {}
    while engine.has_unfinished_requests() and num_steps != 0:
        num_steps = None if num_steps is None else num_steps - 1
        for output in engine.step():
            if output.finished:
                found[output.request_id] = (
                    output.outputs[0].finish_reason,
                    tuple(output.outputs[0].token_ids),
                )
    return found


def ask(engine: LLMEngine) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY)


def nudged(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy of triolet-nano with other values in one tensor, and that tensor."""
    shutil.copytree(PATH, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(tensors[name].shape, generator=generator)
    changed = {name: (tensors[name].float() + noise).to(tensors[name].dtype)}
    save_file(tensors | changed, file, metadata={"format": "pt"})
    return folder, changed


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[str | None, tuple[int, ...]]]:
    engine = make()
    ask(engine)
    return answers(engine)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_requests_that_are_kept_go_on_with_the_same_tokens_after_a_sleep(
    level: int, num_steps: int, plain: object
) -> None:
    engine = make()
    ask(engine)
    assert not answers(engine, num_steps)
    engine.sleep(level, mode="keep")
    assert engine.is_sleeping()
    assert (engine._runner is None) == (level > 0)
    assert answers(engine, 3) == {}
    assert engine.has_unfinished_requests()
    assert engine.wake_up(["weights"]) is False
    assert engine.is_sleeping()
    assert engine.wake_up()
    assert not engine.is_sleeping()
    assert engine.wake_up()  # harmless
    assert answers(engine) == plain


def test_a_sleep_ends_the_requests_or_lets_them_finish_first(plain: object) -> None:
    engine = make()
    ask(engine)
    answers(engine, 3)
    engine.sleep()
    ended = answers(engine)
    assert {reason for reason, _ in ended.values()} == {"abort"}
    engine.wake_up()
    ask(engine)
    engine.sleep(2, "wait")
    assert answers(engine) == plain
    with pytest.raises(
        InvalidRequest, match=r"needs the model, and the engine sleeps; call wake_up\(\) first"
    ):
        engine.apply_model(len)
    ask(engine)  # waits
    assert answers(engine, 2) == {}
    engine.wake_up()
    assert answers(engine) == plain
    for wrong in ({"level": 3}, {"level": True}, {"mode": "later"}):
        with pytest.raises(InvalidRequest, match=rf"^{next(iter(wrong))} must be"):
            engine.sleep(**wrong)
    with pytest.raises(InvalidRequest, match=r"^tags must be"):
        engine.wake_up(["head"])


def test_nothing_holds_the_model_of_a_sleeping_engine() -> None:
    engine = make()
    ask(engine)
    answers(engine, 2)
    assert engine._runner is not None
    runner = weakref.ref(engine._runner)
    engine.sleep(mode="keep")
    assert runner() is None  # at once, and not when garbage is collected


def test_a_model_that_was_handed_in_sleeps_only_in_memory() -> None:
    loaded: Any = (FakeModel(64, 4, 50), model_info(64, 4), LetterTokenizer())
    engine = LLMEngine(EngineConfig(), loaded=loaded)
    with pytest.raises(UnsupportedFeature, match=r"sleep\(level=1\) is not offered: the model was handed in"):
        engine.sleep()
    engine.sleep(0)
    assert engine.is_sleeping()
    assert engine.wake_up()
    engine.pause_generation("keep")
    assert engine.is_paused()
    assert engine.is_sleeping()
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=5, seed=3))
    assert answers(engine, 3) == {}
    engine.resume_generation()
    assert answers(engine)["a"][1] == answer_of([1, 2], 3, 5)


def test_an_llm_that_sleeps_refuses_to_answer_and_does_again_after_it() -> None:
    llm = LLM(**FIELDS)
    before = [output.outputs[0].text for output in llm.generate(["Hello!"], GREEDY, use_tqdm=False)]
    llm.sleep()
    assert llm.is_sleeping()
    with pytest.raises(InvalidRequest, match=r"the engine sleeps or is paused; call wake_up\(\)"):
        llm.generate(["Hello!"], GREEDY, use_tqdm=False)
    assert llm.wake_up()
    after = [output.outputs[0].text for output in llm.generate(["Hello!"], GREEDY, use_tqdm=False)]
    assert after == before


@pytest.mark.slow
def test_new_weights_answer_as_a_fresh_engine_with_them_does(tmp_path: Path, plain: object) -> None:
    folder, changed = nudged(tmp_path / "new")
    fresh = make(str(folder))
    ask(fresh)
    expected = answers(fresh)
    assert expected != plain
    llm = LLM(engine=make())
    engine = llm.llm_engine
    assert llm.get_weight_version() == "0"
    assert llm.reload_weights(str(folder)) == 1
    ask(engine)
    assert answers(engine) == expected
    llm.reload_weights(str(PATH))
    llm.update_weight_version("mine")
    assert llm.get_weight_version() == "mine"
    llm.start_weight_update()
    llm.update_weights(changed)
    ask(engine)
    assert answers(engine) == plain  # not finished yet
    llm.finish_weight_update("theirs")
    assert llm.get_weight_version() == "theirs"
    ask(engine)
    assert answers(engine) == expected
    llm.update_weights(list(changed.items()))
    assert llm.get_weight_version() == "4"
    # while it sleeps: loaded when it wakes
    llm.sleep()
    assert llm.reload_weights(str(PATH)) == 5
    llm.wake_up()
    ask(engine)
    assert answers(engine) == plain


def test_weights_that_do_not_fit_leave_the_old_ones(tmp_path: Path, plain: object) -> None:
    engine = make()
    with pytest.raises(ModelError, match="new weights must be a folder"):
        engine.reload_weights(str(tmp_path / "none"))
    with pytest.raises(WeightsMismatch):
        engine.update_weights({"no.such.tensor": torch.zeros(1)})
    with pytest.raises(InvalidRequest, match="at least one tensor"):
        engine.update_weights({})
    with pytest.raises(UnsupportedFeature, match="takes tensors by the names of the checkpoint"):
        engine.update_weights({"update_info": {"names": []}})
    with pytest.raises(InvalidRequest, match="must come after start_weight_update"):
        engine.finish_weight_update()
    engine.start_weight_update()
    with pytest.raises(InvalidRequest, match="must come once"):
        engine.start_weight_update()
    engine.finish_weight_update()
    with pytest.raises(InvalidRequest, match="new_version must be a string; got int"):
        engine.set_weight_version(3)  # type: ignore[arg-type]
    folder, _ = nudged(tmp_path / "broken")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        engine.reload_weights(str(folder))
    ask(engine)
    assert answers(engine) == plain
    assert engine.weight_version == 0


async def test_async_llm_sleeps_wakes_pauses_and_says_so(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, AsyncLLM.around(engine) as llm:
        assert not await llm.is_sleeping()
        await llm.sleep(level=1, mode="keep")
        assert await llm.is_sleeping()
        assert engine.statistics().sleep_level == 1
        assert await llm.wake_up(["weights"]) is False
        assert await llm.wake_up(tags=None) is True
        assert not await llm.is_sleeping()
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        assert await llm.is_sleeping()
        await llm.resume_generation()
        assert not await llm.is_sleeping()
        with pytest.raises(InvalidRequest, match=r"^level must be"):
            await llm.sleep(4)
        outputs = [output async for output in llm.generate([1, 2], SamplingParams(max_tokens=5, seed=3))]
        assert tuple(outputs[-1].outputs[0].token_ids) == answer_of([1, 2], 3, 5)


@pytest.mark.slow
async def test_async_llm_exchanges_weights_whole_or_in_parts(tmp_path: Path, plain: object) -> None:
    folder, changed = nudged(tmp_path / "new")

    async def ask_all(llm: AsyncLLM) -> dict[str, Any]:
        found = {}
        for number, prompt in enumerate(PROMPTS):
            async for output in llm.generate(prompt, GREEDY, str(number)):
                answer = output.outputs[0]
            found[str(number)] = (answer.finish_reason, tuple(answer.token_ids))
        return found

    async with AsyncLLM.from_engine_args(EngineArgs(**FIELDS)) as llm:
        assert await ask_all(llm) == plain
        await llm.start_weight_update()
        await llm.update_weights(changed)
        assert await llm.get_weight_version() == "0"
        await llm.finish_weight_update("step-1")
        assert await llm.get_weight_version() == "step-1"
        new = await ask_all(llm)
        assert new != plain
        assert await llm.reload_weights(str(PATH)) == 2
        assert await ask_all(llm) == plain
        assert await llm.reload_weights(str(folder)) == 3
        assert await ask_all(llm) == new
        await llm.update_weight_version("last")
        assert await llm.get_weight_version() == "last"
        with pytest.raises(WeightsMismatch):
            await llm.update_weights({"no.such.tensor": torch.zeros(1)})
