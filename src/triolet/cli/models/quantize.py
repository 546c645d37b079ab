"""`triolet quantize`: write a model with rounded weights, and report what the rounding loses.

The report compares the logits of the written model with the original's, in float32, for the same tokens: those of a
text file, or else the original's own answers to some questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from triolet import nano
from triolet.cli.models.hub_cache import size_text
from triolet.config.engine import BUILT_IN_MODEL
from triolet.model.folder.hub import resolve_folder
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions
from triolet.model.quality import Losses, compare_logits, greedy_answer, logits_of
from triolet.model.quantize import GGUF_PREFIX, write_quantized
from triolet.model.tokenizer.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_QUESTIONS = (
    "Who are you?", "Tell me a story.", "Count to ten.", "What is 12 plus 7?", "What day comes after Monday?",
    "Explain how a plant grows.",
)  # fmt: skip
_ANSWER_TOKENS = 96
_WINDOW, _MAX_WINDOWS = 512, 4
"""Tokens of a text file that are seen together, and how many times: the logits of all are in memory."""


@attrs.frozen(kw_only=True)
class _Sample:
    """Tokens, and how many of the first ones are a prompt that is not scored."""

    ids: list[int]
    num_given: int


def quantize_model(
    model: str, out: Path, form: str, *, text: Path | None, revision: str | None, reports: bool, as_json: bool
) -> None:
    """Write `model` to `out`, and print what became of it.

    Args:
        model: id, folder or triolet-nano.
        out: file or folder to write; must not exist, and the name of a GGUF file must end in .gguf.
        form: format.
        text: text to compare on; None for the model's own answers.
        revision: of a hub id.
        reports: compare both models.
        as_json: print an object instead of lines.
    Raises:
        ModelError: the model cannot be read, or the format cannot express it.
    """
    if out.exists():
        raise click.UsageError(f"OUT must not exist; {out} does")
    if form.startswith(GGUF_PREFIX) and out.suffix.lower() != ".gguf":
        # A GGUF file is told by its name wherever it is opened.
        raise click.UsageError(f"OUT must end in .gguf for the format {form}; got {out}")
    folder = nano.PATH if model == BUILT_IN_MODEL else resolve_folder(model, revision=revision)
    if folder.is_file():
        raise click.UsageError(f"IN must be a model folder or a hub id; {model} is a file")
    kinds = write_quantized(folder, out, form, name=Path(model).name)
    facts: dict[str, Any] = {
        "model": model,
        "out": str(out),
        "format": form,
        "tensors": kinds,
        "bytes_before": _weights_bytes(folder),
        "bytes_after": _weights_bytes(out),
    }
    if reports:
        facts |= _report(folder, out, text)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _print(facts)


def _weights_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _report(before: Path, after: Path, text: Path | None) -> dict[str, Any]:
    import torch

    # One model at a time is in memory: the original's logits are kept.
    loaded = load_model(str(before), LoadOptions(dtype="float32"))
    model, ends = loaded.model, loaded.generation_defaults.eos_token_ids
    limit = min(model.spec.max_position, _WINDOW)
    tokenizer = load_tokenizer(before)
    if text is not None:
        samples = _text_samples(text, tokenizer, limit)
    else:
        prompts = _prompts(tokenizer, model.spec.vocab_size)
        samples = [
            _Sample(ids=[*prompt, *greedy_answer(model, prompt, _ANSWER_TOKENS, ends)], num_given=len(prompt))
            for prompt in prompts
        ]
    truth = [_scored(logits_of(model, sample.ids), sample) for sample in samples]
    del model, loaded
    written = load_model(str(after), LoadOptions(dtype="float32")).model
    found = torch.cat([_scored(logits_of(written, sample.ids), sample) for sample in samples])
    told = torch.cat([torch.tensor(sample.ids[sample.num_given :]) for sample in samples])
    whole = torch.cat(truth)
    losses: Losses = compare_logits(whole, found, told)
    return {
        "positions": len(told),
        "perplexity_before": compare_logits(whole, whole, told).perplexity,
        "perplexity_after": losses.perplexity,
        "divergence_nats": losses.divergence,
        "same_likeliest_token": losses.agreement,
    }


def _scored(logits: Tensor, sample: _Sample) -> Tensor:
    """Return the logits that foretell the tokens after the prompt."""
    return logits[sample.num_given - 1 : -1]


def _text_samples(path: Path, tokenizer: TextTokenizer | None, limit: int) -> list[_Sample]:
    if tokenizer is None:
        raise click.UsageError("--text needs a model with a tokenizer")
    ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=True)
    windows = [ids[begin : begin + limit] for begin in range(0, len(ids), limit)][:_MAX_WINDOWS]
    samples = [_Sample(ids=window, num_given=1) for window in windows if len(window) > 1]
    if not samples:
        raise click.UsageError(f"--text must be a file of at least two tokens; {path} has {len(ids)}")
    return samples


def _prompts(tokenizer: TextTokenizer | None, vocab_size: int) -> list[list[int]]:
    if tokenizer is None:
        return [[(7 * index + 11 * place) % vocab_size for place in range(16)] for index in range(6)]
    texts = list(_QUESTIONS)
    if tokenizer.template_source:
        texts = [tokenizer.render([{"role": "user", "content": question}]) for question in texts]
    return [tokenizer.encode(text, add_special_tokens=not tokenizer.template_source) for text in texts]


def _print(facts: Mapping[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["tensors"].items())
    sizes = f"{size_text(facts['bytes_before'])} before, {size_text(facts['bytes_after'])} after"
    click.echo(f"{facts['out']}: {facts['format']} ({kinds}); {sizes}")
    if "positions" in facts:
        click.echo(
            f"perplexity {facts['perplexity_before']:.3f} before, {facts['perplexity_after']:.3f} after; "
            f"divergence {facts['divergence_nats']:.2e} nats; the same likeliest token at "
            f"{facts['same_likeliest_token']:.1%} of {facts['positions']} positions"
        )
