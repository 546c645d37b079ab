"""A request is built for the model as it is now: what is asked on the way, what is refused, and what comes out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import attrs
import pytest

from tests.actors.harness import model_info
from triolet import EngineConfig, SamplingParams
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.grammar_state import Constraint, ThinkingRules
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import GenerationDefaults, LoadedModel, ModelInfo
from triolet.core.request.pooling_params import POOLED, POOLED_WITHOUT_CACHE, PoolingInfo, PoolingParams
from triolet.core.request.prompt import ChatPrompt, ParsedPrompt, TextPair
from triolet.core.request.prompt_adapter import SoftPrompt
from triolet.core.request.request import Request
from triolet.core.request.request_builder import Need, RequestBuilder, RequestLimits
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import MAX_LISTED_TOKENS, Tokenize, Tokenized
from triolet.errors import InvalidParams, InvalidPrompt, PromptTooLong, UnsupportedFeature

EMBEDDER = PoolingInfo(tasks=("embed", "token_embed"), size=8)
GRAMMAR = StructuredOutputsParams(regex="a")
THINK = (
    (1, 2),
    (3,),
    (4, 5),
    (),
)  # ids of the marks around reasoning, of a part of the second one, and of no text
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Config:
    """What a builder reads of the configuration of an engine."""

    request_limits: RequestLimits = EngineConfig().request_limits
    stream_interval: int = 1
    max_grammar_bytes: int = 100
    reasoning_parser: str = "none"
    model_name: str = "org/model"


class Letters:
    """Tokenizer with a token per character, its code; the builder only decodes with it."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        raise AssertionError("the builder asks for tokens and does not encode")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "the marks of reasoning may be special tokens"
        return "".join(map(chr, token_ids))


@attrs.frozen
class Templated(Letters):
    """The same with a chat template, and a text that it makes with reasoning switched on."""

    thinking_prompt: str = ""
    template_source: str = "<think></think>"
    tool_template_source: str = ""
    template_variables: frozenset[str] = frozenset()


def builder(
    config: Config | None = None, tokenizer: Letters | None = None, seed: int = 77, **facts: Any
) -> RequestBuilder:
    """Builder for a model with 100 tokens and a context of 8."""
    info: ModelInfo = attrs.evolve(model_info(2, 4), **({"vocab_size": 100} | facts))
    return RequestBuilder(config or Config(), LoadedModel(info, tokenizer), lambda: seed)


def driven(steps: Generator[Need, Tokenized | None, T], *answers: Tokenized | None) -> tuple[list[Need], T]:
    """Give each step its answer; return what the steps asked for, and their result."""
    asked: list[Need] = []
    waiting: list[Tokenized | None] = [None, *answers]
    while True:
        try:
            asked.append(steps.send(waiting.pop(0)))
        except StopIteration as end:
            assert not waiting, "fewer answers were needed"
            result: T = end.value
            return asked, result


def ids(*token_ids: int, text: str | None = None, **fields: Any) -> Tokenized:
    return Tokenized(text, token_ids, (), **fields)


def codes(text: str) -> list[int]:
    return list(map(ord, text))


# --------------------------------------------------------------------------------- parameters


def test_without_parameters_a_request_has_those_of_the_model() -> None:
    generation = GenerationDefaults(temperature=0.5, max_new_tokens=7)
    assert builder(generation=generation).check(None) == SamplingParams(temperature=0.5, max_tokens=7)


def test_parameters_that_hold_are_returned_as_they_came() -> None:
    params = SamplingParams(temperature=0.5)
    assert builder().check(params) is params


def test_a_model_that_only_pools_does_not_generate() -> None:
    with pytest.raises(UnsupportedFeature, match="task must be one of embed, token_embed for this model"):
        builder(generates=False, pooling=EMBEDDER).check(SamplingParams())


def test_parameters_are_checked_against_the_limits_of_the_engine_and_the_vocabulary() -> None:
    with pytest.raises(InvalidParams, match=r"n must be at most 128 \(max_n\), got 129"):
        builder().check(SamplingParams(n=129))
    with pytest.raises(InvalidParams, match=r"prompt logprobs of 100, which is greater than max allowed: 20"):
        builder().check(SamplingParams(prompt_logprobs=-1))
    builder().check(SamplingParams(stop_token_ids=[99]))
    with pytest.raises(InvalidParams, match="Vocabulary size: 100"):
        builder().check(SamplingParams(stop_token_ids=[100]))


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_texts_need_a_tokenizer(field: str) -> None:
    fields: dict[str, Any] = {field: ["a"]}
    params = SamplingParams(**fields)
    assert builder(tokenizer=Letters()).check(params) is params
    with pytest.raises(UnsupportedFeature) as caught:
        builder().check(params)
    assert str(caught.value) == f"{field} must be empty: the model has no tokenizer"
    assert (caught.value.field, caught.value.got) == (field, ("a",))


