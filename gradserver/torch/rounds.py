"""Communication hook for torch's DistributedDataParallel: its buckets are exchanged as rounds of a plan.

torch calls a hook with each bucket of gradients, in the order of their numbers, as soon as backward has completed it:
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html. The buckets of a step are not known before the last of them.
So the plan is agreed on behind a whole step. Once torch divides the gradients anew, in the order in which they became
ready: behind the first step, or behind the second with ``static_graph=True``.

    step              torch's buckets           here
    ────────────────  ────────────────────────  ────────────────────────────────────────────────────────────────
    first             in the order of the       kept until the last, then agreed on, pushed and finished
                      parameters
    second and third  perhaps others            kept until the last; agreed on again if they are others
    later             the same                  each is pushed at once; the last waits for the results of all
    later             other ones: another       an error at this worker; nothing of such a bucket is pushed
                      module's, for example
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torch import Tensor, nn
from torch.futures import Future

from gradserver.protocol.dtypes import DType
from gradserver.protocol.errors import OutOfStepError, UsageError
from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.torch.groups import worker
from gradserver.torch.private import GradBucket
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker, check_weight
from gradserver.worker.tensors import wire_dtype

_SETTLED: Final = 3
"""Number of steps behind which torch does not divide the gradients anew."""


class _Layout(NamedTuple):
    """The content of one of torch's buckets: its type, and the shapes of its gradients in their order."""

    dtype: DType
    shapes: tuple[tuple[int, ...], ...]


class _Given(NamedTuple):
    """A bucket of the present step: torch's memory, the same on the CPU, and what torch waits for."""

    layout: _Layout
    parameters: Sequence[Tensor]
    buffer: Tensor
    host: Tensor
    future: Future[Tensor]


