"""A group of real workers that follow a program, and the laws that their results must keep.

A `Node` is one worker process. It joins, agrees on a plan of one or more modules, and does the acts of the program one
after the other, as any script: rounds of gradients, and collectives. `Group` starts the nodes of one
`tests.session_world.World`, and afterwards compares what they hold with what the ledger says.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gradserver.engine.policy import Policy
from gradserver.engine.records import Boundary, Epoch, Round, RoundRecord
from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.errors import (
    ConnectionLostError,
    GradServerError,
    LeftOutError,
    MembershipChangedError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Layout, Stream
from gradserver.protocol.messages import Join
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.worker.agreement import Agreement
from gradserver.worker.client import Worker
from gradserver.worker.connect import Wish, join
from gradserver.worker.member.learner import Stage
from tests.engine_harness import TIMEOUT
from tests.session_world import URL, World, running

Doubles = npt.NDArray[np.float64]
SECONDS = 3.0
"""Seconds of virtual time from the last of some losses to the end of the next round, at most."""
PATIENCE = 60.0


class Act(NamedTuple):
    """A step of the program: a round of a module, or a collective."""

    kind: str = "round"
    numel: int = 1
    root: int = 0
    section: int = 0
    direct: bool = False
    """True if members reduce the round among themselves (`tests.direct_session_group`)."""


class Outcome(NamedTuple):
    """Outcome of a collective at one node: members by rank, and the result; or the error."""

    ids: tuple[int, ...]
    value: Any
    error: GradServerError | None = None


class Results(NamedTuple):
    """A round as one node saw it."""

    counts: bool
    """True if what it gave was to count."""
    weights: dict[int, float]
    """The sum of weights of each bucket."""
    values: dict[int, Doubles]
    epoch: int
    """The epoch behind it."""


@dataclass(eq=False)
class Node:
    """One worker process.

    Attributes:
        uid: a number that no other process has.
        rounds: what it got, by round.
        outcomes: what became of collectives, by their place in the program.
        state: the sum of all results, by bucket.
    """

    group: Group
    uid: int
    name: str
    rank: int = -1
    waits: bool = False
    at: int = 0
    worker: Worker | None = None
    finished: bool = False
    closed: bool = False
    error: GradServerError | None = None
    rounds: dict[int, Results] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    state: list[Doubles] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    began: float = 0.0
    """Time at which it was let in."""
    left: int = 0
    """Rounds that were left in the program when it was ready to get the state."""

    @property
    def stage(self) -> Stage:
        """Stage of its way into the group."""
        return Stage.JOINING if self.worker is None else self.worker._session.stage

    @property
    def is_inside(self) -> bool:
        """True if it contributes, or was told that it is to."""
        return self.worker is not None and self.worker._session.member.is_inside

    @property
    def counts(self) -> bool:
        """True if it contributes, or was told that it is to: the coordinator has written that down.

        A group that does not wait for all may go on without a learner that observes earlier rounds until then.
        """
        is_in = self.is_inside if self.group.is_patient else self.stage in (Stage.ENTERED, Stage.MEMBER)
        return self.rank >= 0 or is_in or any(results.counts for results in self.rounds.values())

    @property
    def member_id(self) -> int:
        """Its identity in the group."""
        assert self.worker is not None
        return self.worker._session.member.identity.member_id

    def run(self) -> None:
        """Follow the program."""
        try:
            self._join()
            self._follow()
            self.finished = True
        except GradServerError as error:
            self.error = error

    def _join(self) -> None:
        group = self.group
        self.state = [np.zeros(size) for size in group.buckets]
        wish = Join("default", self.name, self.rank, 0 if self.rank < 0 else group.size, TIMEOUT)
        self.worker = worker = join(Wish(URL, wish, "tcp", "fp32", PATIENCE))
        self.began = group.world.now
        worker.serve_state(self._snapshot)
        for plan in group.plans:
            self.agreements.append(worker.agree_beside(plan))
        if worker.joins:
            self.left = group.rounds - len(group.world.ends)
            number = worker.enter(self._install, self.waits)
            assert number == worker.round
            self.at = group.place_of_round(number)

    def _snapshot(self) -> dict[str, Any]:
        assert self.worker is not None
        return {"round": self.worker.round, "state": self.state}

    def _install(self, tree: dict[str, Any]) -> None:
        self.state = [np.array(one) for one in tree["state"]]

    def _follow(self) -> None:
        program, chance = self.group.program, self.group.world.random
        while self.at < len(program):
            act = program[self.at]
            if act.kind == "round":
                self._exchange(act, chance)
            elif self.stage is Stage.MEMBER:
                self._collect(act)
            self.at += 1

    def _exchange(self, act: Act, chance: random.Random) -> None:
        group, worker = self.group, self.worker
        assert worker is not None
        number, agreement, session = worker.round, self.agreements[act.section], worker._session
        parts, counts = list(agreement.parts), False
        chance.shuffle(parts)
        data, handles = dict[int, Doubles](), {}
        for part in parts:
            data[part] = group.given(self.uid, number, part).copy()
            group.pushed[self.member_id, number].add(self.uid)
            handles[part] = worker.push(part, data[part], weight=group.weight(self.uid, number))
            plan = session.plan
            assert plan is not None
            key, operation = ExchangeKey(Stream.BUCKET, number, part), plan.buckets[part].operation
            self.layouts[part], _ = session.member.exchanges.table.share(key, operation)
            counts = self.stage is not Stage.OBSERVING
            if chance.random() < 0.3:
                group.world.scheduler.pause()
            group.dawdle()
        agreement.finish(None)
        weights = {part: handle.weight for part, handle in handles.items()}
        self.rounds[number] = Results(counts, weights, {part: data[part].copy() for part in parts}, worker.epoch)
        for part in parts:
            self.state[part] += data[part]

    def _collect(self, act: Act) -> None:
        worker = self.worker
        assert worker is not None
        ids = worker._session.membership.member_ids
        try:
            value = COLLECTIVES[act.kind](self, worker, act)
            self.outcomes[self.at] = Outcome(ids, value)
        except (MembershipChangedError, WorkerLostError, ConnectionLostError) as error:
            if worker.closed:
                raise
            self.outcomes[self.at] = Outcome(ids, None, error)

    def tally(self, numel: int = 1) -> npt.NDArray[np.int64]:
        """Return numbers in which this member has a digit of its own."""
        return tally(self.member_id, self.at, numel)

    def close(self) -> None:
        """Leave."""
        assert self.worker is not None
        self.worker.close("done")
        self.closed = True


def tally(member_id: int, at: int, numel: int = 1) -> npt.NDArray[np.int64]:
    """Return what a member gives to the collective at a place of the program."""
    return np.array([8**member_id * (1 + (at + each) % 3) for each in range(numel)], np.int64)


Do = Callable[[Node, Worker, Act], Any]


def _rows(node: Node, act: Act, uneven: bool) -> list[npt.NDArray[np.int64]]:
    """Return what a node has for each rank: its tally, and the receiver's rank."""
    assert node.worker is not None
    sizes = [act.numel + uneven * rank for rank in range(node.worker.world_size)]
    return [node.tally(size) * 8 + rank for rank, size in enumerate(sizes)]