@pytest.mark.parametrize(
    ("task", "method", "stand_in"),
    [
        ("embed", "LAST", POOLED),
        ("token_embed", "LAST", POOLED_WITHOUT_CACHE),
        (None, "MEAN", POOLED_WITHOUT_CACHE),
    ],
)
def test_a_pooled_request_reads_the_prefix_cache_if_its_task_can(
    task: str | None, method: str, stand_in: SamplingParams
) -> None:
    pooling = attrs.evolve(EMBEDDER, method=method)
    found = builder(pooling=pooling).check_pooling(PoolingParams(task=task))
    assert found == (stand_in, PoolingParams(task=task or "embed"))


def test_a_pooled_request_is_checked_against_the_model() -> None:
    with pytest.raises(InvalidParams, match="Model 'org/model' does not support Matryoshka"):
        builder(pooling=EMBEDDER).check_pooling(PoolingParams(dimensions=4))
    classifier = PoolingInfo(tasks=("token_classify",), size=3)
    with pytest.raises(InvalidParams, match=r"step_tag_id must be in \[0, 100\)"):
        builder(pooling=classifier).check_pooling(PoolingParams(step_tag_id=100))


@pytest.mark.parametrize(
    ("wanted", "num_tokens", "most"),
    [
        (2, 1_398_102, 1),  # 3 per token, and 4,194,304 for all
        (0, 4_194_305, 0),
        (5_000_000, 1, 4_194_303),
        (0, 9_000_000, 0),
    ],
)
def test_the_refusal_of_too_many_log_probabilities_of_a_prompt_says_how_many_fit(
    wanted: int, num_tokens: int, most: int
) -> None:
    limits = EngineConfig(max_logprobs=-1).request_limits
    with pytest.raises(InvalidParams) as caught:
        limits.check_prompt(SamplingParams(prompt_logprobs=wanted), num_tokens, 10_000_000)
    assert f"at most {most} for a prompt of {num_tokens} tokens" in str(caught.value)
    assert (caught.value.field, caught.value.got) == ("prompt_logprobs", wanted)


@pytest.mark.parametrize(("wanted", "num_tokens"), [(2, 1_398_101), (0, 4_194_304), (-1, 41_943)])
def test_log_probabilities_of_a_prompt_that_fit_are_taken(wanted: int, num_tokens: int) -> None:
    limits = EngineConfig(max_logprobs=-1).request_limits
    limits.check_prompt(SamplingParams(prompt_logprobs=wanted), num_tokens, 100)
    with pytest.raises(InvalidParams):
        limits.check_prompt(SamplingParams(prompt_logprobs=wanted), num_tokens + 1, 100)


# ------------------------------------------------------------------------------------- prompts


def test_a_prompt_of_ids_is_not_encoded_and_keeps_its_text() -> None:
    asked, found = driven(builder().tokenize(ParsedPrompt((1, 2), text="hi"), SamplingParams()))
    assert (asked, found) == ([], ids(1, 2, text="hi"))


def test_a_prompt_of_text_is_encoded_with_its_bad_words() -> None:
    build, answer = builder(tokenizer=Letters()), Tokenized("hi", (1, 2), ((5,),))
    steps = build.tokenize(ParsedPrompt(content="hi"), SamplingParams(bad_words=["no"]))
    assert driven(steps, answer) == ([Tokenize("hi", ("no",), max_tokens=8)], answer)


def test_a_text_is_encoded_without_special_tokens_if_it_says_so() -> None:
    prompt, asked = (
        ParsedPrompt(content="hi", add_special_tokens=False),
        Tokenize("hi", add_special_tokens=False, max_tokens=8),
    )
    answer = Tokenized("hi", (1, 2), ())
    assert driven(builder(tokenizer=Letters()).tokenize(prompt, SamplingParams()), answer) == (
        [asked],
        answer,
    )
    assert pooled(prompt, None, answer) == ([asked], answer)
    asked, around = attrs.evolve(asked, max_tokens=MAX_LISTED_TOKENS), Tokenize("", add_special_tokens=False)
    assert pooled(prompt, 1, answer, ids()) == ([asked, around], ids(1, text="hi"))


def test_the_bad_words_of_a_prompt_of_ids_are_encoded_alone() -> None:
    build, answer = builder(tokenizer=Letters()), Tokenized(None, (), ((5,),))
    steps = build.tokenize(ParsedPrompt((1, 2), text="hi"), SamplingParams(bad_words=["no"]))
    assert driven(steps, answer) == (
        [Tokenize(None, ("no",), max_tokens=8)],
        Tokenized("hi", (1, 2), ((5,),)),
    )


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        driven(builder().tokenize(ParsedPrompt(content="hi"), SamplingParams()))
    assert str(caught.value) == "prompt must be token ids: the model has no tokenizer"
    assert caught.value.field == "prompt"


