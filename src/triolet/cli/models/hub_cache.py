"""`triolet list`, `show`, `pull` and `rm`: the models in the Hugging Face cache of this machine.

The cache belongs to huggingface_hub, whose own functions scan it and delete from it: blobs are shared between
revisions, and only that library knows which of them are still needed.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from triolet import nano
from triolet.cli.failures import CommandFailure
from triolet.cli.loading import Loading
from triolet.config.engine import BUILT_IN_MODEL
from triolet.model.folder.hub import resolve_folder

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

WEIGHTS: Final = (".safetensors", ".gguf")
SHORT_COMMIT: Final = 8  # characters


@attrs.frozen(kw_only=True)
class CachedModel:
    """Model in the cache; sizes in bytes, times in seconds since the epoch."""

    name: str
    size_bytes: int
    last_used_at: float
    revisions: tuple[str, ...]  # commits, the newest first
    folder: Path  # snapshot of the newest revision that has weights, or of the newest
    has_weights: bool  # False after a download that broke off, or of files without weights

    @classmethod
    def of(cls, repository: CachedRepoInfo) -> CachedModel:
        """Return the model of a repository."""
        newest_first = sorted(repository.revisions, key=lambda one: one.last_modified, reverse=True)
        usable = [one for one in newest_first if _has_weights(one)]
        folders = [one.snapshot_path for one in (*usable, *newest_first)]
        return cls(
            name=repository.repo_id,
            size_bytes=repository.size_on_disk,
            last_used_at=repository.last_accessed,
            revisions=tuple(one.commit_hash for one in newest_first),
            folder=folders[0] if folders else repository.repo_path,
            has_weights=bool(usable),
        )


def list_models(*, as_json: bool) -> None:
    """Print the models on this machine, one a line."""
    models = cached_models()
    if as_json:
        for described in (_built_in(), *map(_described, models)):
            click.echo(json.dumps(described))
        return
    rows = [(BUILT_IN_MODEL, "", "ships with triolet")]
    rows += [
        (
            one.name,
            size_text(one.size_bytes),
            _day(one.last_used_at) + ("" if one.has_weights else "  no weights"),
        )
        for one in models
    ]
    name_width = max(len(name) for name, _, _ in rows)
    click.echo(f"{'MODEL':<{name_width}}  {'SIZE':>9}  LAST USED")
    for name, size, used in rows:
        click.echo(f"{name:<{name_width}}  {size:>9}  {used}")


def show_model(name: str, *, as_json: bool) -> None:
    """Print facts of one model: of the cache, of a folder, or triolet-nano.

    Raises:
        ModelError: there is no such model here.
    """
    cached = None if _is_local(name) else find_model(name)
    folder = _local_folder(name) if cached is None else cached.folder
    facts: dict[str, Any] = {"model": name, "folder": str(folder)}
    if cached is not None:
        facts |= {"size_bytes": cached.size_bytes, "revisions": list(cached.revisions)}
    else:
        facts["size_bytes"] = _size_of(folder)
    facts |= _architecture_of(folder)
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts["size_bytes"] = size_text(facts["size_bytes"])
    labels = {"size_bytes": "size"}
    width = max(map(len, facts))
    for field, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        click.echo(f"{labels.get(field, field).replace('_', ' '):<{width}}  {text}")


def pull_model(name: str, revision: str | None) -> None:
    """Fetch a model from the hub into the cache; what is there already is not fetched again.

    Raises:
        ModelError: the hub has no such model, or cannot be reached.
    """
    if _is_local(name):
        raise CommandFailure(
            f"model {name!r} is on this machine already; pull takes the id of a model of the hub"
        )
    loading = Loading(name)
    with loading.shown():
        path = resolve_folder(name, revision=revision, on_progress=loading.update)
    click.echo(str(path))


def remove_models(names: tuple[str, ...], revision: str | None, *, asks: bool) -> None:
    """Delete models, or one revision of a model, from the cache; nothing is deleted if one name is wrong.

    Args:
        names: ids on the hub.
        revision: commit, or the beginning of one; None for all.
        asks: ask at the terminal first.
    Raises:
        CommandFailure: a model or a revision is not in the cache.
    """
    models = [find_model(name) for name in dict.fromkeys(names)]
    commits = [commit for model in models for commit in _chosen(model, revision)]
    cache = _scan()
    assert cache is not None, "the models were found in it"
    strategy = cache.delete_revisions(*commits)
    freed = size_text(strategy.expected_freed_size)
    if asks:
        click.confirm(f"Delete {', '.join(model.name for model in models)} ({freed})?", abort=True)
    strategy.execute()
    click.echo(f"deleted {', '.join(model.name for model in models)}: {freed} are free again")


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name."""
    cache = _scan()
    repositories = [] if cache is None else [one for one in cache.repos if one.repo_type == "model"]
    return sorted(map(CachedModel.of, repositories), key=lambda one: one.name.lower())


