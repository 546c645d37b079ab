"""`triolet list`, `show`, `pull` and `rm`: the models in the Hugging Face cache of this machine.

The cache belongs to huggingface_hub, whose own functions scan it and delete from it: blobs are shared between
revisions, and only that library knows which of them are still needed.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from triolet import nano
from triolet.cli.failures import CommandFailure
from triolet.cli.loading import Loading
from triolet.config.engine import BUILT_IN_MODEL
from triolet.model.folder.hub import gguf_kinds, resolve_folder

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
    gguf: Mapping[str, int]  # bytes of its GGUF files, by the type that they are named with

    @classmethod
    def of(cls, repository: CachedRepoInfo) -> CachedModel:
        """Return the model of a repository."""
        newest_first = sorted(repository.revisions, key=lambda one: one.last_modified, reverse=True)
        usable = [one for one in newest_first if _has_weights(one)]
        folders = [one.snapshot_path for one in (*usable, *newest_first)]
        kinds = gguf_kinds(folders[0]) if folders else {}
        return cls(
            name=repository.repo_id,
            size_bytes=repository.size_on_disk,
            last_used_at=repository.last_accessed,
            revisions=tuple(one.commit_hash for one in newest_first),
            folder=folders[0] if folders else repository.repo_path,
            has_weights=bool(usable),
            gguf={kind: _bytes_of_gguf(path) for kind, path in kinds.items()},
        )

    @property
    def usable(self) -> dict[str, int]:
        """Names by which it can be used, with the bytes of each: of GGUF files `NAME:TYPE`; empty without weights."""
        files = {f"{self.name}:{kind}": size for kind, size in self.gguf.items()}
        is_folder = self.has_weights and (not files or (self.folder / "config.json").exists())
        return ({self.name: self.size_bytes - sum(files.values())} if is_folder else {}) | files


def list_models(*, as_json: bool) -> None:
    """Print the models on this machine, one a line."""
    models = cached_models()
    if as_json:
        for described in (_built_in(), *map(_described, models)):
            click.echo(json.dumps(described))
        return
    rows = [(BUILT_IN_MODEL, "", "ships with triolet")]
    for one in models:
        named = one.usable.items() or [(one.name, one.size_bytes)]
        used = _day(one.last_used_at) + ("" if one.has_weights else "  no weights")
        rows += [(name, size_text(size), used) for name, size in named]
    name_width = max(len(name) for name, _, _ in rows)
    click.echo(f"{'MODEL':<{name_width}}  {'SIZE':>9}  LAST USED")
    for name, size, used in rows:
        click.echo(f"{name:<{name_width}}  {size:>9}  {used}")


def show_model(name: str, *, as_json: bool) -> None:
    """Print facts of one model: of the cache, of a folder, or triolet-nano.

    Raises:
        ModelError: there is no such model here.
    """
    facts: dict[str, Any]
    if _is_local(name):
        folder = nano.PATH if name == BUILT_IN_MODEL else resolve_folder(name)
        facts = {
            "model": name,
            "folder": str(folder),
            "size_bytes": _size_of(folder),
            **_architecture_of(folder),
        }
    else:
        facts = {"model": name, **_cached_facts(name)}
    if as_json:
        click.echo(json.dumps(facts))
        return
    facts["size_bytes"] = size_text(facts["size_bytes"])
    labels = {"size_bytes": "size"}
    width = max(map(len, facts))
    for field, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if isinstance(value, dict):
            text = ", ".join(f"{kind} ({size_text(size)})" for kind, size in value.items())
        click.echo(f"{labels.get(field, field).replace('_', ' '):<{width}}  {text}")


def _cached_facts(name: str) -> dict[str, Any]:
    """Return the facts of a model of the cache, or of one of its GGUF files."""
    cached, kind = find_file(name)
    path, size = cached.folder, cached.size_bytes
    if kind is not None:
        path, size = gguf_kinds(cached.folder)[kind], cached.gguf[kind]
    facts: dict[str, Any] = {"folder": str(path), "size_bytes": size, "revisions": list(cached.revisions)}
    if kind is None and cached.gguf:
        facts["gguf"] = dict(cached.gguf)
    return facts | _architecture_of(path)


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
        CommandFailure: a model or a revision is not in the cache, a file shares its repository with others, or the
            answer was no.
    """
    models = [_whole_repository(name) for name in dict.fromkeys(names)]
    commits = [commit for model in models for commit in _chosen(model, revision)]
    cache = _scan()
    assert cache is not None, "the models were found in it"
    # Of these models alone: a copy of a repository has the same commits.
    chosen = {model.name for model in models}
    repositories = frozenset(one for one in cache.repos if one.repo_type == "model" and one.repo_id in chosen)
    strategy = dataclasses.replace(cache, repos=repositories).delete_revisions(*commits)
    freed = size_text(strategy.expected_freed_size)
    if asks and not _confirmed(f"Delete {', '.join(model.name for model in models)} ({freed})?"):
        raise CommandFailure("nothing was deleted")
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


