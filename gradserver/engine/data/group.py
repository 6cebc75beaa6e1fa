"""A group as the data half knows it: its plan, and the parts that it consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from gradserver.engine.commands import Measures, Memory
from gradserver.engine.data.exchanges import Exchanges
from gradserver.engine.data.learners import NOT_YET, Learners
from gradserver.engine.data.listeners import Listeners
from gradserver.engine.data.members import Members
from gradserver.engine.data.recovery_state import Recovery
from gradserver.engine.data.rounds import Hashing, Rounds
from gradserver.engine.data.sequences import Sequences
from gradserver.engine.data.stragglers import Stragglers
from gradserver.engine.data.traffic import Traffic
from gradserver.engine.data.witnesses import Witnesses
from gradserver.engine.figures import BLOCK_BYTES, Sampling, Span
from gradserver.engine.orders import OpenGroup
from gradserver.engine.proofs import Proofs
from gradserver.protocol.codecs.base import BLOCK as CODEC_BLOCK
from gradserver.protocol.digest import places
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import (
    BUCKET,
    TRANSFER,
    WORLD_BOUND,
    ExchangeKey,
    Layout,
    Operation,
    Pool,
    pool_of,
)
from gradserver.protocol.limits import KEPT_ROUNDS, SLICE_BYTES
from gradserver.protocol.messages import Push
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table, share_of


@dataclass(slots=True)
class Group:
    """One group. Each organ is changed by its own module alone."""

    order: OpenGroup
    table: Table
    members: Members
    exchanges: Exchanges = field(default_factory=Exchanges)
    plan: Plan | None = None
    planned: int = 0
    """The first round of this plan."""
    full_buckets: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets of each section that this shard has to do with, by the section's number."""
    places: tuple[int, ...] = ()
    """Beginning of each bucket in the bytes of a round that are hashed."""
    hashing: Hashing | None = None
    rounds: Rounds = field(default_factory=Rounds)
    learners: Learners = field(default_factory=Learners)
    memories: dict[tuple[int, int], Memory] = field(default_factory=dict)
    """Memory of reductions from one round of the plan to the next, by bucket and slice."""
    sampling: Sampling = field(default_factory=Sampling)
    """Choice of the blocks in which contributions are compared."""
    recovery: Recovery | None = None
    """Recovery that is under way: members say which results they hold."""
    next_check: float | None = None
    """Time at which deadlines are to be looked at."""
    sequences: Sequences = field(default_factory=Sequences)
    stragglers: Stragglers = field(default_factory=Stragglers)
    traffic: Traffic = field(init=False)
    listeners: Listeners = field(init=False)
    witnesses: Witnesses = field(init=False)
    proofs: Proofs | None = field(init=False)
    """Maker of the proofs that go with results; None if members keep none for one another."""
    _is_steady: bool = field(init=False)
    halted: GradServerError | None = None
    buckets_halted: GradServerError | None = None

    def __post_init__(self) -> None:
        self._is_steady = self.order.steady
        self.traffic = Traffic(self.members.identities, self.order.credit)
        self.listeners = Listeners(self.order.backlog)
        self.witnesses = Witnesses(self.order.audits)
        self.proofs = Proofs(self.order.proves) if self.order.durable else None
        if self.order.lateness is not None:  # a member that turns out to be late is sent what it cannot ask for
            self.listeners.begin(self.members.present, 0)

    def check_by(self, at: float) -> None:
        """Look at deadlines at ``at``, if not before."""
        if self.next_check is None or at < self.next_check:
            self.next_check = at

    def plan_check(self, at: float | None) -> None:
        """Look at deadlines at ``at`` next; None if there are none."""
        self.next_check = at

    def start_over(self, recovery: Recovery) -> None:
        """Forget all that is open, as members are about to say what they hold."""
        self.recovery = recovery
        self.order = replace(self.order, epoch=recovery.generation)
        self.exchanges.void()
        self.rounds.void()
        self.sequences.restart()
        self.traffic.void()
        self.listeners.void()
        self.disturb()
        self.buckets_halted = None  # control has not heard of it
        self.next_check = recovery.touched + self.order.round_timeout

    def resume(self, number: int) -> None:
        """Go on with round ``number``: members have said what they hold."""
        self.recovery = None
        self.sequences.resume_buckets(number)

    @property
    def is_steady(self) -> bool:
        """Tell whether a round ends with its last results, until an order changes the membership."""
        return self._is_steady

    def settle(self) -> None:
        """Let a round end with its last results from now on."""
        self._is_steady = True

    def disturb(self) -> None:
        """Leave the end of a round to control, as the membership is about to change."""
        self._is_steady = False

    @property
    def world(self) -> int:
        """Return the number of workers of a complete group; in an elastic one, of ids that were ever given."""
        return len(self.members.connections)

    def call(self, member_id: int) -> str:
        """Name a member for people."""
        return self.members.identities.call(member_id)

    def named(self, operation: Operation) -> str:
        """Name an operation for people, with the rank of its root."""
        return str(replace(operation, root=self.members.identities.rank(operation.root)))

    def describe(self, key: ExchangeKey, operation: Operation | None = None) -> str:
        """Name an exchange for people."""
        if key.stream == BUCKET and self.plan is not None and key.part < len(self.plan.buckets):
            return f"bucket {self.plan.buckets[key.part].key!r} of round {key.number}"
        if key.stream == BUCKET:
            return f"bucket {key.part} of round {key.number}"
        if key.stream == TRANSFER:
            source, target = self.members.identities.rank(key.source), self.members.identities.rank(key.target)
            return f"transfer {key.number} from rank {source} to rank {target} (tag {key.part})"
        return f"collective {key.number} of round {key.part}" + (f", {self.named(operation)}," if operation else "")

    def bucket_name(self, key: ExchangeKey) -> str:
        """Return the bucket's name in the plan; empty for an exchange of another stream."""
        if key.stream == BUCKET and self.plan is not None:
            return self.plan.buckets[key.part].key
        return ""

    def begins(self, push: Push) -> bool:
        """Tell whether ``push`` is the first of its sender for an exchange at this shard."""
        first = 0
        if self.table.rates:
            if push.key.stream != BUCKET or self.plan is None or self.plan.is_vacant(push.key.part):
                return push.operation is not None or push.key.stream == BUCKET
            _, first, _ = self.share(push.key, self.plan.buckets[push.key.part].operation)
        settled = self.exchanges.settled.get(push.key)
        return push.slice == (first if settled is None else next(i for i in count(first) if i not in settled))

    def share(self, key: ExchangeKey, operation: Operation) -> tuple[Layout, int, int]:
        """Return the layout of an exchange, and the slices that this shard has to do with."""
        if self.learners.first_rounds and operation.kind in WORLD_BOUND and key.stream != BUCKET:
            layout, bounds = share_of(operation, len(self.participants(key)), self.table.rates)
        else:
            layout, bounds = self.table.share(key, operation)
        shard = self.order.shard
        return layout, bounds[shard], bounds[shard + 1]

    def _hash(self, plan: Plan) -> None:
        """Hash rounds of ``plan``."""
        self.places = places(plan)
        load = sum(self._sizes(plan))
        calls, sections = sum(self.full_buckets.values()), len(plan.each)
        self.hashing = Hashing.of(load * (self.world + 1) / sections, calls * (self.world + 1) / sections)

    def _sizes(self, plan: Plan) -> list[int]:
        """Return the bytes of one contribution to each bucket of ``plan`` that come to this shard."""
        keys = [ExchangeKey(BUCKET, 0, part) for part in range(len(plan.buckets))]
        shares = [self.share(key, bucket.operation) for key, bucket in zip(keys, plan.buckets, strict=True)]
        return [layout.run_bytes(start, stop) for layout, start, stop in shares]

    def measures(self, key: ExchangeKey) -> Measures:
        """Return what is to be measured of the contributions to a bucket of a round."""
        sections = 1 if self.plan is None else len(self.plan.each)
        return self.sampling.measures(key.part, key.number // sections)

    def _spans(self, plan: Plan) -> list[Span]:
        """Return the elements of each bucket that come to this shard, and how many are compared or left out at once."""
        spans = []
        for part, bucket in enumerate(plan.buckets):
            operation = bucket.operation
            layout, start, stop = self.share(ExchangeKey(BUCKET, 0, part), operation)
            size = max(4, operation.dtype.itemsize)  # sums are in fp32, or wider
            unit = CODEC_BLOCK if operation.is_lossy else BLOCK_BYTES // size
            whole = (layout.span(start)[0], layout.span(stop - 1)[1]) if start < stop else (0, 0)
            spans.append(Span(*whole, unit))
        return spans

    def agree(self, plan: Plan, first_round: int) -> None:
        """Exchange the buckets of ``plan`` from ``first_round`` on."""
        self._keep_memories(plan)
        self.plan, self.planned = plan, first_round
        if self.order.grants:
            self.listeners.make_room(KEPT_ROUNDS * plan.nbytes)
        self.table.set_plan(plan)
        self.full_buckets = self.table.buckets_of(plan, self.order.shard)
        self.sampling = Sampling.of(self._spans(plan), (section.parts for section in plan.each))
        if self.order.digests:
            self._hash(plan)
        self.sequences.begin_buckets(first_round)
        self.rounds.void()
        self.stragglers.pace.changed()

    def halt(self, error: GradServerError) -> GradServerError:
        """Hand out nothing any more, and return why: the first error counts."""
        self.halted = self.halted or error
        self.halt_buckets(self.halted)
        return self.halted

    def halt_buckets(self, error: GradServerError) -> GradServerError:
        """Hand out no bucket any more, and return why: the first error counts."""
        self.buckets_halted = self.buckets_halted or error
        return self.buckets_halted

    def follow_members(self) -> None:
        """Cut exchanges for the members that are present. Their rounds may take another time."""
        self.table.world_size = len(self.members.present)
        self.stragglers.pace.changed()

    def is_hashed(self, number: int) -> bool:
        """Tell whether round ``number`` is hashed; sections that take turns are hashed alike."""
        sections = 1 if self.plan is None else len(self.plan.each)
        return self.hashing is not None and self.hashing.is_due(number // sections)

    def memory(self, part: int, index: int) -> Memory:
        """Return the memory of the reductions of slice ``index`` of a lossy bucket."""
        return self.memories.setdefault((part, index), Memory())

    def _keep_memories(self, plan: Plan) -> None:
        """Forget the memory for sections of the plan in force that ``plan`` has not any more."""
        here = () if self.plan is None else self.plan.each
        same = (one for one in here if plan.sections and plan.section(one.number) is not None)
        kept = {part for one in same for part in one.parts}
        self.memories = {place: memory for place, memory in self.memories.items() if place[0] in kept}

    def settled_of(self, key: ExchangeKey) -> dict[int, int]:
        """Return the number of settled slices of a bucket in which each member counted."""
        current = self.rounds.get(key.number) if key.stream == BUCKET else None
        counted = current.counted.items() if current is not None else ()
        return {member_id: slices for (member_id, part), slices in counted if part == key.part}

    def participants(self, key: ExchangeKey) -> tuple[int, ...]:
        """Return the members that have to contribute to an exchange that begins now, in rank order.

        A learner contributes to buckets first, and is a member when that round is over.
        """
        if key.stream == TRANSFER:
            return (key.source, key.target) if key.source < key.target else (key.target, key.source)
        present, first_rounds = self.members.identities.present, self.learners.first_rounds
        if not first_rounds:
            return present
        if key.stream == BUCKET:
            expected = {member_id for member_id, first in first_rounds.items() if 0 <= first <= key.number}
            return tuple(sorted(expected.union(member_id for member_id in present if member_id not in first_rounds)))
        return tuple(member_id for member_id in present if first_rounds.get(member_id, NOT_YET) < key.part)

    def snapshot(self, now: float) -> dict[str, object]:
        """Return the traffic, as plain JSON values. Ages in seconds, sizes in bytes."""
        return {
            **self.traffic.snapshot(self.world, now),
            "open": [
                {
                    "what": self.describe(exchange.key, exchange.operation),
                    "round": exchange.key.number if exchange.key.stream == BUCKET else None,
                    "age": round(now - exchange.opened, 3),
                    "missing": [self.call(member_id) for member_id in exchange.missing()[:16]],
                }
                for exchange in list(self.exchanges.values())[:8]
                if exchange.failure is None
            ],
        }

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        expected: Counter[tuple[int, Pool]] = Counter()
        for exchange in self.exchanges.values():
            if exchange.failure is not None:
                continue
            exchange.validate()
            for member_id, run in exchange.unanswered():
                expected[member_id, pool_of(exchange.key, member_id)] += exchange.cost(run)
        for (member_id, pool), outstanding in self.traffic.outstanding.items():
            if member_id not in self.members.departed:
                assert outstanding == expected[member_id, pool], (member_id, pool, outstanding)
                assert outstanding <= self.order.credit + SLICE_BYTES, "credit exceeded"
        self.listeners.validate(self.members.departed)
        assert (
            not self.exchanges
            or self.next_check is not None
            or all(exchange.failure for exchange in self.exchanges.values())
        ), "an exchange without a deadline"
