"""Measure embeddings of texts of 128 tokens beside sentence-transformers and vLLM, and a chat beside 10,000 of them.

    python benchmarks/embedding.py [--sentence-transformers PYTHON] [--vllm PYTHON] [--texts 1000] [--rounds 3]

Throughput: every round embeds the same texts with each engine, from text to vectors; the one that does not run is
stopped. The first embeddings must agree to 1e-5. Models have random weights and a tokenizer of words; the decoder is
pooled at its last token, and the encoder by the mean.

Chat: one client's answers, one after the other, alone and then while another client's 10,000 texts are embedded, under
`fair`: gaps between tokens in milliseconds, and their ratio, which shall be at most 1.5. The part ends with the last of
the chat's answers; how many texts were embedded beside them stands in the line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import trio
from common import OthersAtWork, kept_model, machine, median, percentiles, report
from peers.peer import Peer
from tokenizers import Tokenizer, models, pre_tokenizers

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

NUM_TOKENS = 128
NUM_WORDS = 20_000
CHAT_ANSWER, NUM_ANSWERS = 64, 6
RATIO_BOUND = 1.5
SPEEDUP_BOUND = 2.0
SHAPES = {"llama-160m": "lasttoken", "bert-base": "mean_tokens"}


def made_folder(name: str, root: Path) -> Path:
    """Return a folder of sentence-transformers' form; make it if it is not there."""
    folder = root / f"embedding-{name}"
    if (folder / "modules.json").exists():
        return folder
    if name == "bert-base":
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
    else:
        kept = kept_model(name, root, dtype=torch.float32)
        folder.mkdir(parents=True, exist_ok=True)
        for path in kept.iterdir():
            (folder / path.name).hardlink_to(path)
    write_tokenizer(folder)
    pooling = folder / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
    settings = {"word_embedding_dimension": hidden_size, f"pooling_mode_{SHAPES[name]}": True}
    if name != "bert-base":
        settings["pooling_mode_mean_tokens"] = False
    (pooling / "config.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token a word."""
    words = {"[PAD]": 0, **{f"w{index}": index for index in range(1, NUM_WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 128 tokens."""
    dice = random.Random(seed)
    return [" ".join(f"w{dice.randrange(1, NUM_WORDS)}" for _ in range(NUM_TOKENS)) for _ in range(count)]


def cpu_seconds(*pids: int) -> float:
    """Return the processor time of processes, all threads: on a busy machine it tells more than the clock."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in stats) / os.sysconf("SC_CLK_TCK")


async def embedded(engine: Engine, texts: Sequence[str]) -> tuple[float, Sequence[float]]:
    """Return the seconds of all texts, and the first embedding."""
    began = time.perf_counter()
    outputs = await engine.embed(texts)
    return time.perf_counter() - began, outputs[0].outputs.embedding


async def throughput(name: str, beside: str, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of a model's embeddings a second beside those of a peer."""
    folder = made_folder(name, options.models_folder)
    line: dict[str, Any] = {"bench": "embedding", "part": "throughput", "model": name, "dtype": "float32"}
    ours: list[float] = []
    theirs: list[float] = []
    our_cpu_s = their_cpu_s = 0.0
    # no text comes twice within a round, and a new round must not find the last one's blocks
    fields: dict[str, Any] = (
        {} if name == "bert-base" else {"enable_prefix_caching": False, "convert": "embed"}
    )
    with Peer(beside, python, {"model": str(folder), "dtype": "float32"}) as peer:
        async with triolet.open_engine(
            model=str(folder), dtype="float32", log_stats=False, **fields
        ) as engine:
            warm = make_texts(32, 1)
            await embedded(engine, warm)
            await trio.to_thread.run_sync(peer.ask, warm)
            texts = make_texts(options.texts, 0)
            process_id = engine.model_info.process_id
            runner = [] if process_id is None else [process_id]
            others = OthersAtWork([peer.pid, *runner])
            load = os.getloadavg()[0]
            for _ in range(options.rounds):
                our_cpu_s -= cpu_seconds(os.getpid(), *runner)
                seconds, found = await embedded(engine, texts)
                our_cpu_s += cpu_seconds(os.getpid(), *runner)
                their_cpu_s -= cpu_seconds(peer.pid)
                answer = await trio.to_thread.run_sync(peer.ask, texts)
                their_cpu_s += cpu_seconds(peer.pid)
                ours.append(seconds)
                theirs.append(answer["elapsed_s"])
                difference = max(abs(a - b) for a, b in zip(found, answer["first"], strict=True))
                if difference > 1e-5:
                    raise SystemExit(f"{name}: the embeddings differ by {difference}")
            line |= {"backend": engine.model_info.backend, "others_cpus": others.num_cpus(), "load": load}
    return {
        **line, "texts": options.texts, "rounds": options.rounds, "difference": difference,
        "texts_per_s": options.texts / median(ours), "peer": beside,
        "peer_version": peer.facts["version"], "peer_texts_per_s": options.texts / median(theirs),
        "ratio": median([b / a for a, b in zip(ours, theirs, strict=True)]), "ratio_bound": SPEEDUP_BOUND,
        "cpu_ratio": their_cpu_s / our_cpu_s,
        **machine(),
    }  # fmt: skip


async def gaps_ms(engine: Engine, count: int) -> list[float]:
    """Return the gaps between the tokens of a chat's answers."""
    gaps: list[float] = []
    dice = random.Random(count)
    params = SamplingParams(
        temperature=0, max_tokens=CHAT_ANSWER, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for _ in range(count):
        last = None
        prompt = [dice.randrange(1, NUM_WORDS) for _ in range(NUM_TOKENS)]
        async with engine.generate(prompt, params, client="chat") as stream:
            async for _ in stream:
                now = time.perf_counter()
                if last is not None:
                    gaps.append(1e3 * (now - last))
                last = now
    return gaps


async def chat(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of a chat beside 10,000 embeddings."""
    folder = made_folder(name, options.models_folder)
    texts = make_texts(options.beside, 2)
    async with triolet.open_engine(
        model=str(folder), dtype="float32", policy="fair", convert="embed"
    ) as engine:
        await gaps_ms(engine, 2)  # first times
        load = os.getloadavg()[0]
        alone = await gaps_ms(engine, NUM_ANSWERS)

        async def embed_all() -> None:
            await engine.embed(texts, client="documents")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed_all)
            before = sum(engine.statistics().num_requests_ended.values())
            while sum(engine.statistics().num_requests_ended.values()) < before + 20:  # noqa: ASYNC110
                await trio.sleep(0.01)
            began = time.perf_counter()
            before = sum(engine.statistics().num_requests_ended.values())
            beside = await gaps_ms(engine, NUM_ANSWERS)
            done = sum(engine.statistics().num_requests_ended.values()) - before - NUM_ANSWERS
            seconds = time.perf_counter() - began
            nursery.cancel_scope.cancel()
        backend = engine.model_info.backend
    first, second = percentiles(alone), percentiles(beside)
    return {
        "bench": "embedding", "part": "chat", "model": name, "dtype": "float32", "backend": backend, "policy": "fair",
        "queued": options.beside, "embedded_beside": done, "texts_per_s": done / seconds,
        "alone_ms": first, "beside_ms": second, "alone_p50_ms": first["p50"], "beside_p50_ms": second["p50"],
        "ratio": second["p50"] / first["p50"], "ratio_p99": second["p99"] / first["p99"],
        "ratio_of_means": (sum(beside) / len(beside)) / (sum(alone) / len(alone)),
        "ratio_bound": RATIO_BOUND, "load": load, **machine(),
    }  # fmt: skip


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=("throughput", "chat"), default=["throughput", "chat"])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sentence-transformers", help="a Python that has sentence-transformers")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--beside", type=int, default=10_000, help="texts that are embedded beside the chat")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "triolet-models")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    options = parser.parse_args()
    if "throughput" in options.part:
        peers = {"sentence-transformers": options.sentence_transformers, "vllm-embedding": options.vllm}
        if not any(peers.values()):
            parser.error("--sentence-transformers or --vllm is needed for the part throughput")
        lines = [
            trio.run(throughput, name, beside, python, options)
            for name in options.model
            for beside, python in peers.items()
            if python is not None
        ]
        columns: Sequence[str] = (
            "model",
            "backend",
            "peer",
            "texts",
            "texts_per_s",
            "peer_texts_per_s",
            "ratio",
            "cpu_ratio",
            "others_cpus",
        )
        report(lines, columns, options.output)
    if "chat" in options.part and "llama-160m" in options.model:
        lines = [trio.run(chat, "llama-160m", options)]
        columns = ("model", "alone_p50_ms", "beside_p50_ms", "ratio", "ratio_p99", "embedded_beside")
        report(lines, columns, options.output)


if __name__ == "__main__":
    main()