def find_file(name: str) -> tuple[CachedModel, str | None]:
    """Return a model of the cache, and the type of its GGUF file if `name` is `NAME:TYPE`.

    Raises:
        CommandFailure: it is not there.
    """
    repository, colon, wanted = name.partition(":")
    model = find_model(repository)
    if not colon:
        return model, None
    for kind in model.gguf:
        if kind.lower() == wanted.lower():
            return model, kind
    known = ", ".join(model.gguf) or "none"
    raise CommandFailure(
        f"the type of model {name!r} must be one of its GGUF files in the cache ({known}); got {wanted!r}"
    )


def _whole_repository(name: str) -> CachedModel:
    """Return the model that is to be deleted; a file of several is not deleted alone.

    Raises:
        CommandFailure: it is not there, or is such a file.
    """
    model, kind = find_file(name)
    if kind is not None and len(model.usable) > 1:
        raise CommandFailure(
            f"{name} cannot be deleted alone; `triolet rm {model.name}` deletes all of {', '.join(model.usable)}"
        )
    return model


def _confirmed(question: str) -> bool:
    """Ask at the terminal; the end of stdin means no."""
    try:
        return click.confirm(question)
    except click.Abort as error:  # click's for a Ctrl-C as well
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        click.echo()
        return False


def weight_bytes(model: str | None) -> int:
    """Return the bytes of a model's weights on this machine; 0 for one that is not here."""
    if model is None or os.path.exists(path := os.path.expanduser(model)):
        return _size_of(nano.PATH if model is None else Path(path))
    sizes = {name.lower(): size for one in cached_models() for name, size in one.usable.items()}
    return sizes.get(model.lower(), 0)  # a type may be written in either case


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


def _bytes_of_gguf(path: Path) -> int:
    """Return the bytes of a GGUF file with all its parts."""
    parts = re.sub(r"-00001-of-(\d{5})\.gguf$", r"-?????-of-\1.gguf", glob.escape(path.name))
    return sum(part.stat().st_size for part in path.parent.glob(parts))


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix in WEIGHTS)


def _architecture_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a folder's config.json, or of the metadata of a GGUF file, that a user asks for.

    Raises:
        ModelFileError: a GGUF file is not what its name says.
    """
    if folder.is_file():
        return _facts_of_gguf(folder)
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


def _facts_of_gguf(path: Path) -> dict[str, Any]:
    from triolet.model.gguf.file import GgufArray, GgufFile

    file = GgufFile.open(path)
    architecture = file.metadata.get("general.architecture")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    kinds: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            kinds[tensor.type.name] += math.prod(tensor.shape)
    facts = {
        "architecture": architecture,
        "max_position_embeddings": file.metadata.get(f"{architecture}.context_length"),
        "num_hidden_layers": file.metadata.get(f"{architecture}.block_count"),
        "hidden_size": file.metadata.get(f"{architecture}.embedding_length"),
        "vocab_size": tokens.count if isinstance(tokens, GgufArray) else None,
        "quantization": ", ".join(kind for kind, _ in kinds.most_common()),
    }
    return {name: value for name, value in facts.items() if isinstance(value, int | str) and value != ""}


def _described(model: CachedModel) -> dict[str, Any]:
    return {**attrs.asdict(model), "folder": str(model.folder), "gguf": dict(model.gguf)}


def _built_in() -> dict[str, Any]:
    """Return the fields of `CachedModel` for triolet-nano, which has no revisions and no time of its last use."""
    return {
        "name": BUILT_IN_MODEL,
        "size_bytes": _size_of(nano.PATH),
        "last_used_at": None,
        "revisions": [],
        "folder": str(nano.PATH),
        "has_weights": True,
        "gguf": {},
    }


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
