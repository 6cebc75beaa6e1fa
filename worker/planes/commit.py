"""The commit of a direct round: its plan, and whether results are finite; else, the marks that name parameters.

    marks, one for each parameter   times, and 1       norms, one for each mean, and 1   digest
    ┌─────┬─────┬─────────┬─────┐   ┌─────┬─────┬───┐  ┌─────┬─────┬─────┬─────┬─────┐   ┌─────┬─────┬─────┬─────┐
    │  0  │ nan │    …    │  0  │   │ of rounds │ 1 │  │  of the results       │  1  │   │   of the results      │
    └─────┴─────┴─────────┴─────┘   └─────┴─────┴───┘  └─────┴─────┴─────┴─────┴─────┘   └─────┴─────┴─────┴─────┘

Members that clip their gradients give norms. All have the same results, so the mean of their norms is the norm. It is
the same number at all of them, and takes no message more. The element behind the norms has the part that gave any.

The digest is that of `gradserver.protocol.digest`, in four numbers of 16 bits. The lowest rank gives it, if the ledger
wants it. So the ledger's digest of its commit is one of the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from gradserver.protocol.digest import digest, places
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import NonFiniteError
from gradserver.protocol.exchange import Kind, Op
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.worker.devices.cuda import fetch, fetch_whole
from gradserver.worker.devices.squares import squares_of
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.planes.trial import FIGURES

_DIGEST: Final = 4
"""Elements that have the digest."""
_LARGEST: Final = torch.finfo(torch.float32).max
"""The largest norm that is given: one of finite gradients is finite."""
_BITS: Final = 16
"""Bits of the digest in each of them: a float32 holds any number of so many."""


def commit_plan(plan: Plan) -> Plan:
    """Return the plan of a direct round: its commit has an element for each parameter, or bucket if these are many.

    An element is 0, or a number of the worker's gradient of that parameter that is not finite.
    """
    gradients = [bucket for bucket in plan.buckets if bucket.op is Op.MEAN]
    names = [component.name for bucket in gradients for component in bucket.components]
    if len(names) * FLOAT32.itemsize > SLICE_BYTES:
        names = [bucket.key for bucket in gradients]
    further = Component("times", (FIGURES,)), Component("norms", (len(gradients) + 1,)), Component("digest", (_DIGEST,))
    components = (*(Component(name, (1,)) for name in names), *further)
    return Plan((Bucket("gradients", FLOAT32, components, kind=Kind.COMMIT),))


def sign(plan: Plan, results: Mapping[int, Tensor], commit: Tensor) -> None:
    """Put the digest of a round's results into its commit.

    Args:
        plan: the buckets.
        results: sums, which have yet to be divided, and other results, by the bucket's place in the plan.
        commit: elements of the commit.
    """
    total, begins = 0, places(plan)
    for place, result in results.items():
        on_host = result if result.device.type == "cpu" else fetch(result)
        total += digest(on_host.contiguous().view(torch.uint8).numpy(), begins[place])
    for number in range(_DIGEST):
        commit[number - _DIGEST] = (total >> _BITS * number) & ((1 << _BITS) - 1)


def measure(results: Sequence[Tensor], commit: Tensor) -> None:
    """Put norms into a commit.

    Args:
        results: the result of each mean, in the order of the plan.
        commit: elements of the commit.
    """
    norms = [math.sqrt(squares) for squares in squares_of(results)]
    known = [min(norm, _LARGEST) if math.isfinite(norm) else norm for norm in norms]
    _norms(commit, len(results)).copy_(torch.tensor([*known, 1.0], dtype=torch.float64))


def measured(commit: Tensor, means: int) -> Tensor | None:
    """Return the norms of so many means, in float64, from the result of a commit; None if no member gave any."""
    norms = _norms(commit, means).double()
    return norms[:-1] / norms[-1] if norms[-1] > 0 else None


def _norms(commit: Tensor, means: int) -> Tensor:
    return commit[-_DIGEST - means - 1 : -_DIGEST]


def times(commit: Tensor, means: int) -> Tensor:
    """Return the elements for a vote on the way of rounds (`gradserver.worker.planes.trial`)."""
    return commit[-_DIGEST - means - 1 - FIGURES : -_DIGEST - means - 1]


def overflow(number: int) -> NonFiniteError:
    """Return the error of a round with a mean that is not finite, though what it is of is."""
    return NonFiniteError(
        f"the mean of round {number} overflowed, though every contribution was finite: look at the learning rate, or "
        f"scale the loss down",
        round=number,
    )


def mark(plan: Plan, gave: Iterable[tuple[int, Tensor]], marks: Tensor) -> bool:
    """Set the marks of parameters, or buckets, that are not finite. Return true if any is not.

    Args:
        plan: the buckets of gradients.
        gave: contributions of this worker, by the bucket's place in the plan.
        marks: elements of the commit, of which none is set.
    """
    means = [place for place, bucket in enumerate(plan.buckets) if bucket.op is Op.MEAN]
    marks = marks[: -_DIGEST - len(means) - 1 - FIGURES]
    by_parameter = marks.numel() > len(means)
    sizes = {place: plan.buckets[place].sizes if by_parameter else (plan.buckets[place].numel,) for place in means}
    firsts = dict(zip(means, accumulate((len(sizes[place]) for place in means), initial=0), strict=False))
    for place, flat in gave:
        for number, piece in enumerate(torch.split(flat, list(sizes[place])), firsts[place]):
            wrong = piece[~torch.isfinite(piece)]
            if wrong.numel():
                value = float(wrong[0].real)
                marks[number] = float("nan") if math.isfinite(value) else value  # of a complex number, either part
    return bool(torch.count_nonzero(marks))


def are_finite(means: Iterable[Tensor], on_host: Communicator | None, signal: Signal, timeout: float) -> bool:
    """Return whether all of ``means`` are finite. Each one is looked at before the next one is asked for.

    The members on one host have the same means, and share its memory and processors. So each looks at its part of the
    means, and one number has what all have found. Members on several hosts look while later means are on their way: for
    them a number would take longer.

    Args:
        means: results, which all members of ``on_host`` have.
        on_host: communicator of the members that share the look; None if this member looks at all.
        signal: interrupts the wait for them.
        timeout: limit of that wait, in seconds.
    """
    if on_host is None:
        return _are_finite(means)
    found = torch.tensor([not _are_finite(map(on_host.part, means))], dtype=torch.int32)
    on_host.all_reduce(found, Op.MAX, signal).wait(timeout)
    return not found


def _are_finite(means: Iterable[Tensor]) -> bool:
    suspects: list[Tensor] = []
    on_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for mean in means:
        # A sum is finite if all its terms are, unless it overflows, as it soon does with fp16.
        flag = torch.isfinite(mean.sum(dtype=torch.float32 if mean.dtype == torch.float16 else None))
        if mean.device.type != "cpu":
            on_device.setdefault(mean.device, []).append((flag, mean))
        elif not flag:
            suspects.append(mean)
    for found in on_device.values():
        flags = fetch(torch.stack([flag for flag, _ in found])).tolist()  # one wait, for an event, for all of them
        suspects += [mean for known, (_, mean) in zip(flags, found, strict=True) if not known]
    return all(fetch_whole(torch.isfinite(mean).all()) for mean in suspects)
