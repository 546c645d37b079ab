"""A chat template of the configuration takes the place of the model's, wherever the engine looks at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import triolet
from tests.model.tiny import change_json, make_model
from triolet import SamplingParams
from triolet.cli.replay.run import replay_config
from triolet.compat import LLM
from triolet.config.engine import EngineConfig
from triolet.core.tools.answer import thinking_switch_of
from triolet.errors import ConfigError
from triolet.ipc.recording import read_recording

SHORT = SamplingParams(max_tokens=2, temperature=0.0)
ASKED = [{"role": "user", "content": "Hello?"}]
OWN = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
OTHER = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.content }}]"
    "{% endfor %}{% if not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama-plain", path, with_tokenizer=True)
    templates = [{"name": "default", "template": OWN}, {"name": "tool_use", "template": OWN + "{{ tools }}"}]
    change_json(path / "tokenizer_config.json", chat_template=templates)
    return path


def opened(folder: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "runner": "inline"}
    return triolet.open_engine(model=str(folder), **(settings | fields))


@pytest.mark.parametrize("is_file", [True, False])
async def test_a_template_given_as_a_file_or_as_a_text_renders_chats_with_tools_and_without(
    folder: Path, tmp_path: Path, is_file: bool
) -> None:
    given = OTHER
    if is_file:
        (tmp_path / "other.jinja").write_text(OTHER, encoding="utf-8")
        given = str(tmp_path / "other.jinja")
    async with opened(folder, chat_template=given) as engine:
        plain = await engine.complete(ASKED, SHORT)
        quiet = {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": True}}
        thinking = await engine.complete(quiet, SHORT)
        tool = {"type": "function", "function": {"name": "f"}}
        with_tools = await engine.complete({"messages": ASKED, "tools": [tool]}, SHORT)
    assert plain.prompt == "[Hello?]<think></think>"
    assert thinking.prompt == "[Hello?]"
    assert with_tools.prompt.startswith("<tool_call>[{") and with_tools.prompt.endswith(plain.prompt)


async def test_formats_of_tools_and_reasoning_are_those_of_the_configured_template(folder: Path) -> None:
    async with opened(folder) as engine:
        assert (engine.tool_parser, engine.reasoning_parser) == (None, None)
        assert thinking_switch_of(engine.tokenizer) is None
    async with opened(folder, chat_template=OTHER) as engine:
        assert (engine.tool_parser, engine.reasoning_parser) == ("hermes", "qwen3")
        assert thinking_switch_of(engine.tokenizer) == "enable_thinking"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("no/such.jinja", r"the path of a readable text file, or the text .*No such file"),
        ("{% for m in messages %}", r"a chat template in Jinja \(.*endfor"),
        ("{{ messages", "a chat template in Jinja"),
        ("plain.txt", r"a chat template in Jinja \(it shows no messages\)"),
        ("bytes.jinja", "the path of a readable text file"),
        ("folder", "the path of a readable text file"),
    ],
)
async def test_what_is_no_template_is_refused_by_name_when_the_engine_opens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, rule: str
) -> None:
    (tmp_path / "plain.txt").write_text("Hello.")
    (tmp_path / "bytes.jinja").write_bytes(b"{{ messages }}\xff")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^chat_template must be {rule}") as caught:
        async with opened(folder, chat_template=given):
            pass
    assert (caught.value.field, caught.value.got) == ("chat_template", given)


async def test_a_wrong_template_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no_such_model")
    for given in ("no/such.jinja", "{{ messages"):
        with pytest.raises(ConfigError, match=r"^chat_template must be"):
            async with opened(Path(nowhere), chat_template=given):
                pass
        with pytest.raises(ConfigError, match=r"^chat_template must be"):
            LLM(nowhere, chat_template=given)


async def test_a_model_without_a_tokenizer_takes_no_chat_template(tmp_path: Path) -> None:
    make_model("llama-plain", tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"^chat_template must be left out for a model without a tokenizer"):
        async with opened(tmp_path / "bare", chat_template=OTHER):
            pass


def test_the_classes_of_vllm_take_the_template_as_well(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float", num_gpu_blocks_override=64, chat_template=OTHER)
    [output] = llm.chat(ASKED, SHORT, use_tqdm=False)
    assert output.prompt == "[Hello?]<think></think>"


async def test_a_recording_has_the_text_of_the_template_whatever_becomes_of_its_file(
    folder: Path, tmp_path: Path
) -> None:
    file, recording = tmp_path / "other.jinja", tmp_path / "requests.jsonl"
    file.write_text(OTHER, encoding="utf-8")
    async with opened(folder, chat_template=str(file), record=str(recording)) as engine:
        await engine.complete(ASKED, SHORT)
    file.unlink()
    [one] = read_recording(recording.read_bytes().splitlines(keepends=True))
    again = replay_config(EngineConfig(), one.engine)
    assert again.chat_template == OTHER
    async with triolet.open_engine(again, num_kv_blocks=64, runner="inline") as engine:
        assert (await engine.complete(ASKED, SHORT)).prompt == "[Hello?]<think></think>"


async def test_generation_config_vllm_leaves_of_the_models_defaults_what_ends_an_answer(
    tmp_path: Path,
) -> None:
    make_model("llama-plain", tmp_path / "model", with_tokenizer=True)
    said = {"temperature": 0.3, "top_k": 7, "max_new_tokens": 5, "eos_token_id": [9]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(said))
    async with opened(tmp_path / "model") as engine:
        ends = engine.model_info.generation.eos_token_ids
        given = engine.default_sampling_params()
        assert (given.temperature, given.top_k, given.max_tokens) == (0.3, 7, 5)
    async with opened(tmp_path / "model", generation_config="vllm") as engine:
        plain, defaults = engine.default_sampling_params(), SamplingParams(max_tokens=None)
        assert (plain.temperature, plain.top_k, plain.max_tokens) == (
            defaults.temperature,
            defaults.top_k,
            None,
        )
        assert 9 in ends and engine.model_info.generation.eos_token_ids == ends
