"""The transformers backend, held against transformers' own attention and cache on the same small random weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from triolet.errors import ModelFileError, RemoteCodeRefused, UnsupportedModel, WeightsMismatch
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.backends.transformers_attention import (
    MaskRule,
    TransformersAttentionCall,
    refuse_unsupported_call,
)
from triolet.model.backends.transformers_backend import load_transformers_model
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache, LayerCacheSpec

BLOCK_SIZE = 4
SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
# name -> (architecture, what its config has beyond SMALL); each is here for something that the others lack.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),  # norms over all heads together
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),  # a window that the tests outgrow
    "cohere2": ("Cohere2", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "granite": ("Granite", {"attention_multiplier": 0.4, "logits_scaling": 2.0}),  # a scale of its own
    "gpt_neox": ("GPTNeoX", {}),  # heads that rotate in part, parallel residual
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),  # learned positions with an offset
    "gemma2": (  # soft cap
        "Gemma2",
        dict(attn_logit_softcapping=2.0, head_dim=16, sliding_window=8, tie_word_embeddings=False),
    ),
    "gpt_bigcode": ("GPTBigCode", {}),  # one head of keys and values
    "deepseek_v2": (  # keys wider than values
        "DeepseekV2",
        dict(
            num_key_value_heads=4,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    ),
}
PROMPT = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(1)).tolist()


@attrs.frozen(eq=False)
class Pair:
    """One model twice: as transformers runs it, and over our paged cache."""

    own: Any
    paged: CausalModel

    def greedy_and_generated(self, count: int) -> tuple[list[int], list[int]]:
        """The most likely tokens behind PROMPT: of chunks and decodes over our cache, and of transformers' generate."""
        sequences, greedy = Sequences(self.paged), list[int]()
        for part in chunks_of(PROMPT, 7):
            logits = sequences.step({"a": part})["a"]
        while len(greedy) < count:
            greedy.append(int(logits[-1].argmax()))
            logits = sequences.step({"a": greedy[-1:]})["a"]
        prompt = torch.tensor([PROMPT])
        generated = self.own.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        return greedy, generated[0, len(PROMPT) :].tolist()


@attrs.define(eq=False)
class Sequences:
    """Sequences over one paged cache, their blocks handed out from the end so that none lies in order."""

    model: CausalModel
    cache: tuple[LayerCache, ...] = ()
    tables: dict[str, list[int]] = attrs.field(factory=dict)
    lengths: dict[str, int] = attrs.field(factory=dict)
    free: list[int] = attrs.field(factory=lambda: list(range(100)))

    def __attrs_post_init__(self) -> None:
        spec = self.model.spec
        self.cache = tuple(
            LayerCache(*torch.zeros(2, 100, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype=spec.dtype))
            for layer in spec.cache_layers
        )

    def step(self, chunks: Mapping[str, Sequence[int]], num_padding: int = 0) -> dict[str, Tensor]:
        """Compute one chunk of each sequence named; return all its logits, [tokens of the chunk, vocab_size]."""
        tokens = [token for chunk in chunks.values() for token in chunk] + [0] * num_padding
        positions: list[int] = []
        slots: list[int] = []
        rows: dict[str, slice] = {}
        for name, chunk in chunks.items():
            start, table = self.lengths.get(name, 0), self.tables.setdefault(name, [])
            self.lengths[name] = end = start + len(chunk)
            while len(table) * BLOCK_SIZE < end:
                table.append(self.free.pop())
            rows[name] = slice(len(positions), len(positions) + len(chunk))
            positions += range(start, end)
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
        metadata = self._metadata(
            list(chunks), [len(chunk) for chunk in chunks.values()], slots + [-1] * num_padding
        )
        logits = self.model.forward_logits(
            ForwardBatch(
                token_ids=torch.tensor(tokens),
                positions=torch.tensor(positions + [0] * num_padding),
                cache=self.cache,
                attention=metadata,
                logits_indices=torch.arange(len(positions)),
            )
        )
        assert logits.shape == (len(positions), self.model.spec.vocab_size)
        return {name: logits[row] for name, row in rows.items()}

    def _metadata(self, names: list[str], query_lens: list[int], slots: list[int]) -> AttentionMetadata:
        seq_lens = [self.lengths[name] for name in names]
        widest = max(len(self.tables[name]) for name in names)
        tables = [self.tables[name] + [-1] * (widest - len(self.tables[name])) for name in names]
        return AttentionMetadata(
            cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
        )


