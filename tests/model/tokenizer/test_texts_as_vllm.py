"""Texts that vLLM 0.32.0's detokenizer made of tokens of triolet-nano: recorded there, held here.

What differs on purpose: where a prompt ends inside a character, vLLM begins the answer with text of the prompt; and
where an answer ends inside one, vLLM leaves out whole characters of the last token, too.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.decoders import DecodeStream

from triolet.core.output.detokenizer import OutputText, no_piece
from triolet.core.output.output_processor import decoder, pieces
from triolet.model.tokenizer.tokenizer import load_tokenizer
from triolet.nano import PATH

# prompt, answer, what differs from the defaults, text, number of tokens that are the answer's, stop string
RECORDED: list[tuple[list[int], list[int], dict[str, Any], str, int, str | None]] = [
    ([1733, 1873], [70, 289, 225], {"ends_by_token": True}, "bar", 3, None),
    ([69], [260, 173, 249], {}, "", 3, None),
    ([3, 128], [174, 248, 255], {"stop": ["한", "한"], "ends_by_token": True}, "", 3, None),
    ([21, 22], [225, 167, 250], {"step": 4}, " ", 3, None),
    ([313], [174, 4, 3], {"stop": ["\ufffd"], "include": True, "min_tokens": 1}, "", 3, None),
    ([108, 1649], [124, 1075, 1690], {"stop": [". "], "min_tokens": 1}, "\ufffdung held", 3, None),
    ([1989, 366], [1197, 725, 1927], {"stop": ["yb", "y"], "include": True}, "aurdeaEvery", 3, "y"),
    ([313], [800, 75, 935], {"stop": ["stop"], "include": True, "skip": False}, "dog stop", 3, "stop"),
    ([80], [313, 698, 1043], {"stop": ["e", "ne", "indOne"], "include": True}, "stindOne", 3, "e"),
    ([375, 529], [1134, 502, 1261], {"stop": ["nember"], "step": 4}, " ni", 2, "nember"),
    ([145, 125], [167, 250, 103], {"stop": ["日"], "include": True}, "日", 3, "日"),
    (
        [78],
        [1733, 1999, 244],
        {"stop": [" \ufffd", "e", "\ufffd"], "step": 4, "ends_by_token": True},
        "",
        1,
        "e",
    ),
    ([1874, 423], [72, 304, 69], {"stop": ["da", ". "], "min_tokens": 1, "skip": False}, "", 2, "da"),
    ([69], [74, 1982, 326], {"stop": ["t", " "], "min_tokens": 1, "step": 4}, "fé", 3, " "),
    ([2], [4, 1969, 4], {"stop": [". ", "stop"], "include": True, "step": 2}, "orld", 3, None),
    ([1874], [313, 514, 225], {"stop": ["p"], "step": 2}, "sto", 2, "p"),
    ([1760, 1538], [1064, 60, 416], {"stop": ["X come"], "min_tokens": 3, "step": 2}, " lakeX come", 3, None),
    ([1733, 4], [145, 125, 145], {"stop": ["м", "stop"], "min_tokens": 3, "spaces": False}, "м", 3, None),
]


@pytest.mark.parametrize("knows_pieces", [True, False])
@pytest.mark.parametrize(("prompt", "answer", "asked", "text", "num_tokens", "stop"), RECORDED)
def test_texts_are_those_of_vllm(
    prompt: list[int],
    answer: list[int],
    asked: dict[str, Any],
    text: str,
    num_tokens: int,
    stop: str | None,
    knows_pieces: bool,
) -> None:
    tokenizer, skip, is_spaced = load_tokenizer(PATH), asked.get("skip", True), asked.get("spaces", True)
    output = OutputText(
        decoder(tokenizer, skip_special_tokens=skip, is_spaced=is_spaced),
        prompt,
        piece=pieces(tokenizer, skip_special_tokens=skip, is_spaced=is_spaced) if knows_pieces else no_piece,
        stop=asked.get("stop", ()),
        include_stop_str_in_output=asked.get("include", False),
        min_tokens=asked.get("min_tokens", 0),
    )
    shown, step = [], asked.get("step", 1)
    for first in range(0, len(answer), step):
        is_last = first + step >= len(answer)
        delta = output.add(
            answer[first : first + step], hide_last=is_last and asked.get("ends_by_token", False)
        )
        shown.append(delta.text)
        if delta.stop_reason is not None:
            break
    shown.append(output.flush())
    assert ("".join(shown), output.num_tokens, output.stop_reason) == (text, num_tokens, stop)


def test_whole_characters_of_a_token_that_ends_inside_another_are_shown_where_vllm_drops_them() -> None:
    tokenizer = load_tokenizer(PATH)
    assert tokenizer is not None
    prompt, answer = [313], [1851, 1999]  # the last one is a space and two bytes of an emoji's four
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)  # vLLM's detokenizer is made of this
    theirs = [stream.step(tokenizer.backend, token_id) or "" for token_id in answer]
    output = OutputText(decoder(tokenizer, skip_special_tokens=True, is_spaced=True), prompt)
    ours = [*(output.add([token_id]).text for token_id in answer), output.flush()]
    assert ("".join(theirs), "".join(ours)) == ("could", "could ")
