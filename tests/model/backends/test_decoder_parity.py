"""The native decoder computes what transformers computes: the same weights, the same logits, the same tokens."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from torch import Tensor

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import FAMILIES, NATIVE_FAMILIES, VOCAB_SIZE, is_cached_rightly, make_model
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
PROMPT_LEN, NUM_DECODED, NUM_GREEDY = 30, 20, 64


@attrs.frozen(slots=False)
class Pair:
    """The same weights twice: our decoder with a cache of its own, and transformers with attention written out."""

    folder: Path
    ours: PagedDriver
    theirs: Any

    @functools.cached_property
    def greedy(self) -> list[int]:
        """The greedy tokens of transformers after a prompt of PROMPT_LEN tokens."""
        found = reference_greedy(self.theirs, tokens(PROMPT_LEN), NUM_GREEDY)
        assert len(set(found)) > NUM_GREEDY // 8, "the model repeats itself, and would hide a wrong position"
        return found


# Of random weights with which a family's greedy tokens do not soon repeat themselves, and rounding is not magnified,
# where those of seed 0 do.
SEEDS = {
    "gpt-neox": 1,
    "stablelm-parallel": 1,
    "hunyuan-biased": 1,
    "phi-normed": 11,
    "minimax": 2,
    "minimax-window": 3,
    "kimi-linear": 1,
}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            folder = make_model(family, tmp_path_factory.mktemp(family), seed=SEEDS.get(family, 0))
            made[family] = Pair(folder, PagedDriver(load_model(str(folder)).model), reference(folder))
        return made[family]

    return pair


def reference(folder: Path) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")


def tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=is_cached_rightly(model.config),
    )
    output: list[int] = ids[0, len(prompt) :].tolist()
    return output


# Tokens, and the chunk in which they are fed: a prompt and its decodes; a prompt in chunks, some decodes, and a chunk
# behind them.
PARTS: list[list[tuple[int, int | None]]] = [
    [(PROMPT_LEN, None), (NUM_DECODED, 1)],
    [(PROMPT_LEN, 7), (4, 1), (NUM_DECODED - 4, None)],
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_over_a_paged_cache_are_those_of_transformers(
    family: str, pair_of: Callable[[str], Pair]
) -> None:
    pair, ids = pair_of(family), tokens(PROMPT_LEN + NUM_DECODED)
    expected = reference_logits(pair.theirs, ids)
    for parts in PARTS:
        sequence = pair.ours.sequence(len(ids))
        found: list[Tensor] = []
        for count, chunk in parts:
            end = sequence.length + count
            found.append(pair.ours.feed(sequence, ids[sequence.length : end], chunk=chunk))
        pair.ours.free(sequence)
        torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow  # logits, which are compared above, say as much in half the time
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(family)
    assert pair.ours.greedy(tokens(PROMPT_LEN), NUM_GREEDY, chunk=7) == pair.greedy


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_greedy_tokens_are_those_of_generate_on_every_kind_of_cpu(
    family: str, variant: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(family)
    monkeypatch.setattr(plan, "library", lambda: compiled(variant))
    model = load_model(str(pair.folder)).model
    assert isinstance(model, CpuDecoder)
    assert PagedDriver(model).greedy(tokens(PROMPT_LEN), NUM_GREEDY, chunk=7) == pair.greedy


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_sequences_in_one_step_do_not_see_each_other(family: str, pair_of: Callable[[str], Pair]) -> None:
    driver = pair_of(family).ours
    prompts = [tokens(count, seed) for seed, count in enumerate((1, 17, 26))]
    alone = [driver.once(prompt) for prompt in prompts]
    sequences = [driver.sequence(len(prompt)) for prompt in prompts]
    driver.feed(sequences[2], prompts[2][:20])  # so that one is in its middle while the others begin
    together = driver.step([*zip(sequences[:2], prompts[:2], strict=True), (sequences[2], prompts[2][20:])])
    driver.free(*sequences)
    for logits, expected in zip(together, [*alone[:2], alone[2][20:]], strict=True):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_half_precision_stays_as_near_to_float32_as_transformers_does(
    family: str, dtype: torch.dtype, pair_of: Callable[[str], Pair]
) -> None:
    pair, ids = pair_of(family), tokens(PROMPT_LEN)
    exact = reference_logits(pair.theirs, ids)
    model = load_model(str(pair.folder), LoadOptions(dtype=str(dtype).removeprefix("torch."))).model
    assert model.spec.dtype == dtype
    ours = PagedDriver(model).once(ids).float()
    theirs = reference_logits(copy.deepcopy(pair.theirs).to(dtype), ids).float()
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


def test_a_step_may_want_the_logits_of_some_tokens_or_of_none(pair_of: Callable[[str], Pair]) -> None:
    driver, ids = pair_of("llama").ours, tokens(9)
    every = driver.once(ids)
    for wanted in ([8], [2, 5, 8], []):
        sequence = driver.sequence(len(ids))
        [logits] = driver.step([(sequence, ids)], logits_indices=wanted)
        driver.free(sequence)
        assert logits.shape == (len(wanted), VOCAB_SIZE)
        torch.testing.assert_close(logits, every[wanted], atol=TOLERANCE, rtol=0)


def test_longrope_takes_its_long_factors_where_long_sequences_are_wanted(
    pair_of: Callable[[str], Pair],
) -> None:
    pair, ids = pair_of("phi3-longrope"), tokens(140)
    driver = PagedDriver(load_model(str(pair.folder), LoadOptions(max_model_len=200)).model)
    sequence = driver.sequence(len(ids))
    logits = driver.feed(sequence, ids, chunk=60)
    torch.testing.assert_close(logits, reference_logits(pair.theirs, ids), atol=TOLERANCE, rtol=0)
