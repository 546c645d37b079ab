"""Messages between the engine and a process that follows one grammar.

    engine --> process   Vocabulary    of the model      process --> engine   GrammarState   understood, or not
                         OpenGrammar   compile this                           GrammarState   compiled, or not
                         MaskQuestions tokens added                           MaskAnswers    masks of the next tokens

The first is sent to the process that all others are forked from; see `triolet.workers.grammar`.
"""

from __future__ import annotations

from typing import Final

import attrs

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.messages import Way, layout_of


@attrs.frozen
class Vocabulary:
    """Vocabulary of the model."""

    tokenizer_json: bytes  # the model's tokenizer, in Hugging Face's form, UTF-8
    vocab_size: int  # of the model; masks are that long
    eos_token_ids: tuple[int, ...]  # end an answer; allowed where the grammar can end


@attrs.frozen
class OpenGrammar:
    """Request to compile a grammar."""

    params: StructuredOutputsParams  # the grammar
    memory_bytes: int  # that the process may take, beyond what it has; 0 for as much as there is


@attrs.frozen
class GrammarState:
    """Outcome of a start or of a compilation, or the end of a process that has crashed."""

    process_id: int
    problem: str  # the error message; empty if there is none
    shortage: str = ""  # the exhausted resource, if that is the problem; see `ResourceShortage`
    memory_left: int | None = None  # bytes that a copy may still map, at its start; None without a limit
    crash: str = ""  # traceback of the error that ends the process


@attrs.frozen
class MaskQuestion:
    """Request for the mask of one answer."""

    serial: int
    start: int  # how many of its tokens were sent before; 0 for a new answer
    token_ids: tuple[int, ...]  # tokens since then


@attrs.frozen
class MaskQuestions:
    """Batch of requests for masks, with the serials of answers that have ended."""

    steps: tuple[MaskQuestion, ...]
    ended: tuple[int, ...]


@attrs.frozen
class MaskAnswer:
    """Mask of the tokens that may come next in an answer."""

    serial: int
    position: int  # tokens of the answer that were followed
    mask: bytes  # a bit per token id, least significant first: 1 for those that may come next
    is_over: bool  # no token may: the answer is complete by the grammar
    problem: str  # why the answer cannot be followed; empty if it can


@attrs.frozen
class MaskAnswers:
    """Reply to `MaskQuestions`, in the same order."""

    steps: tuple[MaskAnswer, ...]  # one for each question
    process_id: int


GrammarRequest = Vocabulary | OpenGrammar | MaskQuestions
GrammarReply = GrammarState | MaskAnswers

_REQUESTS: Final = (Vocabulary, OpenGrammar, MaskQuestions)
_REPLIES: Final = (GrammarState, MaskAnswers)
_LAYOUT: Final = layout_of((*_REQUESTS, *_REPLIES))

# The largest tokenizers have some 30 MB of JSON; a mask has a bit for each of a quarter of a million tokens.
GRAMMAR_REQUESTS: Final = Way[GrammarRequest](_REQUESTS, max_bytes=2**27, max_items=2**22, layout=_LAYOUT)
GRAMMAR_REPLIES: Final = Way[GrammarReply](_REPLIES, max_bytes=2**27, max_items=2**16, layout=_LAYOUT)
