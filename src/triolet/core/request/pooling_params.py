"""Parameters of a pooled request, and the facts about what a loaded model can pool.

A pooled request wants vectors computed from its prompt instead of generated tokens: an embedding, the scores of a
classification, or one vector per token. Names, tasks and messages are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from triolet.core.request.param_validation import refuse
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.errors import InvalidParams, UnsupportedFeature, shown

GENERATE: Final = "generate"
EMBED, CLASSIFY = "embed", "classify"
TOKEN_EMBED, TOKEN_CLASSIFY = "token_embed", "token_classify"
TASKS: Final = (EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY)
TOKEN_TASKS: Final = (TOKEN_EMBED, TOKEN_CLASSIFY)
SCORE_TASKS: Final = ("score",)  # of `Engine.score`, which asks for `classify` or `embed`

# What code that handles requests of every task finds in the place of sampling parameters.
POOLED: Final = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
# A pooling method other than the last token's needs the hidden states of tokens that the prefix cache skips.
POOLED_WITHOUT_CACHE: Final = attrs.evolve(POOLED, skip_reading_prefix_cache=True)

MAX_RESULT_BYTES: Final = 2**28
"""Largest result of a request, bytes: 65,536 tokens of a model with 1,024 dimensions."""

_HOW_TO_START: Final = {
    EMBED: "convert='embed' (--convert embed)",
    TOKEN_EMBED: "convert='embed' (--convert embed)",
    CLASSIFY: "a model of sequence classification, or convert='classify' (--convert classify)",
    TOKEN_CLASSIFY: "a model of sequence classification, or convert='classify' (--convert classify)",
    GENERATE: "a model that generates text",
    "score": "a model of sequence classification with one label, or convert='embed' (--convert embed)",
}


def _optional(kind: type, rule: str) -> Any:
    def check(_params: object, attribute: attrs.Attribute[Any], value: object) -> None:
        # Not isinstance: true is no integer.
        if value is not None and type(value) is not kind:
            raise refuse(attribute.name, rule, value)

    return check


def _ids(_params: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not (isinstance(value, tuple) and set(map(type, value)) <= {int}):
        raise refuse(attribute.name, "must be a list of integers", value)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class PoolingParams:
    """Parameters of a pooled request.

    Args:
        task: `embed`, `classify`, `token_embed` or `token_classify`; by default what the model is for.
        use_activation: normalise an embedding to length 1, or turn class scores into probabilities; None is the model's
            own default.
        dimensions: cut embeddings to so many numbers, before they are normalised; only for Matryoshka models.
        step_tag_id: with `token_classify`, take only the positions of this token.
        returned_token_ids: with `token_classify`, take only these columns of the scores.
        token_type_start: position of the first token of the second text of a pair, for a model that tells the two texts
            apart by token types (BERT) and a prompt of token ids; set by the tokenizer where the texts are given.
    Raises:
        InvalidParams: a value of the wrong type or out of its range.
    """

    task: str | None = attrs.field(
        default=None, validator=_optional(str, f"must be one of {', '.join(TASKS)}")
    )
    use_activation: bool | None = attrs.field(
        default=None, validator=_optional(bool, "must be true or false")
    )
    dimensions: int | None = attrs.field(default=None, validator=_optional(int, "must be an integer"))
    step_tag_id: int | None = attrs.field(default=None, validator=_optional(int, "must be an integer"))
    returned_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=_as_tuple, validator=_ids
    )
    token_type_start: int | None = attrs.field(default=None, validator=_optional(int, "must be an integer"))

    def __attrs_post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise refuse("task", f"must be one of {', '.join(TASKS)}", self.task)
        if self.dimensions is not None and self.dimensions < 1:
            raise refuse("dimensions", "must be at least 1", self.dimensions)
        if self.token_type_start is not None and self.token_type_start < 0:
            raise refuse("token_type_start", "must be at least 0", self.token_type_start)


@attrs.frozen(kw_only=True)
class PoolingInfo:
    """Facts about the pooling of a loaded model.

    Args:
        tasks: what it computes; the first one is the default.
        method: `LAST`, `MEAN`, `CLS`, `ALL` or `STEP`.
        size: numbers of an embedding, or classes.
        is_matryoshka: whether embeddings may be cut.
        matryoshka_dimensions: lengths that they may be cut to; empty for any.
        labels: names of the classes, by index.
        is_asked: whether the score of a pair of texts is the answer to a question about it, in a chat.
        needs_whole_prompts: whether tokens attend in both directions, so that a prompt is computed in one step, and
            nothing of it is kept.
        takes_token_types: whether the two texts of a pair are told apart by token types.
        default_prompt: text in front of every text that is embedded, such as `query: `.
        is_rendered: whether a text that is embedded becomes the message of a chat; the default prompt is then its
            system message.
    """

    tasks: tuple[str, ...]
    method: str = "LAST"
    size: int = 0
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    is_asked: bool = False
    needs_whole_prompts: bool = False
    takes_token_types: bool = False
    default_prompt: str = ""
    is_rendered: bool = False

    @property
    def scores(self) -> bool:
        """True if it gives a pair of texts one score."""
        return EMBED in self.tasks or (CLASSIFY in self.tasks and self.size == 1)

    def reads_prefix_cache(self, task: str) -> bool:
        """Return True if a request needs no hidden states of tokens whose KV is cached."""
        return task not in TOKEN_TASKS and self.method == "LAST" and not self.needs_whole_prompts


def check_task(task: str, tasks: Sequence[str]) -> None:
    """Refuse a task that the model does not do, with the way to start one that does.

    Raises:
        UnsupportedFeature: `task` is not among the model's `tasks`.
    """
    if task not in tasks:
        raise UnsupportedFeature(
            f"task must be one of {', '.join(tasks)} for this model; got {task!r}, "
            f"which needs {_HOW_TO_START[task]}",
            field="task",
            got=task,
        )


def resolved(
    params: PoolingParams, info: PoolingInfo | None, tasks: Sequence[str], model_name: str, vocab_size: int
) -> PoolingParams:
    """Check the parameters of a request against the model, and fill in its task.

    Args:
        params: of the caller.
        info: of the model; None for one that only generates.
        tasks: of the model.
        model_name: for the error.
        vocab_size: of the model.
    Raises:
        UnsupportedFeature: the model does not do the task.
        InvalidParams: a parameter that the task or the model does not take.
    """
    task = params.task or (EMBED if info is None else info.tasks[0])
    check_task(task, tasks)
    assert info is not None
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, task, info, model_name)
    # They select positions and columns of its result, which other tasks do not have.
    if task != TOKEN_CLASSIFY:
        for field in ("step_tag_id", "returned_token_ids"):
            if (value := getattr(params, field)) is not None:
                raise refuse(field, f"must be None for task {task}", value)
    if params.step_tag_id is not None and not 0 <= params.step_tag_id < vocab_size:
        raise refuse("step_tag_id", f"must be in [0, {vocab_size})", params.step_tag_id)
    if params.token_type_start is not None and not info.takes_token_types:
        raise refuse("token_type_start", "must be None for this model", params.token_type_start)
    for column in params.returned_token_ids or ():
        if not 0 <= column < info.size:
            raise refuse("returned_token_ids", f"must hold columns in [0, {info.size})", column)
    return attrs.evolve(params, task=task)


def _check_dimensions(dimensions: int, task: str, info: PoolingInfo, model_name: str) -> None:
    if task not in (EMBED, TOKEN_EMBED):
        raise refuse("dimensions", f"must be None for task {task}", dimensions)
    if not info.is_matryoshka:
        raise InvalidParams(
            f"Model {shown(model_name)} does not support Matryoshka embeddings; dimensions must be unset "
            f"(received dimensions={dimensions}).",
            field="dimensions",
            got=dimensions,
        )
    allowed = info.matryoshka_dimensions
    if allowed and dimensions not in allowed:
        raise refuse("dimensions", f"must be one of {', '.join(map(str, allowed))}", dimensions)
    if dimensions > info.size:
        raise refuse("dimensions", f"must be in [1, {info.size}]", dimensions)


def check_size(params: PoolingParams, info: PoolingInfo, num_prompt_tokens: int) -> None:
    """Refuse a result with one vector per token that is too large.

    Raises:
        InvalidPrompt: names both sizes.
    """
    if params.task in TOKEN_TASKS and num_prompt_tokens * info.size * 4 > MAX_RESULT_BYTES:
        most = MAX_RESULT_BYTES // (4 * info.size)
        raise refuse("prompt", f"must have at most {most} tokens for task {params.task}", num_prompt_tokens)
