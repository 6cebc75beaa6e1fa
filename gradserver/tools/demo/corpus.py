"""The text of the demo's training: the source of Python's own standard library, which every machine has."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

CAP = 6 * 2**20  # bytes: more than a short run ever samples, and read in a tenth of a second
HELD_OUT = 1 / 32  # share of the text, at its end, that is never trained on
MINIMUM = 64 * 2**10  # bytes; below this the library is not there as source (a zipped or stripped Python)

# Installed packages differ between machines; tests and generated tables are not useful as training text.
SKIPPED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib2to3",
    }
)

_INDENT = re.compile(rb"^(?: {4})+", re.MULTILINE)


class CorpusError(Exception):
    """The source of the standard library cannot be read."""


class Corpus:
    """Training bytes and held-out bytes, with samples that depend only on (seed, step, row)."""

    def __init__(self, text: bytes, context: int, seed: int) -> None:
        if len(text) * HELD_OUT < context + 1:
            raise CorpusError(f"{len(text)} bytes of text are too few for sequences of {context}")
        cut = len(text) - int(len(text) * HELD_OUT)
        self.text = text
        self.context = context
        self.seed = seed
        self.train = torch.frombuffer(bytearray(text[:cut]), dtype=torch.uint8)
        self.held_out = torch.frombuffer(bytearray(text[cut:]), dtype=torch.uint8)

    @classmethod
    def standard_library(cls, context: int, seed: int, root: Path | None = None) -> Corpus:
        """Read the corpus of this interpreter's library; `root` names another folder of Python source."""
        return cls(read_source(root or Path(sysconfig.get_path("stdlib"))), context, seed)

    @property
    def sha256(self) -> str:
        """Hash of the text, by which the processes of a run check that they read the same."""
        return hashlib.sha256(self.text).hexdigest()

    def batch(self, step: int, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Make inputs and targets of some rows of the global batch of `step`: two [rows, context] int64 tensors.

        Row i of a step is the same sequence in all processes, however the batch is divided.
        """
        span = len(self.train) - self.context
        return self._windows(self.train, [_draw(self.seed, step, row) % span for row in rows])

    def validation(self, rows: int) -> tuple[Tensor, Tensor]:
        """Make inputs and targets of `rows` sequences spread evenly over the held-out text, as `batch` does."""
        span = len(self.held_out) - self.context
        return self._windows(self.held_out, [row * span // rows for row in range(rows)])

    def _windows(self, text: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        both = torch.stack([text[start : start + self.context + 1] for start in starts]).long()
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def read_source(root: Path, cap: int = CAP) -> bytes:
    """Read the .py files under `root` one after the other, sorted by path, of `cap` bytes at most.

    Four spaces of indentation become a tab. A quarter of the text would be spaces otherwise, which are easily
    predicted and hard to count.
    """
    pieces: list[bytes] = []
    left = cap
    for path in _source_files(root):
        if left <= 0:
            break
        try:
            piece = path.read_bytes()[:left]
        except OSError:
            continue  # an unreadable file is unreadable for every process of this run alike
        pieces.append(piece)
        left -= len(piece)
    text = _INDENT.sub(lambda spaces: b"\t" * (len(spaces[0]) // 4), b"".join(pieces))
    if len(text) < MINIMUM:
        raise CorpusError(f"no Python source to train on under {root} ({len(text)} bytes of .py files)")
    return text


def _source_files(root: Path) -> list[Path]:
    """List the .py files under `root`, sorted by their path as text, without the skipped folders."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]  # os.walk enters the remaining ones
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _draw(seed: int, step: int, row: int) -> int:
    """Draw 64 even bits that depend only on the three numbers: the same on every platform and in every version."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest(), "big")
