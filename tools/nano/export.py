"""Turn a training checkpoint into the folder that ships: weights, configuration, tokenizer and chat template.

    python tools/nano/export.py --work DIR [--to src/triolet/nano] [--earlier MODEL --share 0.7]

With `--earlier` every weight is the mean of the checkpoint's and of a model's that the training began with, which has forgotten less of
what the last training did not repeat.

The model card (README.md) is written by hand and left alone.
"""

import argparse
import json
from pathlib import Path

import torch
from model import NanoConfig
from safetensors.torch import load_file, save_file
from tokens import CHAT_TEMPLATE, END, PAD, SPECIAL, TOOL
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "src" / "triolet" / "nano"


def model_config(config: NanoConfig) -> dict[str, object]:
    """Return `config.json` for transformers' LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index(END),
        "pad_token_id": SPECIAL.index(PAD),
        "dtype": "float32",
        "use_cache": True,
    }


def generation_config() -> dict[str, object]:
    """Return `generation_config.json`: end tokens, and default sampling."""
    return {
        "eos_token_id": [SPECIAL.index(END)],
        "pad_token_id": SPECIAL.index(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 0,
    }


def tokenizer_config(config: NanoConfig) -> dict[str, object]:
    """Return `tokenizer_config.json`, with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in [*SPECIAL, TOOL] if token not in (END, PAD)],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def averaged(weights: dict[str, Tensor], earlier: Path, share: float) -> dict[str, Tensor]:
    """Return `share` of the weights plus the rest of those of the model in the folder `earlier`."""
    old = load_file(earlier / "model.safetensors")
    return {name: share * weights[name] + (1 - share) * old[name].float() for name in weights}


def export(work: Path, folder: Path, earlier: Path | None = None, share: float = 1.0) -> None:
    """Write the folder from the checkpoint and the tokenizer in `work`.

    Args:
        earlier: folder of a model of the same shape to average with; None for none.
        share: the checkpoint's in the average, of 1.
    """
    config = NanoConfig()
    folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(work / "checkpoint.pt", map_location="cpu")
    weights: dict[str, Tensor] = state["model"]
    if earlier is not None:
        weights = averaged(weights, earlier, share)
    # Training multiplied bfloat16 copies of the matrices, so rounding them costs nothing; the norms lose a little.
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable to its owner alone
    (folder / "tokenizer.json").write_text((work / "tokenizer.json").read_text())
    files = {
        "config.json": model_config(config),
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(config),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"step {state['step']}, {state['seconds'] / 60:.1f} minutes of training -> {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Export triolet-nano.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokenizer and the checkpoint")
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder to write")
    parser.add_argument("--earlier", type=Path, help="folder of a model to average the checkpoint with")
    parser.add_argument("--share", type=float, default=0.7, help="the checkpoint's share of that average")
    options = parser.parse_args()
    export(options.work, options.to, options.earlier, options.share)


if __name__ == "__main__":
    main()
