"""Tests of the ledger of real training, recomputed from the gradients, and of the output of `gradserver ledger`."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserver.cli import main
from gradserver.engine.declared import Kind
from gradserver.engine.records import Epoch, Gap, Group, Halt, Plan, Round, RoundRecord, Snapshot, Start
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import HEADER_BYTES, Entry, scan
from gradserver.ledger.state import StateDir
from gradserver.protocol.codecs import codec_of, seed_of
from gradserver.protocol.digest import MODULUS, digest, places
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import NonFiniteError
from gradserver.protocol.plan import Plan as PlanTable, simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.worker.client import Worker
from tests.cluster import ROOT, TIMEOUT, Daemon, joined, together, wait_until
from tests.engine_harness import plan_of
from tests.test_records import RECORDS

Array = np.ndarray[Any, Any]
SIZES = (300_000, 5, 70_001)
PLAN = simple_plan([(f"b{index}", size) for index, size in enumerate(SIZES)], FLOAT32)
ROUNDS = 3
WEIGHTS = (1.0, 2.5, 0.0)
"""By rank: the last one's contributions are left out."""


def gradient(rank: int, number: int, part: int) -> Array:
    return np.random.default_rng((rank, number, part)).standard_normal(SIZES[part]).astype(np.float32)


def train(worker: Worker, pause: float = 0.0) -> list[list[bytes]]:
    """Train for some rounds. Return the results of each. A worker that pauses begins each round late."""
    worker.agree(PLAN)
    results = []
    for number in range(ROUNDS):
        time.sleep(pause * worker.rank)
        buckets = [worker.empty(size, np.float32) for size in SIZES]
        for part, data in enumerate(buckets):
            data[:] = gradient(worker.rank, number, part)
            worker.push(part, data, weight=WEIGHTS[worker.rank])
        worker.finish_round()
        results.append([data.tobytes() for data in buckets])
    return results


def written(path: Path) -> list[Kind]:
    """Return all records but those that only restate."""
    return [
        item.read().record for _, file in files_of(path) for item in scan(file.read_bytes()) if isinstance(item, Entry)
    ]


def rounds_of(path: Path) -> list[RoundRecord]:
    return [record.record for record in written(path) if isinstance(record, Round)]


