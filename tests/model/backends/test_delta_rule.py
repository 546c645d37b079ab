"""The gated delta rule in pieces gives what a loop over tokens in float64 gives, wherever a sequence is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from triolet.model.backends.layers.recurrent.delta_rule import DeltaInput, delta_scan, delta_step
from triolet.model.backends.layers.recurrent.mamba_scan import PIECE_TOKENS

NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 6, 5
LENGTH = 2 * PIECE_TOKENS + 9
TOLERANCE = 2e-5


def tokens_of(
    length: int, seed: int = 0, *, fastest: float = 1.0
) -> tuple[DeltaInput, tuple[Tensor, Tensor]]:
    """Random tokens, some keys of which are alike, and their queries and keys before they are scaled."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = random(length, NUM_KEY_HEADS, KEY_DIM), random(length, NUM_KEY_HEADS, KEY_DIM)
    key[1::3] = key[:-1:3] * 2
    log_decays = (
        -torch.rand(length, NUM_HEADS, generator=generator) * torch.logspace(-3, 0, NUM_HEADS) * fastest
    )
    rates = torch.rand(length, NUM_HEADS, generator=generator)
    value = random(length, NUM_HEADS, VALUE_DIM)
    return DeltaInput.normalised(query, key, value, log_decays, rates), (query, key)


def first_state() -> Tensor:
    return torch.randn(NUM_HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(9))


def token_by_token(
    tokens: DeltaInput, raw: tuple[Tensor, Tensor], state: Tensor
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The outputs, and the state after each token, as the definition says."""
    queries, keys = (tensor.double().numpy() for tensor in raw)
    value, decays, rates = (
        tensor.double().numpy() for tensor in (tokens.value, tokens.log_decays, tokens.rates)
    )
    now, outputs, states = state.double().numpy().copy(), np.zeros(value.shape), []
    for token in range(len(value)):
        for head in range(NUM_HEADS):
            shared = head // (NUM_HEADS // NUM_KEY_HEADS)
            query, key = queries[token, shared], keys[token, shared]
            query = query / np.sqrt((query**2).sum() + 1e-6) / np.sqrt(KEY_DIM)
            key = key / np.sqrt((key**2).sum() + 1e-6)
            now[head] *= np.exp(decays[token, head])
            now[head] += np.outer(key, rates[token, head] * (value[token, head] - key @ now[head]))
            outputs[token, head] = query @ now[head]
        states.append(now.copy())
    return outputs, states


@pytest.mark.parametrize("fastest", [0.1, 50.0])
@pytest.mark.parametrize(
    "ends", [(LENGTH,), (1, 2, LENGTH), (PIECE_TOKENS, 2 * PIECE_TOKENS, LENGTH), (16, 100, LENGTH)], ids=str
)
def test_pieces_give_the_outputs_and_states_of_a_loop_over_tokens(
    ends: tuple[int, ...], fastest: float
) -> None:
    tokens, raw = tokens_of(LENGTH, fastest=fastest)
    expected, states = token_by_token(tokens, raw, first_state())
    outputs, found = delta_scan(tokens, first_state(), ends)
    np.testing.assert_allclose(outputs.numpy(), expected, atol=TOLERANCE * np.abs(expected).max())
    for end, state in zip(ends, found, strict=True):
        scale = np.abs(states[end - 1]).max()
        np.testing.assert_allclose(state.numpy(), states[end - 1], atol=TOLERANCE * scale)


@pytest.mark.parametrize("cut", [1, 5, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, LENGTH - 1])
def test_a_sequence_that_is_cut_anywhere_goes_on_as_if_it_were_whole(cut: int) -> None:
    tokens, _ = tokens_of(LENGTH)
    whole, [last] = delta_scan(tokens, first_state(), (LENGTH,))
    before, [state] = delta_scan(tokens.part(0, cut), first_state(), (cut,))
    after, [end] = delta_scan(tokens.part(cut, LENGTH), state, (LENGTH - cut,))
    torch.testing.assert_close(torch.cat((before, after)), whole, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(end, last, atol=1e-4, rtol=1e-5)


def test_a_token_of_each_of_several_sequences_gives_what_each_gives_alone() -> None:
    tokens, (query, key) = tokens_of(3, seed=4)
    states = torch.stack([first_state() * factor for factor in (0.0, 1.0, -2.0)])
    outputs, found = delta_step(tokens, states)
    for index in range(3):
        one = slice(index, index + 1)
        expected, [state] = token_by_token(
            tokens.part(index, index + 1), (query[one], key[one]), states[index]
        )
        np.testing.assert_allclose(outputs[index].numpy(), expected[0], atol=1e-5)
        np.testing.assert_allclose(found[index].numpy(), state, atol=1e-5)
