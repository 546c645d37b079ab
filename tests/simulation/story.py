"""What happens in one simulated run, drawn from its seed: an engine's limits, its clients, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from tests.actors.harness import LONGEST, VOCAB, LetterTokenizer
from tests.core.fake_model import CIRCLE, REPETITIVE
from tests.simulation.adapters import BROKEN, NAMES
from tests.simulation.forms import draw_forms
from tests.simulation.operations import OPERATION_POINTS, Operation, draw_operations
from triolet.core.kv_cache.cache_groups import CacheGroups
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.tokenizer_interface import Tokenize
from triolet.core.step_plan import RowStart

MAX_STEP_S = 0.02
FOR_EVER_S = 1e6
FORMED = 0.15  # of the stories: in these, many answers have a form
AHEAD = 0.6  # of the stories without drafts: in these, up to two steps are in flight
IN_A_PROCESS = 0.5  # of these: in these, a process is sent the second plan before it has answered the first
POOLED = 0.25  # of the stories: in these, many requests are pooled
ADAPTED = 0.2  # of the stories: in these, most requests have an adapter
WINDOWED = 0.4  # of the stories: in these, the layers of the model have windows
OPERATED = 0.25  # of the stories: in these, the engine sleeps, pauses, or gets other weights

Mood = Literal["calm", "faulty", "poisoned", "escalating", "deadly"]
Manner = Literal["read", "slow", "impatient", "leave", "raise", "sit", "complete"]
Ending = Literal["wait", "drain", "leave"]
Retraining = Literal["reload", "leave"]
Kind = Literal["error", "panic", "group", "memory", "disk"]

RUNNER_POINTS = (
    "runner.execute.before",
    "runner.execute.middle",
    "runner.execute.after",
    "runner.hang",
    "runner.tell.before",
    "runner.tell.after",
)
SCHEDULER_POINTS = (
    "scheduler.arrivals.before",
    "scheduler.arrivals.after",
    "scheduler.expire.before",
    "scheduler.expire.after",
    "scheduler.plan.before",
    "scheduler.plan.middle",
    "scheduler.preempt.middle",
    "scheduler.plan.after",
    "scheduler.progress.before",
    "scheduler.progress.after",
    "scheduler.apply.before",
    "scheduler.commit.before",
    "scheduler.commit.after",
    "scheduler.finish.middle",
    "scheduler.apply.after",
)
START_POINTS = ("runner.start", "scheduler.start", "shortage.runner")
# Loads after the first: one makes no progress, or the machine has become so slow that all take seconds.
LOAD_POINTS = ("runner.load_hang", "runner.load_slow")
TOKENIZER_POINTS = ("tokenizer.answer.before", "tokenizer.answer.after")
DETOKENIZER_POINTS = ("detokenizer.deliver.before", "detokenizer.deliver.after")
TEXT_POINTS = (*TOKENIZER_POINTS, *DETOKENIZER_POINTS)
# What no supervisor hears of: one request fails, or nothing at all happens.
OTHER_POINTS = (
    "tokenizer.decode",
    "runner.repeats_itself",
    "runner.repeats_the_past",
    "runner.out_of_memory",
    "shortage.tokenizer",
)
# Where answers have forms.
FORM_POINTS = (
    "guidance.sort.before",
    "guidance.sort.after",
    "guidance.answer.before",
    "guidance.answer.after",
    "grammars.die",
    "grammars.fail",
    "grammars.hang",
    "guidance.hang",
    "shortage.start",
    "shortage.open",
    "shortage.guide",
)
# Where requests have adapters: reading the files in the engine, then in the runner, then there in a step.
ADAPTER_POINTS = ("adapter.read", "adapter.prepare", "adapter.place")
SHORTAGE_POINTS = ("shortage.start", "shortage.open", "shortage.guide")
RARE_POINTS = ("scheduler.preempt", "scheduler.finish", "tokenizer", "runner.rep", "adapter")
# An actor does nothing for a while.
HANG_POINTS = ("scheduler.hang", "detokenizer.hang", "tokenizer.hang")


@attrs.frozen
class Fault:
    """Something breaks the n-th time that a point is reached; see `faults`."""

    point: str
    nth: int
    kind: Kind


@attrs.frozen(kw_only=True)
class Ask:
    """One request, and how its client behaves.

    Args:
        number: names the client.
        request_id: some clients use the id of another.
        at_s: when it comes; bursts share a moment.
        prompt: token ids, or a text that must be tokenised first.
        params: fields of `SamplingParams`.
        arguments: of `generate`; a `deadline` is relative to `at_s`.
        manner: how it reads.
        pace_s: between two reads, of one read, or of sitting there.
        num_outputs: after which it leaves or raises.
        cancel_after_s: its scope has a time limit.
        cancel_at_checkpoint: its scope is cancelled at this checkpoint after `at_s`.
        abort_after_s: another task aborts it.
        is_pooled: it wants a vector, and no answer.
        adapter: name of the one that computes the answer; None for none.
        retraining: the adapter's files are changed before it asks: it wants them loaded in place, or does not care.
        poison_at: every step that computes this token of its sequence, or a later one, crashes the runner.
    """

    number: int
    request_id: str
    at_s: float
    prompt: tuple[int, ...] | str
    params: dict[str, Any]
    arguments: dict[str, Any]
    manner: Manner
    pace_s: float
    num_outputs: int
    cancel_after_s: float | None = None
    cancel_at_checkpoint: int | None = None
    abort_after_s: float | None = None
    is_pooled: bool = False
    adapter: str | None = None
    retraining: Retraining | None = None
    poison_at: int | None = None

    @property
    def num_answers(self) -> int:
        """How many it wants."""
        return int(self.params.get("n", 1))

    def is_of(self, start: RowStart) -> bool:
        """Whether a row of the runner's is one of this one's answers."""
        prompt = self.prompt
        if prompt == "panic":
            return False
        token_ids = (
            LetterTokenizer().tokenize(Tokenize(prompt)).token_ids if isinstance(prompt, str) else prompt
        )
        if self.is_pooled:
            return (start.request_id, start.prompt_token_ids) == (self.request_id, token_ids)
        answers = [(self.request_id, self.params["seed"])]
        if self.num_answers > 1:
            answers = [
                (f"{index}_{name}", seed + index)
                for index in range(self.num_answers)
                for name, seed in answers
            ]
        return (start.request_id, start.seed) in answers and start.prompt_token_ids == token_ids


@attrs.frozen(kw_only=True)
class Story:
    """One run.

    Args:
        seed: it was drawn from, and decides everything else, too.
        mood: how much goes wrong: nothing; what is mended at once; requests that crash the runner each time; so much
            that a supervisor gives up and its own supervisor mends that; more than any limit of restarts allows.
        limits: fields of `EngineConfig`.
        num_blocks: of the KV cache, often too few.
        block_size: tokens.
        eos_token_ids: of the model.
        restart_s: what a runner's restart takes.
        later_num_blocks: of the KV cache after a restart, where there is less memory then.
        windows: of the model's cache groups, tokens.
        longest: sequence of the model, tokens.
        num_replicas: replicas of the model; see `replicas`.
        kills: the replica, and its step in which its process is killed from outside.
        memory_tokens: a step with more tokens finds no memory.
        hang_s: how long an actor does nothing when it hangs; often longer than its watchdog lets it.
        costs_s: what a step says it took: any step, a row, a further token; None if it does not say.
        asks: the clients, in order of arrival.
        faults: at most one per point and count.
        faults_until_s: from then on nothing breaks any more.
        ending: what is done with those that are still there then.
        operations: sleep, pauses and new weights.
    """

    seed: int
    mood: Mood
    limits: dict[str, Any]
    num_blocks: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    restart_s: float
    later_num_blocks: int | None = None
    windows: tuple[int | None, ...] = (None,)
    longest: int = LONGEST
    num_replicas: int = 1
    kills: tuple[tuple[int, int], ...] = ()
    memory_tokens: int | None = None
    hang_s: float = 0.0
    costs_s: tuple[float, float, float] | None = None
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    faults_until_s: float
    ending: Ending
    operations: tuple[Operation, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""
        return self.longest_in(self.num_blocks)

    def longest_in(self, num_blocks: int) -> int:
        """Longest sequence that so many blocks can hold, tokens."""
        return min(CacheGroups(self.windows).longest(num_blocks, self.block_size), self.longest)

    @property
    def is_in_a_process(self) -> bool:
        """Whether the runner is that of `process`."""
        is_ahead = self.limits.get("async_scheduling", False)
        return is_ahead and random.Random(f"process {self.seed}").random() < IN_A_PROCESS


def draw_story(seed: int) -> Story:
    """The story of a seed; the same one in every process."""
    story, forms = _draw_shortages(_draw_without_forms(seed)), random.Random(f"forms {seed}")
    windows = random.Random(f"windows {seed}")
    if windows.random() < WINDOWED:
        story = _draw_windows(windows, story)
    adapters = random.Random(f"adapters {seed}")
    if adapters.random() < ADAPTED:
        story = _draw_adapters(adapters, story)
    operations = random.Random(f"operations {seed}")
    if operations.random() < OPERATED:
        story = _draw_operated(operations, story)
    if forms.random() >= FORMED:
        return attrs.evolve(story, asks=_draw_pooled(random.Random(f"pooled {seed}"), story.asks))
    asks = draw_forms(forms, story.asks, story.eos_token_ids)
    return attrs.evolve(story, asks=asks, faults=(*story.faults, *_draw_form_faults(forms, story.mood)))


def _draw_without_forms(seed: int) -> Story:
    rng = random.Random(seed)
    mood: Mood = rng.choices(("calm", "faulty", "poisoned", "escalating", "deadly"), (20, 45, 20, 10, 5))[0]
    block_size = rng.choice((1, 2, 3, 4, 8))
    is_famine = rng.random() < 0.4
    num_tokens = rng.randint(10, 24) if is_famine else rng.randint(8, 72)
    num_blocks = max(2, -(-num_tokens // block_size))
    asks = _draw_asks(rng, num_blocks * block_size, most=24 if mood == "poisoned" else 10)
    if mood == "poisoned":
        asks = _poison(rng, asks)
    guesses = random.Random(
        f"guesses {seed}"
    )  # dice of their own: the rest of the story stays as it is without
    if is_guessing := guesses.random() < 0.5:
        asks = _repeat(guesses, asks)
    paces = random.Random(f"paces {seed}")
    if costs_s := _sometimes(paces, 0.5, (1.0, paces.choice((0.0, 0.1, 1.0)), paces.choice((0.0, 0.1, 1.0)))):
        asks = tuple(
            attrs.evolve(ask, arguments=ask.arguments | {"client": "hog" if ask.number % 5 else "light"})
            for ask in asks
        )
    asks = _draw_several(random.Random(f"answers {seed}"), asks)
    ending: Ending = rng.choices(("wait", "drain", "leave"), (70, 20, 10))[0]
    is_sudden = ending == "drain" and rng.random() < 0.7  # the others are mostly through by then
    return Story(
        seed=seed,
        mood=mood,
        limits=_draw_limits(rng, is_famine=is_famine)
        | (_draw_guesses(guesses) if is_guessing else {})
        | ({} if seed % 3 else {"policy": "fair"})
        | {"num_scheduler_steps": random.Random(f"runs {seed}").choice((1, 2, 16))}
        | {"async_scheduling": not is_guessing and random.Random(f"ahead {seed}").random() < AHEAD}
        | {"max_prefill_delay": paces.choice((0.1, 2.0)), "fair_ttft_factor": paces.choice((1.1, 3.0, None))},
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        restart_s=rng.choice((0.0, 0.0, 0.1)),
        later_num_blocks=_draw_later_blocks(random.Random(f"memory {seed}"), num_blocks),
        memory_tokens=_sometimes(rng, 0.1, rng.randint(3, 12)),
        hang_s=_draw_hang(random.Random(f"hang {seed}"), mood, rng.choice((0.01, 0.2))),
        costs_s=costs_s,
        asks=asks,
        faults=_draw_faults(rng, mood),
        faults_until_s=asks[-1].at_s + rng.choice((0.0, 0.01, 0.05) if is_sudden else (0.1, 0.4, 1.0)),
        ending=ending,
    )


def _draw_limits(rng: random.Random, *, is_famine: bool) -> dict[str, Any]:
    """With a famine of blocks go many requests that run together, and take them from each other."""
    return {
        "max_num_seqs": rng.randint(3, 6) if is_famine else rng.randint(1, 6),
        "max_num_batched_tokens": rng.choice((5, 9, 16, 24) if is_famine else (1, 2, 5, 9, 16, 24)),
        "max_queued_requests": rng.choice((1, 3, 20, 20, 20)),
        "max_queued_tokens": rng.choice((12, 1000, 1000, 1000)),
        "policy": rng.choice(("fcfs", "priority")),
        "enable_prefix_caching": rng.random() < 0.8,
        "step_timeout": rng.choice((0.05, 0.3)),
    }


def _draw_later_blocks(rng: random.Random, num_blocks: int) -> int | None:
    return rng.randint(max(2, num_blocks // 4), num_blocks) if rng.random() < 0.25 else None


def _draw_windows(rng: random.Random, story: Story) -> Story:
    """Some layers, or all, have windows: the same requests often have just as many blocks as they need with them."""
    window, size, longest = rng.choice((1, 2, 3, 5, 8, 13)), story.block_size, story.max_model_len
    windows = rng.choice(((window,), (window,), (None, window), (None, window, window)))
    groups = CacheGroups(windows)
    least = groups.num_needed(longest, size)
    num_blocks = least + (
        rng.randint(0, groups.count * story.num_blocks - least) if rng.random() < 0.5 else 0
    )
    later = None
    if story.later_num_blocks is not None:
        later = rng.randint(groups.num_needed(max(2, longest // 4), size), num_blocks)
    return attrs.evolve(
        story, windows=windows, longest=longest, num_blocks=num_blocks, later_num_blocks=later
    )


def _draw_guesses(rng: random.Random) -> dict[str, Any]:
    return {
        "speculative": "ngram",
        "num_speculative_tokens": rng.choice((1, 2, 4, 8)),
        "prompt_lookup_min": rng.choice((1, 1, 2)),
    }


def _draw_hang(rng: random.Random, mood: Mood, hang_s: float) -> float:
    """A watchdog's restart counts, and where the story goes to the limit of patience anyway, there is none."""
    return 0.01 if mood == "escalating" else rng.choice((hang_s, hang_s, FOR_EVER_S))


