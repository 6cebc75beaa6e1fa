"""Contenders: ways to do the work of a case. Each can set up, do the work once, and check the result.

All of them reduce `case.numel` fp32 numbers over all workers, or move the bytes that a reduction takes at least.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import zmq

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from gradserver.tools.bench.cost import Timed, processor_seconds
from gradserver.tools.bench.member import Member, mean_pattern, pattern
from gradserver.tools.bench.spec import FLOAT_BYTES, Case, Contender

BUCKET_BYTES = 25 << 20  # largest bucket of the plan: torch DDP's own default
_LARGEST = 251.0 + 8.0  # largest number in a pattern, for up to 16 workers
_STEP = {"bf16": _LARGEST * 2.0**-8, "int8": _LARGEST / 127}
"""The largest rounding of one number by a lossy wire."""


_WARM_UP: Final = 5


class Contestant(ABC):
    """Contender in one process. Its setup before `once` is not measured."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        self.member, self.case, self.spec = member, case, spec

    def align(self) -> None:
        """Wait for all processes; by the contender's own means if it has any, so that these are awake."""
        self.member.barrier()

    @abstractmethod
    def once(self) -> None:
        """Do the work once."""

    def timed(self, count: int) -> Timed:
        """Measure the time for doing the work `count` times in a row, and its processor time.

        Repeated work is warmed up: earlier contenders have left their data in the caches, and its own threads asleep.
        """
        for _ in range(min(count - 1, _WARM_UP)):
            self.once()
        self.align()
        theirs, own = processor_seconds(self.member.seat.servers), time.process_time()
        began = time.perf_counter()
        for _ in range(count):
            self.once()
        seconds = time.perf_counter() - began
        return Timed(seconds, time.process_time() - own, theirs, processor_seconds(self.member.seat.servers))

    def check(self) -> dict[str, Any]:
        """Check the result. Return the number of `wrong` elements, and perhaps further figures."""
        return {"wrong": 0}

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Release resources."""


class Ours(Contestant):
    """Contender that uses a gradserver worker."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self.worker = member.links[spec.link]

    def align(self) -> None:
        """Wait at the coordinator's barrier."""
        self.worker.barrier()


class AllReduce(Ours):
    """``worker.all_reduce`` of one tensor, in ordinary memory or in that of ``worker.empty``."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        make = self.worker.empty if spec.options.get("memory") == "buckets" else _ordinary
        self.tensor: torch.Tensor = make((case.numel,), torch.float32)

    def once(self) -> None:
        """Call one collective."""
        self.worker.all_reduce(self.tensor)

    def check(self) -> dict[str, Any]:
        """Compare with the exact mean. The tensor keeps this mean, which further reductions do not change."""
        self.tensor.copy_(pattern(self.case.numel, self.member.rank, self.member.workers))
        self.align()
        self.once()
        return {"wrong": wrong(self.tensor, _tolerance(self.spec.wire))}


class Rounds(Ours):
    """Round of a plan: every bucket is pushed, last to first as in a backward, then all results are awaited.

    Options: `blocks`, the number of buckets, and `wait_s`, seconds of emulated backward spread over them.
    """

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        sizes = bucket_sizes(case.numel, spec.options.get("blocks"))
        self._wait: float = spec.options.get("wait_s", 0.0) / len(sizes)
        self.worker.agree(simple_plan([(f"b{i}", size) for i, size in enumerate(sizes)], FLOAT32))
        self.buckets: list[torch.Tensor] = [self.worker.empty((size,), torch.float32) for size in sizes]

    def once(self) -> None:
        """Exchange one round."""
        for index in range(len(self.buckets) - 1, -1, -1):
            if self._wait:
                time.sleep(self._wait)
            self.worker.push(index, self.buckets[index])
        self.worker.finish_round()

    def check(self) -> dict[str, Any]:
        """Check as `AllReduce.check` does."""
        rank, workers = self.member.rank, self.member.workers
        for bucket in self.buckets:
            bucket.copy_(pattern(bucket.numel(), rank, workers))
        self.align()
        self.once()
        return {"wrong": sum(wrong(bucket, _tolerance(self.spec.wire)) for bucket in self.buckets)}


class Gloo(Contestant):
    """torch.distributed's all_reduce over gloo.

    It adds up, and the division that makes it a mean is left out of the measured time. With bf16 it does what
    torch DDP's compression hook does: convert, divide, reduce, convert back.
    """

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self.tensor = torch.zeros(case.numel)
        self._bf16 = spec.wire == "bf16"

    def once(self) -> None:
        """Call one collective."""
        if self._bf16:
            packed = self.tensor.to(torch.bfloat16).div_(self.member.workers)
            dist.all_reduce(packed)
            self.tensor.copy_(packed)
        else:
            dist.all_reduce(self.tensor)

    def check(self) -> dict[str, Any]:
        """Compare with the exact mean, and set zeros: sums of sums would grow without end."""
        self.tensor.copy_(pattern(self.case.numel, self.member.rank, self.member.workers))
        self.align()
        self.once()
        workers = self.member.workers
        mean = self.tensor if self._bf16 else self.tensor / workers
        count = wrong(mean, (workers + 2) * _STEP["bf16"] if self._bf16 else 0.0)
        self.tensor.zero_()
        return {"wrong": count}


class Copy(Contestant):
    """Limit of the memory: (W+1)·N bytes read or written, by all processes at once, each its share, as plain copies.

    A reduction reads the contributions of W workers and writes one result. A copy of n bytes reads n and writes n.
    """

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        traffic = (member.workers + 1) * case.nbytes
        numel = max(1, round(traffic / (2 * member.workers) / FLOAT_BYTES))
        self._source, self._target = torch.ones(numel), torch.zeros(numel)

    def once(self) -> None:
        """Copy once."""
        self._target.copy_(self._source)


class Sockets(Contestant):
    """Limit of the network stack: 2·W·N bytes over plain sockets, by all processes at once."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        on_wire: int = spec.options["nbytes"]
        self._outgoing, self._incoming = memoryview(bytearray(on_wire)), memoryview(bytearray(on_wire))

    def once(self) -> None:
        """Exchange N bytes with both neighbours."""
        self.member.ring.exchange(self._outgoing, self._incoming)


