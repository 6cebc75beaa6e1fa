"""A worker that is alone in its group: it needs no daemon.

Its coordinator is the real one, in this process, so that all works as in a group, down to what a lossy wire loses. With
a CUDA device and an exact wire it has the direct plane, on which its gradients stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec

from gradserver.engine import Engine
from gradserver.local import Alarm, Inbox
from gradserver.protocol.channel import Channel, Outlet
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import EXACT
from gradserver.protocol.in_process import in_process_pair
from gradserver.protocol.offers import Offer
from gradserver.protocol.planes import AUTO, DIRECT, IN_PROCESS
from gradserver.runtime import Runtime
from gradserver.worker import connect as daemons
from gradserver.worker.client import Worker
from gradserver.worker.connect import UrlMissingError, Wish
from gradserver.worker.session import Session

log = logging.getLogger("gradserver")

P = ParamSpec("P")


def _or_alone(connect: Callable[P, Worker]) -> Callable[P, Worker]:
    """Make a ``connect`` that also works without a coordinator: the worker then trains alone."""

    @wraps(connect)
    def connect_or_train_alone(*args: P.args, **kwargs: P.kwargs) -> Worker:
        try:
            return connect(*args, **kwargs)
        except UrlMissingError as error:
            wish = error.wish
        return train_alone(wish)

    return connect_or_train_alone


connect = _or_alone(daemons.connect)


def train_alone(wish: Wish) -> Worker:
    """Start a group of one worker. Its coordinator ends with the worker."""
    group = wish.join.group
    why = "the world size is 1" if wish.join.world_size else "neither GRADSERVER_URL nor RANK is set"
    log.warning("%r trains alone, without a coordinator: %s", wish.join.name, why)
    alarm = Alarm(lambda: _tick(coordinator))
    coordinator = Runtime(Engine({group: 1}), alarm.set)
    ours, theirs = in_process_pair(wish.join.name)
    inbox = _Inbox(coordinator, theirs, alarm)
    theirs.attach(inbox)
    session = Session(ours, wish.join.timeout)
    session.subgroups.grow_by(lambda: _grow(coordinator, inbox.connection))
    session.join(replace(wish.join, offer=_offer_of(wish))).wait()
    return Worker(session, wire=wish.wire)


def _offer_of(wish: Wish) -> Offer:
    """Return what the worker offers. A worker that is alone needs no store in which others find it."""
    offer = wish.join.offer._replace(channel=IN_PROCESS)
    stays = offer.plane == AUTO and offer.devices and offer.backends and codec_of(wish.wire) is EXACT
    return offer._replace(plane=DIRECT, store=IN_PROCESS) if stays else offer


def _grow(coordinator: Runtime, base: int) -> Channel:
    """Return a channel for a sub-group of this one worker."""
    ours, theirs = in_process_pair("sub-group")
    theirs.attach(Inbox(coordinator, theirs, base=base))
    return ours


def _tick(coordinator: Runtime) -> float | None:
    coordinator.tick()
    return coordinator.next_deadline()


class _Inbox(Inbox):
    """Ends the coordinator when its only worker has left."""

    def __init__(self, coordinator: Runtime, channel: Outlet, alarm: Alarm) -> None:
        super().__init__(coordinator, channel)
        self._alarm = alarm

    def lost(self, error: GradServerError) -> None:
        super().lost(error)
        self._alarm.close()
        self._coordinator.close()
