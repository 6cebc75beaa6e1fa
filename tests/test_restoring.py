"""Tests of what a coordinator finds in the directory of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradserver.engine import Engine, declared
from gradserver.engine.commands import Log, Send
from gradserver.engine.control.access import Access
from gradserver.engine.declared import Kind
from gradserver.engine.events import Received, Restored, Tick
from gradserver.engine.policy import Lateness, OnNonFinite, OnOutlier, Policy
from gradserver.engine.records import (
    Boundary,
    Closed,
    Cut,
    Durable,
    Entered,
    Epoch,
    Group,
    Handling,
    Outlier,
    Plan,
    Reset,
    Start,
    Stragglers,
    Subgroup,
)
from gradserver.ledger.command import Selection, show
from gradserver.ledger.files import files_of
from gradserver.ledger.state import StateDir
from gradserver.protocol.errors import StateError
from gradserver.protocol.messages import Failure, Join
from gradserver.protocol.messages.recovery import Resume
from tests.engine_harness import plan_of
from tests.test_state_dir import opened, round_record

SECRET = "5ec1" * 8
FOUNDED: list[Kind] = [
    Group("g", 2, 60.0),
    Durable("g", SECRET),
    Epoch("g", 1, 0, ((0, "a"), (1, "b")), "complete"),
    Plan("g", 1, 0, plan_of(3)),
]


def write(path: Path, *records: Kind, **options: int) -> None:
    with opened(path, **options) as state:
        for record in records:
            state.append(record)


def restored(path: Path) -> tuple[Kind, ...]:
    with opened(path) as state:
        return state.restored


def engine(path: Path, policy: Policy | int = 2) -> tuple[Engine, list[str]]:
    """Return the next coordinator's engine, and what it logs."""
    with opened(path) as state:
        found = Engine({"g": policy}, incarnation=state.incarnation)
        commands = found.handle(Restored(state.restored), 0.0)
    found.validate()
    return found, [command.text for command in commands if isinstance(command, Log)]


def join(name: str, rank: int = -1) -> Join:
    return Join("g", name, rank, 0, 60.0)


def test_the_next_coordinator_finds_what_still_matters_and_counts_itself(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(0), round_record(1))

    with opened(tmp_path) as state:
        assert state.incarnation == 2
        start, *others = state.restored
    assert isinstance(start, Start)
    assert others == [*FOUNDED, round_record(1)]


def test_what_becomes_of_non_finite_gradients_stays_as_it_began(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, Handling("g", OnNonFinite.PROPAGATE), round_record(0))

    with opened(tmp_path) as state:
        found = Engine({"g": Policy(2)}, incarnation=state.incarnation, nonfinite=OnNonFinite.HALT)
        found.handle(Restored(state.restored), 0.0)
    assert found.data.groups["g"].order.nonfinite is OnNonFinite.PROPAGATE
    assert found.snapshot(0.0)["groups"]["g"]["nonfinite"]["policy"] == "propagate"  # type: ignore[index]


def test_members_that_are_off_stay_named(tmp_path: Path) -> None:
    handling = Handling("g", OnNonFinite.HALT, outliers=OnOutlier.LEAVE_OUT)
    off = [Outlier("g", 1, 0, member_id, 10.0, -0.5, True, "") for member_id in (0, 1)]
    write(tmp_path, *FOUNDED, handling, *off, Outlier("g", 1, 0, 0, 1.0, 0.0, False, ""), round_record(0))

    found, _ = engine(tmp_path)
    group = found.control.groups["g"]
    assert group.policy.outliers is OnOutlier.LEAVE_OUT
    assert list(group.watch.outliers.named) == [1]
    assert group.watch.evicted == {}


