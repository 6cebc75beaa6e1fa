"""Tests of process groups with members that change: each thread has a group of its own, as a process would.

torch 2.13 has no `torch.distributed._reconfigure`. It calls the methods that are called here, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradserver.engine.policy import Policy
from gradserver.protocol.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    GradServerError,
    InvalidArgumentError,
    JoinTimeoutError,
    MalformedMessageError,
    PeerError,
    UsageError,
)
from gradserver.protocol.limits import OTHERS
from gradserver.torch import coordinator as started, reconfiguring
from gradserver.torch.creating import create
from gradserver.torch.membership import Membership
from gradserver.torch.private import c10d
from tests.cluster import PATIENCE, Task, coordinator, wait_until

SIZE = 3


@pytest.fixture(params=["a coordinator that is given", "one of rank 0"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Make three groups without members."""
    with ExitStack() as stack:
        given = "given" in request.param
        monkeypatch.setenv("GRADSERVER_URL", stack.enter_context(coordinator()).url if given else "")
        found = three(c10d.HashStore())
        yield found
        for group in found:
            group.shutdown()
        while started._started:
            started.end(started._started.pop().process, PATIENCE)


def three(store: Any) -> list[Any]:
    """Make groups as torch does, with names of their own: a process has one of each name."""
    return [
        create(
            SimpleNamespace(
                store=store,
                group_rank=rank,
                group_size=SIZE,
                group_id=f"default {rank}",
                timeout=timedelta(seconds=PATIENCE),
                global_ranks_in_group=[],
                enable_reconfigure=True,
            ),
            None,
        )
        for rank in range(SIZE)
    ]


def reconfigure(group: Any, uuid: int, handles: Iterable[str], seconds: float = PATIENCE) -> None:
    options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=seconds))
    assert group.reconfigure(options).wait()


def become(uuid: int, *members: Any) -> None:
    """Have groups be of these members, in this order."""
    handles = [group.get_reconfigure_handle() for group in members]
    for task in [Task(reconfigure, group, uuid, handles) for group in members]:
        task.result()


def total(group: Any, value: float) -> float:
    tensor = torch.full((4,), value)
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def totals(*members: Any) -> list[float]:
    """Add up a power of two for each rank."""
    tasks = [Task(total, group, 2.0 ** group.getRank()) for group in members]
    return [task.result() for task in tasks]


def test_a_group_has_the_members_of_its_last_handles_in_their_order(groups: list[Any]) -> None:
    a, b, c = groups
    assert [(group.getRank(), group.getSize()) for group in groups] == [(0, 3), (1, 3), (2, 3)]
    assert all(group.supports_reconfigure for group in groups)
    for number, members in enumerate([(a, b, c), (a, c), (c, b, a), (b,), (b, c, a)]):
        become(number, *members)
        assert [(group.getRank(), group.getSize()) for group in members] == [
            (rank, len(members)) for rank in range(len(members))
        ]
        assert totals(*members) == [2.0 ** len(members) - 1] * len(members)


def test_of_a_set_of_handles_all_find_the_same_order(groups: list[Any]) -> None:
    handles = {group.get_reconfigure_handle() for group in groups}
    for task in [Task(reconfigure, group, 1, handles) for group in groups]:
        task.result()
    assert sorted(group.getRank() for group in groups) == [0, 1, 2]
    assert totals(*groups) == [7.0] * 3


def test_several_groups_are_formed_at_once(groups: list[Any]) -> None:
    a, b, c = groups
    alone, both = Task(become, 1, c), Task(become, 2, b, a)
    alone.result()
    both.result()
    assert totals(b, a) == [3.0, 3.0]
    assert totals(c) == [1.0]


def test_it_is_formed_again_when_a_member_is_lost(groups: list[Any]) -> None:
    a, b, c = groups
    become(1, a, b, c)
    waiting = Task(total, a, 1.0)
    c.abort()
    lost = waiting.error(PeerError)
    assert "(rank 2)" in str(lost)
    assert isinstance(lost, dist.DistBackendError)
    with pytest.raises(UsageError, match="has no members: call torch.distributed._reconfigure"):
        total(c, 1.0)
    become(2, a, b)
    assert totals(a, b) == [3.0, 3.0]
    become(3, c, a, b)
    assert totals(c, a, b) == [7.0] * 3