def test_an_answer_does_not_continue_two_texts() -> None:
    steps = builder(tokenizer=Letters()).tokenize(ParsedPrompt(content=TextPair("a", "b")), SamplingParams())
    with pytest.raises(InvalidPrompt, match="text_pair must be left out") as caught:
        driven(steps)
    assert caught.value.field == "text_pair"


def test_a_prompt_is_checked_against_the_model_and_the_limits() -> None:
    build, params = builder(), SamplingParams()
    driven(build.tokenize(ParsedPrompt((0,) * 7), params))
    with pytest.raises(PromptTooLong, match="leaves no room for an answer"):
        driven(build.tokenize(ParsedPrompt((0,) * 8), params))
    with pytest.raises(InvalidPrompt, match=r"must be in \[0, 100\)"):
        driven(build.tokenize(ParsedPrompt((100,)), params))
    wide, many = builder(vocab_size=3_000_000), SamplingParams(prompt_logprobs=-1)
    driven(wide.tokenize(ParsedPrompt((0,)), many))
    with pytest.raises(
        InvalidParams, match="prompt_logprobs must be at most 2097151 for a prompt of 2 tokens"
    ):
        driven(wide.tokenize(ParsedPrompt((0, 0)), many))


def test_a_prompt_with_unlisted_ids_is_refused_by_their_number() -> None:
    steps = builder(tokenizer=Letters()).tokenize(ParsedPrompt(content="long"), SamplingParams())
    with pytest.raises(PromptTooLong, match="your prompt has 900 tokens, which leaves no room for an answer"):
        driven(steps, Tokenized("long", (), (), num_unlisted=900))


@pytest.mark.parametrize(("is_estimate", "number"), [(False, "900 tokens"), (True, "about 900 tokens")])
def test_a_prompt_that_is_too_long_is_said_to_have_about_so_many_tokens_where_they_are_estimated(
    is_estimate: bool, number: str
) -> None:
    tokenized = Tokenized("long", (), (), num_unlisted=900, is_estimate=is_estimate)
    pooled_by = builder(tokenizer=Letters(), pooling=EMBEDDER)
    for steps in (
        builder(tokenizer=Letters()).tokenize(ParsedPrompt(content="long"), SamplingParams()),
        pooled_by.tokenize_pooled(ParsedPrompt(content="long"), PoolingParams(task="embed"), None),
    ):
        with pytest.raises(
            PromptTooLong, match=f"maximum context length is 8 .*, your prompt has {number}"
        ) as told:
            driven(steps, tokenized)
        assert told.value.num_prompt_tokens == 900


# --------------------------------------------------------------------------- prompts to be pooled


def pooled(
    prompt: ParsedPrompt,
    most: int | None,
    *answers: Tokenized,
    pooling: PoolingInfo = EMBEDDER,
    task: str = "embed",
) -> tuple[list[Need], Tokenized]:
    """Encode the prompt of a pooled request for a model with a context of 8."""
    build = builder(tokenizer=Letters(), pooling=pooling)
    return driven(build.tokenize_pooled(prompt, PoolingParams(task=task), most), *answers)


def test_a_pooled_prompt_of_ids_is_not_encoded_and_may_fill_the_context() -> None:
    prompt = ParsedPrompt(tuple(range(8)), text="hi")
    assert pooled(prompt, None) == ([], ids(*range(8), text="hi"))
    with pytest.raises(PromptTooLong, match=r"your prompt has 9 tokens\. Please"):
        pooled(ParsedPrompt(tuple(range(9))), None)


def test_a_pooled_prompt_with_unlisted_ids_is_refused_by_their_number() -> None:
    unlisted = Tokenized("long", (), (), num_unlisted=300_000)
    with pytest.raises(PromptTooLong, match=r"your prompt has 300000 tokens\. Please"):
        pooled(ParsedPrompt(content="long"), None, unlisted)
    with pytest.raises(
        InvalidPrompt, match=r"at most 131072 tokens for truncate_prompt_tokens to cut it; got 300000$"
    ):
        pooled(ParsedPrompt(content="long"), 4, unlisted)
    estimated = attrs.evolve(unlisted, is_estimate=True)
    with pytest.raises(InvalidPrompt, match=r"to cut it; got about 300000$"):
        pooled(ParsedPrompt(content="long"), 4, estimated)


