"""`EngineConfig`: the engine's options, each with its unit, its default and the reason for the default.

The configuration is one frozen value, equal whether it came from keyword arguments, command-line flags
(`--max-num-seqs`) or the environment (`TRIOLET_MAX_NUM_SEQS`): the command line is generated from the fields below.
Every field is honoured; an unknown one is an error that names it. `engine_fields` repeats the fields for editors and
type checkers; a test compares the two.
"""

from __future__ import annotations

from typing import Final, Unpack

import attrs

from triolet.config import choices
from triolet.config.address import is_address
from triolet.config.devices import DEVICE, DEVICE_NAMES
from triolet.config.engine_fields import EngineFields
from triolet.config.fields import (
    Configuration,
    bounds,
    factor,
    flag,
    keys,
    matching,
    names,
    one_of,
    option,
    satisfying,
    seconds,
    share,
    text,
    texts,
    whole,
)
from triolet.core.request.param_validation import MAX_ENTRIES
from triolet.core.request.params import MAX_N
from triolet.core.request.request_builder import RequestLimits
from triolet.core.scheduling.policies import registry as policies
from triolet.core.step_plan import MAX_SCHEDULER_STEPS
from triolet.errors import ConfigError

BUILT_IN_MODEL: Final = "triolet-nano"
URL: Final = r"https?://[^\s/]\S*"
DEFAULT_BLOCK_SIZE: Final = 16  # vLLM's
DEFAULT_GPU_MEMORY_UTILIZATION: Final = 0.9  # vLLM's
MAX_TENSOR_PARALLEL_SIZE: Final = 64  # more than any machine has devices
MAX_REPLICAS: Final = 64  # likewise
# Scheduler and runner hold a row for each; no machine that we know computes a larger step faster than two smaller ones.
MAX_NUM_SEQS: Final = 2**16


