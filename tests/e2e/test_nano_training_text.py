"""The text that `tools/nano` writes for a training of triolet-nano, and the chat template that goes with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.source_tree import ROOT
from triolet.nano import PATH

NUM_CHATS = 3000
FOLDER = ROOT / "tools" / "nano"
TEMPLATE = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
WRITE = f"""
import json, sys
from itertools import islice
import conversations, tokens
chats = islice(conversations.new_chats(5), {NUM_CHATS})
print(json.dumps([[[turn.role, turn.content, turn.given] for turn in chat] for chat in chats]))
"""
TELL = """
import json, sys
import tokens
print(json.dumps([tokens.tools_text(json.load(sys.stdin)), tokens.call_text("weather", {"city": "Zürich", "days": 3})]))
"""

# Of parameters in a tool's line, with the mark of an optional one; what follows the closing bracket is its description.
NAMES = re.compile(r"(?:^|, )([^\s,:?]+)(\??): (?=[^)]*\))")
Turn = tuple[str, str, str]


def run(program: str, asked: str = "") -> Any:
    """What a program prints that has the folder's modules at hand."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=asked,
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer that ships, to which the template's tokens are text."""
    return AutoTokenizer.from_pretrained(PATH)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **values: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, **values)
    return text


@pytest.fixture(scope="module")
def chats() -> list[list[Turn]]:
    written: list[list[Turn]] = run(WRITE)
    return written


def signatures_in(system: str) -> dict[str, str]:
    """Name -> parameters, of the tools that a system turn lists."""
    lines = system.partition("Tools:\n")[2].splitlines()
    return {line.partition("(")[0]: line.partition("(")[2] for line in lines}


def calls_in(answer: str) -> list[dict[str, Any]]:
    """The calls of an answer."""
    return [json.loads(part.partition("</tool_call>")[0]) for part in answer.split("<tool_call>")[1:]]


FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"enum": [1, 3]},
                "unit": {"anyOf": [{"enum": ["c", "f"]}, {"type": "null"}]},
                "more": {"type": ["string", "null"]},
                "other": {"$ref": "#/$defs/other"},
                "any": {},
            },
            "required": ["city"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "later"},
]
LISTING = (
    'Tools:\nweather(city: string, days?: 1|3, unit?: "c"|"f"|null, more?: string|null, other?: object, any?: any): '
    "The weather of a city.\nnow()\nlater()"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'


def test_the_text_and_the_template_tell_of_tools_and_calls_alike(tokenizer: Any) -> None:
    assert run(TELL, json.dumps(FUNCTIONS)) == [LISTING, CALL]
    called = {"function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
    ]
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    text = f"<|user|>?<|end|><|assistant|>{CALL}<|end|>"
    assert rendered(tokenizer, messages, tools=tools) == f"<|system|>{LISTING}<|end|>{text}"
    system: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    assert (
        rendered(tokenizer, system + messages, tools=tools)
        == f"<|system|>Be brief.\n\n{LISTING}<|end|>{text}"
    )


def test_the_template_shows_results_leaves_out_past_thoughts_and_opens_one_that_is_asked_for(
    tokenizer: Any,
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "<think>\nA thought.\n</think>\n\n18 degrees."},
    ]
    text = "<|user|>?<|end|><|tool|>18<|end|><|assistant|>18 degrees.<|end|><|assistant|>"
    assert rendered(tokenizer, messages, add_generation_prompt=True) == text
    thinking = rendered(tokenizer, messages, add_generation_prompt=True, enable_thinking=True)
    assert thinking == text + "<think>\n"


def test_every_call_is_of_a_tool_that_the_chat_lists_with_its_required_parameters(
    chats: list[list[Turn]],
) -> None:
    num_calls = 0
    for chat in chats:
        listed = signatures_in(chat[0][1]) if chat[0][0] == "system" else {}
        for role, content, _ in chat:
            for call in calls_in(content) if role == "assistant" else []:
                num_calls += 1
                names = NAMES.findall(listed[call["name"]])
                required = {name for name, mark in names if not mark}
                assert required <= set(call["arguments"]) <= {name for name, _ in names}
    assert num_calls > NUM_CHATS / 5


def test_what_is_given_begins_an_answer_in_text_and_in_tokens(
    tokenizer: Any, chats: list[list[Turn]]
) -> None:
    given = [(content, given) for chat in chats for role, content, given in chat if given]
    assert len(given) > NUM_CHATS / 10
    for content, beginning in given:
        assert content.startswith(beginning)
        ids = tokenizer.encode(beginning)
        assert tokenizer.encode(content)[: len(ids)] == ids


def test_roles_take_turns(chats: list[list[Turn]]) -> None:
    followers = {
        "system": {"user"},
        "user": {"assistant"},
        "assistant": {"user", "tool"},
        "tool": {"tool", "assistant"},
    }
    for chat in chats:
        assert chat[0][0] in ("system", "user")
        for (role, _, _), (following, _, _) in pairwise(chat):
            assert following in followers[role]


def test_rows_of_a_training_without_compiled_shapes_have_little_padding() -> None:
    program = """
import json
from itertools import islice
from pathlib import Path
from tokenizers import Tokenizer
from train import LENGTHS, Schedule, micro_batches
batches = islice(micro_batches(Tokenizer.from_file(PATH), Schedule(steps=1), 3, LENGTHS), 40)
print(json.dumps([[int((weights > 0).sum()), tokens.numel()] for tokens, weights in batches]))
"""
    sizes = run(program.replace("PATH", repr(str(PATH / "tokenizer.json"))))
    assert all(size <= 2048 for _, size in sizes)
    assert sum(learned for learned, _ in sizes) > 0.9 * sum(size for _, size in sizes)


def test_a_training_goes_on_from_the_model_that_ships_with_its_tokens() -> None:
    program = """
import json
from tokenizers import Tokenizer
from tokens import extend_tokenizer
from model import NanoConfig
tokenizer = Tokenizer.from_file(PATH)
print(json.dumps([extend_tokenizer(tokenizer, [], NanoConfig().vocab_size).to_str(), tokenizer.to_str()]))
"""
    extended, shipped = run(program.replace("PATH", repr(str(PATH / "tokenizer.json"))))
    assert extended == shipped


def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_has_singular_values_of_about_1() -> None:
    program = """
import json, torch
from muon import orthogonalised
torch.manual_seed(1)
found = []
for rows, columns in ((64, 24), (24, 64), (32, 32)):
    left = torch.linalg.qr(torch.randn(rows, 24))[0]
    right = torch.linalg.qr(torch.randn(columns, 24))[0]
    matrix = left @ torch.diag(torch.linspace(0.3, 3.0, 24)) @ right.T
    inner = left.T @ orthogonalised(matrix) @ right  # diagonal if the singular vectors are the same
    outside = inner - torch.diag(inner.diagonal())
    found.append([inner.diagonal().min().item(), inner.diagonal().max().item(), outside.abs().max().item()])
print(json.dumps(found))
"""
    for least, most, outside in run(program):
        assert 0.6 < least <= most < 1.3
        assert outside < 1e-3