def test_a_pooled_prompt_is_encoded_as_a_text_or_a_pair() -> None:
    for content in ("hi", TextPair("a", "b")):
        asked, found = pooled(ParsedPrompt(content=content), None, ids(1, 2, text="hi"))
        assert (asked, found) == ([Tokenize(content, max_tokens=8)], ids(1, 2, text="hi"))


@pytest.mark.parametrize(
    ("task", "asked"), [("embed", "q: hi"), ("token_embed", "q: hi"), ("classify", "hi")]
)
def test_the_default_prompt_stands_in_front_of_a_text_that_is_embedded(task: str, asked: str) -> None:
    pooling = attrs.evolve(EMBEDDER, default_prompt="q: ")
    found, _ = pooled(ParsedPrompt(content="hi"), None, ids(1, 2), pooling=pooling, task=task)
    assert found == [Tokenize(asked, max_tokens=8)]
    pair = TextPair("a", "b")
    assert pooled(ParsedPrompt(content=pair), None, ids(1), pooling=pooling, task=task)[0] == [
        Tokenize(pair, max_tokens=8)
    ]
    assert pooled(ParsedPrompt((1, 2)), None, pooling=pooling, task=task) == ([], ids(1, 2, text=None))


def test_a_text_is_rendered_as_a_chat_where_the_model_embeds_chats_also_to_find_its_end() -> None:
    def chat(text: str, *prompts: str) -> ChatPrompt:
        messages = [{"role": "system", "content": prompt} for prompt in prompts]
        return ChatPrompt(
            messages=[*messages, {"role": "user", "content": text}], add_generation_prompt=False
        )

    rendering = attrs.evolve(EMBEDDER, is_rendered=True)
    asked, found = pooled(
        ParsedPrompt(content="long"), 3, ids(90, 10, 11, 12, 91), ids(90, 91), pooling=rendering
    )
    whole = Tokenize(chat("long"), max_tokens=MAX_LISTED_TOKENS)
    assert (asked, found.token_ids) == ([whole, Tokenize(chat(""))], (90, 10, 91))
    prompted = attrs.evolve(rendering, default_prompt="q: ")
    assert pooled(ParsedPrompt(content="hi"), None, ids(1), pooling=prompted)[0] == [
        Tokenize(chat("hi", "q: "), max_tokens=8)
    ]
    # What is a chat already, and what is classified, is taken as it comes.
    for content, task in ((chat("hi", "be brief"), "embed"), ("hi", "classify")):
        found_asked, _ = pooled(ParsedPrompt(content=content), None, ids(1), pooling=prompted, task=task)
        assert found_asked == [Tokenize(content, max_tokens=8)]


@pytest.mark.parametrize(("most", "kept"), [(5, 5), (6, 6), (-1, 8), (1, 1)])
def test_a_pooled_prompt_of_ids_is_cut_at_its_end(most: int, kept: int) -> None:
    asked, found = pooled(ParsedPrompt(tuple(range(10, 20))), most)
    assert (asked, found.token_ids) == ([], tuple(range(10, 10 + kept)))


@pytest.mark.parametrize("most", [3, 4, -1, None])
def test_a_pooled_prompt_that_is_not_longer_is_not_cut(most: int | None) -> None:
    asked, found = pooled(ParsedPrompt(content="hi"), most, ids(1, 2, 3))
    assert (len(asked), found.token_ids) == (1, (1, 2, 3))