@attrs.frozen(kw_only=True)
class EngineConfig(Configuration):
    """Configuration of an engine.

    Raises:
        ConfigError: a field of the wrong type or out of range; names the field, the rule and what came.
    """

    model: str | None = option(
        "Folder, GGUF file or hub id of the model; without one, the triolet-nano that ships in the package.",
        default=None,
        rule=text(optional=True),
        converter=lambda model: None if model == BUILT_IN_MODEL else model,
    )
    tokenizer: str | None = option(
        "Folder or GGUF file of the tokenizer, if it is not the model's.",
        default=None,
        rule=text(optional=True),
    )
    chat_template: str | None = option(
        "Chat template in place of the model's own: the path of a file in Jinja, or its text.",
        default=None,
        rule=text(optional=True),
    )
    generation_config: str = option(
        "Where a request's parameters that it leaves out come from: auto is generation_config.json of the model's "
        "folder; vllm leaves that out, but for the tokens that end an answer.",
        default="auto",
        rule=one_of(choices.GENERATION_CONFIGS),
    )
    revision: str | None = option(
        "Branch, tag or commit of a hub model.", default=None, rule=text(optional=True)
    )
    dtype: str = option(
        "Data type of weights, activations and, without kv_cache_dtype, KV cache; auto takes the checkpoint's.",
        default="auto",
        rule=one_of(choices.DTYPES, choices.DTYPE_ALIASES),
    )
    convert: str = option(
        # a model whose folder does not say so may give poor embeddings: the operator must ask for them
        "What the model computes beside answers: embed (embeddings) or classify (scores); auto takes what its folder "
        "says.",
        default="auto",
        rule=one_of(choices.CONVERSIONS),
    )
    classifier_from_token: tuple[str, ...] = option(
        # a tuple and no default pair: which words a reranker was trained to answer is its own
        "Two tokens, such as no,yes, whose difference in logits after the prompt is the score of a model that is no "
        "classifier by its folder, such as Qwen3-Reranker.",
        default=(),
        rule=texts(),
    )
    quantization: str = option(
        # none by default: quantized weights give slightly different answers
        "Quantize the weights while they are loaded (models like Llama, on a CPU): int8 takes half the memory of "
        "bfloat16 and changes the answers little; int4 takes a quarter and changes them more. int8-activations keeps "
        "the integers of a quantized model and rounds what they are multiplied with, which is faster; fp8-activations "
        "rounds it to float8 on a GPU, for a model in FP8. The method of a quantized model is found out by itself; "
        "named, it is checked.",
        default="none",
        rule=one_of(choices.QUANTIZATIONS, choices.QUANTIZATION_ALIASES),
    )
    device: str = option(
        "Device that computes the model: auto, cpu, some cores of it, such as cpu:0-3+8, cuda or, of several GPUs, one "
        "by its number, such as cuda:1; auto takes cuda where there is one.",
        default="auto",
        rule=matching(DEVICE, f"one of {DEVICE_NAMES}"),
    )
    runner: str = option(
        # inline blocks the event loop for the length of a step; tests use it to have a single deterministic thread
        "Where the model runs: in a thread, in a process of its own (after its crash the streams continue), inline in "
        "the event loop (for tests), or in a worker on another machine: remote is one that connects to worker_listen, "
        "ray one that Ray places; auto is a process for a GPU, and a thread for a CPU.",
        default="auto",  # an error of a GPU's driver leaves a process of no more use
        rule=one_of(choices.RUNNERS),
    )
    worker_listen: str | None = option(
        # no default: to open a port must be a decision
        "Address, HOST:PORT, that workers connect to (`triolet worker --connect`), with runner remote or ray; port 0 "
        "takes a free one.",
        default=None,
        rule=satisfying(is_address, "HOST:PORT", optional=True),
    )
    worker_token: str | None = option(
        # workers may be told to run code, and so may the engine that they trust
        "Text that engine and workers must both know, with runner remote; better given in the environment than on the "
        "command line, which others can read.",
        default=None,
        rule=text(optional=True),
        is_secret=True,
    )
    worker_certfile: str | None = option(
        "Certificate chain and its private key, PEM, for workers; turns on TLS between engine and workers.",
        default=None,
        rule=text(optional=True),
    )
    tensor_parallel_size: int = option(
        # 1: to talk over each layer costs more than it gains, unless the model is too large for one device
        "Processes that compute the model together, each with a part of its weights, on a GPU each or on the CPU "
        "(dense models like Llama). After the death of one the streams continue.",
        default=1,
        rule=whole(1, MAX_TENSOR_PARALLEL_SIZE),
    )
    replicas: int | None = option(
        # one: several of them share nothing but the queue, which pays where there are several devices
        "Replicas of the model in this engine, each on a device or on cores of its own. After the death of one its "
        "streams continue at the others. By default one, or one for each of --devices.",
        default=None,
        rule=whole(1, MAX_REPLICAS, optional=True),
    )
    autoscale: tuple[int, int] | None = option(
        # no default: workers that are not needed now cost their owner something
        "Least and greatest number of replicas, MIN,MAX, with runner remote or ray: while requests wait, a worker that "
        "waits becomes one more; when few are left for a minute, one ends.",
        default=None,
        rule=bounds(1, MAX_REPLICAS),
    )
    devices: tuple[str, ...] = option(
        "Devices of the replicas, separated by commas, such as cuda:0,cuda:1 or cpu:0-7,cpu:8-15; by default GPUs by "
        "their numbers, on a CPU a node of memory each, or an equal part of the cores.",
        default=(),
        rule=texts(),
    )
    max_model_len: int | None = option(
        "Longest sequence, prompt and answer together, in tokens; by default the most that model and KV cache allow.",
        default=None,
        rule=whole(2, optional=True, has_suffixes=True),
    )
    block_size: int | None = option(
        # half a block per request is wasted on average; larger blocks waste more, smaller ones make block tables longer
        f"Tokens in a KV block; by default {DEFAULT_BLOCK_SIZE}, for a recurrent model so many that their keys and "
        "values take as much memory as a block's states, or 2048 where it keeps states alone.",
        default=None,
        rule=whole(1, optional=True),
    )
    num_kv_blocks: int | None = option(
        "Blocks in the KV cache; overrides --kv-cache-bytes.",
        default=None,
        rule=whole(1, optional=True),
    )
    kv_cache_bytes: int | None = option(
        "Size of the KV cache in bytes; by default a share of the free memory.",
        default=None,
        rule=whole(1, optional=True, has_suffixes=True),
    )
    kv_cache_dtype: str = option(
        # auto by default: the answers are slightly different
        "Data type of keys and values in the KV cache of a GPU: auto is the model's; fp8 (E4M3), fp8_e4m3 and fp8_e5m2 "
        "take a byte a number, with the scales of the checkpoint (k_scale, v_scale) or 1.",
        default="auto",
        rule=one_of(choices.KV_CACHE_DTYPES),
    )
    attention_backend: str = option(
        # triton by default: the others were never compared with it on a card
        "Attention of prompts on a GPU: triton is the engine's kernel; fa2, fa3 and fa4 are torch's flash attention, "
        "of which 3 and 4 need their packages and 2 a block_size of 256; auto measures all that can compute the model "
        "when it is loaded, and takes the fastest.",
        default="triton",
        rule=one_of(choices.ATTENTION_BACKENDS, choices.ATTENTION_ALIASES),
    )
    gpu_memory_utilization: float = option(
        "Greatest part of a GPU's memory that weights, steps and KV cache take together; without a size the KV cache "
        "gets what is left.",
        default=DEFAULT_GPU_MEMORY_UTILIZATION,
        rule=share(),
    )
    enforce_eager: bool = option(
        # vLLM's name; a graph of a step is the same kernels, launched by the driver
        "Launch the kernels of every step on a GPU one by one, without CUDA graphs: the start is faster and takes less "
        "memory, small batches are much slower.",
        default=False,
        rule=flag(),
    )
    max_num_seqs: int = option(
        "Most requests computed together in one step.",
        default=128,  # vLLM's
        rule=whole(1, MAX_NUM_SEQS),
    )
    max_num_batched_tokens: int | None = option(
        # A new request waits for the end of the current step, so a step must stay short: on a CPU 512 tokens of a 0.6B
        # model take about as long as vLLM's 2048 of an 8B model on a GPU.
        "Most tokens computed in one step; by default 2048, on a CPU 512, or more (up to 2048) if the model computes "
        "them within --max-prefill-delay.",
        default=None,
        rule=whole(1, optional=True, has_suffixes=True),
    )
    max_queued_requests: int = option(
        # Bounded by default: without a bound every request in the queue of an overloaded engine comes too late.
        "Most requests that may wait; one more is refused as overloaded.",
        default=1024,
        rule=whole(1),
    )
    max_queued_tokens: int = option(
        # 2**20 tokens are minutes of prefill on any machine, and a few dozen MiB of token ids.
        "Most prompt tokens that may wait; while so many wait, new requests are refused as overloaded.",
        default=2**20,
        rule=whole(1),
    )
    policy: str = option(
        "Order in which requests are scheduled: "
        + ", ".join(f"{name} ({policy.summary})" for name, policy in policies.POLICIES.items())
        + ".",
        default="fcfs",
        rule=one_of(choices.POLICIES),
    )
    priority_aging: float | None = option(
        # Longer than the wait in a healthy queue, so that priorities hold there; in a long one no request starves.
        "Under policy priority, seconds of waiting that improve a request's priority by 1; none: waiting never does.",
        default=60.0,
        rule=seconds(optional=True),
    )
    fair_ttft_factor: float | None = option(
        # 2 is the wait for a step in flight that is as long as the request's own first step
        "Under policy fair, bound on the time to first token of a client with few requests, as a multiple of the time "
        "on an idle engine; the steps of clients with many requests are kept short for it. none: no bound.",
        default=2.0,
        rule=factor(optional=True),
    )
    max_prefill_delay: float | None = option(
        # readers begin to notice a longer pause in a stream
        "Seconds by which prefill may lengthen a step that also decodes for other requests; none: no bound.",
        default=0.25,
        rule=seconds(optional=True),
    )
    num_scheduler_steps: int = option(
        # so many steps share the overhead of planning; blocks are allocated that far ahead: 16 tokens are one block
        "Most steps computed in a row under one plan, while all requests decode, none waits and none ends.",
        default=16,
        rule=whole(1, MAX_SCHEDULER_STEPS),
    )
    async_scheduling: bool | None = option(
        # None: on a CPU, num_scheduler_steps gives the same for less, and the ranks of a group are sent a plan after
        # the result
        "Whether a step is planned while the one before it is computed, instead of num_scheduler_steps under one "
        "plan; not with speculative. By default on a GPU, unless several compute the model together.",
        default=None,
        rule=flag(optional=True),
    )
    enable_prefix_caching: bool = option(
        "Reuse the KV cache of prompts that begin with the same tokens.", default=True, rule=flag()
    )
    seed: int = option(
        "Seed of the engine; a request without a seed draws one from it.", default=0, rule=whole(0)
    )
    stream_interval: int = option(
        "Tokens between two outputs of a stream, after the first token; requests may ask for more.",
        default=1,
        rule=whole(1),
    )
    hold_back: str = option(
        # the whole text is the same with both
        "How much streamed text is held back while a stop string may be forming: exact = only a possible prefix; "
        "blind = always len(longest stop) - 1 characters, as vLLM does.",
        default="exact",
        rule=one_of(choices.HOLD_BACKS),
    )
    logprobs_mode: str = option(
        "Distribution that logprobs are computed from: the model's own (raw), or the one after penalties, temperature "
        "and filters (processed); given as log-probabilities or as logits.",
        default="raw_logprobs",
        rule=one_of(choices.LOGPROBS_MODES),
    )
    max_logprobs: int = option(
        "Most logprobs or prompt_logprobs per position; -1: the whole vocabulary.",
        default=20,  # vLLM's
        rule=whole(-1),
    )
    max_n: int = option(
        # as many as one step computes by default; more would wait for each other
        "Most answers to one prompt (n).",
        default=128,
        rule=whole(1, MAX_N),
    )
    max_stop_strings: int = option("Most stop strings in a request.", default=128, rule=whole(0, MAX_ENTRIES))
    max_logit_bias: int = option(
        "Most token ids in a request's logit_bias.",
        default=1024,  # what vLLM's newer runner takes
        rule=whole(0, MAX_ENTRIES),
    )
    max_bad_words: int = option(
        "Most bad_words in a request.",
        default=128,  # vLLM's
        rule=whole(0, MAX_ENTRIES),
    )
    max_grammar_bytes: int = option(
        "Longest schema, regular expression or grammar in a request's structured_outputs, in bytes.",
        default=2**17,  # twenty times the largest schemas that we have seen in use
        rule=whole(1, 2**20),
    )
    max_grammars: int = option(
        # each is a process of about ten MB; a program uses a handful of schemas, which stay compiled
        "Most compiled grammars kept for structured outputs, each in a process of its own; a request with one more "
        "waits.",
        default=32,
        rule=whole(1, 1024),
    )
    grammar_timeout: float = option(
        # usual schemas take milliseconds
        "Seconds that a grammar may take to compile, or to compute one bitmask. Time in which its process waits for a "
        "processor does not count, up to ten times as much.",
        default=2.0,
        rule=seconds(),
    )
    grammar_memory_bytes: int = option(
        "Memory that a grammar may take, in bytes, beyond the vocabulary that all share.",
        default=2**28,
        rule=whole(2**20),
    )
    tool_parser: str = option(
        "Format in which the model writes tool calls; auto detects it from the chat template.",
        default="auto",
        rule=one_of(choices.TOOL_PARSERS, choices.TOOL_PARSER_ALIASES),
    )
    reasoning_parser: str = option(
        "Format in which the model marks its reasoning; auto detects it from the chat template.",
        default="auto",
        rule=one_of(choices.REASONING_PARSERS, choices.REASONING_PARSER_ALIASES),
    )
    speculative: str = option(
        "Speculative decoding, which computes several tokens in one step: ngram takes the draft from an earlier "
        "occurrence of the last tokens in prompt and answer. The answers are the same.",
        default="none",
        rule=one_of(choices.SPECULATIVE),
    )
    num_speculative_tokens: int = option(
        # a decode is bound by reading the weights, so four more tokens cost little; a fifth is seldom accepted
        "Most draft tokens of a request in one step.",
        default=4,
        rule=whole(1, 16),
    )
    prompt_lookup_min: int = option(
        # two tokens, a word or less, often agree by chance
        "Tokens at the end of the sequence that must have occurred before for a draft to be taken from there.",
        default=3,
        rule=whole(1, 16),
    )
    enable_lora: bool = option(
        # off by default: the decoder with adapters is slower than the C++ one
        "Serve LoRA adapters beside the model.",
        default=False,
        rule=flag(),
    )
    lora_modules: tuple[str, ...] = option(
        "LoRA adapters to load at the start, as NAME=FOLDER, separated by commas; over HTTP the name is a model's.",
        default=(),
        rule=texts(),
    )
    prompt_adapters: tuple[str, ...] = option(
        "Prompt adapters (soft prompts) to load at the start, as NAME=FOLDER, separated by commas.",
        default=(),
        rule=texts(),
    )
    max_loras: int = option(
        "Most different LoRA adapters in one step.",
        default=1,  # vLLM's
        rule=whole(1, MAX_NUM_SEQS),
    )
    max_lora_rank: int = option(
        "Highest rank of a LoRA adapter.",
        default=16,  # vLLM's
        rule=whole(1),
    )
    max_cpu_loras: int | None = option(
        "Most LoRA adapters that are kept in memory, those in use included; by default max_loras, or all of "
        "lora_modules if those are more.",
        default=None,
        rule=whole(1, optional=True),
    )
    lora_dtype: str = option(
        "Data type in which LoRA adapters are kept and multiplied; auto takes the model's.",
        default="auto",
        rule=one_of(choices.DTYPES, choices.DTYPE_ALIASES),
    )
    worker_extension: str | None = option(
        "Class, as module:Class, whose methods collective_rpc calls where the model is computed; it is mixed into the "
        "worker.",
        default=None,
        rule=text(optional=True),
    )
    weights_cache: str | None = option(
        # None: the file is as large as the packed weights
        "Folder where the packed weights of a model on the CPU kernels are kept, for a faster start; made if it is "
        "missing.",
        default=None,
        rule=text(optional=True),
    )
    calibration: str = option(
        # a choice changes no token, so that a measurement on a busy machine can do no harm but to the speed
        "Whether choices of the CPU kernels are measured when a model is loaded (at most 0.3 s): auto does so once for "
        "a model and machine and keeps them in the cache folder, force does so again, off takes fixed ones.",
        default="auto",
        rule=one_of(choices.CALIBRATIONS),
    )
    kv_store: str | None = option(
        # None: it holds what prompts say, as numbers, and takes disk space
        "Folder of a prefix store: keys and values of prefixes are written there, and read by later starts and by "
        "other engines with the same model; made if it is missing.",
        default=None,
        rule=text(optional=True),
    )
    kv_store_bytes: int = option(
        "Most bytes of the files in kv_store; the ones that were used least recently make way.",
        default=16 * 2**30,  # 150,000 tokens of a model with 0.6 billion parameters
        rule=whole(1),
    )
    kv_pool_bytes: int = option(
        "Memory for keys and values of prefixes beyond the KV cache, bytes; it lasts as long as the model is loaded.",
        default=0,  # the cache itself takes a share of the memory
        rule=whole(0),
    )
    profile_dir: str | None = option(
        # None: a profile slows the steps down, and writes files
        "Folder for the traces of start_profile and stop_profile, which are there only with it; made if it is missing.",
        default=None,
        rule=text(optional=True),
    )
    record: str | None = option(
        # None: a recording holds every prompt and answer
        "File to which every request and its answer are appended, for `triolet replay`.",
        default=None,
        rule=text(optional=True),
    )
    served_model_name: str | tuple[str, ...] | None = names(
        "Names of the model, shown under the first one; by default the last part of its folder or hub id."
    )
    api_keys: tuple[str, ...] = option(
        "API keys of a server of this engine, separated by commas; without any, no key is needed.",
        default=(),
        rule=keys(),
        is_secret=True,
    )
    step_timeout: float | None = option(
        # Twice the time of a step of 512 tokens with a model of a few billion parameters on a few CPU cores, and more
        # than compiling kernels adds to a first step. A late restart is better than killing a step that would end.
        "Seconds after which a step counts as hung: health checks fail, and a runner process is killed and restarted. "
        "An idle scheduler, tokenizer or detokenizer that leaves a message unread for as long, 2 at most, is "
        "restarted, too. none: never.",
        default=60.0,
        rule=seconds(optional=True),
    )
    keep_standby: bool = option(
        # true although it takes some memory: most of the time of a restart is the import of torch
        "Keep a second process that has imported torch: the runner process is a fork of it, and so is the next one if "
        "that dies or hangs. Elsewhere than on Linux it takes the place of the first one that does.",
        default=True,
        rule=flag(),
    )
    sleep_after: float | None = option(
        # never by default: the first request after it waits until the model is read again
        "Seconds without a request after which the engine goes to sleep: it gives up the model and its memory, and the "
        "next request wakes it. none: never.",
        default=None,
        rule=seconds(optional=True),
    )
    log_stats: bool = option(
        "Log a line of statistics every ten seconds while there is work.", default=True, rule=flag()
    )
    otlp_traces_endpoint: str | None = option(
        # None: traces need a collector
        "URL to which a span for each request is sent, with OpenTelemetry over HTTP, such as "
        "http://localhost:4318/v1/traces; needs the extra otel.",
        default=None,
        rule=matching(URL, "an http:// or https:// URL", optional=True),
    )
    allow_special_tokens: bool = option(
        # true as in vLLM and transformers: programs that write the chat template's tokens themselves need it
        "Whether texts of prompts may hold special tokens. If not, they are text like any other, and only the chat "
        "template writes special tokens.",
        default=True,
        rule=flag(),
    )
    trust_remote_code: bool = option(
        "Allow Python code in the model folder to run.", default=False, rule=flag()
    )

    def __attrs_post_init__(self) -> None:
        if self.async_scheduling and self.speculative != "none":
            raise ConfigError("async_scheduling", f"false with speculative {self.speculative!r}", True)
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules", "given together with enable_lora", self.lora_modules)
        if self.max_cpu_loras is None:
            return
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError("max_cpu_loras", f"at least max_loras ({self.max_loras})", self.max_cpu_loras)
        if self.max_cpu_loras < len(self.lora_modules):
            rule = f"at least the number of lora_modules ({len(self.lora_modules)})"
            raise ConfigError("max_cpu_loras", rule, self.max_cpu_loras)

    @property
    def stores_blocks(self) -> bool:
        """Tell whether KV of prefixes is kept outside of the KV cache."""
        return self.kv_store is not None or self.kv_pool_bytes > 0

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas, with `autoscale` the greatest one."""
        if self.autoscale is not None:
            return self.autoscale[1]
        return self.replicas or len(self.devices) or 1

    @property
    def num_first_replicas(self) -> int:
        """Return how many replicas an engine begins with."""
        return self.num_replicas if self.autoscale is None else self.autoscale[0]

    @property
    def num_kept_loras(self) -> int:
        """Return the most LoRA adapters in memory; by default there is room for all of `lora_modules`."""
        return self.max_cpu_loras or max(self.max_loras, len(self.lora_modules))

    @classmethod
    def of(cls, config: EngineConfig | str | None = None, /, **fields: Unpack[EngineFields]) -> EngineConfig:
        """Return the configuration that a caller of `open_engine` describes: one of this class, or a model's name.

        Raises:
            ConfigError: another type, two models, or a wrong or unknown field.
        """
        if isinstance(config, str):
            model = fields.setdefault("model", config)
            if model != config:
                raise ConfigError(
                    "model", "given once, as the first argument or as a keyword", [config, model]
                )
            return cls.create(**fields)
        return cls.create(config, **fields)

    @property
    def model_name(self) -> str:
        """Name under which the model is shown."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served: the one that it is shown under first, its folder or hub id last."""
        given = self.served_model_name or (self.model or BUILT_IN_MODEL).rstrip("/").rsplit("/", 1)[-1]
        listed = (given,) if isinstance(given, str) else given
        return tuple(dict.fromkeys((*listed, *filter(None, (self.model,)))))

    @property
    def request_limits(self) -> RequestLimits:
        """Limits of a single request."""
        return RequestLimits(
            **{field.name: getattr(self, field.name) for field in attrs.fields(RequestLimits)}
        )
