"""Pooling: from the hidden states of a prompt to the vectors that a pooled request wants.

A prompt may come in several steps. LAST needs only the last step's last hidden state. CLS keeps the first token's, MEAN
a sum in float32, in the request's row: a row that starts again, after a preemption or a crash, starts with none. The
tasks with a vector per token give the vectors of each step's share at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from triolet.core.request.pooling_params import (
    EMBED,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    TOKEN_TASKS,
    PoolingInfo,
    PoolingParams,
)
from triolet.core.step_plan import PooledVectors, RowFailure
from triolet.errors import ModelFileError, WeightsMismatch
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.weight_map import WeightSource, plan_tensors
from triolet.model.folder.checkpoint import Checkpoint
from triolet.model.folder.pooling_config import DenseConfig, PoolingConfig
from triolet.model.input_batch import PoolShare, Row
from triolet.model.interface import CausalModel

if TYPE_CHECKING:
    from triolet.model.backends.encoder import EncoderModel


# Tensors of a reward model's head.
DEEP_HEAD = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")
_LOGIT_ROWS = 64
"""Tokens whose logits of the whole vocabulary are in memory together."""

Scores = Callable[[Tensor], Tensor]
"""Head of a classification: from float32 [n, hidden_size] to float32 [n, num_labels]."""


@attrs.frozen(eq=False)
class DenseLayer:
    """Linear layer with an activation, in float32."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    activation: torch.nn.Module
    normalizes_input: bool  # whether what it reads is brought to length 1

    def __call__(self, x: Tensor) -> Tensor:
        # [n, in] -> [n, out]
        x = functional.normalize(x, dim=-1) if self.normalizes_input else x
        result: Tensor = self.activation(functional.linear(x, self.weight, self.bias))
        return result


@attrs.frozen(eq=False, kw_only=True)
class Pooler:
    """Pooling of one model; its layers compute in float32."""

    info: PoolingInfo
    dense: tuple[DenseLayer, ...] = ()  # applied to embeddings
    normalizes: bool = True  # whether an embedding has length 1 by default
    dimensions: int | None = (
        None  # to which an embedding is cut where a request does not say; None for no cut
    )
    head: Scores | None = None  # of a classification
    # Head of an encoder, from the hidden states of a whole prompt, [num_tokens, hidden], to scores, [n, num_labels];
    # or of a reward model, from those of any tokens to a row of scores for each.
    classifier: Callable[[Tensor], Tensor] | None = None
    activation: str = "none"  # of class scores: `softmax`, `sigmoid` or `none`

    def pool(self, shares: tuple[PoolShare, ...], hidden: Tensor) -> list[PooledVectors | RowFailure]:
        """Return the results that a step gives.

        Args:
            shares: the rows of the step that are pooled.
            hidden: [num_tokens, hidden_size], of all tokens of the step.
        """
        results: list[PooledVectors | RowFailure] = []
        # A step that runs out of memory is computed again: nothing is added to a row before all is computed.
        states: list[tuple[Row, Tensor | None]] = []
        for share in shares:
            chunk = hidden[share.first : share.first + share.num_tokens]
            if self.classifier is not None:
                results.append(
                    self._result(share, self._probabilities(self._classified(share, chunk), share.params))
                )
                continue
            if share.params.task in TOKEN_TASKS:
                if share.params.step_tag_id is not None:
                    chunk = chunk[share.token_ids == share.params.step_tag_id]
                vectors = chunk.float()
            else:
                state = self._added(share, chunk)
                states.append((share.row, state))
                if not share.is_last:
                    continue
                assert state is not None
                vectors = state[None] / (share.end if self.info.method == "MEAN" else 1)
            results.append(self._result(share, self._finished(vectors, share.params)))
        for row, state in states:
            row.pooled = state
        return results

    def _added(self, share: PoolShare, chunk: Tensor) -> Tensor | None:
        """Return what is kept of a prompt after this share: [hidden_size] float32."""
        match self.info.method:
            case "MEAN":
                total = chunk.sum(dim=0, dtype=torch.float32)
                return total if share.row.pooled is None else share.row.pooled + total
            case "CLS":
                return chunk[0].float() if share.row.pooled is None else share.row.pooled
        return chunk[-1].float() if share.is_last else None

    def _finished(self, vectors: Tensor, params: PoolingParams) -> Tensor:
        """Apply the layers after pooling; [n, hidden_size] to [n, size]."""
        if params.task in (EMBED, TOKEN_EMBED):
            for layer in self.dense:
                vectors = layer(vectors)
            # All for None; normalised after the cut, so that the length is 1.
            vectors = vectors[:, : params.dimensions]
            normalizes = self.normalizes if params.use_activation is None else params.use_activation
            vectors = functional.normalize(vectors, dim=-1) if normalizes else vectors
            # As in sentence-transformers: the folder's cut comes last, and not in the vectors of tokens.
            has_default = params.dimensions is None and params.task == EMBED
            return vectors[:, : self.dimensions] if has_default else vectors
        assert self.head is not None
        return self._probabilities(self.head(vectors), params)

    def _classified(self, share: PoolShare, hidden: Tensor) -> Tensor:
        assert self.classifier is not None
        scores = self.classifier(hidden)
        if share.params.step_tag_id is not None:
            scores = scores[share.token_ids == share.params.step_tag_id]
        return scores

    def _probabilities(self, scores: Tensor, params: PoolingParams) -> Tensor:
        if params.returned_token_ids is not None and params.task == TOKEN_CLASSIFY:
            scores = scores[:, list(params.returned_token_ids)]
        if params.use_activation is False or self.activation == "none":
            return scores
        return scores.sigmoid() if self.activation == "sigmoid" else scores.softmax(dim=-1)

    def _result(self, share: PoolShare, vectors: Tensor) -> PooledVectors | RowFailure:
        row = share.row
        if not bool(vectors.isfinite().all()):
            return RowFailure(row.request_id, row.epoch, "its hidden states are not numbers")
        start = share.end - share.num_tokens if share.params.task in TOKEN_TASKS else 0
        values = vectors.cpu().contiguous().numpy().tobytes()
        return PooledVectors(row.epoch, start, vectors.shape[1], values, share.is_last)


