"""`EngineConfig`: every choice an operator has, each with its unit, its default and the reason for it.

One frozen value, the same whether it came from keyword arguments, command-line flags (`--max-num-seqs`) or
the environment (`TRIOLET_MAX_NUM_SEQS`): the command line is generated from the fields below and decides
nothing itself. Only what is honoured is a field; an unknown one is an error that names it.
"""

from __future__ import annotations

from typing import Final

import attrs

from triolet.config.fields import Configuration, flag, one_of, option, seconds, text, texts, times, whole
from triolet.core.request.limits import RequestLimits
from triolet.core.request.param_validation import MAX_ENTRIES
from triolet.core.request.params import MAX_N
from triolet.core.scheduling.policies import registry as policies
from triolet.core.step_plan import MAX_SCHEDULER_STEPS
from triolet.core.tools import REASONING_FORMATS, TOOL_FORMATS

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
DEVICES: Final = ("auto", "cpu", "cuda")
QUANTIZATIONS: Final = ("none", "int8", "int4")
RUNNERS: Final = ("thread", "process", "inline")
POLICIES: Final = tuple(policies.POLICIES)
LOGPROBS_MODES: Final = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
TOOL_PARSERS: Final = ("auto", "none", *TOOL_FORMATS)
REASONING_PARSERS: Final = ("auto", "none", *REASONING_FORMATS)
HOLD_BACKS: Final = ("exact", "blind")
SPECULATIVE: Final = ("none", "ngram")
# The scheduler and the runner keep a place for each row; a step of more has been of use to nobody yet.
MAX_NUM_SEQS: Final = 2**16


