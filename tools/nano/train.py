"""Train triolet-nano from scratch: make the text, train the tokenizer, train the model, save checkpoints.

    torchrun --nproc-per-node 2 tools/nano/train.py --work DIR [--steps N] [--rate R] [--resume] [--seed S]

Every process makes its own text and computes its own gradients, which are summed once per step: on CPUs start one
process per core. Plain `python tools/nano/train.py` trains in one process, which is right for one GPU; a GPU is used if there is
one. The text is made on the way and depends on the seed alone; nothing is downloaded. `export.py` turns the last
checkpoint into the folder that ships.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from conversations import conversations
from model import NanoConfig, NanoLlama
from muon import Muon
from tokenizers import Tokenizer
from tokens import encode, train_tokenizer
from torch import Tensor, nn

COMPILED_LENGTHS = (48, 96, 160, 256, 384, 640, 1024, 2048)
"""Rows are padded to one of these where each shape is compiled."""

LENGTHS = (*range(16, 256, 16), *range(256, 512, 32), *range(512, 1024, 64), *range(1024, 2049, 128))
"""Rows are padded to one of these where nothing is compiled: few tokens of padding, which made a quarter before."""


@attrs.frozen(kw_only=True)
class Schedule:
    """Length of the training and learning rates.

    Attributes:
        steps: optimizer steps.
        micro_batches: micro-batches of about `micro_tokens` tokens in one step.
        muon_lr: peak learning rate of the weight matrices, `adam_lr` of the embedding and the norms.
        warmup: steps of linear warm-up; `decay` the last share of all steps, in which the rate falls to zero.
        user_weight: weight in the loss of what the user says.
    """

    steps: int
    micro_batches: int = 4
    micro_tokens: int = 2048
    muon_lr: float = 0.01
    adam_lr: float = 0.0012
    warmup: int = 60
    decay: float = 0.6
    user_weight: float = 0.1

    def rate(self, step: int) -> float:
        """Return the learning rate at `step` as a share of its peak: warm up, stay, fall linearly."""
        rest = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(1.0, (step + 1) / self.warmup, rest)


def micro_batches(
    tokenizer: Tokenizer, schedule: Schedule, seed: int, lengths: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless (tokens, weights) of [rows, length], rows of similar length together, padded to one of `lengths`."""
    buckets: dict[int, list[tuple[list[int], list[float]]]] = {length: [] for length in lengths}
    source = conversations(seed)
    while chunk := list(islice(source, 512)):
        for tokens, weights in encode(tokenizer, chunk, schedule.user_weight):
            tokens, weights = tokens[: lengths[-1]], weights[: lengths[-1]]
            length = next(length for length in lengths if length >= len(tokens))
            bucket = buckets[length]
            bucket.append((tokens, weights))
            if len(bucket) == max(1, schedule.micro_tokens // length):
                yield padded(bucket, length)
                bucket.clear()


def padded(rows: list[tuple[list[int], list[float]]], length: int) -> tuple[Tensor, Tensor]:
    """Return rows as tensors, padded on the right with token 0 of weight 0."""
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for row, (row_tokens, row_weights) in enumerate(rows):
        tokens[row, : len(row_tokens)] = torch.tensor(row_tokens)
        weights[row, : len(row_weights)] = torch.tensor(row_weights)
    return tokens, weights


def make_optimizers(
    model: nn.Module, schedule: Schedule, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Make AdamW for the embedding and the norms, and Muon for the matrices inside the layers."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=schedule.muon_lr, dtype=torch.bfloat16 if has_bfloat16(device) else torch.float32),
        torch.optim.AdamW(others, lr=schedule.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, seconds: float
) -> None:
    """Write a checkpoint, whole or not at all."""
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Return True if products of bfloat16 are faster than float32's: on GPUs, and on CPUs with instructions for them."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def summed_gradients(model: NanoLlama, group: list[tuple[Tensor, Tensor]]) -> float:
    """Leave the mean gradient over all processes' tokens in `model`, and return the mean loss in nats per token."""
    device = next(model.parameters()).device
    total, loss_sum = torch.zeros((), device=device), torch.zeros((), device=device)
    for tokens, weights in group:
        tokens, weights = tokens.to(device), weights.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
            loss = model.loss(tokens, weights)
        loss.backward()
        total += weights[:, 1:].sum()
        loss_sum += loss.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(g.flatten() for g in gradients), total[None], loss_sum[None]])
    if dist.is_initialized():
        dist.all_reduce(flat)
    flat /= flat[-2].clone()
    for gradient, mean in zip(gradients, flat[:-2].split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return float(flat[-1])


def load_tokenizer(work: Path, seed: int) -> Tokenizer:
    """Load the tokenizer in `work`; train it first if there is none."""
    path = work / "tokenizer.json"
    if not path.exists():
        texts = (message.content for chat in islice(conversations(seed), 40_000) for message in chat)
        train_tokenizer(texts, NanoConfig().vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def load(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
    """Restore a checkpoint; return its step and the seconds trained so far."""
    state = torch.load(path, map_location=next(model.parameters()).device)
    model.load_state_dict(state["model"])
    if state["step"]:  # a checkpoint that `grow.py` has made begins without
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    return state["step"], state["seconds"]


def train(work: Path, schedule: Schedule, seed: int, resume: bool) -> None:
    """Train until the schedule ends; a checkpoint is written every 100 steps."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = NanoLlama(NanoConfig()).to(device)
    optimizers = make_optimizers(model, schedule, device)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    step, earlier = load(work / "checkpoint.pt", model, optimizers) if resume else (0, 0.0)
    lengths = LENGTHS
    if has_bfloat16(device):  # in float32, eager layers are as fast, and there is nothing to wait for
        lengths = COMPILED_LENGTHS
        torch._dynamo.config.cache_size_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    if world > 1 and rank > 0:
        dist.barrier()  # the first process trains the tokenizer, the others read it
    tokenizer = load_tokenizer(work, seed)
    if world > 1 and rank == 0:
        dist.barrier()
    batches = micro_batches(tokenizer, schedule, seed + step * 1000 + rank, lengths)
    started, tokens_seen, mean = time.monotonic(), 0, 0.0
    while step < schedule.steps:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule.rate(step)
        group = list(islice(batches, max(1, schedule.micro_batches // world)))
        loss = summed_gradients(model, group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        step += 1
        mean = loss if mean == 0.0 else 0.97 * mean + 0.03 * loss
        tokens_seen += world * sum(tokens.numel() for tokens, _ in group)
        seconds = time.monotonic() - started
        if rank == 0 and step % 20 == 0:
            pace = f"tokens/s {tokens_seen / seconds:.0f} minutes {(earlier + seconds) / 60:.1f}"
            print(f"step {step} loss {loss:.4f} mean {mean:.4f} {pace}", flush=True)
        if rank == 0 and (step % 100 == 0 or step == schedule.steps):
            save(work / "checkpoint.pt", model, optimizers, step, earlier + seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train triolet-nano from scratch.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokenizer and the checkpoint")
    parser.add_argument("--steps", type=int, default=4600, help="optimizer steps of about 8,000 tokens")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="learning rates, times those of a training from scratch"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the text and of the first weights")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(steps=options.steps)
    schedule = attrs.evolve(
        schedule, muon_lr=options.rate * schedule.muon_lr, adam_lr=options.rate * schedule.adam_lr
    )
    train(options.work, schedule, options.seed, options.resume)


if __name__ == "__main__":
    main()