def _all_reduce(op: Literal["sum", "max"], node: Node, worker: Worker, act: Act) -> Any:
    return worker.all_reduce(node.tally(act.numel), op=op).tolist()


def _barrier(_node: Node, worker: Worker, _act: Act) -> Any:
    worker.barrier()
    return None


def _broadcast(node: Node, worker: Worker, act: Act) -> Any:
    return worker.broadcast(node.tally(act.numel), root=act.root % worker.world_size).tolist()


def _all_gather(node: Node, worker: Worker, act: Act) -> Any:
    return worker.all_gather(node.tally(act.numel)).tolist()


def _reduce_scatter(node: Node, worker: Worker, act: Act) -> Any:
    data = np.concatenate(_rows(node, act, False))
    return worker.reduce_scatter(data, op="sum").tolist()


def _gather(node: Node, worker: Worker, act: Act) -> Any:
    found = worker.gather(node.tally(act.numel), root=act.root % worker.world_size)
    return None if found is None else found.tolist()


def _scatter(node: Node, worker: Worker, act: Act) -> Any:
    root = act.root % worker.world_size
    rows = np.stack(_rows(node, act, False)) if worker.rank == root else None
    return worker.scatter(np.zeros(act.numel, np.int64), rows, root=root).tolist()


def _all_to_all(node: Node, worker: Worker, act: Act) -> Any:
    return worker.all_to_all(np.stack(_rows(node, act, False))).tolist()


