"""Pooling methods, sentence-transformers folders and classification, compared with transformers' hidden states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tests.e2e.test_embeddings import LONG, hidden_states, open_tiny
from tests.model.quantized import writers
from tests.model.tiny import VOCAB_SIZE, change_json, make_model, randomise, write_tokenizer
from triolet import ClassificationRequestOutput, PoolingParams
from triolet.errors import (
    ConfigError,
    InvalidParams,
    ModelFileError,
    UnsupportedFeature,
    UnsupportedModel,
    WeightsMismatch,
)

TYPES = ("sentence_transformers.models.", "sentence_transformers.base.modules.any_module.")


def make_folder(
    path: Path, mode: str, *, dense: bool = False, normalizes: bool = True, new: bool = False
) -> Path:
    """A sentence-transformers folder, as version 5 or version 6 writes it."""
    make_model("qwen3", path, with_tokenizer=True)
    names = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalizes]
    places = ["", *(f"{index}_{name}" for index, name in enumerate(names[1:], start=1))]
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": TYPES[new] + name}
        for index, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules[::-1]), encoding="utf-8")
    (path / "1_Pooling").mkdir()
    fields = (
        {"pooling_mode": mode} if new else {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}
    )
    (path / "1_Pooling/config.json").write_text(json.dumps(fields), encoding="utf-8")
    if dense:
        (path / "2_Dense").mkdir()
        settings = {"in_features": 64, "out_features": 24, "bias": True}
        settings["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
        (path / "2_Dense/config.json").write_text(json.dumps(settings), encoding="utf-8")
        generator = torch.Generator().manual_seed(1)
        weights = {"linear.weight": torch.randn(24, 64, generator=generator) / 8}
        weights["linear.bias"] = torch.randn(24, generator=generator)
        save_file(weights, path / "2_Dense/model.safetensors")
    return path


def dense(folder: Path, vector: Tensor) -> Tensor:
    weights = load_file(folder / "2_Dense/model.safetensors")
    return torch.tanh(functional.linear(vector, weights["linear.weight"], weights["linear.bias"]))


def finished(folder: Path, vector: Tensor) -> Tensor:
    return functional.normalize(dense(folder, vector), dim=-1)


def difference(found: Sequence[Any], expected: Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max())


@pytest.mark.parametrize(
    ("mode", "new", "method"),
    [
        ("mean_tokens", False, "MEAN"),
        ("mean", True, "MEAN"),
        ("cls_token", False, "CLS"),
        ("lasttoken", True, "LAST"),
    ],
)
async def test_a_sentence_transformers_folder_is_followed_alone_in_chunks_and_again(
    mode: str, new: bool, method: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tiny", mode, dense=True, new=new)
    hidden = hidden_states(folder, LONG)
    pooled = {"MEAN": hidden.mean(dim=0), "CLS": hidden[0], "LAST": hidden[-1]}[method]
    for budget in (512, 16):
        async with open_tiny(folder, convert="auto", max_num_batched_tokens=budget) as engine:
            assert engine.model_info.tasks == ("generate", "embed", "token_embed")
            for _ in range(2):
                output = await engine.embed(LONG)
                assert difference(output.outputs.embedding, finished(folder, pooled)) <= 1e-5
            # only the last token's state needs none of those whose KV is cached
            assert (output.num_cached_tokens > 0) == (method == "LAST")


@pytest.mark.parametrize(
    ("order", "length_is_one"),
    [((1, 3, 2), False), ((1, 3, 2, 3), True)],  # of Pooling, Dense and Normalize
)
async def test_dense_layers_and_normalisation_are_applied_in_the_order_of_the_modules(
    order: tuple[int, ...], length_is_one: bool, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tiny", "mean_tokens", dense=True)
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))[::-1]
    listed = [{**modules[place], "idx": idx} for idx, place in enumerate((0, *order))]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    pooled = functional.normalize(hidden_states(folder, LONG).mean(dim=0), dim=-1)
    normalised, plain = finished(folder, pooled), dense(folder, pooled)
    async with open_tiny(folder, convert="auto") as engine:
        output = await engine.embed(LONG)
        expected = normalised if length_is_one else plain
        assert difference(output.outputs.embedding, expected) <= 1e-5
        # a request switches the last step only
        raw = await engine.embed(LONG, PoolingParams(use_activation=False))
        assert difference(raw.outputs.embedding, plain) <= 1e-5


async def test_every_token_has_its_vector_over_chunks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "lasttoken", normalizes=False)
    params = PoolingParams(task="token_embed")
    async with open_tiny(folder, convert="auto", max_num_batched_tokens=16, num_kv_blocks=20) as engine:
        outputs = await engine.encode_all([LONG, LONG[:100], LONG[:7]], params)
    for output in outputs:
        expected = hidden_states(folder, output.prompt_token_ids)
        assert output.outputs.data.shape == tuple(expected.shape)
        assert difference(output.outputs.data.tolist(), expected) <= 1e-4  # of numbers around 1 to 10
        assert output.num_cached_tokens == 0


async def test_dimensions_are_cut_after_the_dense_layers_and_normalised(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "mean_tokens", dense=True)
    change_json(folder / "config.json", is_matryoshka=True)
    async with open_tiny(folder, convert="auto") as engine:
        cut = await engine.embed(LONG, PoolingParams(dimensions=8))
        whole = finished(folder, hidden_states(folder, LONG).mean(dim=0))
        assert difference(cut.outputs.embedding, functional.normalize(whole[:8], dim=0)) <= 1e-5
        with pytest.raises(InvalidParams, match=r"dimensions must be in \[1, 24\]"):
            await engine.embed(LONG, PoolingParams(dimensions=25))


async def test_truncate_dim_of_the_folder_cuts_embeddings_unless_a_request_gives_dimensions(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path / "tiny", "mean_tokens", dense=True)
    change_json(folder / "config.json", is_matryoshka=True)
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 16}', encoding="utf-8")
    hidden = hidden_states(folder, LONG)
    whole = finished(folder, hidden.mean(dim=0))
    async with open_tiny(folder, convert="auto") as engine:
        cut = await engine.embed(LONG)
        # As sentence-transformers does it: after the normalisation, and without another one.
        assert difference(cut.outputs.embedding, functional.normalize(whole, dim=0)[:16]) <= 1e-5
        longer = await engine.embed(LONG, PoolingParams(dimensions=20))
        assert difference(longer.outputs.embedding, functional.normalize(whole[:20], dim=0)) <= 1e-5
        [tokens] = await engine.encode_all([LONG], PoolingParams(task="token_embed"))
        assert difference(tokens.outputs.data.tolist(), finished(folder, hidden)) <= 1e-5


async def test_the_default_prompt_of_the_folder_stands_in_front_of_texts_but_not_of_token_ids(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path / "tiny", "mean_tokens")
    settings = {"prompts": {"query": "query: ", "document": "doc: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    async with open_tiny(folder, convert="auto") as engine:
        output = await engine.embed("fox")
        plain = (await engine.embed("")).prompt_token_ids
        as_ids = await engine.embed(output.prompt_token_ids)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert list(output.prompt_token_ids) == tokenizer.encode("query: fox").ids
    assert list(plain) == tokenizer.encode("query: ").ids
    assert as_ids.outputs.embedding == output.outputs.embedding
    expected = hidden_states(folder, output.prompt_token_ids).mean(dim=0)
    assert difference(output.outputs.embedding, functional.normalize(expected, dim=0)) <= 1e-5


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
CHATS = {"text": FORWARD, "message": {**FORWARD, "format": "flat"}}


async def test_a_folder_that_embeds_chats_gets_every_text_through_the_chat_template(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "lasttoken", new=True)
    # as sentence-transformers 6.2 saves a folder whose tokenizer has a chat template
    described: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
    }
    described["processing_kwargs"] = {}
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({**described, "modality_config": CHATS}), encoding="utf-8"
    )
    settings = {"prompts": {"query": "be brief"}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, text = "<|bos|><|system|>be brief<|user|>", "the fox lives in the forest"
    rendered = tokenizer.encode(start + text, add_special_tokens=False).ids
    async with open_tiny(folder, convert="auto") as engine:
        output = await engine.embed(text)
        assert list(output.prompt_token_ids) == rendered
        expected = functional.normalize(hidden_states(folder, rendered)[-1], dim=0)
        assert difference(output.outputs.embedding, expected) <= 1e-5
        [score] = await engine.score(text, text)
        assert score.outputs.score == pytest.approx(1.0, abs=1e-5)
        assert list(score.prompt_token_ids) == 2 * rendered


def describe(**fields: Any) -> Any:
    """Return what writes a description of the transformer with one more field."""
    return lambda folder: (folder / "sentence_bert_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (
            describe(transformer_task="text-generation"),
            UnsupportedModel,
            "transformer_task must be feature-extraction; got 'text-generation'",
        ),
        (
            describe(module_output_name="sentence_embedding"),
            UnsupportedModel,
            "module_output_name must be token_embeddings; got 'sentence_embedding'",
        ),
        (
            describe(processing_kwargs={"text": {"max_length": 8}}),
            UnsupportedModel,
            "processing_kwargs must be empty; got",
        ),
        (
            describe(modality_config={"text": {**FORWARD, "method": "get_text_features"}}),
            UnsupportedModel,
            r"modality_config\.text\.method must be forward; got 'get_text_features'",
        ),
        (
            describe(modality_config={"message": {**FORWARD, "format": "structured"}}),
            UnsupportedModel,
            r"modality_config\.message\.format must be flat; got 'structured'",
        ),
        (
            describe(modality_config={"image": FORWARD}),
            UnsupportedModel,
            "modality_config must have text or message",
        ),
        (lambda folder: (folder / "modules.json").write_text("{"), ModelFileError, "cannot be read as JSON"),
        (lambda folder: (folder / "modules.json").write_text("[]"), ModelFileError, "module of type Pooling"),
        (
            lambda folder: (folder / "modules.json").write_text('[{"idx": 0}]'),
            ModelFileError,
            "idx, type and path",
        ),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"idx": 1, "type": "Pooling", "path": "../elsewhere"}]'
            ),
            ModelFileError,
            "must lie in the folder",
        ),
        (
            lambda folder: (folder / "modules.json").write_text('[{"idx": 1, "type": "LSTM", "path": ""}]'),
            UnsupportedModel,
            "got 'LSTM'",
        ),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"idx": 1, "type": "Normalize", "path": ""}]'
            ),
            UnsupportedModel,
            "Normalize must come after Pooling",
        ),
        (
            lambda folder: (folder / "config_sentence_transformers.json").write_text(
                '{"prompts": {"query": "query: "}, "default_prompt_name": "document"}'
            ),
            ModelFileError,
            "default_prompt_name must be a name in prompts; got 'document'",
        ),
        (
            lambda folder: change_json(folder / "1_Pooling/config.json", pooling_mode_max_tokens=True),
            UnsupportedModel,
            "exactly one pooling_mode",
        ),
        (
            lambda folder: change_json(folder / "2_Dense/config.json", activation_function="os.system"),
            UnsupportedModel,
            "got 'os.system'",
        ),
        (
            lambda folder: change_json(folder / "2_Dense/config.json", in_features=63),
            Exception,
            "63",
        ),
    ],
)
async def test_a_wrong_folder_is_refused_by_file_and_field(
    spoil: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tiny", "mean_tokens", dense=True)
    spoil(folder)
    with pytest.raises(error, match=text):
        async with open_tiny(folder, convert="auto"):
            pytest.fail("it has started")


# ------------------------------------------------------------------------------------ classification


@pytest.mark.parametrize(("num_labels", "family"), [(3, "Qwen3"), (1, "Llama"), (3, "Gemma3Text")])
async def test_a_sequence_classification_equals_transformers(
    num_labels: int, family: str, tmp_path: Path
) -> None:
    base = make_model(
        {"Qwen3": "qwen3", "Llama": "llama-plain", "Gemma3Text": "gemma3"}[family],
        tmp_path / "base",
        with_tokenizer=True,
    )
    kind = getattr(transformers, f"{family}ForSequenceClassification")
    reference = kind.from_pretrained(base, num_labels=num_labels, dtype=torch.float32).eval()
    reference.config.pad_token_id = 0
    reference.save_pretrained(base)
    with torch.no_grad():
        [logits] = reference(torch.tensor([LONG])).logits
    probabilities = logits.softmax(dim=0) if num_labels > 1 else logits.sigmoid()
    for budget in (512, 16):
        async with open_tiny(base, convert="auto", max_num_batched_tokens=budget) as engine:
            assert engine.model_info.tasks == ("classify", "token_classify")
            [output] = await engine.encode_all([LONG])
            found = ClassificationRequestOutput.from_base(output).outputs
            assert found.num_classes == num_labels
            assert difference(found.probs, probabilities) <= 1e-5
            [raw] = await engine.encode_all([LONG], PoolingParams(use_activation=False))
            assert difference(raw.outputs.data.tolist(), logits) <= 1e-5
            steps = PoolingParams(task="token_classify", step_tag_id=LONG[3], use_activation=False)
            [tagged] = await engine.encode_all([LONG], steps)
            assert tagged.outputs.data.shape == (LONG.count(LONG[3]), num_labels)
            with pytest.raises(UnsupportedFeature, match="got 'generate'"):
                await engine.complete(LONG)
            with pytest.raises(InvalidParams, match="dimensions must be None for task classify"):
                await engine.encode_all([LONG], PoolingParams(dimensions=2))


@pytest.mark.parametrize(
    ("architecture", "num_labels"),
    [("Qwen2ForProcessRewardModel", 2), pytest.param("Qwen2ForRewardModel", 1, marks=pytest.mark.slow)],
)
async def test_a_reward_model_scores_each_token_by_its_head_of_two_layers(
    architecture: str, num_labels: int, tmp_path: Path
) -> None:
    folder = make_model("qwen2", tmp_path / "tiny", with_tokenizer=True)
    generator = torch.Generator().manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_labels))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        scores = head(hidden_states(folder, LONG))
    expected = scores.softmax(dim=-1) if num_labels > 1 else scores
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": value.detach() for name, value in head.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(folder / "config.json", architectures=[architecture])
    async with open_tiny(folder, convert="auto", max_num_batched_tokens=16) as engine:
        assert engine.model_info.tasks == ("token_classify",)
        [output] = await engine.encode_all([LONG])
        assert difference(output.outputs.data.tolist(), expected) <= 1e-5
        params = PoolingParams(step_tag_id=LONG[3])
        [steps] = await engine.encode_all([LONG], params)
    places = [place for place, token_id in enumerate(LONG) if token_id == LONG[3]]
    assert difference(steps.outputs.data.tolist(), expected[places]) <= 1e-5


def yes_probabilities(folder: Path) -> Tensor:
    """Probability of `y` against `n` after each token, by transformers."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    no, yes = (tokenizer["model"]["vocab"][letter] for letter in "ny")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([LONG])).logits[0]
    return (logits[:, yes] - logits[:, no]).sigmoid()


