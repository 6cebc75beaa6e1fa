"""The modules that the tests train: a small transformer, and data for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, CONTEXT, WIDTH, BLOCKS = 17, 6, 8, 4


class Block(nn.Module):
    """A pre-norm block with single-headed causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w_o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.post_attn_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.input_norm(x)).chunk(3, dim=-1)
        x = x + self.w_o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out: Tensor = x + self.down(F.gelu(self.up(self.post_attn_norm(x))))
        return out


class Transformer(nn.Module):
    """Tokens [rows, time] in, logits [rows, time, vocabulary] out.

    Args:
        seed: equal seeds give equal weights, on any thread.
        tied: whether head and token embedding are one parameter.
        branch: whether there is an extra layer, used only by ``forward(…, branch=True)``.
        checkpointed: runs each block in a re-entrant checkpoint.
        twice: runs the last block twice, in two checkpoints.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        tied: bool = False,
        branch: bool = False,
        checkpointed: bool = False,
        twice: bool = False,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        assert width == WIDTH or not tied
        self.checkpointed, self.twice = checkpointed, twice
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.empty(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.branch = nn.Linear(WIDTH, WIDTH) if branch else None
        self.final_norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.token.weight
        seeded(self, seed)

    def forward(self, tokens: Tensor, branch: bool = False) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in [*self.blocks, *([self.blocks[-1]] if self.twice else [])]:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointed else block(x)
        if branch:
            assert self.branch is not None
            x = x + self.branch(x)
        logits: Tensor = self.lm_head(self.final_norm(x))
        return logits


class Convolutional(nn.Module):
    """Images [rows, 3, 6, 6] in, logits [rows, 5] out, with BatchNorm between."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        seeded(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.norm(self.conv(images))).mean((2, 3)))
        return logits


def seeded(module: nn.Module, seed: int) -> None:
    """Draw all parameters anew, with a generator of their own: workers are threads, and the global one is shared."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)


def tokens(step: int, rows: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, both [rows, CONTEXT]."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    drawn = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def images(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs [rows, 3, 6, 6] and classes [rows] of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, 6, 6, generator=generator), torch.randint(5, (rows,), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, **options: bool) -> Any:
    """Return the mean cross-entropy. (Any, as torch has not typed `backward`.)"""
    return F.cross_entropy(model(inputs, **options).flatten(0, -2), targets.flatten())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Return all tensors of an optimizer's state, in order."""
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))
