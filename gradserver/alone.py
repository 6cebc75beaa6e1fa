"""A worker that is alone in its group: it needs no daemon.

Its coordinator is the real one, in this process, so that all works as in a group, down to what a lossy wire loses. With
a CUDA device and an exact wire it has the direct plane, on which its gradients stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

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

if TYPE_CHECKING:
    from gradserver.worker.training import Device, Module, Stepper, Training

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


def setup(
    model: Module,
    optimizer: Stepper | None = None,
    *,
    devices: Iterable[Device] | None = None,
    url: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "default",
    name: str | None = None,
    timeout: float = 60.0,
    wire: str = "fp32",
    plane: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> Training:
    """Set a module up for training: on one device, on several, or beside other workers. It says what it chose.

    For example:

        optimizer = torch.optim.AdamW(model.parameters())
        with gradserver.setup(model, optimizer) as training:
            for inputs, targets in loader:
                training.step(loss(training(inputs.to(training.device)), targets.to(training.device)))

    The loop is the same in each case:

    - With GRADSERVER_URL or ``url``, this worker joins the group there, as `connect` does, and gradients are averaged
      over the workers. Without, it trains alone.
    - With a launcher that starts a process for each device (`gradserver run`, torchrun, mpirun, srun), this process has
      the device of its place on the host. Otherwise it has all CUDA devices, and each computes a part of the batch, as
      with `DataParallel`; if they are of different kinds, with ``balance=True``. Without any CUDA device it has the
      CPU.

    The module is moved to its first device. Parameters stay the same objects, so an optimizer may be made before.
    Rank 0 writes one line to standard error: the devices, how gradients travel, and why.

    Args:
        model: module to train.
        optimizer: its optimizer, for `Training.step`; None if the loop has its own.
        devices: devices of this process. ``cpu:1`` stands for a CPU with memory of its own, for tests.
        url: the coordinator's address. None takes GRADSERVER_URL; ``""`` means none.
        rank: rank of this worker. None takes the launcher's, or one that the coordinator assigns.
        world_size: number of workers. None takes the launcher's, or the coordinator's.
        group: name of the group.
        name: name of this worker.
        timeout: seconds to wait for the coordinator and the other workers.
        wire: format in which gradients travel, see `connect`.
        plane: way of the gradients, see `connect`.
        quiet: true to write nothing.
        options: options of `DistributedDataParallel`. ``balance`` needs the worker, and so `connect`.

    Returns:
        The training: model, worker and devices.

    Raises:
        InvalidArgumentError: a device does not exist, the optimizer is another model's, or there are several workers
            and no URL. `connect` and `DistributedDataParallel` have further errors.
        TypeError: there is no such option. It is raised before any group is joined.
    """
    from gradserver.worker.training import set_up  # imported here: connect needs no torch

    joining = {"rank": rank, "world_size": world_size, "group": group, "name": name, "timeout": timeout}
    joining |= {"wire": wire, "plane": plane}
    return set_up(connect, model, optimizer, devices, url, quiet, joining, options)


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
