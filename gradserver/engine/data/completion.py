"""Complete slices at the data half: all contributions are in, are reduced, and all members are answered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from gradserver.engine.commands import Command, Contribution, Digests, Hashes, Measures, Reduce, Repeated, Send, make
from gradserver.engine.data.exchange import NO_FACTS, WEIGHED, Exchange, Facts, Payload, Piece, Run
from gradserver.engine.data.group import Group
from gradserver.engine.data.nonfinite import counting, sifted
from gradserver.engine.data.rounds import Round
from gradserver.engine.effects import Effects
from gradserver.engine.events import Finding
from gradserver.engine.figures import figures_of
from gradserver.engine.policy import HALT, PROPAGATE
from gradserver.engine.proofs import Said
from gradserver.engine.reports import Behind, RoundCompleted
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import BUCKET, JOINED, PORTIONED, Kind, Layout, Op, gets, is_state, unasked_cost
from gradserver.protocol.means import PLAIN
from gradserver.protocol.messages import Result
from gradserver.protocol.messages.data import proof_of, squares_of

_GIVEN_BY_ALL: Final = JOINED | {Kind.ALL_TO_ALL}
_FIRST, _NONE, _MEAN = Op.FIRST, Op.NONE, Op.MEAN


def complete(group: Group, exchange: Exchange, piece: Piece, now: float, effects: Effects) -> None:
    """Have some slices reduced, to which all contributions are in."""
    operation, key = exchange.operation, exchange.key
    contributions, repeated = _counting(group, exchange, piece)
    if not any(contribution.payload is not None for contribution in contributions):
        if not (operation.is_lossy and group.order.durable and key.stream == BUCKET):
            answer(group, exchange, piece, None, now, effects)
            return
        contributions = []  # what an earlier reduction of this round has left is void: its result was lost
    owner, receivers = exchange.owner(piece), _receivers(exchange, piece)
    getters = [piece.given[member_id] for member_id in receivers if gets(operation, member_id, key, owner)]
    targets = [run.target or run.payload for run in getters if run.shared and run.payload is not None]
    if operation.op is _NONE and operation.kind not in _GIVEN_BY_ALL and not targets:
        (contribution,) = contributions  # one gives, others get: the bytes pass through as they are
        payload = contribution.payload
        if payload is not None and not piece.given[contribution.member_id].shared:
            passed = portions(payload, len(piece.given)) if operation.kind in PORTIONED else payload
            answer(group, exchange, piece, passed, now, effects)
            return
    exchange.begin_reduction(piece)
    keep = len(targets) < len(getters) or bool(group.listeners.of(exchange, piece))
    reduction = _reduction(group, exchange, piece, contributions, repeated, targets, keep)
    if operation.kind in PORTIONED:  # each member gets a part of it
        places = [place for place, run in enumerate(piece.given.values()) if run.shared]
        reduction = reduction._replace(world=len(piece.given), places=places)
    effects.reduce(reduction)


def _counting(group: Group, exchange: Exchange, piece: Piece) -> tuple[list[Contribution], Repeated | None]:
    """Return the contributions that count, in rank order, and those to be compared first."""
    operation, number = exchange.operation, exchange.key.number
    weighed = operation.kind in WEIGHED
    contributions = [
        make(Contribution, (member_id, run.weight, run.payload if run.present else None))
        for member_id, run in piece.given.items()
        if not weighed or run.weight > 0
    ]
    if weighed and operation.op is _MEAN and exchange.key.stream == BUCKET:
        return group.witnesses.sort_out(number, group.rounds[number], contributions)
    if operation.op is _FIRST or (not weighed and operation.kind not in _GIVEN_BY_ALL):
        contributions = [contribution for contribution in contributions if contribution.payload is not None]
    return contributions[:1] if operation.op is _FIRST else contributions, None


def _reduction(
    group: Group,
    exchange: Exchange,
    piece: Piece,
    contributions: Sequence[Contribution],
    repeated: Repeated | None,
    targets: Sequence[Buffer],
    keep: bool,
) -> Reduce:
    """Return the reduction of some slices, by the group's rules if they are a round's."""
    order, layout, key, operation = group.order, exchange.layout, exchange.key, exchange.operation
    numel = layout.run_numel(piece.start, piece.stop)
    where = order.group, order.epoch, key, piece.start
    what = operation, layout.span(piece.start)[0], layout.run_bytes(piece.start, piece.stop), numel
    proven = group.proofs is not None and operation.kind not in PORTIONED and not is_state(key)
    hashes = Hashes(group.proofs.key, []) if group.proofs is not None and proven else None
    if key.stream != BUCKET:  # a collective carries any number, and has no next round
        more = contributions, targets, keep
        return Reduce(*where, *what, None, *more, nonfinite=PROPAGATE, each=layout.step, hashes=hashes)
    averages = operation.op is _MEAN
    tells = averages and operation.kind is Kind.ALL_REDUCE
    measures: Measures | None = None
    if tells and len(contributions) > 1:
        measures = group.measures(key)
        group.rounds[key.number].compare(key.part, numel)
    return Reduce(
        *where,
        *what,
        group.memory(key.part, piece.start) if operation.is_lossy else None,
        contributions,
        targets,
        keep,
        digests=Digests(group.places[key.part], []) if group.rounds[key.number].hashed else None,
        nonfinite=order.nonfinite,
        spans=_spans(exchange, piece) if averages and order.nonfinite not in (HALT, PROPAGATE) else (),
        mean=order.mean if averages else PLAIN,
        squares=[] if tells else None,
        measures=measures,
        repeated=repeated,
        each=layout.step,
        hashes=hashes,
    )


def portions(payload: Buffer, count: int) -> tuple[Buffer, ...]:
    """Cut a slice into ``count`` equal parts, one for each participant."""
    view, size = memoryview(payload), len(payload) // count
    return tuple(view[place * size : (place + 1) * size] for place in range(count))


def _spans(exchange: Exchange, piece: Piece) -> Sequence[tuple[int, int]]:
    """Return the elements of each slice, counted from the first one's."""
    first = exchange.layout.span(piece.start)[0]
    spans = (exchange.layout.span(index) for index in range(piece.start, piece.stop))
    return [(start - first, stop - first) for start, stop in spans]


