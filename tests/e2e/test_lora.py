"""LoRA adapters in a real engine: the answers are those of models that the adapters were merged into."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

import triolet
from tests.model.tiny import make_model
from tests.model.tiny_adapters import (
    ATTENTION,
    LINEAR,
    every_layer,
    is_greedy_answer,
    make_adapter,
    merged,
)
from tests.server.routes.harness import Scene
from triolet import Engine, LoRARequest, SamplingParams
from triolet.config.engine import EngineConfig
from triolet.errors import (
    AdapterError,
    AdaptersPinned,
    ConfigError,
    InvalidRequest,
    RequestFailed,
    SnapshotError,
)
from triolet.kernels.cpu.library import SWITCH
from triolet.model.backends.cpu import plan
from triolet.server import create_app

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 64
PROMPTS = [[(7 * place + 11 * index) % 256 for place in range(30)] for index in range(3)]


@pytest.fixture(autouse=True, params=["cpp", pytest.param("torch", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder that the engines of a test take."""
    if request.param == "torch":
        monkeypatch.setattr(plan, "library", lambda: None)
        monkeypatch.setenv(SWITCH, "off")  # of processes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four adapters: of all linear layers, of attention, of q and v alone, and one of rank 3."""
    root = tmp_path_factory.mktemp("adapters")
    few = every_layer(("self_attn.q_proj", "self_attn.v_proj"))
    return [
        make_adapter(base, root / "all", every_layer(LINEAR), rank=8, alpha=4, seed=1),
        make_adapter(base, root / "attention", every_layer(ATTENTION), rank=4, alpha=16, seed=2),
        make_adapter(base, root / "few", few, rank=1, seed=3),
        make_adapter(base, root / "odd", every_layer(LINEAR), rank=3, seed=4),
    ]


def lora(adapters: list[Path], number: int) -> LoRARequest | None:
    """The adapter of a number from 1; None for 0."""
    return LoRARequest(f"adapter-{number}", number, str(adapters[number - 1])) if number else None


