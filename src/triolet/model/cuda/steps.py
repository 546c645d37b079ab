"""Steps whose rows live on the device: one copy in, one graph, one copy out, and one wait for that.

A step may be submitted before the one before it was read, since a row's last token is taken from the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from triolet.core.step_plan import PlanRow, RowFailure, SampledToken, StepPlan, TokenLogprobs
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.step.edits import edit_logits
from triolet.kernels.step.inputs import make_inputs
from triolet.kernels.step.layout import (
    HEADER_WORDS,
    MAX_TOP,
    ROW_WORDS,
    Header,
    RowTables,
    RowWord,
    Status,
    StepBuffers,
)
from triolet.kernels.step.logprobs import note_logprobs
from triolet.kernels.step.results import RESULT_WORDS, note_results
from triolet.kernels.step.writes import apply_writes
from triolet.model.cuda.device_rows import DeviceRows, Int32s, can_hold
from triolet.model.cuda.graphs import (
    OnCaptured,
    StepGraphs,
    graph_sizes,
    ignore_captured,
    prompt_graph_sizes,
)
from triolet.model.cuda.packet import Packet, pack, pack_writes
from triolet.model.cuda.step_device import Mark, StepDevice
from triolet.model.input_batch import Row, RowTable
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache
from triolet.model.sampling.random_draw import draw_columns
from triolet.model.sampling.sampler import NOT_NUMBERS, NOTHING_ALLOWED

NUM_SLOTS = 3
"""Steps whose packets and results have memory at the same time: two in flight, and one that is being packed."""
WRITES_PER_ROW = 64
_PROBLEMS = {Status.NOT_NUMBERS: NOT_NUMBERS, Status.NOTHING_ALLOWED: NOTHING_ALLOWED}


@attrs.frozen(eq=False)
class _Slot:
    """Pinned memory of one step."""

    packet: Tensor
    results: Tensor


class PendingSamples:
    """Samples of a step that the device computes.

    Args:
        rows: each sequence's row; None for one that gets no token.
        packet: of the step.
        results: of the step, on the host, once `mark` is past: of each row; log-probabilities, if any is asked for, are
            behind those of `num_seqs`.
        num_seqs: sequences, with those of the padding.
        mark: when they are there.
    """

    def __init__(
        self, rows: Sequence[Row | None], packet: Packet, results: Tensor, num_seqs: int, mark: Mark
    ) -> None:
        self._rows, self._packet = rows, packet
        self._words, self._num_seqs, self._mark = results, num_seqs, mark
        self._results: list[SampledToken | RowFailure] | None = None
        for row in rows:
            if row is not None:
                row.num_pending += 1

    def wait(self) -> None:
        """Wait until the device is done."""
        self._mark.wait()

    def settle(self) -> list[SampledToken | RowFailure]:
        """Wait for the samples, store them in their rows, and return them. Steps must be settled in order."""
        if self._results is None:
            self._mark.wait()
            words = self._words.tolist()
            self._results = [
                self._settled(row, words[RESULT_WORDS * i], words[RESULT_WORDS * i + 1], i)
                for i, row in enumerate(self._rows)
                if row is not None
            ]
        return self._results

    def _settled(self, row: Row, token_id: int, status: int, sequence: int) -> SampledToken | RowFailure:
        row.num_pending -= 1
        if status != Status.CHOSEN:
            row.has_failed = True
            return RowFailure(row.request_id, row.epoch, _PROBLEMS[Status(status)])
        position = len(row.sampling.output_token_ids)
        row.settle(token_id)
        logprobs = self._logprobs(token_id, sequence)
        return SampledToken(row.request_id, row.epoch, position, token_id, logprobs)

    def _logprobs(self, token_id: int, sequence: int) -> TokenLogprobs | None:
        if (num_top := self._packet.num_tops[sequence]) < 0:
            return None
        most = self._packet.num_top
        width = RESULT_WORDS + 2 * most
        first = _first_logprob(self._num_seqs) + width * sequence
        words = self._words[first : first + width]
        numbers = words.view(torch.float32)
        return TokenLogprobs(
            (token_id, *words[2 : 2 + num_top].tolist()),
            (numbers[0].item(), *numbers[2 + most : 2 + most + num_top].tolist()),
            int(words[1]),
        )


class DeviceSteps:
    """Computer of steps on a device that holds the rows.

    Args:
        model: reads nothing from the device while it computes.
        cache: its KV cache, with one spare block behind the others.
        table: of the host; is advanced before a step is submitted here.
        block_size: tokens in a block.
        max_num_seqs: rows.
        max_model_len: longest sequence, tokens.
        max_num_tokens: of a step; larger ones are not taken.
        device: computes.
        logprobs_mode: see `EngineConfig`.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: tuple[LayerCache, ...],
        table: RowTable,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_tokens: int,
        device: StepDevice,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._model, self._cache, self._table, self._device = model, cache, table, device
        self._block_size, self._max_model_len = block_size, max_model_len
        self._max_num_tokens = max(max_num_tokens, max_num_seqs)
        self._is_processed = logprobs_mode.startswith("processed")
        self._is_normalised = logprobs_mode.endswith("logprobs")
        vocab_size, max_blocks = model.spec.vocab_size, -(-max_model_len // block_size)
        tables = RowTables.allocate(
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            vocab_size=vocab_size,
            spare_block=len(cache[0].keys) - 1,
            device=device.device,
        )
        self.rows = DeviceRows(tables)
        self._buffers = StepBuffers.allocate(
            num_tokens=self._max_num_tokens,
            num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            vocab_size=vocab_size,
            device=device.device,
        )
        self._max_writes = WRITES_PER_ROW * max_num_seqs
        num_packet_words = (
            HEADER_WORDS
            + (ROW_WORDS + 2 * WRITES_PER_ROW + tables.mask_words) * max_num_seqs
            + self._max_num_tokens
        )
        num_result_words = _first_logprob(max_num_seqs) + (RESULT_WORDS + 2 * MAX_TOP) * max_num_seqs
        self._packet = torch.zeros(num_packet_words, dtype=torch.int32, device=device.device)
        self._results = torch.zeros(num_result_words, dtype=torch.int32, device=device.device)
        self._slots = deque(
            _Slot(device.pinned(num_packet_words), device.pinned(num_result_words)) for _ in range(NUM_SLOTS)
        )
        self._pending: deque[PendingSamples] = deque(maxlen=NUM_SLOTS)
        self._max_num_seqs = max_num_seqs
        self.graphs = StepGraphs(device, graph_sizes(max_num_seqs), "rows")
        self.prompt_graphs = StepGraphs(device, prompt_graph_sizes(self._max_num_tokens), "tokens")

    def takes(self, plan: StepPlan, rows: Sequence[Row]) -> bool:
        """Tell whether a plan can be computed here; its rows must have been advanced by it."""
        return plan.num_tokens <= self._max_num_tokens and all(
            not share.draft_token_ids
            and row.pooling is None
            and row.soft_prompt is None
            and row.adapter_slot is None
            and row.num_prompt_logprobs is None
            and can_hold(row.sampling, is_processed=self._is_processed)
            for share, row in zip(plan.rows, rows, strict=True)
        )

    @torch.inference_mode()
    def submit(self, plan: StepPlan, rows: Sequence[Row]) -> PendingSamples:
        """Hand a step to the device. The steps before it need not have been read.

        Args:
            plan: that `takes` takes.
            rows: its rows, advanced by it.
        """
        if any(
            row.num_pending and not self.rows.holds(share.row_id, row) for share, row in _pairs(plan, rows)
        ):
            self.settle()  # what is sent of a row is what the host knows of it
        if len(self._pending) == NUM_SLOTS:
            self._pending.popleft().settle()  # its memory is the next step's
        writes = [
            write
            for share, row in _pairs(plan, rows)
            for write in self.rows.update(share.row_id, row, self._table)
        ]
        if sum(len(words) for words, _ in writes) > self._max_writes:
            self._send_writes(pack_writes(writes))
            writes = []
        packet = pack(plan.rows, rows, writes, self._model.spec.vocab_size)
        slot = self._slots[0]
        self._slots.rotate(-1)
        num_words = len(packet.words)
        slot.packet.numpy()[:num_words] = packet.words
        self._packet[:num_words].copy_(slot.packet[:num_words], non_blocking=True)
        num_seqs = self._compute(packet)
        num_results = RESULT_WORDS * len(rows)
        if packet.num_top >= 0:
            num_results = _first_logprob(num_seqs) + (RESULT_WORDS + 2 * packet.num_top) * len(rows)
        results = slot.results[:num_results]
        results.copy_(self._results[:num_results], non_blocking=True)
        sampled = [row if share.sample else None for share, row in _pairs(plan, rows)]
        pending = PendingSamples(sampled, packet, results, num_seqs, self._device.mark())
        self._pending.append(pending)
        return pending

    def settle(self, last: PendingSamples | None = None) -> None:
        """Read the results of the steps that were submitted, in order: up to one of them, or of all."""
        while self._pending and (last is None or last in self._pending):
            self._pending.popleft().settle()

    def pass_by(self, plan: StepPlan) -> None:
        """Note that a plan is computed in another way, now."""
        self.settle()
        self.rows.forget(share.row_id for share in plan.rows)

    def clear(self) -> None:
        """Forget every row, and the steps that were not read."""
        while self._pending:
            self._pending.popleft().wait()
        self.rows.forget_all()

    def warm_up(self) -> None:
        """Compute steps of the spare row that launch every kernel around the layers, so that each is compiled."""
        self.settle()
        header = [0] * HEADER_WORDS
        header[Header.NUM_ROWS] = header[Header.NUM_TOKENS] = 1
        row = [0] * ROW_WORDS
        row[RowWord.ROW_ID], row[RowWord.QUERY_LEN] = self.rows.tables.spare_row, 1
        row[RowWord.TOKENS] = row[RowWord.MASK] = -1
        packet = torch.tensor(header + row, dtype=torch.int32)
        self._packet[: len(packet)].copy_(packet)
        for is_decode in (True, False):
            self.launch((1,), (1,), is_decode=is_decode)

    def capture(self, on_captured: OnCaptured = ignore_captured, *, only_largest: bool = False) -> bool:
        """Capture the steps of all sizes; see `StepGraphs.capture`.

        Returns:
            Whether decode steps are captured.
        """
        self.settle()
        self._packet.zero_()  # a step of no rows: all that it writes is in the spare row and the spare block
        most, num_done = 1 if only_largest else None, 0
        num_all = 2 if only_largest else len(self.graphs.sizes) + len(self.prompt_graphs.sizes)

        def count() -> None:
            nonlocal num_done
            num_done += 1
            on_captured(num_done, num_all)

        self.prompt_graphs.capture(self._prompts, count, most)
        return self.graphs.capture(self._decode, count, most)

    def _compute(self, packet: Packet) -> int:
        # Returns the number of sequences, with those of the padding.
        num_rows = len(packet.query_lens)
        if packet.is_decode:
            if (found := self.graphs.of(num_rows)) is not None:
                num_seqs, graph = found
                graph.replay()
                return num_seqs
        elif packet.has_long_chunks and (found := self.prompt_graphs.of(sum(packet.query_lens))) is not None:
            found[1].replay()
            return self._max_num_seqs
        self.launch(packet.query_lens, packet.seq_lens, is_decode=packet.is_decode)
        return num_rows

    def _decode(self, num_seqs: int) -> None:
        # The numbers of the host hold for any rows: the longest sequence there can be.
        self.launch((1,) * num_seqs, (self._max_model_len,) * num_seqs, is_decode=True)

    def _prompts(self, num_tokens: int) -> None:
        # Of any rows, too: which sequence has how many of the tokens is read from the packet.
        query_lens = (num_tokens, *[0] * (self._max_num_seqs - 1))
        seq_lens = (self._max_model_len,) * self._max_num_seqs
        self.launch(query_lens, seq_lens, is_decode=False, has_any_lengths=True)

    @torch.inference_mode()
    def launch(
        self,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        *,
        is_decode: bool,
        has_any_lengths: bool = False,
    ) -> None:
        """Launch the kernels of a step whose packet is on the device.

        Args:
            query_lens: tokens of each sequence.
            seq_lens: of each, keys that its last token sees; those of a graph may be greater than they are.
            is_decode: whether each sequence has one token.
            has_any_lengths: whether these lengths are bounds; see `AttentionMetadata`.
        """
        packet, tables, num_seqs = self._packet, self.rows.tables, len(query_lens)
        buffers = self._buffers.part(sum(query_lens), num_seqs)
        apply_writes(packet, tables)
        make_inputs(packet, tables, buffers, block_size=self._block_size, is_decode=is_decode)
        attention = AttentionMetadata(
            cu_query_lens=buffers.cu_query_lens,
            seq_lens=buffers.seq_lens,
            block_tables=buffers.block_tables,
            slot_mapping=buffers.slots,
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            has_any_lengths=has_any_lengths,
        )
        batch = ForwardBatch(
            token_ids=buffers.token_ids,
            positions=buffers.positions,
            cache=self._cache,
            attention=attention,
            logits_indices=buffers.last_tokens,
        )
        logits = self._model.forward_logits(batch)
        edited = edit_logits(logits, packet, tables, buffers)
        drawn_ids = draw_columns(
            buffers.work, edited.max_logits,
            temperature=buffers.temperature, log_min_p=buffers.log_min_p, top_k=buffers.top_k,
            top_p=buffers.top_p, answers=buffers.answers, positions=buffers.answer_positions,
        )  # fmt: skip
        num_results = RESULT_WORDS * num_seqs
        results = self._results[:num_results].view(num_seqs, RESULT_WORDS)
        note_results(packet, tables, edited, drawn_ids, results)
        logprobs = self._results[_first_logprob(num_seqs) :]
        note_logprobs(logits, packet, tables, results, logprobs, is_normalised=self._is_normalised)

    def _send_writes(self, words: Int32s) -> None:
        # More than a packet has room for, as when many rows come with long answers behind them.
        pinned = self._device.pinned(len(words))
        pinned.numpy()[:] = words
        there = torch.empty(len(words), dtype=torch.int32, device=self._device.device)
        there.copy_(pinned, non_blocking=True)
        apply_writes(there, self.rows.tables)
        self._device.mark().wait()  # the pinned memory is given back


def _first_logprob(num_seqs: int) -> int:
    """Return the word of the results where log-probabilities begin: aligned, whatever the number of rows is."""
    return -(-RESULT_WORDS * num_seqs // 4) * 4


def _pairs(plan: StepPlan, rows: Sequence[Row]) -> Iterable[tuple[PlanRow, Row]]:
    return zip(plan.rows, rows, strict=True)