async def check_reranker(folder: Path, expected: Tensor) -> None:
    async with open_tiny(folder, convert="auto", classifier_from_token=("n", "y")) as engine:
        assert engine.model_info.tasks == ("classify", "token_classify")
        [output] = await engine.encode_all([LONG])
        assert difference(output.outputs.data.tolist(), expected[-1]) <= 1e-5
        [tokens] = await engine.encode_all([LONG], PoolingParams(task="token_classify"))
        assert difference(tokens.outputs.data.tolist(), expected[:, None]) <= 1e-5


# Granite and Cohere 2 scale their logits, Gemma 2 caps them, and the head of Phi has a bias.
@pytest.mark.parametrize(
    "family",
    ["qwen3", "granite", "gemma2", "phi", pytest.param("cohere2", marks=pytest.mark.slow)],
)
async def test_a_reranker_scores_by_the_logits_of_two_tokens(family: str, tmp_path: Path) -> None:
    folder = make_model(family, tmp_path / "tiny", with_tokenizer=True)
    await check_reranker(folder, yes_probabilities(folder))


async def test_a_reranker_of_the_transformers_backend_scores_by_the_logits_of_its_last_token(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    config = transformers.OlmoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    model = transformers.OlmoForCausalLM(config)
    randomise(model, seed=0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    await check_reranker(folder, yes_probabilities(folder))


async def test_a_reranker_reads_a_quantised_head(tmp_path: Path) -> None:
    plain, quantized = (
        make_model("llama-plain", tmp_path / name, with_tokenizer=True) for name in ("plain", "quantized")
    )
    tensors = load_file(plain / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    parts, weight = writers.gptq(4, 32)(np.random.default_rng(0), *head.shape)
    stored = {f"lm_head.{part}": each.contiguous() for part, each in parts.items()}
    save_file(tensors | stored, quantized / "model.safetensors", metadata={"format": "pt"})
    tensors["lm_head.weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    change_json(quantized / "config.json", quantization_config=section)
    await check_reranker(quantized, yes_probabilities(plain))
    async with open_tiny(quantized) as engine:
        assert engine.model_info.tasks == ("generate", "embed", "token_embed")


async def test_a_reranker_without_a_head_is_refused_unless_its_embedding_is_tied(tmp_path: Path) -> None:
    folder = make_model("llama-plain", tmp_path / "tiny", with_tokenizer=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight"):
        async with open_tiny(folder, convert="auto", classifier_from_token=("n", "y")):
            pytest.fail("it has started")


async def test_the_tokens_of_a_reranker_may_stand_in_its_configuration(tmp_path: Path) -> None:
    folder = make_model("qwen3", tmp_path / "tiny", with_tokenizer=True)
    with pytest.raises(ConfigError, match="classifier_from_token"):
        async with open_tiny(folder, convert="classify"):
            pytest.fail("it has started")
    change_json(folder / "config.json", classifier_from_token=["n", "y"])
    async with open_tiny(folder, convert="classify") as engine:
        [output] = await engine.encode_all([LONG])
    assert difference(output.outputs.data.tolist(), yes_probabilities(folder)[-1]) <= 1e-5


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "Qwen3Model"),
        ("gemma3", "Gemma3TextModel"),
        pytest.param("qwen3.5", "Qwen3_5TextModel", marks=pytest.mark.slow),
    ],
)
async def test_a_class_without_a_head_gives_embeddings_and_generates_nothing(
    family: str, name: str, tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path / "tiny", with_tokenizer=True)
    expected = functional.normalize(hidden_states(folder, LONG)[-1], dim=0)
    headless = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    headless.save_pretrained(folder)
    async with open_tiny(folder, convert="auto") as engine:
        assert engine.model_info.tasks == ("embed", "token_embed")
        assert difference((await engine.embed(LONG)).outputs.embedding, expected) <= 1e-5
