"""Welcome of a worker that comes into a group, as a founder or as a learner."""

from __future__ import annotations

from dataclasses import replace

from gradserver.engine.control.group import Group
from gradserver.engine.effects import Effects
from gradserver.protocol.messages import Agreed, Welcome
from gradserver.protocol.offers import pack_offers
from gradserver.protocol.plan import Plan, Section


def tell_agreed(connection: int, plan: Plan, section: Section, first_round: int, effects: Effects) -> None:
    """Tell a worker that its plan is ``section`` of ``plan``, or all of it."""
    message = Agreed(plan.alone(section).hash, first_round, section.number)
    effects.send(connection, message, (plan.encoded,) if plan.sections else ())


def welcome_to(group: Group, member_id: int, token: str, incarnation: int) -> Welcome:
    """``token`` is for data shards. In a durable group it follows from the group's secret, and is for Resume, too.

    A worker that is not a member yet gets the ids, names and rank that are to be.
    """
    joins = member_id not in group.members.by_id
    present, names = sorted({*group.members.identities.present, member_id}), group.members.identities.names
    choice = group.planes.choice
    if joins:
        choice = group.planes.best_for(group.case(present))
    lateness = group.policy.lateness
    stale = group.policy.mode if group.policy.mode.grants or lateness is None else lateness
    return Welcome(
        group.name,
        present.index(member_id),
        group.members.epoch,
        group.shards.credit,
        names=tuple(names[other] for other in present),
        shards=group.shards.urls,
        rates=group.shards.table.rates,
        token=group.token(member_id) if group.is_durable else token,
        member_ids=tuple(present),
        durable=group.is_durable,
        incarnation=incarnation if group.is_durable else 0,
        founded=group.members.founded if joins else 0,
        joins=joins,
        late=group.late_are,
        timeout=group.round_timeout,
        nonfinite=str(group.nonfinite),
        mean=group.policy.mean,
        needs_all=group.policy.needs_all,
        plane=choice.plane,
        plane_reason=choice.reason,
        demanded=choice.demanded,
        commits=group.planes.commits,
        digests=group.planes.digests,
        mode=str(group.policy.mode.name),
        staleness=-1 if stale.staleness is None else stale.staleness,
        damping=str(stale.damping),
        places=group.policy.maximum,
        grain=group.shards.table.grain,
        offers=group.planes.offers_of(present),
    )


def welcome_again(group: Group, member_id: int, connection: int, incarnation: int, effects: Effects) -> None:
    """Send a member the Welcome that was lost with its connection. It says Resume on another one.

    Raises:
        GradServerError: the group is broken.
        LeftOutError: the others have gone on without it.
    """
    if group.broken is not None:
        raise group.broken.again()
    if not group.is_inside(member_id):
        raise group.left_out(member_id, "its connection broke, and it did not come back")
    welcome = welcome_to(group, member_id, "", incarnation)
    effects.send(connection, replace(welcome, again=True), pack_offers(welcome.offers))
