"""The data half: slices in, slices out.

An exchange lives from the first push for it to the last result:

    state      event                               next       what happens
    ─────────  ──────────────────────────────────  ─────────  ─────────────────────────────────────────
    (none)     push of the first slice             OPEN       the deadline starts
    (none)     push of the first, group halted     (none)     the sender is told
    (none)     push of a later slice               (none)     dropped, if the exchange has been
    OPEN       push, slice incomplete              OPEN       kept, at its sender's credit
    OPEN       push, slice complete                OPEN       Reduce, or results at once
    OPEN       last slice's results sent           (none)     a bucket counts towards its round
    OPEN       push of another operation           FAILED     every contributor is told both sides
    OPEN       a missing participant departs       FAILED     every contributor is told its name
    OPEN       deadline                            FAILED     every contributor is told the culprit
    OPEN       … of a bucket; non-finite, halts    OPEN       its slices get no result: control is told
    OPEN       Halt                                FAILED     every contributor is told why
    OPEN       non-finite, by another policy       OPEN       the slices' results name it (`nonfinite`)
    OPEN       a new plan, for a bucket            OPEN       the plan is not taken: control is told
    OPEN       a contributor goes on without it    FAILED     every contributor is told (with several shards)
    FAILED     push of the first slice             FAILED     the sender is told
    FAILED     push of a later slice               FAILED     dropped
    FAILED     every participant told or departed  (none)

A bucket that cannot go on halts its group, as soon as control has written that down (`failures`). A collective or
transfer fails alone.

Of several data halves each has to do with one run of an exchange's slices (`gradserver.protocol.shards`), and that run
is the exchange for it: the first slice is the first of the run, and it ends with the last of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.engine.data import commits, recovery
from gradserver.engine.data.abandoned import end_abandoned
from gradserver.engine.data.completion import answer, complete
from gradserver.engine.data.errors import broken, non_finite, overdue, undecodable
from gradserver.engine.data.exchange import Exchange, Facts, Piece
from gradserver.engine.data.failures import fail, forget_if_over, give_up, halt_all, say_failed, tell_all
from gradserver.engine.data.grants import leave_silent_out, silent_since
from gradserver.engine.data.group import Group
from gradserver.engine.data.matching import admitted, checked
from gradserver.engine.data.members import Members
from gradserver.engine.data.membership import configure, do_without, do_without_overdue
from gradserver.engine.data.quorum import close, contributed, look, next_look
from gradserver.engine.effects import Effects
from gradserver.engine.events import Broken, NonFinite, Reduced, Sifted, Undecodable
from gradserver.engine.identities import Identities
from gradserver.engine.orders import (
    Attach,
    Break,
    CloseGroup,
    Configure,
    CutRound,
    Detach,
    Halt,
    OpenGroup,
    Order,
    Proceed,
    Recover,
    SetPlan,
)
from gradserver.engine.reports import Applied, Halted, Planned, StateComes, Violation
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError, OutOfStepError, UnexpectedMessageError
from gradserver.protocol.exchange import BUCKET, TRANSFER, WORLD_BOUND, ExchangeKey, Pool
from gradserver.protocol.limits import CREDIT_BYTES, SLICE_BYTES
from gradserver.protocol.messages import Inquire, Missing, Push, Taken
from gradserver.protocol.messages.recovery import Held, Holding
from gradserver.protocol.plan import Plan
from gradserver.protocol.shards import Table


class Data:
    """Data half: it matches slices, and asks for their reduction. All output goes to the effects."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._attached: dict[int, tuple[Group, int]] = {}
        self._next_check: float | None = None

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, order: Order, now: float, effects: Effects) -> None:
        """Carry out an order of control."""
        match order:
            case OpenGroup(name, epoch, founders):
                connections = [member.connection for member in founders]
                places = Identities(
                    member.name for member in founders
                )  # some may be vacant: no record is left of an earlier member
                table = Table(len(places.present), order.rates, order.mean.unit, order.grain)
                members = Members(places, connections, list(order.tokens), epoch)
                group = self.groups[name] = Group(order, table, members)
                for member_id, connection in enumerate(connections):
                    if connection >= 0:
                        self._attached[connection] = (group, member_id)
            case Configure(name):
                self._configure(self.groups[name], order, now, effects)
                effects.report(Applied(name, order.version))
            case SetPlan(name, plan, first_round):
                self._set_plan(self.groups[name], plan, first_round, effects)
            case Break(name, member_id, error):
                self._break_without(self.groups[name], member_id, error, effects)
                recovery.forget(self.groups[name], member_id, now, effects)
            case CloseGroup(name):
                group = self.groups.pop(name)
                for connection in group.members.connections:
                    if connection in self._attached and self._attached[connection][0] is group:
                        del self._attached[connection]
                self._plan_next_check()
            case Halt(name, error, buckets_only):
                halt_all(self.groups[name], error, buckets_only, effects)
                self._plan_check(self.groups[name])
                self._plan_next_check()
            case Attach(name, member_id, connection):
                self.attach(name, member_id, connection)
            case Detach(name, member_id):
                self.detach(self.groups[name].members.connections[member_id])
                recovery.forget(self.groups[name], member_id, now, effects)
            case Recover(name):
                recovery.begin(self.groups[name], order, now)
                self._plan_next_check()
            case Proceed(name):
                recovery.proceed(self.groups[name], now, effects)
            case CutRound(name):
                close(self.groups[name], order, now, effects)
                end_abandoned(self.groups[name], now, effects)

    def attach(self, name: str, member_id: int, connection: int) -> None:
        """Note that ``member_id`` has come to this shard."""
        group = self.groups[name]
        group.members.connect(member_id, connection)
        self._attached[connection] = (group, member_id)

    def detach(self, connection: int) -> None:
        """Forget the member on this connection. It is not here any more, whatever control will say of it."""
        group, member_id = self._attached.pop(connection)
        group.members.disconnect(member_id)

    def _configure(self, group: Group, order: Configure, now: float, effects: Effects) -> None:
        for departure in order.departed:
            self._attached.pop(group.members.connections[departure.member_id], None)
        for newcomer in order.newcomers:
            if newcomer.member_id not in group.learners.newcomers and newcomer.occupant.connection >= 0:
                self._attached[newcomer.occupant.connection] = (group, newcomer.member_id)
        configure(group, order, now, effects)
        if order.departed:
            end_abandoned(group, now, effects)
        for departure in order.departed:
            recovery.forget(group, departure.member_id, now, effects)

    def _set_plan(self, group: Group, plan: Plan, first_round: int, effects: Effects) -> None:
        """Exchange the buckets of ``plan`` from ``first_round`` on; or have the group halt, as a round is not over."""
        for exchange in list(group.exchanges.values()):
            if exchange.key.stream == BUCKET and exchange.failure is None:
                if exchange.pushed:
                    what = f"{group.describe(exchange.key)} was open when a new plan was agreed on"
                    give_up(group, exchange, OutOfStepError(what), effects)
                    return
                group.exchanges.end(exchange)  # departed members alone had begun it
        group.agree(plan, first_round)
        effects.report(Planned(group.order.group, plan.hash))

    def _break_without(self, group: Group, member_id: int, error: GradServerError, effects: Effects) -> None:
        group.disturb()
        self._attached.pop(group.members.connections[member_id], None)
        group.members.lose(member_id, error)
        group.listeners.forget(member_id)
        for exchange in list(group.exchanges.values()):
            if member_id in exchange.participants:
                if exchange.pushed.get(member_id, 0) < exchange.stop:
                    fail(group, exchange, error, effects)
                forget_if_over(group, exchange)
        commits.broken(group, error, effects)

    # ── pushes ────────────────────────────────────────────────────────────────────────────────────────

    def push(self, connection: int, push: Push, payloads: Sequence[Buffer], now: float, effects: Effects) -> None:
        """Take one contribution."""
        member = self._attached.get(connection)
        if member is None:
            error: GradServerError = UnexpectedMessageError("a Push on a connection of no group: join first")
            effects.report(Violation(connection, error))
            return
        group, member_id = member
        if group.recovery is not None:
            return  # it has yet to hear that all this is void
        was_idle = group.next_check is None
        try:
            exchange = admitted(group, member_id, push, now, effects)
            if was_idle and group.next_check is not None:
                self._plan_next_check()
            if exchange is None:
                if group.stragglers.is_closed(member_id, push.key):
                    end_abandoned(group, now, effects, push.key)
                return
            run = checked(group, exchange, member_id, push, payloads)
            group.traffic.charge(exchange, member_id, run)
        except GradServerError as violation:
            effects.report(Violation(connection, violation))
            return
        if push.key.stream == BUCKET:
            current = group.rounds[push.key.number]
            if run.start == exchange.start or run.stop == exchange.stop:
                current.arrived(member_id, exchange.operation, now)
            if not current.held and group.traffic.is_short(member_id):
                current.hold_back()
        before = exchange.complete
        for piece in exchange.take(member_id, run, now):
            complete(group, exchange, piece, now, effects)
        if group.learners.first_rounds and push.key.stream == TRANSFER:
            came = group.learners.take_state(exchange, member_id, before, now)
            if came is not None:
                effects.report(StateComes(group.order.group, push.key.target, push.key.source, *came))
        if push.key.stream == BUCKET:
            look_at = contributed(group, push.key.number, member_id, run.stop == exchange.stop, now, effects)
            if look_at is not None:
                group.check_by(look_at)
                self._next_check = look_at if self._next_check is None else min(self._next_check, look_at)

    # ── held results ────────────────────────────────────────────────────────────────────────────────

    def hold(
        self, connection: int, message: Holding | Held, payloads: Sequence[Buffer], now: float, effects: Effects
    ) -> None:
        """Take what a member of a durable group says that it holds."""
        member = self._attached.get(connection)
        try:
            if member is None:
                raise UnexpectedMessageError(f"a {type(message).__name__} on a connection of no group")
            group, member_id = member
            if isinstance(message, Holding):
                recovery.hold(group, member_id, message, payloads[0], now, effects)
            elif recovery.held(group, member_id, message, payloads[0] if payloads else None, effects):
                recovery.advance(group, now, effects)
        except GradServerError as violation:
            effects.report(Violation(connection, violation))

    def reduced(self, event: Reduced, now: float, effects: Effects) -> None:
        """Go on with a reduction that came back."""
        group = self.groups.get(event.group)
        if group is None:
            return
        if group.order.epoch != event.epoch:
            if recovery.drained(group, event.epoch, event.key, event.slice):
                recovery.advance(group, now, effects)
            return
        exchange = group.exchanges.get(event.key)
        piece = exchange.end_reduction(event.slice) if exchange is not None else None
        if exchange is None or piece is None:
            return
        if exchange.failure is not None:
            tell_all(group, exchange, effects)
            return
        outcome = event.outcome
        if isinstance(outcome, Undecodable):
            self._blame(group, exchange, piece, outcome, now, effects)
        elif isinstance(outcome, Broken):
            self._break(group, exchange, piece, outcome, effects)
        elif isinstance(outcome, NonFinite):
            self._halt(group, exchange, piece, outcome, effects)
        else:
            if event.digests:
                group.rounds[event.key.number].count(event.key.part, event.digests)
            if event.measured:
                group.rounds[event.key.number].tallies[event.key.part].add(event.measured)
            if event.compared:
                group.rounds[event.key.number].repeat(event.key.part, event.compared)
            findings = outcome.findings if isinstance(outcome, Sifted) else ()
            payload = outcome.payload if isinstance(outcome, Sifted) else outcome
            if payload is None and (findings or not isinstance(outcome, Sifted)):
                payload = b""  # it is in members' memory
            answer(group, exchange, piece, payload, now, effects, findings, Facts(event.squares, event.hashes))

    def _blame(
        self, group: Group, exchange: Exchange, piece: Piece, found: Undecodable, now: float, effects: Effects
    ) -> None:
        """Let the giver of a contribution to ``piece`` depart that cannot be decoded. Others go on if they can."""
        guilty, error = found.member_id, undecodable(group, exchange, found)
        violation = Violation(group.members.connections[guilty], error)
        some_are_left = len(piece.given) > 1 or exchange.key.stream == BUCKET  # of a mean no member is needed
        if not group.order.needs_all and some_are_left and exchange.operation.kind not in WORLD_BOUND:
            do_without(group, exchange, piece, guilty, now, effects)
        else:
            exchange.withhold(piece)
            give_up(group, exchange, error, effects)
        effects.report(violation)

    def _halt(self, group: Group, exchange: Exchange, piece: Piece, found: NonFinite, effects: Effects) -> None:
        """Have nothing handed out any more in this group: a contribution to ``piece`` was not finite."""
        exchange.withhold(piece)
        element = exchange.layout.span(piece.start)[0] + found.element
        effects.report(Halted(group.order.group, non_finite(group, exchange, element, found)))

    def _break(self, group: Group, exchange: Exchange, piece: Piece, found: Broken, effects: Effects) -> None:
        """Fail the exchange of ``piece``, which cannot be reduced, and nothing else."""
        exchange.withhold(piece)
        give_up(group, exchange, broken(group, exchange, found), effects)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """Return the earliest time at which an exchange could be overdue."""
        return self._next_check

    def _plan_next_check(self) -> None:
        checks = [group.next_check for group in self.groups.values() if group.next_check is not None]
        self._next_check = min(checks, default=None)

    def tick(self, now: float, effects: Effects) -> None:
        """Fail what is overdue: no contribution for as long as the group's timeout."""
        for group in self.groups.values():
            if group.next_check is not None and group.next_check <= now:
                self._check_deadlines(group, now, effects)
        self._plan_next_check()

    def _check_deadlines(self, group: Group, now: float, effects: Effects) -> None:
        timeout = group.order.round_timeout
        if group.recovery is not None:
            recovery.overdue(group, now, effects)
            group.plan_check(now + timeout)
            return
        for exchange in list(group.exchanges.values()):
            if exchange.failure is None and exchange.touched + timeout <= now:
                if not group.order.needs_all and do_without_overdue(group, exchange, now, effects):
                    continue
                give_up(group, exchange, overdue(group, exchange), effects)
                exchange.put_off(now)
        look(group, now, effects)
        leave_silent_out(group, now, effects)
        self._plan_check(group)

    def _plan_check(self, group: Group) -> None:
        """Look at what is open when the first of it can be overdue. A recovery has a time of its own."""
        if group.recovery is not None:
            return
        timeout = group.order.round_timeout
        waiting = [e.touched + timeout for e in group.exchanges.values() if e.failure is None]
        since = silent_since(group)
        waiting += [] if since is None else [since + timeout]
        look_at = next_look(group)
        group.plan_check(min([*waiting, *([] if look_at is None else [look_at])], default=None))

    def inquire(self, connection: int, inquire: Inquire, effects: Effects) -> None:
        """Say which members are missing from an exchange."""
        member = self._attached.get(connection)
        if member is None:
            effects.report(Violation(connection, UnexpectedMessageError("an Inquire on a connection of no group")))
            return
        group, member_id = member
        exchange = group.exchanges.get(inquire.key)
        if (error := self._why_never(group, inquire.key)) is not None:
            say_failed(group, member_id, inquire.key, error, effects)
            return
        names = tuple(group.call(member_id) for member_id in exchange.missing()[:32]) if exchange else ()
        effects.send(connection, Missing(inquire.key, names))

    @staticmethod
    def _why_never(group: Group, key: ExchangeKey) -> GradServerError | None:
        """Return the error that a transfer ends in; None if it has begun, or may yet begin."""
        if key.stream != TRANSFER or not group.order.needs_all:
            return None
        exchange = group.exchanges.get(key)
        return group.members.departed.get(key.source) if exchange is None else exchange.failure

    def taken(self, connection: int, taken: Taken, effects: Effects) -> None:
        """Note that a listener has read on."""
        member = self._attached.get(connection)
        if member is None:
            effects.report(Violation(connection, UnexpectedMessageError("a Taken on a connection of no group")))
            return
        group, member_id = member
        group.listeners.read(member_id, taken.nbytes)

    def awaited(self, name: str) -> set[int]:
        """Return the connections of members that have yet to begin an exchange that others have begun."""
        group = self.groups.get(name)
        exchanges = () if group is None else group.exchanges.values()
        begun = [exchange for exchange in exchanges if exchange.failure is None and exchange.pushed]
        missing = {
            member_id for exchange in begun for member_id in exchange.participants if member_id not in exchange.pushed
        }
        return set() if group is None else {group.members.connections[member_id] for member_id in missing}

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def allowance(self) -> int:
        """Return the most bytes that one member may have under way, or leave unread: its credits and a backlog."""
        credit = max((group.order.credit for group in self.groups.values()), default=CREDIT_BYTES)
        backlog = max((group.listeners.backlog for group in self.groups.values()), default=0)
        return len(Pool) * (credit + SLICE_BYTES) + backlog

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """Return the traffic of each group, as plain JSON values. Ages in seconds, sizes in bytes."""
        return {name: group.snapshot(now) for name, group in self.groups.items()}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for group in self.groups.values():
            group.validate()