def find_model(name: str) -> CachedModel:
    """Return a model of the cache.

    Raises:
        CommandFailure: it is not there.
    """
    models = {one.name: one for one in cached_models()}
    if name not in models:
        nearest = [one for one in models if name.lower() in one.lower()]
        hint = f"; did you mean {nearest[0]}?" if nearest else "; `triolet list` shows the models that are"
        raise CommandFailure(f"model {name!r} is not in the cache of this machine{hint}")
    return models[name]


def weight_bytes(model: str | None) -> int:
    """Return the bytes of a model's weights on this machine; 0 for one that is not here."""
    if model is None or os.path.exists(path := os.path.expanduser(model)):
        return _size_of(nano.PATH if model is None else Path(path))
    return next((one.size_bytes for one in cached_models() if one.name == model.partition(":")[0]), 0)


def size_text(num_bytes: int) -> str:
    """Return a size in the unit that suits it."""
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:.1f} {unit}"
    return f"{num_bytes} B"


def _scan() -> HFCacheInfo | None:
    """Return the content of the cache; None where there is none yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _has_weights(revision: CachedRevisionInfo) -> bool:
    return any(file.file_path.suffix in WEIGHTS for file in revision.files)


def _chosen(model: CachedModel, revision: str | None) -> list[str]:
    commits = [commit for commit in model.revisions if commit.startswith(revision or "")]
    if not commits or (revision is not None and len(commits) > 1):
        known = ", ".join(commit[:SHORT_COMMIT] for commit in model.revisions)
        raise CommandFailure(f"--revision must be one of model {model.name!r} ({known}); got {revision!r}")
    return commits


def _is_local(name: str) -> bool:
    return name == BUILT_IN_MODEL or os.path.exists(os.path.expanduser(name))


def _local_folder(name: str) -> Path:
    return nano.PATH if name == BUILT_IN_MODEL else resolve_folder(name)


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix in WEIGHTS)


def _architecture_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a folder's config.json that a user asks for; a GGUF file has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    text = config.get("text_config") or config  # models with images keep those of the text apart
    quantization = (config.get("quantization_config") or {}).get("quant_method")
    facts = {
        "architecture": ", ".join(config.get("architectures") or ()),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "num_hidden_layers": text.get("num_hidden_layers"),
        "hidden_size": text.get("hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "dtype": text.get("dtype") or text.get("torch_dtype"),
        "quantization": quantization,
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _described(model: CachedModel) -> dict[str, Any]:
    return {**attrs.asdict(model), "folder": str(model.folder)}


def _built_in() -> dict[str, Any]:
    """Return the fields of `CachedModel` for triolet-nano, which has no revisions and no time of its last use."""
    return {
        "name": BUILT_IN_MODEL,
        "size_bytes": _size_of(nano.PATH),
        "last_used_at": None,
        "revisions": [],
        "folder": str(nano.PATH),
        "has_weights": True,
    }


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
