"""Shapes of recurrent layers: what a layer has in place of attention, or beside it."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class MambaConfig:
    """A Mamba-2 layer: heads whose state, [head_dim, state_size], decays and is added to. Source: arXiv 2405.21060."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # heads of a group share what is written into their states, and what is read from them
    kernel_size: int  # of the convolution before it, tokens
    convolution_bias: bool
    projection_bias: bool
    activation: str  # of what the convolution gives
    # What tokens are projected to is multiplied by these: gate, heads, what is written, what is read, steps.
    projection_scales: tuple[float, float, float, float, float] | None = None
    is_normed: bool = True  # what the heads give is normalised per group
    norms_before_gate: bool = False  # it is, and the gate multiplies it afterwards
    norm_eps: float | None = None  # of that norm, where it is not the model's

    @property
    def inner_size(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Numbers of all groups together, of what is written or of what is read."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of the heads, and what their states are written and read with."""
        return self.inner_size + 2 * self.group_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state."""
        return self.num_heads, self.head_dim, self.state_size


@attrs.frozen(kw_only=True)
class Mamba1Config:
    """A Mamba layer: channels whose state, [state_size], decays and is added to. Source: arXiv 2312.00752."""

    channels: int  # of the convolution before it, and of the recurrence
    state_size: int
    step_rank: int  # numbers that the steps of a head's channels are projected from
    kernel_size: int  # of the convolution, tokens
    convolution_bias: bool
    projection_bias: bool
    activation: str  # of what the convolution gives
    # Heads that each project their channels by themselves to steps, and to what is written and read; None for one
    # projection of all channels (Zamba has such heads).
    num_heads: int | None = None
    alternates: bool = False  # the first projection gives each channel and its gate side by side (Zamba)
    # Of the norms of what steps come from, of what is written and of what is read; None without.
    norm_eps: float | None = None
    has_norm_weights: bool = False  # with them: they have weights (Jamba)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state."""
        return self.channels, self.state_size


@attrs.frozen(kw_only=True)
class DeltaNetConfig:
    """A layer whose heads' states map keys to values, and are corrected by each token. Source: arXiv 2412.06464."""

    num_heads: int  # of values
    num_key_heads: int  # of queries and keys; each is shared by as many heads of values
    key_dim: int
    value_dim: int
    kernel_size: int  # of the convolution before it, tokens
    # What tokens are projected to lies head of keys after head of keys, each with what belongs to it (Qwen3-Next), not
    # all queries, all keys, all values, all gates.
    by_key_heads: bool = False
    rate_scale: float = (
        1.0  # of the sigmoids that rates are; 2 where a state's answer may change its sign (OLMo)
    )
    norm_eps: float | None = None  # of the norm of what it gives, where it is not the model's

    @property
    def key_size(self) -> int:
        """Numbers of all keys together."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all values together."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state."""
        return self.num_heads, self.key_dim, self.value_dim


@attrs.frozen(kw_only=True)
class KimiDeltaConfig:
    """A gated delta net of which each number of a key decays by itself. Source: arXiv 2510.26692."""

    num_heads: int
    head_dim: int  # of queries, keys and values
    kernel_size: int  # of the convolution before it, tokens

    @property
    def inner_size(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 3 * self.inner_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state."""
        return self.num_heads, self.head_dim, self.head_dim


@attrs.frozen(kw_only=True)
class LightningConfig:
    """A layer with lightning attention: attention without a softmax, whose past decays. Source: arXiv 2501.08313."""

    head_dim: int
    slopes: tuple[float, ...]  # of each head: minus the logarithm of what a token leaves
    norm_eps: float = 1e-6  # of the norm of what it gives
    kernel_size: int = 1  # there is no convolution before it

    @property
    def num_heads(self) -> int:
        """Heads of queries, keys and values."""
        return len(self.slopes)

    @property
    def inner_size(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers that a token is projected to: queries, keys and values."""
        return 3 * self.inner_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state."""
        return self.num_heads, self.head_dim, self.head_dim


@attrs.frozen(kw_only=True)
class ShortConvolutionConfig:
    """A layer with a gated convolution over the last few tokens. Source: arXiv 2511.23404."""

    channels: int
    kernel_size: int  # tokens
    bias: bool  # of the convolution and the projections around it

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state: nothing beside the inputs of the convolution."""
        return (0,)


@attrs.frozen(kw_only=True)
class SharedBlockConfig:
    """Attention and a feed-forward block in front of a layer's recurrence, whose weights several layers share.

    They read the residual stream and the token's embedding side by side; what a projection of the layer's own makes of
    what they give is added to what the recurrence reads. Source: Zamba, arXiv 2405.16712, and Zamba2, 2411.15242.
    """

    stored_in: int  # the checkpoint's layer that holds the shared weights
    name: str  # of the shared block in that layer, such as `shared_transf.`
    adapter: int | None = None  # number of the layer's own adapters in the shared block; None without
    adapter_rank: int = 0
    adapts_attention: bool = False  # queries, keys and values have adapters, too


RecurrentConfig = (
    MambaConfig | Mamba1Config | DeltaNetConfig | KimiDeltaConfig | LightningConfig | ShortConvolutionConfig
)