def stopped(daemon: Daemon) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.end() == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a ledger of three workers of which the last ones begin late."""
    path = tmp_path_factory.mktemp("ledger")
    with Daemon("--state-dir", str(path)) as daemon:
        with joined(daemon.url, 3) as workers:
            together(workers, train, 0.5)
        wait_until(lambda: not daemon.group(), "all have left")
        stopped(daemon)
    return path


# ── an oracle ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [(), ("--shards", "2")], ids=["alone", "shards"])
@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_digests_are_those_of_the_gradients_and_of_the_results(
    tmp_path: Path, channel: str, options: Sequence[str]
) -> None:
    with Daemon("--state-dir", str(tmp_path), *options) as daemon:
        with joined(daemon.url, 3, channel=channel) as workers:
            results = together(workers, train)
        wait_until(lambda: not daemon.group(), "all have left")
        stopped(daemon)
    assert results[0] == results[1] == results[2]
    at = places(PLAN)
    records = rounds_of(tmp_path)
    assert [record.round for record in records] == list(range(ROUNDS))
    assert records[0].inputs
    for number, record in enumerate(records):
        assert record.weights == WEIGHTS
        if not record.inputs:
            continue  # hashing would have taken more than its share of so short rounds
        given = [[gradient(rank, number, part) for part in range(len(SIZES))] for rank in range(3)]
        expected = [sum(digest(data, at[part]) for part, data in enumerate(parts)) % MODULUS for parts in given]
        assert record.inputs == (*expected[:2], 0)
        assert record.results == tuple(digest(data, at[part]) for part, data in enumerate(results[0][number]))
    (plan,) = [record for record in written(tmp_path) if isinstance(record, Plan)]
    assert plan.plan == PLAN


@pytest.mark.parametrize("wire", ["bf16", "int8", "topk:0.01"])
@pytest.mark.parametrize("options", [(), ("--shards", "2")], ids=["alone", "shards"])
def test_what_travels_lossy_is_hashed_as_it_travels(tmp_path: Path, wire: str, options: Sequence[str]) -> None:
    plan = with_codec(PLAN, codec_of(wire))
    with Daemon("--state-dir", str(tmp_path), *options) as daemon, joined(daemon.url, 2) as workers:

        def step(worker: Worker) -> None:
            worker.agree(plan)
            for part in range(len(SIZES)):
                worker.push(part, gradient(worker.rank, 0, part))
            worker.finish_round()

        together(workers, step)
        wait_until(lambda: rounds_of(tmp_path), "the round is written")
    (record,) = rounds_of(tmp_path)
    for rank, found in enumerate(record.inputs):
        assert found == sum(expected(plan, rank, part) for part in range(len(SIZES))) % MODULUS
    assert len(set(record.results)) == len(SIZES)


def expected(plan: PlanTable, rank: int, part: int) -> int:
    """Return the digest of what a worker sends of a bucket in the first round."""
    bucket, at = plan.buckets[part], places(plan)[part]
    data = gradient(rank, 0, part)
    if bucket.codec is None:
        return digest(data, at)
    total = 0
    for start in range(0, data.size, 65_536):
        stop = min(start + 65_536, data.size)
        seed = seed_of(0, part, start // 262_144 * 262_144) + start % 262_144 // 65_536
        block = np.frombuffer(bucket.codec.encode(data[start:stop], None, seed), np.uint8)
        for piece, place in bucket.codec.places(start, stop, data.size):
            total += digest(block[piece], at + place)
    return total


def test_what_is_lost_or_halts_is_in_the_ledger_with_its_reason(tmp_path: Path) -> None:
    with Daemon("--state-dir", str(tmp_path)) as daemon:
        with joined(daemon.url, 2) as workers:

            def step(worker: Worker) -> None:
                worker.agree(PLAN)
                for part in range(len(SIZES)):
                    data = gradient(worker.rank, 0, part)
                    data[0] = np.nan if worker.rank else 0.0
                    worker.push(part, data)
                with pytest.raises(NonFiniteError):
                    worker.finish_round()

            together(workers, step)
        wait_until(lambda: not daemon.group(), "all have left")
    kinds = [type(record).__name__ for record in written(tmp_path) if not isinstance(record, Epoch)]
    assert kinds == [
        "Snapshot",
        "Start",
        "Group",
        "Durable",
        "Commits",
        "Chosen",
        "Plan",
        "Halt",
        "Closed",
    ]
    (halt,) = [record for record in written(tmp_path) if isinstance(record, Halt)]
    assert "'w1' (rank 1) contributed NaN in parameter" in halt.reason
    left = [record.reason for record in written(tmp_path) if isinstance(record, Epoch)]
    assert left[0] == "complete with 2 workers"
    assert "left" in left[1]


def test_nothing_is_hashed_unless_asked_for(tmp_path: Path) -> None:
    with Daemon("--state-dir", str(tmp_path), "--ledger-hashes", "off") as daemon:
        with joined(daemon.url, 3) as workers:
            together(workers, train)
        wait_until(lambda: len(rounds_of(tmp_path)) == ROUNDS, "all rounds are written")
        assert daemon.snapshot()["ledger"]["trouble"] is None
    assert all(not record.inputs and not record.results for record in rounds_of(tmp_path))
    with Daemon() as daemon:
        assert "ledger" not in daemon.snapshot()


# ── the command ───────────────────────────────────────────────────────────────────────────────────────


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], list[str]]:
    """Return exit status, and the lines of both streams."""
    status = main(["ledger", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert all(len(line) <= 100 for line in out.splitlines() if line[:1] not in ("{", "/")), out
    return status, out.splitlines(), err.splitlines()


def test_it_says_which_workers_contributed_and_were_waited_for_and_why(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, trained)
    text = "\n".join(out)
    assert (status, err) == (0, [])
    assert "group 'default': 3 workers, membership epoch 1, since 20" in text
    assert "plan: 3 buckets, 1.5 MB a round, as fp32" in text
    assert re.search(r"rounds 0 to 2: [01]\.\d", text)
    rows = {line.split()[1]: line.split() for line in out if line.split()[1:2] in (["w0"], ["w1"], ["w2"])}
    # rank, worker, rounds, came last, behind, began late, sent slowly
    assert rows["w2"][2:4] == ["0", "3"]
    assert rows["w2"][6:] == ["3", "0"]
    assert rows["w0"][2:4] == ["3", "0"]
    assert rows["w0"][6:] == ["0", "0"]
    assert 0.05 < float(rows["w2"][4]) < 5
    assert "before round 0: complete with 3 workers" in text
    assert "the last worker" in text.replace("\n" + " " * 23, " ")
    assert [line.split()[0] for line in out[-3:]] == ["0", "1", "2"]
    assert all("2 of 3" in line and "w2" in line and "began late" in line for line in out[-3:])


def test_the_plane_and_its_reason_are_among_what_happened(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, trained)
    assert any(re.search(r"plane shm, because 'w0' has no", line) for line in out), out


def test_the_page_shows_the_columns_that_there_are(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, trained, "--to", 2)
    shown = re.search(r"```text\n(  round  done at .*)\n(.*)\n(.*)\n```", (ROOT / "docs" / "observing.md").read_text())
    assert shown is not None
    assert shown[1].split() == out[1].split()
    row = r" +\d+  \d\d:\d\d:\d\d  \d\.\d{3} s  \d of \d +\S+ +\d\.\d{3} s( +began late| +sent slowly)? +[0-9a-f]{16}"
    assert all(re.fullmatch(row, line) for line in (shown[2], shown[3], *out[2:]))


def test_of_one_round_it_says_all(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, trained, "--round", 0)
    record = rounds_of(trained)[0]
    assert status == 0
    assert out[0].startswith("round 0 of group 'default', membership epoch 1: 20")
    lines = {line.split()[1]: line for line in out if line.split()[1:2] in (["w0"], ["w1"], ["w2"])}
    assert f"{record.inputs[1]:016x}" in lines["w1"]
    assert "71.4%" in lines["w1"]
    assert "left out" in lines["w2"]
    assert "began late" in lines["w2"]
    for part, found in enumerate(record.results):
        assert any(f"b{part} " in line and f"{found:016x}" in line and "fp32" in line for line in out)


def test_ranges_and_groups_are_chosen(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, rounds in (
        (("--from", 1), [1, 2]),
        (("--to", 1), [0, 1]),
        (("--from", 1, "--to", 1), [1]),
        (("--from", 0, "--group", "default"), [0, 1, 2]),
    ):
        status, out, _ = run(capsys, trained, *options)
        assert status == 0
        assert out[0] == "group 'default', membership epoch 1:"
        assert [int(line.split()[0]) for line in out[2:]] == rounds


def test_of_one_group_programs_get_no_record_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = StateDir(tmp_path, "0.1.0", sync=None)
    of_a_group = [record for record in RECORDS if not isinstance(record, Start | Snapshot | Gap)]
    for name in ("g", "h"):
        for record in of_a_group:
            state.append(replace(record, group=name))
    state.close()

    assert groups_in(run(capsys, tmp_path, "--json")[1]) == {"g": len(of_a_group), "h": len(of_a_group)}
    assert groups_in(run(capsys, tmp_path, "--json", "--group", "h")[1]) == {"h": len(of_a_group)}


def groups_in(lines: Sequence[str]) -> Counter[str]:
    return Counter(line["group"] for line in map(json.loads, lines) if "group" in line)


def test_programs_get_every_record_as_a_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, trained, "--json")
    lines = [json.loads(line) for line in out]
    assert status == 0
    kinds = [line["kind"] for line in lines]
    assert kinds[:7] == ["start", "group", "durable", "commits", "epoch", "chosen", "plan"]
    assert kinds[-1] == "closed"
    rounds = [line for line in lines if line["kind"] == "round"]
    first, record = rounds[0], rounds_of(trained)[0]
    assert [line["round"] for line in rounds] == [0, 1, 2]
    assert first["weights"] == list(WEIGHTS)
    assert first["inputs"] == [f"{value:016x}" for value in record.inputs]
    assert first["last"] == 2
    assert abs(first["completed"] - time.time()) < 600
    assert first["opened"] <= first["arrivals"][0][0] <= first["arrivals"][2][1] <= first["completed"]
    (plan,) = [line["plan"] for line in lines if line["kind"] == "plan"]
    assert plan["hash"] == PLAN.hash
    assert plan["buckets"][1] == {"key": "b1", "dtype": "float32", "numel": 5, "codec": "fp32"}
    status, out, _ = run(capsys, trained, "--json", "--round", 1)
    assert [json.loads(line)["round"] for line in out] == [1]


def test_a_whole_ledger_is_verified(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, trained, "--verify")
    assert status == 0
    assert out[0].startswith("ledger-000001.gsl: ")
    assert out[0].endswith("KiB, intact")
    assert out[1:] == ["group 'default', membership epoch 1: rounds 0 to 2", "no rounds are missing"]


def test_wrong_paths_groups_and_rounds_are_told_with_what_there_is(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    for arguments, message in (
        (("/nowhere",), "no ledger at /nowhere: no such file or directory"),
        ((tmp_path,), f"{tmp_path} contains no ledger: `gradserver serve --state-dir {tmp_path}` writes one"),
        ((text,), f"{text} is not a ledger file: it does not begin as one"),
        ((text, "--verify"), f"{text} is not a ledger file: it does not begin as one"),
        ((trained, "--round", 99), f"{trained} has no round 99; it has rounds 0 to 2 of group 'default'"),
        ((trained, "--round", 99, "--json"), f"{trained} has no round 99; it has rounds 0 to 2 of group"),
        ((trained, "--from", 3, "--to", 9), f"{trained} has no rounds from 3 to 9; it has rounds 0 to 2"),
        ((trained, "--group", "g"), f"{trained} has no group 'g'; its groups: 'default'"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (1, [])
        assert len(err) == 1
        assert err[0].startswith(f"gradserver: {message}"), err


def write(path: Path, rounds: Sequence[int], file_bytes: int = 1 << 20) -> None:
    """Write a ledger of two workers with these rounds."""
    state = StateDir(path, "0.1.0", sync=None, file_bytes=file_bytes)
    members = ((0, "a"), (1, "b\x1b[31m"))
    for record in (Group("g", 2, 60.0), Epoch("g", 1, 0, members, "complete"), Plan("g", 1, 0, plan_of(3))):
        state.append(record)
    for number in rounds:
        at = time.monotonic()
        arrivals = ((at, at + 0.1), (at, at + 0.5))
        state.append(Round("g", 1, RoundRecord(number, (1.0, 1.0), at, at + 0.5, 1, arrivals, (1, 2), (3,))))
    state.close()


def test_rounds_are_said_to_be_of_the_epoch_in_which_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(2))
    state = StateDir(tmp_path, "0.1.0", sync=None)
    state.append(Group("g", 2, 60.0))
    for epoch, number in ((1, 0), (2, 1), (3, 2)):
        state.append(Epoch("g", epoch, number, ((0, "a"), (1, "b")), "somebody left"))
        at = time.monotonic()
        state.append(Round("g", epoch, RoundRecord(number, (1.0, 1.0), at, at + 0.5, 1, ((at, at), (at, at)), (), ())))
    state.close()

    assert run(capsys, tmp_path, "--round", 1)[1][-4].startswith("round 1 of group 'g', membership epoch 2: ")
    assert "group 'g', membership epochs 1 to 3:" in run(capsys, tmp_path, "--from", 0)[1]


def test_a_slow_sender_is_told_from_a_late_beginner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(3))
    _, out, _ = run(capsys, tmp_path, "--from", 0)
    assert all("sent slowly" in line for line in out[2:])
    assert "\x1b" not in "\n".join(out)


def test_rounds_are_shown_once_however_many_files_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(60), file_bytes=2000)
    assert len(files_of(tmp_path)) > 3
    _, out, _ = run(capsys, tmp_path, "--from", 0)
    assert [int(line.split()[0]) for line in out[2:]] == list(range(60))
    _, out, _ = run(capsys, tmp_path, "--json")
    assert [json.loads(line)["kind"] for line in out].count("group") == 1
    status, out, _ = run(capsys, tmp_path, "--verify")
    assert (status, out[-1]) == (0, "no rounds are missing")
    last = files_of(tmp_path)[-1][1]
    _, out, _ = run(capsys, last)  # it alone names them, too
    assert any("a" in line.split() for line in out)


def test_missing_rounds_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [0, 1, 2, 7, 8])
    status, out, _ = run(capsys, tmp_path, "--verify")
    assert status == 1
    assert out[-1] == "group 'g', membership epoch 1: rounds 3 to 6 missing"


def test_damage_is_told_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(5))
    file = files_of(tmp_path)[0][1]
    data = bytearray(file.read_bytes())
    entries = [item for item in scan(bytes(data)) if isinstance(item, Entry)]
    place = entries[-3].at
    data[place + 30] ^= 1
    file.write_bytes(data)
    status, out, err = run(capsys, tmp_path, "--from", 0)
    assert status == 1
    assert [int(line.split()[0]) for line in out[2:]] == [0, 1, 3, 4]
    assert err == [
        f"gradserver: {file} is damaged: bytes {place} to {entries[-2].at} are not a record and were skipped"
    ]
    status, out, _ = run(capsys, tmp_path, "--verify")
    assert status == 1
    assert out[0].endswith("KiB, damaged")
    assert out[1] == f"  bytes {place} to {entries[-2].at} are not a record"
    assert out[-1] == "group 'g', membership epoch 1: round 2 missing"


def test_a_file_that_is_being_written_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(2))
    file = files_of(tmp_path)[0][1]
    data = file.read_bytes()
    for size in range(HEADER_BYTES, len(data)):
        file.write_bytes(data[:size])
        status, _, err = run(capsys, tmp_path)
        assert (status, err) == (0, [])
    status, out, _ = run(capsys, tmp_path, "--verify")
    assert status == 0
    assert re.search(r"intact except for its last 1\d\d bytes, an incomplete record$", out[0])


def test_options_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (("--sync", "often"), "'often' is not none, round, or a number of seconds"),
        (("--sync", "0"), "out of range"),
        (("--ledger-keep", "much"), "'much' is not a size: a number and KiB, MiB, GiB or TiB, such as 500MiB"),
        (("--ledger-hashes", "maybe"), "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", *options])
        assert message in capsys.readouterr().err
    assert main(["serve", "--join", "tcp://127.0.0.1:1", "--state-dir", "x"]) == 2
    assert "--state-dir is an option of coordinators, not of data shards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "flag", "part"),
    [
        (("--repair", "--group", "g"), "--repair", "--group"),
        (("--export", "out", "--round", 1), "--export", "--round"),
        (("--verify", "--group", "g", "--from", 1), "--verify", "--from"),
    ],
)
def test_what_takes_all_of_the_ledger_takes_no_part_of_it(
    options: tuple[object, ...], flag: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, range(5))

    assert run(capsys, tmp_path, *options) == (
        2,
        [],
        [f"gradserver: {flag} takes all of the ledger: leave out {part}"],
    )


def test_status_tells_of_a_ledger_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import resource

    with Daemon("--state-dir", str(tmp_path)) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0, 0))
        with joined(daemon.url, 2, timeout=TIMEOUT) as workers:
            together(workers, lambda worker: worker.barrier())
            assert main(["status", daemon.url, "--interval", "0.05"]) == 0
    out = capsys.readouterr().out
    assert f"ledger cannot be written: {tmp_path}/ledger-000001.gsl: file too large" in out
