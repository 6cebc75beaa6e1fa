"""What control does about the plans that members propose: agree on one, or say why not."""

from __future__ import annotations

from gradserver.engine import chronicle
from gradserver.engine.events import Command, Log, Send
from gradserver.engine.membership import Group
from protocol.errors import DeadlineError, GradServerError, PlanMismatchError
from protocol.messages import Agreed, Failure, Scope
from protocol.plan import Plan, first_difference


def agree(group: Group, plan: Plan, commands: list[Command]) -> None:
    """Rounds are this plan's from now on: tell everybody."""
    chronicle.planned(group, plan, commands)
    group.plan, group.planned = plan, group.rounds
    group.proposals.clear()
    group.unaware.clear()
    group.partial.clear()
    group.table.set_plan(plan)
    group.busy_shards = group.table.busy(plan)
    for seat in group.members.values():
        commands.append(Send(seat.connection, Agreed(plan.hash, group.rounds)))
    commands.append(Log(f"group {group.name!r}: plan of {plan.size}"))


def confirm(group: Group, source: int, digest: str, commands: list[Command]) -> None:
    """A shard elsewhere knows the plan. Members may push to it when all do."""
    plan = next(iter(group.proposals.values())).plan if group.proposals else None
    if plan is None or plan.hash != digest or source not in group.unconfirmed:
        return
    group.unconfirmed.discard(source)
    if not group.unconfirmed:
        agree(group, plan, commands)


def reject_minority(group: Group, reference: int, commands: list[Command]) -> None:
    """Tell those who differ from most (a tie goes to the lowest rank); the others' proposals stand."""
    plan = group.proposals[reference].plan
    for rank, proposal in sorted(group.proposals.items()):
        difference = first_difference(plan, proposal.plan)
        if difference is None:
            continue
        theirs, own = difference
        error = PlanMismatchError(
            f"the plans of group {group.name!r} differ, first here: {group.call(reference)} has {theirs}; "
            f"{group.call(rank)} has {own}. Every worker must wrap the same module in the same way"
        )
        fail_proposal(group, rank, error, commands)
        del group.proposals[rank]
        commands.append(Log(error.message, warning=True))


def fail_all(group: Group, error: GradServerError, commands: list[Command]) -> None:
    """Nothing comes of any proposal."""
    for rank in group.proposals:
        fail_proposal(group, rank, error, commands)
    group.proposals.clear()
    group.unconfirmed.clear()


def fail_proposal(group: Group, rank: int, error: GradServerError, commands: list[Command]) -> None:
    """Tell ``rank`` that nothing comes of what it has proposed."""
    commands.append(Send(group.members[rank].connection, Failure.of(error, Scope.PROPOSAL)))


def fail_overdue(group: Group, commands: list[Command]) -> None:
    """Tell those who proposed who did not."""
    missing = [rank for rank in group.members if rank not in group.proposals]
    what = f"{group.calls(missing)} to propose one" if missing else "its data shards to confirm it"
    error = DeadlineError(
        f"the plan of group {group.name!r} waited {group.timeout:g} s for {what}",
        missing=tuple(group.call(rank) for rank in missing),
    )
    fail_all(group, error, commands)
