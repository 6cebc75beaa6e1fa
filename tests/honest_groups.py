"""Honest groups, simulated: in how many rounds of how many groups an honest worker is named.

`python -m tests.honest_groups --groups 40 --seed 1` prints it for each kind of group. The bounds of
`gradserver.engine.control.outliers` were not chosen by these groups, and each seed draws others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.engine.control.outliers import Outliers
from gradserver.engine.figures import OfMember

Array = npt.NDArray[np.float64]
WORKERS: Final = (2, 3, 5, 8, 16)
_CHUNK: Final = 500
"""Rounds that are made together."""
_LARGE: Final = 2.0


def figures_of(gradients: Array, weights: Array) -> list[list[OfMember]]:
    """Compare gradients, by round and worker, as `gradserver.comparison` does: a test holds these side by side."""
    products = gradients @ gradients.transpose(0, 2, 1)
    squares = np.einsum("tii->ti", products)
    usual = (squares.min(1) if squares.shape[1] == 2 else np.median(squares, axis=1))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = np.where(squares > _LARGE**2 * usual, np.sqrt(usual / squares), 1.0)
    shares = weights / weights.sum(1, keepdims=True)
    parts, rest = shares * norms, 1 - shares
    inner = np.einsum("tij,tj->ti", products, parts)
    of_mean = np.einsum("ti,ti->t", inner, parts)[:, None]
    others = np.maximum((of_mean - 2 * parts * inner + parts**2 * squares) / rest**2, 0.0)
    inner = (inner - parts * squares) / rest
    return [
        [OfMember(place, *each) for place, each in enumerate(zip(*rows, strict=True))]
        for rows in zip(squares.tolist(), inner.tolist(), others.tolist(), strict=True)
    ]


@dataclass(slots=True)
class Found:
    """Outcome of some groups: their rounds, those in which a worker was named, and what was said of it.

    Attributes:
        numel: elements of a gradient of the one group that it is of.
    """

    numel: int = 0
    rounds: int = 0
    named: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Count another group as well."""
        self.rounds += other.rounds
        self.named += other.named
        self.texts += other.texts

    @property
    def most(self) -> float:
        """Bound of the rate of rounds with a false name, which holds with a confidence of 95 %."""
        low, high = 0.0, self.named + 10 * math.sqrt(self.named + 1) + 10
        while high - low > 1e-6:
            middle = (low + high) / 2
            chance = sum(math.exp(k * math.log(middle) - middle - math.lgamma(k + 1)) for k in range(self.named + 1))
            low, high = (middle, high) if chance > 0.05 else (low, middle)
        return high / max(self.rounds, 1)


class Group:
    """Draw of one honest group: workers, elements, noise, and a true gradient that turns."""

    def __init__(self, random: np.random.Generator, workers: int) -> None:
        self.random, self.workers = random, workers
        self.numel = int(random.choice([1, 2, 10, 60, 300]))
        self.noise = float(10 ** random.uniform(-1, 2))
        self._turn = float(random.choice([0.0, 0.01, 0.1, 0.5]))
        self._true = random.normal(size=self.numel)

    def true(self) -> Array:
        """Return the true gradients of the next rounds."""
        rows = np.empty((_CHUNK, self.numel))
        for number in range(_CHUNK):
            self._true = (1 - self._turn) * self._true + math.sqrt(self._turn) * self.random.normal(size=self.numel)
            rows[number] = self._true
        return rows

    def rows(self, noise: Any = None) -> Array:
        """Return gradients of the next rounds, by round and worker."""
        scatter = self.noise if noise is None else noise
        shape = _CHUNK, self.workers, self.numel
        return np.asarray(self.true()[:, None, :] + scatter * self.random.normal(size=shape))

    def ones(self) -> Array:
        """Return weights that are all alike."""
        return np.ones((_CHUNK, self.workers))


Course = Iterator[tuple[Array, Array]]


def _equal(group: Group) -> Course:
    while True:
        yield group.rows(), group.ones()


def _heavy_norms(group: Group) -> Course:
    """Yield gradients with norms that are Student-t with 2 to 3 degrees of freedom."""
    freedom = group.random.uniform(2, 3)
    while True:
        scale = np.abs(group.random.standard_t(freedom, size=(_CHUNK, group.workers, 1)))
        yield scale * group.rows(), group.ones()