def load_pooler(
    config: PoolingConfig,
    folder: Path,
    device: torch.device,
    hidden_size: int,
    encoder: EncoderModel | None = None,
    token_scores: Scores | None = None,
) -> Pooler:
    """Read the layers of a pooler.

    Args:
        config: of the folder.
        folder: of the model.
        device: of the model.
        hidden_size: of the model.
        encoder: the model, if it is one: its own head classifies.
        token_scores: head of a folder with `classifier_tokens`.
    Raises:
        ModelFileError: a file is missing or wrong.
        WeightsMismatch: a tensor is missing or of another shape.
    """
    dense = tuple(_dense_layer(layer, device) for layer in config.dense)
    sizes = [hidden_size, *(layer.out_features for layer in config.dense)]
    for size, layer in zip(sizes, config.dense, strict=False):
        if layer.in_features != size:
            raise ModelFileError(
                layer.folder / "config.json", f"in_features must be {size}; got {layer.in_features}"
            )
    head: Scores | None = None
    classifier: Callable[[Tensor], Tensor] | None = (
        encoder.classify if encoder is not None and config.labels else None
    )
    if config.has_deep_head:
        classifier = _deep_head(folder, hidden_size, len(config.labels), device)
    elif config.labels and encoder is None:
        head = token_scores
        if head is None:
            weight = _tensor(folder, "score.weight", (len(config.labels), hidden_size), device)
            head = functools.partial(functional.linear, weight=weight)
    allowed = tuple(size for size in config.matryoshka_dimensions if size <= sizes[-1])
    info = PoolingInfo(
        tasks=config.tasks,
        method=config.method,
        size=len(config.labels) or sizes[-1],
        is_matryoshka=config.is_matryoshka,
        matryoshka_dimensions=allowed,
        labels=config.labels,
        is_asked=bool(config.classifier_tokens),
        needs_whole_prompts=encoder is not None,
        takes_token_types=encoder is not None and encoder.takes_token_types,
        default_prompt=config.default_prompt,
        is_rendered=config.is_rendered,
    )
    return Pooler(
        info=info,
        dense=dense,
        normalizes=config.normalizes,
        dimensions=config.truncate_dim,
        head=head,
        classifier=classifier,
        activation=config.activation,
    )


