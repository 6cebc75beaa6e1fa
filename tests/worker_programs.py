"""Programs of workers in processes of their own. Run as ``worker_programs.py NAME URL RANK WORLD_SIZE ARGUMENTS``.

They print what they have reached. Where a test decides what is next, they wait for a line on stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gradserver import GradServerError, Handle, Worker, connect
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.messages import BePresent, Message
from gradserver.protocol.plan import simple_plan
from gradserver.worker.transport.beacon import Beacon


def say(what: str) -> None:
    sys.stdout.write(what + "\n")  # in one piece: print writes two, and other threads may write between them
    sys.stdout.flush()


def told() -> None:
    """Wait until the test says so."""
    sys.stdin.readline()


def rounds(worker: Worker, count: int, buckets: int, numel: int, ready: bool = False) -> None:
    """Exchange ``count`` rounds, in which worker r contributes r + round. Print ``ok`` if every result was right."""
    worker.agree(simple_plan([(f"b{index}", numel) for index in range(buckets)], FLOAT32))
    memory = [np.empty(numel, np.float32) for _ in range(buckets)]
    if ready:
        say("ready")
        told()
    for number in range(count):
        for index, data in enumerate(memory):
            data.fill(worker.rank + number + index)
            worker.push(index, data)
        worker.finish_round()
        mean = (worker.world_size - 1) / 2
        for index, data in enumerate(memory):
            assert (data == np.float32(mean + number + index)).all(), (number, index, data)
    say("ok")


def regression(worker: Worker, steps: int, pause: float) -> None:
    """Train a small model on this rank's data. Print when half is done, the time of each half, and the weights.

    Each step computes for ``pause`` seconds.
    """
    chance = np.random.default_rng(worker.rank)
    inputs = chance.normal(size=(64, 32)).astype(np.float32)
    targets = np.tanh(inputs @ np.ones(32, np.float32) / 6).astype(np.float32)
    weights = [np.full((32, 16), 0.1, np.float32), np.full(16, 0.1, np.float32)]
    weights[0] += np.arange(16, dtype=np.float32) / 100
    worker.agree(simple_plan([("hidden", weights[0].size), ("out", weights[1].size)], FLOAT32))
    times = [time.monotonic()]
    for step in range(steps):
        if step == steps // 2:
            times.append(time.monotonic())
            say("half")
        hidden = np.tanh(inputs @ weights[0])
        error = (hidden @ weights[1] - targets) / len(targets)
        grads = [inputs.T @ (np.outer(error, weights[1]) * (1 - hidden**2)), hidden.T @ error]
        time.sleep(pause)
        for index, gradient in enumerate(grads):
            grads[index] = np.ascontiguousarray(gradient.astype(np.float32).reshape(-1))
            worker.push(index, grads[index])
        worker.finish_round()
        for weight, gradient in zip(weights, grads, strict=True):
            weight -= np.float32(0.1) * gradient.reshape(weight.shape)
    times.append(time.monotonic())
    say(f"halves {json.dumps([times[1] - times[0], times[2] - times[1]])}")
    say(f"weights {b''.join(weight.tobytes() for weight in weights).hex()}")


def rounds_as_told(worker: Worker, numel: int) -> None:
    """Exchange as many rounds as each line says, in which a worker gives its rank. Print each result."""
    worker.agree(simple_plan([("b0", numel), ("b1", 1)], FLOAT32))
    large, small = worker.empty(numel, "float32"), worker.empty(1, "float32")
    say("ready")
    for line in sys.stdin:
        for _ in range(int(line)):
            for index, data in enumerate((large, small)):
                data.fill(worker.rank)
                worker.push(index, data)
            worker.finish_round()
            assert (large == large[0]).all()
            say(f"result {large[0]:.6g} {small[0]:.6g}")
    say("ok")


def exchange_until_error(worker: Worker, numel: int = 1000) -> None:
    """Exchange round after round until an error. Print it, and the time by the machine's clock.

    It prints ``exchanging`` first.
    """
    said = False
    worker.agree(simple_plan([("b0", numel), ("b1", 1)], FLOAT32))
    large, small = np.zeros(numel, np.float32), np.zeros(1, np.float32)
    try:
        while True:
            worker.push(1, small)
            worker.push(0, large)
            worker.finish_round()
            if worker.round >= 3 and not said:
                said = True
                say("exchanging")
    except GradServerError as error:
        say(f"error {json.dumps([time.monotonic(), type(error).__name__, str(error)])}")


def exchange_with_children(worker: Worker, count: int) -> None:
    """Fork children as a loader does, which outlive this process. Print their process ids, and exchange."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
    say(f"children {json.dumps(children)}")
    exchange_until_error(worker)


def exchange_until_fewer(worker: Worker, numel: int = 1000) -> None:
    """Exchange round after round until a worker is missing, and a round more. Print when that was noticed."""
    said = False
    data, world = np.zeros(numel, np.float32), worker.world_size
    try:
        worker.agree(simple_plan([("b0", numel)], FLOAT32))
        while worker.world_size == world:
            if worker.round >= 3 and not said:
                said = True
                say("exchanging")
            data.fill(1.0)
            worker.push(0, data)
            worker.finish_round()
        say(f"fewer {time.monotonic()}")
        worker.push(0, data)
        worker.finish_round()
        assert (data == 1.0).all()
        say("ok")
    except GradServerError as error:
        say(f"error {json.dumps([time.monotonic(), type(error).__name__, str(error)])}")


def exchange_and_tell(worker: Worker, numel: int = 1000) -> None:
    """Exchange round after round, and print whenever there are fewer workers than before."""
    worker.agree(simple_plan([("b0", numel)], FLOAT32))
    data, world = np.zeros(numel, np.float32), worker.world_size
    said = False
    while worker.world_size > 2:
        worker.push(0, data)
        worker.finish_round()
        if worker.world_size < world:
            world = worker.world_size
            say(f"fewer {time.monotonic()}")
        if not said and worker.round >= 3:
            said = True
            say("exchanging")
        time.sleep(0.005)