def _heavy_elements(group: Group) -> Course:
    freedom = group.random.uniform(2, 3)
    while True:
        tails = group.random.standard_t(freedom, size=(_CHUNK, group.workers, group.numel))
        yield group.rows(0.0) + group.noise * tails, group.ones()


def _weighed(group: Group) -> Course:
    """Yield gradients of batches of 1 to 64 samples, which the weights say."""
    sizes = np.floor(2 ** group.random.uniform(0, 6, group.workers))
    while True:
        yield group.rows((group.noise / np.sqrt(sizes))[:, None]), group.ones() * sizes


def _changing(group: Group) -> Course:
    """Yield gradients of batches that have another size in each round, which the weights say."""
    while True:
        sizes = np.floor(2 ** group.random.uniform(0, 6, (_CHUNK, group.workers)))
        yield group.rows((group.noise / np.sqrt(sizes))[:, :, None]), sizes


def _unweighed(group: Group) -> Course:
    """Yield gradients of batches that differ by a factor of 16 at most, and all have weight 1."""
    sizes = 2 ** group.random.uniform(0, 4, group.workers)
    while True:
        yield group.rows((group.noise / np.sqrt(sizes))[:, None]), group.ones()


def _decaying(group: Group) -> Course:
    """Yield gradients that shrink: the true ones, or all, down to nothing."""
    rate, all_shrink = 10 ** group.random.uniform(-3, -0.5), group.random.random() < 0.5
    begin = 0
    while True:
        scale = np.exp(-rate * np.arange(begin, begin + _CHUNK))[:, None, None]
        true = group.rows(0.0)
        scatter = group.noise * group.random.normal(size=(_CHUNK, group.workers, group.numel))
        yield scale * (true + scatter) if all_shrink else scale * true + scatter, group.ones()
        begin += _CHUNK


def _learned(group: Group) -> Course:
    """Yield gradients of workers that learn their samples one after another, so that theirs vanish."""
    rates = 10 ** group.random.uniform(-3, -1, group.workers)
    begin = 0
    while True:
        steps = np.arange(begin, begin + _CHUNK)[:, None]
        yield np.exp(-np.minimum(rates * steps, 300.0))[:, :, None] * group.rows(), group.ones()
        begin += _CHUNK


def _spikes(group: Group) -> Course:
    """Yield gradients in which all spike together now and then, for some rounds."""
    while True:
        rows = group.rows()
        for start in group.random.integers(0, _CHUNK - 20, 4):
            rows[start : start + group.random.integers(1, 20)] *= 10 ** group.random.uniform(1, 6)
        yield rows, group.ones()


def _lone_spikes(group: Group) -> Course:
    """Yield gradients with a bad batch of one worker now and then: up to 100 times the others."""
    while True:
        rows = group.rows()
        bad = group.random.random((_CHUNK, group.workers, 1)) < 0.02
        yield np.where(bad, 10 ** group.random.uniform(1, 2, bad.shape), 1.0) * rows, group.ones()


def _embedding(group: Group) -> Course:
    """Yield rows of embeddings: some are frequent, most are rare, and other ones are measured each time."""
    frequent = 10 ** group.random.uniform(-3, 0, (1, 1, 12))
    while True:
        there = group.random.random((_CHUNK, group.workers, 12)) < frequent
        values = group.random.normal(size=(_CHUNK, group.workers, 12, 8)) * group.noise + 1.0
        yield (values * there[..., None]).reshape(_CHUNK, group.workers, -1), group.ones()


def _idle(group: Group) -> Course:
    """Yield gradients that are zero at some workers: for some rounds, or a worker nearly always."""
    share = group.random.uniform(0, 1, group.workers)
    while True:
        rows = group.rows()
        rows[group.random.random((_CHUNK, group.workers)) < share] = 0
        yield rows, group.ones()


def _classes(group: Group, split: Array, rate: float) -> Course:
    """Yield gradients of a softmax regression, in which each worker has classes by ``split``."""
    random, classes, features, size = group.random, split.shape[1], 8, 16
    centres = random.normal(size=(classes, features)) * random.uniform(0.3, 3)
    weights = np.zeros((classes, features + 1))
    places = np.arange(group.workers)[:, None]
    bounds = split.cumsum(1)
    bounds[:, -1] = 1.0
    while True:
        rows = np.empty((_CHUNK, group.workers, weights.size))
        for number in range(_CHUNK):
            labels = (random.random((group.workers, size, 1)) > bounds[:, None, :]).sum(2)
            inputs = np.ones((group.workers, size, features + 1))
            inputs[..., :-1] = centres[labels] + random.normal(size=(group.workers, size, features))
            logits = inputs @ weights.T
            chances = np.exp(logits - logits.max(2, keepdims=True))
            chances /= chances.sum(2, keepdims=True)
            chances[places, np.arange(size), labels] -= 1
            gradient = chances.transpose(0, 2, 1) @ inputs / size
            rows[number] = gradient.reshape(group.workers, -1)
            weights -= rate * gradient.mean(0)
        yield rows, group.ones()


