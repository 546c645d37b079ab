"""Writing a model folder with rounded weights, in formats that other programs read."""

from __future__ import annotations

from pathlib import Path

from triolet.errors import UnsupportedModel
from triolet.model.architectures.decoder_config import architecture_of, checkpoint_dtype, read_config
from triolet.model.architectures.families import is_native, parse_decoder_config
from triolet.model.architectures.weight_map import WeightSource, check_fit, plan_tensors
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.generation_config import read_generation_defaults
from triolet.model.folder.json_fields import Fields
from triolet.model.gguf.config import written_architecture
from triolet.model.gguf.write_tokenizer import written_tokenizer
from triolet.model.gguf.writer import KINDS, GgufModel, write_gguf
from triolet.model.quantized.checkpoint import open_quantized
from triolet.model.quantized.stacked_experts import open_stacked_experts
from triolet.model.quantized.writer import SCHEMES, write_integers
from triolet.model.tokenizer.tokenizer import load_tokenizer

GGUF_PREFIX = "gguf:"
WRITTEN_FORMATS = (*(f"{GGUF_PREFIX}{kind}" for kind in KINDS), *SCHEMES)
"""What `write_quantized` can write."""


def write_quantized(
    folder: Path,
    out: Path,
    form: str,
    *,
    name: str,
) -> dict[str, int]:
    """Write a model with rounded weights.

    Args:
        folder: of a model of the native decoder; its weights may be quantised already.
        out: the GGUF file, or the folder, which must not exist.
        form: one of `WRITTEN_FORMATS`.
        name: of the model, for metadata.

    Returns:
        Number of tensors of each type.

    Raises:
        ModelError: the folder cannot be read, or the format cannot express the model.
    """
    config = read_config(folder)
    architecture = architecture_of(config, folder)
    if not is_native(architecture):
        raise UnsupportedModel(f"{folder}: {architecture} has no native decoder, so it cannot be quantised")
    parsed = parse_decoder_config(config, folder)
    if parsed.names.stacked_experts and form in SCHEMES:
        raise UnsupportedModel(f"{folder}: {architecture} stacks its experts, which {form} cannot express")
    stored = Checkpoint.open(folder)
    if stored.unstacked(parsed.names.expert_stacks).tensors != stored.tensors:
        raise UnsupportedModel(
            f"{folder}: {architecture} stacks its experts, which none of the formats that are written can express"
        )
    source: WeightSource = stored
    if parsed.names.stacked_experts:
        source = open_stacked_experts(stored, config, folder)
    elif config.get("quantization_config"):
        source = open_quantized(stored, config, folder)
    check_fit(parsed, plan_tensors(parsed, source.tensors), source)
    if form in SCHEMES:
        dtype = checkpoint_dtype(config, folder)
        return write_integers(folder, out, SCHEMES[form], parsed, source, dtype)
    defaults, tokenizer = read_generation_defaults(folder), load_tokenizer(folder)
    written = written_architecture(architecture)
    model = GgufModel(
        name=name,
        config=parsed,
        fields=Fields(folder / "config.json", config),
        source=source,
        tokenizer=None
        if tokenizer is None
        else written_tokenizer(
            tokenizer,
            vocab_size=parsed.vocab_size,
            eos_token_ids=defaults.eos_token_ids,
            architecture="" if written is None else written.name,
        ),
        defaults=defaults,
    )
    return write_gguf(model, out, form.removeprefix(GGUF_PREFIX))
