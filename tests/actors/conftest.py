"""What several stories about actors begin with."""

from __future__ import annotations

import pytest
import trio

from triolet.actors import tokenizer
from triolet.actors.channels import TokenizeRequest


@pytest.fixture
def stuck_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes questions and answers none; prompts of token ids do not need it."""

    async def hold(tokenizer: object, request: TokenizeRequest, run: object) -> None:
        _, reply = request
        with reply:
            await trio.sleep_forever()

    monkeypatch.setattr(tokenizer, "_answer", hold)
