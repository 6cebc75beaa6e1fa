"""Receiving from whichever member sends first.

A transfer is one of two members, and a receiver names its source. So this asks the coordinator which member has begun
its next send, and receives that one by its name. The answer is nothing that others count on: when a coordinator has
been lost, sources send again to the next one, and this asks again. A failed transfer, or a source that has departed, is
an answer too.

    state     event                                          next     what happens
    ────────  ─────────────────────────────────────────────  ───────  ──────────────────────────────────────────────
    ASKING    a member has sent                              BEGUN    this receives from it
    ASKING    none has, or there is no coordinator now       ASKING   it asks again, after a pause
    ASKING    none has, and one has departed                 FAILED   raises that member's error
    ASKING    another call has received that message         ASKING   it asks again
    BEGUN     …                                              DONE,    as any transfer
                                                             FAILED
"""

from __future__ import annotations

import time
from typing import Final

from gradserver.protocol.errors import (
    CoordinatorError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    OutOfStepError,
    UnsupportedOperationError,
)
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, operation_of
from gradserver.worker.handle import VERDICT_SECONDS, Handle
from gradserver.worker.session import Session
from gradserver.worker.tensors import Tensor, bind

_FIRST_PAUSE: Final = 0.0002
_LONGEST_PAUSE: Final = 0.01
_LARGE: Final = 4 << 20
"""Bytes of a transfer that members which reduce among themselves pass to each other without the coordinator."""


class AnySource:
    """One receive, into ``tensor``, from any other member that sends with ``tag``.

    Attributes:
        source: rank of the member that it receives from; -1 until one has sent.
    """

    def __init__(self, session: Session, tensor: Tensor, tag: int) -> None:
        self.source = -1
        self._session, self._tensor, self._tag = session, tensor, tag
        self._bound = bind(tensor, writes=True)
        self._operation = operation_of(Kind.TRANSFER, Op.NONE, self._bound.dtype, self._bound.numel)
        self._handle: Handle | None = None
        if not self._bound.numel:
            raise InvalidArgumentError("a message without elements does not travel, so none comes from any rank")
        if session.membership.commits and self._bound.data.size >= _LARGE:
            raise UnsupportedOperationError(
                f"on plane {session.membership.plane!r}, messages of {_LARGE >> 20} MiB and more do not pass the "
                f"coordinator, which alone knows the members that have sent: name the source"
            )

    def done(self) -> bool:
        """Return true if the message is there, or has failed. Nothing is asked: `wait` does that."""
        return self._handle is not None and self._handle.done()

    def wait(self, seconds: float) -> int:
        """Wait for the message, and return the rank that it is from."""
        until, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while self._handle is None and not self._begin():
            if time.monotonic() + pause >= until:
                raise self.overdue(seconds)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        assert self._handle is not None
        self._handle.wait(max(until - time.monotonic(), 0.0))
        return self.source

    def overdue(self, seconds: float) -> DeadlineError:
        """Make the error of a wait that ran out after so many ``seconds``."""
        if self._handle is not None:
            return self._handle.overdue(seconds)
        return DeadlineError(f"recv from any rank (tag {self._tag}) is not done after {seconds:g} s")

    def _begin(self) -> bool:
        """Ask all other members' next sends of the coordinator. Begin to receive the first that was sent."""
        ids, me = self._session.membership.member_ids, self._session.membership.rank
        error: GradServerError | None = None
        others = [rank for rank in range(len(ids)) if rank != me]
        asked = [(rank, *self._session.traffic.ask_begun(ids[rank], ids[me], self._tag)) for rank in others]
        for rank, key, handles in asked:
            try:
                if any(handle.wait(VERDICT_SECONDS) for handle in handles) and self._receive(rank, key):
                    return True
            except (CoordinatorError, DeadlineError):  # it is away, and no other question is answered either
                self._session.check_open()
                return False
            except GradServerError as raised:
                error = raised
        if error is not None:
            raise error
        return False

    def _receive(self, rank: int, key: ExchangeKey) -> bool:
        ends = key.source, key.target, key.part
        try:
            handle = self._session.traffic.transfer(
                self._operation, ends, None, self._bound.data, self._tensor, True, True, key.number
            )
        except OutOfStepError:
            return False
        handle.then(self._bound.store)
        self._handle, self.source = handle, rank
        return True
