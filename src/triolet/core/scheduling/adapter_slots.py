"""Slots of LoRA adapters: which waiting requests may start although the runner holds few adapters at a time.

A step may have as many different adapters as there are slots. A running request keeps its adapter's slot; a slot that
no running request uses keeps its adapter until another one needs the place, the one that was used last the longest. A
waiting request for which there is no slot is passed over, and others overtake it.

That alone could starve it: as long as requests for the adapters in the slots arrive, no slot becomes free. So when an
adapter has waited for `MAX_WAIT_S`, the slot that was taken first is cleared for it: its running requests are preempted
and wait at their old places. A request with the adapter is then admitted before all others, whose turn may be earlier:
until it is, the slot is of use to none. Every adapter thus waits at most `MAX_WAIT_S` for each one that waited before
it.

All of this can be lost: a scheduler that is built anew begins with empty slots, as its runner does, and its plans fill
them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from triolet.core.request.lora import Adapter
from triolet.core.scheduling.sequence import Sequence
from triolet.core.step_plan import AdapterStart

MAX_WAIT_S = 5.0  # seconds; longer than most answers take, so that few requests lose their rows for it


def adapter_of(sequence: Sequence) -> Adapter | None:
    """Return the adapter of a request; None for none."""
    return sequence.entry.request.adapter


class AdapterSlots:
    """Slots of one runner.

    Args:
        num_slots: how many there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}  # by digest, the one that was used last at the end
        self._taken_s: dict[str, float] = {}  # by digest of the adapters in use: since when
        self._waits_since_s: dict[str, float] = {}  # by digest of the adapters without a slot, oldest first
        self._reserved: str | None = None  # adapter that gets the next free slot
        self._stale: set[str] = set()  # digests of the adapters to be loaded again
        self._starts: list[AdapterStart] = []
        self._now_s = 0.0

    def begin_step(
        self,
        running: Iterable[Sequence],
        waiting: Iterable[Sequence],
        now_s: float,
        *,
        may_preempt: bool = True,
    ) -> str | None:
        """Prepare to plan a step.

        Args:
            may_preempt: whether the requests of the adapter that is returned are preempted now.
        Returns:
            Digest of the adapter whose running requests must be preempted, if another one has waited too long for a
            slot.
        """
        self._now_s, self._starts, self._reserved = now_s, [], None
        in_use = {adapter.digest for sequence in running if (adapter := adapter_of(sequence)) is not None}
        self._taken_s = {digest: self._taken_s.get(digest, now_s) for digest in in_use}
        wanted = {adapter.digest for sequence in waiting if (adapter := adapter_of(sequence)) is not None}
        blocked = {} if self._has_free_slot else dict.fromkeys(wanted - in_use)
        # A slot that became free for a moment and was taken by another adapter does not begin the time anew.
        since = {digest: at_s for digest, at_s in self._waits_since_s.items() if digest in wanted - in_use}
        self._waits_since_s = since | {digest: now_s for digest in sorted(blocked) if digest not in since}
        if not self._waits_since_s:
            return None
        oldest, since_s = next(iter(self._waits_since_s.items()))
        if now_s - since_s < MAX_WAIT_S:
            return None
        self._reserved = oldest
        if self._has_free_slot:
            return None
        victim = min(self._taken_s, key=self._taken_s.__getitem__)
        if may_preempt:
            del self._taken_s[victim]
        return victim

    @property
    def reserved(self) -> str | None:
        """Digest of the adapter that a free slot is kept for in the step that is planned; None if there is none."""
        is_kept = self._has_free_slot and self._reserved not in self._taken_s
        return self._reserved if is_kept else None

    @property
    def _has_free_slot(self) -> bool:
        return len(self._taken_s) < self._num_slots

    def may_start(self, adapter: Adapter) -> bool:
        """Return True if a request with this adapter may be admitted to the step that is planned."""
        if adapter.digest in self._taken_s:
            return True
        num_free = self._num_slots - len(self._taken_s)
        return num_free > (0 if self.reserved in (None, adapter.digest) else 1)

    def take(self, adapter: Adapter) -> int:
        """Return the slot of an adapter that `may_start`; its request is admitted."""
        digest = adapter.digest
        self._taken_s.setdefault(digest, self._now_s)
        self._waits_since_s.pop(digest, None)
        slot, is_stale = self._slots.pop(digest, None), digest in self._stale
        if slot is None or is_stale:
            slot = self._free_slot() if slot is None else slot
            self._starts.append(AdapterStart(slot=slot, name=adapter.name, path=adapter.path, digest=digest))
            self._stale.discard(digest)
        self._slots[digest] = slot
        return slot

    def _free_slot(self) -> int:
        if len(self._slots) < self._num_slots:
            return next(slot for slot in range(self._num_slots) if slot not in self._slots.values())
        evicted = next(digest for digest in self._slots if digest not in self._taken_s)
        self._stale.discard(evicted)
        return self._slots.pop(evicted)

    def load_again(self, failed: Sequence) -> None:
        """Have the next request with the adapter of a failed one load it anew, into the same slot."""
        adapter = adapter_of(failed)
        if adapter is not None and adapter.digest in self._slots:
            self._stale.add(adapter.digest)

    def take_starts(self) -> tuple[AdapterStart, ...]:
        """Return the slots to fill for the step that is planned."""
        starts, self._starts = tuple(self._starts), []
        return starts
