"""One worker of a chaos run, which trains until told to end: ``python -m gradserver.tools.chaos.program SETTINGS``.

Its model is four vectors. A round moves them by 0.01 of the mean of the generated contributions, or as the outer
optimizer of local SGD has it. It prints lines of `gradserver.tools.chaos.evidence`, and takes these on standard input:

    leave        finish the round, leave, and end
    slow S T     take S seconds longer for each round, for T seconds
    linger S     come S seconds later to the collectives, if this worker is the late one that the others wait for
    die N        die (SIGKILL) in the next round, when N pieces of its contribution are on their way
    stacks       write to the log what each thread is doing

A worker that is out of the group (it was frozen, cut off, or its connection broke) joins again under its name.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

import gradserver
from gradserver.protocol.planes import AUTO, HIERARCHICAL
from gradserver.tools.chaos import generator, tally
from gradserver.tools.chaos.exchange import Exchange, Reduced, directly
from gradserver.tools.chaos.workload import Workload
from gradserver.tools.common.as_json import AsJson

T = TypeVar("T")
_COLLECTIVES_EVERY = 5
"""Rounds."""
_LATE_SECONDS = 0.15
"""Delay of one member at a collective: while the others wait, an event can hit them."""
_ARRIVES_SECONDS = 0.05
"""Time until sent bytes have left the process."""
_WAITS_SECONDS = 0.006
"""Time between two moments at which a worker dies that has pushed everything."""
_AGAIN_SECONDS = 0.1
"""Time between two attempts to join."""


@dataclass(frozen=True, slots=True)
class Settings(AsJson):
    """Settings of one worker.

    Attributes:
        workload: what workers exchange (`gradserver.tools.chaos.workload`), as JSON.
        pace: time that it computes in each round, in seconds.
        world: number of workers that begin the group; 0 for a worker that joins later.
        plane: "direct" to reduce gradients among the workers, with gloo; "hierarchical" to do so on each of two hosts;
            "quicker" to be on a host of its own, and to take the quicker way; "auto" to send them to the coordinator.
    """

    url: str
    name: str
    workload: str
    channel: str
    timeout: float
    pace: float
    world: int = 0
    plane: str = "auto"


class Program:
    """One replica, over all of its memberships."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workload = Workload.from_json(settings.workload)
        self._weights = [np.zeros(size, np.float32) for size in generator.SIZES]
        self._scratch = np.empty(max(generator.SIZES), np.float32)
        self.leaving = threading.Event()
        self._lingers = 0.0
        """Time until which it waits if it is late to a collective."""
        self._dies_after = 0
        """Number of pieces after which it dies; 0 if it does not."""
        self._slow = (0.0, 0.0)
        """Additional seconds for each round, and the time until which they count."""

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
                worker.close("it joins again")

    def listen(self) -> None:
        """Carry out the parent's commands, until it has ended."""
        for line in sys.stdin:
            match line.split():
                case ["leave"]:
                    self.leaving.set()
                case ["slow", seconds, duration]:
                    self._slow = float(seconds), time.monotonic() + float(duration)
                case ["linger", seconds]:
                    self._lingers = time.monotonic() + float(seconds)
                case ["die", pieces]:
                    self._dies_after = int(pieces)
                case ["stacks"]:
                    faulthandler.dump_traceback()

    def _join(self) -> gradserver.Worker:
        s = self._settings
        world, wire, plane = s.world or None, self._workload.wire, s.plane
        if s.plane == HIERARCHICAL:
            os.environ["GRADSERVER_HOST"] = generator.host(s.name)
        elif s.plane == generator.QUICKER:
            os.environ["GRADSERVER_HOST"], plane = s.name, AUTO
        return gradserver.connect(
            s.url, world_size=world, name=s.name, timeout=s.timeout, channel=s.channel, plane=plane, wire=wire
        )

    def _train(self, worker: gradserver.Worker) -> None:
        if self._workload.is_local:
            self._train_locally(worker)
            return
        exchange = directly(worker) if self._settings.plane != AUTO else Reduced(worker)
        worker.serve_state(lambda: {"weights": self._weights})
        if worker.joins:
            worker.enter(self._install)
        self._say("entered", round=worker.round, epoch=worker.epoch, channel=worker.channel)
        gave = False
        train = self._train_once if worker.mode == "sync" else self._train_in_turns
        while not self.leaving.is_set():
            self._compute()
            gave = train(worker, exchange, gave)

    def _train_locally(self, worker: gradserver.Worker) -> None:
        """Train with local SGD: each round exchanges one fragment."""
        from gradserver.tools.chaos.locally import Locally  # torch takes seconds to load

        local = Locally(worker, self._workload)
        worker.serve_state(local.state)
        if worker.joins:
            worker.enter(local.install)
        self._say("entered", round=worker.round, epoch=worker.epoch, channel=worker.channel)
        gave = False
        while not self.leaving.is_set():
            self._compute()
            number = worker.round
            if local.is_inside:
                self._say("gives", round=number, rank=worker.rank)
                self._die_on_the_way(worker, number, gave)
                wrong = local.exchange(number, generator.weight(self._workload.seed, worker.name, number))
                if wrong:
                    self._say("fault", text=f"{wrong}, behind round {number}")
                gave = not worker.observes
            else:
                local.replay()
            self._report(number, worker, "round" if gave else "replayed", [local.mean], local.fingerprint())
            self._meet_if_due(worker, tally.LARGE, number)

    def _die_on_the_way(self, worker: gradserver.Worker, number: int, gave: bool) -> None:
        """Die in the middle of the next exchange if that is due: when pieces were sent, or a few milliseconds later."""
        pieces = self._dies_after if gave else 0
        if pieces and worker.channel != "shm":
            _when_sent(pieces, lambda: self._die(number))
        elif pieces:
            self._die_while_waiting(number, pieces * _WAITS_SECONDS)

    def _train_once(self, worker: gradserver.Worker, exchange: Exchange, gave: bool) -> bool:
        """Take part in the next round. Return whether this worker's contribution counts, as it ``gave`` before."""
        number = worker.round
        gave = self._contribute(worker, exchange, number, gave)
        exchange.finish()
        self._step(number, worker, exchange, "round" if gave else "replayed")
        return gave

    def _train_in_turns(self, worker: gradserver.Worker, exchange: Exchange, gave: bool) -> bool:
        """Request a round, and take part in all up to that. Return whether this worker's contribution counts."""
        worker.request_round()
        while (turn := worker.next_turn()) is not gradserver.Turn.DROP:
            number, gives = worker.round, turn is gradserver.Turn.PUSH
            if gives:
                self._contribute(worker, exchange, number, gave)
            else:
                for part in exchange.order:
                    exchange.push(part, 0.0)
            exchange.finish()
            self._step(number, worker, exchange, "round" if gives else "replayed", worker.staleness if gives else 0)
            if gives:
                return True
        self._say("dropped", round=worker.round)
        return gave

    def _contribute(self, worker: gradserver.Worker, exchange: Exchange, number: int, gave: bool) -> bool:
        """Push all buckets, the largest first. Return whether it counts; ``gave``: whether the round before did."""
        seed, name = self._workload.seed, self._settings.name
        weight = generator.weight(seed, name, number)
        self._say("gives", round=number, rank=worker.rank)
        pieces = self._dies_after if gave else 0
        sends_nothing = worker.channel == "shm" or self._settings.plane != AUTO
        if pieces and not sends_nothing:
            _when_sent(pieces, lambda: self._die(number))
        for count, part in enumerate(exchange.order, start=1):
            generator.values(seed, name, number, part, exchange.buckets[part])
            exchange.push(part, weight)
            if pieces == count and sends_nothing:
                self._die(number)
        if pieces and self._settings.plane != AUTO:
            self._die_while_waiting(number, (pieces - len(exchange.order)) * _WAITS_SECONDS)
        elif pieces:  # there were fewer pieces
            self._die(number)
        return not worker.observes

    def _die(self, number: int) -> None:
        self._say("dies", round=number)
        time.sleep(_ARRIVES_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    def _die_while_waiting(self, number: int, seconds: float) -> None:
        """Die in so many seconds: until then, buckets are reduced, and the commit is on its way."""
        self._say("dies", round=number)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _install(self, state: dict[str, Any]) -> None:
        """Install the state of a member, as it was at the end of the last round."""
        for weights, given in zip(self._weights, state["weights"], strict=True):
            weights[:] = given

    def _step(self, number: int, worker: gradserver.Worker, exchange: Exchange, kind: str, staleness: int = 0) -> None:
        results = exchange.buckets
        for weights, result in zip(self._weights, results, strict=True):
            weights -= np.multiply(result, generator.STEP, out=self._scratch[: result.size])
        self._report(number, worker, kind, results, generator.fingerprint(self._weights), staleness, exchange.way)
        self._meet_if_due(worker, exchange.tallies, number)

    def _report(
        self,
        number: int,
        worker: gradserver.Worker,
        kind: str,
        results: list[Any],
        weights: int,
        staleness: int = 0,
        way: str = "",
    ) -> None:
        """Report the results of a round, and the fingerprint of the weights behind it."""
        fingerprints = [generator.fingerprint([result]) for result in results]
        told = {"results": fingerprints, "weights": weights, "way": way, "staleness": staleness}
        self._say(kind, round=number, rank=worker.rank, **told)

    def _meet_if_due(self, worker: gradserver.Worker, tallies: int, number: int) -> None:
        if number % _COLLECTIVES_EVERY == _COLLECTIVES_EVERY - 1 and not worker.observes:
            self._meet(worker, tallies, number)

    def _compute(self) -> None:
        slow, until = self._slow
        pause = self._settings.pace + (slow if time.monotonic() < until else 0.0)
        if pause:
            time.sleep(pause)  # a real worker would compute; meanwhile others of this machine have the processors

    def _meet(self, worker: gradserver.Worker, tallies: int, number: int) -> None:
        """Call the collectives that a trainer calls now and then, and report their results."""
        self._say("meets", round=number)
        own, turn = tally.tally(worker.name, number), number // _COLLECTIVES_EVERY
        if turn % worker.world_size == worker.rank:
            time.sleep(_LATE_SECONDS)
            time.sleep(max(0.0, self._lingers - time.monotonic()))
        sums: dict[str, list[int]] = {}
        rows = tallies - turn % 2  # one fewer goes over the coordinator
        small = worker.all_reduce(own.copy(), "sum", async_op=True)
        large = worker.all_reduce(np.tile(own, rows), "sum", async_op=True)
        sums["an all_reduce"] = small.wait().tolist()
        sums |= self._slices(large.wait().reshape(rows, -1))
        broadcast = _again(lambda: self._broadcast(worker, number))
        code = np.full(3, tally.code(worker.name, number), np.int64)
        gathered = _again(lambda: worker.all_gather(code))
        scattered = _again(lambda: worker.reduce_scatter(np.tile(own, worker.world_size), "sum"))
        sums["a reduce_scatter"] = scattered.tolist()
        if (gathered != gathered[:, :1]).any():
            self._say("fault", text=f"an all_gather behind round {number} brought {gathered.tolist()}")
        half, half_sum = _in_half(worker, own)
        self._say(
            "met",
            round=number,
            rank=worker.rank,
            sums=sums,
            gathered=gathered[:, 0].tolist(),
            broadcast=broadcast,
            half=half,
            half_sum=half_sum,
            among=getattr(large, "is_direct", False),
        )

    def _slices(self, rows: npt.NDArray[np.int64]) -> dict[str, list[int]]:
        """Collect the different sums in a tensor of many, which are alike within a slice."""
        changes = [0, *(int(at) + 1 for at in np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))), len(rows)]
        return {f"rows {a} to {b} of an all_reduce": rows[a].tolist() for a, b in list(pairwise(changes))[:8]}

    def _broadcast(self, worker: gradserver.Worker, number: int) -> int | None:
        value = np.full(2, tally.code(worker.name, number), np.int64)
        try:
            worker.broadcast(value, number % worker.world_size)
        except gradserver.CollectiveMismatchError:  # two data shards knew of different deaths: no member has the result
            return None
        return int(value[0])

    def _say(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "name": self._settings.name, **fields, "at": time.monotonic()}
        print(json.dumps(line), flush=True)


