"""Collectives on the direct plane: members exchange tensors among themselves, and all get the result or none does.

Each worker has a lane, in which its collectives of this kind are done in the order of the calls. That order is the
same at all members. One collective, at one member:

    state       event                                              next        what happens
    ──────────  ─────────────────────────────────────────────────  ──────────  ────────────────────────────────────
    QUEUED      earlier ones are done; they are tried directly     PREPARING   an all_gather says what was called,
                                                                               with which weight, on which device
    QUEUED      else: a member is gone, or the epoch rests         THROUGH
    PREPARING   all have called the same, and can                  EXCHANGING  a communicator, if the epoch is new
    PREPARING   calls differ, or a member cannot                   THROUGH     which reports it, if it is an error
    EXCHANGING  the result is here                                 CONFIRMING  an all_gather says so
    EXCHANGING  an error, too late, or a member has departed       CONFIRMING  it says that there is none
    CONFIRMING  all have their result                              DONE        it is copied into the tensor
    CONFIRMING  a member has none                                  THROUGH     communicators are given up
    PREPARING,  a member has departed before it had said so        THROUGH     of what goes on without it: a reduction
    CONFIRMING                                                                 or a broadcast
    PREPARING,  the same                                           FAILED      MembershipChangedError at all members,
    CONFIRMING                                                                 of what depends on their number
    any         another error, as a lost coordinator               FAILED      it is raised
    THROUGH     …                                                  DONE,       as on the coordinator's plane: the same
                                                                   FAILED      call, with the tensor as it was

Both all_gathers need every member of the membership. So the coordinator decides once for all, and what it says is the
same at each. A member that is lost between them has nothing to say: the others are told of its departure, and end
their wait for it.

Calls of different tensors never reach gloo or NCCL. Gloo ends the process then, and NCCL may hang.

While a call is in the lane, other collectives, the end of a round and a new membership wait for it. Kernels of two
NCCL communicators may not be queued in different orders at two members. So a round on CUDA devices waits for the lane
before it begins. A call that comes during such a round says that it cannot.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import BackendUnavailableError, GradServerError, MembershipChangedError
from gradserver.protocol.exchange import WORLD_BOUND, Kind, Op, Operation, operation_of
from gradserver.protocol.messages import Welcome
from gradserver.protocol.offers import backend_of
from gradserver.protocol.planes import DIRECT, GLOO
from gradserver.worker.collectives.call import Call, on_stream
from gradserver.worker.collectives.writers import into_rows
from gradserver.worker.handle import Handle
from gradserver.worker.interrupts import watch as stand_in
from gradserver.worker.planes.bodies import LINEAR, REDUCES, Body, Scratch, is_reducible
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.planes.epochs import form, introduce
from gradserver.worker.planes.lane import Lane
from gradserver.worker.planes.trial import is_tried
from gradserver.worker.planes.watch import watch_for_departures
from gradserver.worker.session import Session

log = logging.getLogger("gradserver")

LEAST_BYTES: Final = 1 << 20
"""Bytes of a call below which it goes over the coordinator: two of its rounds cost more than the bytes."""
LEAST_BYTES_OF_A_HOST: Final = 8 << 20
"""The same for tensors on the CPU, of members that are all on one host, where the coordinator most often is, too."""
_STALL_SECONDS: Final = 20.0
_SLOWEST_RATE: Final = 1e6
"""Bytes a second, for which an exchange has time beside `_STALL_SECONDS`."""
_REST_CALLS: Final = 8
_MOST_REST_CALLS: Final = 512


class Record(NamedTuple):
    """A member's word about its call, before it begins.

    Attributes:
        digest: of the operation.
        place: kind of the tensor's device, 0 if this member cannot.
        weight: of the member.
    """

    digest: int
    place: int
    weight: float


_RECORD: Final = struct.Struct("<QBd")
_PLACES: Final = {"cpu": 1, "cuda": 2}


class Outcome(Handle[Any]):
    """A handle that a lane completes. Its caller reads no messages meanwhile: the channel's thread does.

    Attributes:
        is_direct: true if the members have exchanged the tensors among themselves, known when done.
    """

    __slots__ = ("is_direct",)

    def __init__(self, timeout: float, value: Any = None) -> None:
        super().__init__(timeout, value=value)
        self.is_direct = False

    def _wait_once(self, seconds: float) -> bool:
        stand_in()
        return self._lock.acquire(timeout=seconds)


class DirectCalls:
    """Collectives of one session that go by the direct plane.

    Args:
        session: the membership.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lane = Lane("calls")
        self._scratch = Scratch()
        self._streams: dict[torch.device, Any] = {}
        self._communicators: dict[str, Communicator] = {}
        self._epoch, self._voids, self._rests = -1, 0, 0
        self._is_broken = False
        """True if a member of the epoch is gone."""
        session.boundaries.on_settle(self._lane.settle)
        session.on_end(self._give_up)

    @classmethod
    def of(cls, session: Session) -> DirectCalls:
        """Return those of ``session``."""
        if session not in _of_session:
            _of_session[session] = cls(session)
        return _of_session[session]

    # ── what the caller's thread does ─────────────────────────────────────────────────────────────────

    def begin(self, call: Call) -> Handle | None:
        """Begin ``call``; None if it is one for the coordinator. All members decide alike."""
        operation, here = call.operation, self._session.membership
        is_large = operation.numel * operation.dtype.itemsize >= _least_bytes(here)
        if here.plane != DIRECT or is_tried(here) or not is_large or len(here.member_ids) == 1:
            return None
        if operation.kind in REDUCES and not is_reducible(operation.op, operation.dtype):
            return None
        stream = self._stream_for(call)
        with on_stream(stream):
            body = Body(call, here.rank, len(here.member_ids))
        can = self._can(body)
        handle = Outcome(self._session.timeout)
        handle.on_error(self._session.heed)
        if stream is not None:
            handle.then(partial(_follow, handle, stream, call.stream is None))
        self._lane.submit(partial(self._carry_out, call, body, stream, can, handle))
        return handle

    def _stream_for(self, call: Call) -> Any:
        """Return the stream on which ``call`` is queued: the caller's, or one beside all others that waits for it."""
        if not getattr(call.tensor, "is_cuda", False) or call.stream is not None:
            return call.stream
        device, cuda = call.tensor.device, torch.cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(cuda.current_stream(device))
        for tensor in (call.tensor, *(call.parts or ())):
            tensor.record_stream(stream)
        return stream

    def _can(self, body: Body) -> bool:
        """Tell whether this member can go by the direct plane with the tensors of ``body``, as far as it knows."""
        if body.device.type == "cpu":
            return torch.distributed.is_gloo_available()
        if self._session.member.rounds.is_direct:
            return False
        return torch.distributed.is_nccl_available() and body.device.index == torch.cuda.current_device()

    # ── what the lane does ────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, call: Call, body: Body, stream: Any, can: bool, handle: Outcome) -> None:
        error: GradServerError | None = None
        try:
            with on_stream(stream):
                if not self._try(call, body, can, handle):
                    through = call.through()
                    through.on_error(lambda _: None)  # the caller's thread goes by another membership, and not this one
                    handle._value = through.wait()
                    handle.weight, handle.present = through.weight, through.present
        except GradServerError as raised:
            error = raised
        except Exception as raised:  # of torch: out of memory, a broken device
            error = BackendUnavailableError(f"{call.operation}: {type(raised).__name__}: {raised}")
        handle._complete(error)

    def _try(self, call: Call, body: Body, can: bool, handle: Outcome) -> bool:
        """Do ``call`` directly. Return false if it is to go over the coordinator, at all members alike."""
        if self._rests_now():
            return False
        operation = call.operation
        place = _PLACES.get(body.device.type, 0) if can and not body.has_nan else 0
        try:
            said = self._gather(operation, _RECORD.pack(digest_of(operation), place, call.weight))
            records = [Record(*_RECORD.unpack(one)) for one in said]
            weights = [record.weight for record in records]
            if not _agree(records) or not _counts(operation, weights):
                return False
            fine = self._exchange(call, body, weights)
            if all(one == b"\1" for one in self._gather(operation, b"\1" if fine else b"\0")):
                handle._value = body.commit()
                self._scratch.give_back(body.device)
                handle.weight, handle.present = sum(weights), any(weights)
                handle.is_direct = True
                return True
            self._void()
        except MembershipChangedError:
            self._is_broken = True
            self._give_up()
            if operation.kind in WORLD_BOUND:
                raise
        return False

    def _rests_now(self) -> bool:
        """Tell whether the present call is not tried directly. Each void one has more of them rest behind it."""
        if self._session.membership.epoch != self._epoch:
            self._give_up()
            self._epoch, self._voids, self._rests, self._is_broken = self._session.membership.epoch, 0, 0, False
        if self._rests:
            self._rests -= 1
            return True
        return self._is_broken

    def _void(self) -> None:
        """Note that the present call could not be done directly."""
        self._give_up()
        self._rests = min(_REST_CALLS << self._voids, _MOST_REST_CALLS)
        self._voids += 1

    def _gather(self, operation: Operation, own: bytes) -> list[bytes]:
        """Return what each member says, by rank. Errors name ``operation``."""
        world = len(self._session.membership.member_ids)
        told = operation_of(Kind.ALL_GATHER, Op.NONE, UINT8, len(own))
        rows = np.zeros((world, len(own)), np.uint8)
        try:
            handle = self._session.traffic.collective(told, np.frombuffer(own, np.uint8), into_rows(rows))
            handle.on_error(lambda _: None)
            handle.wait()
        except GradServerError as error:
            raise renamed(error, told, operation) from None
        return [row.tobytes() for row in rows]

    def _exchange(self, call: Call, body: Body, weights: Sequence[float]) -> bool:
        """Exchange the tensors with the others. Return false if this member has no result."""
        signal = Signal()
        watch = watch_for_departures(signal, self._session.timeout)
        self._session.boundaries.watch(watch)
        operation = call.operation
        limit = stall_after(operation.numel * operation.dtype.itemsize * len(weights), self._session.timeout)
        try:
            communicator = self._joined(body.device, signal)
            signal.on_interrupt(communicator.give_up)
            body.start(communicator, signal, weights, self._scratch).wait(limit)
            return True
        except Exception as error:  # whatever it is, the others are to hear of it
            self._give_up()
            self._scratch.drop()
            if signal.error is None:
                log.warning(
                    "group %r: this worker could not do %s with the others, and it goes over the coordinator: %s",
                    self._session.membership.group,
                    operation,
                    str(error),  # a handler that keeps the error keeps its frames, and with them the others' sockets
                )
            return False
        finally:
            self._session.boundaries.unwatch(watch)

    def _joined(self, device: torch.device, signal: Signal) -> Communicator:
        """Return the communicator of the present epoch for ``device``, and form it if need be."""
        communicator = self._communicators.get(device.type)
        if communicator is None:
            name = f"calls/{device.type}/{self._epoch}/{self._voids}"
            communicator = self._communicators[device.type] = introduce(self._session, name, [device])
            form(communicator, self._session, signal)
        return communicator

    def _give_up(self) -> None:
        """End all that is under way among the members."""
        communicators, self._communicators = self._communicators, {}
        for communicator in communicators.values():
            communicator.give_up()


