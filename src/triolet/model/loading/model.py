"""Loading of a model: from its name to something that a runner can call.

An architecture that the native decoder knows is loaded natively, without importing transformers; any other
is left to the transformers backend. Which one it was stands in the model's `spec`, and in the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from triolet.config.choices import STORED_METHODS
from triolet.core.load_progress import OnProgress
from triolet.errors import ConfigError
from triolet.kernels.cpu.library import kernels
from triolet.model.architectures.decoder_config import read_config
from triolet.model.architectures.language_part import language_config
from triolet.model.folder.hub import resolve_folder
from triolet.model.loading.folder import load_folder
from triolet.model.loading.gguf import load_gguf_file
from triolet.model.loading.options import DEFAULT_OPTIONS, LoadedFolder, LoadOptions
from triolet.model.quantized.checkpoint import check_method

if TYPE_CHECKING:
    from triolet.model.parallel.group import Group


def load_model(
    model: str,
    options: LoadOptions = DEFAULT_OPTIONS,
    *,
    on_progress: OnProgress | None = None,
    group: Group | None = None,
) -> LoadedFolder:
    """Load a model folder or a GGUF file, or fetch and load a model of the hub.

    Args:
        model: path of a folder or of a GGUF file, or a hub id.
        options: settings of the load.
        on_progress: told how many bytes were fetched and read.
        group: of the processes that compute this model together; None for one.

    Raises:
        ConfigError: a field is not possible with this model or device.
        ModelError: the model cannot be loaded; the subclass says why. Nothing half-loaded stays.
    """
    options.check()
    path = resolve_folder(model, revision=options.revision, on_progress=on_progress)
    if options.place.type == "cpu":
        # Compiled now, if it must be: in a first step it would use up some request's time, and before this line it
        # would be for a model that there may not be.
        kernels()
    if options.classifier_from_token:
        _check_classifier_tokens(options, path)
    if options.quantization in STORED_METHODS:
        config = {} if path.is_file() else read_config(path)
        check_method(options.quantization, language_config(config) or config, path)
        options = attrs.evolve(options, quantization=None)  # the files say what is to be done
    if not path.is_file():
        return load_folder(path, options, on_progress, group)
    if group is not None:
        raise ConfigError("tensor_parallel_size", "1 for a GGUF file", group.part.size)
    return load_gguf_file(path, options, on_progress)


def _check_classifier_tokens(options: LoadOptions, path: Path) -> None:
    tokens = options.classifier_from_token
    if len(tokens) != 2:
        raise ConfigError("classifier_from_token", "two tokens, such as no,yes", tokens)
    if options.convert == "embed" or path.is_file():
        where = "for a GGUF file" if path.is_file() else "where convert is embed"
        raise ConfigError("classifier_from_token", f"left out {where}", tokens)