@pytest.mark.parametrize(
    ("most", "around", "cut"),
    [
        (4, (90, 91, 92), (90, 10, 91, 92)),  # one token before each text, and two after it
        (4, (90,), (90, 10, 11, 12)),  # one before, none after
        (4, (92,), (90, 10, 11, 92)),
        (4, (90, 92), (90, 10, 11, 92)),
        (4, (), (90, 10, 11, 12)),
        (2, (91, 92), (91, 92)),
        (1, (91, 92), (92,)),
        (3, (91, 92), (90, 91, 92)),
    ],
)
def test_the_tokens_after_every_text_stay_where_a_text_is_cut(
    most: int, around: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    whole = (90, 10, 11, 12, 13, 91, 92)
    asked, found = pooled(ParsedPrompt(content="long"), most, ids(*whole, text="long"), ids(*around))
    assert asked == [Tokenize("long", max_tokens=MAX_LISTED_TOKENS), Tokenize("")]
    assert found == ids(*cut, text="long")


@pytest.mark.parametrize(
    ("most", "kept"), [(3, (13, 91, 92)), (1, (92,)), (-1, (11, 12, 13, 14, 15, 16, 91, 92))]
)
def test_a_prompt_that_is_cut_at_its_beginning_keeps_its_last_tokens(
    most: int, kept: tuple[int, ...]
) -> None:
    whole = (90, 10, 11, 12, 13, *((14, 15, 16) if most == -1 else ()), 91, 92)
    build = builder(tokenizer=Letters(), pooling=EMBEDDER)
    for prompt, answers in ((ParsedPrompt(content="long"), [ids(*whole)]), (ParsedPrompt(whole), [])):
        task = build.tokenize_pooled(prompt, PoolingParams(task="embed"), most, True)
        assert driven(task, *answers)[1].token_ids == kept


@pytest.mark.parametrize(("most", "start"), [(4, 2), (2, 0), (1, 0)])
def test_the_second_text_of_a_pair_moves_with_a_prompt_that_is_cut_at_its_beginning(
    most: int, start: int
) -> None:
    pooling = attrs.evolve(EMBEDDER, takes_token_types=True)
    build = builder(tokenizer=Letters(), pooling=pooling)
    for prompt, given, answers in (
        (ParsedPrompt(content=TextPair("a", "b")), None, [ids(1, 2, 3, 4, 5, token_type_start=3)]),
        (ParsedPrompt((1, 2, 3, 4, 5)), 3, []),
    ):
        params = PoolingParams(task="embed", token_type_start=given)
        assert (
            driven(build.tokenize_pooled(prompt, params, most, True), *answers)[1].token_type_start == start
        )


def test_the_tokens_after_every_text_may_be_the_whole_prompt() -> None:
    _, found = pooled(ParsedPrompt(content="a"), 1, ids(91, 92), ids(90, 91, 92))
    assert found.token_ids == (92,)


def test_a_pooled_prompt_is_checked_against_the_model() -> None:
    with pytest.raises(InvalidPrompt, match=r"must be in \[0, 100\)"):
        pooled(ParsedPrompt((100,)), None)
    huge = attrs.evolve(EMBEDDER, size=2**26)  # 2**28 bytes per token, the most of a result
    pooled(ParsedPrompt((1, 2)), None, pooling=huge)
    pooled(ParsedPrompt((1,)), None, pooling=huge, task="token_embed")
    with pytest.raises(InvalidParams, match="prompt must have at most 1 tokens"):
        pooled(ParsedPrompt((1, 2)), None, pooling=huge, task="token_embed")


@pytest.mark.parametrize(("takes", "start"), [(True, 1), (False, None)])
def test_the_place_of_the_second_text_is_kept_for_a_model_that_reads_it(
    takes: bool, start: int | None
) -> None:
    answer = ids(1, 2, token_type_start=1)
    pooling = attrs.evolve(EMBEDDER, takes_token_types=takes)
    _, found = pooled(ParsedPrompt(content=TextPair("a", "b")), None, answer, pooling=pooling)
    assert found.token_type_start == start


# ------------------------------------------------------------------------- grammars and reasoning


def constrained(
    prompt: str = "",
    *answers: Tokenized | None,
    parser: str = "qwen3",
    tokenizer: Letters | None = None,
    **fields: Any,
) -> tuple[list[Need], Constraint | None]:
    """The constraint of an answer to a prompt, and what is asked on the way."""
    build = builder(Config(reasoning_parser=parser), tokenizer or Letters())
    return driven(build.constrain(SamplingParams(**fields), tokens(prompt)), *answers)


def tokens(text: str) -> Tokenized:
    """A prompt that came as token ids."""
    return Tokenized(None, tuple(codes(text)), ())


def marks(opening: str = "<think>", closing: str = "</think>") -> Tokenize:
    return Tokenize(None, marks=(opening, closing, closing[:-1], ""))


def rules(*, is_open: bool, budget: int | None = None) -> ThinkingRules:
    return ThinkingRules(opening_token_ids=(1, 2), closing_token_ids=(3,), is_open=is_open, budget=budget)


MARKS = ids(marks_token_ids=THINK)


@pytest.mark.parametrize("budget", [None, -1])
def test_an_answer_without_grammar_and_budget_has_no_constraint(budget: int | None) -> None:
    assert constrained("<think>", thinking_token_budget=budget) == ([], None)


def test_a_grammar_of_a_model_that_does_not_reason_is_compiled() -> None:
    found = constrained("", None, structured_outputs=GRAMMAR, parser="none")
    assert found == ([GRAMMAR], Constraint(grammar=GRAMMAR, thinking=None))


def test_a_budget_of_a_model_that_does_not_reason_is_refused() -> None:
    with pytest.raises(
        UnsupportedFeature, match=r"how this model marks its reasoning is not known"
    ) as caught:
        constrained(thinking_token_budget=5, parser="none")
    assert (caught.value.field, caught.value.got) == ("thinking_token_budget", 5)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "structured_outputs": GRAMMAR}, "thinking_token_budget"),
        ({"structured_outputs": GRAMMAR}, "structured_outputs"),
    ],
)
def test_rules_of_reasoning_need_a_tokenizer(fields: dict[str, Any], field: str) -> None:
    build = builder(Config(reasoning_parser="qwen3"))
    with pytest.raises(UnsupportedFeature, match="the model has no tokenizer") as caught:
        driven(build.constrain(SamplingParams(**fields), ids(1)))
    assert caught.value.field == field


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_holds_for_the_reasoning_between_its_marks(budget: int) -> None:
    asked, found = constrained("hi", MARKS, thinking_token_budget=budget)
    assert asked == [marks()]
    assert found == Constraint(grammar=None, thinking=rules(is_open=False, budget=budget))


