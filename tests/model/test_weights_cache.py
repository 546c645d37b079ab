"""A cache of packed weights changes no logit, and a file that does not fit is written anew."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.kernels.cpu.library import library
from triolet.model import weights_cache
from triolet.model.backends.quant_method import QuantMethod
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

PROMPT = [1, 2, 3, 40, 50, 60, 7]

pytestmark = pytest.mark.skipif(library() is None, reason="packed weights are those of the C++ kernels")


@pytest.fixture(scope="module")
def q8(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file whose layers stay in blocks."""
    place = tmp_path_factory.mktemp("q8")
    return write_gguf(make_model("llama-plain", place / "folder"), place / "n.gguf", "Q8_0").read_bytes()


def logits(
    path: Path, cache: Path | None, on_progress: OnProgress | None = None, **options: Any
) -> torch.Tensor:
    options["weights_cache"] = None if cache is None else str(cache)
    loaded = load_model(str(path), LoadOptions(**options), on_progress=on_progress)
    return PagedDriver(loaded.model).once(PROMPT)


def refuse_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a layer was packed")

    monkeypatch.setattr(QuantMethod, "pack_kept", pack)
    monkeypatch.setattr(QuantMethod, "read", pack)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"dtype": "float32", "quantization": "int8"},
        pytest.param({"dtype": "bfloat16", "quantization": "int4"}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_equal_with_and_without_the_cache(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama-plain", tmp_path / "model")
    plain = logits(folder, None, **options)
    assert torch.equal(logits(folder, tmp_path / "cache", **options), plain)
    refuse_to_pack(monkeypatch)
    assert torch.equal(logits(folder, tmp_path / "cache", **options), plain)


def test_blocks_of_a_gguf_file_come_from_the_cache(
    q8: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "n.gguf").write_bytes(q8)
    plain = logits(path, None, dtype="float32")
    logits(path, tmp_path, dtype="float32")
    refuse_to_pack(monkeypatch)
    caplog.set_level(logging.INFO)
    reports: list[LoadProgress] = []
    cached = logits(path, tmp_path, dtype="float32", on_progress=reports.append)
    assert torch.equal(cached, plain)
    assert "its weights, Q8_0, are kept" in caplog.text
    assert reports[-1].done_bytes == reports[-1].total_bytes


@pytest.mark.parametrize("damage", ["a byte", "short", "foreign", "empty"])
def test_a_damaged_file_is_written_anew_with_one_warning(
    damage: str, q8: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "n.gguf").write_bytes(q8)
    plain = logits(path, tmp_path, dtype="float32")
    (file,) = tmp_path.glob("*.weights")
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(
        {
            "a byte": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "short": good[:-1],
            "foreign": b"GGUF" + good,
            "empty": b"",
        }[damage]
    )
    assert torch.equal(logits(path, tmp_path, dtype="float32"), plain)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "cannot be used and is written anew" in caplog.text
    assert file.read_bytes() == good


def test_a_changed_model_replaces_its_file(q8: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "n.gguf").write_bytes(q8)
    before, stat = logits(path, tmp_path, dtype="float32"), path.stat()
    middle = len(q8) // 2  # in the layers: the lowest bits of bytes and of scales
    changed = q8[:middle] + bytes(byte ^ 1 for byte in q8[middle : middle + 4000]) + q8[middle + 4000 :]
    path.write_bytes(changed)  # of the same size,
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and as old
    after = logits(path, tmp_path, dtype="float32")
    assert torch.equal(after, logits(path, None, dtype="float32"))
    assert not torch.equal(after, before)
    assert len(list(tmp_path.glob("*.weights*"))) == 1


def test_a_full_disk_is_one_warning(
    q8: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "n.gguf").write_bytes(q8)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights_cache, "_write", full)
    assert torch.equal(logits(path, tmp_path, dtype="float32"), logits(path, None, dtype="float32"))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob("*.weights*"))