class Rounds:
    """Gradients of one model of torch's DistributedDataParallel, as rounds. It is the state of `hook`.

    For example:

        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(gradserver.torch.Rounds(), gradserver.torch.hook)

    The mean of the gradients then comes from the coordinator, with all that it does for rounds: formats on the wire,
    robust means, policies for NaN, quorums, the ledger. An error of a round is raised by ``backward()``.

    What torch's wrapper does by itself stays as it is: it compares modules and sends buffers over its process group.
    Workers cannot join later, as nothing sends them the state. `gradserver.torch.DistributedDataParallel` can do both.

    Args:
        worker: the worker. None takes that of the default process group, at the first step.
        module: the module, for the names of its parameters in errors. None if they may be numbers.
    """

    def __init__(self, worker: Worker | None = None, module: nn.Module | None = None) -> None:
        self._worker = worker
        named = () if module is None else module.named_parameters()
        self._names: Mapping[int, str] = {id(parameter): name for name, parameter in named}
        self._weight = 1.0
        self._agreement: Agreement | None = None
        self._agreed: tuple[_Layout, ...] = ()
        self._steps = 0
        """Number of steps with the layout that is agreed on, until it is settled."""
        self._given: list[_Given] = []

    @property
    def worker(self) -> Worker:
        """The worker that exchanges the gradients."""
        if self._worker is None:
            self._worker = worker()
        return self._worker

    @property
    def skipped(self) -> bool:
        """True if the last round is to be applied by none, as some gradients were not finite: they are zeros then."""
        return self.worker.skipped

    @property
    def left_out(self) -> bool:
        """True if a part of this worker's gradients in the last round was not finite, and so did not count."""
        return self.worker.left_out

    def set_weight(self, weight: float) -> None:
        """Set the weight of this worker's gradients, from the next backward on: such as its number of samples.

        Raises:
            InvalidArgumentError: ``weight`` is negative, not finite, or above 1e30.
        """
        self._weight = check_weight(weight)

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket of the present step; the last one is back when the round is over. See `hook`."""
        if bucket.index() == 0:
            self._begin()
        self._given.append(given := self._bind(bucket))
        if self._steps >= _SETTLED:
            self._push(len(self._given) - 1)
        if bucket.is_last():
            self._finish()
        return given.future

    def _begin(self) -> None:
        """Check that a round can begin."""
        worker = self.worker
        if worker.mode != "sync":
            raise UsageError(
                f"the coordinator has --mode {worker.mode}, in which a worker applies several updates a step. torch's "
                "wrapper cannot: wrap the model by gradserver.torch.DistributedDataParallel, and step with a Job"
            )
        if worker.joins:
            raise UsageError(
                "this worker joins a group that trains already, and torch's wrapper has no state from the others: wrap "
                "the model by gradserver.torch.DistributedDataParallel, and give it to a Job"
            )
        worker.boundary()

    def _bind(self, bucket: GradBucket) -> _Given:
        """Give a bucket its memory on the CPU, where it is exchanged."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        layout = _Layout(wire_dtype(buffer), tuple(tuple(one.shape) for one in parameters))
        host = buffer if buffer.device.type == "cpu" else buffer.cpu()  # behind all that the stream has
        return _Given(layout, parameters, buffer, host, Future())

    def _push(self, place: int) -> None:
        """Contribute a bucket to the round that is open."""
        assert self._agreement is not None
        given = self._given[place]
        if place >= len(self._agreed) or self._agreed[place] != given.layout:
            raise OutOfStepError(
                f"bucket {place} has other gradients than in the steps before. One state of the hook is of one model: "
                "make gradserver.torch.Rounds() for each. A graph that changes needs find_unused_parameters=True"
            )
        self.worker.push(self._agreement.first + place, given.host, weight=self._weight)

    def _finish(self) -> None:
        """Finish the round, and give torch the means."""
        layouts = tuple(given.layout for given in self._given)
        if self._steps < _SETTLED:
            if layouts != self._agreed:
                self._agree(layouts)
            self._steps += 1
            for place in range(len(self._given)):
                self._push(place)
        elif len(layouts) < len(self._agreed):
            raise OutOfStepError(f"this step has {len(layouts)} buckets, and those before had {len(self._agreed)}")
        assert self._agreement is not None
        self._agreement.finish(None)
        skipped = self.worker.skipped
        for given in self._given:
            if skipped:
                given.buffer.zero_()
            elif given.buffer is not given.host:
                given.buffer.copy_(given.host)
            given.future.set_result(given.buffer)
        self._given.clear()

    def _agree(self, layouts: Sequence[_Layout]) -> None:
        """Agree with the other workers on the buckets of a step."""
        buckets = []
        for number, given in enumerate(self._given):
            names = [self._names.get(id(one), f"{number}.{place}") for place, one in enumerate(given.parameters)]
            components = map(Component, names, given.layout.shapes)
            buckets.append(Bucket(f"torch.{number}", given.layout.dtype, tuple(components), Op.MEAN))
        self._agreement = None  # its place in the group's plan is free from now on
        self._agreement = self.worker.agree_beside(Plan(tuple(buckets)))
        self._agreed = tuple(layouts)


# torch compares the annotations themselves: so in this module they are no texts.
def hook(state: Rounds, bucket: GradBucket) -> Future[Tensor]:
    """Exchange a bucket of gradients of torch's DistributedDataParallel: give it to ``register_comm_hook``.

    Args:
        state: the rounds of this model, a `Rounds`.
        bucket: torch's bucket.

    Returns:
        A ``torch.futures.Future`` of the bucket's mean over all workers, in the bucket's own memory.

    Raises:
        UsageError: the state is another object, or the coordinator's mode is not "sync".
        GradServerError: the round failed, for example with NonFiniteError or WorkerLostError.
    """
    if not isinstance(state, Rounds):
        raise UsageError(
            f"the state of gradserver's hook is a {type(state).__name__}, and must be gradserver.torch.Rounds(): "
            "model.register_comm_hook(gradserver.torch.Rounds(), gradserver.torch.hook)"
        )
    return state.take(bucket)
