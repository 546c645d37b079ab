"""The recurrence of Mamba in pieces gives what a loop over tokens in float64 gives, wherever a sequence is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from triolet.model.backends.layers.recurrent.selective_scan import (
    PIECE_TOKENS,
    SelectiveInput,
    selective_scan,
    selective_step,
)

NUM_HEADS, HEAD_DIM, STATE_SIZE = 3, 5, 7
CHANNELS = NUM_HEADS * HEAD_DIM
LENGTH = 2 * PIECE_TOKENS + 9
TOLERANCE = 2e-5


def tokens_of(
    length: int, seed: int = 0, *, largest_step: float = 1.0
) -> tuple[SelectiveInput, torch.Tensor]:
    """Random tokens, and rates from slow to fast, different for each number of a state."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    steps = torch.rand(length, CHANNELS, generator=generator) * largest_step
    heads = (length, NUM_HEADS, STATE_SIZE)
    rates = -torch.logspace(-3, 1, CHANNELS * STATE_SIZE).view(CHANNELS, STATE_SIZE)
    return SelectiveInput(random(length, CHANNELS), steps, random(*heads), random(*heads)), rates


def token_by_token(
    tokens: SelectiveInput, rates: torch.Tensor, state: torch.Tensor
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The outputs, and the state after each token, as the definition says."""
    x, steps, written, read = (
        tensor.double().numpy() for tensor in (tokens.x, tokens.steps, tokens.written, tokens.read)
    )
    slopes, now = rates.double().numpy(), state.double().numpy().copy()
    outputs, states = np.zeros(x.shape), []
    for token in range(len(x)):
        for channel in range(CHANNELS):
            head, step = channel // HEAD_DIM, steps[token, channel]
            now[channel] *= np.exp(step * slopes[channel])
            now[channel] += step * x[token, channel] * written[token, head]
            outputs[token, channel] = now[channel] @ read[token, head]
        states.append(now.copy())
    return outputs, states


def first_state() -> torch.Tensor:
    return torch.randn(CHANNELS, STATE_SIZE, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("largest_step", [0.1, 20.0])
@pytest.mark.parametrize(
    "ends", [(LENGTH,), (1, 2, LENGTH), (PIECE_TOKENS, 2 * PIECE_TOKENS, LENGTH), (16, 50, LENGTH)], ids=str
)
def test_pieces_give_the_outputs_and_states_of_a_loop_over_tokens(
    ends: tuple[int, ...], largest_step: float
) -> None:
    tokens, rates = tokens_of(LENGTH, largest_step=largest_step)
    expected, states = token_by_token(tokens, rates, first_state())
    outputs, found = selective_scan(tokens, rates, first_state(), ends)
    np.testing.assert_allclose(outputs.numpy(), expected, atol=TOLERANCE * np.abs(expected).max())
    for end, state in zip(ends, found, strict=True):
        scale = np.abs(states[end - 1]).max()
        np.testing.assert_allclose(state.numpy(), states[end - 1], atol=TOLERANCE * scale)


@pytest.mark.parametrize("cut", [1, 5, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, LENGTH - 1])
def test_a_sequence_that_is_cut_anywhere_goes_on_as_if_it_were_whole(cut: int) -> None:
    tokens, rates = tokens_of(LENGTH)
    whole, [last] = selective_scan(tokens, rates, first_state(), (LENGTH,))
    before, [state] = selective_scan(tokens.part(0, cut), rates, first_state(), (cut,))
    after, [end] = selective_scan(tokens.part(cut, LENGTH), rates, state, (LENGTH - cut,))
    torch.testing.assert_close(torch.cat((before, after)), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end, last, atol=1e-5, rtol=1e-5)


def test_a_token_of_each_of_several_sequences_gives_what_each_gives_alone() -> None:
    tokens, rates = tokens_of(3, seed=4)
    states = torch.stack([first_state() * factor for factor in (0.0, 1.0, -2.0)])
    before = states.clone()
    outputs, found = selective_step(tokens, rates, states)
    torch.testing.assert_close(
        states, before, atol=0, rtol=0
    )  # a step that is computed twice reads them again
    for index in range(3):
        expected, [state] = token_by_token(tokens.part(index, index + 1), rates, before[index])
        np.testing.assert_allclose(outputs[index].numpy(), expected[0], atol=1e-5)
        np.testing.assert_allclose(found[index].numpy(), state, atol=1e-5)