def test_it_keeps_a_timeout_that_was_set(groups: list[Any]) -> None:
    a, b, c = groups
    become(1, a, b, c)
    a.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(GradServerError, match="[Tt]imed out"):
        total(a, 1.0)
    a.set_timeout(timedelta(seconds=PATIENCE))
    become(2, a, b, c)
    assert totals(a, b, c) == [7.0] * 3


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Make three groups, of which the first has one member, itself."""
    with coordinator() as server:
        monkeypatch.setenv("GRADSERVER_URL", server.url)
        found = three(c10d.HashStore())
        become(7, found[0])
        yield found
        for group in found:
            group.shutdown()


def check_goes_on(alone: Sequence[Any]) -> None:
    """Check that a group has lost nothing by what was asked of it."""
    assert (alone[0].getRank(), alone[0].getSize()) == (0, 1)
    assert totals(alone[0]) == [1.0]


def test_what_can_never_be_right_changes_nothing(alone: list[Any]) -> None:
    a, b, _ = (group.get_reconfigure_handle() for group in alone)
    with pytest.raises(UsageError, match="uuid 7 was already used"):
        reconfigure(alone[0], 7, [a])
    with pytest.raises(UsageError, match="is not among the members"):
        reconfigure(alone[0], 8, [b])
    with pytest.raises(UsageError, match="is there twice"):
        reconfigure(alone[0], 8, [a, b, a])
    with pytest.raises(MalformedMessageError, match="'nccl2:0:1' is no handle of the backend 'gradserver'"):
        reconfigure(alone[0], 8, [a, "nccl2:0:1"])
    check_goes_on(alone)


def test_collectives_before_the_first_members_are_refused(alone: list[Any]) -> None:
    with pytest.raises(UsageError, match="has no members: call torch.distributed._reconfigure"):
        total(alone[1], 1.0)


def test_a_member_that_does_not_come_is_named(alone: list[Any]) -> None:
    a, b, c = (group.get_reconfigure_handle() for group in alone)
    coming = Task(reconfigure, alone[1], 8, [a, b, c], 1.0)
    with pytest.raises(JoinTimeoutError, match="missing: .*rank 2"):
        reconfigure(alone[0], 8, [a, b, c], 1.0)
    coming.error(JoinTimeoutError)
    become(9, *alone)
    assert totals(*alone) == [7.0] * 3


def test_without_a_coordinator_that_rank_0_tells_of_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVER_URL", "")
    a, b, _ = three(c10d.HashStore())
    handles = [a.get_reconfigure_handle(), b.get_reconfigure_handle()]
    said = "rank 0 of the new group, .*, has told no coordinator in 0.5 s"
    with pytest.raises(CoordinatorUnreachableError, match=said):
        reconfigure(b, 1, handles, 0.5)


def test_members_are_told_why_rank_0_has_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str | None) -> str:
        raise CoordinatorError("rank 0 could not start a coordinator (no memory)")

    monkeypatch.setenv("GRADSERVER_URL", "")
    monkeypatch.setattr(reconfiguring, "coordinator_url", fail)
    groups = three(c10d.HashStore())[:2]
    handles = [group.get_reconfigure_handle() for group in groups]
    first, second = [Task(reconfigure, group, 1, handles) for group in groups]
    first.error(CoordinatorError)
    error = second.error(CoordinatorUnreachableError)
    assert "has no coordinator. CoordinatorError: rank 0 could not start a coordinator (no memory)" in str(error)


# ── as a coordinator decides it ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Membership, Any]]]:
    """Make three groups, each with its membership of two to four, at a coordinator that has that."""
    with coordinator({"members/job": Policy(2, 4), OTHERS: Policy()}) as server:
        monkeypatch.setenv("GRADSERVER_URL", server.url)
        found = [(Membership("job", 2, 4, gather=0.5, timeout=PATIENCE), group) for group in three(c10d.HashStore())]
        yield found
        for membership, group in found:
            with suppress(RuntimeError):
                membership.close()
            group.shutdown()


def meet(*members: tuple[Membership, Any]) -> list[Any]:
    """Reconfigure all, and return their groups in the order of ranks."""
    tasks = [Task(membership.reconfigure, group) for membership, group in members]
    names = [task.result() for task in tasks]
    assert all(found == names[0] and len(found) == len(members) for found in names)
    return sorted((group for _, group in members), key=lambda group: int(group.getRank()))


def test_a_coordinator_decides_the_members(members: list[tuple[Membership, Any]]) -> None:
    first, second, third = members
    assert totals(*meet(first, second)) == [3.0, 3.0]
    joining = Task(third[0].reconfigure, third[1])
    wait_until(lambda: first[0].has_changed and second[0].has_changed, "a third one waits")
    both = [Task(membership.reconfigure, group) for membership, group in (first, second)]
    names = [task.result() for task in (joining, *both)]
    assert all(len(found) == 3 and found == names[0] for found in names)
    assert totals(*(group for _, group in members)) == [7.0] * 3

    waiting = Task(total, first[1], 1.0)
    third[1].abort()
    third[0]._rendezvous._leave("its process has ended")
    waiting.error(PeerError)
    assert totals(*meet(first, second)) == [3.0, 3.0]


def test_a_membership_that_cannot_be_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSERVER_URL", raising=False)
    with pytest.raises(InvalidArgumentError, match="a membership of 3 to 2: expected 1 <= least <= most"):
        Membership("job", 3, 2, url="tcp://127.0.0.1:7411")
    with pytest.raises(InvalidArgumentError, match="no coordinator: give Membership"):
        Membership("job", 2)
    with pytest.raises(UsageError, match="cannot be reconfigured: make it by init_process_group"):
        Membership("job", 2, url="tcp://127.0.0.1:7411").reconfigure(SimpleNamespace())


def test_a_group_of_several_backends_is_not_reconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.torch.creating.backends_by_device", lambda: {"cpu": "gradserver", "cuda": "nccl"})
    monkeypatch.setattr("gradserver.torch.creating.HAS_PYTHON_BACKENDS", True)
    with pytest.raises(UsageError, match="has one backend, and this one has 'nccl', too"):
        three(c10d.HashStore())