@attrs.frozen(kw_only=True)
class EngineConfig(Configuration):
    """What an engine is started with.

    Raises:
        ConfigError: a field of the wrong type or out of range; names the field, the rule and what came.
    """

    model: str | None = option(
        "Folder or hub id of the model; without one, the triolet-nano that ships in the package.",
        default=None,
        validator=text(optional=True),
    )
    tokenizer: str | None = option(
        "Folder of the tokenizer, if it is not the model's.", default=None, validator=text(optional=True)
    )
    revision: str | None = option(
        "Branch, tag or commit of a hub model.", default=None, validator=text(optional=True)
    )
    dtype: str = option(
        "Of weights, activations and KV; auto is what the checkpoint says.",
        default="auto",
        validator=one_of(DTYPES),
    )
    quantization: str = option(
        # Off by default: it answers a little differently.
        "Of the weights, while they are read, for models like Llama on a CPU: int8 rounds them to bytes, half the "
        "memory of bfloat16, at little loss; int4 to half of that, at more.",
        default="none",
        validator=one_of(QUANTIZATIONS),
    )
    device: str = option("auto is cuda where there is one.", default="auto", validator=one_of(DEVICES))
    runner: str = option(
        # inline blocks the loop for the length of a step; it is for tests, which want one deterministic
        # thread.
        "Where the model runs: in a thread, in a process of its own (whose crash costs streams a pause), or inline "
        "in the event loop (for tests).",
        default="thread",
        validator=one_of(RUNNERS),
    )
    max_model_len: int | None = option(
        "Longest sequence, prompt and answer together, in tokens; by default what model and KV cache allow.",
        default=None,
        validator=whole(2, optional=True),
    )
    block_size: int = option(
        # vLLM's default: small enough that half a block wasted per request is nothing, large enough for short
        # tables.
        "Tokens in a KV block.",
        default=16,
        validator=whole(1),
    )
    num_kv_blocks: int | None = option(
        "Blocks in the KV cache; wins over --kv-cache-bytes.",
        default=None,
        validator=whole(1, optional=True),
    )
    kv_cache_bytes: int | None = option(
        "Size of the KV cache in bytes; by default a share of the memory that is free.",
        default=None,
        validator=whole(1, optional=True),
    )
    max_num_seqs: int = option(
        "Requests computed together in a step.",
        default=128,  # vLLM's
        validator=whole(1, MAX_NUM_SEQS),
    )
    max_num_batched_tokens: int | None = option(
        # A step must stay short, or whoever comes waits for its end: on a CPU 512 tokens of a 0.6B model take about
        # as long as vLLM's 2048 take an 8B model on a GPU. Small models take as many in no time.
        "Tokens computed in a step, at most; by default 2048, on a CPU 512 or as many of these as max_prefill_delay "
        "has time for.",
        default=None,
        validator=whole(1, optional=True),
    )
    max_queued_requests: int = option(
        # Bounded by default: a queue that never says no turns an overload into an outage for everybody in it.
        "Requests that may wait; one more is refused as overloaded.",
        default=1024,
        validator=whole(1),
    )
    max_queued_tokens: int = option(
        # 2**20 tokens are minutes of prefill on any machine, and a few dozen MiB of token ids.
        "Prompt tokens that may wait; a request that finds this many waiting is refused as overloaded.",
        default=2**20,
        validator=whole(1),
    )
    policy: str = option(
        "Order in which requests are scheduled: "
        + ", ".join(f"{name} ({policy.summary})" for name, policy in policies.POLICIES.items())
        + ".",
        default="fcfs",
        validator=one_of(POLICIES),
    )
    priority_aging: float | None = option(
        # A minute is longer than a healthy queue, so priorities mean what they say; and nobody waits for ever.
        "Seconds of waiting that weigh as much as one step of priority; none is never.",
        default=60.0,
        validator=seconds(optional=True),
    )
    fair_ttft_factor: float | None = option(
        # Twice is the wait for a step in flight that is as long as one's own first step.
        "Under fair, how many times as long as on an idle engine a client with few requests may wait for a first token "
        "beside one with many, whose steps are kept short for that; none is no bound.",
        default=2.0,
        validator=times(),
    )
    max_prefill_delay: float | None = option(
        # A pause in a stream that readers begin to notice; a small model computes a whole step's tokens in that time.
        "Seconds by which prompts may lengthen a step in which others get their next tokens; none is no bound.",
        default=0.25,
        validator=seconds(optional=True),
    )
    num_scheduler_steps: int = option(
        # What it saves is shared by so many steps; blocks are handed out that much ahead, one of the default size.
        "Steps that are computed in a row, at most, before the next ones are planned, while everybody decodes, nobody "
        "waits and nobody leaves.",
        default=16,
        validator=whole(1, MAX_SCHEDULER_STEPS),
    )
    enable_prefix_caching: bool = option("Reuse the KV of equal beginnings.", default=True, validator=flag)
    seed: int = option(
        "Requests without a seed of their own draw theirs from this one.", default=0, validator=whole(0)
    )
    stream_interval: int = option(
        "Tokens from one output of a stream to the next, after the first token's; requests may ask for more.",
        default=1,
        validator=whole(1),
    )
    hold_back: str = option(
        # blind is what vLLM does. The whole text is the same.
        "What streamed text waits for a stop string: exact holds back only what may begin one, blind always as many "
        "characters as the longest has, less one.",
        default="exact",
        validator=one_of(HOLD_BACKS),
    )
    logprobs_mode: str = option(
        "What logprobs are of: the model's own distribution (raw) or what penalties, temperature and filters leave of "
        "it (processed); as log-probabilities or as logits.",
        default="raw_logprobs",
        validator=one_of(LOGPROBS_MODES),
    )
    max_logprobs: int = option(
        "Most logprobs or prompt_logprobs per position; -1 is the whole vocabulary.",
        default=20,  # vLLM's
        validator=whole(-1),
    )
    max_n: int = option(
        # As many as one step computes by default: more would wait for each other.
        "Most answers to one prompt.",
        default=128,
        validator=whole(1, MAX_N),
    )
    max_stop_strings: int = option(
        "Most stop strings of a request.", default=128, validator=whole(0, MAX_ENTRIES)
    )
    max_logit_bias: int = option(
        "Most token ids in a request's logit_bias.",
        default=1024,  # what vLLM's newer runner takes
        validator=whole(0, MAX_ENTRIES),
    )
    max_bad_words: int = option(
        "Most bad_words of a request.",
        default=128,  # vLLM's
        validator=whole(0, MAX_ENTRIES),
    )
    max_grammar_bytes: int = option(
        "Most bytes of a request's structured_outputs: schema, expression or grammar.",
        default=2**17,  # twenty times the largest schemas that people write
        validator=whole(1, 2**20),
    )
    max_grammars: int = option(
        # Each is a process of some ten MB. A program has a handful of schemas, and finds them ready.
        "Grammars of structured outputs that are kept ready, each in a process of its own; a request with one more "
        "waits.",
        default=32,
        validator=whole(1, 1024),
    )
    grammar_timeout: float = option(
        # Schemas that people write take some milliseconds; this leaves room for a busy machine.
        "Seconds that a grammar may take to compile, or to say what may come next.",
        default=2.0,
        validator=seconds(),
    )
    grammar_memory_bytes: int = option(
        "Memory that a grammar may take, beyond the vocabulary that all share.",
        default=2**28,
        validator=whole(2**20),
    )
    tool_parser: str = option(
        "How the model writes calls of tools; auto is told from its chat template.",
        default="auto",
        validator=one_of(TOOL_PARSERS),
    )
    reasoning_parser: str = option(
        "How the model marks its reasoning; auto is told from its chat template.",
        default="auto",
        validator=one_of(REASONING_PARSERS),
    )
    speculative: str = option(
        "Try several tokens in one step: ngram guesses them from what the prompt and the answer have said before. The "
        "answers are the same.",
        default="none",
        validator=one_of(SPECULATIVE),
    )
    num_speculative_tokens: int = option(
        # Beside what a decode reads anyway, four more tokens cost little; a fifth is seldom right if four were not.
        "Most tokens that a request tries beyond its next one.",
        default=4,
        validator=whole(1, 16),
    )
    prompt_lookup_min: int = option(
        # Two tokens, a word or less, agree by chance all the time.
        "Tokens at the end of an answer that must have occurred before, so that what followed is a guess.",
        default=3,
        validator=whole(1, 16),
    )
    served_model_name: str | None = option(
        "Name under which the model is shown; by default its folder's or hub id's last part.",
        default=None,
        validator=text(optional=True),
    )
    api_keys: tuple[str, ...] = option(
        "Bearer keys that a server of this engine asks for, separated by commas; without any, everybody is let in.",
        default=(),
        validator=texts,
        is_secret=True,
    )
    step_timeout: float | None = option(
        # Twice what a step of 512 tokens takes a model of a few billion parameters on a few CPU cores, and more than
        # compiling kernels adds to a first one. Killing a step that would have ended is worse than a late rescue.
        "Seconds after which a step counts as hung: health turns bad, and a runner process is killed and started "
        "again. As long may a message lie unread before a scheduler, tokenizer or detokenizer that does nothing else: "
        "then it is ended and started again. None is never.",
        default=60.0,
        validator=seconds(optional=True),
    )
    log_stats: bool = option(
        "Log a line about the last ten seconds, as long as there is work.", default=True, validator=flag
    )
    otlp_traces_endpoint: str | None = option(
        # None: a trace is worth nothing without somebody who collects it.
        "URL to which a span for each request is sent, with OpenTelemetry over HTTP, such as "
        "http://localhost:4318/v1/traces; needs the extra otel.",
        default=None,
        validator=text(optional=True),
    )
    trust_remote_code: bool = option(
        "Let a model folder run Python code of its own.", default=False, validator=flag
    )

    @property
    def model_name(self) -> str:
        """The name to show for the model."""
        if self.served_model_name:
            return self.served_model_name
        return self.model.rstrip("/").rsplit("/", 1)[-1] if self.model else "triolet-nano"

    @property
    def request_limits(self) -> RequestLimits:
        """How much one request may ask for."""
        return RequestLimits(
            **{field.name: getattr(self, field.name) for field in attrs.fields(RequestLimits)}
        )
