"""From config.json to `DecoderConfig`, one function per family.

Defaults of absent keys are those of transformers' config classes; a feature that the decoder would not
honour is refused by name. Configs come as transformers 5 writes them (`rope_parameters`, `dtype`) or as
version 4 did (`rope_theta` and `rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from triolet.errors import UnsupportedModel
from triolet.model.architectures import dense_families as dense
from triolet.model.architectures import gemma_families as gemma
from triolet.model.architectures import latent_families as latent
from triolet.model.architectures import layer_norm_families as layer_norm
from triolet.model.architectures import moe_families as moe
from triolet.model.architectures.decoder_config import DecoderConfig, first_architecture
from triolet.model.architectures.recurrent import hybrid_families as hybrid
from triolet.model.architectures.recurrent import linear_attention_families as linear_attention
from triolet.model.architectures.recurrent import liquid_families as liquid
from triolet.model.architectures.recurrent import state_space_families as state_space
from triolet.model.architectures.recurrent import zamba_families as zamba
from triolet.model.folder.json_fields import Fields


def is_native(architecture: str) -> bool:
    """Return whether the native decoder knows this architecture."""
    return architecture in _FAMILIES


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Return whether the contents of a config.json ask for attention to later tokens, too, of any text."""
    # "vision" of a Gemma 4 is about the tokens of an image.
    return config.get("use_bidirectional_attention") in (True, "all")


