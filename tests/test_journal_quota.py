"""Tests of the journal quota: what one group's members can have written, and that no other group notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine import Engine
from gradserver.engine.commands import Command, Record
from gradserver.engine.control.access import OPEN, Access
from gradserver.engine.control.quota import ENDED_BUDGETS, REFILL_SECONDS, Account, counted
from gradserver.engine.data_records import Claim as HandedOut, Data, Order
from gradserver.engine.declared import Kind
from gradserver.engine.events import Restored
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.policy import Policy
from gradserver.engine.records import Round, Spent, size_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import GradServerError, JoinRefusedError, QuotaExceededError
from gradserver.protocol.limits import KIB
from gradserver.protocol.messages import Enter, Failure, Propose, Ready, RoundDone, Scope, Serve
from gradserver.protocol.messages.leases import Claim, Claimed, Register, Used
from gradserver.protocol.messages.recovery import Resumed
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.ranges import pack
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import Daemon, joined, wait_until
from tests.engine_harness import SEATS, Harness, bucket, floats, plan_of
from tests.test_bad_input import Bystanders
from tests.test_engine_resuming import BACK, Group

QUOTA = 64 * KIB
PIECES = tuple((2 * place, 2 * place + 1) for place in range(1000))
"""Used samples that leave as many holes."""


def harness(worlds: dict[str, int | Policy] | None = None, access: Access = OPEN, quota: int = QUOTA) -> Harness:
    found = Harness(worlds or {})
    found.engine = Engine(found.worlds, access=access, quota=quota)
    return found


def large_plan(number: int, nbytes: int = 20 * KIB) -> Plan:
    """Return a plan that takes about so many bytes, and differs from that of any other number."""
    names = [f"{number:04}-{place:04}-{'x' * 110}" for place in range(nbytes // 256)]
    return simple_plan([(name, 1) for name in names], FLOAT32)


def records(commands: list[Command]) -> list[Kind]:
    return [command.record for command in commands if isinstance(command, Record)]


def found_and_leave(harness: Harness, connection: int, group: str, nbytes: int = 60 * KIB) -> GradServerError | None:
    """Found a group of one that agrees on a large plan and ends. Return why it could not be founded."""
    harness.join(connection, "w", world=1, group=group)
    if connection in harness.closed:
        return harness.refusal(connection)
    harness.propose(connection - SEATS, large_plan(connection, nbytes))
    harness.leave(connection - SEATS)
    harness.inbox.clear()
    return None


# ── the budget by itself ──────────────────────────────────────────────────────────────────────────────


@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, REFILL_SECONDS), st.integers(0, 300)), max_size=60),
)
def test_a_group_never_writes_more_than_its_budget_and_what_refills(limit: int, steps: list[tuple[float, int]]) -> None:
    now = 0.0
    account = Account("g", limit, lambda: now)
    written: list[tuple[float, int]] = []
    for seconds, nbytes in steps:
        now += seconds
        if account.is_used_up:
            continue
        account.spend(nbytes)
        written.append((now, nbytes))
    for first, (begin, _) in enumerate(written):
        total = 0
        for end, nbytes in written[first:]:
            allowed = limit * (1 + (end - begin) / REFILL_SECONDS)
            assert total <= allowed + 1e-6, "before its last record it was within the budget"
            total += nbytes


def test_a_budget_is_full_again_in_an_hour_and_never_fuller() -> None:
    now = 0.0
    account = Account("g", 1000, lambda: now)
    now = 10 * REFILL_SECONDS
    account.spend(1000)
    assert account.is_used_up
    now += REFILL_SECONDS / 2
    assert not account.is_used_up
    assert account.debt() == pytest.approx(500)
    now += REFILL_SECONDS
    assert account.debt() == 0


def test_without_a_limit_nothing_is_counted() -> None:
    account = Account()
    account.spend(1 << 60)
    assert not account.is_used_up
    assert account.news() is None


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_founds_and_leaves_and_founds_again_is_refused_and_no_other() -> None:
    there = harness()
    assert found_and_leave(there, SEATS + 1, "abuser") is None
    assert found_and_leave(there, SEATS + 2, "abuser") is None
    error = found_and_leave(there, SEATS + 3, "abuser")
    assert isinstance(error, JoinRefusedError)
    for words in ("journal quota of group 'abuser'", "0.1 MiB", "0.0625 MiB", "--journal-quota", "Try again in"):
        assert words in error.message
    assert found_and_leave(there, SEATS + 4, "honest") is None
    there.wait(REFILL_SECONDS)
    assert found_and_leave(there, SEATS + 5, "abuser") is None


def come_and_go(there: Harness, number: int) -> GradServerError | None:
    """Let a worker join a running group of one, contribute to a round, and be lost. Return why it could not."""
    plan, member_id, round_number = plan_of(2), 1, 3 * number
    there.join(SEATS + 1, f"{number:03}" + "n" * 90)
    if SEATS + 1 in there.closed:
        return there.refusal(SEATS + 1)
    there.receive(SEATS + 1, Propose(plan.hash), plan.encoded)
    there.receive(SEATS + 1, Enter(0, True))
    there.push(0, bucket(round_number), floats(1, 1))
    transfers = [one for done in there.told(1, RoundDone) for one in done.transfers]
    there.receive(SEATS + 1, Ready(transfers[-1].number))
    for rank in (0, member_id):
        there.push(rank, bucket(round_number + 1), floats(1, 1))
    there.lose(1)
    there.push(0, bucket(round_number + 2), floats(1, 1))
    there.inbox.clear()
    return None


def test_a_worker_that_joins_and_leaves_again_and_again_is_refused_and_the_members_go_on() -> None:
    there = harness({"default": Policy(1, 4)}, quota=8 * KIB)
    there.assemble(1, plan_of(2))
    there.receive(SEATS, Serve())
    attempts = [come_and_go(there, number) for number in range(8)]
    assert attempts == [None] * 8
    while (error := come_and_go(there, len(attempts))) is None:
        attempts.append(error)
    assert 8 < len(attempts) < 40
    assert isinstance(error, JoinRefusedError)
    assert "quota of group 'default'" in error.message
    rounds = there.group()["round"]
    there.push(0, bucket(rounds), floats(1, 1))
    assert there.group()["round"] == rounds + 1


def test_ever_new_plans_are_refused_and_the_last_one_stays_in_force() -> None:
    there = harness({"default": 2})
    there.assemble(2)
    for number in range(10):
        for rank in range(2):
            there.propose(rank, large_plan(number))
        told = there.sent(0)
        there.sent(1)
        if isinstance(told[-1][0], Failure):
            break
    failure = told[-1][0]
    assert isinstance(failure, Failure)
    assert failure.scope is Scope.PROPOSAL
    error = failure.exception()
    assert isinstance(error, QuotaExceededError)
    assert "a plan of" in error.message
    assert 3 <= number <= 5, "about 64 KiB of 20 KiB each"
    in_force = there.engine.control.groups["default"].plans.plan
    assert in_force is not None
    assert in_force.hash == large_plan(number - 1).hash
    for rank in range(2):
        for part in range(len(in_force.buckets)):
            there.push(rank, bucket(0, part), floats(1))
    assert there.group()["round"] == 1


def test_rounds_are_never_counted() -> None:
    there = harness({"default": 1}, quota=KIB)
    there.assemble(1, plan_of(2))
    nbytes = 0
    for number in range(200):
        nbytes += sum(isinstance(one, Round) for one in records(there.push(0, bucket(number), floats(1, 1))))
    assert nbytes == 200
    account = there.engine.control.groups["default"].account
    assert not account.is_used_up


def test_a_claim_of_few_ranges_is_never_refused_and_one_of_many_is_counted() -> None:
    there = harness({"default": 2})
    there.assemble(2, plan_of(2))
    there.receive(SEATS, Register("sound", 10_000_000, 1, True, 0, 0), b"")
    there.receive(SEATS, Register("holes", 2001, 1, True, 0, 0), pack(PIECES))
    refused = None
    for _ in range(10):  # the same claim again is answered again, and written again
        there.sent(0)
        there.receive(SEATS, Claim("holes", 1, 0, 2000, 0))
        ((message, _),) = there.sent(0)
        if isinstance(message, Failure):
            refused = message
            break
    assert refused is not None
    assert refused.scope is Scope.DATA
    assert "a Claim of many ranges of data 'holes' by 'w0'" in refused.exception().message
    for number in range(1, 50):
        there.receive(SEATS, Claim("sound", number, 0, 100, 0))
        ((message, _),) = there.sent(0)
        assert isinstance(message, Claimed)
    there.receive(SEATS, Used("holes", 0, 0), pack(PIECES))
    assert "a Used of many ranges" in there.refusal(SEATS).message


def test_what_is_counted() -> None:
    ranges = tuple((3 * place, 3 * place + 1) for place in range(132))
    assert counted(HandedOut("g", "data", 0, 1, 0, ranges[:32])) == 0
    assert counted(HandedOut("g", "data", 0, 1, 0, ranges)) == 1600
    order = Order(1000, 1, True)
    assert counted(Data("g", "data", order, "w", 0, True, ranges[:32], ())) == 0
    assert counted(Data("g", "data", order, "w", 0, True, ranges, ())) == 1600


def test_a_member_that_claims_ever_later_epochs_has_no_more_written_than_the_budget() -> None:
    group = Group(2)
    group.harness.restart()
    account = Account("default", KIB)
    group.harness.engine.control.groups["default"].account = account
    for epoch in range(2, 100):
        group.resume(0, epoch=10 * epoch)
        if BACK in group.harness.closed:
            break
        group.harness.lose(BACK - SEATS)
        group.told(0)
    assert epoch < 40
    assert "the join of 'w0' is refused" in group.refusal(0).message
    group.resume(1)
    assert any(isinstance(message, Resumed) for message in group.told(1)), "the other one can come back"


STEPS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60 * KIB), st.floats(0, REFILL_SECONDS / 4))


@settings(max_examples=30)
@given(steps=st.lists(STEPS, max_size=40))
def test_whatever_two_groups_do_each_has_its_own_budget_and_a_third_notices_nothing(
    steps: list[tuple[str, int, float]],
) -> None:
    there, most = harness({"c": 1}), 63 * KIB
    written: dict[str, list[tuple[float, int]]] = {"a": [], "b": []}
    for number, (group, nbytes, seconds) in enumerate(steps):
        there.wait(seconds)
        connection = SEATS + number
        commands = there.join(connection, "w", world=1, group=group)
        if connection in there.closed:
            assert f"group {group!r}" in there.refusal(connection).message
        else:
            commands += there.propose(number, large_plan(number, nbytes + 256))
            commands += there.leave(number)
        written[group].append((there.now, sum(map(size_of, records(commands)))))
        assert found_and_leave(there, SEATS + 500 + number, "c", 256) is None
    for all_of_it in written.values():
        for first, (begin, _) in enumerate(all_of_it):
            allowed = QUOTA * (1 + (all_of_it[-1][0] - begin) / REFILL_SECONDS) + most + 2 * KIB
            assert sum(nbytes for _, nbytes in all_of_it[first:]) <= allowed


def test_a_debt_of_a_larger_quota_is_cut_to_the_present_one() -> None:
    there = harness()
    there.feed(Restored((Spent("g", 1 << 40),), frozenset()))
    there.wait(REFILL_SECONDS)
    assert found_and_leave(there, SEATS + 1, "g") is None


# ── ever new names ────────────────────────────────────────────────────────────────────────────────────


def test_ever_new_names_do_not_give_ever_new_budgets() -> None:
    there = harness()
    for number in range(ENDED_BUDGETS + 1):
        assert found_and_leave(there, SEATS + number, f"abuser {number}") is None
    error = found_and_leave(there, SEATS + 90, "one more name")
    assert isinstance(error, JoinRefusedError)
    assert "5 groups that have ended have filled" in error.message
    assert "--groups" in error.message
    assert found_and_leave(there, SEATS + 91, "abuser 0", KIB) is None, "it has some of its own budget left"
    there.wait(REFILL_SECONDS)
    assert found_and_leave(there, SEATS + 92, "one more name") is None


def test_a_name_that_the_operator_has_given_can_always_be_founded() -> None:
    there = harness({"told": 1, "*": Policy(1, 4)})
    for number in range(ENDED_BUDGETS + 1):
        found_and_leave(there, SEATS + number, f"abuser {number}")
    assert found_and_leave(there, SEATS + 90, "other") is not None
    assert found_and_leave(there, SEATS + 91, "told") is None


def test_full_budgets_of_groups_that_have_ended_are_forgotten() -> None:
    there = harness()
    found_and_leave(there, SEATS + 1, "once")
    there.wait(2 * REFILL_SECONDS)
    written = records(there.join(SEATS + 2, "w", world=1, group="later"))
    assert Spent("once", 0) in written
    assert set(there.engine.control.groups) == {"later"}


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_restarted_coordinator_goes_on_with_what_is_left_of_a_budget() -> None:
    there, books = harness(), JournalState()
    for connection in (SEATS + 1, SEATS + 2):
        commands = there.join(connection, "w", world=1, group="abuser")
        commands += there.propose(connection - SEATS, large_plan(connection, 60 * KIB))
        for record in records(commands + there.leave(connection - SEATS)):
            books.apply(Dated(there.now, record))
    again = harness()
    again.feed(Restored(tuple(dated.record for dated in books.records()), frozenset()))
    assert isinstance(found_and_leave(again, SEATS + 3, "abuser"), JoinRefusedError)
    again.wait(REFILL_SECONDS)
    assert found_and_leave(again, SEATS + 4, "abuser") is None


# ── a real coordinator ────────────────────────────────────────────────────────────────────────────────


def filled(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("ledger-*.gsl"))


def replan(worker: Worker) -> QuotaExceededError:
    """Agree on ever new plans until that is refused."""
    for number in range(10):
        try:
            worker.agree(large_plan(number))
        except QuotaExceededError as error:
            return error
    raise AssertionError("ten plans of 20 KiB were taken, and 64 KiB are allowed")


def test_an_abusive_group_fills_no_disk_and_a_training_beside_it_goes_on(tmp_path: Path) -> None:
    options = ("--quiet", "--groups", "any", "--state-dir", str(tmp_path), "--journal-quota", "64KiB")
    with Daemon(*options) as daemon, joined(daemon.url, 2, group="innocent") as workers:
        bystanders = Bystanders(workers)
        wait_until(lambda: bystanders.rounds > 3, "they exchange")
        with connect(daemon.url, 0, 1, "replans") as abuser:
            assert "journal quota of group 'replans' is used up, and a plan of" in replan(abuser).message
        refused = 0
        for number in range(20):
            try:
                with connect(daemon.url, 0, 1, "founds again") as abuser:
                    abuser.agree(large_plan(number))
            except JoinRefusedError:
                refused += 1
            except QuotaExceededError:
                pass
        assert refused > 10
        rounds = bystanders.rounds
        bystanders.check()
        assert bystanders.rounds > rounds
        assert filled(tmp_path) < 300 * KIB + 300 * bystanders.rounds
