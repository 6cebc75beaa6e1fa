"""Writes checkpoints into a directory until it is killed: ``checkpoint_writer.py DIRECTORY``.

The one of round n holds a tensor of n's; it says ``n`` when that one is written.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np

from gradserver.worker.job.checkpoint import Directory
from gradserver.worker.tree import pack

NUMEL = 1 << 18


def main() -> None:
    directory = Directory(Path(sys.argv[1]), keep=2)
    for number in itertools.count():
        directory.write(number, pack({"round": number, "weights": np.full(NUMEL, number, np.float32)}))
        os.write(sys.stdout.fileno(), b"written %d\n" % number)  # whole, or not at all


if __name__ == "__main__":
    main()
