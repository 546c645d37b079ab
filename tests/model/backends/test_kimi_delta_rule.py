"""Kimi's delta rule in pieces gives what a loop over tokens in float64 gives, wherever a sequence is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from triolet.model.backends.layers.recurrent.delta_rule import DeltaInput
from triolet.model.backends.layers.recurrent.kimi_delta_rule import (
    PIECE_TOKENS,
    kimi_delta_scan,
    kimi_delta_step,
)

NUM_HEADS, KEY_DIM, VALUE_DIM = 3, 6, 5
LENGTH = 2 * PIECE_TOKENS + 5
TOLERANCE = 2e-5


def tokens_of(length: int, seed: int = 0, *, most_decay: float = 1.0) -> DeltaInput:
    """Random tokens with keys of length 1, and decays of each number of a key."""
    generator = torch.Generator().manual_seed(seed)

    def random(size: int) -> torch.Tensor:
        return torch.randn(length, NUM_HEADS, size, generator=generator)

    log_decays = -torch.rand(length, NUM_HEADS, KEY_DIM, generator=generator) * most_decay
    rates = torch.rand(length, NUM_HEADS, generator=generator)
    return DeltaInput.normalised(random(KEY_DIM), random(KEY_DIM), random(VALUE_DIM), log_decays, rates)


def token_by_token(
    tokens: DeltaInput, state: torch.Tensor
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The outputs, and the state after each token, as the definition says."""
    query, key, value, log_decays, rates = (
        tensor.double().numpy()
        for tensor in (tokens.query, tokens.key, tokens.value, tokens.log_decays, tokens.rates)
    )
    now = state.double().numpy().copy()
    outputs, states = np.zeros(value.shape), []
    for token in range(len(value)):
        for head in range(NUM_HEADS):
            now[head] *= np.exp(log_decays[token, head])[:, None]
            missing = value[token, head] - key[token, head] @ now[head]
            now[head] += rates[token, head] * np.outer(key[token, head], missing)
            outputs[token, head] = query[token, head] @ now[head]
        states.append(now.copy())
    return outputs, states


def first_state() -> torch.Tensor:
    return torch.randn(NUM_HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("most_decay", [0.01, 30.0])
@pytest.mark.parametrize(
    "ends", [(LENGTH,), (1, 2, LENGTH), (PIECE_TOKENS, 2 * PIECE_TOKENS, LENGTH), (7, 20, LENGTH)], ids=str
)
def test_pieces_give_the_outputs_and_states_of_a_loop_over_tokens(
    ends: tuple[int, ...], most_decay: float
) -> None:
    tokens = tokens_of(LENGTH, most_decay=most_decay)
    expected, states = token_by_token(tokens, first_state())
    outputs, found = kimi_delta_scan(tokens, first_state(), ends)
    np.testing.assert_allclose(outputs.numpy(), expected, atol=TOLERANCE * np.abs(expected).max())
    for end, state in zip(ends, found, strict=True):
        scale = np.abs(states[end - 1]).max()
        np.testing.assert_allclose(state.numpy(), states[end - 1], atol=TOLERANCE * scale)


@pytest.mark.parametrize("cut", [1, 5, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, LENGTH - 1])
def test_a_sequence_that_is_cut_anywhere_goes_on_as_if_it_were_whole(cut: int) -> None:
    tokens = tokens_of(LENGTH)
    whole, [last] = kimi_delta_scan(tokens, first_state(), (LENGTH,))
    before, [state] = kimi_delta_scan(tokens.part(0, cut), first_state(), (cut,))
    after, [end] = kimi_delta_scan(tokens.part(cut, LENGTH), state, (LENGTH - cut,))
    torch.testing.assert_close(torch.cat((before, after)), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end, last, atol=1e-5, rtol=1e-5)


def test_a_token_of_each_of_several_sequences_gives_what_each_gives_alone() -> None:
    tokens = tokens_of(3, seed=4)
    states = torch.stack([first_state() * factor for factor in (0.0, 1.0, -2.0)])
    outputs, found = kimi_delta_step(tokens, states)
    for index in range(3):
        expected, [state] = token_by_token(tokens.part(index, index + 1), states[index])
        np.testing.assert_allclose(outputs[index].numpy(), expected[0], atol=1e-5)
        np.testing.assert_allclose(found[index].numpy(), state, atol=1e-5)
