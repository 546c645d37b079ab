"""Language part of a checkpoint that also sees: its config, and the names of its tensors.

A family with images wraps a decoder that exists without them. Of a prompt without images that decoder computes what
the whole model does, so the folder is read as the decoder's own, and the tensors of the vision part are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LANGUAGE_PARTS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Of an architecture: the decoder's, by the `model_type` of its `text_config`."""

_FLAT = {"qwen2_5_vl": "qwen2_5_vl_text"}  # configs of version 4 without `text_config`
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",  # of files of transformers 4
    "language_model.lm_head.": "lm_head.",
}
_VISION = (
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "multi_modal_projector.",
)


def language_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of the decoder that a model with images wraps.

    Args:
        config: contents of a config.json.
    Returns:
        None if the model is no such one, or its decoder is none that is known.
    """
    names = config.get("architectures")
    parts = LANGUAGE_PARTS.get(names[0]) if isinstance(names, list) and names else None
    if parts is None:
        return None
    text = config.get("text_config")
    if text is None and config.get("model_type") in _FLAT:
        text = {**config, "model_type": _FLAT[config["model_type"]]}
    if not isinstance(text, dict) or text.get("model_type") not in parts:
        return None
    whole = {name: config[name] for name in _OF_THE_WHOLE if name in config}
    return {**text, **whole, "architectures": [parts[text["model_type"]]]}


def language_name(name: str) -> str | None:
    """Return the name that a tensor has in the decoder's own checkpoint; None for one of the vision part."""
    if name.startswith(_VISION):
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
