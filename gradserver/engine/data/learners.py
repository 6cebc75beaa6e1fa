"""How the data half of an elastic group takes somebody in.

    order    what changes
    ───────  ────────────────────────────────────────────────────────────────────────────────────────────────────
    Admit    the seat is somebody's; only the state's transfers have to do with him
    Expect   from a round on, which nobody has begun, its buckets wait for him too; or he listens: he is sent their
             results, unasked
    Excuse   they do not: what was open goes on without him, and his state is sent no further
    Reseat   he is a member: collectives and transfers, too, from the round after his first one on
    Depart   as for members; what he gave before counts

An exchange has the participants that it had when it began, and who comes later has no part in it: which those are
follows from the round in which it was called. A seat can have been somebody else's before. Whoever sends something to
him, as he does not know yet that he is gone, names the membership that he goes by, and is told.
"""

from __future__ import annotations

from gradserver.engine.data.exchange import Exchange
from gradserver.engine.data.group import Coming, Group
from gradserver.engine.data.membership import cut
from gradserver.engine.effects import Effects
from gradserver.engine.events import Admit, Excuse, Expect, Reseat, StateComes
from gradserver.protocol.errors import OutOfStepError, WorkerLostError
from gradserver.protocol.exchange import STATE_TAG, ExchangeKey, Stream, is_state
from gradserver.protocol.messages import Failure, Push, Scope

NOT_YET = -1
_REPORT_SECONDS = 0.5
"""How often it is reported that more of a state has come, at most, once it has begun."""


def admit(group: Group, order: Admit) -> None:
    """Somebody has a seat, which may have been somebody else's."""
    seat = order.seat
    group.seats.admit(seat, order.occupant.name)
    group.connections += [-1] * (seat + 1 - len(group.connections))
    group.tokens += [""] * (seat + 1 - len(group.tokens))
    group.connections[seat], group.tokens[seat] = order.occupant.connection, order.token
    group.departed.pop(seat, None)
    group.stragglers.hand_over(seat)
    group.entered[seat] = group.since[seat] = NOT_YET
    group.heard.pop(seat, None)
    group.states.pop(seat, None)
    group.coming.pop(seat, None)
    group.sequences.hand_over(seat)
    group.traffic.hand_over(seat, group.exchanges.values())


def expect(group: Group, order: Expect) -> None:
    """They contribute from a round on, or are sent its results unasked."""
    listens = order.listen or group.order.lateness is not None  # a member that contributes can be late from then on
    for seat in order.seats:
        group.listeners.end(seat)
        if listens:
            group.listeners.begin((seat,), order.round)
        if not order.listen:
            group.entered[seat] = order.round
    if order.transfers:
        group.states.update(zip(order.seats, ((number, group.epoch) for number in order.transfers), strict=True))


def excuse(group: Group, order: Excuse, now: float, effects: Effects) -> None:
    """He contributes to nothing, and nothing waits for him any more."""
    group.entered[order.seat] = NOT_YET
    group.listeners.forget(order.seat)
    group.states.pop(order.seat, None)
    for exchange in list(group.exchanges.values()):
        if exchange.key.stream == Stream.BUCKET and order.seat in exchange.participants and exchange.failure is None:
            cut(group, exchange, order.seat, False, now, effects)


def reseat(group: Group, order: Reseat) -> None:
    """Who is there from now on."""
    new = [seat for seat in order.seats if group.since.get(seat) == NOT_YET]
    group.before = max((group.entered[seat] for seat in new), default=group.before[0]), group.epoch
    group.since.update(dict.fromkeys(new, order.epoch))
    group.seats.reseat(order.seats)
    group.epoch, group.change = order.epoch, f"{group.calls(new)} joined"
    group.table.world_size = len(order.seats)
    group.stragglers.pace.changed()


def check_may_begin(group: Group, rank: int, key: ExchangeKey) -> None:
    """Raise OutOfStepError if ``rank`` begins what it has no part in, because it joined later."""
    entered = group.entered.get(rank)
    if entered is None or key.stream == Stream.TRANSFER:
        return
    part = key.number if key.stream == Stream.BUCKET else key.part - 1
    if entered == NOT_YET or part < entered or (key.stream == Stream.COLLECTIVE and group.since[rank] == NOT_YET):
        raise OutOfStepError(f"{group.call(rank)} has no part in {group.describe(key)}: it was not a member then")


def state_comes(group: Group, exchange: Exchange, rank: int, before: int, now: float, effects: Effects) -> None:
    """``rank`` has pushed to a transfer that was complete up to slice ``before``: report what came of a state by that.

    The first bytes are reported as they come, later ones twice a second, and also that somebody asks for it: what each
    end says by itself is nothing that has come.
    """
    key, seat = exchange.key, exchange.key.target
    if not is_state(key) or group.since.get(seat) != NOT_YET:
        return
    which = key.part - STATE_TAG, key.source
    coming = group.coming.get(seat)
    if coming is None or coming.key != which:
        if rank != seat:
            return  # it has yet to be asked for
        coming = group.coming[seat] = Coming(which)
    if exchange.complete > before:
        coming.nbytes += exchange.layout.run_bytes(before, exchange.complete)
        group.heard[seat] = now
    begins = coming.nbytes > 0 and not coming.begun
    if now < coming.reported + _REPORT_SECONDS and not begins:
        return
    coming.begun |= begins
    nbytes, coming.nbytes, coming.reported = coming.nbytes, 0, now
    effects.report(StateComes(group.order.group, seat, key.source, which[0], nbytes))


def is_stale(group: Group, rank: int, push: Push) -> bool:
    """Whether this is for whoever had somebody's seat before, or of a state that nobody is to get any more."""
    key = push.key
    if key.stream != Stream.TRANSFER:
        return False
    if is_state(key):
        number, epoch = group.states.get(key.target, (0, 0))
        since = group.since.get(key.source, 0)
        return key.part - STATE_TAG != number or not 0 <= since <= epoch
    other = key.target if key.source == rank else key.source
    since = group.since.get(other, 0)
    return since == NOT_YET or push.epoch < since


def turn_away(group: Group, rank: int, push: Push, effects: Effects) -> None:
    """Tell ``rank`` that whom it means is gone, or that it sends or takes a state in vain."""
    what = "who had that rank is gone, and somebody else has joined"
    if is_state(push.key):
        what = "this state is not waited for any more"
    error = WorkerLostError(f"{group.describe(push.key)}: {what}")
    effects.send(group.connections[rank], Failure.of(error, Scope.EXCHANGE, push.key))
