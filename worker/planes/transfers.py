"""Transfers on the direct plane: from one member to another, without the others.

Each end has a lane for each source, target and tag. In it transfers are done in the order of the calls. One transfer:

    state     event                                               next       what happens
    ────────  ──────────────────────────────────────────────────  ─────────  ─────────────────────────────────────────
    QUEUED    earlier ones are done                               OFFERED    a transfer over the coordinator says what
                                                                             the source sends
    OFFERED   the target expects the same, in the same epoch      AGREED     it answers so; both connect, if they have
                                                                             not
    OFFERED   it does not                                         THROUGH    it answers so
    AGREED    the target has all bytes                            DONE       it answers so, and takes them
    AGREED    an error, too late, or a member has departed        THROUGH    the target answers so
    any       the other end is lost, or another error             FAILED     as on the coordinator's plane
    THROUGH   …                                                   DONE,      the same transfer, over the coordinator
                                                                  FAILED

The target alone decides, as it alone gets something. Bytes come into memory of their own: what was given up may still
write there. They are those of the host, also of a CUDA device: NCCL needs kernels in one order at all members, and
those of two members have none.
"""

from __future__ import annotations

import logging
import struct
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import UINT8
from gradserver.protocol.errors import BackendUnavailableError, GradServerError
from gradserver.protocol.exchange import ANSWER_TAG, Kind, Op, operation_of
from gradserver.worker.background import in_background
from gradserver.worker.collectives.call import Passing
from gradserver.worker.handle import Handle
from gradserver.worker.planes.calls import Outcome, digest_of, renamed, stall_after
from gradserver.worker.planes.communicator import Signal
from gradserver.worker.planes.lane import Lane
from gradserver.worker.planes.pairs import Pair
from gradserver.worker.planes.watch import watch_for_departures
from gradserver.worker.session import Session

log = logging.getLogger("gradserver")

LEAST_BYTES: Final = 4 << 20
"""Bytes of a transfer below which it goes over the coordinator. Both ends go by it in all memberships."""
_OFFER: Final = struct.Struct("<QQII")


class Offered(NamedTuple):
    """The source's word about a transfer.

    Attributes:
        digest: of the operation.
        epoch: of the membership.
        connection: number of the connection between the two.
        number: number of the transfer on it.
    """

    digest: int
    epoch: int
    connection: int
    number: int


class DirectTransfers:
    """Transfers of one session that go by the direct plane.

    Args:
        session: the membership.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lanes: dict[tuple[int, int, int], Lane] = {}
        self._pairs: dict[tuple[int, int], Pair] = {}
        session.on_end(self._give_up)

    @classmethod
    def of(cls, session: Session) -> DirectTransfers:
        """Return those of ``session``."""
        if session not in _of_session:
            _of_session[session] = cls(session)
        return _of_session[session]

    def begin(self, call: Passing) -> Handle | None:
        """Begin ``call``; None if it is one for the coordinator, and none before it is under way."""
        is_large = call.operation.numel * call.operation.dtype.itemsize >= LEAST_BYTES
        lane = self._lanes.get(call.ends)
        if not is_large and (lane is None or lane.is_idle):
            return None
        if lane is None:
            lane = self._lanes[call.ends] = Lane("transfers")
        handle = Outcome(self._session.timeout, call.value)
        lane.submit(partial(self._carry_out, call, is_large, handle))
        return handle

    def _carry_out(self, call: Passing, is_large: bool, handle: Outcome) -> None:
        error: GradServerError | None = None
        try:
            if not (is_large and self._try(call)):
                call.through().wait()
        except GradServerError as raised:
            error = raised
        except Exception as raised:  # of torch, or of memory
            error = BackendUnavailableError(f"{call.operation}: {type(raised).__name__}: {raised}")
        handle._complete(error)

    def _try(self, call: Passing) -> bool:
        """Do a transfer directly. Return false if it is to go over the coordinator, at both ends alike."""
        here = self._session.membership
        pair = self._pairs.setdefault(call.ends[:2], Pair(self._session, *call.ends[:2]))
        digest = digest_of(call.operation)
        if call.gives:
            offered = Offered(digest, here.epoch, *pair.next_number(here.epoch))
            self._pass(call, np.frombuffer(_OFFER.pack(*offered), np.uint8).copy())
            return self._answer_to(call) and self._give(call, pair, offered)
        told = np.zeros(_OFFER.size, np.uint8)
        self._pass(call, told)
        offered = Offered(*_OFFER.unpack(told.tobytes()))
        fits = offered[:2] == (digest, here.epoch)
        self._answer(call, fits)
        return fits and self._take(call, pair, offered)

    def _give(self, call: Passing, pair: Pair, offered: Offered) -> bool:
        """Send the bytes, and hear whether they have come. What the target says counts, whatever happens here."""
        under_way: list[object] = []
        try:
            data = call.data if call.data.flags.writeable else call.data.copy()
            communicator = pair.joined(offered.epoch, offered.connection, Signal())
            under_way.append(communicator.send(torch.from_numpy(data), 1, offered.number))
        except Exception as error:  # the target says what came
            log.warning("group %r: %s cannot be sent directly: %s", pair.group, call.operation, str(error))
        came = self._answer_to(call)
        if not came:
            pair.void(offered.connection)
            in_background(under_way.clear, "forget")  # it may wait for what was given up
        return came

    def _take(self, call: Passing, pair: Pair, offered: Offered) -> bool:
        """Receive the bytes, and say whether they have come."""
        signal, session = Signal(), self._session
        watch = watch_for_departures(signal, session.timeout)
        session.boundaries.watch(watch)
        data = torch.empty(call.data.size, dtype=torch.uint8)
        try:
            communicator = pair.joined(offered.epoch, offered.connection, signal)
            receiving = pair.receive(communicator, data, offered.number, signal)
            receiving.wait(stall_after(call.data.size, session.timeout))
            came = True
        except Exception as error:  # whatever it is, the others are to hear of it
            came = False
            pair.void(offered.connection)
            if signal.error is None:
                log.warning("group %r: %s goes over the coordinator: %s", pair.group, call.operation, str(error))
        finally:
            session.boundaries.unwatch(watch)
        self._answer(call, came)
        if came:
            call.data[:] = data.numpy()
        return came

    # ── over the coordinator ──────────────────────────────────────────────────────────────────────────

    def _pass(self, call: Passing, data: Bytes, back: bool = False) -> None:
        """Pass a few bytes the way of ``call``, or ``back``."""
        source, target, tag = call.ends
        ends = (target, source, tag + ANSWER_TAG) if back else call.ends
        gives = call.gives is not back
        given, taken = (data, None) if gives else (None, data)
        told = operation_of(Kind.TRANSFER, Op.NONE, UINT8, data.size)
        try:
            self._session.traffic.transfer(told, ends, given, taken, by_id=True).wait()
        except GradServerError as error:
            raise renamed(error, told, call.operation) from None

    def _answer(self, call: Passing, fits: bool) -> None:
        self._pass(call, np.array([fits], np.uint8), back=True)

    def _answer_to(self, call: Passing) -> bool:
        answer = np.zeros(1, np.uint8)
        self._pass(call, answer, back=True)
        return bool(answer[0])

    def _give_up(self) -> None:
        for pair in self._pairs.values():
            pair.give_up()


_of_session: WeakKeyDictionary[Session, DirectTransfers] = WeakKeyDictionary()
