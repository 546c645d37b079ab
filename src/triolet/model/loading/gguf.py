"""Loading of a GGUF file, which has configuration, weights and tokenizer in one."""

from __future__ import annotations

import logging
from pathlib import Path

from triolet.core.load_progress import OnProgress
from triolet.core.request.pooling_params import EMBED, TOKEN_EMBED
from triolet.errors import ConfigError
from triolet.model.architectures.decoder_config import DTYPES
from triolet.model.folder.pooling_config import PoolingConfig
from triolet.model.gguf.config import (
    describe_types,
    open_checkpoint,
    read_decoder_config,
    read_gguf_defaults,
    read_pooling_method,
    stored_dtype,
)
from triolet.model.gguf.file import GgufFile
from triolet.model.loading.decoder import DecoderLoad, kv_format_of
from triolet.model.loading.options import AUTO, LoadedFolder, LoadOptions
from triolet.model.pooling import load_pooler

logger = logging.getLogger(__name__)


def load_gguf_file(path: Path, options: LoadOptions, on_progress: OnProgress | None) -> LoadedFolder:
    """Load a GGUF file.

    Args:
        path: of the file, or of the first part of one in several.
        options: settings of the load.
        on_progress: told how many bytes were read.

    Raises:
        ConfigError: a field is not possible with this model or device.
        ModelError: the file cannot be loaded; the subclass says why.
    """
    if options.convert == "classify":
        raise ConfigError("convert", "auto or embed for a GGUF file", options.convert)
    file = GgufFile.open(path)
    parsed = read_decoder_config(file, max_model_len=options.max_model_len)
    options.check_length(parsed.max_position)
    defaults = read_gguf_defaults(file)
    dtype = stored_dtype(file) if options.dtype == AUTO else DTYPES[options.dtype]
    checkpoint = open_checkpoint(file, parsed, dtype)
    load = DecoderLoad(
        parsed=parsed,
        checkpoint=checkpoint,
        dtype=dtype,
        options=options,
        files=list({tensor.path for tensor in file.tensors.values()}),
        kv_format=kv_format_of(options.kv_cache_dtype, parsed),
        on_progress=on_progress,
    )
    model, adapters = load.build()
    is_rounded = options.quantization in ("int8", "int4")
    logger.info(
        "%s runs on the native backend on %s; its weights, %s",
        parsed.architecture,
        options.device,
        describe_types(
            file, checkpoint.kept, f"{dtype} and then {options.quantization}" if is_rounded else str(dtype)
        ),
    )
    pooler = None
    if options.convert == "embed":
        pooling = PoolingConfig(tasks=(EMBED, TOKEN_EMBED), method=read_pooling_method(file))
        pooler = load_pooler(pooling, path, options.place, model.spec.hidden_size)
    return LoadedFolder(
        model=model, folder=file.path, generation_defaults=defaults, adapters=adapters, pooler=pooler
    )