def test_a_grammar_holds_from_where_the_reasoning_ends() -> None:
    asked, found = constrained("hi", MARKS, None, structured_outputs=GRAMMAR)
    assert asked == [marks(), GRAMMAR]
    assert found == Constraint(grammar=GRAMMAR, thinking=rules(is_open=False))


def test_marks_of_reasoning_are_those_of_the_format() -> None:
    asked, _ = constrained("hi", MARKS, parser="mistral", thinking_token_budget=5)
    assert asked == [marks("[THINK]", "[/THINK]")]


@pytest.mark.parametrize(
    ("closing", "beginning", "num_certain"),
    [
        ((5, 6, 7), (5, 6), 2),
        ((5, 6, 7), (5, 8), None),  # which the mark does not begin with
        ((5, 6), (5, 6), None),  # which is all of the mark
        ((3,), (5, 6), None),
    ],
)
def test_a_closing_mark_of_several_tokens_goes_on_as_it_began(
    closing: tuple[int, ...], beginning: tuple[int, ...], num_certain: int | None
) -> None:
    said = ids(marks_token_ids=((1, 2), closing, beginning, ()))
    _, found = constrained("hi", said, None, structured_outputs=GRAMMAR)
    assert found is not None and found.thinking is not None
    assert (found.thinking.closing_token_ids, found.thinking.num_certain) == (closing, num_certain)


def test_the_format_of_reasoning_is_that_of_the_template_unless_it_is_named() -> None:
    asked, _ = constrained("hi", MARKS, parser="auto", tokenizer=Templated(), thinking_token_budget=5)
    assert asked == [marks()]


@pytest.mark.parametrize(
    ("prompt", "parser", "is_open"),
    [
        ("<think>\n", "qwen3", True),
        ("</think><think>", "qwen3", True),
        ("<think>a</think>b", "qwen3", False),
        ("hi", "deepseek_r1", True),
        ("<think>" + "a" * 57, "qwen3", True),
        ("<think>" + "a" * 58, "qwen3", True),  # the mark begins before the last 64 tokens
        ("<think>" + "a" * 5000, "qwen3", True),
        ("<think></think>" + "a" * 5000, "qwen3", False),
        ("<think>a</think><|user|>" + "a" * 5000, "deepseek_r1", True),  # the reasoning of an earlier turn
        ("a" * 5000, "qwen3", False),
    ],
)
def test_reasoning_is_open_if_the_end_of_the_prompt_opens_it_or_it_always_is(
    prompt: str, parser: str, is_open: bool
) -> None:
    _, found = constrained(prompt, MARKS, parser=parser, thinking_token_budget=5)
    assert found == Constraint(thinking=rules(is_open=is_open, budget=5))