def stop_halfway(worker: Worker, numel: int = 1000) -> None:
    """Contribute to one of two buckets of the fourth round, and to nothing after that."""
    worker.agree(simple_plan([("b0", numel), ("b1", 1)], FLOAT32))
    large, small = np.zeros(numel, np.float32), np.zeros(1, np.float32)
    for _ in range(3):
        worker.push(1, small)
        worker.push(0, large)
        worker.finish_round()
    worker.push(1, small)
    say("halfway")
    told()


def hold_the_lock(worker: Worker, seconds: float, at_once: bool = False) -> None:
    """Make one call that keeps Python's lock for a while, between two exchanges, or ``at_once``."""
    if not at_once:
        worker.barrier()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    worker.barrier()
    say("ok")


def hold_the_lock_in_round(worker: Worker, seconds: float, number: int = 3) -> None:
    """Exchange some rounds, and make such a call before one of them."""
    worker.agree(simple_plan([("b0", 1000)], FLOAT32))
    data, world = np.zeros(1000, np.float32), worker.world_size
    for _ in range(2 * number):
        if worker.round == number and seconds:
            say("holding")
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        data.fill(worker.rank)
        worker.push(0, data)
        worker.finish_round()
        assert (data == (world - 1) / 2).all()
    say("ok")


def freeze() -> None:
    """Stop this process, all of its threads at once, until the test continues it. Print the time."""
    say(f"freezing {time.monotonic()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze_when(point: str) -> None:
    """Let this process stop itself while it joins: when its beacon is ``asked`` for, ``made``, or ``connected``."""
    make = Beacon.__init__

    def made(self: Beacon, address: str, wanted: BePresent, tell: Callable[[Message], None]) -> None:
        if point == "made":
            make(self, address, wanted, tell)
        freeze()

    def connected(self: Beacon) -> None:
        while not self._monitor.poll(10):
            pass
        freeze()

    if point in ("asked", "made"):
        Beacon.__init__ = made  # type: ignore[method-assign]
    elif point == "connected":
        Beacon._show = connected  # type: ignore[method-assign]


def compute(worker: Worker, seconds: float) -> None:
    """Keep the interpreter busy for a while between two exchanges."""
    sys.setswitchinterval(10 * seconds)
    worker.barrier()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    worker.barrier()
    say("ok")


def idle(worker: Worker) -> None:
    """Wait for the test's word, then exchange something. Print the outcome."""
    worker.barrier()
    say("idle")
    told()
    try:
        worker.all_reduce(np.zeros(1, np.float32))
    except GradServerError as error:
        say(f"error {json.dumps([time.monotonic(), type(error).__name__, str(error)])}")


def leave_without_a_word(worker: Worker) -> None:
    """Exchange something and end the process with the worker still open."""
    worker.all_reduce(np.zeros(10, np.float32))
    worker.barrier()
    sys.exit(0)


def fork(worker: Worker) -> None:
    """Fork a child that ends like a script, between two exchanges."""
    worker.barrier()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    worker.barrier()
    say("ok")


def use_in_a_child(worker: Worker) -> None:
    """Fork a child that tries every use of this worker, during an exchange. Print its errors, and continue."""
    worker.agree(simple_plan([("b0", 10)], FLOAT32))
    open_one = worker.all_reduce(np.ones(3, np.float32), "sum", async_op=True) if worker.rank == 0 else None
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(met_in_a_child(worker, open_one)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        say(f"met {stream.read()}")
    if open_one is None:
        worker.all_reduce(np.ones(3, np.float32), "sum")
    else:
        open_one.wait()
    worker.push(0, np.ones(10, np.float32))
    worker.finish_round()
    say("ok")


def met_in_a_child(worker: Worker, handle: Handle | None) -> dict[str, str]:
    """Return the error of each use of a worker."""
    tensor = np.ones(10, np.float32)
    other = 1 - worker.rank
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: worker.all_reduce(tensor),
        "async": lambda: worker.all_reduce(tensor, async_op=True),
        "broadcast": lambda: worker.broadcast(tensor),
        "all_gather": lambda: worker.all_gather(tensor),
        "reduce_scatter": lambda: worker.reduce_scatter(tensor),
        "barrier": worker.barrier,
        "send": lambda: worker.send(tensor, other),
        "recv": lambda: worker.recv(tensor, other),
        "agree": lambda: worker.agree(simple_plan([("b1", 10)], FLOAT32)),
        "push": lambda: worker.push(0, tensor),
        "finish_round": worker.finish_round,
        "wait": lambda: handle.wait() if handle is not None else worker.barrier(),
        "close": worker.close,
        "abort": lambda: worker.abort("an error"),
    }
    met = {}
    for name, use in uses.items():
        try:
            met[name] = f"returned {use()!r}"
        except Exception as error:
            met[name] = f"{type(error).__name__}: {error}"
    with worker:  # it ends silently: the block is the parent's
        met["rank"] = f"{worker.rank} of {worker.world_size}"
    return met


def main() -> None:
    name, url, rank, world_size, arguments = sys.argv[1:]
    program: Callable[..., None] = globals()[name]
    options: dict[str, Any] = json.loads(arguments)
    point = options.pop("freezes_when", "")
    freeze_when(point)
    group = options.pop("group", "default")
    worker = connect(url, int(rank), int(world_size), group, name=f"w{rank}", timeout=20.0)
    if point == "in":
        freeze()
    program(worker, **options)
    worker.close()


if __name__ == "__main__":
    main()
