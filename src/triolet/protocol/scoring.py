"""Request bodies and answer objects of `/score` and `/rerank`: scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from triolet.core.request.pooling_params import PoolingParams
from triolet.protocol.errors import missing, wrong
from triolet.protocol.json.structuring import CONVERTER, Wrong
from triolet.protocol.pooling import MAX_INPUTS, PooledRequest, usage_of


@attrs.frozen
class Texts:
    """One text or several; a text may stand in an object with the field `text`."""

    texts: tuple[str, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Texts:
        """Build the texts from JSON data."""
        listed = value if isinstance(value, list) else [value]
        texts: tuple[Any, ...] = tuple(one.get("text") if isinstance(one, dict) else one for one in listed)
        if not 0 < len(texts) <= MAX_INPUTS or not all(isinstance(text, str) for text in texts):
            raise Wrong(f"a text, or a list of 1 to {MAX_INPUTS} texts", value)
        return cls(texts)


CONVERTER.register_structure_hook(Texts, Texts.of)

# Names of the two sides of the pairs, of which a body has one.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


@attrs.frozen(kw_only=True)
class PairedRequest(PooledRequest):
    """Fields that the bodies of `/score` and `/rerank` have in common."""

    instruction: str | None = None  # task of a reranker that is asked in a chat

    def params(self) -> PoolingParams:
        """Return the parameters for the engine."""
        return PoolingParams(use_activation=self.use_activation)


@attrs.frozen(kw_only=True)
class ScoreRequest(PairedRequest):
    """Body of `/score`."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def check(self) -> None:
        first, second = self._names
        for name in (first, second):
            if getattr(self, name) is None:
                raise missing(name)
        for name in (name for names in _SIDES for name in names if name not in (first, second)):
            if (value := getattr(self, name)) is not None:
                raise wrong(name, f"left out beside {first}", value.texts)
        num_first, num_second = map(len, self.sides)
        if num_first not in (1, num_second):
            raise wrong(first, f"one text, or as many as {second}, which holds {num_second}", num_first)

    @property
    def _names(self) -> tuple[str, str]:
        given = (names for names in _SIDES if any(getattr(self, name) is not None for name in names))
        return next(given, _SIDES[0])

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts of the two sides of the pairs; the first one may be a single text."""
        first, second = (getattr(self, name).texts for name in self._names)
        return first, second

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": self._names[1], "prompt_token_ids": self._names[1], "text_pair": self._names[1]}

    def answer(
        self,
        response_id: str,
        created: int,
        scores: Sequence[ScoringRequestOutput],
        outputs: Sequence[PoolingRequestOutput[PoolingOutput]],
    ) -> dict[str, Any]:
        """Return the response.

        Args:
            response_id: id of it.
            created: seconds since the epoch.
            scores: of the pairs.
            outputs: of the pooled requests that they come from.
        """
        return {
            "id": f"score-{response_id}",
            "object": "list",
            "created": created,
            "model": self.model,
            "data": [
                {"index": index, "object": "score", "score": score.outputs.score}
                for index, score in enumerate(scores)
            ],
            "usage": usage_of(outputs),
        }


@attrs.frozen(kw_only=True)
class RerankRequest(PairedRequest):
    """Body of `/rerank`, in the shape of Jina and Cohere."""

    query: str
    documents: Texts
    top_n: int = 0  # results to return; 0 for all
    return_documents: bool = True  # whether results hold the texts

    def check(self) -> None:
        if self.top_n < 0:
            raise wrong("top_n", "at least 0", self.top_n)

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Query and documents."""
        return (self.query,), self.documents.texts

    def field_names(self) -> Mapping[str, str]:
        return {"prompt": "documents", "prompt_token_ids": "documents", "text_pair": "documents"}

    def answer(
        self,
        response_id: str,
        scores: Sequence[ScoringRequestOutput],
        outputs: Sequence[PoolingRequestOutput[PoolingOutput]],
    ) -> dict[str, Any]:
        """Return the response; see `ScoreRequest.answer`."""
        # documents with the same score stay in their order
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index].outputs.score)
        results = []
        for index in ranked[: self.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index].outputs.score}
            if self.return_documents:
                result["document"] = {"text": self.documents.texts[index]}
            results.append(result)
        return {
            "id": f"rerank-{response_id}",
            "model": self.model,
            "usage": usage_of(outputs),
            "results": results,
        }
