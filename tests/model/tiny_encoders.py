"""Tiny random encoders as folders with a tokenizer of words, also as sentence-transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.model.tiny import change_json, randomise

WORDS = ("<s>", "<pad>", "</s>", "<unk>", *(f"w{index}" for index in range(60)))
_SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_SIZES, "max_position_embeddings": 64}),
    "xlm-roberta": ("XLMRoberta", {**_SIZES, "max_position_embeddings": 66, "type_vocab_size": 1}),
    # a window of two tokens on either side, in one layer of two
    "modernbert": (
        "ModernBert",
        {
            **_SIZES,
            "max_position_embeddings": 64,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 0,
            "cls_token_id": 0,
            "sep_token_id": 2,
            "eos_token_id": 2,
        },
    ),
    "gemma": (
        "Gemma3Text",
        {
            **_SIZES,
            "max_position_embeddings": 64,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "use_bidirectional_attention": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def make_encoder(family: str, path: Path, head: str = "Model", seed: int = 0, **overrides: Any) -> Any:
    """Write a folder, and return the model.

    Args:
        family: a key of `FAMILIES`.
        path: the folder.
        head: `Model`, `ForSequenceClassification` or `ForTokenClassification`.
        overrides: further fields of the family's config.
    """
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**settings, **overrides})
    model = getattr(transformers, name + head)(config).eval()
    randomise(model, seed)
    model.save_pretrained(path)
    write_word_tokenizer(path)
    return model


def write_word_tokenizer(path: Path) -> None:
    """A tokenizer of whole words, which joins two texts as BERT's does."""
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.save(str(path / "tokenizer.json"))


def add_modules(path: Path, mode: str, dense: tuple[tuple[int, int], ...] = (), **settings: Any) -> None:
    """Add the files of sentence-transformers: pooling, dense layers without bias, normalisation."""
    names = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    places = ["", *(f"{index}_{name}" for index, name in enumerate(names[1:], start=1))]
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{name}"}
        for index, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (path / "sentence_bert_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}), encoding="utf-8")
    for index, (num_in, num_out) in enumerate(dense, start=2):
        folder = path / f"{index}_Dense"
        folder.mkdir()
        fields = {"in_features": num_in, "out_features": num_out, "bias": False}
        fields["activation_function"] = "torch.nn.modules.linear.Identity"  # type: ignore[assignment]
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
        save_file({"linear.weight": weight}, folder / "model.safetensors")


__all__ = ["FAMILIES", "WORDS", "add_modules", "change_json", "make_encoder", "write_word_tokenizer"]