def open_engine(base: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {"runner": "inline", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
    settings |= {"model": str(base), "dtype": "float32", "num_kv_blocks": 256, "log_stats": False}
    return triolet.open_engine(**(settings | fields))


async def answer(
    engine: Engine, prompt: list[int], adapter: LoRARequest | None, length: int = NUM_TOKENS
) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    output = await engine.complete(prompt, params, lora=adapter)
    assert output.lora_request == output.outputs[0].lora_request == adapter
    return list(output.outputs[0].token_ids)


async def answers(
    engine: Engine, adapters: list[Path], numbers: range, length: int = NUM_TOKENS, num_prompts: int = 2
) -> dict[tuple[int, int], list[int]]:
    """The answers to each prompt with each adapter, all asked for at once."""
    found: dict[tuple[int, int], list[int]] = {}

    async def ask(place: int, number: int) -> None:
        found[place, number] = await answer(engine, PROMPTS[place], lora(adapters, number), length)

    async with trio.open_nursery() as nursery:
        for place in range(num_prompts):
            for number in numbers:
                nursery.start_soon(ask, place, number)
    return found


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        # more adapters than slots, prompts in chunks, and too few blocks for all requests at once
        (12, {"max_num_batched_tokens": 32, "num_kv_blocks": 20}),
        pytest.param(NUM_TOKENS, {"max_num_batched_tokens": 32, "num_kv_blocks": 40}, marks=pytest.mark.slow),
        pytest.param(
            NUM_TOKENS, {"runner": "thread", "enable_prefix_caching": False}, marks=pytest.mark.slow
        ),
    ],
)
async def test_requests_of_four_adapters_and_of_none_get_the_answers_of_the_merged_models(
    length: int, settings: dict[str, Any], base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    async with open_engine(base, **settings) as engine:
        found = await answers(engine, adapters, range(5), length)
        assert engine.list_loras() == {1, 2, 3, 4}
    for number in range(5):
        model = merged(base, adapters[number - 1] if number else None, tmp_path / str(number))
        for place, prompt in enumerate(PROMPTS[:2]):
            assert len(found[place, number]) == length
            assert is_greedy_answer(model, prompt, found[place, number])
    assert len({tuple(found[0, number]) for number in range(5)}) == 5


@pytest.mark.parametrize(
    ("family", "without_values", "without_keys"),
    [("gemma4", (2, 5), ()), ("gemma4-small", (3, 4, 5), (3, 4, 5))],
)
@pytest.mark.parametrize("decoder", ["C++", "torch"])
async def test_an_adapter_of_a_projection_that_gives_keys_and_values_changes_both(
    family: str,
    without_values: tuple[int, ...],
    without_keys: tuple[int, ...],
    decoder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if decoder == "torch":
        monkeypatch.setattr(plan, "library", lambda: None)
    base = make_model(family, tmp_path / family)
    lacking = {"v_proj": without_values, "k_proj": without_keys}
    modules = [
        f"model.layers.{layer}.{name}"
        for layer in range(6)
        for name in LINEAR
        if layer not in lacking.get(name.rpartition(".")[2], ())
    ]
    adapter = make_adapter(base, tmp_path / "adapter", modules, rank=8, alpha=4, seed=1)
    async with open_engine(base, max_model_len=128) as engine:
        found = await answer(engine, PROMPTS[0], lora([adapter], 1))
        assert found != await answer(engine, PROMPTS[0], None)
    assert is_greedy_answer(merged(base, adapter, tmp_path / "merged"), PROMPTS[0], found)


NEOX = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
PHI = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2")


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("gpt-neox", [f"gpt_neox.layers.{layer}.{name}" for layer in range(3) for name in NEOX]),
        ("phi", [*every_layer(PHI), "lm_head"]),
    ],
)
@pytest.mark.parametrize("decoder", ["C++", "torch"])
async def test_an_adapter_of_rows_that_lie_head_by_head_and_one_of_a_head_with_a_bias_answer_as_merged(
    family: str, modules: list[str], decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "torch":
        monkeypatch.setattr(plan, "library", lambda: None)
    base = make_model(family, tmp_path / family)
    adapter = make_adapter(base, tmp_path / "adapter", modules, rank=8, alpha=4, seed=1)
    async with open_engine(base, max_model_len=128) as engine:
        found = await answer(engine, PROMPTS[0], lora([adapter], 1))
        assert found != await answer(engine, PROMPTS[0], None)
    assert is_greedy_answer(merged(base, adapter, tmp_path / "merged"), PROMPTS[0], found)


@pytest.mark.slow
async def test_sixteen_streams_with_four_adapters_and_none_survive_a_kill_token_for_token(
    base: Path, adapters: list[Path]
) -> None:
    async with open_engine(base, max_loras=4) as engine:
        undisturbed = await answers(engine, adapters, range(5), 24, num_prompts=3)
    # Without a limit, which is learned from fast steps: a slow one of a busy machine would count as hung.
    async with open_engine(base, max_loras=4, runner="process", step_timeout=None) as engine:
        for number in range(1, 5):
            await engine.add_lora(lora(adapters, number))
        found: dict[tuple[int, int], list[int]] = {}
        async with trio.open_nursery() as nursery:

            async def collect() -> None:
                found.update(await answers(engine, adapters, range(5), 24, num_prompts=3))

            async def kill() -> None:
                process_id = engine.model_info.process_id
                # the sixteenth stream is the killer's own, so that it is killed while the others are being computed
                params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
                async with engine.generate(PROMPTS[0], params, lora=lora(adapters, 1)) as stream:
                    for _ in range(3):
                        await anext(stream)
                    assert process_id is not None
                    os.kill(process_id, signal.SIGKILL)
                    [*_, last] = [output async for output in stream]
                assert list(last.outputs[0].token_ids) == undisturbed[0, 1]

            nursery.start_soon(collect)
            nursery.start_soon(kill)
        assert engine.statistics().num_restarts == 1
    assert found == undisturbed


async def test_an_adapter_that_is_reloaded_in_place_never_finds_the_blocks_of_its_former_weights(
    base: Path, tmp_path: Path
) -> None:
    modules = every_layer(ATTENTION)
    first, second = (make_adapter(base, tmp_path / str(seed), modules, seed=seed) for seed in (5, 6))
    folder = make_adapter(base, tmp_path / "adapter", modules, seed=5)
    async with open_engine(base) as engine:
        request = LoRARequest("mine", 1, str(folder))
        before = await answer(engine, PROMPTS[0], request, 8)
        (folder / "adapter_model.safetensors").write_bytes(
            (second / "adapter_model.safetensors").read_bytes()
        )
        # Files that have changed on the disk are read when that is asked for, and not before.
        assert await answer(engine, PROMPTS[0], request, 8) == before
        assert await engine.add_lora(LoRARequest("mine", 1, str(folder), load_inplace=True))
        after = await answer(engine, PROMPTS[0], request, 8)
        assert after == await answer(engine, PROMPTS[0], LoRARequest("other", 2, str(second)), 8)
        assert before == await answer(engine, PROMPTS[0], LoRARequest("third", 3, str(first)), 8)
    assert before != after


async def test_the_verbs_return_what_those_of_vllm_return(base: Path, adapters: list[Path]) -> None:
    one, two, three = (
        LoRARequest(f"adapter-{number}", number, str(adapters[number - 1])) for number in (1, 2, 3)
    )
    async with open_engine(base, max_cpu_loras=2) as engine:
        assert await engine.add_lora(one)
        assert await engine.add_lora(two)
        assert await engine.add_lora(one)  # only touched
        assert await engine.add_lora(three)  # in the place of the one that was used least recently
        assert engine.list_loras() == {1, 3}
        assert set(engine.loras()) == {one, three}
        with pytest.raises(InvalidRequest, match=r"Pinning failed\. LoRA 7 is not registered\."):
            await engine.pin_lora(7)
        assert await engine.pin_lora(1)
        assert await engine.add_lora(two)
        assert engine.list_loras() == {1, 2}
        assert await engine.pin_lora(2)
        with pytest.raises(AdaptersPinned, match="pinned items"):
            await engine.add_lora(three)
        assert engine.remove_lora(2)
        assert not engine.remove_lora(2)
        assert engine.list_loras() == {1}


async def test_an_adapter_that_cannot_be_used_fails_the_request_that_names_it_and_no_other(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    broken = make_adapter(base, tmp_path / "broken", every_layer(ATTENTION))
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    async with open_engine(base) as engine:
        good = await answer(engine, PROMPTS[0], lora(adapters, 1), 4)
        for request, problem in (
            (LoRARequest("broken", 9, str(broken)), "is truncated"),
            (LoRARequest("nowhere", 9, str(tmp_path / "nowhere")), "is no folder"),
        ):
            with pytest.raises(AdapterError, match=problem):
                await answer(engine, PROMPTS[0], request)
        with pytest.raises(InvalidRequest, match="lora_int_id must belong to one adapter"):
            await answer(engine, PROMPTS[0], LoRARequest("another name", 1, str(adapters[0])))
        with pytest.raises(InvalidRequest, match="lora_name must belong to one adapter"):
            await answer(engine, PROMPTS[0], LoRARequest("adapter-1", 2, str(adapters[0])))
        assert engine.list_loras() == {1}
        assert await answer(engine, PROMPTS[0], lora(adapters, 1), 4) == good


async def test_a_runner_starts_again_although_the_files_of_an_adapter_are_gone(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    gone = make_adapter(base, tmp_path / "gone", every_layer(ATTENTION))
    async with open_engine(base) as engine:
        good = await answer(engine, PROMPTS[0], lora(adapters, 1), 4)
        await engine.add_lora(LoRARequest("gone", 9, str(gone)))
        (gone / "adapter_model.safetensors").unlink()
        await engine.sleep()
        await engine.wake_up()
        assert await answer(engine, PROMPTS[0], lora(adapters, 1), 4) == good
        with pytest.raises(RequestFailed, match="adapter 'gone' could not be loaded"):
            await answer(engine, PROMPTS[0], LoRARequest("gone", 9, str(gone)))


async def test_an_engine_without_adapters_refuses_a_request_with_one(
    base: Path, adapters: list[Path]
) -> None:
    async with open_engine(base, enable_lora=False) as engine:
        with pytest.raises(InvalidRequest, match="LoRA is not enabled"):
            await answer(engine, PROMPTS[0], lora(adapters, 1))


async def test_a_snapshot_goes_on_with_the_same_weights_or_not_at_all(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "adapter", every_layer(ATTENTION), seed=7)
    request = LoRARequest("mine", 1, str(folder))
    async with open_engine(base) as engine:
        whole = await answer(engine, PROMPTS[0], request, 8)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        async with engine.generate(PROMPTS[0], params, lora=request, request_id="r") as stream:
            await anext(stream)
            saved = triolet.Snapshot.from_bytes(engine.snapshot().to_bytes())
    async with open_engine(base) as engine:
        async with engine.resume(saved)["r"] as stream:
            async for output in stream:
                last = output
        assert list(last.outputs[0].token_ids) == whole
    weights = adapters[1] / "adapter_model.safetensors"
    (folder / "adapter_model.safetensors").write_bytes(weights.read_bytes())
    async with open_engine(base) as engine:
        with pytest.raises(SnapshotError, match="other contents of adapter 'mine'"):
            async with engine.resume(saved)["r"]:
                pass


async def test_answers_of_former_and_present_contents_of_a_name_both_go_on_in_another_engine(
    base: Path, adapters: list[Path]
) -> None:
    former, present = (
        LoRARequest("mine", 1, str(adapters[place]), load_inplace=place > 0) for place in range(2)
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with open_engine(base) as engine:
        whole = {"former": await answer(engine, PROMPTS[0], former)}
        async with engine.generate(PROMPTS[0], params, lora=former, request_id="former") as one:
            await anext(one)
            async with engine.generate(PROMPTS[0], params, lora=present, request_id="present") as two:
                await anext(two)
                saved = triolet.Snapshot.from_bytes(engine.snapshot().to_bytes())
        whole["present"] = await answer(engine, PROMPTS[0], present)
    assert [request.request_id for request in saved.requests] == ["former", "present"]
    assert whole["former"] != whole["present"]
    for loaded in (None, former, present):
        async with open_engine(base) as engine:
            if loaded is not None:
                await engine.add_lora(loaded)
            for name, stream in engine.resume(saved).items():
                async with stream:
                    async for output in stream:
                        last = output
                assert list(last.outputs[0].token_ids) == whole[name], name
            # what was resumed has replaced nothing
            expected = former if loaded is None else loaded
            assert [one.lora_path for one in engine.loras()] == [expected.lora_path]


async def test_a_configured_adapter_is_a_model_over_http(base: Path, adapters: list[Path]) -> None:
    modules = (f"first={adapters[0]}", f"second={adapters[1]}")
    async with open_engine(base, lora_modules=modules, max_num_batched_tokens=64) as engine:
        scene = Scene(engine, create_app(engine), None)
        listed = json.loads((await scene.get("/v1/models")).body)
        assert [(card["id"], card["parent"]) for card in listed["data"]] == [
            *((name, None) for name in scene.app.state.context.model_names),
            ("first", engine.model_name),
            ("second", engine.model_name),
        ]
        wish = {"prompt": PROMPTS[0], "temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
        for name, number in (("first", 1), ("second", 2), (engine.model_name, 0)):
            found = json.loads((await scene.post("/v1/completions", wish | {"model": name})).body)
            request = LoRARequest(name, number, str(adapters[number - 1])) if number else None
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            expected = await engine.complete(PROMPTS[0], params, lora=request)
            assert (found["model"], found["choices"][0]["text"]) == (name, expected.outputs[0].text)
        unknown = await scene.post("/v1/completions", wish | {"model": "third"})
        assert json.loads(unknown.body)["error"]["code"] == "model_not_found"


async def test_all_configured_adapters_are_kept_also_if_one_step_takes_only_one(
    base: Path, adapters: list[Path]
) -> None:
    modules = tuple(f"adapter-{number}={folder}" for number, folder in enumerate(adapters))
    assert len(modules) > EngineConfig().max_loras
    async with open_engine(base, lora_modules=modules, max_loras=1) as engine:
        assert {request.lora_name for request in engine.loras()} == {
            entry.partition("=")[0] for entry in modules
        }


async def test_two_configured_adapters_of_one_name_are_refused_by_it(
    base: Path, adapters: list[Path]
) -> None:
    with pytest.raises(
        InvalidRequest, match="lora_name must belong to one adapter; 'mine' has lora_int_id 1, got 2"
    ):
        async with open_engine(base, lora_modules=(f"mine={adapters[0]}", f"mine={adapters[1]}")):
            pass


@pytest.mark.parametrize("entry", ["no folder", "=folder", "tiny=folder"])
async def test_a_configured_adapter_has_a_name_of_its_own_and_a_folder(entry: str, base: Path) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be"):
        async with open_engine(base, lora_modules=(entry,)):
            pass