def answer(
    group: Group,
    exchange: Exchange,
    piece: Piece,
    payload: Payload,
    now: float,
    effects: Effects,
    findings: Sequence[Finding] = (),
    facts: Facts = NO_FACTS,
) -> None:
    """Send all members the result of some slices: ``payload``, or None for zeros. To shared memory it was written.

    The payload of a `PORTIONED` operation is a tuple, with the result of each participant. ``findings`` name the
    contributions to each slice that do not count, and ``facts`` are those about the result. In a durable group a result
    waits for those of earlier slices. So members hold a prefix of each bucket.
    """
    if group.order.durable and exchange.key.stream == BUCKET and exchange.keeps_back(piece):
        exchange.keep_back(piece, payload, findings, facts)
        return
    _send(group, exchange, piece, payload, findings, facts, now, effects)
    if exchange.made:
        for later in exchange.release():
            _send(group, exchange, *later, now, effects)


def _send(
    group: Group,
    exchange: Exchange,
    piece: Piece,
    payload: Payload,
    findings: Sequence[Finding],
    facts: Facts,
    now: float,
    effects: Effects,
) -> None:
    group.traffic.refund(exchange, piece.given.items())
    acknowledged: list[Command] = []
    over = _ends_round(group, exchange, piece)
    if findings:
        for part, part_payload, nonfinite in sifted(group, exchange, piece, payload, findings):
            is_last = over and part.stop == piece.stop
            own = facts.of(part.start - piece.start, part.stop - piece.start)
            _tell(group, exchange, part, part_payload, nonfinite, own, is_last, acknowledged, effects)
    else:
        _tell(group, exchange, piece, payload, (), facts, over, acknowledged, effects)
    # Last, because then the payload's memory is its giver's again, and over memory it is that very memory.
    effects.commands += acknowledged
    group.traffic.answer(piece.stop - piece.start)
    if not exchange.answer(piece.stop - piece.start):
        return
    key = exchange.key
    group.exchanges.end(exchange)
    if key.stream == BUCKET:
        _bucket_done(group, exchange, over, now, effects)


