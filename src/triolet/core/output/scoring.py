"""Scores of pairs of texts: which pooled requests a model needs for them, and how their results become scores.

A model of classification with one label (a cross-encoder) reads both texts in one prompt, and its class score is the
score of the pair. A reranker that answers a question about the pair, such as Qwen3-Reranker, gets it as a chat. A model
of embeddings gets each text once, and the score is the cosine of the two embeddings.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from math import hypot
from operator import mul
from typing import Any, Final

import attrs

from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.pooling_params import CLASSIFY, EMBED, SCORE_TASKS, PoolingParams, check_task
from triolet.core.request.prompt import Prompt
from triolet.core.tools.answer import TemplateOwner
from triolet.errors import InvalidPrompt, UnsupportedFeature

# The chat of Qwen3-Reranker. With the chat template of Qwen3 it gives the prompt of the model's own example, to the
# character: the template writes the empty thoughts.
# Source: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, section "Transformers Usage".
_JUDGE: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]


@attrs.frozen(eq=False, kw_only=True)
class Scoring:
    """Pooled requests that give the scores of some pairs of texts."""

    prompts: tuple[Prompt, ...]  # a request each
    params: PoolingParams  # of all of them
    # Indices of the two texts of each pair among `prompts`; None where each prompt is a pair.
    places: tuple[tuple[int, int], ...] | None = None

    def scores(self, outputs: Outputs) -> list[ScoringRequestOutput]:
        """Return the score of each pair, in the order of the pairs.

        Args:
            outputs: of `prompts`, in their order.
        """
        if self.places is None:
            return [ScoringRequestOutput.from_base(output) for output in outputs]
        return [
            ScoringRequestOutput.from_base(_cosine(outputs[first], outputs[second]))
            for first, second in self.places
        ]


def plan_scoring(
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    info: ModelInfo,
    tokenizer: object = None,
    params: PoolingParams | None = None,
    instruction: str | None = None,
) -> Scoring:
    """Decide which requests give the scores of pairs of texts.

    Args:
        data_1: a text, which is compared with each of `data_2`, or as many texts as there are in `data_2`.
        data_2: texts.
        info: of the model.
        tokenizer: of the model; its chat template may take queries and documents.
        params: parameters of the requests; their task is set here.
        instruction: task of a reranker that is asked in a chat; by default the one that it was trained with.
    Raises:
        InvalidPrompt: the texts are no texts, or their numbers do not fit.
        UnsupportedFeature: the model gives no scores, or takes no instruction.
    """
    pairs = _pairs(data_1, data_2)
    params = params or PoolingParams()
    pooling = info.pooling
    check_task("score", SCORE_TASKS if pooling is not None and pooling.scores else info.tasks)
    assert pooling is not None
    names_roles = isinstance(tokenizer, TemplateOwner) and _names_roles(tokenizer.template_source)
    is_chat = CLASSIFY in pooling.tasks and (pooling.is_asked or names_roles)
    if instruction is not None and not is_chat:
        raise UnsupportedFeature(
            "instruction must be None for this model, which is not asked in a chat",
            field="instruction",
            got=instruction,
        )
    if CLASSIFY not in pooling.tasks:
        texts = {
            text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
        }
        return Scoring(
            prompts=tuple(texts),
            params=attrs.evolve(params, task=EMBED, use_activation=True),
            places=tuple((texts[first], texts[second]) for first, second in pairs),
        )
    prompts: list[Prompt] = []
    for first, second in pairs:
        if is_chat:
            prompts.append(_chat(first, second, instruction, names_roles=names_roles))
        else:
            prompts.append({"prompt": first, "text_pair": second})
    return Scoring(prompts=tuple(prompts), params=attrs.evolve(params, task=CLASSIFY))


def _pairs(data_1: object, data_2: object) -> list[tuple[str, str]]:
    firsts, seconds = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidPrompt(
            f"data_1 must hold one text, or as many as data_2, which holds {len(seconds)}; got {len(firsts)}",
            field="data_1",
            got=len(firsts),
        )
    return list(zip(firsts, seconds, strict=True))


def _texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidPrompt(f"{name} must be a text or a list of at least one text", field=name, got=value)
    return list(texts)


def _names_roles(template_source: str) -> bool:
    """Return True for a template that takes the two texts as messages of the roles `query` and `document`."""
    return all(re.search(rf"""["']{role}["']""", template_source) for role in ("query", "document"))


def _chat(query: str, document: str, instruction: str | None, *, names_roles: bool) -> Mapping[str, Any]:
    if names_roles:
        values = {} if instruction is None else {"instruction": instruction}
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        # such a template is the whole prompt: nothing is generated
        return {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": values}
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return {
        "messages": [{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def _cosine(
    first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]
) -> PoolingRequestOutput[PoolingOutput]:
    one, other = first.outputs.data.tolist(), second.outputs.data.tolist()
    # Not all embeddings have length 1: `truncate_dim` of a folder cuts them after the normalisation.
    lengths = hypot(*one) * hypot(*other)
    cosine = sum(map(mul, one, other)) / lengths if lengths else 0.0
    return attrs.evolve(
        second,
        outputs=PoolingOutput(memoryview(array("f", [cosine]))),
        prompt_token_ids=(*first.prompt_token_ids, *second.prompt_token_ids),
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        task="score",
    )