def _own_classes(group: Group) -> Course:
    """Yield gradients of workers with classes that no other worker has."""
    split = np.eye(group.workers).repeat(2, axis=1) / 2
    return _classes(group, split, float(10 ** group.random.uniform(-3, 0)))


def _shares_of_classes(group: Group) -> Course:
    """Yield gradients of workers with more of some classes than of others."""
    split = group.random.dirichlet([10 ** group.random.uniform(-1, 1)] * 10, group.workers)
    return _classes(group, split, float(10 ** group.random.uniform(-3, 0)))


def _one_of_its_own(group: Group) -> Course:
    """Yield gradients of workers with the same classes, but for one that has others."""
    split = np.tile(np.repeat([0.2, 0.0], 5), (group.workers, 1))
    split[group.random.integers(group.workers)] = np.repeat([0.0, 0.2], 5)
    return _classes(group, split, float(10 ** group.random.uniform(-3, 0)))


def _targets(group: Group) -> Course:
    """Yield gradients of squares, with a target of its own for each worker."""
    targets = group.random.normal(size=(group.workers, group.numel)) + group.random.uniform(0, 3)
    weights, rate = np.zeros(group.numel), 10 ** group.random.uniform(-3, -0.5)
    scatter = group.random.choice([0.0, 0.01, 0.3, 3.0])
    while True:
        rows = np.empty((_CHUNK, group.workers, group.numel))
        for number in range(_CHUNK):
            rows[number] = weights - targets + scatter * group.random.normal(size=targets.shape)
            weights = weights - rate * rows[number].mean(0)
        yield rows, group.ones()


KINDS: Final[dict[str, Callable[[Group], Course]]] = {
    "equal": _equal,
    "norms with heavy tails": _heavy_norms,
    "elements with heavy tails": _heavy_elements,
    "batches that weights say": _weighed,
    "batches that change": _changing,
    "batches without weights": _unweighed,
    "gradients that shrink": _decaying,
    "workers that have learned": _learned,
    "spikes of all": _spikes,
    "spikes of one": _lone_spikes,
    "embeddings": _embedding,
    "idle workers": _idle,
    "own classes": _own_classes,
    "shares of classes": _shares_of_classes,
    "one with its own classes": _one_of_its_own,
    "own targets": _targets,
}


def simulate(kind: str, seed: int, workers: int, rounds: int) -> Found:
    """Judge the rounds of one group."""
    group = Group(np.random.default_rng([seed, workers, sorted(KINDS).index(kind)]), workers)
    outliers, found = Outliers(), Found(numel=group.numel)
    for rows, weights in KINDS[kind](group):
        for members, of in zip(figures_of(rows, weights), weights.tolist(), strict=True):
            named = outliers.take(members, dict(enumerate(of))).new
            found.rounds += 1
            found.named += bool(named)
            found.texts += [f"{workers} workers, {group.numel} elements, round {found.rounds}: {one}" for one in named]
            if found.rounds == rounds:
                return found
    raise AssertionError("a course has no end")


def main() -> None:
    """Print in how many rounds an honest worker was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help="groups of each kind and number of workers")
    parser.add_argument("--rounds", type=int, default=2000, help="rounds of each group")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--show", type=int, default=2, help="verdicts of each kind that are printed")
    given = parser.parse_args()
    total, began = Found(), time.monotonic()
    for kind in given.kinds:
        of_kind = Found()
        for workers in WORKERS:
            for number in range(given.groups):
                of_kind.add(simulate(kind, 1000 * given.seed + number, workers, given.rounds))
        total.add(of_kind)
        print(f"{kind:28} {of_kind.named:6} of {of_kind.rounds} rounds", flush=True)
        for text in of_kind.texts[: given.show]:
            print("   ", text)
    rate = total.named / max(total.rounds, 1)
    print(f"all: {total.named} of {total.rounds} rounds, {rate:.1e}; at most {total.most:.1e} (95 % confidence)")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