def _uneven(node: Node, worker: Worker, act: Act) -> Any:
    return [row.tolist() for row in worker.all_to_all(_rows(node, act, True))]


def _several(node: Node, worker: Worker, act: Act) -> Any:
    """Have three collectives under way at once, and return what becomes of each: its result, or the error."""
    data, size = np.concatenate(_rows(node, act, False)), act.numel
    handles = [
        worker.all_to_all(data.reshape(-1, size), async_op=True),
        worker.all_reduce(node.tally(size), op="sum", async_op=True),
        worker.reduce_scatter(data, op="sum", async_op=True),
    ]
    ends: list[Any] = []
    for handle in handles:
        try:
            ends.append(handle.wait().tolist())
        except (MembershipChangedError, WorkerLostError, ConnectionLostError) as error:
            if worker.closed:
                raise
            ends.append(error)
    return ends


def _gather_object(node: Node, worker: Worker, act: Act) -> Any:
    return worker.all_gather_object(["x" * (node.member_id + act.numel), int(node.tally()[0])])


def _broadcast_object(node: Node, worker: Worker, act: Act) -> Any:
    return worker.broadcast_object({"it": int(node.tally()[0])}, root=act.root % worker.world_size)


def _scatter_object(node: Node, worker: Worker, act: Act) -> Any:
    root = act.root % worker.world_size
    values = [[int(row[0])] * rank for rank, row in enumerate(_rows(node, act, False))]
    return worker.scatter_object(values if worker.rank == root else None, root=root)


def _transfer(node: Node, worker: Worker, act: Act) -> Any:
    source = act.root % worker.world_size
    target = (source + 1) % worker.world_size
    if source == target:
        return None
    if worker.rank == source:
        worker.send(node.tally(act.numel), target)
    elif worker.rank == target:
        return worker.recv(np.zeros(act.numel, np.int64), source).tolist()
    return None


COLLECTIVES: dict[str, Do] = {
    "sum": partial(_all_reduce, "sum"),
    "max": partial(_all_reduce, "max"),
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "uneven": _uneven,
    "several": _several,
    "gather_object": _gather_object,
    "broadcast_object": _broadcast_object,
    "scatter_object": _scatter_object,
    "transfer": _transfer,
}
MAY_BE_LOST = {"reduce_scatter", "gather", "scatter", "all_to_all", "uneven", "several", "scatter_object"}
"""Collectives with bytes of its own for a member: what is lost of these on its way, no other member has."""


