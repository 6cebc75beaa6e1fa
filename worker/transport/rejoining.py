"""Joining anew: a worker that was about to join a durable group lost its connection, or the group recovers.

It has nothing that others need, so it cannot resume. It asks for the same once more, with its name and rank, on a new
connection:

    step                             what is said                          what its caller notices
    ───────────────────────────────  ────────────────────────────────────  ──────────────────────────────────────────
    what it was told is forgotten    –                                     a state that is under way has failed
    it is let in                     Join, as at first                     –
    plans that were agreed on        Propose, each; Agreed                 –; or PlanMismatchError
    what has no answer               Propose, what it asks of data         waits go on
    it can send its state            Serve                                 –
    it wants the state               Enter                                 the next transfer comes

If the connection breaks meanwhile, or the group recovers once more, all begins again. Once the worker trains with the
state there is no way back: it is not known which rounds it has missed. Then it gets a LeftOutError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gradserver.protocol.errors import DeadlineError, LeftOutError, PlanMismatchError
from gradserver.protocol.messages import Serve
from gradserver.worker.handle import Handle
from gradserver.worker.session import Session
from gradserver.worker.transport.tcp import TcpChannel

_LOOK_SECONDS: Final = 0.2
"""Seconds between two looks at whether the connection still stands."""


def let_in(session: Session, channel: TcpChannel, patience: float, check: Callable[[], None]) -> None:
    """Join once more on ``channel``. The session goes by the Welcome that comes. ``check`` raises why it cannot be.

    Raises:
        LeftOutError: there is no group any more that this worker could join.
    """
    before, asked = session.membership, session.application
    assert asked is not None
    with session.traffic.mutex:
        session.member.join_anew()
        effects = session.member.effects.take()
        joining = Handle(patience, channel)
        session.member.attachment.join(joining)
    session.traffic.carry_out(effects)
    channel.send(replace(asked, name=before.names[before.rank], timeout=max(patience, 1.0)))
    channel.ask()
    _await(joining, check, patience)
    here = session.membership
    if not (here.joins and here.durable):
        raise LeftOutError(
            f"this worker, {asked.name!r}, was about to join group {here.group!r}, which has ended: connect again",
            worker=asked.name,
            rank=here.rank,
        )


def agree_again(session: Session, channel: TcpChannel, check: Callable[[], None]) -> None:
    """Propose all plans that were agreed on.

    Raises:
        PlanMismatchError: the group has agreed on others.
    """
    for plan, before in session.member.plans.settled:
        handle = Handle(session.timeout, channel)
        with session.traffic.mutex:
            message = session.member.plans.repeat(plan, handle).message
        channel.send(message, (plan.encoded,))
        section = _await(handle, check, session.timeout)
        if section != before:
            here = session.membership
            raise PlanMismatchError(
                f"this worker, {here.names[here.rank]!r}, was about to join group {here.group!r}, which has agreed on "
                f"other plans meanwhile: wrap the modules anew, and connect again"
            )


def ask_again(session: Session, channel: TcpChannel) -> None:
    """Say what has no answer yet, that this worker can send its state, and that it wants one."""
    member = session.member
    with session.traffic.mutex:
        again = member.again()
        serves, asked = member.donor.serves, member.learner.asked
    for message, payloads in again:
        channel.send(message, payloads)
    if serves:
        channel.send(Serve())
    if asked is not None:
        channel.send(asked)


def _await(handle: Handle, check: Callable[[], None], patience: float) -> object:
    """Wait until ``handle`` is done, for as long as ``check`` raises nothing. Return its value."""
    waited = 0.0
    while True:
        try:
            return handle.wait(_LOOK_SECONDS)
        except DeadlineError:
            if not handle._open:
                raise
        check()
        waited += _LOOK_SECONDS
        if waited >= patience:
            raise DeadlineError(f"no answer came within {patience:g} s")