def _dense_layer(config: DenseConfig, device: torch.device) -> DenseLayer:
    shape = config.out_features, config.in_features
    weight = _tensor(config.folder, "linear.weight", shape, device)
    bias = _tensor(config.folder, "linear.bias", shape[:1], device) if config.bias else None
    return DenseLayer(weight, bias, getattr(torch.nn, config.activation)(), config.normalizes_input)


def _deep_head(
    folder: Path, hidden_size: int, num_labels: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    shapes = ((hidden_size, hidden_size), (hidden_size,), (num_labels, hidden_size), (num_labels,))
    first, first_bias, last, last_bias = (
        _tensor(folder, name, shape, device) for name, shape in zip(DEEP_HEAD, shapes, strict=True)
    )

    def scores(hidden: Tensor) -> Tensor:
        return functional.linear(functional.linear(hidden.float(), first, first_bias).relu(), last, last_bias)

    return scores


def classifier_token_ids(folder: Path, texts: tuple[str, ...]) -> tuple[int, int]:
    """Return the ids of the two tokens of `classifier_from_token`: no, yes.

    Raises:
        ModelFileError: the tokenizer cannot be read, or does not have them.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(path, f"cannot be read: {error}") from error
    no, yes = (tokenizer.token_to_id(text) for text in texts)
    if no is None or yes is None:
        raise ModelFileError(path, f"must have the tokens of classifier_from_token, {', '.join(texts)}")
    return no, yes


def read_token_scores(
    config: DecoderConfig, checkpoint: WeightSource, token_ids: tuple[int, int], device: torch.device
) -> Scores:
    """Read the head whose score is the logit of the second token less that of the first.

    The logits are those of the model, but in float32: rounded to bfloat16, the scores of similar texts would be equal.

    Args:
        config: of the model.
        checkpoint: its tensors, without quantisation.
        token_ids: of both tokens.
        device: of the model.
    Raises:
        WeightsMismatch: the model's head is not there.
    """
    plans = plan_tensors(config, checkpoint.tensors)
    # a tied head is the embedding
    [(name, _)] = (plans.get("head.weight") or plans["embedding.weight"]).sources
    if name not in checkpoint.tensors:
        raise WeightsMismatch(missing=[name], unused=[], misshapen=[])
    weight = checkpoint.read(name)[list(token_ids)].to(device, torch.float32)
    bias: Tensor | None = None
    if config.head_bias:
        [(stored, _)] = plans["head.bias"].sources
        bias = checkpoint.read(stored)[list(token_ids)].to(device, torch.float32)

    def scores(hidden: Tensor) -> Tensor:
        logits = functional.linear(hidden, weight, bias) * config.logit_scale
        if (cap := config.logit_soft_cap) is not None:
            logits = (logits / cap).tanh() * cap
        return logits[:, 1:] - logits[:, :1]

    return scores


def token_scores_of(model: CausalModel, token_ids: tuple[int, int]) -> Scores:
    """Return the head of `read_token_scores` for a model of any backend, from logits in its dtype."""

    def scores(hidden: Tensor) -> Tensor:
        found = hidden.new_empty(len(hidden), 1)
        for part, rows in zip(found.split(_LOGIT_ROWS), hidden.split(_LOGIT_ROWS), strict=True):
            if len(rows):
                places = torch.arange(len(rows), device=rows.device)
                logits = model.compute_logits(rows.to(model.spec.dtype), places)[:, list(token_ids)].float()
                part.copy_(logits[:, 1:] - logits[:, :1])
        return found

    return scores


def _tensor(folder: Path, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    checkpoint = Checkpoint.open(folder)
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise WeightsMismatch(missing=[name], unused=[], misshapen=[])
    if stored.shape != shape:
        problem = f"{name} must be {shape}; got {stored.shape}"
        raise WeightsMismatch(missing=[], unused=[], misshapen=[problem])
    return checkpoint.read(name).to(device, torch.float32)