class Hops(Contestant):
    """Two hops over plain pyzmq, through a process that waits for all messages before it answers."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self._payload = bytes(range(256)) * (case.nbytes // 256) + bytes(case.nbytes % 256)

    def align(self) -> None:
        """Wait for all processes with two hops."""
        self._hop()

    def once(self) -> None:
        """Send the payload there and back."""
        self._hop()

    def _hop(self) -> bytes:
        socket: zmq.Socket[bytes] = self.member.hub
        socket.send(self._payload)
        return socket.recv()

    def check(self) -> dict[str, Any]:
        """Check that the payload comes back."""
        return {"wrong": int(self._hop() != self._payload)}


class Threads(Contestant):
    """LocalCluster: the workers are threads of this one process."""

    def __init__(self, member: Member, case: Case, spec: Contender) -> None:
        super().__init__(member, case, spec)
        self._cluster = gradserver.LocalCluster(member.workers, timeout=member.seat.timeout)
        workers = self._cluster.workers
        self._tensors: list[torch.Tensor] = [worker.empty((case.numel,), torch.float32) for worker in workers]

    def once(self) -> None:
        """Call one operation in all threads."""
        self.timed(1)

    def timed(self, count: int) -> Timed:
        """Measure the longest time of all threads."""

        def work(worker: gradserver.Worker) -> float:
            tensor = self._tensors[worker.rank]
            worker.barrier()
            began = time.perf_counter()
            for _ in range(count):
                worker.all_reduce(tensor)
            return time.perf_counter() - began

        return Timed(max(self._cluster.run(work)))

    def check(self) -> dict[str, Any]:
        """Check as `AllReduce.check` does."""
        for rank, tensor in enumerate(self._tensors):
            tensor.copy_(pattern(self.case.numel, rank, len(self._tensors)))
        self.timed(1)
        return {"wrong": sum(wrong(tensor, 0.0) for tensor in self._tensors)}

    def close(self) -> None:
        """End the threads."""
        self._cluster.close()


def wrong(tensor: torch.Tensor, tolerance: float) -> int:
    """Count the elements that are further than `tolerance` from the mean pattern. NaN is wrong."""
    return int((~((tensor - mean_pattern(tensor.numel())).abs() <= tolerance)).sum())


def _tolerance(wire: str) -> float:
    """Return the largest error: 0 for fp32; for lossy wires a rounding each way, and as much by error feedback."""
    return 4 * _STEP[wire] if wire in _STEP else 0.0


def bucket_sizes(numel: int, blocks: int | None = None) -> list[int]:
    """Divide `numel` elements into buckets of equal size: `blocks` of them, or as few as possible."""
    count = blocks or -(-numel * FLOAT_BYTES // BUCKET_BYTES)
    return [numel * (i + 1) // count - numel * i // count for i in range(count)]


def _ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


KINDS: dict[str, Callable[[Member, Case, Contender], Contestant]] = {
    "all_reduce": AllReduce,
    "rounds": Rounds,
    "gloo": Gloo,
    "copy": Copy,
    "sockets": Sockets,
    "hops": Hops,
    "threads": Threads,
}
