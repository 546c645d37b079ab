"""What a model folder says about pooling: config.json, and the modules of a sentence-transformers folder.

A sentence-transformers folder lists its modules in modules.json: the transformer, then pooling, dense layers and
normalisation, in the order in which they are applied. Modules are told by the last part of their type's dotted name,
which has moved between versions. A folder without that file is described by the architecture in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from triolet.core.request.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED
from triolet.errors import ConfigError, ModelFileError, UnsupportedModel, shown
from triolet.model.architectures.families import is_bidirectional, native_family
from triolet.model.folder.json_fields import Fields, read_json_object

CLASSIFIER = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"
REWARD, PROCESS_REWARD = "ForRewardModel", "ForProcessRewardModel"
HEADLESS = "Model"
MASKED = "ForMaskedLM"  # trained to fill gaps: without that head it is a model of embeddings
ENCODER_ENDINGS = (
    HEADLESS,
    MASKED,
    CLASSIFIER,
    TOKEN_CLASSIFIER,
)  # of classes that may attend in both directions
_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_OLD_MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
_OTHER_OLD_MODES = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
# What a sentence-transformers folder may say of its transformer, of each kind of input, and of chats.
TRANSFORMER_TEXTS = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
FORWARD_TEXTS = {"method": "forward", "method_output_name": "last_hidden_state"}
MESSAGE_TEXTS = {**FORWARD_TEXTS, "format": "flat"}
ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU", "Sigmoid", "SiLU")


@attrs.frozen(kw_only=True)
class DenseConfig:
    """Dense module of a sentence-transformers folder."""

    folder: Path  # where its weights are
    in_features: int
    out_features: int
    bias: bool
    activation: str  # name in torch.nn
    normalizes_input: bool = False  # whether a Normalize stands in front of it


@attrs.frozen(kw_only=True)
class PoolingConfig:
    """Pooling of a model folder."""

    tasks: tuple[str, ...]
    method: str = "LAST"
    dense: tuple[DenseConfig, ...] = ()
    normalizes: bool = True  # whether an embedding has length 1 by default
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = "none"  # of class scores: `softmax`, `sigmoid` or `none`
    has_deep_head: bool = False  # whether the head of the scores is linear, ReLU, linear
    default_prompt: str = ""  # in front of every text that is embedded
    is_rendered: bool = False  # whether a text that is embedded becomes the message of a chat
    truncate_dim: int | None = None  # numbers to which an embedding is cut where a request does not say
    max_seq_length: int | None = None  # longest prompt that the folder allows, tokens
    # Texts of the tokens whose difference in logits is the score: no, yes.
    classifier_tokens: tuple[str, ...] = ()


def read_pooling_config(
    folder: Path, config: dict[str, Any], architecture: str, convert: str
) -> PoolingConfig | None:
    """Read what a folder says about pooling; None for a model that only generates.

    Args:
        folder: of the model.
        config: its config.json.
        architecture: from there.
        convert: what the operator wants: `auto`, `embed` or `classify`.
    Raises:
        ConfigError: the model cannot do what `convert` asks for.
        ModelFileError: a file is missing or wrong.
        UnsupportedModel: a module that is not supported.
    """
    fields = Fields(folder / "config.json", config)
    classifiers = CLASSIFIER, TOKEN_CLASSIFIER, REWARD, PROCESS_REWARD
    if convert != "embed" and (architecture.endswith(classifiers) or convert == "classify"):
        if architecture.endswith((REWARD, PROCESS_REWARD)):
            return _reward_model(architecture)
        return _classifier(fields, architecture)
    if architecture.endswith(classifiers):
        raise ConfigError("convert", f"auto or classify for {architecture}", convert)
    modules = folder / "modules.json"
    if convert == "auto" and not modules.exists() and not architecture.endswith((HEADLESS, MASKED)):
        return None
    if architecture == "GPT2LMHeadModel" and convert == "auto" and not modules.exists():
        return None
    dimensions = fields.integers("matryoshka_dimensions")
    found = PoolingConfig(
        tasks=(EMBED, TOKEN_EMBED),
        method=_default_method(fields, architecture),
        is_matryoshka=fields.flag("is_matryoshka", False) or bool(dimensions),
        matryoshka_dimensions=dimensions,
    )
    if not modules.exists():
        return found
    return _with_settings(_with_modules(found, modules), folder / "config_sentence_transformers.json")


def _default_method(fields: Fields, architecture: str) -> str:
    """Return the pooling of a folder without modules.json, as vLLM chooses it."""
    if is_bidirectional(fields.values):
        return "MEAN"
    # Only in an encoder has the first token seen the others.
    return (
        "CLS"
        if architecture.endswith((HEADLESS, MASKED)) and native_family(architecture, fields.values) is None
        else "LAST"
    )


def _classifier(fields: Fields, architecture: str) -> PoolingConfig:
    tokens = fields.texts("classifier_from_token") or ()
    if not architecture.endswith((CLASSIFIER, TOKEN_CLASSIFIER)) and len(tokens) != 2:
        raise ConfigError(
            "convert",
            f"auto or embed for {architecture}, unless its config.json names two tokens in classifier_from_token, "
            "such as ['no', 'yes']",
            "classify",
        )
    names = fields.values.get("id2label")
    labels: tuple[str, ...] = ()
    if isinstance(names, dict):
        labels = tuple(str(names[key]) for key in sorted(names, key=int))
    count = 1 if len(tokens) == 2 else fields.integer("num_labels", len(labels) or 2)
    labels = labels if len(labels) == count else tuple(f"LABEL_{index}" for index in range(count))
    default = "sigmoid" if count < 2 else "softmax"
    by_problem = {"regression": "none", "multi_label_classification": "sigmoid"}
    by_problem["single_label_classification"] = default
    activation = (
        by_problem.get(fields.text("problem_type", "")) or _cross_encoder_activation(fields) or default
    )
    tasks: tuple[str, ...] = (CLASSIFY, TOKEN_CLASSIFY)
    if architecture.endswith(TOKEN_CLASSIFIER):
        tasks = (TOKEN_CLASSIFY,)
    elif len(tokens) != 2 and (
        is_bidirectional(fields.values) or native_family(architecture, fields.values) is None
    ):
        # an encoder's head reads the whole prompt
        tasks = (CLASSIFY,)
    return PoolingConfig(
        tasks=tasks,
        method="LAST" if TOKEN_CLASSIFY in tasks else "CLS",
        labels=labels,
        activation=activation,
        classifier_tokens=tokens,
    )


def _reward_model(architecture: str) -> PoolingConfig:
    """Return the pooling of Qwen's reward models: a score for each token, by a head of two layers."""
    if architecture.endswith(PROCESS_REWARD):  # the probability that a step of a solution is wrong, or right
        return PoolingConfig(
            tasks=(TOKEN_CLASSIFY,),
            method="STEP",
            labels=("LABEL_0", "LABEL_1"),
            activation="softmax",
            has_deep_head=True,
        )
    return PoolingConfig(tasks=(TOKEN_CLASSIFY,), method="ALL", labels=("LABEL_0",), has_deep_head=True)


