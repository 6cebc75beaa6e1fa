"""Agreement on the plans that members propose."""

from __future__ import annotations

from typing import Final

from gradserver.engine.control import journal, learners
from gradserver.engine.control.group import Group
from gradserver.engine.control.group.plans import Proposal
from gradserver.engine.control.welcome import tell_agreed
from gradserver.engine.effects import Effects
from gradserver.engine.orders import SetPlan
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs.sparse import Sparse
from gradserver.protocol.errors import (
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    LimitExceededError,
    MalformedMessageError,
    OutOfStepError,
    PlanMismatchError,
    QuotaExceededError,
    UnexpectedMessageError,
)
from gradserver.protocol.means import Rule
from gradserver.protocol.messages import Failure, Propose, Scope
from gradserver.protocol.plan import Plan, decode_plan
from gradserver.protocol.plan_changes import extend, first_difference

_HOW: Final = {False: "a plan in place of all others", True: "a plan beside those that there are"}


def propose(group: Group, member_id: int, message: Propose, data: Buffer, now: float, effects: Effects) -> None:
    """Take the plan of a member, or of a learner."""
    if member_id in group.learners.by_id:
        learners.propose(group, member_id, _plan_of(group, message, data), bool(message.beside), now, effects)
        return
    if group.broken is not None:
        _fail(group, member_id, group.broken, effects)
        return
    if group.plans.is_repeated(member_id, group.members.by_id[member_id].connection, message.number):
        return
    if member_id in group.plans.proposals:
        raise UnexpectedMessageError(f"{group.call(member_id)} proposed a second plan before the first was settled")
    group.check_round(message.round, "Propose")
    plan, here = _plan_of(group, message, data), group.plans.plan
    if member_id in group.plans.unaware and here is not None and plan.hash == here.alone(here.each[-1]).hash:
        group.plans.tells(member_id)
        tell_agreed(group.members.by_id[member_id].connection, here, here.each[-1], group.plans.planned, effects)
        return
    if message.beside and (here is None or here.hash != message.beside):
        raise UnexpectedMessageError(f"{group.call(member_id)} proposed a section of a plan that is not the group's")
    proposal = Proposal(plan, now, message.round, bool(message.beside), frozenset(message.dropped))
    group.plans.propose(member_id, proposal)


def _plan_of(group: Group, message: Propose, data: Buffer) -> Plan:
    """Return the plan that a member proposes. All members' equal plans are one object, as a plan may be large."""
    plan = decode_plan(memoryview(data), [proposal.plan for proposal in group.plans.proposals.values()])
    if plan.hash != message.hash:
        raise MalformedMessageError(f"a plan with the hash {plan.hash}, announced as {message.hash[:64]}")
    return plan


def are_complete(group: Group) -> bool:
    """Tell whether all members have proposed a plan, and nothing else has to come first."""
    if group.plans.unconfirmed or group.recovery.is_open:
        return False
    return 0 < len(group.plans.proposals) == len(group.members.by_id)


def agree(group: Group, effects: Effects) -> None:
    """Agree on the plan that all members have proposed, or tell the minority what differs.

    Learners that had agreed to the plan before are evicted first: some may have begun the next round by that.
    """
    reference, all_alike = group.plans.reference()
    if not all_alike:
        _reject_minority(group, reference, effects)
        return
    if group.policy.mode.grants and (text := _in_other_rounds(group)):
        fail_all(group, OutOfStepError(text), effects)
        return
    if group.shards:  # a round may be over for its members, and its reports still be on their way
        group.rounds.skip_to(max(proposal.round for proposal in group.plans.proposals.values()))
    try:
        plan = _whole(group, group.plans.proposals[reference])
    except (InvalidArgumentError, LimitExceededError) as error:
        fail_all(group, InvalidArgumentError(f"all modules of group {group.name!r} together: {error.message}"), effects)
        return
    try:
        group.account.check(f"a plan of {len(plan.encoded)} bytes")
    except QuotaExceededError as error:
        fail_all(group, error, effects)
        effects.log(error.message, warning=True)
        return
    if text := _unsuited(group, plan):
        fail_all(group, InvalidArgumentError(text), effects)
        return
    if learners.outdated(group, plan):
        learners.evict_outdated(group, plan, effects)
        return
    group.plans.await_shards(plan, group.shards.all)
    group.order(SetPlan(group.name, plan, group.rounds.number), effects)


def _in_other_rounds(group: Group) -> str:
    """Return why members that are in other rounds cannot agree on a plan; empty if all are in the same one."""
    by_round = sorted((proposal.round, member_id) for member_id, proposal in group.plans.proposals.items())
    (first, behind), (last, ahead) = by_round[0], by_round[-1]
    if first == last:
        return ""
    return (
        f"{group.call(behind)} wraps a module in round {first}, and {group.call(ahead)} in round {last}: in a group of "
        f"mode {str(group.policy.mode.name)!r} workers agree on a plan in the same round. Wrap all modules before the "
        f"first backward, or behind the end of a block of join"
    )


