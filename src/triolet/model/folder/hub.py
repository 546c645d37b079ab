"""From what the user calls a model to a folder on this machine.

A download that breaks off leaves what it has in the hub's cache, where the next one resumes it; only a
complete snapshot is ever returned.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triolet.core.load_progress import LoadProgress, OnProgress
from triolet.errors import HubUnreachable, ModelError, ModelFileError, ModelNotFound

logger = logging.getLogger(__name__)

_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
# The same weights in other layouts; the modules of sentence-transformers are in folders such as `2_Dense`.
_UNWANTED = ("[!0-9]*/*.safetensors", "consolidated*.safetensors")
_GGUF_ON_HUB = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")
_HUB_PAGE = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/(?P<id>[\w.-]+/[\w.-]+(?::[\w.-]+)?)/?")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_NO_MODEL = ("*mmproj*", "*imatrix*")  # GGUF files that lie beside models
# The type at the end of a name, as the converters write it; other names have it behind the last hyphen.
_USUAL_KIND = re.compile(r"[-._](?P<kind>(?:i?q\d|tq\d|bf16|f16|fp16|f32|mxfp4)\w*)$", re.IGNORECASE)


def resolve_folder(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Find a model's folder or GGUF file, fetching it from the Hugging Face hub if `model` is neither here.

    Args:
        model: path of a folder with a config.json or of a GGUF file, or a hub id such as `Qwen/Qwen3-0.6B`;
            `Qwen/Qwen3-0.6B-GGUF:Q8_0` is the GGUF file of that type in a repository that has several.
        revision: branch, tag or commit on the hub; the main branch if None.
        token: for private or gated models; the one of `hf auth login` or HF_TOKEN if None.
        on_progress: told how many bytes have come; possibly from another thread.

    Raises:
        ModelNotFound: no folder, no GGUF file and no model that the hub knows (or lets us see), or no such revision.
        ModelFileError: the folder has no config.json.
        HubUnreachable: the hub does not answer, and the model is not completely in the local cache.
    """
    path = os.path.expanduser(model)  # os.path and not Path: it takes any text for what it is, however odd
    if revision is not None and os.path.exists(path):
        logger.warning("revision has no effect: model %r is on this machine; got %r", model, revision)
    if model.lower().endswith(".gguf") and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise ModelNotFound(f"model must be a GGUF file that is there; there is no file {model!r}")
        return Path(path)
    if (named := _GGUF_ON_HUB.fullmatch(model)) and not os.path.isdir(path):
        return _download_gguf(named["repository"], named["kind"], revision, token, on_progress)
    folder = Path(path) if os.path.isdir(path) else _download(model, revision, token, on_progress)
    if not (folder / "config.json").is_file():
        raise ModelFileError(folder / "config.json", f"is missing{_gguf_hint(model, folder)}")
    return folder


def gguf_kinds(folder: Path) -> dict[str, Path]:
    """Return the GGUF models of a repository's folder by the types that `REPOSITORY:TYPE` names them with.

    Returns:
        The file, or the first part of a split one, of each type, in the order of their names. Files that no type tells
        from the others are left out.
    """
    paths = [path for path in sorted(folder.rglob("*.gguf")) if not _LATER_PART.search(path.name)]
    stems = {
        path: re.sub(r"-00001-of-\d{5}$", "", path.stem)
        for path in paths
        if not any(path.match(pattern) for pattern in _NO_MODEL)
    }
    found = {path: _kind_of(stem) for path, stem in stems.items()}
    return {
        kind: path
        for path, kind in found.items()
        if kind and sum(bool(_ending(kind).fullmatch(f"{stem}.gguf")) for stem in stems.values()) == 1
    }


def _kind_of(stem: str) -> str:
    usual = _USUAL_KIND.search(stem)
    return usual["kind"] if usual else stem.rpartition("-")[2] if "-" in stem else ""