@pytest.mark.parametrize(
    ("began", "told", "goes_on"),
    [
        (True, Lateness(quorum=1), Lateness(quorum=1)),
        (False, Lateness(quorum=1), Lateness(quorum=1, keeps=False)),
        (None, Lateness(quorum=1), None),
        (False, None, Lateness(percent=100.0, keeps=False)),
        (None, None, None),
    ],
)
def test_late_members_are_dealt_with_as_they_were_told_when_they_joined(
    began: bool | None, told: Lateness | None, goes_on: Lateness | None, tmp_path: Path
) -> None:
    stragglers = [] if began is None else [Stragglers("g", began)]
    write(tmp_path, *FOUNDED[:2], *stragglers, *FOUNDED[2:], round_record(0))

    found, _ = engine(tmp_path, Policy(1, 4, lateness=told))
    assert found.data.groups["g"].order.lateness == goes_on


SUBGROUP: list[Kind] = [
    Group("g/1", 2, 60.0),
    Subgroup("g/1", "g", (1, 2)),
    Durable("g/1", SECRET),
    Epoch("g/1", 2, 0, ((0, "b"), (1, "c")), "complete"),
]


@pytest.mark.parametrize(("told", "least"), [(3, 2), (Policy(1, 4, lateness=Lateness(quorum=2)), 1)])
def test_a_sub_group_goes_on_as_its_parent_does_and_waits_for_all(
    told: Policy | int, least: int, tmp_path: Path
) -> None:
    parent = [Group("g", 3, 60.0), Durable("g", SECRET), Epoch("g", 1, 0, ((0, "a"), (1, "b"), (2, "c")), "complete")]
    write(tmp_path, *parent, *SUBGROUP, round_record(0))
    assert [record for record in restored(tmp_path) if record in SUBGROUP] == SUBGROUP

    found, _ = engine(tmp_path, told)
    group = found.control.groups["g/1"]
    assert (group.policy.minimum, group.policy.maximum, group.policy.lateness) == (least, 2, None)
    assert found.snapshot(0.0)["groups"]["g/1"]["parent"] == "g"  # type: ignore[index]


def test_a_sub_group_ends_with_a_parent_that_has_ended(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, *SUBGROUP, Closed("g", 1, 0, "done"))
    found, said = engine(tmp_path)
    assert not found.control.groups
    assert said == ["group 'g/1' ends: 'g', which it is a sub-group of, has ended"]

    resume = Resume("g/1", 0, "token", 2, "")
    refused = found.handle(Received(7, resume), 0.0)
    failures = [command.message for command in refused if isinstance(command, Send)]
    assert any(isinstance(failure, Failure) and "'g' has ended" in failure.text for failure in failures)


def test_a_round_that_was_closed_for_a_member_stays_closed(tmp_path: Path) -> None:
    closed = [Cut("g", 1, number, (1,), "late") for number in (0, 1)]
    write(tmp_path, *FOUNDED, closed[0], round_record(0), closed[1])
    assert [record for record in restored(tmp_path) if isinstance(record, Cut)] == closed

    write(tmp_path, round_record(0))  # made again, so the next one is made again too
    assert [record for record in restored(tmp_path) if isinstance(record, Cut)] == closed[:1]


def test_epochs_behind_earlier_rounds_are_kept_where_members_can_be_late(tmp_path: Path) -> None:
    later = Epoch("g", 2, 1, ((0, "a"),), "'b' was lost")
    done = [*map(round_record, range(3)), later, Boundary("g", 2, 2), round_record(3), Boundary("g", 3, 2)]
    write(tmp_path / "late", *FOUNDED, Stragglers("g", True), *done)
    write(tmp_path / "none", *FOUNDED, *done)

    def ends(path: Path) -> list[Kind]:
        return [record for record in restored(path) if isinstance(record, Boundary)]

    assert ends(tmp_path / "late") == [Boundary("g", 0, 1), Boundary("g", 2, 2), Boundary("g", 3, 2)]
    assert ends(tmp_path / "none") == [Boundary("g", 3, 2)]
    memberships = [record for record in restored(tmp_path / "late") if isinstance(record, Epoch)]
    assert [record.epoch for record in memberships] == [1, 2], "a member may have to hear of these"


def test_memberships_are_kept_from_that_on_which_is_in_force(tmp_path: Path) -> None:
    epochs = [Epoch("g", number, 1, ((0, "a"),), "somebody left") for number in (2, 3, 4)]
    write(tmp_path, *FOUNDED, round_record(0), *epochs, Boundary("g", 0, 3))

    assert [record.epoch for record in restored(tmp_path) if isinstance(record, Epoch)] == [0, 3, 4], "0 has the names"


