"""Buckets of a device, and their memory on the host: as elements, or as payloads of a codec.

What travels as bf16 or int8 is encoded on the device, so that fewer bytes cross the bus, and results are decoded there.
The bits are those that the host would make. The residual of error feedback is on the device, too. A worker that is not
a member yet, or may be late, encodes on the host: what it gives may not count, and is kept as elements.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.exchange import BUCKET, ExchangeKey, Layout
from gradserver.protocol.limits import MIB
from gradserver.worker.client import Worker
from gradserver.worker.devices.codecs import DEVICE_CODECS, DeviceCodec
from gradserver.worker.devices.device import Device, Event, Stream
from gradserver.worker.devices.memory import HostMemory
from gradserver.worker.member.coder import offsets_of
from gradserver.worker.member.learner import Stage

PIECE_BYTES: Final = 4 * MIB
"""Bytes that are copied to the host in one piece: a whole number of slices, and long beside what a copy takes to begin.
At 50 GB/s it takes 84 µs."""
_SLICES: Final = 16
"""Slices that are encoded in one piece: a codec takes some fifteen kernels for any number of them."""


class Staged:
    """One bucket of a device, and its memory on the host.

    Attributes:
        flat: its elements on the device.
        host: as many on the host.
        pieces: first element of each piece, and the one behind its last.
        events: for each piece, that it is on the host.
        mirrors: true if both have the same elements, unless the device computes others.
        has_payloads: true if ``host`` has payloads instead.
    """

    has_payloads = False

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """Tensors of the device that copies use."""
        return (self.flat,)

    def __init__(self, flat: Tensor, host: Tensor, pieces: list[tuple[int, int]], events: list[Event]) -> None:
        self.flat, self.host = flat, host
        self.pieces, self.events = pieces, events
        self.mirrors = False

    def copy_out(self, device: Device, stream: Stream, start: int, stop: int) -> None:
        """Queue the copy of a piece to the host."""
        device.copy(self.host[start:stop], self.flat[start:stop], stream)

    def copy_back(self, device: Device, stream: Stream, start: int, stop: int) -> None:
        """Queue the copy of results, of whole slices, to the device."""
        device.copy(self.flat[start:stop], self.host[start:stop], stream)


class Payloads(Staged):
    """One bucket that is encoded on its device.

    Args:
        flat: its elements on the device, float32.
        host: memory for payloads, of contributions and behind them of results.
        layout: how it is cut.
        codec: its codec.
        residual: what earlier encodings lost, on the device. It is an attribute, too.
        sifts: true if a slice that is not finite does not count.
        device: the device.
    """

    has_payloads = True

    def __init__(
        self,
        flat: Tensor,
        host: Tensor,
        layout: Layout,
        codec: DeviceCodec,
        residual: Tensor,
        sifts: bool,
        device: Device,
    ) -> None:
        ends = [*range(_SLICES, layout.count, _SLICES), layout.count]
        bounds = [0, *(layout.span(end - 1)[1] for end in ends)]
        pieces = list(pairwise(bounds))
        super().__init__(flat, host, pieces, [device.new_event() for _ in pieces])
        self._codec, self.residual, self._sifts = codec, residual, sifts
        self._offsets = offsets_of(layout)
        self._starts = [layout.span(index)[0] for index in range(layout.count)] + [flat.numel()]

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """Tensors of the device that copies use."""
        return self.flat, self.residual

    def copy_out(self, device: Device, stream: Stream, start: int, stop: int) -> None:
        """Queue the encoding of a piece, and the copy of its payloads to the host."""
        for first, last in self._runs(start, stop, self._sifts):
            device.run(lambda first=first, last=last: self._encode(first, last), stream)  # type: ignore[misc]

    def _encode(self, first: int, last: int) -> None:
        begin, end = self._starts[first], self._starts[last]
        room = self.host[self._offsets[first] : self._offsets[last]]
        payload = torch.empty(room.numel(), dtype=torch.uint8, device=self.flat.device)
        self._codec.encode(self.flat[begin:end], payload, self.residual[begin:end], self._sifts)
        room.copy_(payload, non_blocking=True)

    def copy_back(self, device: Device, stream: Stream, start: int, stop: int) -> None:
        """Queue the copy of results to the device, and their decoding."""
        for first, last in self._runs(start, stop, False):
            device.run(lambda first=first, last=last: self._decode(first, last), stream)  # type: ignore[misc]

    def _decode(self, first: int, last: int) -> None:
        begin, end, whole = self._starts[first], self._starts[last], self._offsets[-1]
        payload = torch.empty(self._offsets[last] - self._offsets[first], dtype=torch.uint8, device=self.flat.device)
        payload.copy_(self.host[whole + self._offsets[first] : whole + self._offsets[last]], non_blocking=True)
        self._codec.decode(payload, self.flat[begin:end])

    def _runs(self, start: int, stop: int, alone: bool) -> list[tuple[int, int]]:
        """Return runs of slices, first and one behind the last, that encode as one: their blocks do not cross slices.

        With ``alone``, each slice is a run.
        """
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, stop)
        cuts = [first]
        for index in range(first + 1, last):
            if alone or (self._starts[index] - self._starts[cuts[-1]]) % BLOCK:
                cuts.append(index)
        return list(pairwise([*cuts, last]))


def takes_payloads(worker: Worker, number: int) -> bool:
    """Return true if this bucket of the group's plan is encoded on its device."""
    session = worker._session
    assert session.plan is not None
    operation = session.plan.buckets[number].operation
    is_known = operation.is_lossy and operation.codec.name in DEVICE_CODECS and operation.numel > 0
    return is_known and session.stage is Stage.MEMBER and not session.membership.late


def stage(
    worker: Worker, number: int, flat: Tensor, device: Device, memory: HostMemory, before: Staged | None
) -> Staged:
    """Return a bucket with memory on the host. What the bucket ``before`` owes is still owed.

    A bucket that is in other memory of the device than before has the same memory on the host: that stays locked.
    """
    if takes_payloads(worker, number):
        return _stage_payloads(worker, number, flat, device, memory, before)
    host = _host_of(before, has_payloads=False, nbytes=flat.nbytes, memory=memory).view(flat.dtype)
    step = PIECE_BYTES // flat.element_size()
    pieces = [(start, min(start + step, flat.numel())) for start in range(0, max(flat.numel(), 1), step)]
    return Staged(flat, host, pieces, [device.new_event() for _ in pieces])


def _stage_payloads(
    worker: Worker, number: int, flat: Tensor, device: Device, memory: HostMemory, before: Staged | None
) -> Payloads:
    session = worker._session
    assert session.plan is not None
    exchanges, operation = session.member.exchanges, session.plan.buckets[number].operation
    with session.traffic.mutex:
        layout = exchanges.table.share(ExchangeKey(BUCKET, 0, number), operation).layout
        kept = exchanges.feedback.pop(number, None)  # of rounds in which the host has encoded
    residual = before.residual if isinstance(before, Payloads) else torch.zeros_like(flat)
    if kept is not None:
        residual.copy_(torch.from_numpy(kept.residual))
    host = _host_of(before, has_payloads=True, nbytes=2 * offsets_of(layout)[-1], memory=memory)
    codec = DEVICE_CODECS[operation.codec.name]
    return Payloads(flat, host, layout, codec, residual, session.member.identity.sifts, device)


def _host_of(before: Staged | None, has_payloads: bool, nbytes: int, memory: HostMemory) -> Tensor:
    if before is not None and before.has_payloads == has_payloads and before.host.nbytes == nbytes:
        return before.host
    return memory.new(nbytes)
