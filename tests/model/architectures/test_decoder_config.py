"""Reading config.json: both versions' spelling, the families' defaults, and wrong values named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.tiny import FAMILIES
from triolet.errors import ModelFileError, ModelNotFound, UnsupportedModel
from triolet.model.architectures.decoder_config import (
    DecoderConfig,
    architecture_of,
    checkpoint_dtype,
    read_config,
)
from triolet.model.architectures.families import is_native, parse_decoder_config
from triolet.model.architectures.recurrent.configs import KimiDeltaConfig

FOLDER = Path("folder")


def parse(architecture: str, *, max_model_len: int | None = None, **fields: Any) -> DecoderConfig:
    config = {"architectures": [architecture], **fields}
    return parse_decoder_config(config, FOLDER, max_model_len=max_model_len)


# ------------------------------------------------------------------------------ what is said, and how


# Fields without which a config class describes no model: DeepSeek V2 has no number of experts per token, GLM 4.5
# heads of 42 dimensions of which 21 turn, LFM2 with experts no kinds of layers, and ERNIE 4.5 and HunYuan have fewer
# experts than the numbers that are tried.
NEEDED: dict[str, dict[str, Any]] = {
    "DeepseekV2Config": {"num_experts_per_tok": 4},
    "Glm4MoeConfig": {"head_dim": 128},
    "Ernie4_5_MoeConfig": {"moe_num_experts": 128},
    "HunYuanMoEV1Config": {"num_experts": 128},
    "KimiLinearConfig": {"num_local_experts": 960},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_config_means_the_defaults_of_the_config_class(family: str) -> None:
    architecture, class_name, _ = FAMILIES[family]
    needed = NEEDED.get(class_name, {})
    written = json.loads(getattr(transformers, class_name)(**needed).to_json_string(use_diff=False))
    theirs = parse_decoder_config({**written, "architectures": [architecture]}, FOLDER)
    assert parse(architecture, **needed) == theirs


@pytest.mark.parametrize(
    "family", [name for name, facts in FAMILIES.items() if getattr(transformers, facts[1]).attribute_map]
)
def test_other_names_of_a_field_are_read_as_the_config_class_reads_them_alone_and_beside_it(
    family: str,
) -> None:
    architecture, class_name, _ = FAMILIES[family]
    config_class = getattr(transformers, class_name)
    for other, name in config_class.attribute_map.items():
        if "layers_block_type" in (other, name):  # lists of kinds have a test of their own
            continue
        one, two = (48.0, 96.0) if name.endswith("eps") else (48, 96)
        if name == "moe_renormalize":
            one, two = False, True
        for fields in ({other: one}, {name: two}, {other: one, name: two}):
            config = {**NEEDED.get(class_name, {}), **fields}
            read = json.loads(config_class.from_dict(dict(config)).to_json_string(use_diff=False))
            theirs = parse_decoder_config({**read, "architectures": [architecture]}, FOLDER)
            assert parse(architecture, **config) == theirs, fields


def test_rope_parameters_of_version_4_mean_what_those_of_version_5_mean() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 512
    new = parse("LlamaForCausalLM", rope_parameters={**scaling, "rope_theta": 500_000.0})
    old = parse("LlamaForCausalLM", rope_scaling=scaling, rope_theta=500_000.0)
    assert new == old
    assert new != parse("LlamaForCausalLM", rope_theta=500_000.0)


def test_older_configs_call_the_rope_type_type() -> None:
    assert parse("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0}) == parse(
        "LlamaForCausalLM", rope_parameters={"rope_type": "linear", "factor": 2.0}
    )


def test_gemma_3_has_one_theta_for_local_layers_and_one_for_global_ones() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = parse(
        "Gemma3ForCausalLM",
        rope_theta=50_000.0,
        rope_local_base_freq=700.0,
        rope_scaling=scaling,
        num_hidden_layers=6,
    )
    new = parse(
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    )
    assert old == new
    ropes = [layer.rope for layer in new.layers]
    assert len(set(ropes[:5])) == 1
    assert ropes[5] != ropes[0]


def test_gemma_4_has_the_same_heads_by_its_own_fields_and_by_those_of_transformers() -> None:
    own = parse(
        "Gemma4ForCausalLM",
        num_hidden_layers=6,
        attention_k_eq_v=True,
        global_head_dim=128,
        num_global_key_value_heads=2,
    )
    by_layer = parse(
        "Gemma4ForCausalLM",
        num_hidden_layers=6,
        attention_k_eq_v=True,
        per_layer_config={"5": {"head_dim": 128, "num_key_value_heads": 2}},
    )
    assert own == by_layer
    assert [own.head_dim_of(layer) for layer in own.layers] == [256] * 5 + [128]
    assert [own.num_kv_heads_of(layer) for layer in own.layers] == [4] * 5 + [2]


def test_the_last_layers_of_a_small_gemma_4_read_the_cache_of_the_last_layer_of_their_kind() -> None:
    config = parse(
        "Gemma4ForCausalLM",
        num_hidden_layers=8,
        num_kv_shared_layers=4,
        layer_types=["full_attention", "sliding_attention"] * 3 + ["sliding_attention", "full_attention"],
    )
    assert [layer.reads_cache_of for layer in config.layers] == [None] * 4 + [2, 3, 3, 2]


def test_proportional_positions_turn_a_share_of_the_head_by_the_frequencies_of_the_whole() -> None:
    parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10_000.0}
    share, whole = parse("LlamaForCausalLM", rope_parameters=parameters), parse("LlamaForCausalLM")
    turned, all_turned = share.layers[0].rope, whole.layers[0].rope
    assert turned is not None and all_turned is not None
    assert turned.frequencies == (*all_turned.frequencies[:16], *(0.0,) * 48)


def test_null_means_as_many_key_value_heads_as_heads_where_absence_means_the_default() -> None:
    sizes = {"num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128}
    assert parse("FalconH1ForCausalLM", **sizes).num_kv_heads == 8
    assert parse("FalconH1ForCausalLM", **sizes, num_key_value_heads=None).num_kv_heads == 32


def test_null_means_no_window_where_absence_means_the_default_one() -> None:
    assert parse("MistralForCausalLM").layers[0].sliding_window == 4096
    assert parse("MistralForCausalLM", sliding_window=None).layers[0].sliding_window is None


def test_qwen_slides_only_where_it_is_told_to() -> None:
    def windows(**fields: Any) -> list[int | None]:
        config = parse(
            "Qwen2ForCausalLM", num_hidden_layers=3, sliding_window=8, max_window_layers=2, **fields
        )
        return [layer.sliding_window for layer in config.layers]

    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows() == [None, None, None]
    assert windows(use_sliding_window=True) == [None, None, 8]
    assert windows(use_sliding_window=True, layer_types=kinds) == [8, None, None]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_checkpoints_dtype_is_read_in_both_spellings(key: str) -> None:
    assert checkpoint_dtype({key: "bfloat16"}, FOLDER) == torch.bfloat16
    assert checkpoint_dtype({key: "torch.float16"}, FOLDER) == torch.float16
    assert checkpoint_dtype({"text_config": {key: "bfloat16"}}, FOLDER) == torch.bfloat16


def test_a_config_without_a_dtype_means_float32() -> None:
    assert checkpoint_dtype({}, FOLDER) == torch.float32


def test_longrope_is_for_its_original_length_unless_more_is_asked_for() -> None:
    lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    fields = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    short = parse("Phi3ForCausalLM", rope_scaling={"type": "su", **lists}, **fields)
    long = parse("Phi3ForCausalLM", rope_scaling={"type": "su", **lists}, **fields, max_model_len=4097)
    assert short.max_position == 4096
    assert long.max_position == 131072
    assert short.layers[0].rope != long.layers[0].rope


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse("Qwen2ForCausalLM", rope_scaling=yarn).max_position == 131072


def test_layers_may_be_named_as_version_4_named_them_and_a_limit_that_limits_nothing_in_any_way() -> None:
    kinds = ["mamba", "attention", "mamba", "mamba"]
    new = {"layer_types": [{"mamba": "linear_attention"}.get(kind, "full_attention") for kind in kinds]}
    old = {"layers_block_type": kinds, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    [first, second] = [
        parse("GraniteMoeHybridForCausalLM", num_hidden_layers=4, **fields)
        for fields in (new | {"time_step_limit": [0, float("inf")]}, old)
    ]
    assert first == second
    assert [layer.recurrent is None for layer in first.layers] == [False, True, False, False]


def test_a_published_kimi_linear_numbers_its_layers_from_one_and_says_its_heads_in_a_section() -> None:
    own = {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 3, "full_attn_layers": [2, 4]}
    section = {**own, "kda_layers": [1, 3, 5]}
    read = parse("KimiLinearForCausalLM", num_hidden_layers=5, linear_attn_config=section)
    delta = KimiDeltaConfig(num_heads=8, head_dim=64, kernel_size=3)
    assert [layer.recurrent for layer in read.layers] == [delta, None, delta, None, delta]
    assert [layer.latent is None for layer in read.layers] == [True, False, True, False, True]
    assert [layer.moe is None for layer in read.layers] == [True, False, False, False, False]


def test_an_olmo_hybrid_with_a_null_rotary_base_does_not_encode_positions() -> None:
    def turns(**fields: Any) -> bool:
        layers = parse("OlmoHybridForCausalLM", **fields).layers
        assert all(layer.rope is None for layer in layers if layer.recurrent is not None)
        return any(layer.rope is not None for layer in layers)

    assert turns()
    assert turns(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert not turns(rope_parameters={"rope_type": "default", "rope_theta": None})
    assert not turns(rope_theta=None)


# ------------------------------------------------------------------------------------- what is refused


def refused(**fields: Any) -> tuple[str, type[Exception], dict[str, Any]]:
    return ("LlamaForCausalLM", UnsupportedModel, fields)


def hybrid(error: type[Exception], **fields: Any) -> tuple[str, type[Exception], dict[str, Any]]:
    return ("GraniteMoeHybridForCausalLM", error, fields)


@pytest.mark.parametrize(
    ("architecture", "error", "fields", "named"),
    [
        (*refused(rope_parameters={"rope_type": "helical"}), "rope_type"),
        ("Gemma4ForCausalLM", UnsupportedModel, {"use_bidirectional_attention": "all"}, "bidirectional"),
        ("Gemma4ForCausalLM", ModelFileError, {"num_kv_shared_layers": 29}, "num_kv_shared_layers"),
        ("Gemma4ForCausalLM", ModelFileError, {"enable_moe_block": True}, "num_experts"),
        (
            "Gemma4ForCausalLM",
            UnsupportedModel,
            {"per_layer_config": {"5": {"head_dim": 64}}},
            "per_layer_config",
        ),
        ("Gemma4ForCausalLM", ModelFileError, {"per_layer_config": {"40": {"head_dim": 64}}}, "40"),
        ("Gemma4ForCausalLM", UnsupportedModel, {"per_layer_config": {"5": {"skip": ["mlp"]}}}, "skip"),
        ("LlamaForCausalLM", UnsupportedModel, {"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer"),
        (*refused(rope_scaling={"rope_type": "spiral"}), "spiral"),
        ("Phi3ForCausalLM", UnsupportedModel, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (
            *refused(partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0}),
            "rotates the whole head",
        ),
        (*refused(hidden_act="mish"), "hidden_act"),
        ("Gemma2ForCausalLM", UnsupportedModel, {"use_bidirectional_attention": True}, "bidirectional"),
        ("Gemma3ForCausalLM", UnsupportedModel, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("GPT2LMHeadModel", UnsupportedModel, {"add_cross_attention": True}, "add_cross_attention"),
        ("Qwen3ForCausalLM", UnsupportedModel, {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        ("Qwen3ForCausalLM", UnsupportedModel, {"layer_types": ["full_attention"]}, "layer_types"),
        ("OlmoForCausalLM", UnsupportedModel, {}, "OlmoForCausalLM"),
        ("OPTForCausalLM", ModelFileError, {"hidden_size": 100, "num_attention_heads": 3}, "hidden_size"),
        ("CohereForCausalLM", ModelFileError, {"logit_scale": 0.0}, "logit_scale"),
        ("Ernie4_5_MoeForCausalLM", UnsupportedModel, {"moe_norm_min": 0.1}, "moe_norm_min"),
        ("ExaoneMoeForCausalLM", UnsupportedModel, {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("HunYuanMoEV1ForCausalLM", ModelFileError, {"moe_topk": [1]}, "moe_topk"),
        ("HunYuanMoEV1ForCausalLM", ModelFileError, {"moe_topk": 2}, "num_experts_per_tok"),
        ("LlamaForCausalLM", ModelFileError, {"hidden_size": "big"}, "hidden_size"),
        ("LlamaForCausalLM", ModelFileError, {"hidden_size": 0}, "hidden_size"),
        ("LlamaForCausalLM", ModelFileError, {"num_hidden_layers": True}, "num_hidden_layers"),
        ("LlamaForCausalLM", ModelFileError, {"num_key_value_heads": 5}, "num_key_value_heads"),
        ("LlamaForCausalLM", ModelFileError, {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("LlamaForCausalLM", ModelFileError, {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("LlamaForCausalLM", ModelFileError, {"rope_theta": float("nan")}, "rope_theta"),
        ("LlamaForCausalLM", ModelFileError, {"rope_scaling": "linear"}, "rope_scaling"),
        ("LlamaForCausalLM", ModelFileError, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ("LlamaForCausalLM", ModelFileError, {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor"),
        (
            "Phi3ForCausalLM",
            ModelFileError,
            {"rope_scaling": {"type": "su", "short_factor": [1]}},
            "short_factor",
        ),
        ("GPT2LMHeadModel", ModelFileError, {"n_embd": 100, "n_head": 3}, "n_embd"),
        ("GraniteForCausalLM", ModelFileError, {"logits_scaling": 0}, "logits_scaling"),
        ("Cohere2ForCausalLM", ModelFileError, {"logit_scale": -1.0}, "logit_scale"),
        ("Qwen3NextForCausalLM", ModelFileError, {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        (*hybrid(UnsupportedModel, layer_types=["mamba"] * 31 + ["sliding_attention"]), "layer_types"),
        (*hybrid(UnsupportedModel, time_step_limit=[0.001, 0.1]), "time_step_limit"),
        (*hybrid(ModelFileError, mamba_d_head=32), "mamba_n_heads"),
        (*hybrid(ModelFileError, mamba_n_groups=3), "mamba_n_groups"),
        (*hybrid(ModelFileError, num_experts_per_tok=9), "num_experts_per_tok"),
        ("FalconH1ForCausalLM", ModelFileError, {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers"),
        ("FalconH1ForCausalLM", ModelFileError, {"mlp_multipliers": [1.0, "2"]}, "mlp_multipliers"),
        ("FalconH1ForCausalLM", ModelFileError, {"mamba_d_ssm": 1000}, "mamba_n_heads.*mamba_d_ssm"),
        ("FalconH1ForCausalLM", UnsupportedModel, {"projectors_bias": True}, "projectors_bias"),
        (
            "FalconH1ForCausalLM",
            UnsupportedModel,
            {"attention_bias": True, "attention_in_multiplier": 0.5},
            "attention_in_multiplier",
        ),
        (
            "FalconH1ForCausalLM",
            UnsupportedModel,
            {"mlp_bias": True, "mlp_multipliers": [1.0, 0.5]},
            "mlp_bias",
        ),
        ("Mamba2ForCausalLM", ModelFileError, {"num_heads": 100}, "num_heads.*expand"),
        ("Mamba2ForCausalLM", ModelFileError, {"n_groups": 3}, "n_groups"),
        ("Mamba2ForCausalLM", UnsupportedModel, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        *(
            ("Mamba2ForCausalLM", UnsupportedModel, {"time_step_limit": limit}, "time_step_limit")
            for limit in (-1, True, "x", {"a": 1}, [0], [0, {"__float__": "long"}], [0, {"__float__": []}])
        ),
        *(
            ("FalconH1ForCausalLM", ModelFileError, {"mlp_multipliers": value}, "mlp_multipliers")
            for value in (1.0, [1.0], [1.0, "x"], [1.0, True], [1.0, 10**400], [1.0, float("nan")])
        ),
        *(
            (
                "LlamaForCausalLM",
                ModelFileError,
                {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **wrong}},
                rf"rope_parameters\.{next(iter(wrong))} must be a number",
            )
            for wrong in (
                {"beta_fast": 0.0},
                {"beta_fast": -1.0},
                {"beta_slow": 0},
                {"mscale_all_dim": -7.2, "mscale": 1.0},
            )
        ),
        (
            "Phi3ForCausalLM",
            ModelFileError,
            {
                "original_max_position_embeddings": 1,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 48,
                    "long_factor": [1.0] * 48,
                },
            },
            "original_max_position_embeddings must be from 2 to .*; got 1",
        ),
        *(
            (
                "LlamaForCausalLM",
                ModelFileError,
                {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, name: 10**400}},
                name,
            )
            for name in ("original_max_position_embeddings", "factor", "beta_fast", "attention_factor")
        ),
        ("MambaForCausalLM", ModelFileError, {"time_step_rank": "large"}, "time_step_rank"),
        ("JambaForCausalLM", ModelFileError, {"attn_layer_offset": 8}, "attn_layer_offset"),
        ("JambaForCausalLM", ModelFileError, {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("ZambaForCausalLM", UnsupportedModel, {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("ZambaForCausalLM", UnsupportedModel, {"attention_hidden_size": 3712}, "attention_hidden_size"),
        ("ZambaForCausalLM", ModelFileError, {"n_mamba_heads": 3}, "n_mamba_heads"),
        ("ZambaForCausalLM", UnsupportedModel, {"layers_block_type": ["mamba"] * 76}, "layers_block_type"),
        ("Zamba2ForCausalLM", UnsupportedModel, {"use_long_context": True}, "use_long_context"),
        ("Zamba2ForCausalLM", ModelFileError, {"mamba_ngroups": 3}, "mamba_ngroups"),
        (
            "Zamba2ForCausalLM",
            UnsupportedModel,
            {"use_shared_attention_adapter": True, "num_key_value_heads": 8},
            "num_key_value_heads",
        ),
        ("OlmoHybridForCausalLM", UnsupportedModel, {"linear_num_key_heads": 15}, "linear_num_key_heads"),
        ("MiniMaxForCausalLM", ModelFileError, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (
            "KimiLinearForCausalLM",
            ModelFileError,
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
            "full_attn_layers",
        ),
        ("KimiLinearForCausalLM", UnsupportedModel, {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("SmolLM3ForCausalLM", ModelFileError, {"no_rope_layers": [1]}, "no_rope_layers"),
        (
            "Ministral3ForCausalLM",
            ModelFileError,
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings",
        ),
        ("MixtralForCausalLM", ModelFileError, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (
            "DeepseekV3ForCausalLM",
            ModelFileError,
            {"num_nextn_predict_layers": 2**31},
            "num_nextn_predict_layers must be at most 1024",
        ),
        (
            "Gemma3ForCausalLM",
            ModelFileError,
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar must be greater",
        ),
        (
            "LlamaForCausalLM",
            ModelFileError,
            {"num_hidden_layers": 10**400},
            "num_hidden_layers must be at most",
        ),
        ("LlamaForCausalLM", ModelFileError, {"head_dim": 2**31}, "head_dim must be at most 65536"),
        ("LlamaForCausalLM", ModelFileError, {"rope_theta": -1.0}, "rope_theta must be greater than 1"),
        (
            "LlamaForCausalLM",
            ModelFileError,
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e308, "rope_theta": 1e4}},
            "rope_parameters.factor must be at most 1048576",
        ),
        ("LlamaForCausalLM", ModelFileError, {"rope_theta": 10**400}, "rope_theta must be a number"),
        ("Qwen3MoeForCausalLM", ModelFileError, {"mlp_only_layers": ["one"]}, "mlp_only_layers"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    architecture: str, error: type[Exception], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse(architecture, **fields)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        checkpoint_dtype({"torch_dtype": "float8_e4m3fn"}, FOLDER)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [3]])
def test_a_config_must_name_its_architecture(architectures: Any) -> None:
    with pytest.raises(ModelFileError, match="architectures must"):
        architecture_of({"architectures": architectures}, FOLDER)


def test_other_architectures_are_not_native() -> None:
    assert is_native("LlamaForCausalLM")
    assert not is_native("BloomForCausalLM")


# ---------------------------------------------------------------------------------------- the file itself


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not JSON"), (b"[1]", "must hold a JSON object"), (b"\xff\xfe", "not JSON"), (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"), (b"1" * 5000, "not JSON"),
    ],
)  # fmt: skip
def test_a_config_that_is_no_json_object_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=problem) as caught:
        read_config(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


def test_a_missing_config_and_a_missing_folder_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is missing"):
        read_config(tmp_path)
    with pytest.raises(ModelNotFound, match="nowhere"):
        read_config(tmp_path / "nowhere")
