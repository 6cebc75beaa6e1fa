"""Connections between two members of one epoch, over gloo, one after the other."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from gradserver.worker.background import in_background
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.planes.epochs import form, store_of
from gradserver.worker.session import Session

_LONGEST: Final = timedelta(days=1)


class Receiving:
    """Bytes that are on their way. A thread waits for them, in which gloo may block."""

    def __init__(self, work: Any, signal: Signal) -> None:
        self._signal = signal
        self._is_done = False
        self._error: BaseException | None = None
        in_background(self._wait, "receive", work)

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_LONGEST)
        except Exception as error:  # torch has its own kinds
            self._error = error
        self._is_done = True
        self._signal.wake()

    def wait(self, timeout: float) -> None:
        """Wait until they are here.

        Raises:
            GradServerError: what interrupted the wait.
            RuntimeError: they do not come.
            TimeoutError: they are not here in time.
        """
        if not self._signal.wait_until(lambda: self._is_done, timeout):
            raise TimeoutError(f"the bytes are not here after {timeout:g} s")
        if self._signal.error is not None and not self._is_done:
            raise self._signal.error.again()
        if self._error is not None:
            raise RuntimeError(str(self._error))


class Pair:
    """The connection from one member to another.

    Args:
        session: the membership of one of them.
        source: id of the one that sends.
        target: id of the other one.

    Attributes:
        group: name of the group.
    """

    def __init__(self, session: Session, source: int, target: int) -> None:
        self.group: str = session.membership.group
        self._session, self._ends = session, (source, target)
        self._lock = threading.Lock()
        self._epoch, self._connection, self._number = -1, 0, 0
        self._communicator: Communicator | None = None

    def next_number(self, epoch: int) -> tuple[int, int]:
        """Return the numbers of the present connection and of a new transfer on it. The source calls this."""
        with self._lock:
            if epoch != self._epoch:
                self._begin(epoch, 0)
            self._number += 1
            return self._connection, self._number

    def joined(self, epoch: int, connection: int, signal: Signal) -> Communicator:
        """Return the connection of these numbers, and connect if need be. See `Communicator.form`."""
        with self._lock:
            if (epoch, connection) != (self._epoch, self._connection):
                self._begin(epoch, connection)
            if self._communicator is None:
                rank = self._ends.index(self._session.member.identity.member_id)
                name = f"{self.group}/{self._ends[0]}-{self._ends[1]}/{epoch}/{connection}"
                store, host = store_of(self._session.membership)
                self._communicator = Communicator(store, name, rank, 2, [torch.device("cpu")], host)
                signal.on_interrupt(self._communicator.give_up)
                form(self._communicator, self._session, signal)
            return self._communicator

    def receive(self, communicator: Communicator, data: Tensor, number: int, signal: Signal) -> Receiving:
        """Begin to receive the transfer ``number``."""
        signal.on_interrupt(communicator.give_up)
        return Receiving(communicator.receive(data, 0, number), signal)

    def void(self, connection: int) -> None:
        """Give up a connection on which a transfer has failed."""
        with self._lock:
            if connection == self._connection:
                self._begin(self._epoch, connection + 1)

    def give_up(self) -> None:
        """End what is under way."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.give_up()

    def _begin(self, epoch: int, connection: int) -> None:
        self.give_up()
        self._epoch, self._connection, self._number = epoch, connection, 0