def _ends_round(group: Group, exchange: Exchange, piece: Piece) -> bool:
    """Tell whether the round ends with the results of ``piece``, and members hear so from them."""
    key = exchange.key
    if not group.is_steady or key.stream != BUCKET:
        return False
    if exchange.answered + piece.stop - piece.start < exchange.stop - exchange.start:
        return False
    current = group.rounds[key.number]
    return len(current.done) + 1 >= group.full_buckets[current.section]


def _tell(
    group: Group,
    exchange: Exchange,
    piece: Piece,
    payload: Payload,
    nonfinite: tuple[int, ...],
    facts: Facts,
    over: bool,
    acknowledged: list[Command],
    effects: Effects,
) -> None:
    """Send the result of some slices. Contributions of the members ``nonfinite`` to them are not finite.

    The round may be ``over`` with them.
    """
    key, operation, layout = exchange.key, exchange.operation, exchange.layout
    start, stop, given = piece
    weight = sum([run.weight for run in given.values()], 0.0)
    owner = exchange.owner(piece)
    lacking = exchange.lacking(piece)
    weights = _weights(given) if group.order.durable and key.stream == BUCKET else ()
    if nonfinite:
        weight = counting(group, given, nonfinite)
        weights = tuple(-own if member_id in nonfinite else own for member_id, own in enumerate(weights))

    proof = b""
    if group.proofs is not None:
        proof = _proof(group, exchange, piece, payload, Said(key, weight, lacking, weights), facts)

    def result(present: bool, slices: int, is_placed: bool) -> Result:
        own = tuple(facts.squares[: 2 * slices]) if present else ()
        told = lacking, weights, nonfinite, own, proof_of(proof, 0, slices) if proof else proof
        return Result(key, start, weight, present, slices, is_placed, over, *told)

    placed = empty = run = None  # made when a member is to get them: most often all get the same one
    connections, departed = group.members.connections, group.members.departed
    whole: Any = payload  # where it is the same for all
    parts = dict(zip(given, payload, strict=True)) if type(payload) is tuple else None
    nbytes, sent = layout.reply_bytes(start, stop), 0
    for member_id in _receivers(exchange, piece):
        if member_id in departed:
            continue
        connection = connections[member_id]
        if payload is None or not gets(operation, member_id, key, owner):
            empty = empty or result(False, stop - start, False)
            acknowledged.append(Send(connection, empty))
            continue
        sent += nbytes
        if given[member_id].shared:
            placed = placed or result(True, stop - start, True)
            effects.send(connection, placed)
            continue
        if parts is not None:
            effects.send(connection, result(True, 1, False), (parts[member_id],))
            continue
        run = run or result(True, stop - start, False)  # it has pushed these slices together, too
        effects.send(connection, run, (whole,))
    if sent:
        group.traffic.send(sent)
    if listening := group.listeners.of(exchange, piece):
        unasked: list[tuple[Result, Sequence[Buffer]]]
        if payload is None:
            unasked = [(empty or result(False, stop - start, False), ())]
        else:
            unasked = _by_slice(layout, piece, result(True, stop - start, False), whole)
        _send_unasked(group, listening, unasked, effects)