def _cross_encoder_activation(fields: Fields) -> str | None:
    """Return the activation that sentence-transformers wrote into config.json; None if it wrote none."""
    section = fields.section("sentence_transformers")
    dotted = "" if section is None else section.text("activation_fn", "")
    dotted = dotted or fields.text("sbert_ce_default_activation_function", "")
    if not dotted:
        return None
    known = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith("torch.nn.modules.") or name not in known:
        raise UnsupportedModel(
            f"{fields.path}: activation_fn must be torch.nn.modules' {', '.join(known)}; got {dotted!r}"
        )
    return known[name]


def _with_modules(config: PoolingConfig, path: Path) -> PoolingConfig:
    """Add the modules of a sentence-transformers folder."""
    normalizes, method, dense = False, "", []
    for module in _modules(path):
        place = path.parent / module["path"]
        match module["type"].rsplit(".", 1)[-1]:
            case "Transformer":
                config = _with_transformer(config, place / "sentence_bert_config.json")
            case "Pooling":
                method = _method(place / "config.json")
            case "Dense" | "Normalize" as name if not method:
                raise UnsupportedModel(f"{path}: {name} must come after Pooling")
            case "Dense":
                dense.append(_dense(place, normalizes_input=normalizes))
                normalizes = False
            case "Normalize":
                normalizes = True
            case other:
                raise UnsupportedModel(f"{path}: a module must be Pooling, Dense or Normalize; got {other!r}")
    if not method:
        raise ModelFileError(path, "must list a module of type Pooling")
    return attrs.evolve(config, method=method, dense=tuple(dense), normalizes=normalizes)


