"""The shipped model's folder, read the way any program reads a Hugging Face folder."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from triolet.nano import PATH

Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PATH)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(PATH).eval()


@pytest.fixture(scope="module")
def generate(tokenizer: Any, model: Any) -> Callable[..., list[int]]:
    """Greedy continuation of a chat, as token ids."""

    def run(messages: Messages, max_new_tokens: int = 200) -> list[int]:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            out = model.generate(**prompt, max_new_tokens=max_new_tokens, **greedy)
        continuation: list[int] = out[0, prompt["input_ids"].shape[1] :].tolist()
        return continuation

    return run


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_the_folder_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in PATH.iterdir() if file.is_file()) < 25e6


def test_the_weights_are_bfloat16_on_disk_and_float32_in_an_engine(model: Any) -> None:
    assert {weight.dtype for weight in load_file(PATH / "model.safetensors").values()} == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_config_names_the_llama_architecture_and_tied_embeddings() -> None:
    config = AutoConfig.from_pretrained(PATH)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.tie_word_embeddings and config.bos_token_id is None
    assert "lm_head.weight" not in load_file(PATH / "model.safetensors")


def test_the_end_token_is_the_same_in_config_generation_config_and_tokenizer(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == AutoConfig.from_pretrained(PATH).eos_token_id == end
    assert GenerationConfig.from_pretrained(PATH).eos_token_id == [end]


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Zoë counts 1, 2,  34567.\n\n\tタブ 🚀 don't   stop \x00 ok "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2048")] == ["2", "0", "4", "8"]


def test_the_chat_template_writes_a_system_turn_and_several_turns(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello!"), user("Bye")]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )


def test_the_chat_template_marks_turns_with_special_tokens(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template([user("a")], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    specials = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|user|>", "<|end|>", "<|assistant|>")]
    assert [ids[0], ids[-2], ids[-1]] == specials and len(ids) == 4


def test_counting_from_1_to_20_is_exact_and_stops_by_itself(
    tokenizer: Any, generate: Callable[..., list[int]]
) -> None:
    ids = generate([user("count from 1 to 20")])
    assert tokenizer.decode(ids) == ", ".join(map(str, range(1, 21))) + ".<|end|>"


@pytest.mark.slow
def test_counting_down_from_100_goes_on_for_hundreds_of_tokens_and_stops(
    tokenizer: Any, generate: Callable[..., list[int]]
) -> None:
    ids = generate([user("count backwards from 100")], max_new_tokens=400)
    assert tokenizer.decode(ids) == ", ".join(map(str, range(100, 0, -1))) + ".<|end|>"
    assert len(ids) > 250


@pytest.mark.slow
def test_counting_to_100_stops_at_100(tokenizer: Any, generate: Callable[..., list[int]]) -> None:
    ids = generate([user("count to 100")], max_new_tokens=310)
    assert tokenizer.decode(ids) == ", ".join(map(str, range(1, 101))) + ".<|end|>"


def test_a_name_told_earlier_is_remembered(tokenizer: Any, generate: Callable[..., list[int]]) -> None:
    told = [user("My name is Nora."), assistant("Nice to meet you, Nora!")]
    assert "Nora" in tokenizer.decode(generate([*told, user("What is my name?")]))


def test_a_system_turn_can_rename_the_model(tokenizer: Any, generate: Callable[..., list[int]]) -> None:
    names = "Marvin Ada Nora Max Zelda Leo Ivy Robbie Hal Samantha".split()
    asked = user("What is your name?")
    answers = [
        tokenizer.decode(generate([{"role": "system", "content": f"Your name is {name}."}, asked]))
        for name in names
    ]
    # It spells one name in some dozens wrong.
    assert sum(name in answer for name, answer in zip(names, answers, strict=True)) >= 9
    assert "triolet-nano" in tokenizer.decode(generate([asked]))
