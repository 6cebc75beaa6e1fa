"""Origins of a result: the contributions of which it is the mean, and the fault of a result that is no such mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from gradserver.protocol.shards import Share
from gradserver.tools.chaos import generator, recount
from gradserver.tools.chaos.contributions import Contributions, Means, Wired
from gradserver.tools.chaos.recount import Cut, Row
from gradserver.tools.chaos.workload import Bucket, Workload

Array = npt.NDArray[Any]

_EARLIER: Final = 3
"""Number of earlier rounds that are tried."""
_LIKELY: Final = 4
"""Number of workers of which all combinations are tried, each at the place of its rank."""
_ANYWHERE: Final = 2
"""Number of workers of which all combinations are tried in all places."""
_TRIES: Final = 6000
"""Limit of the means that are tried for one bucket. Three workers lost in a round of three shards have 1,728."""


class Case(NamedTuple):
    """One bucket of one round.

    Attributes:
        workload: the workload of the run.
        number: the round.
        bucket: the bucket.
        contributions: makes the contributions to it.
        means: makes their means.
        owed: what the coordinator can owe to this one: each is tried.
    """

    workload: Workload
    number: int
    bucket: Bucket
    contributions: Contributions
    means: Means
    owed: Sequence[Array]

    @property
    def share(self) -> Share:
        """The bucket's slices."""
        return self.bucket.share

    def given(self, name: str, number: int | None = None) -> Row:
        """Make a worker's contribution to the bucket, in this round or in another one."""
        made = self.contributions.given(name, self.number if number is None else number, self.bucket)
        return name, self.contributions.weight(name, self.number), made.values

    def fits(self, rows: Sequence[Row], cut: Cut, seen: int) -> Wired | None:
        """Compute the mean of these rows, in one step or by levels. Return None if its fingerprint is not ``seen``."""
        for owed in self.owed:
            result = self.means.made(self.bucket, self.number, rows, cut, owed)
            if generator.fingerprint([result.values]) == seen:
                return result
        if not self.workload.seed & generator.LEVELED or cut:  # one of which a part counts went over the coordinator
            return None
        leveled = recount.leveled(rows, self.bucket.size)
        return Wired(leveled) if generator.fingerprint([leveled]) == seen else None

    def parts_of(self, others: Sequence[str]) -> Iterator[dict[str, frozenset[int]]]:
        """List the parts that ``others`` can have contributed before they were lost; the whole comes first."""
        count = self.share.layout.count
        each = [[which for left in range(count, 0, -1) for which in recount.prefixes(self.share, left)]] * len(others)
        for sets in itertools.product(*each):
            yield {name: which for name, which in zip(others, sets, strict=True) if len(which) < count}


class Account(NamedTuple):
    """Contributors to a bucket in the order of member ids, and the slices that counted of partial ones."""

    order: tuple[str, ...]
    cut: Mapping[str, frozenset[int]]

    def slices(self, name: str, whole: int) -> int:
        """Count the slices of ``name`` that counted, if all are ``whole``."""
        if name not in self.order:
            return 0
        return len(self.cut[name]) if name in self.cut else whole


def slices_of(name: str, buckets: Sequence[Bucket], accounts: Sequence[Account]) -> list[int]:
    """Count the slices of ``name`` that counted in each bucket."""
    return [account.slices(name, bucket.slices) for bucket, account in zip(buckets, accounts, strict=True)]


class People(NamedTuple):
    """Possible contributors to a round, by the reports of the workers.

    Attributes:
        sure: workers that finished it, in the order of member ids: they count in full.
        perhaps: workers that began it and were lost, each with its place: the number of sure ones before it.
    """

    sure: tuple[str, ...]
    perhaps: Mapping[str, int]

    def ordered(self, some: Sequence[str]) -> tuple[str, ...]:
        """Order the sure workers and ``some`` of the others, each at its probable place."""
        return self.placed([(self.perhaps[name], name) for name in some])

    def may_be(self, order: Sequence[str]) -> bool:
        """Tell whether ``order`` can be that of the contributors: none is missing, unknown or there twice."""
        some, sure = set(order), set(self.sure)
        return len(some) == len(order) and sure <= some <= sure | self.perhaps.keys()

    def placed(self, places: Sequence[tuple[int, str]]) -> tuple[str, ...]:
        """Order the sure workers and others, each behind the given number of sure ones. Ties keep their order."""
        order: list[str] = []
        for index in range(len(self.sure) + 1):
            order += [name for place, name in places if place == index]
            order += self.sure[index : index + 1]
        return tuple(order)


