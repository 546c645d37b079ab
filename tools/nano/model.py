"""The Llama architecture in plain PyTorch, for training triolet-nano.

Parameter names are those of transformers' `LlamaForCausalLM`, so a state dict is exported as it is.
There are no masks: every row of a batch is one conversation that starts at position 0, padded on the right.
"""

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class NanoConfig:
    """Sizes of the model, under the names that transformers' `LlamaConfig` gives them."""

    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 10
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    """Scale each row to unit mean square, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding, halves paired as in Llama.

    Args:
        x: [batch, heads, length, head_dim].
        cos: [length, head_dim], in the dtype of `x`; `sin` likewise.
    """
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of [batch, heads, length, head_dim] each.

    Short rows on the CPU are written out if they are compiled: two plain matrix products and a softmax beat the fused
    kernel there by a quarter; where they are not, they take up to twice as long.
    """
    length = q.shape[2]
    if q.device.type != "cpu" or length > 384 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(scores.masked_fill(future, -torch.inf), dim=-1, dtype=torch.float32).to(v.dtype) @ v


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, kv_size, bias=False)
        self.v_proj = nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotate(q, cos.to(q.dtype), sin.to(q.dtype)), rotate(k, cos.to(k.dtype), sin.to(k.dtype))
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        mixed: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Token embedding, decoder layers and the last norm."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden


class NanoLlama(nn.Module):
    """Causal language model that uses its embedding table as output projection."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position_embeddings).float(), config.rope_theta**-channels
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._initialise)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.num_hidden_layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocab_size] for tokens [batch, length]."""
        length = tokens.shape[1]
        hidden = self.model(tokens, self.cos[:length], self.sin[:length])
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the summed cross entropy of each next token, in nats.

        Args:
            tokens: [batch, length] int64.
            weights: [batch, length] float32, how much predicting the token at that place counts.
        """
        logits = self(tokens[:, :-1]).flatten(0, 1).float()
        losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
        return (losses * weights[:, 1:].flatten()).sum()