@pytest.mark.parametrize("prompt", ["a<think></think>", "a<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_a_prompt_that_ends_with_the_end_of_reasoning_has_no_rules_of_it(prompt: str, parser: str) -> None:
    found = constrained(prompt, None, parser=parser, structured_outputs=GRAMMAR, thinking_token_budget=5)
    assert found == ([GRAMMAR], Constraint(grammar=GRAMMAR, thinking=None))


@pytest.mark.parametrize("prompt", ["<think>a</think>b", "</think>" + "b" * 100])
def test_the_end_of_reasoning_that_is_implied_may_stand_anywhere_in_the_last_turn(prompt: str) -> None:
    build = builder(Config(reasoning_parser="deepseek_r1"), Letters())
    steps = build.constrain(SamplingParams(structured_outputs=GRAMMAR), ids(1, text=prompt))
    assert driven(steps, None) == ([GRAMMAR], Constraint(grammar=GRAMMAR, thinking=None))


@pytest.mark.parametrize(
    ("thinking_prompt", "prompt", "budget", "thinking"),
    [
        ("<think>", "hi", None, None),  # a template that opens reasoning did not
        ("<think>", "<think>", None, rules(is_open=True)),
        ("<think>", "hi", 5, rules(is_open=False, budget=5)),
        ("", "hi", None, rules(is_open=False)),
        ("<think></think>", "hi", None, rules(is_open=False)),
    ],
)
def test_a_template_that_opens_reasoning_itself_has_done_so_if_there_is_any(
    thinking_prompt: str, prompt: str, budget: int | None, thinking: ThinkingRules | None
) -> None:
    answers = [None] if thinking is None else [MARKS, None]
    _, found = constrained(
        prompt,
        *answers,
        tokenizer=Templated(thinking_prompt),
        structured_outputs=GRAMMAR,
        thinking_token_budget=budget,
    )
    assert found == Constraint(grammar=GRAMMAR, thinking=thinking)


HARMONY = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>final"),
    *("<|end|><|start|>assistant", "<|channel|>final", "<|channel|>commentary"),
]
CALLS = StructuredOutputsParams(
    tool_calls={"format": "gpt_oss", "tools": [{"name": "f", "parameters": {}}], "parallel": True}
)
IN_FINAL = "<|start|>assistant<|channel|>final<|message|>So"


def test_reasoning_in_messages_ends_with_the_header_of_the_final_one() -> None:
    said = ids(marks_token_ids=((5, 8, 7), (5, 6, 7), (5, 6), (1, 2, 3), (5, 6), (5, 9)))
    asked, found = constrained("hi", said, None, parser="gpt_oss", structured_outputs=GRAMMAR)
    assert asked == [Tokenize(None, marks=tuple(HARMONY)), GRAMMAR]
    thinking = ThinkingRules(
        opening_token_ids=(5, 8, 7),
        closing_token_ids=(5, 6, 7),
        is_open=True,
        num_certain=2,
        lead_token_ids=(1, 2, 3),
        freeing_token_ids=((5, 6), (5, 9)),
    )
    assert found == Constraint(grammar=GRAMMAR, thinking=thinking)
    for final in (IN_FINAL, IN_FINAL + "o" * 500):
        behind = constrained(final, None, parser="gpt_oss", structured_outputs=GRAMMAR)
        assert behind == ([GRAMMAR], Constraint(grammar=GRAMMAR, thinking=None))


def test_a_form_of_reasoning_and_answer_together_begins_with_the_answer() -> None:
    found = constrained("hi", None, parser="gpt_oss", structured_outputs=CALLS)
    assert found == ([CALLS], Constraint(grammar=CALLS, thinking=None))


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        ("hi", {"thinking_token_budget": 5}, "thinking_token_budget"),
        (IN_FINAL, {}, "continue_final_message"),
        (IN_FINAL + "o" * 500, {}, "continue_final_message"),
    ],
)
def test_what_a_form_of_reasoning_and_answer_together_leaves_no_room_for_is_refused(
    prompt: str, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedFeature, match=f"{field} must be .* beside calls of tools") as caught:
        constrained(prompt, parser="gpt_oss", structured_outputs=CALLS, **fields)
    assert caught.value.field == field


def test_a_grammar_has_a_largest_size() -> None:
    largest = StructuredOutputsParams(regex="a" * 100)
    assert constrained("", None, structured_outputs=largest, parser="none")[0] == [largest]
    with pytest.raises(InvalidParams, match=r"at most 100 bytes \(max_grammar_bytes\), got 101"):
        constrained("", None, structured_outputs={"regex": "a" * 101}, parser="none")


# ------------------------------------------------------------------------------------ the request


def built(build: RequestBuilder | None = None, tokenized: Tokenized | None = None, **fields: Any) -> Request:
    """The one request for a prompt of three tokens."""
    params = SamplingParams(**fields.pop("params", {}))
    constraint = fields.pop("constraint", None)
    [request] = (build or builder()).build(
        "r", params, tokenized or ids(1, 2, 3, text="hi"), constraint, **({"arrival_s": 1.5} | fields)
    )
    return request


def test_a_request_holds_the_prompt_and_what_came_with_it() -> None:
    constraint = Constraint(grammar=GRAMMAR)
    tokenized = Tokenized("hi", (1, 2, 3), ((5,),))
    generation = GenerationDefaults(eos_token_ids=(9,))
    request = built(
        builder(generation=generation),
        tokenized,
        constraint=constraint,
        deadline_s=7.0,
        queue_deadline_s=6.0,
        priority=4,
        client="c",
        owner="o",
        cache_salt="salt",
        trace_headers=(("traceparent", "t"),),
    )
    assert (request.request_id, request.prompt, request.prompt_token_ids) == ("r", "hi", (1, 2, 3))
    assert (request.eos_token_ids, request.bad_words_token_ids) == ((9,), ((5,),))
    assert (request.constraint, request.priority, request.pooling) == (constraint, 4, None)
    assert (request.client, request.owner, request.trace_headers) == ("c", "o", (("traceparent", "t"),))
    assert (request.arrival_s, request.deadline_s, request.queue_deadline_s) == (1.5, 7.0, 6.0)
    assert request.cache_namespace == CacheNamespace(salt="salt")