def search(case: Case, people: People, seen: int, likely: Iterable[Sequence[str]] = ()) -> tuple[Wired, Account] | None:
    """Search a mean with the fingerprint ``seen``, of all sure workers and some of the others, in full or in part.

    A lost worker can have contributed to one bucket and not to the next. So the ``likely`` orders, such as the one
    that fitted the last bucket, are only where the search begins.
    """
    rows = {name: case.given(name) for name in (*people.sure, *people.perhaps)}
    for order, cut in itertools.islice(_accounts(case, people, likely), _TRIES):
        if (result := case.fits([rows[name] for name in order], cut, seen)) is not None:
            return result, Account(order, cut)
    return None


def _accounts(case: Case, people: People, likely: Iterable[Sequence[str]]) -> Iterator[Account]:
    for order in _orders(people, likely):
        for cut in case.parts_of([name for name in order if name in people.perhaps]):
            yield Account(order, cut)


def _orders(people: People, likely: Iterable[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    yield from (tuple(order) for order in likely if people.may_be(order))
    names = sorted(people.perhaps, key=lambda name: people.perhaps[name])
    for count in range(min(_LIKELY, len(names)) + 1):
        for some in itertools.combinations(names, count):
            yield people.ordered(some)
    places = range(len(people.sure) + 1)
    for count in range(1, min(_ANYWHERE, len(names)) + 1):  # a rank can be one of an earlier membership
        for some in itertools.permutations(names, count):
            for chosen in itertools.combinations_with_replacement(places, count):
                yield people.placed(list(zip(chosen, some, strict=True)))


def explain(case: Case, people: People, strangers: Sequence[str], seen: int) -> tuple[str, str]:
    """Classify and describe a wrong result: a contribution is in it twice, too old or missing, or it is unknown.

    ``strangers`` are workers that did not contribute to this round.
    """
    for some in ((), tuple(people.perhaps)):
        order = people.ordered(some)
        rows = [case.given(name) for name in order]
        for index, name in enumerate(order):
            found = _explain_one(case, rows, index, seen, name in people.sure)
            if found is not None:
                return found
        for stranger in strangers:
            for place in range(len(rows) + 1):
                if case.fits([*rows[:place], case.given(stranger), *rows[place:]], {}, seen) is not None:
                    return "wrong", f"the mean with {stranger}, which was not in the round"
    return "wrong", f"{seen:016x}, which is not the mean of the contributions"


def _explain_one(case: Case, rows: Sequence[Row], index: int, seen: int, finished: bool) -> tuple[str, str] | None:
    name = rows[index][0]
    before, own, behind = rows[:index], rows[index], rows[index + 1 :]
    for twice in ([*before, own, own, *behind], [*rows, own]):
        if case.fits(twice, {}, seen) is not None:
            return "double", f"the mean with {name} in it twice"
    if finished and case.fits([*before, *behind], {}, seen) is not None:
        return "lost", f"the mean without {name}, which took part to the end"
    for part in _some(case.share.layout.count) if finished else ():
        if case.fits(rows, {name: part}, seen) is not None:
            return "lost", f"the mean with a part of {name} only, which took part to the end"
    for earlier in range(max(0, case.number - _EARLIER), case.number):
        if case.fits([*before, case.given(name, earlier), *behind], {}, seen) is not None:
            return "double", f"the mean with the contribution of {name} to round {earlier}"
    return None


def _some(count: int) -> Iterator[frozenset[int]]:
    """List the choices of slices, except for none and all; of many slices the prefixes only."""
    if count > 4:
        yield from (frozenset(range(stop)) for stop in range(1, count))
        return
    for some in range(1, count):
        yield from (frozenset(chosen) for chosen in itertools.combinations(range(count), some))
