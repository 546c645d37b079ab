"""Measure what the journal of resumable responses costs per token: its record alone.

    python benchmarks/journal.py [--records N] [--turns N]

A record is made on the event loop for every output; a thread writes it. One JSON line for the records, with the best
and the median turn, and one for the file, which a thread appends one step of 32 streams at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

from triolet.protocol.responses.response_items import ResponseDelta
from triolet.server.responses.journal import JournalDelta, delta_record

STREAMS = 32


def records_us(num_records: int) -> float:
    """Return the time of one record, microseconds: the delta is made and packed."""
    piece = ResponseDelta(text=" token", num_tokens=1)
    began = time.perf_counter()
    for index in range(num_records):
        delta_record(3, JournalDelta(index=index, piece=piece, token_ids=(index % 32_000,)))
    return (time.perf_counter() - began) / num_records * 1e6


def written_us(num_records: int) -> float:
    """Return the time of appending one record, microseconds, when each write has those of one step."""
    piece = ResponseDelta(text=" token", num_tokens=1)
    step = delta_record(3, JournalDelta(index=100, piece=piece, token_ids=(17,))) * STREAMS
    with tempfile.TemporaryFile(buffering=0) as file:
        began = time.perf_counter()
        for _ in range(num_records // STREAMS):
            os.write(file.fileno(), step)
        return (time.perf_counter() - began) / (num_records // STREAMS * STREAMS) * 1e6


def main() -> None:
    from common import machine, median

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    for part, measure in (("record", records_us), ("write", written_us)):
        took = [measure(options.records) for _ in range(options.turns)]
        figures = {"bench": "journal", "part": part, "records": options.records, "turns": options.turns}
        figures |= {"best_us": round(min(took), 3), "median_us": round(median(took), 3)}
        print(json.dumps(figures | machine()), flush=True)


if __name__ == "__main__":
    main()
