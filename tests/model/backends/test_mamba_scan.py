"""The recurrence in pieces gives what a loop over tokens in float64 gives, wherever a sequence is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from triolet.model.backends.layers.recurrent.mamba_scan import PIECE_TOKENS, ScanInput, scan, scan_step

NUM_HEADS, HEAD_DIM, NUM_GROUPS, STATE_SIZE = 6, 5, 2, 7
LENGTH = 2 * PIECE_TOKENS + 9
TOLERANCE = 2e-5


def tokens_of(length: int, seed: int = 0, *, largest_step: float = 1.0) -> tuple[ScanInput, torch.Tensor]:
    """Random tokens, and rates from slow to fast."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    steps = torch.rand(length, NUM_HEADS, generator=generator) * largest_step
    groups = (length, NUM_GROUPS, STATE_SIZE)
    return ScanInput(
        random(length, NUM_HEADS, HEAD_DIM), steps, random(*groups), random(*groups)
    ), -torch.logspace(-3, 1, NUM_HEADS)


def token_by_token(
    tokens: ScanInput, rates: torch.Tensor, state: torch.Tensor
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The outputs, and the state after each token, as the definition says."""
    x, steps, written, read = (
        tensor.double().numpy() for tensor in (tokens.x, tokens.steps, tokens.written, tokens.read)
    )
    slopes, now = rates.double().numpy(), state.double().numpy().copy()
    outputs, states = np.zeros(x.shape), []
    for token in range(len(x)):
        for head in range(NUM_HEADS):
            group = head // (NUM_HEADS // NUM_GROUPS)
            now[head] *= np.exp(steps[token, head] * slopes[head])
            now[head] += steps[token, head] * np.outer(x[token, head], written[token, group])
            outputs[token, head] = now[head] @ read[token, group]
        states.append(now.copy())
    return outputs, states


def first_state() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(NUM_HEADS, HEAD_DIM, STATE_SIZE, generator=generator)


@pytest.mark.parametrize("largest_step", [0.1, 20.0])
@pytest.mark.parametrize(
    "ends", [(LENGTH,), (1, 2, LENGTH), (PIECE_TOKENS, 2 * PIECE_TOKENS, LENGTH), (16, 100, LENGTH)], ids=str
)
def test_pieces_give_the_outputs_and_states_of_a_loop_over_tokens(
    ends: tuple[int, ...], largest_step: float
) -> None:
    tokens, rates = tokens_of(LENGTH, largest_step=largest_step)
    expected, states = token_by_token(tokens, rates, first_state())
    outputs, found = scan(tokens, rates, first_state(), ends)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(outputs.numpy(), expected, atol=TOLERANCE * scale)
    for end, state in zip(ends, found, strict=True):
        np.testing.assert_allclose(
            state.numpy(), states[end - 1], atol=TOLERANCE * np.abs(states[end - 1]).max()
        )


@pytest.mark.parametrize("cut", [1, 5, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, LENGTH - 1])
def test_a_sequence_that_is_cut_anywhere_goes_on_as_if_it_were_whole(cut: int) -> None:
    tokens, rates = tokens_of(LENGTH)
    whole, [last] = scan(tokens, rates, first_state(), (LENGTH,))
    before, [state] = scan(tokens.part(0, cut), rates, first_state(), (cut,))
    after, [end] = scan(tokens.part(cut, LENGTH), rates, state, (LENGTH - cut,))
    torch.testing.assert_close(torch.cat((before, after)), whole, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(end, last, atol=1e-4, rtol=1e-5)


def test_a_token_of_each_of_several_sequences_gives_what_each_gives_alone() -> None:
    tokens, rates = tokens_of(3, seed=4)
    states = torch.stack([first_state() * factor for factor in (0.0, 1.0, -2.0)])
    outputs, found = scan_step(tokens, rates, states)
    for index in range(3):
        expected, [state] = token_by_token(tokens.part(index, index + 1), rates, states[index])
        np.testing.assert_allclose(outputs[index].numpy(), expected[0], atol=1e-5)
        np.testing.assert_allclose(found[index].numpy(), state, atol=1e-5)