class Group:
    """The nodes of one world.

    Args:
        size: how many found the group.
        modules: the sizes of each module's buckets.
        program: what each node does.
        seed: decides on the order of everything.
        rates: of the data shards.
        fuses: after how many commands each process of the coordinator is lost, in turn.
        policy: of the group.
        preemption: how probable it is that a fiber loses its turn where it takes a lock.
        zeros: whether some contributions have weight 0.
    """

    node_type: type[Node] = Node

    def __init__(
        self,
        size: int,
        modules: Sequence[Sequence[int]],
        program: Sequence[Act],
        seed: int,
        rates: Sequence[float] = (1.0,),
        fuses: Sequence[int] = (),
        policy: Policy | int | None = None,
        preemption: float = 0.0,
    ) -> None:
        self.size, self.program = size, program
        self.buckets = [size for module in modules for size in module]
        names = iter(range(len(self.buckets)))
        self.plans = [self.plan_of({f"b{next(names)}": size for size in module}) for module in modules]
        self.policy = Policy(1, 8) if policy is None else policy
        self.world = World(self.policy, rates, seed, fuses, preemption)
        self.pushed: dict[tuple[int, int], set[int]] = defaultdict(set)
        """The processes that pushed to a round, by member and round."""
        self.nodes: list[Node] = []
        """Processes that run."""
        self.dead: list[Node] = []
        self.uids = 0
        self._given: dict[tuple[int, int, int], Doubles] = {}

    @property
    def rounds(self) -> int:
        """Number of rounds in the program."""
        return sum(act.kind == "round" for act in self.program)

    @property
    def is_patient(self) -> bool:
        """True if it waits for all."""
        return isinstance(self.policy, int) or self.policy.lateness is None

    @property
    def most(self) -> int:
        """Number of processes that begin, at most."""
        return 20

    def place_of_round(self, number: int) -> int:
        """Return the place of a round in the program."""
        places = [place for place, act in enumerate(self.program) if act.kind == "round"]
        return places[number] if number < len(places) else len(self.program)

    def plan_of(self, sizes: dict[str, int]) -> Plan:
        """Return a module's plan."""
        return simple_plan(sizes.items(), dtype_of("float64"))

    def weight(self, uid: int, number: int) -> float:
        """Return the weight of a process in a round."""
        return random.Random(f"{uid} {number}").choice([0.0, 0.5, 1.0, 1.0, 3.25])

    def given(self, uid: int, number: int, part: int) -> Doubles:
        """Return what a process gives to a bucket: whole numbers, of which sums are exact."""
        if (uid, number, part) not in self._given:
            chance = np.random.default_rng([uid, number, part])
            self._given[uid, number, part] = chance.integers(1, 2**30, self.buckets[part]).astype(np.float64)
        return self._given[uid, number, part]

    def dawdle(self) -> None:
        """Do nothing for a while, as one of some workers. Here they are never late."""

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────

    def start(self, name: str, rank: int = -1, waits: bool = False) -> Node:
        """Start a process."""
        node = self.node_type(self, self.uids, name, rank, waits)
        self.uids += 1
        self.nodes.append(node)
        self.world.scheduler.spawn(node.run, node)
        return node

    def kill(self, which: int) -> None:
        """Let a process die, unless it is the last one that contributes."""
        node = self.nodes[which % len(self.nodes)]
        if any(other.is_inside for other in self.nodes if other is not node):
            self.nodes.remove(node)
            self.dead.append(node)
            self.world.kill(node)

    def break_line(self, which: int) -> None:
        """Break the connections of a process."""
        self.world.break_line(self.nodes[which % len(self.nodes)])

    def join(self, which: int) -> None:
        """Start a worker that joins: under the name of a dead one if there is one."""
        names = [node.name for node in self.dead if all(node.name != other.name for other in self.nodes)]
        self.start(names[0] if names else f"late{self.uids}", waits=bool(which % 2))

    def lose_in_transfer(self, which: int, tries: int = 60) -> None:
        """Lose a part of the next transfer of a state: the learner, its donor, or the connections of one of them."""
        for learner in self.nodes:
            if (donor := self._donor_to(learner)) is not None:
                lost = self.nodes.index((learner, donor)[which % 2])
                (self.kill, self.break_line)[which // 2 % 2](lost)
                return
        if tries:
            self.world.at[self.world.steps + 5].append(partial(self.lose_in_transfer, which, tries - 1))

    def _donor_to(self, learner: Node) -> Node | None:
        """Return the node that sends its state to ``learner``."""
        if learner.worker is None or learner.stage is not Stage.JOINING:
            return None
        transfer = learner.worker._session.member.learner.transfer
        donors = (node for node in self.nodes if node.worker is not None and transfer is not None)
        return next((node for node in donors if transfer is not None and node.member_id == transfer.donor), None)

    def _is_over(self) -> bool:
        for node in [node for node in self.nodes if node.error is not None]:
            if not node.counts:  # a supervisor starts it again
                self.nodes.remove(node)
                self.dead.append(node)
                self.world.kill(node)
                if len(self.world.ends) < self.rounds and self.uids < self.most:
                    self.start(node.name, waits=node.waits)
        under_way = (node for node in self.nodes if not node.finished and node.error is None)
        return not any(node.rank >= 0 or node.is_inside for node in under_way)

    def is_founded(self) -> bool:
        """Return true if all that is needed for the program is there."""
        return all(len(node.agreements) == len(self.plans) for node in self.nodes)

    def run(self) -> None:
        """Run the program, and then let all leave."""
        with running(self.world):
            for rank in range(self.size):
                self.start(f"w{rank}", rank)
            self.world.found(self.is_founded)
            self.world.run(self._is_over)
            self.world.at.clear()
            self.world.along.clear()
            leaving = [node for node in self.nodes if node.finished]
            for node in leaving:
                self.world.scheduler.spawn(node.close, node)
            self.world.run(lambda: all(node.closed for node in leaving))

    # ── laws ──────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Check all laws."""
        self._check_errors()
        self._check_rounds()
        self._check_states()
        self._check_collectives()
        self._check_ends()
        self._check_times()

    def _check_errors(self) -> None:
        """Check that no worker that contributed has failed, and that one which was about to join has done so again."""
        for node in [*self.nodes, *self.dead]:
            if node.worker is not None and isinstance(node.error, LeftOutError):
                assert node.stage is not Stage.JOINING, f"{node.name} was left out when it joined: {node.error}"
        for node in self.nodes:
            if node.finished or (node.counts and not self._is_outlived(node)):
                assert node.error is None, f"{node.name} failed: {node.error}"

    def _is_outlived(self, node: Node) -> bool:
        """Tell whether the dead alone had the results of a node's round, and a learner has the state behind it.

        A round that is over is not made again while such a learner is there. A coordinator that was lost right behind
        the record of this knows the record alone.
        """
        if node.worker is None or not isinstance(node.error, LeftOutError):
            return False
        number, everybody = node.worker.round, [*self.nodes, *self.dead]
        texts = [f"no member has round {number} for it any more"]
        if self.world.harness.incarnation > 1:
            texts.append("when the others had gone on without it")
        if not any(text in node.error.message for text in texts):
            return False
        learnt = any(other.rank < 0 and min(other.rounds, default=0) > number for other in everybody)
        return learnt and not any(number in other.rounds for other in self.nodes)

    def check_entered(self) -> None:
        """Check that a learner that the others wait for came in, if there was time. They wait once in a while only."""
        last, learners = max([0.0, *self.world.losses]), sum(node.rank < 0 for node in [*self.nodes, *self.dead])
        for node in self.nodes:
            had_time = node.waits and node.left >= 4 and node.began > last and learners == 1 and self.world.ways is None
            assert node.finished or not had_time, f"{node.name} never came in"

    def _witnesses(self, number: int) -> list[Node]:
        """Return the nodes with results of a round that count: of one that was made again, the dead may have others.

        A connection may break, or the coordinator be lost, with results on their way that a dead node alone had got.
        It had not finished the round before the round was written.
        """
        times = sum(isinstance(one, Round) and one.record.round == number for one in self.world.harness.records)
        return [node for node in [*self.nodes, *(self.dead if times == 1 else ())] if number in node.rounds]

    def _records(self) -> dict[int, RoundRecord]:
        """Return the last record of each round: of one that was made again, that counts."""
        found = {one.record.round: one.record for one in self.world.harness.records if isinstance(one, Round)}
        assert sorted(found) == list(range(self.rounds)), "the ledger lacks a round"
        return found

    @property
    def agreements(self) -> list[Agreement]:
        """All agreements of one node. A node that joined late may have none yet."""
        return max((node.agreements for node in [*self.nodes, *self.dead]), key=len)

    def sections_of(self, act: Act) -> set[int]:
        """Return the sections in which a round of the program may have been exchanged."""
        return {self.agreements[act.section].number}

    def _check_rounds(self) -> None:
        for number, record in self._records().items():
            nodes = self._witnesses(number)
            act = self.program[self.place_of_round(number)]
            assert record.section in self.sections_of(act)
            for node in nodes:
                results = node.rounds[number]
                for part, values in results.values.items():
                    weights = self._check_bucket(record, part, values, node.layouts[part])
                    assert results.weights[part] in weights, "another weight than the ledger's"
            for node in nodes:
                if node in self.nodes and node.rounds[number].counts:
                    own, member = self.weight(node.uid, number), node.member_id
                    assert record.weights[member] == own, f"{node.name} finished round {number} and does not count"
                    assert all(member_id != member for member_id, _, _ in record.cut), f"{node.name} counts in part"

    def _check_bucket(self, record: RoundRecord, part: int, values: Doubles, layout: Layout) -> set[float]:
        """Check that a bucket is the mean of those that counted, slice by slice. Return the weights of the slices."""
        cut = {member_id: slices for member_id, one, slices in record.cut if one == part}
        departed = {member_id for member_id, _, _ in record.cut}
        always = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id not in departed]
        partly = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id in departed]
        counted, sums = dict.fromkeys(partly, 0), set[float]()
        for index in range(layout.count):
            start, stop = layout.span(index)
            for some in _subsets(partly):
                members = [*always, *some]
                expected = self._mean(record, members, part, start, stop)
                if np.array_equal(expected, values[start:stop]):
                    break
            else:
                raise AssertionError(f"slice {index} of bucket {part} of round {record.round} is no mean: {record}")
            for member_id in some:
                assert len(self.world.harness.rates) > 1 or counted[member_id] == index, "what counts is no prefix"
                counted[member_id] += 1
            sums.add(sum(record.weights[member_id] for member_id in members))
        for member_id in partly:
            assert counted[member_id] == cut.get(member_id, 0), (
                f"the ledger counts other slices of {member_id}: {record}"
            )
        return sums or {sum(record.weights)}

    def _mean(self, record: RoundRecord, members: list[int], part: int, start: int, stop: int) -> Doubles:
        """Return the exact mean of some members' contributions, rounded once: the sums and the total are exact."""
        number, total = record.round, sum(record.weights[member_id] for member_id in members)
        if not total:
            return np.zeros(stop - start)
        sums = np.zeros(stop - start)
        for member_id in members:
            uids = [
                uid for uid in self.pushed[member_id, number] if self.weight(uid, number) == record.weights[member_id]
            ]
            assert uids, f"member {member_id} did not give that weight to round {number}"
            sums += record.weights[member_id] * self.given(max(uids), number, part)[start:stop]
        return sums / total

    def _check_states(self) -> None:
        """Check that all members have the same bits after each round."""
        first: dict[tuple[int, int], bytes] = {}
        for number in range(self.rounds):
            for node in self._witnesses(number):
                for part, values in node.rounds[number].values.items():
                    bits = values.tobytes()
                    assert first.setdefault((number, part), bits) == bits, "members hold different bits"
        finished = [node for node in self.nodes if node.finished]
        states = {tuple(one.tobytes() for one in node.state) for node in finished}
        assert len(states) == 1, "replicas differ"
        to_the_end = [
            node for node in finished if self.rounds - 1 in node.rounds and node.rounds[self.rounds - 1].counts
        ]
        there = [node for node in to_the_end if not self._left_before_end(node, self.rounds - 1)]
        epochs = {node.worker.epoch for node in there if node.worker is not None}
        assert len(epochs) <= 1, "members are in different epochs"
        for node in self.nodes:
            for number, results in node.rounds.items():
                end = self.world.harness.ends[number]
                is_late = results.epoch > end and not self.is_patient  # it resumes, and hears of the membership of then
                is_right = results.epoch == end or is_late or self._left_before_end(node, number)
                assert not results.counts or is_right, (
                    f"{node.name} is in another epoch behind round {number} than the ledger says"
                )

    def _left_before_end(self, node: Node, number: int) -> bool:
        """Tell whether a node has heard an earlier end of a round than the last one, and was gone by then.

        When all members are gone that have heard that a round is over, the others may hear of a later epoch behind it.
        """
        records, told, end = self.world.harness.records, node.rounds[number].epoch, self.world.harness.ends[number]
        done = {one.epoch for one in records if isinstance(one, Round) and one.record.round == number}
        done |= {one.epoch for one in records if isinstance(one, Boundary) and one.round == number}
        members = [one.members for one in records if isinstance(one, Epoch) and one.epoch == end]
        return end != told and told in done and bool(members) and node.member_id not in dict(members[-1])

    def _check_collectives(self) -> None:
        for place, act in enumerate(self.program):
            found = [(node, node.outcomes[place]) for node in self.nodes if place in node.outcomes]
            good = [(node, outcome) for node, outcome in found if outcome.error is None]
            for node, outcome in good:
                check_collective(act, place, node.member_id, outcome)
            if act.kind in ("sum", "max", "broadcast", "broadcast_object"):
                assert len({repr(outcome.value) for _, outcome in good}) <= 1, f"{act.kind}: different results"
            if not self.dead and act.kind not in MAY_BE_LOST:
                assert len(good) == len(found), f"{act.kind} failed: {[outcome.error for _, outcome in found]}"

    def _check_ends(self) -> None:
        """Check that a collective fails at all members alike, but for those that had its end when another lost that."""
        for place, act in enumerate(self.program):
            if act.kind == "transfer":  # some have no part in it
                continue
            outcomes = [node.outcomes[place] for node in self.nodes if place in node.outcomes]
            ends = [one.value if act.kind == "several" else [one.error] for one in outcomes]
            for found in zip(*ends, strict=True):
                errors = {type(end) for end in found if isinstance(end, GradServerError)}
                assert len(errors) <= 1, f"{act.kind} at {place} fails in different ways: {found}"
                if errors and not all(isinstance(end, GradServerError) for end in found):
                    assert errors == {ConnectionLostError}, f"{act.kind} at {place} fails at some: {found}"

    def _check_times(self) -> None:
        """Check that a round ends soon after the coordinator was lost, and whatever else happened meanwhile.

        With data shards each further loss may begin the recovery anew: all make new connections, and wait for the dead.
        """
        ends = sorted(self.world.ends.values())
        is_sharded = len(self.world.harness.rates) > 1
        for crash in self.world.crashes:
            before = sum(crash - SECONDS < loss < crash for loss in self.world.losses)
            last, bound = crash, SECONDS * (1 + before * is_sharded)
            for loss in sorted(self.world.losses):
                if last < loss < last + bound:
                    last, bound = loss, bound + SECONDS * is_sharded
            later = [end for end in ends if end > crash]
            assert not later or later[0] <= last + bound, f"no round for {later[0] - last:.2f} s"


