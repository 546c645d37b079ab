"""Small model folders with random weights, one per family, as transformers writes them."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(256, 261)
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}
_ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "tie_word_embeddings": True}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
_GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_LATENT = {
    **_GROUPS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_YOUTU = {name: value for name, value in _LATENT.items() if name not in _GROUPS}

_GRANITE_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}

_MAMBA = {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8}
_MAMBA2 = {**_MAMBA, "num_heads": 8, "head_dim": 16, "state_size": 16}
_JAMBA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 8,
}
_ZAMBA = {
    **_SIZES,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 2,
    "mamba_d_state": 8,
}
_ZAMBA2 = {
    **_SIZES,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 16,
    "adapter_rank": 5,
    # A limit of steps that transformers has for prompts alone: pull request 48989.
    "time_step_min": 1e-9,
}
_KIMI = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "model_max_length": 256,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
}

_FALCON_MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.5, 1.25, 0.9, 1.1, 0.8],
}
_NEMOTRON_H = {
    **{name: size for name, size in _SIZES.items() if name != "num_hidden_layers"},
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    # A limit of steps that transformers has for prompts alone, and NVIDIA's own code nowhere: pull request 48989.
    "time_step_min": 1e-9,
}

_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}

_OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

# Class of the model, class of its config, and what sets it apart. Sliding windows are shorter than the tests'
# sequences, so that they matter.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "rope_parameters": _LLAMA3_ROPE}),
    "llama-plain": ("LlamaForCausalLM", "LlamaConfig", _SIZES),
    "llama-biased": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    # it is ignored, as transformers does
    "llama-partial-rotary": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "partial_rotary_factor": 0.5}),
    "llama-linear": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "smollm": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SIZES, "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"hidden_size": 48},
    ),
    "helium": (
        "HeliumForCausalLM",
        "HeliumConfig",
        {**_SIZES, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "ernie4.5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_SIZES, "head_dim": 32}),
    "ernie4.5-biased": (
        "Ernie4_5ForCausalLM",
        "Ernie4_5Config",
        {**_SIZES, "head_dim": 32, "use_bias": True, "tie_word_embeddings": False},
    ),
    "seed-oss": ("SeedOssForCausalLM", "SeedOssConfig", {**_SIZES, "head_dim": 32}),
    "seed-oss-biased": (
        "SeedOssForCausalLM",
        "SeedOssConfig",
        {**_SIZES, "head_dim": 32, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, "sliding_window": 11}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2ForCausalLM", "Qwen2Config", {**_SIZES, "rope_parameters": _YARN_ROPE}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_SIZES, "sliding_window": 13, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_SIZES, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 128},
    ),
    "gemma": (
        "GemmaForCausalLM",
        "GemmaConfig",
        {**_SIZES, "head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_SIZES, **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_SIZES, **_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_SIZES, **_GEMMA4, "final_logit_softcapping": 8.0},
    ),
    "gemma4-small": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_SIZES,
            **_GEMMA4,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_SIZES,
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_OPT, "word_embed_proj_dim": 64}),
    "opt-unbiased": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT, "enable_bias": False, "tie_word_embeddings": False},
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_SIZES, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "gpt-neox-serial": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            **_SIZES,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_SIZES, "num_key_value_heads": None}),
    "phi-normed": (
        "PhiForCausalLM",
        "PhiConfig",
        {**_SIZES, "qk_layernorm": True, "tie_word_embeddings": True},
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**_SIZES, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {
            **_SIZES,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {"partial_rotary_factor": 0.5},
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_SIZES, "logit_scale": 0.25}),
    "cohere-normed": (
        "CohereForCausalLM",
        "CohereConfig",
        {**_SIZES, "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **_SIZES,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**_SIZES, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 12},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _SIZES),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            **_SIZES,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**_SIZES, "sliding_window": 10, "sliding_window_pattern": 2},
    ),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**_SIZES, "sliding_window": None} | {"layer_types": ["full_attention"] * 3},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**_SIZES, "sliding_window": 10, "sliding_window_pattern": 2, "logit_scale": 0.25},
    ),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_SIZES, "head_dim": 32}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**_SIZES, "head_dim": 32}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_SIZES, "sliding_window": 14}),
    "ministral": (
        "MinistralForCausalLM",
        "MinistralConfig",
        {
            **_SIZES,
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {
            **_SIZES,
            "head_dim": 32,
            "rope_parameters": {
                **_YARN_ROPE,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_SIZES, **_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_SIZES,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "use_sliding_window": True,
            "sliding_window": 12,
            "mlp_only_layers": [1],
        },
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {
            **_SIZES,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 3.0,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {
            **_SIZES,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 80,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**_SIZES, **_GRANITE_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2, "mamba_n_groups": 2},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_SIZES,
            **_GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {
            **_SIZES,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_SIZES,
            **_FALCON_MULTIPLIERS,
            "mamba_n_heads": 8,
            "mamba_d_ssm": 96,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-normed": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_SIZES,
            **_FALCON_MULTIPLIERS,
            "mamba_n_heads": 8,
            "mamba_d_ssm": None,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "falcon-h1-biased": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **_SIZES,
            "mamba_n_heads": 4,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_multipliers": [0.8, 1.0],
            "key_multiplier": 0.7,
            "ssm_multipliers": [0.5, 1.25, 0.9, 1.1, 0.8],
        },
    ),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {**_MAMBA2, "n_groups": 2}),
    "mamba2-biased": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            **_MAMBA2,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA),
    "mamba-biased": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            **_MAMBA,
            "conv_kernel": 3,
            "expand": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_rank": 7,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {**_MAMBA, "mixer_rms_eps": 1e-3}),
    "jamba": ("JambaForCausalLM", "JambaConfig", _JAMBA),
    "jamba-dense": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_JAMBA,
            "num_experts": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": 6,
            "tie_word_embeddings": True,
        },
    ),
    "zamba": ("ZambaForCausalLM", "ZambaConfig", _ZAMBA),
    "zamba-biased": (
        "ZambaForCausalLM",
        "ZambaConfig",
        {
            **_ZAMBA,
            "layers_block_type": ["hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 3,
            "n_mamba_heads": 1,
            "attention_head_dim": 24,
            "num_key_value_heads": 2,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": 6,
        },
    ),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", {**_ZAMBA2, "num_mem_blocks": 2, "use_mem_rope": True}),
    "zamba2-biased": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **_ZAMBA2,
            "mamba_ngroups": 2,
            "add_bias_linear": True,
            "use_shared_attention_adapter": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "linear_value_head_dim": 12,  # as large as keys: transformers writes convolutions in equal parts
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "olmo-hybrid-rope": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            **_SIZES,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **_SIZES,
            "num_local_experts": 4,
            "block_size": 8,
            "full_attn_alpha_factor": 1.1,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.3,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 0.7,
            "mlp_beta_factor": 1.2,
        },
    ),
    "minimax-window": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **_SIZES,
            "head_dim": 12,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 3,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "kimi-linear": ("KimiLinearForCausalLM", "KimiLinearConfig", {**_KIMI, "num_hidden_layers": 6}),
    "kimi-linear-groups": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **_KIMI,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "num_expert_group": 3,
            "topk_group": 2,
            "q_lora_rank": 24,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_NEMOTRON_H,
            **_GROUPS,
            "hybrid_override_pattern": "MEM*EM-",
            "moe_shared_expert_intermediate_size": 80,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_SIZES,
            **_MOE,
            **_DELTA_NET,
            "shared_expert_intermediate_size": 80,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "full_attention_interval": 2,
        },
    ),
    "qwen3-next-dense": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_SIZES,
            **_DELTA_NET,
            "head_dim": 32,
            "num_experts": 0,
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **_SIZES,
            **_DELTA_NET,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **_SIZES,
            **_MOE,
            **_DELTA_NET,
            "shared_expert_intermediate_size": 80,
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    ),
    "lfm2-biased": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **_SIZES,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": (
        "Lfm3ForCausalLM",
        "Lfm3Config",
        {
            **_SIZES,
            "num_hidden_layers": 5,
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
        },
    ),
    "lfm3-plain": (
        "Lfm3ForCausalLM",
        "Lfm3Config",
        {
            **_SIZES,
            "head_dim": 16,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
        },
    ),
    "youtu": (
        "YoutuForCausalLM",
        "YoutuConfig",
        {**_SIZES, **_YOUTU},
    ),
    "youtu-direct": (
        "YoutuForCausalLM",
        "YoutuConfig",
        {**_SIZES, **_YOUTU, "q_lora_rank": None, "rope_interleave": False},
    ),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", {**_SIZES, "rope_parameters": _YARN_ROPE}),
    "arcee-biased": (
        "ArceeForCausalLM",
        "ArceeConfig",
        {**_SIZES, "hidden_act": "relu", "attention_bias": True, "mlp_bias": True},
    ),
    "jais2": ("Jais2ForCausalLM", "Jais2Config", {**_SIZES}),
    "cwm": (
        "CwmForCausalLM",
        "CwmConfig",
        # This config takes no None.
        {**_SIZES, "sliding_window": 9, "rope_parameters": _LLAMA3_ROPE, "bos_token_id": 0},
    ),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {**_SIZES, "rope_parameters": _LLAMA3_ROPE}),
    "apertus-biased": (
        "ApertusForCausalLM",
        "ApertusConfig",
        {**_SIZES, "attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "hunyuan": (
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        {**_SIZES, "head_dim": 32, "rope_parameters": _ALPHA_ROPE},
    ),
    "hunyuan-biased": (
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        {**_SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {**_SIZES, "head_dim": 32, "num_experts": 6, "moe_topk": [2, 1, 3], "rope_parameters": _ALPHA_ROPE},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {**_SIZES, "head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**_SIZES, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48},
    ),
    "ernie4.5-moe-sparse": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": False,
        },
    ),
    "solar-open": (
        "SolarOpenForCausalLM",
        "SolarOpenConfig",
        {
            **{name: size for name, size in _SIZES.items() if name != "intermediate_size"},
            "head_dim": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "exaone-moe": (
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {
            **_SIZES,
            "sliding_window": 10,
            "sliding_window_pattern": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES,
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {**_YARN_ROPE, "truncate": False},
            "swiglu_limit": 0.8,  # so low that it matters
        },
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **_SIZES,
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**_SIZES, **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_SIZES,
            **_LATENT,
            "attention_bias": True,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **_SIZES,
            **_GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {**_SIZES, **_LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_SIZES, **_LATENT, "rope_interleave": False, "norm_topk_prob": False},
    ),
}

# One of each kind, for tests that need not see every variant.
# Written with the names of transformers' own modules, not with those of published files.
TRANSFORMERS_NAMES = ("olmo-hybrid-rope",)

NATIVE_FAMILIES = (
    "llama", "smollm", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "mixtral", "qwen3-moe",
    "gpt-oss", "deepseek-v2", "deepseek-v3", "granite-hybrid", "qwen3-next",
)  # fmt: skip


def is_cached_rightly(config: Any) -> bool:
    """Return False for a model of which transformers computes other logits with its cache than over all tokens at once.

    Args:
        config: of transformers.
    """
    return config.model_type != "minimax" or config.sliding_window is None


def make_model(
    family: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    with_tokenizer: bool = False,
    eos_token_id: int | None = None,
    **overrides: Any,
) -> Path:
    """Write a folder with config.json, model.safetensors, generation_config.json and perhaps a tokenizer.

    Args:
        family: a key of `FAMILIES`.
        path: the folder; made if need be.
        with_tokenizer: bytes as tokens, five special tokens and a chat template; its EOS is then the model's.
        eos_token_id: None for a model that never ends by itself.
        overrides: further fields of the family's config.
    """
    # Of each model one is made in a process; the tests have copies, which they may change.
    eos_token_id = EOS_ID if with_tokenizer else eos_token_id
    made = _made(family, dtype, vocab_size, seed, with_tokenizer, eos_token_id, json.dumps(overrides))
    shutil.copytree(made, path, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return path


@functools.cache
def _made(
    family: str,
    dtype: torch.dtype,
    vocab_size: int,
    seed: int,
    with_tokenizer: bool,
    eos_token_id: int | None,
    overrides: str,
) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=_folder().name))
    model_class, config_class, settings = FAMILIES[family]
    ids = {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}
    fields = {"vocab_size": vocab_size, **ids, **settings, **json.loads(overrides)}
    # configs keep the dicts they are given, and change them
    config = getattr(transformers, config_class)(**json.loads(json.dumps(fields)))
    model = getattr(transformers, model_class)(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(path, save_original_format=family not in TRANSFORMERS_NAMES)
    if with_tokenizer:
        write_tokenizer(path)
    return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="triolet-models-")  # removed with this process


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights lively enough that the likeliest token changes from step to step."""
    generator = torch.Generator().manual_seed(seed)
    is_gemma = (
        "Gemma" in type(model).__name__
    )  # scales its embeddings up, and adds 1 to the weights of its norms
    # Its shared block has no residual stream: what it gives would drown the rest, and rounding with it.
    is_zamba = type(model).__name__.startswith("Zamba")
    embedding_std = 0.03 if is_gemma else 0.25
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name or ".ln_" in name
            if is_norm and name.endswith("weight"):
                # Those of Qwen3-Next and Qwen3.5, too, but for the ones behind the recurrence.
                is_offset = (is_gemma and "Gemma4" not in type(model).__name__) or (
                    type(model).__name__.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in name
                )
                parameter.copy_(noise * 0.2 if is_offset else 1.0 + noise * 0.2)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1.0 + noise * 0.2)
            elif parameter.ndim == 1:
                parameter.copy_(noise * 0.2)
            elif is_zamba and name.endswith(("q_proj.weight", "k_proj.weight", ".linear.weight", "0.weight")):
                parameter.copy_(noise * 0.05)
            else:
                std = 0.18 if is_zamba else 0.25
                parameter.copy_(noise * (embedding_std if "emb" in name or ".wte" in name else std))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + torch.randn(buffer.shape, generator=generator) * 0.2)


def write_tokenizer(path: Path) -> None:
    """A tokenizer whose ids below 256 are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; a field set to ... is removed."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")