def _ending(kind: str) -> re.Pattern[str]:
    """Return what the name of a GGUF file of a type is like."""
    return re.compile(rf".*[-._]{re.escape(kind)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)


def _gguf_hint(model: str, folder: Path) -> str:
    """Return what to name in place of a folder or a repository that has GGUF files."""
    if os.path.isdir(os.path.expanduser(model)):
        files = sorted(path.name for path in folder.glob("*.gguf"))
        return f"; a GGUF file is a model by itself, such as {os.path.join(model, files[0])}" if files else ""
    kinds = [*gguf_kinds(folder)] or (["Q4_K_M"] if "gguf" in model.lower() else [])
    return (
        f"; a GGUF file of a repository is named with its type, such as {model}:{kinds[0]}" if kinds else ""
    )


def _download_gguf(
    model: str, kind: str, revision: str | None, token: str | None, on_progress: OnProgress | None
) -> Path:
    """Fetch the GGUF file, with all its parts if it is split, whose name ends in `kind`; return its (first) path."""
    kinds = dict.fromkeys(
        (kind, kind.upper(), kind.lower())
    )  # the patterns tell letters of the two cases apart
    patterns = [
        f"*{before}{each}{parts}.gguf" for each in kinds for before in "-._" for parts in ("", "-*-of-*")
    ]
    folder = _download(model, revision, token, on_progress, wanted=patterns, unwanted=_NO_MODEL)
    found = sorted(path for path in folder.rglob("*.gguf") if _ending(kind).fullmatch(path.name))
    models = [path for path in found if not _LATER_PART.search(path.name)]
    if len(models) != 1:
        names = ", ".join(str(path.relative_to(folder)) for path in models) or "none"
        raise ModelNotFound(f"model {model!r} must have one GGUF file of type {kind!r}; found {names}")
    return models[0]


def _download(
    model: str,
    revision: str | None,
    token: str | None,
    on_progress: OnProgress | None,
    *,
    wanted: Sequence[str] = _WANTED,
    unwanted: Sequence[str] = _UNWANTED,
) -> Path:
    """Fetch the files of a repository whose names fit `wanted` and not `unwanted`; return their folder."""
    if _is_plainly_a_path(model):
        page = _HUB_PAGE.fullmatch(model)
        hint = f"; on the hub it is {page['id']!r}" if page else ""
        raise ModelNotFound(
            f"model must be a folder with a config.json or a hub id; there is no folder {model!r}{hint}"
        )
    from huggingface_hub import snapshot_download  # here, because a local folder needs none of it

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            token=token,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
            tqdm_class=_reporting_bar(on_progress),
        )
    except Exception as error:  # its own, the system's, and whatever the transport of this version raises
        raise _explained(error, model, revision) from error
    return Path(folder)


def _explained(error: Exception, model: str, revision: str | None) -> ModelError:
    """Return the error that a failed download means for the requested model."""
    from huggingface_hub import errors

    match error:
        case errors.HFValidationError():
            return ModelNotFound(f"model must be a folder with a config.json or a hub id; got {model!r}")
        case errors.GatedRepoError():
            return ModelNotFound(
                f"model {model!r} is gated: ask for access on its page and give a token (HF_TOKEN)"
            )
        case errors.RepositoryNotFoundError():
            return ModelNotFound(
                f"model {model!r} is neither a folder here nor a model that the hub shows without a token for it"
            )
        case errors.RevisionNotFoundError():
            return ModelNotFound(f"model {model!r} has no revision {revision!r}")
        case errors.LocalEntryNotFoundError():
            return HubUnreachable(
                f"model {model!r} is not in the local cache, or not all of it, and the hub cannot be reached: "
                f"{error.__cause__ or error}"
            )
        case errors.HfHubHTTPError():
            return HubUnreachable(f"the hub refused to send model {model!r}: {error}")
        case OSError(errno=int()) if not isinstance(error, ConnectionError | TimeoutError):
            return ModelError(f"model {model!r} cannot be stored in the local cache: {error}")
        case _:
            return HubUnreachable(f"the download of model {model!r} broke off: {error}")


def _is_plainly_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model or os.path.exists(model)


def _reporting_bar(on_progress: OnProgress | None) -> type[Any]:
    """Return a progress bar class for huggingface_hub; it draws nothing and reports the bytes of all files together."""
    from huggingface_hub import utils

    class Bar(utils.tqdm):  # type: ignore[name-defined,misc]
        monitor_interval = 0  # no thread that only watches bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> bool:
            if on_progress is not None and self.unit == "B" and self.total:
                on_progress(LoadProgress("download", min(int(self.n), int(self.total)), int(self.total)))
            return True

    return Bar
