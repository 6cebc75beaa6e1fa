"""A group with gradients that travel with loss, with all of the workers' real code.

What workers send is overheard. So each result can be made once more: from what those sent that count by the ledger, and
from what the round before has left. That is lost only where the ledger says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from gradserver.engine.commands import Contribution, Memory, Reduce
from gradserver.engine.policy import Policy
from gradserver.engine.records import Reset, RoundRecord
from gradserver.lossy import Owed, reduce_lossy
from gradserver.protocol.codecs import Codec, seed_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import ExchangeKey, Layout, Stream
from gradserver.protocol.messages import Message, Push
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.plan_codecs import with_named_codecs
from tests.late_session_group import LateNode
from tests.session_group import Act, Group, Node, _subsets

Floats = npt.NDArray[np.float32]
TOLERANCE = 1e-4


class LossyGroup(Group):
    """Nodes of a group in which each bucket has a codec of its own.

    Args:
        size: how many found the group.
        buckets: elements of each bucket.
        codecs: the codecs of the buckets, in turn.
        rounds: how many there are.
        seed: decides on the order of everything.
        rates: of the data shards.
        fuses: after how many commands each process of the coordinator is lost, in turn.
        policy: of the group.
        preemption: how probable it is that a fiber loses its turn where it takes a lock.
    """

    def __init__(
        self,
        size: int,
        buckets: Sequence[int],
        codecs: Sequence[str],
        rounds: int,
        seed: int,
        rates: Sequence[float] = (1.0,),
        fuses: Sequence[int] = (),
        policy: Policy | None = None,
        preemption: float = 0.0,
    ) -> None:
        self.codecs = codecs
        lateness = None if policy is None else policy.lateness
        self.waits_for_all = lateness is None
        self.node_type = Node if lateness is None else LateNode
        modules, program = [buckets], [Act()] * rounds
        if seed % 4 == 3:  # the last bucket is another module's, and exchanged in each other round
            modules, program = [buckets[:-1] or [7], buckets[-1:]], [Act(section=each % 2) for each in range(rounds)]
        super().__init__(size, modules, program, seed, rates, fuses, policy, preemption)
        self.operations = [bucket.operation for plan in self.plans for bucket in plan.buckets]
        self.world.overhear = self._overhear
        self.sent: dict[tuple[int, int, int, int], list[tuple[float, bytes]]] = defaultdict(list)
        """Contributions of each process by round, bucket and slice, with weights. Each is one thing, sent once more."""
        self.owed: dict[tuple[int, int], list[Floats]] = {}
        """Values that the rounds before may have left of each bucket and slice."""
        self.made: dict[tuple[int, int], int] = {}
        """The last round of each bucket and slice."""

    def plan_of(self, sizes: dict[str, int]) -> Plan:
        codecs = {name: self.codecs[number % len(self.codecs)] for number, name in enumerate(sizes)}
        return with_named_codecs(simple_plan(sizes.items(), FLOAT32), codecs)

    def given(self, uid: int, number: int, part: int) -> Any:
        return np.random.default_rng([uid, number, part]).standard_normal(self.buckets[part]).astype(np.float32)

    def _overhear(self, owner: object, message: Message, payloads: list[bytes]) -> None:
        if isinstance(owner, Node) and isinstance(message, Push) and message.key.stream == Stream.BUCKET and payloads:
            there = self.sent[owner.uid, message.key.number, message.key.part, message.slice]
            if (message.weight, payloads[0]) not in there:
                there.append((message.weight, payloads[0]))

    def is_reset(self) -> bool:
        """Return whether the ledger says that anything that was owed was lost."""
        return any(isinstance(one, Reset) for one in self.world.harness.records)

    # ── laws ──────────────────────────────────────────────────────────────────────────────────────────

    def _check_rounds(self) -> None:
        written = self._records()
        for (uid, number, part, index), payloads in self.sent.items():
            assert len(payloads) == 1, f"process {uid} encoded slice {index} of {part} of round {number} twice"
        for number, record in sorted(written.items()):
            nodes = self._witnesses(number)
            if not nodes:
                break  # all that had its results are dead, and so no process knows what it has left
            for part, values in nodes[0].rounds[number].values.items():
                self._check_lossy(record, part, np.asarray(values, np.float32), nodes[0].layouts[part])
        for node in self.nodes:
            if node.finished and self.waits_for_all:  # what a late member keeps is added to what it gives next
                self._check_kept_back(node)

    def _check_lossy(self, record: RoundRecord, part: int, values: Floats, layout: Layout) -> None:
        """Check that a bucket is what a coordinator makes of those that counted, slice by slice."""
        cut = {member_id: slices for member_id, one, slices in record.cut if one == part}
        departed = {member_id for member_id, _, _ in record.cut}
        always = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id not in departed]
        partly = [member_id for member_id, weight in enumerate(record.weights) if weight and member_id in departed]
        counted = dict.fromkeys(partly, 0)
        for index in range(layout.count):
            start, stop = layout.span(index)
            for some in _subsets(partly):
                members = sorted([*always, *some])
                if self._makes(record, members, part, index, layout, values[start:stop]):
                    break
            else:
                raise AssertionError(f"slice {index} of bucket {part} is not what those make that count: {record}")
            for member_id in some:
                counted[member_id] += 1
        for member_id in partly:
            assert counted[member_id] == cut.get(member_id, 0), (
                f"the ledger counts other slices of {member_id}: {record}"
            )

    def _makes(
        self, record: RoundRecord, members: list[int], part: int, index: int, layout: Layout, values: Floats
    ) -> bool:
        """Return whether these members make ``values``. Then note what that has left."""
        nothing, last = np.zeros(values.size, np.float32), self.made.get((part, index), -1)
        reset = self._owes_nothing_from(last + 1, record.round)
        before = [*self.owed.get((part, index), [nothing]), *([nothing] if reset else [])]
        if not members and not values.any():
            self.owed[part, index], self.made[part, index] = before, record.round
        if not members:
            return not values.any()
        found: list[Floats] = []
        for given, residual in product(self._contributions(record, members, part, index), before):
            made, left = self._make(record.round, part, index, layout, given, residual)
            found += [left] if made.tobytes() == values.tobytes() else []
        if found:
            self.made[part, index] = record.round
            self.owed[part, index] = found + ([nothing] if reset else [])  # it may have been made before that was lost
        return bool(found)

    def _owes_nothing_from(self, first: int, last: int) -> bool:
        """Return whether what was owed was lost in one of some rounds, by the ledger."""
        return any(isinstance(one, Reset) and first <= one.round <= last for one in self.world.harness.records)

    def _contributions(
        self, record: RoundRecord, members: list[int], part: int, index: int
    ) -> Iterator[list[Contribution]]:
        """Yield what these members may have given: an id may have been two processes'."""
        choices = []
        for member_id in members:
            uids = sorted(self.pushed[member_id, record.round], reverse=True)
            sent = [payload for uid in uids for payload in self.sent.get((uid, record.round, part, index), ())]
            choices.append([Contribution(member_id, weight, payload) for weight, payload in sent])
        yield from (list(choice) for choice in product(*choices))

    def _make(
        self, number: int, part: int, index: int, layout: Layout, given: list[Contribution], residual: Floats
    ) -> tuple[Floats, Floats]:
        """Return the result as members decode it, and what it leaves."""
        operation = self.operations[part]
        start, stop = layout.span(index)
        codec: Codec = operation.codec
        memory, key = Memory(), ExchangeKey(Stream.BUCKET, number, part)
        owed = memory.content = Owed(np.stack([residual, residual]), np.array([number, 0], np.uint64))
        size = stop - start
        where = operation, start, codec.nbytes(size), size
        made: Any = reduce_lossy(Reduce("default", 0, key, index, *where, memory, given, (), True))
        values = np.empty(size, np.float32)
        codec.decode(made, size, values, seed_of(number, part, start))
        return values, owed.latest.copy()

    def _check_kept_back(self, node: Node) -> None:
        """Check that what a node has sent is what it was given, but for what its codecs keep back."""
        assert node.worker is not None
        for part, layout in node.layouts.items():
            given = np.zeros(self.buckets[part])
            for (uid, number, there, index), payloads in self.sent.items():
                if (uid, there) == (node.uid, part):
                    start, stop = layout.span(index)
                    values = np.empty(stop - start, np.float32)
                    layout.codec.decode(payloads[0][1], stop - start, values, seed_of(number, part, start))
                    given[start:stop] += self.given(uid, number, part)[start:stop] - values
            feedback = node.worker._session.member.exchanges.feedback.get(part)
            kept = 0.0 if feedback is None else feedback.residual
            assert np.allclose(given, kept, atol=TOLERANCE), f"{node.name} keeps back other values than it has not sent"
