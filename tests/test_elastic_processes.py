"""Elastic groups between processes: one is killed in the middle of a round, and no step is lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from gradserver import daemon
from gradserver.cli import main
from gradserver.engine.policy import Lateness, Policy
from tests.cluster import BUSY, Daemon, joined, wait_until
from tests.elastic_course import lose, survivors_of
from tests.elastic_training import FATAL, VICTIM, WORLD, alone
from tests.replicas import distance

PROGRAM = Path(__file__).with_name("elastic_training.py")
GOES_ON_WITHIN = 1.0 + BUSY
"""From a death to the end of its round: what is promised, and what a machine that has other things to do may add."""


@pytest.mark.parametrize(
    ("channel", "shards"), [("shm", 1), *(pytest.param("tcp", shards, marks=pytest.mark.long) for shards in (1, 2))]
)
def test_a_worker_killed_in_the_middle_of_a_round_costs_one_contribution_and_no_step(
    channel: str, shards: int, tmp_path: Path
) -> None:
    options, environment = ("--shards", str(shards)), {"GRADSERVER_CHANNEL": channel}
    course = lose(PROGRAM, tmp_path, "ok", GOES_ON_WITHIN, options=options, environment=lambda _: environment)

    assert course.places == [[str(rank), "3", "2"] for rank in range(3)]
    record = course.group["last_round"]
    assert record["round"] == FATAL
    assert [weight for member_id, weight in enumerate(record["weights"]) if member_id != VICTIM] == [1.0] * 3
    assert distance(course.state, expected(record["cut"])) < 1e-5


def expected(cut: Collection[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Return the weights after all steps, if the victim counted in the ledger's buckets; each has one slice."""
    counted = {part for member_id, part, slices in cut if member_id == VICTIM and slices == 1}
    assert len(counted) == len(cut)

    def counting(step: int, part: int) -> list[int]:
        counts = step < FATAL or (step == FATAL and part in counted)
        return list(range(WORLD)) if counts else survivors_of()

    return alone(counting)


def test_status_shows_seats_and_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon("--workers", "1:3", "--gather", "0.5") as coordinator, joined(coordinator.url, 3) as workers:
        workers[1].abort("it was preempted")
        wait_until(lambda: len(coordinator.group()["members"]) == 2, "one is gone")
        assert main(["status", coordinator.url, "--interval", "0.05"]) == 0

    shown = capsys.readouterr().out.splitlines()
    assert "group 'default': active, 2 workers, elastic (1 to 3), membership epoch 2" in shown
    columns = [line.split() for line in shown if line.endswith(("0", "2")) and line.startswith("     ")]
    assert [(row[0], row[1], row[-1]) for row in columns] == [("0", "w0", "0"), ("1", "w2", "2")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "3:2"], "1 ≤ MIN ≤ MAX"),
        (["--workers", "0:2"], "0 is out of range: a number of workers is 1 to 1024"),
        (["--workers", "2:x"], "'x' is not a number of workers"),
        (["--workers", ":2"], "'' is not a number of workers"),
        (["--workers", "2:4", "--quorum", "0"], "0 is out of range"),
        (["--workers", "2:4", "--quorum", "120%"], "120 is out of range: a share in percent is 1 to 100"),
        (["--workers", "2:4", "--quorum", "most"], "'most' is not a number of workers (or a share such as 75%)"),
    ],
)
def test_sizes_that_cannot_be_are_told_with_the_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gather", "1"], "--gather needs the number of workers: give --workers"),
        (["--rejoin-for", "1"], "--rejoin-for needs the number of workers: give --workers"),
        (["--join", "tcp://127.0.0.1:1", "--gather", "1"], "--gather is an option of coordinators, not of data shards"),
        (["--join", "tcp://127.0.0.1:1", "--quorum", "1"], "--quorum is an option of coordinators, not of data shards"),
        (["--backlog", "8"], "--backlog needs the number of workers: give --workers"),
        (["--quorum", "2"], "--quorum needs the number of workers: give --workers"),
        (["--workers", "2:4", "--grace", "1"], "grace and late need a quorum or backups"),
        (["--workers", "2:4", "--quorum", "2", "--backup", "1"], "quorum and backup exclude each other"),
        (["--group", "mine"], "--group needs the number of workers in the group: give --workers without a name"),
        (["--group", "mine", "--workers", "a=2"], "--group needs the number of workers in the group: give --workers"),
        (["--ledger-keep", "1GiB"], "--ledger-keep needs a directory for the ledger: give --state-dir"),
        (["--sync", "none"], "--sync needs a directory for the ledger: give --state-dir"),
        (["--ledger-hashes", "off"], "--ledger-hashes needs a directory for the ledger: give --state-dir"),
        (["--journal-quota", "0KiB"], "--journal-quota needs a directory for the ledger: give --state-dir"),
        *(
            (["--join", "tcp://127.0.0.1:1", option, value], f"{option} is an option of coordinators")
            for option, value in (("--sync", "none"), ("--journal-quota", "0KiB"), ("--backlog", "0"), ("--group", "g"))
        ),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "serve", lambda *_, **__: pytest.fail("it served"))
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ("2:4 --quorum 75% --late drop", Policy(2, 4, lateness=Lateness(percent=75.0, keeps=False))),
        ("4 --quorum 3 --grace 2", Policy(4, 4, lateness=Lateness(quorum=3, grace=2.0, staleness=12))),
        (
            "4 --backup 1 --backlog 8",
            Policy(4, 4, backlog=8 << 20, lateness=Lateness(backup=1, grace=0.0, staleness=12)),
        ),
    ],
)
def test_what_is_said_of_late_workers_is_the_groups_policy(
    arguments: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds: list[dict[str, Policy]] = []

    def serve(_bind: str, told: dict[str, Policy], *_: object, **__: object) -> int:
        worlds.append(told)
        return 0

    monkeypatch.setattr(daemon, "serve", serve)
    assert main(["serve", "--workers", *arguments.split()]) == 0
    assert worlds == [{"default": policy}]