def native_family(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Return the name under which the native decoder knows a class; None if it does not, or not with this config.

    A class without an output head, or with one of a sequence classification or a reward model, has the decoder of the
    class that generates text.

    Args:
        architecture: the class.
        config: contents of the config.json.
    """
    # "ForProcessRewardModel" ends with "Model", too: the longer endings come first
    for ending in ("", "ForSequenceClassification", "ForProcessRewardModel", "ForRewardModel", "Model"):
        if architecture.endswith(ending):
            # "Gemma3TextModel" is the language part of a model that also sees
            stem = architecture.removesuffix(ending).removesuffix("Text")
            for name in (architecture,) if not ending else (f"{stem}ForCausalLM", f"{stem}LMHeadModel"):
                if is_native(name):
                    return name if _FAMILIES[name].takes(config) else None
    return None


def parse_decoder_config(
    config: dict[str, Any], folder: Path, *, max_model_len: int | None = None
) -> DecoderConfig:
    """Read what the native decoder needs from a config.json.

    Args:
        config: the file's contents.
        folder: where it lies, for error messages.
        max_model_len: longest sequence that is wanted, tokens; decides which factors a LongRoPE model uses.

    Raises:
        ModelFileError: a field is of the wrong type or out of its range.
        UnsupportedModel: the architecture, or a feature that the config asks for, is not known.
    """
    return parse_decoder_fields(Fields(folder / "config.json", config), max_model_len=max_model_len)


def parse_decoder_fields(fields: Fields, *, max_model_len: int | None = None) -> DecoderConfig:
    """Read what the native decoder needs from the fields of a config.json, whatever file they come from.

    Raises:
        ModelFileError: a field is of the wrong type or out of its range.
        UnsupportedModel: the architecture, or a feature that the config asks for, is not known.
    """
    architecture = first_architecture(fields)
    if not is_native(architecture):
        raise UnsupportedModel(
            f"{fields.path}: the native decoder does not know the architecture {architecture!r}"
        )
    family = _FAMILIES[architecture]
    if fields.section("per_layer_config") and not family.takes_layer_configs:
        raise UnsupportedModel(f"{fields.path}: per_layer_config must be absent for {architecture}")
    parsed = family.parse(fields, max_model_len)
    return attrs.evolve(parsed, architecture=architecture, runs_on_cpu_decoder=family.runs_on_cpu_decoder)


@attrs.frozen
class Family:
    """One architecture that the native decoder knows."""

    # Reads its config.json; the second argument is `max_model_len`.
    parse: Callable[[Fields, int | None], DecoderConfig]
    # The C++ decoder has been tested with this family. Without it a CPU runs the torch decoder: a family may
    # compute something that no field of `DecoderConfig` names yet.
    runs_on_cpu_decoder: bool = False
    takes_layer_configs: bool = False  # it reads `per_layer_config`
    # Whether the decoder computes what a config.json of the family asks for. What it does not take is left to the
    # transformers backend.
    takes: Callable[[Mapping[str, Any]], bool] = lambda config: True


_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(dense.llama, runs_on_cpu_decoder=True),
    "HeliumForCausalLM": Family(dense.helium, runs_on_cpu_decoder=True),
    "Ernie4_5ForCausalLM": Family(dense.ernie4_5, runs_on_cpu_decoder=True),
    "SeedOssForCausalLM": Family(dense.seed_oss, runs_on_cpu_decoder=True),
    "ArceeForCausalLM": Family(dense.arcee, runs_on_cpu_decoder=True),
    "Jais2ForCausalLM": Family(layer_norm.jais2, runs_on_cpu_decoder=True),
    "ApertusForCausalLM": Family(dense.apertus, runs_on_cpu_decoder=True),
    "HunYuanDenseV1ForCausalLM": Family(dense.hunyuan, runs_on_cpu_decoder=True),
    "CwmForCausalLM": Family(dense.cwm, runs_on_cpu_decoder=True),
    "MistralForCausalLM": Family(dense.mistral, runs_on_cpu_decoder=True),
    "Qwen2ForCausalLM": Family(dense.qwen2, runs_on_cpu_decoder=True),
    "Qwen3ForCausalLM": Family(dense.qwen3, runs_on_cpu_decoder=True),
    "Phi3ForCausalLM": Family(dense.phi3, runs_on_cpu_decoder=True),
    "GemmaForCausalLM": Family(gemma.gemma, runs_on_cpu_decoder=True),
    "Gemma2ForCausalLM": Family(gemma.gemma2, runs_on_cpu_decoder=True),
    "Gemma3ForCausalLM": Family(gemma.gemma3, runs_on_cpu_decoder=True),
    "Gemma4ForCausalLM": Family(gemma.gemma4, runs_on_cpu_decoder=True, takes_layer_configs=True),
    "GPT2LMHeadModel": Family(layer_norm.gpt2, runs_on_cpu_decoder=True),
    "OPTForCausalLM": Family(layer_norm.opt, runs_on_cpu_decoder=True, takes=layer_norm.is_plain_opt),
    "GPTNeoXForCausalLM": Family(layer_norm.gpt_neox, runs_on_cpu_decoder=True),
    "PhiForCausalLM": Family(layer_norm.phi, runs_on_cpu_decoder=True),
    "StableLmForCausalLM": Family(layer_norm.stablelm, runs_on_cpu_decoder=True),
    "GraniteForCausalLM": Family(dense.granite, runs_on_cpu_decoder=True),
    "SmolLM3ForCausalLM": Family(dense.smollm3, runs_on_cpu_decoder=True),
    "Olmo2ForCausalLM": Family(dense.olmo2, runs_on_cpu_decoder=True),
    "Olmo3ForCausalLM": Family(dense.olmo3, runs_on_cpu_decoder=True),
    "Exaone4ForCausalLM": Family(dense.exaone4, runs_on_cpu_decoder=True),
    "CohereForCausalLM": Family(layer_norm.cohere, runs_on_cpu_decoder=True),
    "Cohere2ForCausalLM": Family(layer_norm.cohere2, runs_on_cpu_decoder=True),
    "GlmForCausalLM": Family(dense.glm, runs_on_cpu_decoder=True),
    "Glm4ForCausalLM": Family(dense.glm4, runs_on_cpu_decoder=True),
    "Starcoder2ForCausalLM": Family(layer_norm.starcoder2, runs_on_cpu_decoder=True),
    "MinistralForCausalLM": Family(dense.ministral, runs_on_cpu_decoder=True),
    "Ministral3ForCausalLM": Family(dense.ministral3, runs_on_cpu_decoder=True),
    "MixtralForCausalLM": Family(moe.mixtral, runs_on_cpu_decoder=True),
    "Qwen2MoeForCausalLM": Family(moe.qwen2_moe, runs_on_cpu_decoder=True),
    "Qwen3MoeForCausalLM": Family(moe.qwen3_moe, runs_on_cpu_decoder=True),
    "GraniteMoeForCausalLM": Family(moe.granite_moe, runs_on_cpu_decoder=True),
    "GraniteMoeSharedForCausalLM": Family(moe.granite_moe_shared, runs_on_cpu_decoder=True),
    "OlmoeForCausalLM": Family(moe.olmoe, runs_on_cpu_decoder=True),
    "GptOssForCausalLM": Family(moe.gpt_oss, runs_on_cpu_decoder=True),
    "Glm4MoeForCausalLM": Family(moe.glm4_moe, runs_on_cpu_decoder=True),
    "SolarOpenForCausalLM": Family(moe.solar_open, runs_on_cpu_decoder=True),
    "ExaoneMoeForCausalLM": Family(moe.exaone_moe, runs_on_cpu_decoder=True),
    "MiniMaxM2ForCausalLM": Family(moe.minimax_m2, runs_on_cpu_decoder=True),
    "Ernie4_5_MoeForCausalLM": Family(moe.ernie4_5_moe, runs_on_cpu_decoder=True, takes=moe.has_no_biases),
    "HunYuanMoEV1ForCausalLM": Family(moe.hunyuan_moe, runs_on_cpu_decoder=True),
    "GraniteMoeHybridForCausalLM": Family(hybrid.granite_moe_hybrid),
    "BambaForCausalLM": Family(hybrid.bamba),
    "FalconH1ForCausalLM": Family(hybrid.falcon_h1),
    "NemotronHForCausalLM": Family(hybrid.nemotron_h),
    "JambaForCausalLM": Family(state_space.jamba),
    "MambaForCausalLM": Family(state_space.mamba),
    "FalconMambaForCausalLM": Family(state_space.falcon_mamba),
    "Mamba2ForCausalLM": Family(state_space.mamba2),
    "ZambaForCausalLM": Family(zamba.zamba),
    "Zamba2ForCausalLM": Family(zamba.zamba2),
    "OlmoHybridForCausalLM": Family(linear_attention.olmo_hybrid),
    "MiniMaxForCausalLM": Family(linear_attention.minimax),
    "KimiLinearForCausalLM": Family(linear_attention.kimi_linear),
    "Qwen3NextForCausalLM": Family(hybrid.qwen3_next),
    "Qwen3_5ForCausalLM": Family(hybrid.qwen3_5),
    "Qwen3_5MoeForCausalLM": Family(hybrid.qwen3_5_moe),
    "Lfm2ForCausalLM": Family(liquid.lfm2),
    "Lfm2MoeForCausalLM": Family(liquid.lfm2_moe),
    "Lfm3ForCausalLM": Family(liquid.lfm3),
    "DeepseekV2ForCausalLM": Family(latent.deepseek_v2),
    "DeepseekV3ForCausalLM": Family(latent.deepseek_v3),
    "Glm4MoeLiteForCausalLM": Family(latent.glm4_moe_lite),
    "YoutuForCausalLM": Family(latent.youtu),
}
