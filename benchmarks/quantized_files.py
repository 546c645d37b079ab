"""Compare what `triolet quantize` writes with the model that it was made from: sizes, perplexity, divergence.

    python benchmarks/quantized_files.py [--format gguf:Q8_0 int4] [--output results.jsonl]

The model is triolet-nano, the texts are its own answers. The figures do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import machine, report

MODEL = "triolet-nano"
FORMATS = ("gguf:Q8_0", "gguf:Q5_1", "gguf:Q4_0", "w8a8", "int4", "w4a16")


def write(form: str, folder: Path) -> dict[str, Any]:
    """Return what the command reports of one format."""
    out = folder / form.replace(":", "-")
    target = out.with_suffix(".gguf") if form.startswith("gguf:") else out
    command = [sys.executable, "-m", "triolet", "quantize", MODEL, str(target), "--format", form, "--json"]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    del facts["out"], facts["tensors"]
    return {"bench": "quantized_files", **facts, "rounds": 1, **machine()}


def main() -> None:
    """Parse, write, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = [write(form, Path(folder)) for form in arguments.format]
    columns = ("format", "perplexity_before", "perplexity_after", "divergence_nats", "same_likeliest_token")
    report(lines, columns, arguments.output)


if __name__ == "__main__":
    main()
