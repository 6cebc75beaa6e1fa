"""Modules with the weights of a seed, made in threads: all threads draw from torch's one generator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_DRAWING = threading.Lock()


def seeded(seed: int, make: Callable[[], T]) -> T:
    """Return what ``make()`` makes with torch's generator at ``seed``, alone. The generator is then as it was."""
    with _DRAWING, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make()