def _in_half(worker: gradserver.Worker, own: tally.Tally) -> tuple[list[str], list[int]]:
    """Sum tallies in a sub-group of the members with odd ranks, or of the others. Return the names, and the sum.

    The barrier is behind the results of all: a member that leaves takes its own along.
    """
    ranks = range(worker.rank % 2, worker.world_size, 2)
    names = [worker.names[rank] for rank in ranks]
    group = worker.subgroup(ranks)
    assert group is not None, "it has its own rank"
    found = group.all_reduce(own.copy(), "sum").tolist()
    group.barrier()
    group.close("its sum is there")
    return names, found


def _again(call: Callable[[], T]) -> T:
    """Repeat ``call`` until the membership does not change during it, and return its result."""
    while True:
        try:
            return call()
        except gradserver.MembershipChangedError:
            continue


def _when_sent(pieces: int, do: Callable[[], None]) -> None:
    """Call ``do`` when libzmq has taken ``pieces`` messages that carry a tensor."""
    send = zmq.Socket.send
    left, opened = pieces, False

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal left, opened
        result = send(*arguments, **options)
        begins = bool(arguments[2] & zmq.SNDMORE) if len(arguments) > 2 else False
        if opened and not begins:
            left -= 1
            if left == 0:
                do()
        opened = begins
        return result

    zmq.Socket.send = counting  # type: ignore[method-assign]


def main() -> int:
    """Train as told."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    program = Program(Settings.from_json(sys.argv[1]))
    threading.Thread(target=program.listen, daemon=True).start()
    program.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