def test_one_file_is_enough(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, *map(round_record, range(60)), file_bytes=2000)
    for _, file in files_of(tmp_path)[:-1]:
        file.unlink()

    assert restored(tmp_path)[1:] == (*FOUNDED, round_record(59))


def test_a_file_that_has_not_begun_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(0))
    (tmp_path / "ledger-000002.gsl").write_bytes(bytes(100))

    assert restored(tmp_path)[1:] == (*FOUNDED, round_record(0))


def test_a_group_goes_on_where_it_was(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(7), Epoch("g", 2, 8, ((1, "b"),), "'a' was lost"))

    found, logs = engine(tmp_path, Policy(1, 4))

    assert logs == ["group 'g': waiting for 'b' to come back, for 60 s; it was in round 8, membership epoch 2"]
    group = found.control.groups["g"]
    assert (group.state.value, group.rounds.number, group.members.epoch, group.timeout) == ("suspended", 8, 2, 60.0)
    assert group.members.identities.present == (1,)
    assert found.next_deadline() == 60.0


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_lost_members_come_back_to_their_places_after_two_restarts(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    names = ((0, "a"), (1, "b"), (2, "c"))
    left = Epoch("g", 2, 1, names[:1], "two were lost")
    founded: list[Kind] = [Group("g", 3, 60.0), FOUNDED[1], Epoch("g", 1, 0, names, "complete"), FOUNDED[3]]
    write(path, *founded, left, Boundary("g", 0, 2))
    write(path)
    found, _ = engine(path, Policy(1, 4))
    for connection, join in enumerate([Join("g", "c", rank, 0, 60.0), Join("g", "b", -1, 0, 60.0)], 1):
        commands = found.handle(Received(connection, join), 0.0)
        assert not any(isinstance(one, Send) and isinstance(one.message, Failure) for one in commands)
    learners = found.control.groups["g"].learners.by_id
    assert {member_id: learner.join.name for member_id, learner in learners.items()} == {1: "b", 2: "c"}


@pytest.mark.parametrize(
    "last",
    [Closed("g", 1, 8, "all left"), Group("g", 2, 60.0)],
    ids=["it has ended", "one that is not durable took over"],
)
def test_what_is_over_is_not_taken_up_again(tmp_path: Path, last: Kind) -> None:
    write(tmp_path, *FOUNDED, round_record(7), last)

    found, logs = engine(tmp_path, Policy(1, 4))

    assert found.control.groups == {}
    assert logs == []


def test_a_learner_that_the_last_member_has_left_its_group_to_has_time_to_come_back(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, Entered("g", 0, ((2, "c"),)), Epoch("g", 2, 0, (), "'b' (rank 0) left"))
    group = engine(tmp_path, Policy(1, 4))[0].control.groups["g"]
    assert dict(group.sessions.away) == {2: group.policy.reconnect}


def told_on_return(found: Engine) -> str:
    """Return the text of the failure that a member of the group gets which comes back."""
    told, *_ = found.handle(Received(7, Resume("g", 0, "", 1, "")), 1.0)
    assert isinstance(told, Send)
    assert isinstance(told.message, Failure)
    return told.message.text


def test_a_group_that_needs_another_number_of_workers_now_ends_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED)

    found, logs = engine(tmp_path, 3)

    assert found.control.groups == {}
    what = "--workers is 3 now, and must be what it was: the group had 2 workers"
    assert logs == [f"group 'g' ends: {what}"]
    assert f"to resume in, as {what}: call connect again" in told_on_return(found)


def test_a_group_that_lacks_a_member_that_it_needs_says_which_one_has_left(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, Epoch("g", 2, 0, ((0, "a"),), "'b' (rank 1) left (done)"))

    found, logs = engine(tmp_path, 2)

    what = "'b' (rank 1) left (done), and all 2 workers are needed"
    assert logs == [f"group 'g' ends: {what}"]
    assert f"to resume in, as {what}: call connect again" in told_on_return(found)


