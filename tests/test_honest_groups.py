"""Honest groups, simulated: no worker is named where workers have similar data."""

from __future__ import annotations

import numpy as np
import pytest

from gradserver.engine.figures import OfMember
from tests.honest_groups import KINDS, WORKERS, figures_of, simulate
from tests.test_outliers import figures

OWN_DATA = {"one with its own classes", "own targets"}
"""Kinds in which the gradients of a worker can be the mirror image of those of the others."""


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_simulation_compares_as_the_reducer_does(workers: int) -> None:
    random = np.random.default_rng(workers)
    weights = [float(weight) for weight in random.integers(1, 9, workers)]
    rows = (1 + random.normal(size=(workers, 50))) * 10 ** random.uniform(-1, 1, (workers, 1))
    (found,) = figures_of(rows[None], np.array([weights]))
    for one, real in zip(found, figures(list(rows), weights).members, strict=True):
        assert isinstance(one, OfMember)
        assert one == pytest.approx(real, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OWN_DATA))
def test_no_honest_worker_is_named(kind: str) -> None:
    assert [text for workers in WORKERS[:3] for text in simulate(kind, 1, workers, 150).texts] == []


@pytest.mark.long
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OWN_DATA))
def test_no_honest_worker_is_named_in_many_rounds(kind: str, workers: int) -> None:
    for seed in range(4):
        found = simulate(kind, seed, workers, 2000)
        # One element or two tell little: a norm may be next to nothing by chance, and a cosine has two values.
        assert len(found.texts) <= (0 if found.numel >= 10 else 8), found.texts
