"""Beam search against a search of everything, and against transformers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio

import triolet
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet import BeamSearchParams, Engine
from triolet.errors import InvalidParams, RequestFailed, TrioletError

PROMPT = [7, 100, 31, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-plain", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def opened(folder: Path, **fields: Any) -> Any:
    return triolet.open_engine(model=str(folder), dtype="float32", num_kv_blocks=512, block_size=4, **fields)


@pytest.mark.slow
async def test_a_beam_as_wide_as_the_vocabulary_finds_the_likeliest_of_all(folder: Path, model: Any) -> None:
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(0)
        pairs = torch.tensor([[*PROMPT, token_id] for token_id in range(VOCAB_SIZE)])
        second = model(pairs).logits[:, -1].log_softmax(1)
    sums = (first[:, None] + second).flatten()
    best = sums.topk(20)
    params = BeamSearchParams(beam_width=VOCAB_SIZE, max_tokens=2, ignore_eos=True)
    async with opened(folder, max_logprobs=-1) as engine:
        found = (await triolet.beam_search(engine, PROMPT, params)).sequences[:20]
        assert engine.statistics().kv_blocks_in_use == 0
    expected = [divmod(int(place), VOCAB_SIZE) for place in best.indices]
    assert [beam.output_token_ids for beam in found] == expected
    assert [beam.cum_logprob for beam in found] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert {beam.finish_reason for beam in found} == {"length"}


async def test_beams_are_those_of_transformers(folder: Path, model: Any) -> None:
    ids = torch.tensor([PROMPT])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = {tuple(sequence) for sequence in whole.tolist()}
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    async with opened(folder) as engine:
        found = (await triolet.beam_search(engine, PROMPT, params)).sequences
    assert {beam.tokens for beam in found} == expected
    assert found[0].tokens == tuple(whole[0].tolist())


async def test_an_end_of_sequence_completes_a_beam(folder: Path, model: Any, tmp_path: Path) -> None:
    """The end is here what is likeliest but for two tokens, first and later."""
    with torch.inference_mode():
        eos = model(torch.tensor([PROMPT])).logits[0, -1].topk(3).indices[2].item()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    async with opened(tmp_path) as engine:
        fields: dict[str, Any] = {"beam_width": 8, "max_tokens": 3, "length_penalty": 0.0}
        found = (await triolet.beam_search(engine, PROMPT, BeamSearchParams(**fields))).sequences
        fields["include_stop_str_in_output"] = True
        kept = (await triolet.beam_search(engine, PROMPT, BeamSearchParams(**fields))).sequences
    ended = [beam for beam in found if beam.finish_reason == "stop"]
    assert ended[0].output_token_ids == ()
    assert all(beam.stop_reason == eos and eos not in beam.output_token_ids for beam in ended)
    assert [beam.output_token_ids[-1] for beam in kept if beam.finish_reason == "stop"] == [eos] * len(ended)
    scores = [beam.cum_logprob for beam in found]
    assert scores == sorted(scores, reverse=True)


async def test_wishes_out_of_range_are_refused_by_name(folder: Path) -> None:
    for fields in (
        {"beam_width": 0},
        {"beam_width": 1025},
        {"beam_width": True},
        {"max_tokens": 0},
        {"max_tokens": 2**63},
        {"length_penalty": float("nan")},
        {"length_penalty": 1e300},
        {"temperature": -1.0},
        {"ignore_eos": 1},
    ):
        with pytest.raises(InvalidParams) as caught:
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | fields))
        assert caught.value.field in fields
    async with opened(folder) as engine:
        with pytest.raises(
            InvalidParams, match=r"beam_width must be at most 10 \(half of max_logprobs\), got 11"
        ):
            await triolet.beam_search(engine, PROMPT, BeamSearchParams(beam_width=11, max_tokens=2))
        with pytest.raises(TrioletError):
            await triolet.beam_search(engine, [], BeamSearchParams(beam_width=2, max_tokens=2))


async def test_a_search_that_is_left_or_too_late_holds_nothing(folder: Path) -> None:
    async def search(engine: Engine, **arguments: Any) -> None:
        await triolet.beam_search(engine, PROMPT, BeamSearchParams(beam_width=5, max_tokens=200), **arguments)

    async with opened(folder) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(search, engine)
            while engine.statistics().steps < 5:  # noqa: ASYNC110 - it tells of no step
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert engine.statistics().steps < 200
        with pytest.raises(RequestFailed, match="deadline"):  # no machine computes 200 steps in this time
            await search(engine, deadline=trio.current_time() + 0.01)
        await engine.complete(PROMPT)  # by then the step in flight has ended
        assert engine.statistics().kv_blocks_in_use == 0
        assert engine.statistics().num_requests_live == 0
