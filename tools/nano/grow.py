"""Start a training from the model that ships: more tokens, and as `NanoConfig` says more and wider
layers, with the same answers at first.

    python tools/nano/grow.py --work DIR [--model src/triolet/nano]

Writes `tokenizer.json` and a checkpoint of step 0 into the work folder, for `train.py --resume`. The second training
of triolet-nano began so.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from conversations import new_chats
from model import NanoConfig, NanoLlama
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokens import extend_tokenizer
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "src" / "triolet" / "nano"


def grown_weights(old: dict[str, Tensor], tokenizer: Tokenizer, extended: Tokenizer) -> dict[str, Tensor]:
    """Return the weights of a model of today's `NanoConfig` that computes what the old one does.

    A new layer is a copy of the one before it that adds nothing to its input; new channels of the feed-forward layers
    read at random and write zeros; a new token begins as the mean of the old tokens that it is made of.
    """
    weights = NanoLlama(NanoConfig()).state_dict()
    num_old = old["model.embed_tokens.weight"].shape[0]
    embedding = weights["model.embed_tokens.weight"]
    embedding[:num_old] = old["model.embed_tokens.weight"]
    for token in range(num_old, extended.get_vocab_size()):
        parts = tokenizer.encode(extended.decode([token], skip_special_tokens=False)).ids
        embedding[token] = embedding[parts].mean(dim=0)
    weights["model.norm.weight"] = old["model.norm.weight"].float()
    num_layers, num_old_layers = (
        NanoConfig().num_hidden_layers,
        sum("input_layernorm" in name for name in old),
    )
    sources = [layer * num_old_layers // num_layers for layer in range(num_layers)]
    for layer, source in enumerate(sources):
        is_copy = source in sources[:layer]
        for name in [name for name in weights if name.startswith(f"model.layers.{layer}.")]:
            value = old[name.replace(f".{layer}.", f".{source}.", 1)]
            if "down_proj" in name:
                weights[name].zero_()
            weights[name][tuple(map(slice, value.shape))] = value
            if is_copy and ("o_proj" in name or "down_proj" in name):
                weights[name].zero_()
    return weights


def main() -> None:
    """Parse, grow, write."""
    parser = argparse.ArgumentParser(
        description="Start a training of triolet-nano from the model that ships."
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokenizer and the checkpoint")
    parser.add_argument("--model", type=Path, default=FOLDER, help="folder of the model to start from")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(2)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = (message.content for chat in islice(new_chats(2), 20_000) for message in chat)
    extended = extend_tokenizer(tokenizer, texts, NanoConfig().vocab_size)
    extended.save(str(options.work / "tokenizer.json"))
    weights = grown_weights(load_file(options.model / "model.safetensors"), tokenizer, extended)
    torch.save(
        {"model": weights, "optimizers": [], "step": 0, "seconds": 0.0}, options.work / "checkpoint.pt"
    )
    print(f"{sum(value.numel() for value in weights.values()):,} parameters -> {options.work}")


if __name__ == "__main__":
    main()
