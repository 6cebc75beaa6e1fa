"""A small GPT over bytes: the model that the demo trains.

Its modules have the names by which the exchange groups gradients: `blocks`, and beside them `lm_head`,
`final_norm` and `embedding`. There is no dropout and no other source of randomness after construction.
"""

from __future__ import annotations

import hashlib
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradserver.tools.demo.settings import Settings


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.w_q = nn.Linear(width, width, bias=False)
        self.w_k = nn.Linear(width, width, bias=False)
        self.w_v = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, time, width] -> [rows, time, width]."""
        rows, time, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(rows, time, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.w_q(x)), split(self.w_k(x)), split(self.w_v(x)), is_causal=True
        )
        out: Tensor = self.w_o(mixed.transpose(1, 2).reshape(rows, time, width))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, time, width] -> [rows, time, width]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class RMSNorm(nn.Module):
    """Scaling of each vector to a mean square of one, times a learned gain. Torch has its own since 2.4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Pre-norm transformer block: each half reads a normalised copy and adds to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = GatedMLP(width, hidden)
        self.input_norm = RMSNorm(width)
        self.post_attn_norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, time, width] -> [rows, time, width]."""
        x = x + self.attention(self.input_norm(x))
        out: Tensor = x + self.mlp(self.post_attn_norm(x))
        return out


class Embedding(nn.Module):
    """Sum of the learned vectors of a byte, of the `history` bytes before it, and of its position.

    A single byte says little. With the bytes before it, the model need not first learn to look back by one. That
    would cost a run this short most of its steps.
    """

    def __init__(self, context: int, width: int, history: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.history = nn.ModuleList(nn.Embedding(vocabulary, width) for _ in range(history))
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, time] int64 -> [rows, time, width]."""
        time = tokens.shape[1]
        out: Tensor = self.token(tokens) + self.position(torch.arange(time, device=tokens.device))
        for back, table in enumerate(self.history, start=1):
            out = out + F.pad(table(tokens), (0, 0, back, 0))[:, :time]  # nothing is before the first byte
        return out

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw vectors of unit variance, and set positions to sinusoids: near ones are similar from the start."""
        self.token.weight.normal_(0.0, 1.0, generator=generator)
        for table in self.history:
            cast(nn.Embedding, table).weight.normal_(0.0, 0.5, generator=generator)
        places, width = self.position.weight.shape
        half = (width + 1) // 2
        rates = torch.exp(torch.arange(half) * (-math.log(1000.0) / half))  # radians per byte, from 1 to 1/1000
        angles = torch.arange(places)[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
        self.position.weight.copy_(waves * math.sqrt(2))


class GPT(nn.Module):
    """Model from bytes to the logits of the next byte. Equal settings, seed included, give equal weights."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.context = settings.context
        self.embedding = Embedding(settings.context, settings.width, settings.history, settings.vocabulary)
        self.blocks = nn.ModuleList(
            Block(settings.width, settings.heads, settings.hidden) for _ in range(settings.blocks)
        )
        self.final_norm = RMSNorm(settings.width)
        self.lm_head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        self._initialise(settings.seed)

    def _initialise(self, seed: int) -> None:
        """Draw all weights from a separate generator, so that they do not depend on the rest of the process."""
        generator = torch.Generator().manual_seed(seed)
        self.embedding.initialise(generator)
        with torch.no_grad():
            self.lm_head.weight.normal_(0.0, 0.02, generator=generator)  # near zero: all bytes equally likely
            for name, weight in self.blocks.named_parameters():
                if weight.ndim < 2:
                    continue  # the norms' gains stay at one
                std = weight.shape[1] ** -0.5
                if name.endswith(("w_o.weight", "down.weight")):
                    std /= math.sqrt(2 * len(self.blocks))  # the sum of the residual stream stays near one
                weight.normal_(0.0, std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, time] int64, time <= context -> [rows, time, vocabulary] logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.final_norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Generate `count` bytes that continue the non-empty `prompt`, drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            window = torch.tensor([tokens[-self.context :]])
            logits = self(window)[0, -1] / temperature
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return bytes(tokens[len(prompt) :])


def state_sha256(module: nn.Module) -> str:
    """Compute the SHA-256 of all parameters and buffers: name, dtype, shape and bytes, in the state's order."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