# ------------------------------------------------------------------------------------------ clients


def _draw_asks(rng: random.Random, max_model_len: int, *, most: int) -> tuple[Ask, ...]:
    bursts = sorted(rng.uniform(0, 0.5) for _ in range(rng.randint(1, 4)))
    beginnings = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))) for _ in range(3)]
    sharing = rng.choice((0.05, 0.05, 0.05, 0.6))
    moments = sorted(rng.choice(bursts) for _ in range(rng.randint(2, most)))
    return tuple(
        _draw_ask(
            rng,
            number,
            "twice" if rng.random() < sharing else f"client-{number}",
            at_s,
            _draw_prompt(rng, beginnings, max_model_len),
        )
        for number, at_s in enumerate(moments)
    )


def _draw_prompt(
    rng: random.Random, beginnings: Sequence[tuple[int, ...]], max_model_len: int
) -> tuple[int, ...] | str:
    if rng.random() < 0.03:
        return "panic"
    if rng.random() < 0.03:
        return (1,) * (max_model_len + 1)
    ids = rng.choice(beginnings) + tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
    ids = ids[: rng.choice((max_model_len - 1, max(1, max_model_len // 2)))]
    return "".join(chr(65 + token_id) for token_id in ids) if rng.random() < 0.4 else ids


def _draw_ask(
    rng: random.Random, number: int, request_id: str, at_s: float, prompt: tuple[int, ...] | str
) -> Ask:
    manner: Manner = rng.choices(
        ("read", "slow", "impatient", "leave", "raise", "sit", "complete"), (35, 10, 10, 10, 5, 5, 25)
    )[0]
    return Ask(
        number=number,
        request_id=request_id,
        at_s=at_s,
        prompt=prompt,
        params=_draw_params(rng),
        arguments=_draw_arguments(rng) | {"client": "abc"[number % 3]},
        manner=manner,
        pace_s=rng.choice((0.003, 0.03, 0.1)),
        num_outputs=rng.randint(0, 5),
        cancel_after_s=_sometimes(rng, 0.08, rng.uniform(0, 0.2)),
        cancel_at_checkpoint=_sometimes(rng, 0.15, rng.randint(1, 12)),
        abort_after_s=_sometimes(rng, 0.12, rng.choice((0.0, rng.uniform(0, 0.2)))),
    )


def _repeat(rng: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """Many go round in a circle, which some prompts have begun, until a token of it ends them."""

    def repeat(ask: Ask) -> Ask:
        params, prompt, offset = (
            ask.params | {"seed": REPETITIVE + ask.params["seed"]},
            ask.prompt,
            rng.randrange(6),
        )
        if (
            rng.random() < 0.3 and "min_tokens" not in params
        ):  # an ending that the fake model would have to mask
            params["stop_token_ids"] = (rng.choice(CIRCLE),)
        if rng.random() < 0.5 and isinstance(prompt, tuple):
            prompt = tuple(CIRCLE[(offset + place) % 6] for place in range(len(prompt)))
        return attrs.evolve(ask, params=params, prompt=prompt)

    return tuple(repeat(ask) if rng.random() < 0.7 else ask for ask in asks)


def _draw_several(rng: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """In some stories, clients want several answers to one prompt."""
    chance = rng.choice((0.0, 0.0, 0.3, 0.8))
    return tuple(
        attrs.evolve(ask, params=ask.params | {"n": rng.randint(2, 4)}) if rng.random() < chance else ask
        for ask in asks
    )


def _draw_pooled(rng: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """In some stories, many clients want vectors; of their parameters only the seed is kept, which has no effect."""
    chance = 0.5 if rng.random() < POOLED else 0.0
    return tuple(
        attrs.evolve(ask, is_pooled=True, params={"seed": ask.params["seed"]})
        if rng.random() < chance and ask.adapter is None
        else ask
        for ask in asks
    )


def _draw_adapters(rng: random.Random, story: Story) -> Story:
    """Most clients name one of a few adapters, for which there are few slots; some change its files before."""
    names = NAMES[: rng.choice((1, 2, 3, 3))]
    # Often many have the same prompt: its blocks must not go from one adapter, or its former contents, to another.
    common = next((ask.prompt for ask in story.asks if isinstance(ask.prompt, tuple)), ())
    sharing = rng.choice((0.0, 0.7)) if len(common) < story.max_model_len else 0.0

    def adapt(ask: Ask) -> Ask:
        name = BROKEN if rng.random() < 0.05 else rng.choice(names)
        if common and isinstance(ask.prompt, tuple) and len(ask.prompt) < story.max_model_len:
            ask = attrs.evolve(ask, prompt=common if rng.random() < sharing else ask.prompt)
        return attrs.evolve(
            ask, adapter=name, retraining=_sometimes(rng, 0.4, rng.choice(("reload", "leave")))
        )

    max_loras = rng.choice((1, 1, 2, 3))
    limits = {
        "enable_lora": True,
        "max_loras": max_loras,
        "max_cpu_loras": max_loras + rng.choice((0, 0, 1, 3)),
    }
    drawn = [
        _draw_fault(rng, ADAPTER_POINTS) for _ in range(0 if story.mood == "calm" else rng.randint(0, 3))
    ]
    faults = {(fault.point, fault.nth): fault for fault in drawn}.values()
    return attrs.evolve(
        story,
        limits=story.limits | limits,
        asks=tuple(adapt(ask) if rng.random() < 0.75 else ask for ask in story.asks),
        faults=(*story.faults, *faults),
    )


def _draw_operated(rng: random.Random, story: Story) -> Story:
    """Something is done to the engine, at about the times at which requests come; and loads take their time."""
    faults = list(story.faults)
    if story.mood != "calm" and rng.random() < 0.5:
        faults.append(Fault(rng.choice(OPERATION_POINTS), rng.randint(1, 2), "error"))
    if story.mood == "faulty" and rng.random() < 0.4:
        faults.append(Fault("runner.start", rng.randint(1, 3), _draw_kind(rng)))
    operations = draw_operations(rng, [ask.at_s for ask in story.asks])
    return attrs.evolve(
        story,
        operations=operations,
        restart_s=rng.choice((0.0, 0.05, 0.3)),
        limits=story.limits | {"sleep_after": rng.choice((None, None, 0.02, 0.1))},
        faults=tuple({(fault.point, fault.nth): fault for fault in faults}.values()),
    )


def _draw_stop(rng: random.Random) -> tuple[str, ...]:
    stop = [
        "".join(chr(65 + rng.randrange(40)) for _ in range(rng.randint(1, 2)))
        for _ in range(rng.choice((0, 0, 4, 14)))
    ]
    # Some end together with another one: then the first in the list is the reason.
    return (*stop, *(text[-1] for text in stop[:2]))


def _draw_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": rng.choice((None, *range(1, 8), *range(1, 20))),
        "seed": rng.randrange(50),
        "stop": _draw_stop(rng),
        "include_stop_str_in_output": rng.random() < 0.3,
        "output_kind": rng.choice(tuple(RequestOutputKind)),
    }
    if rng.random() < 0.2:
        params["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 3))
    if rng.random() < 0.2:
        params["ignore_eos"] = True
        if "stop_token_ids" not in params:  # those the fake model would have to mask
            params["min_tokens"] = rng.randint(0, params["max_tokens"] or 5)
    return params


def _draw_arguments(rng: random.Random) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "priority": rng.randint(0, 2),
        "deadline": _sometimes(rng, 0.2, rng.uniform(0, 0.5)),
        "queue_timeout": _sometimes(rng, 0.15, rng.uniform(0, 0.2)),
        "cache_salt": _sometimes(rng, 0.2, rng.choice(("salt", "pepper"))),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _sometimes(rng: random.Random, chance: float, value: Any) -> Any:
    return value if rng.random() < chance else None


# ------------------------------------------------------------------------------------------- faults


def _draw_faults(rng: random.Random, mood: Mood) -> tuple[Fault, ...]:
    """Within the supervisors' patience, except where the mood says otherwise (`actors.supervision_tree` has their
    figures)."""
    if mood == "calm":
        return ()
    engine = (*RUNNER_POINTS, *SCHEDULER_POINTS)
    hangs = [_draw_fault(rng, HANG_POINTS) for _ in range(rng.choice((0, 0, 1, 2)))]
    # A crash while the root starts its children again is one more for the root, which mends three of them.
    max_text_faults = 1 if mood == "escalating" else 5
    drawn = [_draw_fault(rng, TEXT_POINTS) for _ in range(rng.randint(0, max_text_faults))]
    drawn += [_draw_fault(rng, OTHER_POINTS) for _ in range(rng.randint(0, 3))] + hangs
    if mood == "faulty":
        drawn += [_draw_fault(rng, engine) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.2:
            point = rng.choice(START_POINTS)
            num_times = rng.randint(1, 12) if point.startswith("shortage") else 1
            drawn += [Fault(point, nth, _draw_kind(rng)) for nth in range(1, num_times + 1)]
    if mood == "poisoned":  # one that comes in between delays the search, and may count
        drawn += [_draw_fault(rng, engine) for _ in range(rng.randint(0, 1))]
    if mood == "escalating":
        drawn += [_draw_fault(rng, engine) for _ in range(rng.randint(6, 17))]
    if mood == "deadly":
        first = rng.randint(1, 20)
        drawn += [Fault("runner.execute.before", nth, _draw_kind(rng)) for nth in range(first, first + 30)]
    return tuple({(fault.point, fault.nth): fault for fault in drawn}.values())


def _draw_form_faults(rng: random.Random, mood: Mood) -> tuple[Fault, ...]:
    if mood in ("calm", "escalating"):
        return ()
    drawn = [_draw_fault(rng, FORM_POINTS) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.3:  # a shortage that lasts, for a moment or longer than a request waits
        point, first = rng.choice(SHORTAGE_POINTS), rng.randint(1, 12)
        drawn += [Fault(point, nth, "error") for nth in range(first, first + rng.choice((3, 30)))]
    return tuple({(fault.point, fault.nth): fault for fault in drawn}.values())


def _draw_shortages(story: Story) -> Story:
    """Add late loads, and have some faults raise what Python raises without memory, or the system with a full disk."""
    rng = random.Random(f"shortages {story.seed}")
    faults = tuple(
        attrs.evolve(fault, kind=rng.choice(("memory", "disk"))) if rng.random() < 0.2 else fault
        for fault in story.faults
    )
    if story.mood == "faulty" and rng.random() < 0.3:
        faults += (Fault(rng.choice(LOAD_POINTS), 1, "error"),)
    return attrs.evolve(story, faults=faults)


def _poison(rng: random.Random, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
    """One of them, or some, or nearly all; by their prompts, or by something that they are answered."""
    chance = rng.choice((0.0, 0.3, 0.9))
    always = rng.randrange(len(asks))
    return tuple(
        attrs.evolve(ask, poison_at=rng.randint(0, len(ask.prompt) + rng.choice((-1, 4))))
        if ask.number == always or rng.random() < chance
        else ask
        for ask in asks
    )


def _draw_fault(rng: random.Random, points: Sequence[str]) -> Fault:
    point = rng.choice(points)
    # Preempting, committing a last token and the like are rare: their first times are as good as any.
    mean = 3 if point.startswith(RARE_POINTS) else 12
    return Fault(point, 1 + int(rng.expovariate(1 / mean)), _draw_kind(rng))


def _draw_kind(rng: random.Random) -> Kind:
    return rng.choices(("error", "panic", "group"), (6, 3, 1))[0]