class LateGroup(Group):
    """Nodes of a group that does not wait for all. Each now and then is busy for a while.

    All weights are 1, and what a node gives to a round is a bit of its own. So a mean shows what is in it.
    """

    @property
    def most(self) -> int:
        """Largest number of processes that begin: the mean of numbers that are further apart does not show them all."""
        return min(super().most, 48 // self.rounds)

    def given(self, uid: int, number: int, part: int) -> Doubles:
        """Return what a process gives to a bucket."""
        return np.full(self.buckets[part], 2.0 ** (uid * self.rounds + number))

    def weight(self, uid: int, number: int) -> float:
        """Return the weight of a process in a round."""
        del uid, number
        return 1.0

    def dawdle(self) -> None:
        """Do nothing for a while, now and then."""
        if self.world.random.random() < 0.1:
            self.world.scheduler.pause(lambda: False, self.world.random.choice((0.01, 0.4, 1.0)))

    def check(self) -> None:
        """Check that all have finished with the same bits, and that no gradient counts twice."""
        self._check_errors()
        self._check_states()
        assert set(self._records()) == set(range(self.rounds))
        for node in self._finished_from_the_start():
            for part, size in enumerate(self.buckets):
                for element in range(size):
                    self._check_element(node, part, element)

    def _finished_from_the_start(self) -> list[Node]:
        return [node for node in self.nodes if len(node.rounds) == self.rounds]

    def _check_element(self, node: Node, part: int, element: int) -> None:
        """Check one element of all rounds' results: each gradient is in one of them at most, and not before its own."""
        given = 0
        for number in sorted(node.rounds):
            given |= sum(1 << (uid * self.rounds + number) for uid in self._uids_in(number))
            if part in node.rounds[number].values and (mean := node.rounds[number].values[part][element]):
                found = [bits for bits in _bits_of(mean) if not bits & ~given]
                assert found, f"{mean} in bucket {part} of round {number} has a gradient that counted before"
                given &= ~found[0]

    def _uids_in(self, number: int) -> set[int]:
        """Return the processes that pushed to a round."""
        return {uid for (_, where), uids in self.pushed.items() if where == number for uid in uids}


def _bits_of(mean: float) -> Iterator[int]:
    """Yield sums of different powers of two of which this is the mean."""
    for count in range(1, 40):
        total = round(mean * count)
        if total.bit_count() == count and abs(total - mean * count) <= total * 2.0**-50:
            yield total


def _subsets(members: list[int]) -> list[tuple[int, ...]]:
    return [some for size in range(len(members), -1, -1) for some in combinations(members, size)]


def check_collective(act: Act, place: int, me: int, outcome: Outcome) -> None:
    """Check that a collective's result has each participant in it, once, and nothing else."""
    ids, value = outcome.ids, outcome.value
    rank, root = ids.index(me), ids[act.root % len(ids)]
    own = [tally(one, place, act.numel).tolist() for one in ids]
    rows = [[(tally(one, place, act.numel) * 8 + to).tolist() for to in range(len(ids))] for one in ids]
    expected: Any
    match act.kind:
        case "sum":
            unit = (1 + (place + np.arange(act.numel)) % 3).tolist()
            for total, digit in zip(value, unit, strict=True):
                digits = {one: total // 8**one % 8 for one in range(20)}
                assert set(digits.values()) <= {0, digit}, "a contribution counts twice"
                assert digits[me], "a member that was there does not count"
            return
        case "max":
            for largest, *column in zip(value, *own, strict=True):  # of a member that is lost some slices may count
                assert largest in column, "what no member gave"
                assert largest >= column[rank], "a member that was there does not count"
            return
        case "broadcast":
            expected = own[ids.index(root)]
        case "all_gather":
            expected = own
        case "reduce_scatter":
            expected = [sum(column) for column in zip(*(one[rank] for one in rows), strict=True)]
        case "gather":
            expected = own if me == root else None
        case "scatter":
            expected = rows[ids.index(root)][rank]
        case "all_to_all":
            expected = [one[rank] for one in rows]
        case "uneven":
            expected = [(tally(one, place, act.numel + rank) * 8 + rank).tolist() for one in ids]
        case "several":
            for kind, end in zip(("all_to_all", "sum", "reduce_scatter"), value, strict=True):
                if not isinstance(end, GradServerError):
                    check_collective(act._replace(kind=kind), place, me, Outcome(ids, end))
            return
        case "gather_object":
            expected = [["x" * (one + act.numel), int(tally(one, place)[0])] for one in ids]
        case "broadcast_object":
            expected = {"it": int(tally(root, place)[0])}
        case "scatter_object":
            expected = [int(tally(root, place)[0]) * 8 + rank] * rank
        case "transfer":
            target = ids[(ids.index(root) + 1) % len(ids)]
            expected = own[ids.index(root)] if me == target != root else None
        case _:
            return
    assert value == expected, f"{act.kind} at {place}: {value}, not {expected}"