def _proof(group: Group, exchange: Exchange, piece: Piece, payload: Payload, said: Said, facts: Facts) -> bytes:
    """Return the proof of some slices, as far as members keep results of them for one another."""
    proofs, layout = group.proofs, exchange.layout
    if proofs is None or isinstance(payload, tuple) or is_state(exchange.key):
        return b""
    hashes = facts.hashes
    if payload is None or not hashes:  # it was not reduced
        sizes = [layout.reply_bytes(index, index + 1) for index in range(piece.start, piece.stop)]
        hashes = proofs.hashes(payload, sizes)
    return proofs.prove(group.order.epoch, said, piece.start, hashes, facts.squares)


def _send_unasked(
    group: Group, member_ids: Iterable[int], results: Sequence[tuple[Result, Sequence[Buffer]]], effects: Effects
) -> None:
    """Send ``results`` to listeners, as far as each has read what it was sent before."""
    for member_id in member_ids:
        connection = group.members.connections[member_id]
        if connection < 0 and group.order.durable:
            continue  # other members keep the results for it, until it is back
        for result, payloads in results:
            unread = unasked_cost(payloads[0] if payloads else None)
            if connection < 0 or not group.listeners.charge(member_id, unread):
                group.listeners.end(member_id)
                effects.report(Behind(group.order.group, member_id, result.key.number))
                break
            group.traffic.send(len(payloads[0]) if payloads else 0)
            effects.send(connection, result, payloads)


def _weights(given: dict[int, Run]) -> tuple[float, ...]:
    """Return the weights that counted, by member id up to the last giver."""
    weights = [0.0] * (max(given, default=0) + 1)
    for member_id, run in given.items():
        weights[member_id] = run.weight
    return tuple(weights)


def _receivers(exchange: Exchange, piece: Piece) -> Sequence[int]:
    """Return the members that wait for ``piece``: also those that have given to it and were late afterwards."""
    if not exchange.late:
        return exchange.participants
    return sorted(exchange.late.intersection(piece.given).union(exchange.participants))


def _bucket_done(group: Group, exchange: Exchange, over: bool, now: float, effects: Effects) -> None:
    number = exchange.key.number
    current = group.rounds[number]
    current.end_bucket(exchange)
    if len(current.done) < group.full_buckets[current.section]:
        return
    group.rounds.end(number)
    group.traffic.end_round(now)
    group.stragglers.completed(number)
    took = now - current.opened - current.waited
    took = took if current.quorum_at is None else current.quorum_at - current.opened
    group.stragglers.pace.completed(took, current.arrivals)
    if group.hashing is not None:
        group.hashing.completed(now)
    record = current.record(number, group.world, group.plan, now, _unmeasured(group, number, current))
    figures = figures_of(current.tallies)
    effects.report(RoundCompleted(group.order.group, record, told=over, figures=figures))


def _unmeasured(group: Group, number: int, current: Round) -> Collection[int] | None:
    """Return the members of which the round does not tell how quick they were; None if it tells that of none.

    A round that was granted begins when its members have their gradients. One in which a worker joins waits for a
    state. Members that were cut off gave a part only.
    """
    resumed = group.sequences.restarted and number == group.sequences.first_round
    if group.order.grants or resumed or number in group.learners.first_rounds.values():
        return None
    late = [member_id for member_id, latest in group.stragglers.closed.items() if latest >= number]
    return {*late, *(member_id for member_id, _ in current.cut)}


def _by_slice(layout: Layout, piece: Piece, result: Result, payload: Buffer) -> list[tuple[Result, Sequence[Buffer]]]:
    """Cut the ``result`` of ``piece`` for members that have not asked for it."""
    if piece.stop - piece.start == 1:
        return [(result, (payload,))]
    view, at = memoryview(payload), 0
    results: list[tuple[Result, Sequence[Buffer]]] = []
    for index in range(piece.start, piece.stop):
        size = layout.nbytes(index)
        place = index - piece.start
        told = squares_of(result.squares, place, place + 1), proof_of(result.proof, place, place + 1)
        over = result.over and index + 1 == piece.stop
        one = result._replace(slice=index, slices=1, over=over, squares=told[0], proof=told[1])
        results.append((one, (view[at : at + size],)))
        at += size
    return results
