"""The commit of a direct round: its plan, and the marks that name parameters with gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import Kind, Op
from gradserver.protocol.limits import SLICE_BYTES
from gradserver.protocol.plan import Bucket, Component, Plan


def commit_plan(plan: Plan) -> Plan:
    """Return the plan of a direct round: its commit has an element for each parameter, or bucket if these are many.

    An element is 0, or a number of the worker's gradient of that parameter that is not finite.
    """
    gradients = [bucket for bucket in plan.buckets if bucket.op is Op.MEAN]
    names = [component.name for bucket in gradients for component in bucket.components]
    if len(names) * FLOAT32.itemsize > SLICE_BYTES:
        names = [bucket.key for bucket in gradients]
    components = tuple(Component(name, (1,)) for name in names) or (Component("round", (1,)),)
    return Plan((Bucket("gradients", FLOAT32, components, kind=Kind.COMMIT),))


def mark(plan: Plan, gave: Iterable[tuple[int, Tensor]], marks: Tensor) -> bool:
    """Set the marks of parameters, or buckets, that are not finite. Return true if any is not.

    Args:
        plan: the buckets of gradients.
        gave: contributions of this worker, by the bucket's place in the plan.
        marks: elements of the commit, all zero.
    """
    means = [place for place, bucket in enumerate(plan.buckets) if bucket.op is Op.MEAN]
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
