"""One worker of a chaos run, started as ``python -m gradserver.chaos.program SETTINGS``: trains until told to end.

Its model is one vector for each bucket, which a round moves by 0.01 of the mean of what the generator gives. It prints
lines of `gradserver.chaos.evidence`, and takes these on standard input:

    leave        finish the round, leave, and end
    slow S T     take S seconds longer for each round, for T seconds

Whoever is out of the group (it was frozen, cut off, or its connection broke) joins again under its name.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

import gradserver
from gradserver.chaos import generator
from protocol.digest import digest, places

_COLLECTIVES_EVERY = 16
"""Rounds."""
_AGAIN_SECONDS = 0.1
"""Between two attempts to join."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one worker is told at its start.

    Attributes:
        pace: what its computing takes, in seconds for each round.
        world: how many found the group together; 0 for whoever joins later.
    """

    url: str
    name: str
    seed: int
    channel: str
    timeout: float
    pace: float
    world: int = 0

    def to_json(self) -> str:
        """As an argument of the program."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From its argument."""
        return cls(**json.loads(text))


class Program:
    """One replica, over all the times that it is a member."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._weights = [np.zeros(size, np.float32) for size in generator.SIZES]
        self._scratch = np.empty(max(generator.SIZES), np.float32)
        self._places = places(generator.plan())
        self.leaving = threading.Event()
        self._slow = (0.0, 0.0)
        """Seconds for each round, and until when."""

    def run(self) -> None:
        """Train until told to leave."""
        while not self.leaving.is_set():
            try:
                worker = self._join()
            except gradserver.GradServerError as error:
                self._say("refused", error=type(error).__name__, text=str(error))
                self.leaving.wait(_AGAIN_SECONDS)
                continue
            try:
                self._train(worker)
                worker.close("it was told to leave")
                self._say("left")
            except gradserver.GradServerError as error:
                self._say("out", error=type(error).__name__, text=str(error), round=worker.round)
                worker.close("it begins anew")

    def listen(self) -> None:
        """Heed what the parent says, until it is gone."""
        for line in sys.stdin:
            match line.split():
                case ["leave"]:
                    self.leaving.set()
                case ["slow", seconds, duration]:
                    self._slow = float(seconds), time.monotonic() + float(duration)

    def _join(self) -> gradserver.Worker:
        s = self._settings
        world = s.world or None
        return gradserver.connect(s.url, world_size=world, name=s.name, timeout=s.timeout, channel=s.channel)

    def _train(self, worker: gradserver.Worker) -> None:
        worker.agree(generator.plan())
        worker.serve_state(lambda: {"weights": self._weights})
        if worker.joins:
            worker.enter(self._install)
        buckets = [worker.empty(size, "float32") for size in generator.SIZES]
        self._say("entered", round=worker.round, epoch=worker.epoch, channel=worker.channel)
        while not self.leaving.is_set():
            number = worker.round
            weight = generator.weight(self._settings.seed, self._settings.name, number)
            self._compute()
            for part in reversed(range(len(buckets))):
                generator.values(self._settings.seed, self._settings.name, number, part, buckets[part])
                worker.push(part, buckets[part], weight=weight)
            gave = not worker.observes
            worker.finish_round()
            self._step(number, worker, buckets, "round" if gave else "replayed")
            if number % _COLLECTIVES_EVERY == _COLLECTIVES_EVERY - 1 and not worker.observes:
                self._collectives(worker, number)

    def _install(self, state: dict[str, Any]) -> None:
        """The state of a member, as it was at the end of the last round."""
        for weights, given in zip(self._weights, state["weights"], strict=True):
            weights[:] = given

    def _step(self, number: int, worker: gradserver.Worker, results: list[Any], kind: str) -> None:
        for weights, result in zip(self._weights, results, strict=True):
            weights -= np.multiply(result, generator.STEP, out=self._scratch[: result.size])
        self._say(
            kind,
            round=number,
            rank=worker.rank,
            results=[digest(result, at) for result, at in zip(results, self._places, strict=True)],
            weights=generator.weights_digest(self._weights),
        )

    def _compute(self) -> None:
        slow, until = self._slow
        pause = self._settings.pace + (slow if time.monotonic() < until else 0.0)
        if pause:
            time.sleep(pause)  # what a real one would compute; others of this machine have the processors meanwhile

    def _collectives(self, worker: gradserver.Worker, number: int) -> None:
        """What a trainer does now and then; each checks what it got against who is there."""
        while True:
            try:
                gathered = worker.all_gather(np.full(5, _code(worker.name, number), np.int64))
            except gradserver.MembershipChangedError:
                continue
            break
        expected = [[_code(name, number)] * 5 for name in worker.names]
        if gathered.tolist() != expected:
            text = f"an all_gather behind round {number} brought other things than its {len(expected)} members gave"
            self._say("fault", text=text)
        least = worker.all_reduce(np.full(3, number, np.int64), "min")
        if least.tolist() != [number] * 3:
            self._say("fault", text=f"an all_reduce behind round {number} is {least.tolist()}")

    def _say(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "name": self._settings.name, **fields, "at": time.monotonic()}
        print(json.dumps(line), flush=True)


def _code(name: str, number: int) -> int:
    return zlib.crc32(name.encode()) + (number << 32)


def main() -> int:
    """Train as told."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    program = Program(Settings.from_json(sys.argv[1]))
    threading.Thread(target=program.listen, daemon=True).start()
    program.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
