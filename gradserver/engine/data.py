"""The data half: slices in, slices out.

An exchange lives from the first push for it to the last result:

    state      event                               next       what happens
    ─────────  ──────────────────────────────────  ─────────  ─────────────────────────────────────────
    (none)     push of slice 0                     OPEN       the deadline starts
    (none)     push of slice 0, group halted       (none)     the sender is told
    (none)     push of a later slice               (none)     dropped, if the exchange has been
    OPEN       push, slice incomplete              OPEN       kept, at its sender's credit
    OPEN       push, slice complete                OPEN       Reduce, or results at once
    OPEN       last slice's results sent           (none)     a bucket counts towards its round
    OPEN       push of another operation           FAILED     every contributor is told both sides
    OPEN       a missing participant departs       FAILED     every contributor is told who
    OPEN       non-finite, deadline                FAILED     every contributor is told who
    OPEN       a new plan, for a bucket            FAILED     every contributor is told
    FAILED     push of slice 0                     FAILED     the sender is told
    FAILED     push of a later slice               FAILED     dropped
    FAILED     every participant told or departed  (none)

A failed bucket halts its group; a failed collective or transfer fails alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradserver.engine.events import (
    CloseGroup,
    Command,
    Contribution,
    Depart,
    Halted,
    NonFinite,
    OpenGroup,
    Order,
    Reduce,
    Reduced,
    Report,
    RoundCompleted,
    RoundRecord,
    Send,
    SetPlan,
    Violation,
)
from gradserver.engine.exchanges import WEIGHED, Exchange, Group, Piece, Round, Run, check_operation
from protocol.errors import (
    GradServerError,
    InvalidRankError,
    OutOfStepError,
    SizeMismatchError,
    UnexpectedMessageError,
)
from protocol.exchange import (
    IN_PLACE,
    ExchangeKey,
    Kind,
    Layout,
    Op,
    Operation,
    Stream,
    gets,
    gives,
    layout_of,
)
from protocol.messages import Failure, Inquire, Missing, Push, Result, Scope
from protocol.plan import Plan
from protocol.wire import Buffer

_MAX_FAILED = 1024
"""Failed exchanges that are kept for those who come late; whoever is later still waits for its deadline."""


class Data:
    """Matches slices, and asks for their reduction. Its methods append commands and return reports."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._seats: dict[int, tuple[Group, int]] = {}
        self._next_check: float | None = None

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, order: Order, commands: list[Command]) -> list[Report]:
        """Carry out what control says."""
        match order:
            case OpenGroup(name, _, seats):
                group = self.groups[name] = Group(order)
                for rank, seat in enumerate(seats):
                    self._seats[seat.connection] = (group, rank)
            case SetPlan(name, plan, first_round):
                return self._set_plan(self.groups[name], plan, first_round, commands)
            case Depart(name, rank, error):
                self._depart(self.groups[name], rank, error, commands)
            case CloseGroup(name):
                group = self.groups.pop(name)
                for seat in group.order.seats:
                    if seat.connection in self._seats and self._seats[seat.connection][0] is group:
                        del self._seats[seat.connection]
                self._plan_next_check()
        return []

    def _set_plan(self, group: Group, plan: Plan, first_round: int, commands: list[Command]) -> list[Report]:
        """From ``first_round`` on, buckets are this plan's. A round that was begun by another one is given up."""
        reports: list[Report] = []
        for exchange in list(group.exchanges.values()):
            if exchange.key.stream == Stream.BUCKET and exchange.failure is None:
                error = OutOfStepError(f"{group.describe(exchange.key)} was open when a new plan was agreed on")
                self._fail(group, exchange, error, commands)
                reports.append(Halted(group.order.group, error))
        group.plan, group.first_round = plan, first_round
        group.full_buckets = sum(bucket.numel > 0 for bucket in plan.buckets)
        group.due = {key: due for key, due in group.due.items() if key[1] != Stream.BUCKET}
        group.rounds.clear()
        return reports

    def _depart(self, group: Group, rank: int, error: GradServerError, commands: list[Command]) -> None:
        self._seats.pop(group.order.seats[rank].connection, None)
        group.departed[rank] = error
        for exchange in list(group.exchanges.values()):
            if rank in exchange.participants:
                if exchange.pushed.get(rank, 0) < exchange.layout.count:
                    self._fail(group, exchange, error, commands)
                self._forget_if_over(group, exchange)

    # ── pushes ────────────────────────────────────────────────────────────────────────────────────────

    def push(
        self, connection: int, push: Push, payloads: Sequence[Buffer], now: float, commands: list[Command]
    ) -> list[Report]:
        """Take one contribution."""
        seat = self._seats.get(connection)
        if seat is None:
            error: GradServerError = UnexpectedMessageError("a Push from someone who is in no group: join first")
            return [Violation(connection, error)]
        group, rank = seat
        try:
            exchange = self._admit(group, rank, push, now, commands)
            if exchange is None:
                return []
            run = self._check(group, exchange, rank, push, payloads[0] if payloads else None)
            group.charge(exchange, rank, run)
        except GradServerError as violation:
            return [Violation(connection, violation)]
        exchange.touched = now
        reports: list[Report] = []
        for piece in exchange.take(rank, run):
            exchange.last = rank
            reports += self._complete(group, exchange, piece, now, commands)
        return reports

    def _admit(self, group: Group, rank: int, push: Push, now: float, commands: list[Command]) -> Exchange | None:
        """The exchange that ``push`` is for, opened if need be; None if there is nothing more to do."""
        key = push.key
        exchange = group.exchanges.get(key)
        if push.slice == 0:
            group.take_number(rank, key)
            operation = self._operation(group, rank, push)
            if exchange is None:
                exchange = self._open(group, rank, key, operation, now)
            elif exchange.operation is not operation and exchange.operation != operation and exchange.failure is None:
                error = group.mismatch(exchange, rank, operation)
                exchange.join(rank, push.weight)
                self._fail(group, exchange, error, commands)
                return None
            exchange.join(rank, push.weight)
        elif exchange is None:
            if group.is_past(rank, key):
                return None  # the tail of an exchange that failed meanwhile
            raise UnexpectedMessageError(f"slice {push.slice} of an exchange that did not begin with slice 0")
        if exchange.failure is not None:
            if push.slice == 0:
                self._tell(group, exchange, rank, commands)
                self._forget_if_over(group, exchange)
            return None
        return exchange

    def _operation(self, group: Group, rank: int, push: Push) -> Operation:
        key, operation = push.key, push.operation
        if key.stream == Stream.BUCKET:
            if group.plan is None or key.part >= len(group.plan.buckets):
                raise OutOfStepError(f"bucket {key.part} is in no plan that {group.call(rank)} agreed on")
            return group.plan.buckets[key.part].operation
        if operation is None:
            raise UnexpectedMessageError("the first slice of a collective must say which one it is")
        if key.stream == Stream.TRANSFER and rank not in (key.source, key.target):
            raise InvalidRankError(f"rank {rank} cannot take part in a transfer from {key.source} to {key.target}")
        return operation

    def _open(self, group: Group, rank: int, key: ExchangeKey, operation: Operation, now: float) -> Exchange:
        check_operation(key, operation, group.world)
        layout = layout_of(operation, group.world)
        if layout.count == 0:
            raise UnexpectedMessageError("empty tensors are not exchanged")
        transfer = key.stream == Stream.TRANSFER
        participants = tuple(sorted((key.source, key.target))) if transfer else tuple(range(group.world))
        exchange = Exchange(key, operation, layout, participants, rank, now, now)
        halted = group.halted or (group.buckets_halted if key.stream == Stream.BUCKET else None)
        first_to_depart = next((rank for rank in group.departed if rank in participants), None)
        exchange.failure = halted or (None if first_to_depart is None else group.departed[first_to_depart])
        if exchange.failure is not None:  # for the others too, when they come: there is nothing to remember
            return exchange
        group.exchanges[key] = exchange
        if key.stream == Stream.BUCKET:
            group.rounds.setdefault(key.number, Round(now))
        if group.next_check is None:  # else an exchange that began earlier is due earlier
            group.next_check = now + group.order.timeout
            self._plan_next_check()
        return exchange

    def _check(self, group: Group, exchange: Exchange, rank: int, push: Push, payload: Buffer | None) -> Run:
        """Check a contribution against what is due from ``rank``."""
        layout, operation = exchange.layout, exchange.operation
        start, stop = push.slice, push.slice + push.slices
        if start != exchange.pushed.get(rank, -1) or stop > layout.count:
            raise OutOfStepError(
                f"{group.describe(exchange.key)} from {group.call(rank)}: slice {start} came, "
                f"{exchange.pushed.get(rank, 0)} of {layout.count} is due"
            )
        if push.slices > 1 and operation.kind not in IN_PLACE:
            raise OutOfStepError(f"{operation} from {group.call(rank)} goes slice by slice, {push.slices} came together")
        has_to_give = gives(operation, rank, exchange.key)
        expected = layout.run_bytes(start, stop)
        size = 0 if payload is None else len(payload)
        shared = push.place is not None
        if shared:  # there must be room for what is given, and for the result
            is_right = size >= expected * layout.replies and (
                push.present == has_to_give or (has_to_give and operation.kind in WEIGHED)
            )
        elif payload is None:
            is_right = not has_to_give or operation.kind in WEIGHED
        else:
            is_right = has_to_give and size == expected
        if not is_right:
            raise SizeMismatchError(
                f"{group.describe(exchange.key)} from {group.call(rank)}: slice {start} has {size} "
                f"bytes, {expected if has_to_give else 0} were agreed"
            )
        if push.present:
            group.bytes_in += expected
        return Run(start, stop, payload, push.present, shared)

    # ── results ───────────────────────────────────────────────────────────────────────────────────────

    def _complete(
        self, group: Group, exchange: Exchange, piece: Piece, now: float, commands: list[Command]
    ) -> list[Report]:
        """All contributions to some slices are in."""
        operation, weights = exchange.operation, exchange.weights
        contributions = [
            Contribution(rank, weights[rank], run.payload if run.present else None) for rank, run in piece.given.items()
        ]
        if operation.kind in WEIGHED:
            contributions = [contribution for contribution in contributions if contribution.weight > 0]
        elif operation.kind is not Kind.ALL_GATHER:
            contributions = [contribution for contribution in contributions if contribution.payload is not None]
        if operation.op is Op.FIRST:
            del contributions[1:]
        if all(contribution.payload is None for contribution in contributions):
            return self._answer(group, exchange, piece, None, now, commands)
        getters = [
            piece.given[rank]
            for rank in exchange.participants
            if gets(operation, rank, exchange.key, exchange.layout.owner(piece.start))
        ]
        targets = [run.payload for run in getters if run.shared and run.payload is not None]
        if operation.op is Op.NONE and operation.kind is not Kind.ALL_GATHER and not targets:
            (contribution,) = contributions  # one gives, others get: the bytes pass through as they are
            if not piece.given[contribution.rank].shared:
                return self._answer(group, exchange, piece, contribution.payload, now, commands)
        exchange.reducing[piece.start] = piece
        nbytes = exchange.layout.run_bytes(piece.start, piece.stop)
        keep = len(targets) < len(getters)
        where = group.order.group, group.order.epoch, exchange.key, piece.start
        commands.append(Reduce(*where, operation, nbytes, contributions, targets, keep))
        return []

    def reduced(self, event: Reduced, now: float, commands: list[Command]) -> list[Report]:
        """A reduction came back."""
        group = self.groups.get(event.group)
        if group is None or group.order.epoch != event.epoch:
            return []
        exchange = group.exchanges.get(event.key)
        piece = exchange.reducing.pop(event.slice, None) if exchange is not None else None
        if exchange is None or piece is None:
            return []
        if exchange.failure is not None:
            self._tell_all(group, exchange, commands)
            return []
        if isinstance(event.outcome, NonFinite):
            self._refund(group, exchange, piece)
            return self._halt(group, exchange, piece.start, event.outcome, commands)
        payload = b"" if event.outcome is None else event.outcome
        return self._answer(group, exchange, piece, payload, now, commands)

    def _answer(
        self,
        group: Group,
        exchange: Exchange,
        piece: Piece,
        payload: Buffer | None,
        now: float,
        commands: list[Command],
    ) -> list[Report]:
        """Send everybody the result of some slices: ``payload``, or None for zeros. To shared memory it was written."""
        key, operation, layout = exchange.key, exchange.operation, exchange.layout
        start, stop, given = piece
        weight = sum(exchange.weights[rank] for rank in exchange.participants)
        owner = layout.owner(start)
        placed = Result(key, start, weight, True, stop - start, True)
        empty = Result(key, start, weight, False, stop - start)
        travels: list[tuple[Result, Sequence[Buffer]]] = []
        acknowledged: list[Command] = []
        seats, departed = group.order.seats, group.departed
        self._refund(group, exchange, piece)
        for rank in exchange.participants:
            if rank in departed:
                continue
            connection = seats[rank].connection
            if payload is None or not gets(operation, rank, key, owner):
                acknowledged.append(Send(connection, empty))
                continue
            group.bytes_out += layout.run_bytes(start, stop) * layout.replies
            if given[rank].shared:
                commands.append(Send(connection, placed))
                continue
            travels = travels or list(_by_slice(key, layout, piece, weight, payload))
            commands += [Send(connection, result, payloads) for result, payloads in travels]
        # Last, because then the payload's memory is its giver's again, and over memory it is that very memory.
        commands += acknowledged
        group.slices += stop - start
        exchange.answered += stop - start
        if exchange.answered < layout.count:
            return []
        del group.exchanges[key]
        return self._bucket_done(group, exchange, now) if key.stream == Stream.BUCKET else []

    def _refund(self, group: Group, exchange: Exchange, piece: Piece) -> None:
        for rank, run in piece.given.items():
            group.refund(exchange, rank, run)

    def _bucket_done(self, group: Group, exchange: Exchange, now: float) -> list[Report]:
        number = exchange.key.number
        current = group.rounds[number]
        current.buckets += 1
        current.weights.update(exchange.weights)
        current.last = exchange.last
        if current.buckets < group.full_buckets:
            return []
        del group.rounds[number]
        weights = tuple(current.weights[rank] for rank in range(group.world))
        record = RoundRecord(number, weights, current.opened, now, current.last)
        return [RoundCompleted(group.order.group, record)]

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────

    def _halt(
        self, group: Group, exchange: Exchange, index: int, found: NonFinite, commands: list[Command]
    ) -> list[Report]:
        """A contribution to the slices from ``index`` was not finite: this group hands out nothing any more."""
        element = exchange.layout.span(index)[0] + found.element
        error = group.non_finite(exchange, element, found)
        group.halted = error
        for open_exchange in list(group.exchanges.values()):
            self._fail(group, open_exchange, error, commands)
        return [Halted(group.order.group, error)]

    def _fail(self, group: Group, exchange: Exchange, error: GradServerError, commands: list[Command]) -> None:
        """Fail ``exchange``, and tell those who contributed. Others are told when they come."""
        if exchange.failure is not None:
            return
        exchange.failure = error
        for rank, run in exchange.unanswered():
            group.refund(exchange, rank, run)
        exchange.runs.clear()
        if not exchange.writes():
            exchange.reducing.clear()
        if exchange.key.stream == Stream.BUCKET and group.buckets_halted is None:
            group.buckets_halted = error
        group.failed.append(exchange.key)
        if len(group.failed) > _MAX_FAILED:
            group.exchanges.pop(group.failed.popleft(), None)
        self._tell_all(group, exchange, commands)

    def _tell_all(self, group: Group, exchange: Exchange, commands: list[Command]) -> None:
        """Tell those who contributed, unless something is still being written to their memory: then later."""
        if not exchange.reducing:
            for rank in exchange.pushed:
                self._tell(group, exchange, rank, commands)
            self._forget_if_over(group, exchange)

    def _tell(self, group: Group, exchange: Exchange, rank: int, commands: list[Command]) -> None:
        if rank not in group.departed and exchange.failure is not None:
            failure = Failure.of(exchange.failure, Scope.EXCHANGE, exchange.key)
            commands.append(Send(group.order.seats[rank].connection, failure))

    def _forget_if_over(self, group: Group, exchange: Exchange) -> None:
        if (
            exchange.failure is not None
            and not exchange.reducing
            and all(rank in exchange.pushed or rank in group.departed for rank in exchange.participants)
        ):
            group.exchanges.pop(exchange.key, None)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────

    def next_deadline(self) -> float | None:
        """The earliest time at which an exchange could be overdue."""
        return self._next_check

    def _plan_next_check(self) -> None:
        checks = [group.next_check for group in self.groups.values() if group.next_check is not None]
        self._next_check = min(checks, default=None)

    def tick(self, now: float, commands: list[Command]) -> list[Report]:
        """Fail what is overdue: no contribution for as long as the group's timeout."""
        reports: list[Report] = []
        for group in self.groups.values():
            if group.next_check is not None and group.next_check <= now:
                reports += self._check_deadlines(group, now, commands)
        self._plan_next_check()
        return reports

    def _check_deadlines(self, group: Group, now: float, commands: list[Command]) -> Iterator[Report]:
        timeout = group.order.timeout
        for exchange in list(group.exchanges.values()):
            if exchange.failure is None and exchange.touched + timeout <= now:
                error = group.overdue(exchange)
                self._fail(group, exchange, error, commands)
                if exchange.key.stream == Stream.BUCKET:
                    yield Halted(group.order.group, error)
        waiting = [e.touched + timeout for e in group.exchanges.values() if e.failure is None]
        group.next_check = min(waiting, default=None)

    def inquire(self, connection: int, inquire: Inquire, commands: list[Command]) -> list[Report]:
        """Say who is missing from an exchange."""
        seat = self._seats.get(connection)
        if seat is None:
            return [Violation(connection, UnexpectedMessageError("an Inquire from someone who is in no group"))]
        group, _ = seat
        exchange = group.exchanges.get(inquire.key)
        names = tuple(group.call(rank) for rank in exchange.missing()[:32]) if exchange else ()
        commands.append(Send(connection, Missing(inquire.key, names)))
        return []

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    def snapshot(self, now: float) -> dict[str, dict[str, object]]:
        """Traffic of each group, as plain JSON values. Ages in seconds, sizes in bytes."""
        return {name: group.snapshot(now) for name, group in self.groups.items()}

    def validate(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for group in self.groups.values():
            group.validate()


def _by_slice(
    key: ExchangeKey, layout: Layout, piece: Piece, weight: float, payload: Buffer
) -> Iterator[tuple[Result, Sequence[Buffer]]]:
    """The results of ``piece`` for who is to get them as payloads."""
    if piece.stop - piece.start == 1:
        yield Result(key, piece.start, weight, True), (payload,)
        return
    view, at = memoryview(payload), 0
    for index in range(piece.start, piece.stop):
        size = layout.nbytes(index)
        yield Result(key, index, weight, True), (view[at : at + size],)
        at += size
