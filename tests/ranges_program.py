"""A worker of `test_ranges` without torch, as ``ranges_program.py URL SEAT``: it uses one epoch of 300 samples."""

from __future__ import annotations

import sys

import numpy as np

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from tests.worker_programs import say


def main(url: str, member_id: int) -> None:
    with gradserver.connect(url, member_id, 3, name=f"w{member_id}", timeout=30.0) as worker:
        worker.agree(simple_plan([("a", 70_000), ("b", 300_000)], FLOAT32))
        data = gradserver.DataRanges(300, worker, batch_size=3 + member_id, seed=3)
        gradients = [np.ones(70_000, np.float32), np.ones(300_000, np.float32)]
        while not data.finished():
            weight = float(len(data.take()))
            for bucket, gradient in enumerate(gradients):
                worker.push(bucket, gradient, weight=weight)
            worker.finish_round()
            say(f"round {worker.round}")
    say("ok")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