def save_model(folder: Path, architecture: str, **fields: Any) -> Any:
    """Write a small random model to `folder`; return it."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    # a name that the class does not know would be written, too, and hide that published configs lack it
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    small = {name: value for name, value in SMALL.items() if name in known}
    model = model_class(config_class(**{**small, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)  # so far from zero that attention decides what comes next
    model.save_pretrained(folder)
    return model


def load(
    folder: Path,
    *,
    trust: bool = False,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
) -> CausalModel:
    config = json.loads((folder / "config.json").read_text())
    return load_transformers_model(folder, config, dtype, "cpu", trust, max_model_len)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def chunks_of(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Each family's pair, made when it is first asked for."""
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            architecture, fields = FAMILIES[family]
            made[family] = Pair(save_model(folder, f"{architecture}ForCausalLM", **fields), load(folder))
        return made[family]

    return pair


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chunks_and_decodes_equal_those_of_transformers(
    pairs: Callable[[str], Pair], family: str
) -> None:
    pair = pairs(family)
    sequences = Sequences(pair.paged)
    parts = [*chunks_of(PROMPT[:21], 7), *chunks_of(PROMPT[21:], 1)]
    got = torch.cat([sequences.step({"a": part})["a"] for part in parts])
    with torch.no_grad():
        wanted = pair.own(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


# Of the others the logits say as much, which are compared above, in a fraction of the time.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "olmo2" else pytest.mark.slow) for name in FAMILIES]
)
def test_48_greedy_tokens_equal_those_of_generate(pairs: Callable[[str], Pair], family: str) -> None:
    greedy, wanted = pairs(family).greedy_and_generated(48)
    assert greedy == wanted
    assert len(set(greedy)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_in_a_mixed_batch_gets_the_logits_it_gets_alone(
    pairs: Callable[[str], Pair], family: str
) -> None:
    paged = pairs(family).paged
    prompts = {"long": PROMPT, "short": PROMPT[5:8], "middle": PROMPT[10:23]}
    alone = {name: Sequences(paged).step({name: prompt})[name] for name, prompt in prompts.items()}
    sequences = Sequences(paged)
    steps = [  # a chunk, a prompt and a decode stand in one row; "short" is done while others still begin
        {"long": PROMPT[:11], "short": PROMPT[5:7]},
        {"short": PROMPT[7:8], "middle": PROMPT[10:22], "long": PROMPT[11:13]},
        {"long": PROMPT[13:], "middle": PROMPT[22:23]},
    ]
    got: dict[str, list[Tensor]] = {}
    for step in steps:
        for name, logits in sequences.step(step, num_padding=2).items():
            got.setdefault(name, []).append(logits)
    for name, wanted in alone.items():
        torch.testing.assert_close(torch.cat(got[name]), wanted, atol=1e-4, rtol=0)


def test_only_the_rows_that_are_asked_for_reach_the_head(pairs: Callable[[str], Pair]) -> None:
    paged: Any = pairs("olmo2").paged
    shapes: list[torch.Size] = []
    hook = paged.model.lm_head.register_forward_pre_hook(
        lambda _module, inputs: shapes.append(inputs[0].shape)
    )
    sequences = Sequences(paged)
    sequences.step({"a": PROMPT[:7]})
    sequences.step({"a": PROMPT[7:9]}, num_padding=3)
    hook.remove()
    assert shapes == [(1, 7, 64), (1, 2, 64)]


def test_models_in_one_process_do_not_see_each_other(pairs: Callable[[str], Pair]) -> None:
    models = {family: Sequences(pairs(family).paged) for family in ("olmo2", "starcoder2")}
    got: dict[str, list[Tensor]] = {family: [] for family in models}
    for part in chunks_of(PROMPT, 7):
        for family, sequences in models.items():
            got[family].append(sequences.step({"a": part})["a"])
    for family in models:
        with torch.no_grad():
            wanted = pairs(family).own(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(torch.cat(got[family]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_logits_have_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    own = save_model(tmp_path, "Olmo2ForCausalLM").to(dtype)
    paged = load(tmp_path, dtype=dtype)
    logits = Sequences(paged).step({"a": PROMPT})["a"]
    assert paged.spec.dtype == logits.dtype == dtype
    with torch.no_grad():
        wanted = own(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=0.1, rtol=0.1)


# ---------------------------------------------------------------------------------------------------- what it says


def test_the_spec_tells_architecture_vocabulary_positions_and_cache(pairs: Callable[[str], Pair]) -> None:
    spec = pairs("cohere2").paged.spec
    assert (spec.architecture, spec.backend) == ("Cohere2ForCausalLM", "transformers")
    assert (spec.vocab_size, spec.max_position) == (128, 128)
    assert spec.cache_layers == (LayerCacheSpec(num_kv_heads=2, head_dim=16),) * 2
    assert spec.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4


def test_keys_wider_than_values_share_a_cache_of_the_keys_width(pairs: Callable[[str], Pair]) -> None:
    assert pairs("deepseek_v2").paged.spec.cache_layers[0] == LayerCacheSpec(num_kv_heads=4, head_dim=24)


def test_longrope_ends_at_the_original_context(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = dict(
        rope_type="longrope",
        short_factor=factors,
        long_factor=[4.0] * 8,
        rope_theta=1e4,
        original_max_position_embeddings=32,
    )
    save_model(tmp_path, "Olmo2ForCausalLM", rope_parameters=rope)
    assert load(tmp_path).spec.max_position == 32


# -------------------------------------------------------------------------------------------------------- refusals


def test_architectures_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def refused(match: str, **config: Any) -> None:
        with pytest.raises(UnsupportedModel, match=match):
            load_transformers_model(tmp_path, config, torch.float32, "cpu", False)

    refused("MambaForCausalLM", model_type="mamba", architectures=["MambaForCausalLM"])
    refused(
        "RecurrentGemma.*state", model_type="recurrent_gemma", architectures=["RecurrentGemmaForCausalLM"]
    )
    refused("NoSuchForCausalLM.*'nosuch'", model_type="nosuch", architectures=["NoSuchForCausalLM"])
    refused("Olmo2ForSequence.*", model_type="olmo2", architectures=["Olmo2ForSequenceClassification"])
    refused(
        "encoder-decoder",
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        is_encoder_decoder=True,
    )
    refused("one class.*None|one class.*\\[\\]", model_type="olmo2")
    refused("'awq'", model_type="olmo2", architectures=["Olmo2"], quantization_config={"quant_method": "awq"})
    refused(
        "no causal", model_type="nosuch", architectures=["NoSuch"], quantization_config=None, auto_map=None
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization_config": "awq"},
        {"auto_map": ["own.py"]},
        {"model_type": ["olmo2"]},
        {"architectures": "Olmo2"},
    ],
)
def test_a_config_field_of_the_wrong_type_is_an_error_that_names_it(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **wrong}
    with pytest.raises(ModelFileError, match=f"{next(iter(wrong))} must be"):
        load_transformers_model(tmp_path, config, torch.float32, "cpu", False)


@pytest.mark.parametrize(
    ("architecture", "fields", "match"),
    [
        ("MiniMaxForCausalLM", dict(head_dim=16, num_local_experts=2), "linear_attention"),
        ("BertLMHeadModel", {}, "both directions.*own attention.*deviations"),
    ],
)
def test_attention_of_another_kind_is_refused_by_name(
    tmp_path: Path, architecture: str, fields: dict[str, Any], match: str
) -> None:
    save_model(tmp_path, architecture, **fields)
    with pytest.raises(UnsupportedModel, match=match):
        load(tmp_path)


def attention_call(mask: object = None, **options: Any) -> TransformersAttentionCall:
    return TransformersAttentionCall(
        torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8), mask, options
    )


def test_a_mask_with_another_rule_than_ours_is_refused() -> None:
    causal = MaskRule(lambda _batch, _head, query, key: key <= query)
    window = MaskRule(lambda _batch, _head, query, key: (key <= query) & (key > query - 8))
    chunked = MaskRule(lambda _batch, _head, query, key: (key <= query) & (key // 600 == query // 600))
    prefix = MaskRule(lambda _batch, _head, query, key: (key <= query) | (key < 4))

    def check(mask: MaskRule, **options: Any) -> None:
        refuse_unsupported_call(nn.Identity(), attention_call(mask, **options), 2, 1024)

    check(causal)
    check(window, sliding_window=8)
    with pytest.raises(UnsupportedModel, match="Identity shows position 0 from the token at position 8"):
        check(causal, sliding_window=8)
    with pytest.raises(UnsupportedModel, match="hides position 0 from the token at position 8"):
        check(window)
    with pytest.raises(UnsupportedModel, match="sliding_window=9"):
        check(window, sliding_window=9)
    with pytest.raises(UnsupportedModel, match="hides position"):
        check(chunked)
    with pytest.raises(UnsupportedModel, match="shows position"):
        check(prefix)


def test_what_paged_attention_would_leave_out_is_refused() -> None:
    def check(call: TransformersAttentionCall) -> None:
        refuse_unsupported_call(nn.Identity(), call, 2, 1024)

    check(attention_call(dropout=0.0, position_ids=torch.zeros(1), s_aux=None))
    with pytest.raises(UnsupportedModel, match="'position_bias'"):
        check(attention_call(position_bias=torch.zeros(1)))
    with pytest.raises(UnsupportedModel, match="mask of its own"):
        check(attention_call(mask=torch.zeros(2, 2)))
    with pytest.raises(UnsupportedModel, match="both directions"):
        check(attention_call(is_causal=False))
    three = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedModel, match=r"keys of .* for 2 tokens"):
        check(attrs.evolve(attention_call(), key=three, value=three))


# ------------------------------------------------------------------------------------------- code that models bring


CODE = """
from pathlib import Path
from transformers import Olmo2Config, Olmo2ForCausalLM

Path({marker!r}).touch()


class OwnConfig(Olmo2Config):
    model_type = "own"


class OwnForCausalLM(Olmo2ForCausalLM):
    config_class = OwnConfig
{body}
"""
COUNTS_POSITIONS = """
    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, Path]]:
    """Write a model with code of its own; return its folder, and a file that is there once the code has run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def write(body: str) -> tuple[Path, Path]:
        folder, marker = tmp_path / "own", tmp_path / "ran"
        save_model(folder, "Olmo2ForCausalLM")
        (folder / "own_code.py").write_text(CODE.format(marker=str(marker), body=body))
        auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
        change_config(folder, auto_map=auto_map, architectures=["OwnForCausalLM"], model_type="own")
        return folder, marker

    return write


def test_code_in_the_folder_does_not_run_unless_it_is_trusted(
    own_code: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, marker = own_code("    pass")
    with pytest.raises(RemoteCodeRefused, match="trust_remote_code must be true"):
        load(folder)
    assert not marker.exists()
    paged = load(folder, trust=True)
    assert marker.exists()
    assert paged.spec.architecture == "OwnForCausalLM"
    assert Sequences(paged).step({"a": PROMPT})["a"].isfinite().all()


def test_a_model_that_counts_positions_itself_is_refused_with_the_measured_difference(
    own_code: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, _ = own_code(COUNTS_POSITIONS)
    with pytest.raises(
        UnsupportedModel, match=r"OwnForCausalLM computes other logits .* by 0\.\d+ standard dev"
    ):
        load(folder, trust=True)


# --------------------------------------------------------------------------------------------------------- weights


def test_missing_unused_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "Olmo2ForCausalLM")

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(5, 3)

    change_weights(tmp_path, spoil)
    with pytest.raises(WeightsMismatch) as caught:
        load(tmp_path)
    assert caught.value.missing == ("model.norm.weight",)
    assert caught.value.unused == ("model.extra.weight",)
    assert caught.value.misshapen == ("lm_head.weight must be (128, 64); got (5, 3)",)


def test_a_tied_head_needs_no_tensor_and_an_untied_one_does(tmp_path: Path) -> None:
    save_model(tmp_path, "Olmo2ForCausalLM", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load(tmp_path).spec.vocab_size == 128
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightsMismatch, match=r"missing tensors: lm_head\.weight"):
        load(tmp_path)


def test_shards_are_read_and_a_missing_or_truncated_one_is_named(tmp_path: Path) -> None:
    own = save_model(tmp_path, "Olmo2ForCausalLM")
    (tmp_path / "model.safetensors").unlink()
    own.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    got = Sequences(load(tmp_path)).step({"a": PROMPT})["a"]
    with torch.no_grad():
        torch.testing.assert_close(got, own(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=shards[1].name):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelFileError, match=shards[1].name):
        load(tmp_path)


def test_a_config_that_no_model_can_be_built_from_is_a_model_file_error(tmp_path: Path) -> None:
    save_model(tmp_path, "Olmo2ForCausalLM")
    change_config(tmp_path, hidden_act="no-such-activation")
    with pytest.raises(ModelFileError, match="no-such-activation"):
        load(tmp_path)
