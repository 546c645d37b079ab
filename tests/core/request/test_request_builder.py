"""A request is built for the model as it is now, which may not be the one that its prompt was checked for."""

from __future__ import annotations

import pytest

from tests.actors.harness import model_info
from triolet import EngineConfig, SamplingParams
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request_builder import RequestBuilder
from triolet.core.request.tokenizer_interface import Tokenized
from triolet.errors import PromptTooLong


def test_a_prompt_that_no_longer_fits_into_a_model_that_was_loaded_again_is_refused() -> None:
    model = LoadedModel()
    builder = RequestBuilder(EngineConfig(), model, lambda: 1)
    tokenized, params = Tokenized(None, (1,) * 8, ()), SamplingParams(max_tokens=4)
    model.info = model_info(4, 4)
    [request] = builder.build("a", params, tokenized, None, arrival_s=0.0)
    assert request.max_tokens == 4
    model.info = model_info(2, 4)
    with pytest.raises(PromptTooLong, match="maximum context length is 8 tokens"):
        builder.build("a", params, tokenized, None, arrival_s=0.0)
    pooling = PoolingParams(task="embed")
    builder.build("a", params, tokenized, None, arrival_s=0.0, pooling=pooling)  # needs no room for an answer
    model.info = model_info(1, 4)
    with pytest.raises(PromptTooLong, match="maximum context length is 4 tokens"):
        builder.build("a", params, tokenized, None, arrival_s=0.0, pooling=pooling)