@pytest.mark.parametrize("names", ["ab", "ba", "abc"])
def test_an_elastic_group_ends_when_all_its_workers_are_started_anew(names: str, tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(7))
    found, _ = engine(tmp_path, Policy(2, 4))
    group = found.control.groups["g"]

    for number, name in enumerate(names):
        assert found.control.groups["g"] is group or number > 1, "the other worker may come back"
        logs = [log.text for log in found.handle(Received(number, join(name)), 1.0) if isinstance(log, Log)]
        found.validate()
        if number == 0:
            said = f"{name!r} waits: the workers of group 'g' may come back, 'a' (rank 0), 'b' (rank 1)"
            assert logs == [f"group 'g': {said}"]

    assert [applicant.join.name for applicant in found.control.groups["g"].applicants.waiting] == [*names]


def test_workers_of_a_group_that_may_not_be_founded_any_more_are_told(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(7))
    found, _ = engine(tmp_path, Policy(2, 4))
    found.control._registry.access = Access(frozenset({"other"}))
    found.handle(Received(0, join("a")), 1.0)

    commands = found.handle(Received(1, join("b")), 1.0)
    found.validate()

    assert {one.connection for one in commands if isinstance(one, Send) and isinstance(one.message, Failure)} == {0, 1}
    assert found.control.groups == {}


def test_a_worker_that_suits_no_new_group_is_told(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(7))
    found, _ = engine(tmp_path, Policy(2, 4))
    found.handle(Received(0, join("a", 1)), 1.0)

    commands = found.handle(Received(1, join("b", 1)), 1.0)
    found.validate()

    (error,) = [one.message.text for one in commands if isinstance(one, Send) and isinstance(one.message, Failure)]
    assert error.startswith("rank 1 of group 'g' is taken by 'a'")


def test_a_group_that_needs_as_many_workers_as_it_has_goes_on(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED)

    found, _ = engine(tmp_path, 2)

    assert found.control.groups["g"].policy.needs_all
    assert len(found.control.groups["g"].members.by_id) == 2


def test_a_record_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later_version:
        later_version.setitem(declared.KINDS, 60, Reset)
        later_version.setitem(declared.CODES, Reset, 60)
        write(tmp_path, *FOUNDED, Reset("g", 3))

    with pytest.raises(StateError, match=r"ledger-000001.gsl: the record at byte .* there is no kind of record 60"):
        StateDir(tmp_path, "0.1.0")


def test_the_port_is_kept_for_the_next_one(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        assert state.port() == 0
        state.keep_port(7411)
    with opened(tmp_path) as state:
        assert state.port() == 7411
        (tmp_path / "port").write_text("rubbish")
        assert state.port() == 0


def test_the_ledger_shows_one_life_of_a_group_that_survived_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *FOUNDED, round_record(0))
    write(tmp_path, Reset("g", 1), round_record(1))

    assert show(str(tmp_path), Selection(), False, False) == 0

    text = capsys.readouterr().out
    assert text.count("group 'g'") == 1
    assert "after round 0: its coordinator was started again, incarnation 2" in text
    assert "before round 1: residuals of lossy codecs were lost, and reset" in text
    assert show(str(tmp_path), Selection(), True, False) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"kind": "durable", "group": "g"}.items() <= next(x for x in lines if x["kind"] == "durable").items()
    assert SECRET not in json.dumps(lines)


def test_members_that_do_not_come_back_are_given_up_while_data_shards_start(tmp_path: Path) -> None:
    durable = Durable("g", SECRET, (1.0, 1.0))
    write(tmp_path, FOUNDED[0], durable, *FOUNDED[2:], round_record(0))
    found, _ = engine(tmp_path, Policy(1, 4))
    group = found.control.groups["g"]

    found.handle(Received(7, Resume("g", 1, group.token(1), 1, "")), 5.0)
    assert group.shards.lacking, "no shard has enlisted"
    assert group.sessions.away == {0: 5.0 + group.policy.missing}
    found.handle(Tick(), 5.0 + group.policy.missing)
    assert list(group.members.by_id) == [1]
    found.validate()