def _unsuited(group: Group, plan: Plan) -> str:
    """Return why a plan does not go with the group's mean or its audits; empty if it does."""
    mean = group.policy.mean
    if group.policy.audit.share:
        sparse = next((codec for one in plan.buckets if isinstance(codec := one.operation.codec, Sparse)), None)
        if sparse is not None:
            return (
                f"group {group.name!r} is audited, and gradients travel as {sparse.name}: a worker sends some "
                f"elements, and what it has kept back of earlier rounds, so two contributions cannot be compared. "
                f"Choose another wire, such as int8, or start the coordinator without --audit"
            )
    if mean.rule not in (Rule.MEDIAN, Rule.TRIMMED):
        return ""
    topk = next((one.operation.codec for one in plan.buckets if one.operation.codec.family == "topk"), None)
    if topk is None:
        return ""
    return (
        f"group {group.name!r} has the mean {mean}, and gradients travel as {topk.name}, of which each worker sends "
        f"other elements: most values of an element would be zero, and so would the mean. Choose another wire, such as "
        f"int8 or randomk, or the mean clipped:1 or krum:1"
    )


def _whole(group: Group, proposal: Proposal) -> Plan:
    """The plan that all members want: without the sections that are of no use to any of them."""
    if not proposal.beside:
        return proposal.plan
    dropped = frozenset.intersection(*(one.dropped for one in group.plans.proposals.values()))
    plan = extend(group.plans.plan, group.plans.planned, proposal.plan, dropped, group.rounds.number)
    assert plan.encoded  # which refuses a plan that is too large to go
    return plan


def confirm(group: Group, source: int, digest: str, effects: Effects) -> None:
    """Put the plan in force when all shards know it: members may push to any of them."""
    plan = group.plans.confirm(source, digest)
    if plan is None:
        return
    journal.planned(group, plan, effects)
    group.plans.adopt(plan, group.rounds.number)
    group.requests.restart(group.rounds.number)
    group.shards.set_plan(plan)
    group.watch.restart()
    for member in group.members.by_id.values():
        tell_agreed(member.connection, plan, plan.each[-1], group.rounds.number, effects)
    effects.log(f"group {group.name!r}: plan of {plan.size}")
    learners.compare_plans(group, effects)


def _reject_minority(group: Group, reference: int, effects: Effects) -> None:
    """Tell members that differ from most (a tie goes to the lowest rank); the others' proposals stand."""
    most = group.plans.proposals[reference]
    for member_id, proposal in sorted(group.plans.proposals.items()):
        difference = first_difference(most.plan, proposal.plan)
        if difference is None and proposal.beside != most.beside:
            difference = _HOW[most.beside], _HOW[proposal.beside]
        if difference is None:
            continue
        theirs, own = difference
        error = PlanMismatchError(
            f"the plans of group {group.name!r} differ, first here: {group.call(reference)} has {theirs}; "
            f"{group.call(member_id)} has {own}. Every worker must wrap the same module in the same way, "
            f"with the same wire"
        )
        _fail(group, member_id, error, effects)
        group.plans.withdraw(member_id)
        effects.log(error.message, warning=True)


def fail_all(group: Group, error: GradServerError, effects: Effects) -> None:
    """Nothing comes of any proposal."""
    for member_id in group.plans.proposals:
        _fail(group, member_id, error, effects)
    group.plans.withdraw_all()


def _fail(group: Group, member_id: int, error: GradServerError, effects: Effects) -> None:
    """Tell ``member_id`` that nothing comes of what it has proposed."""
    effects.send(group.members.by_id[member_id].connection, Failure.of(error, Scope.PROPOSAL))


def deadline(group: Group) -> float | None:
    """Return when the patience of the first member ends that has proposed a plan."""
    if not group.plans.proposals:
        return None
    return min(proposal.since for proposal in group.plans.proposals.values()) + group.round_timeout


def overdue(group: Group, effects: Effects) -> None:
    """Tell members that have proposed a plan, and waited too long, which others did not."""
    missing = [member_id for member_id in group.members.by_id if member_id not in group.plans.proposals]
    what = f"{group.calls(missing)} to propose one" if missing else "its data shards to confirm it"
    error = DeadlineError(
        f"the plan of group {group.name!r} waited {group.round_timeout:g} s for {what}",
        missing=tuple(group.call(member_id) for member_id in missing),
    )
    fail_all(group, error, effects)
