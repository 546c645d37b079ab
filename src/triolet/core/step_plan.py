"""Values that the scheduler and the runner exchange: a step and its result, made of ints.

The runner keeps a table of rows, one per request it is computing. A `RowStart` fills a row with all that the
request's sampling depends on; from then on a `PlanRow` per step says only what changed. The token a row
sampled is the runner's to remember: the plan does not send it back. A row that left (`ended`) is forgotten.
Plans are computed in their order. A plan may be handed over before the result of the one before it is known
(`StepPlan.is_ahead`): the input of a row is then "the token that it samples in that step". A row that fails in that
step computes nothing more, and if there is no memory for that step, the plan after it is void.

A plan may be a run: its rows then go on, a token each, for up to `num_steps` steps, and a result comes after each of
them. The runner does not wait for the scheduler in between. It may end a run after any step.
`StepRunner` is the contract of the object that computes steps, and `steps_of` the loop over the steps of one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import attrs

from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import SoftPrompt

MAX_SCHEDULER_STEPS = 64
"""Longest run."""


@attrs.frozen(kw_only=True)
class RowStart:
    """A request takes a row of the runner's table: for the first time, or again after preemption or a crash."""

    row_id: int  # index of the row, below `max_num_seqs`
    request_id: str
    epoch: int  # names this residency of the request; results carry it, so that a late one is recognised
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # what was already generated, and must be computed again
    params: SamplingParams
    seed: int
    ending_token_ids: frozenset[int]  # masked while the answer is shorter than `params.min_tokens`
    # Sequences whose last token is banned when the others precede it.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    wants_prompt_logprobs: bool = False  # whether those that `params` ask for are not known yet
    pooling: PoolingParams | None = None  # of a request that is pooled: no token of it is sampled
    adapter_slot: int | None = None  # slot of the adapter that computes its tokens; None for none
    # Takes the place of the first tokens of the prompt, which are placeholders.
    soft_prompt: SoftPrompt | None = None


@attrs.frozen(kw_only=True)
class AdapterStart:
    """A LoRA adapter takes a slot of the runner, in the place of the one that was there."""

    slot: int  # below `max_loras`
    name: str
    path: str  # folder that the runner reads it from, unless it still has it
    digest: str  # of the contents: if the folder has others now, the rows with this slot fail


@attrs.frozen
class PlanRow:
    """One row's share of a step: compute tokens `start : start + num_tokens` of prompt + answer + draft."""

    row_id: int
    start: int  # tokens whose KV is present already
    num_tokens: int  # tokens to compute now; at least 1
    # Appended to the row's block table before the step; a `RowStart`'s first step brings all of them. For every block
    # of tokens one of each cache group, and -1 for a block that no layer of the group reads any more.
    new_block_ids: tuple[int, ...]
    # Whether the last of these tokens is the request's last, so that a new one is sampled from it, or, if the
    # request is pooled, its result is complete.
    sample: bool
    # The tokens that may be sampled, a bit for each, least significant first; None for any.
    mask: bytes | None = None
    # What is guessed to come next; only with `sample`, and without a mask. As long as what is sampled is what
    # was guessed, one more is sampled after it.
    draft_token_ids: tuple[int, ...] = ()


@attrs.frozen
class BlockLoad:
    """A full block of a row whose KV may be read from the prefix store instead of being computed."""

    row_id: int
    block_ids: tuple[int, ...]  # where it goes, one of each cache group
    key: bytes  # see `core.kv_cache.prefix_cache.PrefixCache.chain`


@attrs.frozen
class BlockSave:
    """A full block that has been computed, for the prefix store to keep."""

    block_ids: tuple[int, ...]  # where it is when the step begins, one of each cache group
    key: bytes


@attrs.frozen
class StepPlan:
    """One forward pass; or none, but only blocks to save, if there are no rows."""

    step_id: int  # counts up from 1
    ended: tuple[int, ...]  # rows to forget, before `starts` are looked at
    starts: tuple[RowStart, ...]  # rows to fill
    rows: tuple[PlanRow, ...]  # the work, in the order in which rows are laid end to end
    # How many steps at most. If more than one, every row has a single token to compute and one to be sampled,
    # without mask or draft; there are no `starts`; and there are blocks for the tokens of all steps.
    num_steps: int = 1
    adapters: tuple[AdapterStart, ...] = ()  # slots to fill, before `starts` are looked at
    saves: tuple[BlockSave, ...] = ()  # before anything is written
    # Blocks of rows, in their order, the first at `PlanRow.start`. Where one is not in the store, it and those after it
    # are computed, as the row says; the last token of a row always is.
    loads: tuple[BlockLoad, ...] = ()
    # Whether the plan was made before the result of the one before it. If that one finds no memory, this one is void:
    # the runner notes its rows and blocks, saves what is to be saved, computes nothing, and says `out_of_memory`.
    is_ahead: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step; in a run, in each."""
        return sum(row.num_tokens for row in self.rows)

    def after(self, result: StepResult) -> StepPlan | None:
        """Return the rest of a run after its first step; None if nothing is left to compute."""
        if self.num_steps == 1 or result.failures or result.out_of_memory is not None:
            return None
        rows = tuple([PlanRow(row.row_id, row.start + 1, 1, (), sample=True) for row in self.rows])
        return StepPlan(self.step_id, (), (), rows, self.num_steps - 1)


@attrs.frozen
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the likeliest in falling order."""

    token_ids: tuple[int, ...]  # chosen token, then the top ones (which may repeat it)
    logprobs: tuple[float, ...]  # one per token id
    rank: int  # of the chosen token, 1 for the likeliest


