"""DataParallel: a module with replicas on several devices of one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from gradserver.protocol.balance import ThroughputTracker
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import ROUND_TIMEOUT
from gradserver.protocol.nearest import names_keywords
from gradserver.worker.data_parallel.batches import Joiner, Scalars, split
from gradserver.worker.data_parallel.devices import Device, checked_devices, described, moved_to, plain
from gradserver.worker.data_parallel.given import check_count
from gradserver.worker.data_parallel.replicas import Replicas
from gradserver.worker.data_parallel.shares import Shares, tracker_of

log = logging.getLogger("gradserver")

_PREFIX = "module."


class DataParallel(nn.Module):
    """Wrapper of a module: each device of this process computes a part of the batch.

    For example:

        model = gradserver.DataParallel(model, ["cuda:0", "cuda:1"])
        optimizer = torch.optim.AdamW(model.parameters())
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

    The batch is cut into parts, which differ by one sample at most, or follow the speeds of devices (``balance``). A
    replica on each device computes its part, and the outputs are joined in order on the first device. So the loop is
    that of one device, and so are the results but for rounding: ``.grad`` is the gradient of the loss over the whole
    batch, whatever the loss is and however uneven the parts are. This holds for `torch.autograd.grad` and for gradients
    of gradients, too.

    The module itself is the first replica. ``parameters()`` are the module's, so one optimizer with one state steps
    them. The other replicas follow: before each forward they are what the module is now, with its parameters, buffers,
    modes, hooks and attributes. What a forward changes in another replica than the first is forgotten. So BatchNorm's
    running statistics are those of the first part of each batch.

    Replicas on one device share the module's parameters, and run one after the other. Each further device has a copy,
    and a thread, which runs its replicas beside the others. ``cpu:1``, ``cpu:2`` … are the CPU, treated as devices of
    their own: so tests without any GPU see what happens between devices.

    A module of all GPUs of a host can be wrapped once more: ``DistributedDataParallel(DataParallel(module), worker)``
    exchanges gradients with other hosts, one worker for each host.

    Args:
        module: module to replicate. It is moved to the first device.
        devices: device of each replica, as names, numbers of CUDA devices, or `torch.device`. One may be there several
            times. None takes all CUDA devices, or the CPU if there is none.
        output_device: device of the outputs. None takes the first of the devices.
        dim: dimension of the samples in inputs and outputs. Tensors without it go to every replica whole.
        whole: names of keyword arguments that go to every replica whole.
        scalars: result for outputs without a dimension, such as a loss that the module computes itself. ``"stack"``
            gives a vector with one for each replica that had samples, as torch's does. ``"mean"`` gives their mean,
            weighted by samples: the loss over the whole batch, if it is a mean.
        bucket_cap_mb: size in MiB of the pieces in which parameters and gradients travel between devices, for a module,
            or a part of one, that has no blocks.
        timeout: seconds that a forward may last in another thread than the caller's.
        replicas: modules for the further devices, in their order, instead of copies: for modules that hold what belongs
            to one object, such as a handle of their device. They must have the module's parameters and buffers, by
            name, shape and type, and get its values. Their attributes and hooks remain their own.
        balance: True to cut batches by the measured speed of each device, or a `gradserver.ThroughputTracker` with
            further options: its ranks are the devices in their order. Shares change after 10 forwards, and then each
            50. A batch with less than one sample for each replica is cut evenly.

    Attributes:
        module: the wrapped module, on the first device.
        devices: device of each replica.
        output_device: device of the outputs.

    Raises:
        InvalidArgumentError: a device does not exist, or the module cannot be replicated. LayoutError is among these
            errors.
        SizeMismatchError: one of ``replicas`` is not like the module. The error names the first difference.
    """

    @names_keywords
    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[Device] | None = None,
        *,
        output_device: Device | None = None,
        dim: int = 0,
        whole: Iterable[str] = (),
        scalars: Scalars = "stack",
        bucket_cap_mb: float = 25.0,
        timeout: float = ROUND_TIMEOUT,
        replicas: Iterable[nn.Module] = (),
        balance: ThroughputTracker | bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}, and must be a torch.nn.Module")
        if scalars not in ("stack", "mean"):
            raise InvalidArgumentError(f"scalars is 'stack' or 'mean', not {scalars!r}")
        if isinstance(whole, str):
            raise InvalidArgumentError(f"whole is a list of names of keyword arguments, as [{whole!r}], not {whole!r}")
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
            raise InvalidArgumentError(f"dim is the number of a dimension, 0 or above, not {dim!r}")
        if not timeout > 0:
            raise InvalidArgumentError(f"timeout is a number of seconds above 0, not {timeout!r}")
        self.devices = checked_devices(devices)
        self.output_device = checked_devices([output_device])[0] if output_device is not None else self.devices[0]
        self._given = tuple(replicas)
        if self._given:
            check_count(self._given, self.devices)
        self._tracker = tracker_of(self.devices, balance)
        self._shares: Shares | None = None
        self.module = moved_to(module, plain(self.devices[0]))
        self._dim, self._whole, self._scalars = dim, frozenset(whole), scalars
        self._cap_mb, self._timeout = bucket_cap_mb, timeout
        self._depth = 0
        self._replicas: Replicas | None = None
        self._made()
        self.train(module.training)
        log.info("DataParallel: %s", self.describe())

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the replicas, each with its part of the batch, and return their outputs as one.

        Raises:
            SizeMismatchError: tensors of the batch, or of the outputs, do not fit each other.
            DeadlineError: a replica has not returned within ``timeout``. The error names its device.
            ClosedError: the model was closed.
            UsageError: a forward is under way in another thread.
            Exception: an error of a replica, as it was raised there, with a note that names its device and samples.
        """
        replicas, shares = self._made(), self._shares
        sizes = None if shares is None else shares.sizes
        parts = split(inputs, options, len(self.devices), self._dim, self._whole, sizes)
        outputs = replicas.call(parts)
        if shares is not None:
            shares.record()
        samples = [part.end - part.begin for part in parts]
        return Joiner(self._dim, plain(self.output_device), self._scalars, samples).join(outputs)

    def _made(self) -> Replicas:
        """Return the replicas, which a copy of this object makes when it needs them, as it does for another module."""
        if self._replicas is not None and not self._replicas.are_of(self.module):  # another one is in its place
            self._replicas.close()
            self._replicas = None
        if self._replicas is None:
            self._shares = None if self._tracker is None else Shares(self.devices, self._tracker)
            self._replicas = Replicas(self.module, self.devices, self._cap_mb, self._timeout, self._given, self._shares)
        return self._replicas

    @property
    def ratios(self) -> tuple[float, ...]:
        """Part of the batch of each replica. Together they are 1."""
        self._made()
        return (1 / len(self.devices),) * len(self.devices) if self._shares is None else self._shares.ratios

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending parameters to the other devices in between.

        Gradients always add up in ``.grad``, inside and outside. Behind a backward outside, the next forward sends the
        parameters, as the loop may have stepped. Behind a backward inside, it does so only if an optimizer has stepped,
        or after a change that autograd knows of.
        """
        self._depth += 1
        self._made().accumulate(True)
        try:
            yield
        finally:
            self._depth -= 1
            self._made().accumulate(self._depth > 0)

    def sync_params(self) -> None:
        """Give all replicas the first one's parameters before the next forward.

        That is needed only after a change that neither an optimizer makes nor autograd knows of. An example is
        ``parameter.data.copy_(…)``, between two forwards of evaluation, or inside of `no_sync`.
        """
        self._made().parameters_may_have_changed()

    def sync_buffers(self) -> None:
        """Give all replicas the first one's buffers before the next forward. It is needed as `sync_params` is."""
        self._made().buffers_may_have_changed()

    def describe(self) -> str:
        """Return a line about the devices: how many replicas, where, and whether the devices are alike."""
        return described(self.devices, self._tracker is not None)

    def close(self) -> None:
        """End the threads of the devices. The wrapped module remains usable. A second call does nothing.

        Without this call they end with the object.
        """
        self._made().close()

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, under the names that it has without this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the module, also one with ``module.`` in front of all names, as torch's wrapper saves it."""
        return self.module.load_state_dict(self._unwrapped(state_dict), strict, assign)

    def _unwrapped(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        own = self.module.state_dict().keys()
        if len(own & state.keys()) >= sum(name.removeprefix(_PREFIX) in own for name in state if name[:7] == _PREFIX):
            return state
        bare: Any = copy.copy(state)
        if hasattr(bare, "_metadata"):
            bare._metadata = copy.copy(bare._metadata)
        consume_prefix_in_state_dict_if_present(bare, _PREFIX)
        return bare  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Find the module's names, when a module around this one loads its state."""
        own = self.module.state_dict(prefix=prefix).keys()
        for name in [name for name in state_dict if name in own]:
            state_dict[f"{prefix}{_PREFIX}{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but threads and replicas: a copy, or what a pickle gives, makes its own."""
        return {**self.__dict__, "_replicas": None, "_shares": None, "_given": (), "_depth": 0}
