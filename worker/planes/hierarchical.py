"""The way of a module's buckets on the hierarchical plane: up to the leader of the host, across, and down again.

A pass at one member:

    step      a leader                                          another member
    ────────  ────────────────────────────────────────────────  ─────────────────────────────────────────────────
    `open`    the host's weight is summed up to the leader      the same
    `mean`    each piece of the bucket is summed up to the      each piece is summed up to the leader
              leader; then a lane pushes it as the host's
              mean, by the host's weight
    a wait    in the order of `mean`: the result of each piece  all results are received, in the same order
              is awaited, and broadcast in the host
    `close`   the round of the sub-group is finished            nothing

So all members of a host make the same calls of their communicator in the same order. Sums of one piece are made while
earlier ones are on their way (`gradserver.worker.planes.pieces`). Other combinations take the same steps one by one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import Plan
from gradserver.worker.collectives.call import on_stream
from gradserver.worker.member.progress import Progress
from gradserver.worker.planes.communicator import Reduction, Signal
from gradserver.worker.planes.flat import ARRIVED, Arrived, divisor
from gradserver.worker.planes.given import NO_DATA
from gradserver.worker.planes.levels import Levels
from gradserver.worker.planes.pieces import Pieces
from gradserver.worker.planes.staging import Staging


class _Mean:
    """The mean of a bucket, which comes down in its turn."""

    def __init__(self, way: Hierarchical, index: int) -> None:
        self._way, self._index = way, index

    def wait(self, timeout: float) -> None:
        """Wait for it."""
        self._way._take(self._index, timeout)


class _Streams:
    """The streams of a lane on CUDA devices, beside all others: that of backward has all of backward queued."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Any] = {}

    def of(self, tensor: Tensor) -> Any:
        """Return the one for a tensor; None on the CPU."""
        if not tensor.is_cuda:
            return None
        stream = self._made.get(tensor.device)
        if stream is None:
            stream = self._made[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        tensor.record_stream(stream)
        return stream


class _Computed:
    """A tensor on a CUDA device that the current stream computes."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self, timeout: float) -> None:  # noqa: ARG002  (Pending's signature)
        """Wait until it is computed."""
        self._event.synchronize()


class Hierarchical:
    """Two levels: see `gradserver.worker.planes.plane.Way`.

    Args:
        levels: the levels of the epoch.
        plan: buckets of the module.
        world: number of members.
        timeout: limit of each wait, in seconds.
        signal: interrupts the wait for the other leaders' plan.
    """

    def __init__(self, levels: Levels, plan: Plan, world: int, timeout: float, signal: Signal) -> None:
        self._levels, self._world, self._timeout = levels, world, timeout
        self.on_host = levels.inside
        means = [index for index, bucket in enumerate(plan.buckets) if bucket.op is Op.MEAN]
        self._parts = {index: part for part, index in enumerate(means)}
        """Place of each mean among the means: the leaders' plan has no other bucket."""
        self._staging: Staging | None = None
        self._upwards, self._downwards = _Streams(), _Streams()
        group = levels.among
        if group is not None and means:
            shared = Plan(tuple(plan.buckets[index] for index in means))
            agreed: Any = levels.ask(lambda: group.agree_beside(shared, timeout), signal, timeout)
            self._staging = Staging(group, agreed, timeout)
        self._begin(signal)

    def _begin(self, signal: Signal) -> None:
        self._signal = signal
        self._weight = torch.zeros(1, dtype=torch.float64)
        """Weight of this member; at a leader, of its host as soon as that is known."""
        self._begun: dict[int, Pieces] = {}
        """Means, in the order in which they were begun."""

    # ── means ─────────────────────────────────────────────────────────────────────────────────────────

    def memory(self, index: int, like: Tensor) -> Tensor:
        """Return memory for a result: at a leader, such as the channel reads and writes without a copy."""
        if self._staging is not None and index in self._parts:
            return self._staging.new_memory(like.numel(), like.dtype, like.device)
        return torch.empty_like(like)

    def open(self, weight: float, signal: Signal) -> None:
        """Begin a pass: sum up the host's weight."""
        self._begin(signal)
        self._weight.fill_(weight)
        inside, levels = self._levels.inside, self._levels
        if inside is not None:
            reduction = inside.reduce(self._weight, 0, levels.inner if levels.leads else signal)
            if levels.leads:
                levels.up.do(partial(reduction.wait, self._timeout), signal)

    def mean(self, index: int, weighed: Tensor) -> _Mean:
        """Begin to sum up contributions in the host; from there the lanes go on."""
        levels, inside = self._levels, self._levels.inside
        pieces = self._begun[index] = Pieces(weighed, self._signal)
        if inside is not None:
            signal = levels.inner if levels.leads else self._signal
            pieces.up += [inside.reduce(piece, 0, signal) for piece in pieces.tensors]
        if levels.leads:
            computed = _Computed(weighed) if inside is None and weighed.is_cuda else None
            levels.up.do(partial(self._send, index, pieces, computed), self._signal)
        return _Mean(self, index)

    def _send(self, index: int, pieces: Pieces, computed: _Computed | None) -> None:
        """Push the host's mean, each piece when it is summed up. Runs in a lane, as `_receive` does."""
        if computed is not None:
            computed.wait(self._timeout)
        staging, sent = self._staging, None
        with on_stream(self._upwards.of(pieces.result)):
            for number in range(len(pieces.tensors)):
                self._sum_up(pieces, number)
                if staging is None:
                    continue
                if sent is None:
                    sent = self._push(staging, self._parts[index], pieces, number)
                else:
                    staging.advance(sent, pieces.end_of(number))
            if staging is None:
                _settle(pieces.result)
                pieces.complete()
                return
        self._levels.down.do(partial(self._receive, staging, self._parts[index], pieces), self._signal)

    def _sum_up(self, pieces: Pieces, number: int) -> None:
        """Wait until a piece is summed up, and make it the mean of the host."""
        if pieces.up:
            pieces.up[number].wait(self._timeout)
        weight = float(self._weight)
        if weight >= NO_DATA and (total := weight / divisor(self._world)) != 1.0:
            pieces.tensors[number].div_(total)

    def _push(self, staging: Staging, part: int, pieces: Pieces, number: int) -> Progress | None:
        """Push a bucket of which the pieces up to this ``number`` are there. Return None if it is to be pushed later.

        If the host gives no data, results come in its place at once. So its sums, which are not needed, are awaited.
        """
        weight, is_last = float(self._weight), number + 1 == len(pieces.tensors)
        if weight < NO_DATA and not is_last:
            return None
        progress = Progress(pieces.come)
        progress.advance(pieces.end_of(number))
        staging.note_writer(part, pieces.result.device)
        staging.push(part, pieces.result, weight, weight >= NO_DATA, progress=progress)
        return progress

    def _receive(self, staging: Staging, part: int, pieces: Pieces) -> None:
        """Wait until the result of a bucket is there. Pieces of it are handed out before."""
        with on_stream(self._downwards.of(pieces.result)):
            staging.wait(part)
            _settle(pieces.result)
        pieces.complete()

    def _take(self, index: int, timeout: float) -> None:
        """Wait for the result of a bucket."""
        wanted = self._begun[index]
        self._hand_out_due(wanted, timeout)
        for broadcast in wanted.down:
            broadcast.wait(timeout)

    def _hand_out_due(self, wanted: Pieces, timeout: float) -> None:
        """Begin to hand out pieces in the order of `mean`: up to the ``wanted`` ones, and what has come behind them."""
        for pieces in self._begun.values():
            for number in range(len(pieces.down), len(pieces.tensors)):
                if not self._levels.leads:
                    pieces.up[number].wait(timeout)
                elif wanted.is_handed_out and not pieces.has_come(number):
                    return
                else:
                    self._levels.await_lanes(partial(pieces.has_come, number), self._signal, timeout)
                pieces.down.append(self._hand_out(pieces.tensors[number]))

    def _hand_out(self, result: Tensor) -> Reduction | Arrived:
        inside = self._levels.inside
        return ARRIVED if inside is None else inside.broadcast(result, 0, self._signal)

    def close(self) -> None:
        """End a pass: finish the leaders' round, if all of them are still there."""
        if self._staging is not None and self._begun:
            self._levels.ask(self._staging.finish, self._signal, self._timeout)
            self._levels.check_complete()

    def divide(self, result: Tensor, weight: float, out: Tensor) -> None:  # noqa: ARG002  (Way's signature)
        """Copy a mean, if it is elsewhere: the leaders have divided it."""
        if out is not result:
            out.copy_(result)

    # ── other combinations, one step after the other ──────────────────────────────────────────────────

    def combine(self, tensor: Tensor, op: Op) -> Reduction | Arrived:
        """Combine tensors in each host, then among leaders, and begin to hand out the result."""
        inside, group = self._levels.inside, self._levels.among
        if inside is not None:
            inside.all_reduce(tensor, op, self._signal).wait(self._timeout)
        if group is not None:
            self._across(tensor, partial(group.all_reduce, tensor, op.name.lower()))
        return self._hand_out(tensor)

    def broadcast(self, tensor: Tensor, rank: int) -> Reduction | Arrived:
        """Bring the tensor of ``rank`` to all."""
        levels = self._levels
        root = next(place for place, ranks in enumerate(levels.hosts) if rank in ranks)
        if root == levels.place and levels.inside is not None:
            place = levels.hosts[root].index(rank)
            levels.inside.broadcast(tensor, place, self._signal).wait(self._timeout)
        if levels.among is not None:
            self._across(tensor, partial(levels.among.broadcast, tensor, root))
        return ARRIVED if root == levels.place else self._hand_out(tensor)

    def _across(self, tensor: Tensor, call: Any) -> None:
        _settle(tensor)
        self._levels.ask(call, self._signal, self._timeout)
        self._levels.check_complete()


def _settle(tensor: Tensor) -> None:
    """Wait until what this thread has queued for a tensor is done: another thread goes on with it."""
    if tensor.is_cuda:
        _Computed(tensor).wait(0.0)