def _least_bytes(here: Welcome) -> int:
    """Return the bytes of a call from which on these members try it directly. All say the same.

    A group with NCCL has CUDA tensors, most often, and these do not lie where the coordinator sees them.
    """
    one_host = len({offer.host_id for offer in here.offers}) == 1
    return LEAST_BYTES_OF_A_HOST if one_host and backend_of(here.offers) == GLOO else LEAST_BYTES


def stall_after(nbytes: int, timeout: float) -> float:
    """Return the seconds after which an exchange of so many bytes takes too long.

    The others wait for this member's word about it. So it says so well within their ``timeout``, in seconds.
    """
    return min(_STALL_SECONDS + nbytes / _SLOWEST_RATE, timeout / 2)


def renamed(error: GradServerError, told: Operation, operation: Operation) -> GradServerError:
    """Return ``error`` about ``told`` as one about ``operation``, for which that was said."""
    return type(error)(error.message.replace(str(told), str(operation)), **error.fields)


def digest_of(operation: Operation) -> int:
    """Return a number that stands for ``operation``."""
    return int.from_bytes(blake2b(str(operation).encode(), digest_size=8).digest(), "little")


def _agree(records: Sequence[Record]) -> bool:
    """Tell whether all members have called the same, on one kind of device."""
    return records[0].place > 0 and len({record[:2] for record in records}) == 1


def _counts(operation: Operation, weights: Sequence[float]) -> bool:
    """Tell whether each member's contribution counts, or adds nothing: only to a sum zeros do so."""
    return operation.op in LINEAR or all(weights)


def _follow(handle: Handle[Any], stream: Any, beside: bool) -> None:
    """Have what is queued from now on wait for ``stream``, if it is ours: what it allocated is used here then."""
    if beside:
        current = torch.cuda.current_stream(stream.device)
        current.wait_stream(stream)
        if isinstance(handle._value, torch.Tensor) and handle._value.is_cuda:
            handle._value.record_stream(current)


_of_session: WeakKeyDictionary[Session, DirectCalls] = WeakKeyDictionary()