def test_a_request_has_neither_deadline_nor_priority_unless_it_is_given_one() -> None:
    request = built()
    assert (request.deadline_s, request.queue_deadline_s) == (float("inf"), float("inf"))
    assert (request.priority, request.adapter, request.soft_prompt) == (0, None, None)
    assert request.cache_namespace == CacheNamespace()


@pytest.mark.parametrize(("given", "seed"), [(None, 77), (5, 5), (0, 0)])
def test_a_seed_is_drawn_where_the_caller_gave_none(given: int | None, seed: int) -> None:
    assert built(params={"seed": given}).seed == seed


def test_each_of_several_answers_draws_its_own_seed() -> None:
    requests = builder().build("r", SamplingParams(n=2), ids(1), None, arrival_s=0.0)
    assert [(request.request_id, request.seed) for request in requests] == [("0_r", 77), ("1_r", 77)]


@pytest.mark.parametrize(("max_tokens", "most"), [(None, 5), (4, 4), (5, 5), (6, 5)])
def test_an_answer_ends_with_the_context(max_tokens: int | None, most: int) -> None:
    assert built(params={"max_tokens": max_tokens}).max_tokens == most


@pytest.mark.parametrize(("wanted", "least", "interval"), [(None, 1, 1), (None, 3, 3), (2, 3, 3), (4, 3, 4)])
def test_outputs_come_no_more_often_than_the_engine_allows(
    wanted: int | None, least: int, interval: int
) -> None:
    build = builder(Config(stream_interval=least))
    assert built(build, params={"stream_interval": wanted}).stream_interval == interval


def test_an_adapter_keeps_the_blocks_of_a_request_to_itself() -> None:
    adapter = Adapter(name="a", int_id=1, path="/a", digest="digest")
    request = built(adapter=adapter, cache_salt="salt")
    assert request.adapter == adapter
    assert request.cache_namespace == CacheNamespace(salt="salt", adapter="digest")


def test_a_soft_prompt_stands_before_the_prompt_and_takes_room() -> None:
    soft = SoftPrompt(name="s", int_id=1, path="/s", digest="soft", num_virtual_tokens=2)
    request = built(soft_prompt=soft)
    assert request.prompt_token_ids == (0, 0, 1, 2, 3)
    assert (request.max_tokens, request.num_virtual_tokens, request.soft_prompt) == (3, 2, soft)
    assert request.cache_namespace == CacheNamespace(adapter="soft")


@pytest.mark.parametrize("pooling", [None, PoolingParams(task="embed")])
def test_a_soft_prompt_leaves_room_for_an_answer(pooling: PoolingParams | None) -> None:
    soft = SoftPrompt(name="s", int_id=1, path="/s", digest="soft", num_virtual_tokens=4)
    assert built(soft_prompt=soft, pooling=pooling).max_tokens == 1
    with pytest.raises(PromptTooLong, match=r"length is 8 tokens\. However, your prompt has 8"):
        built(soft_prompt=attrs.evolve(soft, num_virtual_tokens=5), pooling=pooling)


def test_a_pooled_request_learns_where_the_second_text_begins() -> None:
    pooling = PoolingParams(task="embed")
    assert built(pooling=pooling).pooling == pooling
    found = built(tokenized=ids(1, 2, token_type_start=1), pooling=pooling).pooling
    assert found == PoolingParams(task="embed", token_type_start=1)
    given = PoolingParams(task="embed", token_type_start=2)
    assert built(pooling=given).pooling == given
    assert built(tokenized=ids(1, 2, token_type_start=1)).pooling is None


def test_a_prompt_that_no_longer_fits_into_a_model_that_was_loaded_again_is_refused() -> None:
    model = LoadedModel()
    build = RequestBuilder(EngineConfig(), model, lambda: 1)
    tokenized, params = Tokenized(None, (1,) * 8, ()), SamplingParams(max_tokens=4)
    model.info = model_info(4, 4)
    [request] = build.build("a", params, tokenized, None, arrival_s=0.0)
    assert request.max_tokens == 4
    model.info = model_info(2, 4)
    with pytest.raises(PromptTooLong, match="maximum context length is 8 tokens") as caught:
        build.build("a", params, tokenized, None, arrival_s=0.0)
    assert "leaves no room for an answer" in str(caught.value)
    pooling = PoolingParams(task="embed")
    build.build("a", params, tokenized, None, arrival_s=0.0, pooling=pooling)  # needs no room for an answer
    model.info = model_info(1, 4)
    with pytest.raises(PromptTooLong, match="maximum context length is 4 tokens") as caught:
        build.build("a", params, tokenized, None, arrival_s=0.0, pooling=pooling)
    assert "no room" not in str(caught.value)