@attrs.frozen
class SampledToken:
    """A token and where it belongs: committed if `epoch` is current and `position` is the answer's length."""

    request_id: str
    epoch: int  # from the `RowStart`
    position: int  # index in the answer, from 0
    token_id: int
    logprobs: TokenLogprobs | None = None  # if the request asked for them


@attrs.frozen
class PromptLogprobs:
    """Log-probabilities of tokens of a prompt, whose positions this step computed."""

    epoch: int  # from the `RowStart`
    # Position of the first of them in the prompt; at least 1, since nothing comes before the first token.
    start: int
    logprobs: tuple[TokenLogprobs, ...]  # one per position


@attrs.frozen
class RowFailure:
    """A row that failed alone and gave no token: its logits are not numbers."""

    request_id: str
    epoch: int
    reason: str


@attrs.frozen
class PooledVectors:
    """Vectors of a pooled request: its result, or the part of it that a step's share of the prompt gives."""

    epoch: int  # from the `RowStart`
    start: int  # position in the prompt from which this part is; 0 for a result that comes at once
    width: int  # numbers of a vector
    values: bytes  # [num_vectors, width] float32, little-endian
    is_last: bool  # whether the result is complete


RowResult = SampledToken | PromptLogprobs | RowFailure | PooledVectors
"""One result of a row in a step: a row may have none, one or several, of any of these kinds."""


@attrs.frozen
class StepResult:
    """Result of a step."""

    step_id: int
    # A `SampledToken` per row with `sample` that did not fail, and one for each token of its draft that was
    # right; a `RowFailure` for a row that failed alone; `PromptLogprobs` of the rows whose requests asked for
    # them; `PooledVectors` of rows that are pooled. The tokens of a row are in the order of their positions.
    rows: tuple[RowResult, ...]
    elapsed_s: float = 0.0  # time the runner took, seconds
    # What was said when there was no memory for the step; then nothing of it was computed, and the runner is
    # as it was, except that it knows the plan's rows and blocks.
    out_of_memory: str | None = None
    is_last: bool = True  # whether the plan is done; else it is a run, and there is more to come
    num_loaded_tokens: int = 0  # tokens of the plan whose KV came from the prefix store
    num_failed_saves: int = 0  # blocks that the prefix store could not write, since the result before

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The sampled tokens, in their order."""
        return tuple([row for row in self.rows if isinstance(row, SampledToken)])

    @property
    def failures(self) -> tuple[RowFailure, ...]:
        """The rows that failed alone, in their order."""
        return tuple([row for row in self.rows if isinstance(row, RowFailure)])


class StepRunner(Protocol):
    """A model that computes plans: `model.runner.ModelRunner`, or a fake. Never called from two threads at once."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the first step of a plan."""
        ...

    def reset(self) -> None:
        """Forget all requests."""
        ...


class SubmittedStep(Protocol):
    """A step that was handed to a runner."""

    @property
    def is_done(self) -> bool:
        """Return whether `result` waits for nothing, as far as is known."""
        ...

    def wait(self) -> None:
        """Wait until it is computed, and change nothing. May be called from another thread."""
        ...

    def result(self) -> StepResult:
        """Wait for the result; those of the steps before come first."""
        ...


@runtime_checkable
class SubmittingRunner(StepRunner, Protocol):
    """A runner that takes a step before the result of the one before it was read."""

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Compute the first step of a plan, or have a device do it."""
        ...


@runtime_checkable
class BackgroundRunner(StepRunner, Protocol):
    """A runner that computes some plans without a thread of the caller."""

    def begin(self, plan: StepPlan, done_fd: int) -> StepsInBackground | None:
        """Begin a plan; None, with nothing changed, if this one must be given to `execute`.

        Args:
            plan: one step or several.
            done_fd: an eventfd that counts the steps that are done.
        """
        ...


@runtime_checkable
class AdapterRunner(StepRunner, Protocol):
    """A runner with LoRA adapters."""

    def prepare_adapter(self, path: str, digest: str, *, is_pinned: bool) -> None:
        """Read an adapter, so that the step that needs it does not wait. May be called from any thread.

        Args:
            path: its folder.
            digest: of its contents; another one is an error.
            is_pinned: whether it is kept until the runner ends.
        """
        ...


@runtime_checkable
class WritingRunner(StepRunner, Protocol):
    """A runner that writes behind its steps."""

    def flush(self) -> None:
        """Wait until that is written, less than a second."""
        ...


class StepsInBackground(Protocol):
    """A plan that is being computed in the background."""

    def results(self, count: int) -> list[StepResult]:
        """Return the results of the next `count` steps, which `done_fd` has counted as done."""
        ...

    @property
    def is_over(self) -> bool:
        """Return whether no result follows those that were returned."""
        ...

    def halt(self) -> None:
        """End the plan after the step that is being computed."""
        ...


def steps_of(
    plan: StepPlan, execute: Callable[[StepPlan], StepResult], must_halt: Callable[[], bool] = lambda: False
) -> Iterator[StepResult]:
    """Compute a plan step by step: each `next` computes one and gives its result, the last one marked `is_last`.

    Args:
        plan: one step or several.
        execute: computes the first step of a plan.
        must_halt: asked after each step but the last one whether the plan ends there.
    """
    rest: StepPlan | None = plan
    while rest is not None:
        result = execute(rest)
        result, rest = after_step(rest, result, must_halt=rest.num_steps > 1 and must_halt())
        yield result


def after_step(plan: StepPlan, result: StepResult, *, must_halt: bool) -> tuple[StepResult, StepPlan | None]:
    """Mark the result of a plan's first step as its last or not; return it with what is left of the plan."""
    rest = None if must_halt else plan.after(result)
    is_last = rest is None
    return result if result.is_last is is_last else attrs.evolve(result, is_last=is_last), rest