def _with_settings(config: PoolingConfig, path: Path) -> PoolingConfig:
    if not path.exists():
        return config
    fields = Fields(path, read_json_object(path))
    name, prompts = fields.text("default_prompt_name", ""), fields.section("prompts")
    if name and (prompts is None or name not in prompts):
        raise fields.wrong("default_prompt_name", "a name in prompts")
    return attrs.evolve(
        config,
        default_prompt="" if prompts is None or not name else prompts.text(name, ""),
        truncate_dim=fields.optional_integer("truncate_dim"),
    )


def _with_transformer(config: PoolingConfig, path: Path) -> PoolingConfig:
    if not path.exists():
        return config
    fields = Fields(path, read_json_object(path))
    if fields.flag("do_lower_case", False):
        raise UnsupportedModel(
            f"{path}: do_lower_case must be false: the tokenizer decides on the case of letters"
        )
    if kwargs := fields.values.get("processing_kwargs"):
        raise UnsupportedModel(f"{path}: processing_kwargs must be empty; got {shown(kwargs)}")
    _check_texts(fields, TRANSFORMER_TEXTS)
    is_rendered = False
    if (kinds := fields.section("modality_config")) is not None:
        # Where a folder has a kind `message`, sentence-transformers makes one of every text.
        is_rendered = "message" in kinds
        if (kind := kinds.section("message" if is_rendered else "text")) is None:
            raise UnsupportedModel(f"{path}: modality_config must have text or message")
        _check_texts(kind, MESSAGE_TEXTS if is_rendered else FORWARD_TEXTS)
    return attrs.evolve(
        config, max_seq_length=fields.optional_integer("max_seq_length"), is_rendered=is_rendered
    )


def _check_texts(fields: Fields, supported: Mapping[str, str]) -> None:
    """Refuse a field that says something else than what is supported; one that is absent says that."""
    for name, value in supported.items():
        if (got := fields.text(name, value)) != value:
            raise UnsupportedModel(f"{fields.path}: {fields.prefix}{name} must be {value}; got {got!r}")


def module_folders(folder: Path) -> list[Path]:
    """Return the folders of a model that its modules.json names; none without that file.

    Raises:
        ModelFileError: the file is wrong.
    """
    path = folder / "modules.json"
    named = [folder / module["path"] for module in _modules(path)] if path.exists() else []
    # The transformer's is the model's own folder, and a normalisation needs none.
    return [place for place in named if place.is_dir() and not place.samefile(folder)]


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(path, f"cannot be read as JSON: {error}") from error
    good = isinstance(modules, list) and all(
        isinstance(module, dict)
        and isinstance(module.get("type"), str)
        and isinstance(module.get("path"), str)
        and isinstance(module.get("idx"), int)
        for module in modules
    )
    if not good:
        raise ModelFileError(path, "must hold a list of objects with idx, type and path")
    for module in modules:
        # the folder is written by others, and may not lead out of itself
        if not (path.parent / module["path"]).resolve().is_relative_to(path.parent.resolve()):
            raise ModelFileError(path, f"path must lie in the folder; got {module['path']!r}")
    return sorted(modules, key=lambda module: module["idx"])


def _method(path: Path) -> str:
    fields = Fields(path, read_json_object(path))
    mode = fields.text("pooling_mode", "")
    if not mode:
        others = [name for name in _OTHER_OLD_MODES if fields.flag(f"pooling_mode_{name}", False)]
        modes = [mode for name, mode in _OLD_MODES.items() if fields.flag(f"pooling_mode_{name}", False)]
        modes += others
        if len(modes) != 1:
            raise UnsupportedModel(f"{path}: exactly one pooling_mode_... must be true; got {modes}")
        mode = modes[0]
    if mode not in _MODES:
        raise UnsupportedModel(f"{path}: pooling_mode must be one of {', '.join(_MODES)}; got {mode!r}")
    if not fields.flag("include_prompt", True):
        raise UnsupportedModel(f"{path}: include_prompt must be true")
    return _MODES[mode]


def _dense(folder: Path, *, normalizes_input: bool) -> DenseConfig:
    fields = Fields(folder / "config.json", read_json_object(folder / "config.json"))
    dotted = fields.text("activation_function", "torch.nn.modules.linear.Identity")
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith("torch.nn.modules.") or name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{fields.path}: activation_function must be torch.nn.modules' {', '.join(ACTIVATIONS)}; got {dotted!r}"
        )
    _check_texts(fields, dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding"))
    return DenseConfig(
        folder=folder,
        in_features=fields.integer("in_features", 0),
        out_features=fields.integer("out_features", 0),
        bias=fields.flag("bias", True),
        activation=name,
        normalizes_input=normalizes_input,
    )
