"""`gradserver demo`: what it promises, what it looks like, and what it leaves behind."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradserver.protocol.harmless import harmless
from gradserver.tools import demo
from gradserver.tools.common.processes import RunError
from gradserver.tools.common.screen import Screen, duration
from gradserver.tools.demo import runner
from gradserver.tools.demo.corpus import Corpus, CorpusError, read_source
from gradserver.tools.demo.lives import Account, ChurnVerdict, Life, churned, judge_churn
from gradserver.tools.demo.model import GPT, state_sha256
from gradserver.tools.demo.outcome import GlobalStep, Result, distances, judge
from gradserver.tools.demo.processes import Processes
from gradserver.tools.demo.reports import Done, Joined, Ready, Report, Round, Step, TooLate, from_line, to_line
from gradserver.tools.demo.settings import TOLERANCE, Settings
from gradserver.tools.demo.train import mean_loss, train
from tests.cluster import PATHS, Program

TINY = Settings.quick(workers=2, batch=3, steps=6, seed=1)
TEXT = b"".join(b"line %d: %d bottles of beer\n" % (n, n * n % 97) for n in range(2000))


# ── the whole, as a user runs it ──────────────────────────────────────────────────────────────────────


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "gradserver", "demo", "--quick", "--out", str(out), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATHS, "PYTHONIOENCODING": "utf-8"}


def output_of(out: Path, *options: str, seconds: float = 100.0) -> str:
    """Return the output of a demo that has passed."""
    with Program(
        "-m", "gradserver", "demo", "--out", str(out), *options, environment=environment(), loaded="torch"
    ) as ran:
        status = ran.end(seconds)
        said = "".join(f"{line}\n" for line in ran.output())
        assert status == 0, "\n".join([said, *ran.complaints()])
    return said


def test_demo_passes_and_leaves_its_results(tmp_path: Path) -> None:
    said = output_of(tmp_path / "out", "--quick", "--steps", "12")
    assert "\x1b" not in said
    assert "\r" not in said
    assert not [line for line in said.replace(str(tmp_path), "").splitlines() if len(line) > 79]
    digest = re.search(r"ok  weights +identical +SHA-256 (\w{32})\.\.\.", said)
    assert digest
    assert re.search(r"ok  loss curve +same +difference \S+ \(step \d+, tolerance 1e-04\)", said)
    assert "PASS  2 workers trained like one process with 2 times the batch." in said

    picture = (tmp_path / "out" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000
    with (tmp_path / "out" / "losses.csv").open() as stream:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["loss_workers"] == pytest.approx(row["loss_one_process"], rel=1e-5)
        assert row["norm_workers"] == pytest.approx(row["norm_one_process"], rel=1e-5)
    assert rows[-1]["loss_workers"] < rows[0]["loss_workers"] - 1.0

    model = GPT(Settings.quick(workers=2, batch=4, steps=12, seed=0))
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pt", weights_only=True))
    assert state_sha256(model).startswith(digest[1])


@pytest.mark.long
def test_demo_over_a_lossy_wire_holds_replicas_together_and_says_how_near_it_came(tmp_path: Path) -> None:
    said = output_of(tmp_path / "out", "--quick", "--steps", "12", "--wire", "topk:0.1")
    assert not [line for line in said.replace(str(tmp_path), "").splitlines() if len(line) > 79]
    assert "gradients travel as topk:0.1, with error feedback" in said
    assert re.search(r"ok  weights +identical +SHA-256 \w{32}\.\.\.", said)
    assert re.search(r"ok  loss curve +lossy +difference \S+ \(step \d+\)", said)
    assert "PASS  2 workers have identical replicas, trained with topk:0.1." in said
    assert re.search(r'connect\("tcp://COORDINATOR:7411",\n +wire="topk:0.1"\)', said)
    with (tmp_path / "out" / "losses.csv").open() as stream:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    apart = max(abs(row["loss_workers"] / row["loss_one_process"] - 1) for row in rows)
    assert TOLERANCE < apart < 0.2  # it is lossy, and learns
    assert rows[-1]["loss_workers"] < rows[0]["loss_workers"] - 0.5


def run_with_churn(out: Path, *options: str, seconds: float) -> str:
    """Return the output of a demo that kills workers. It has passed, and left what belongs to it."""
    said = output_of(out, *options, seconds=seconds)
    assert not [line for line in said.replace(str(out), "").splitlines() if len(line) > 79]
    assert re.search(r"ok  weights +identical +SHA-256 \w{32}\.\.\.", said)
    assert re.search(r"ok  samples +each once +([\d,]+) of \1", said)
    assert re.search(
        r"ok  final loss  same        difference 0\.\d\d%, tolerance 2%|ok  final loss  same        difference 1",
        said,
    )
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with (out / "losses.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    for name in ("churn", "calm"):
        used = [int(row["samples"]) for row in rows if row["run"] == name]
        assert used == sorted(used)
        assert used[-1] == int(rows[-1]["samples"])
    return said


@pytest.mark.long
def test_demo_with_churn_loses_nothing(tmp_path: Path) -> None:
    said = run_with_churn(tmp_path, "--quick", "--churn", "0.2", "--workers", "2", "--steps", "60", seconds=100)
    assert re.search(r"\d  worker 'w[01]' was killed; 1 continues\n", said)
    assert re.search(r"\d  worker 'w2' joined with the state of 'w[01]' \(1\.8 MB in \d\.\d\d s\)\n", said)
    assert re.search(r"PASS  .* killed and \d+ joined, and the training has the same result\.", said)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_demo_with_churn_trains_its_model_as_undisturbed(tmp_path: Path) -> None:
    said = run_with_churn(tmp_path, "--churn", "4", "--steps", "60", "--batch", "2", seconds=900)
    assert len(re.findall(r"worker 'w\d+' was killed; 3 continue", said)) >= 2
    model = GPT(Settings())
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    digest = re.search(r"SHA-256 (\w{32})", said)
    assert digest
    assert state_sha256(model).startswith(digest[1])


@contextmanager
def running_demo(out: Path) -> Iterator[tuple[subprocess.Popen[str], dict[int, str]]]:
    """Start a demo that would train for long. Return it, once it trains, with the processes that it has started."""
    with subprocess.Popen(
        command(out, "--steps", "100000"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                if re.match(r" +1  +\d", line):
                    break
            children = children_of(process.pid)
            (forks,) = [pid for pid, text in children.items() if "common.forks" in text]
            trainers = children_of(forks)
            assert (len(children), len(trainers)) == (2, 2), (children, trainers)
            yield process, children | trainers
        finally:
            if process.poll() is None:
                process.terminate()  # not kill: it would leave its children behind


def children_of(parent: int) -> dict[int, str]:
    """Return the command lines of the processes that `parent` has started, by process id, in their order."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == parent and after_name[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it has ended meanwhile
    return dict(sorted(found.items()))


def assert_gone(processes: dict[int, str]) -> None:
    still_there = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes}
    assert not [pid for pid, path in still_there.items() if path.exists() and "gradserver" in path.read_text()]


@pytest.mark.long
def test_demo_reports_a_killed_worker_and_leaves_no_process(tmp_path: Path) -> None:
    with running_demo(tmp_path) as (process, children):
        victim = list(children)[-1]
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "FAIL  worker 1 was killed by SIGKILL" in output
        assert f"the logs are in {tmp_path}" in output
        assert "Traceback" not in output.partition("FAIL")[0]
        assert_gone(children)


@pytest.mark.long
def test_demo_reports_a_lost_coordinator(tmp_path: Path) -> None:
    with running_demo(tmp_path) as (process, children):
        [victim] = [pid for pid, text in children.items() if " serve " in text]
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "FAIL  coordinator was killed by SIGKILL" in output
        assert_gone(children)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_ends_its_processes_when_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    with running_demo(tmp_path) as (process, children):
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Interrupted. All processes of the demo have been ended." in output
        assert "Traceback" not in output
        assert_gone(children)


# ── the command line ──────────────────────────────────────────────────────────────────────────────────


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradserver demo")
    demo.add_arguments(parser)
    return parser.parse_args(options)


def test_defaults() -> None:
    arguments = parse()
    assert (arguments.workers, arguments.steps, arguments.batch, arguments.seed) == (None, None, 4, 0)
    assert (arguments.churn, parse("--churn", "10").churn) == (0.0, 10.0)
    assert arguments.out == Path("gradserver-demo")
    assert (arguments.wire, parse("--wire", "topk").wire) == ("fp32", "topk:0.01")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "argument --workers: 0 is out of range: 1 to 64"),
        (["--steps", "-3"], "argument --steps: -3 is out of range: 1 to 1000000"),
        (["--batch", "many"], "argument --batch: 'many' is not a whole number"),
        (["--seed", "1.5"], "argument --seed: '1.5' is not a whole number"),
        (["--wire", "int4"], "argument --wire: there is no codec 'int4'; there are fp32, bf16, fp16, int8, topk"),
        (["--churn", "0"], "argument --churn: 0 is out of range: a number of seconds is 0.1 to 3600"),
        (["--wire", "topk:1"], "argument --wire: topk:1 takes more bytes than fp32"),
    ],
)
def test_bad_values_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(*options)
    assert message in capsys.readouterr().err


def test_import_is_light() -> None:
    code = (
        "import argparse, sys, gradserver.tools.demo as demo; demo.add_arguments(argparse.ArgumentParser()); "
        "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert demo.run(parse()) == 2
    message = "gradserver demo requires torch and matplotlib: pip install 'gradserver[demo]'\n"
    assert capsys.readouterr() == ("", message)


def test_a_worker_that_is_killed_leaves_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(parse("--churn", "10", "--workers", "1", "--out", str(tmp_path))) == 2
    assert capsys.readouterr().err.startswith("gradserver demo --churn requires at least 2 workers")


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo.run(parse("--out", str(tmp_path / "file" / "out"))) == 2
    assert capsys.readouterr().err.startswith("gradserver demo: [Errno 20] Not a directory")


# ── the verdict ───────────────────────────────────────────────────────────────────────────────────────


def result(losses: list[float], *hashes: str, norm: float = 2.0) -> Result:
    steps = [GlobalStep(n, loss, norm, 0.1, 0.25) for n, loss in enumerate(losses)]
    done = [Done(digest, losses[-1], "self):\n\tpass\x1b[2J") for digest in hashes]
    return Result(steps, done)


LOSSES = [5.5, 4.0, 3.0, 2.5, 2.25, 2.0]


Verdict = Callable[[Settings, tuple[str, str], float, int, list[str]], None]


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verdict:
    """Check the output for workers with these hashes of their weights, and this last loss."""

    def run(settings: Settings, hashes: tuple[str, str], last: float, status: int, lines: list[str]) -> None:
        monkeypatch.setattr(runner.Demo, "train_group", lambda _self: result([*LOSSES[:-1], last], *hashes))
        monkeypatch.setattr(runner.Demo, "train_reference", lambda _self, _group: result(LOSSES, "ab" * 32))
        assert runner.run_demo(settings, tmp_path, runner.Demo) == status
        output = capsys.readouterr().out
        for line in lines:
            assert line in output
        assert ("PASS" in output) == (status == 0)
        assert "\x1b" not in output
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    return run


@pytest.mark.parametrize(
    ("hashes", "last", "status", "lines"),
    [
        (("ab" * 32, "ab" * 32), 2.0 * (1 + TOLERANCE / 2), 0, ["PASS  2 workers trained like one process"]),
        (
            ("ab" * 32, "cd" * 32),
            2.0,
            1,
            ["NO  weights     DIFFERENT", "worker 1 cdcdcdcdcdcdcdcdcdcdcdcd", "FAIL  the replicas' weights differ."],
        ),
        (
            ("ab" * 32, "ab" * 32),
            2.0 * (1 + TOLERANCE * 2),
            1,
            ["NO  loss curve  DIFFERENT", "FAIL  the loss curves differ."],
        ),
        (("ab" * 32, "ab" * 32), math.nan, 1, ["difference inf (step 6,"]),
    ],
)
def test_exit_status_follows_the_verdict(
    verdict: Verdict, hashes: tuple[str, str], last: float, status: int, lines: list[str]
) -> None:
    verdict(TINY, hashes, last, status, lines)


@pytest.mark.parametrize(
    ("hashes", "last", "status", "lines"),
    [
        (("ab" * 32, "ab" * 32), 4.0, 0, ["ok  loss curve  lossy       difference 1.0e+00 (step 6)"]),
        (("ab" * 32, "cd" * 32), 2.0, 1, ["NO  weights     DIFFERENT", "FAIL  the replicas' weights differ."]),
        (
            ("ab" * 32, "ab" * 32),
            math.nan,
            1,
            ["NO  loss curve  NOT FINITE  difference inf (step 6)", "FAIL  the loss curves are not finite."],
        ),
    ],
)
def test_a_lossy_curve_may_be_another_but_replicas_may_not(
    verdict: Verdict, hashes: tuple[str, str], last: float, status: int, lines: list[str]
) -> None:
    verdict(replace(TINY, wire="int8"), hashes, last, status, lines)


def test_distance_is_relative_to_the_reference_and_never_hidden() -> None:
    assert distances([1.0, 2.2, math.nan, 1.0, 1.0], [1.0, 2.0, 1.0, math.inf, 0.0]) == [
        0.0,
        pytest.approx(0.1),
        math.inf,
        math.inf,
        math.inf,
    ]
    verdict = judge(result([5.0, 4.4], "a", "a"), result([5.0, 4.0], "a"))
    assert verdict.losses.distance == pytest.approx(0.1)
    assert verdict.losses.step == 1
    assert verdict.identical
    assert not verdict.passed


def test_gradients_that_are_summed_instead_of_averaged_do_not_pass() -> None:
    """Test what the loss curve may not show: clipping and Adam both undo a constant factor."""
    verdict = judge(result(LOSSES, "a", "a", norm=4.0), result(LOSSES, "a", norm=2.0))
    assert verdict.losses_allowed
    assert verdict.gradient_norms.distance == 1.0
    assert not verdict.passed


def test_global_step_is_the_mean_over_replicas() -> None:
    step = GlobalStep.of([Step(7, 2.0, 1.5, 0.5, 0.1), Step(7, 3.0, 1.5, 0.3, 0.1)])
    assert (step.step, step.loss, step.gradient_norm, step.seconds) == (7, 2.5, 1.5, 0.5)
    assert step.exchange_share == pytest.approx(0.25)


# ── workers that come and go ──────────────────────────────────────────────────────────────────────────


def told(number: int, samples: list[int], used: int, workers: int = 2, wait: float = 0.1) -> Round:
    """Return a round that ends a second after the one before it."""
    loss = float(number) if samples else None
    return Round(number, loss, samples, used, workers, 1.0, wait, number + 1.0)


def lives(**changes: Any) -> list[Life]:
    """Return two founders, of which one dies in round 2, where its part counted; another worker joins in round 4."""
    one = Life("w0", joined=Joined(0.0), done=Done("ab", 2.5, "text"))
    one.rounds = [told(0, [0, 1], 4), told(1, [4, 5], 8), told(2, [8, 9], 12, 1, 0.4), told(3, [12, 13], 14, 1)]
    one.rounds += [told(4, [14], 16, wait=0.3), told(5, [16, 17], 20)]
    two = Life("w1", joined=Joined(0.0), killed=2.5, rounds=[told(0, [2, 3], 4), told(1, [6, 7], 8)])
    three = Life("w2", False, Joined(4.2, "w0", 1_800_000, 0.1), done=Done("ab"))
    three.rounds = [told(4, [15], 16), told(5, [18, 19], 20)]
    found = [one, two, three]
    for name, value in changes.items():
        setattr(found[0], name, value)
    return found


def test_samples_of_lives_add_up() -> None:
    group = churned(lives(), 20)
    assert group.account == Account(total=20, used=20, told=18, twice=0, by_the_dead=2)
    assert group.account.each_once
    assert [(event.name, event.joined, event.used) for event in group.events] == [("w1", False, 8), ("w2", True, 14)]
    assert [event.waited for event in group.events] == [pytest.approx(0.3), pytest.approx(0.2)]
    assert [one.loss for one in group.rounds] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (group.validation_loss, group.sample) == (2.5, "text")
    assert group.losses_at([4, 9, 14, 20, 24]) == [0.0, 2.0, 3.0, 5.0, 5.0]
    assert group.final_loss == 5.0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda found: found[0].rounds[5].samples.append(8), "a sample that was used twice"),
        (lambda found: found[0].rounds[3].samples.pop(), "a sample that counted and no worker used"),
        (lambda found: found[0].rounds[4].samples.append(99), "a sample that was used and did not count"),
        (lambda found: found[0].rounds.pop() and found[2].rounds.pop(), "samples that are left"),
    ],
)
def test_samples_that_do_not_add_up_are_found(change: Callable[[list[Life]], object], what: str) -> None:
    found = lives()
    change(found)
    assert not churned(found, 20).account.each_once, what


def verdict_on(found: list[Life], last: float = 5.0, *, lossy: bool = False) -> ChurnVerdict:
    return judge_churn(churned(found, 20), result([5.0] * 4 + [last], "ab"), lossy=lossy)


@pytest.mark.parametrize(
    ("found", "last", "lossy", "faults"),
    [
        (lives(), 5.0, False, []),
        (lives(), 4.91, False, []),
        (lives(), 4.89, False, ["the final losses differ"]),
        (lives(), 4.0, True, []),
        (lives(), math.nan, True, ["the final losses are not finite"]),
        (lives(done=Done("cd")), 5.0, False, ["the replicas' weights differ"]),
        (lives()[:2], 5.0, False, ["not every sample was used once", "no worker joined in so short a run"]),
        (lives()[:1], 5.0, False, ["not every sample was used once", "no worker was killed in so short a run"]),
    ],
)
def test_a_run_with_churn_is_judged(found: list[Life], last: float, lossy: bool, faults: list[str]) -> None:
    assert verdict_on(found, last, lossy=lossy).faults == faults


def test_a_killed_process_is_no_error_and_one_that_waits_can_be_told_to_go(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        victim = processes.start("victim", "-c", "import time; print('up', flush=True); time.sleep(600)")
        assert processes.next_line(30) == (victim, "up")
        processes.kill(victim)
        assert processes.next_line(30) == (victim, None)
        waiting = processes.start("waiting", "-c", "print(input())")
        assert processes.line_within(0.1) is None
        waiting.say("go")
        assert processes.next_line(30) == (waiting, "go")


# ── the samples ───────────────────────────────────────────────────────────────────────────────────────


def library(root: Path) -> Path:
    """Make a small standard library, with files that are not to be read."""
    for name in ("b.py", "a/z.py", "a/b.py", "site-packages/x.py", "test/t.py", "a/tests/t.py", "notes.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\nif True:\n        pass\n".encode() + TEXT)
    return root


def test_corpus_is_the_sorted_source_and_nothing_else(tmp_path: Path) -> None:
    text = read_source(library(tmp_path))
    assert re.findall(rb"# (\S+)", text) == [b"a/b.py", b"a/z.py", b"b.py"]
    assert b"if True:\n\t\tpass\n" in text
    assert read_source(tmp_path, cap=70_000) == text[: 70_000 - 12]  # in both files eight spaces became two tabs
    assert hashlib.sha256(read_source(tmp_path)).digest() == hashlib.sha256(text).digest()


def test_corpus_says_when_there_is_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    with pytest.raises(CorpusError, match=r"no Python source to train on under .* \(5 bytes of .py files\)"):
        read_source(tmp_path)
    with pytest.raises(CorpusError, match="100 bytes of text are too few for sequences of 64"):
        Corpus(b"x" * 100, 64, 0)


def test_standard_library_is_there() -> None:
    corpus = Corpus.standard_library(TINY.context, TINY.seed)
    assert len(corpus.text) > 2**20
    assert corpus.sha256 == Corpus.standard_library(TINY.context, TINY.seed).sha256


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_parts_are_exactly_the_global_batch(workers: int) -> None:
    settings = replace(TINY, workers=workers)
    corpora = [Corpus(TEXT, settings.context, settings.seed) for _ in range(workers + 1)]
    for step in (0, 1, 17):
        whole = corpora[-1].batch(step, range(settings.global_batch))
        for rank in range(workers):
            part = corpora[rank].batch(step, settings.rows_of(rank))
            for mine, all_rows in zip(part, whole, strict=True):
                assert mine.shape == (settings.batch, settings.context)
                assert torch.equal(mine, all_rows[rank::workers])
    covered = sorted(row for rank in range(workers) for row in settings.rows_of(rank))
    assert covered == list(range(settings.global_batch))


def test_samples_depend_on_seed_step_and_row_and_stay_in_their_part() -> None:
    corpus = Corpus(TEXT, 64, 0)
    first = corpus.batch(0, range(4))[0]
    assert not torch.equal(first, corpus.batch(1, range(4))[0])
    assert not torch.equal(first, Corpus(TEXT, 64, 1).batch(0, range(4))[0])
    inputs, targets = corpus.validation(8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    held_out = TEXT[len(corpus.train) :]
    assert bytes(inputs[-1].tolist()) in held_out
    assert len(corpus.train) + len(corpus.held_out) == len(TEXT)


def test_samples_are_these_for_ever() -> None:
    """Test that old and new curves can be compared: a change here has to be meant."""
    starts = [TEXT.index(bytes(row.tolist())) for row in Corpus(TEXT, 64, 0).batch(3, [0, 1, 2])[0]]
    assert starts == [22279, 5373, 52576]


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────


def test_settings_know_the_size_of_the_model() -> None:
    for settings in (TINY, Settings()):
        assert sum(parameter.numel() for parameter in GPT(settings).parameters()) == settings.parameters
        assert Settings.from_json(settings.to_json()) == settings
    assert 1.9e6 < Settings().parameters < 4e6


def test_model_is_causal_and_depends_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    model = GPT(TINY)
    torch.manual_seed(6)
    assert state_sha256(model) == state_sha256(GPT(TINY)) != state_sha256(GPT(replace(TINY, seed=2)))
    tokens = torch.randint(256, (2, TINY.context))
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, TINY.context, 256)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])
    assert model.generate(b"x", 90, seed=1) == model.generate(b"x", 90, seed=1)
    assert len(model.generate(b"prompt", 90)) == 90


def test_first_loss_is_that_of_knowing_nothing() -> None:
    loss = mean_loss(GPT(TINY), *Corpus(TEXT, TINY.context, 0).batch(0, range(8)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_hash_sees_every_bit_and_survives_saving(tmp_path: Path) -> None:
    model = GPT(TINY)
    digest = state_sha256(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = GPT(replace(TINY, seed=9))
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert state_sha256(other) == digest
    with torch.no_grad():
        other.final_norm.weight[3] = torch.nextafter(other.final_norm.weight[3], torch.tensor(2.0))
    assert state_sha256(other) != digest


def test_mean_of_the_workers_gradients_is_that_of_the_whole_batch() -> None:
    model, corpus = GPT(TINY).double(), Corpus(TEXT, TINY.context, 0)

    def gradients(rows: range) -> list[torch.Tensor]:
        loss = mean_loss(model, *corpus.batch(0, rows))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    whole = gradients(range(TINY.global_batch))
    parts = [gradients(TINY.rows_of(rank)) for rank in range(TINY.workers)]
    for one, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(pieces).mean(0), one, rtol=1e-9, atol=1e-12)


def test_training_is_deterministic_and_learns() -> None:
    settings = replace(TINY, steps=30)
    corpus = Corpus(TEXT, settings.context, settings.seed)
    runs = []
    for _ in range(2):
        model = GPT(settings)
        clock = iter(range(1000))
        steps = list(train(model, corpus, settings, range(settings.global_batch), lambda: float(next(clock))))  # noqa: B023
        assert [step.step for step in steps] == list(range(30))
        assert {step.exchange_seconds for step in steps} == {1.0}
        runs.append(([step.loss for step in steps], state_sha256(model)))
    assert runs[0] == runs[1]
    assert runs[0][0][-1] < runs[0][0][0] - 2.0


def test_learning_rate_rises_falls_and_never_vanishes_within_a_run() -> None:
    rates = [Settings().learning_rate_at(step) for step in range(Settings().steps)]
    assert max(rates) == pytest.approx(Settings().learning_rate)
    assert min(rates) > 0
    assert replace(TINY, steps=1).learning_rate_at(0) > 0


# ── processes, reports, screen ────────────────────────────────────────────────────────────────────────


def test_a_crash_is_reported_with_its_last_words_and_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    with Processes(tmp_path) as processes:
        patient = processes.start("patient", "-c", "import time; time.sleep(600)")
        unlucky = processes.start("worker 3", "-c", "print('hello'); raise RuntimeError('out of ideas')")
        assert processes.next_line(30) == (unlucky, "hello")
        with pytest.raises(RunError) as caught:
            processes.next_line(30)
    text = str(caught.value)
    assert text.startswith("worker 3 ended with status 1\nits last output:\n")
    assert "  | RuntimeError: out of ideas" in text
    assert (tmp_path / "worker-3.log").exists()
    assert patient.process.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 30


def test_silence_has_an_end_and_names_the_silent_process(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        for rank in range(2):
            processes.start(f"worker {rank}", "-c", "import time; time.sleep(600)")
        with pytest.raises(RunError, match="nothing was heard from worker 0, worker 1 for 0 s"):
            processes.next_line(0.2)


def test_where_no_process_can_be_copied_each_imports_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.tools.demo.processes._IMPORTS", ("nonesuch",))
    with Processes(tmp_path) as processes:
        for name in ("one", "two"):
            child = processes.start_trainer(name, "-c", "print('here')", patience=30)
            assert processes.next_line(30) == (child, "here")
            assert processes.next_line(30) == (child, None)
    assert "No module named 'nonesuch'" in (tmp_path / "forks.log").read_text()


def test_what_does_not_want_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserver.tools.common.processes.STOP_SECONDS", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with Processes(tmp_path) as processes:
        stubborn = processes.start("stubborn", "-c", code)
        assert processes.next_line(30) == (stubborn, "up")
    assert stubborn.process.returncode == -signal.SIGKILL
    assert stubborn.fate() == "was killed by SIGKILL"


@pytest.mark.parametrize(
    "report",
    [
        Ready("ab"),
        Step(3, 2.5, 1.5, 0.25, 0.125),
        Joined(1.5, "w0", 5, 0.1),
        TooLate("it is over", 2.0),
        Round(3, None, [1, 2], 7, 2, 0.5, 0.1, 3.5),
        Done("ab"),
        Done("ab", 2.5, "tab\tquote'"),
    ],
)
def test_reports_survive_the_pipe(report: Report) -> None:
    line = to_line(report)
    assert "\n" not in line
    assert from_line(line) == report


@pytest.mark.parametrize("line", ["", "hello", "[1]", "{}", '{"report": "Step"}', '{"report": "object"}'])
def test_other_lines_are_no_reports(line: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        from_line(line)


class Terminal(io.StringIO):
    """A stream that answers a test's questions about itself."""

    def __init__(self, *, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self.terminal, self.name_of_encoding = terminal, encoding

    def isatty(self) -> bool:
        return self.terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.name_of_encoding


def test_live_lines_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = []
    for is_terminal in (True, False):
        stream = Terminal(terminal=is_terminal)
        screen = Screen(stream)
        screen.live("working")
        screen.line(screen.style("done", "1"))
        written.append(stream.getvalue())
    assert written == ["\x1b[2mworking\x1b[0m\r\x1b[2K\x1b[1mdone\x1b[0m\n", "done\n"]


def test_facts_wrap_before_the_end_of_a_line_of_80_columns() -> None:
    stream = Terminal(terminal=False)
    Screen(stream).facts(("files", "word " * 20), ("", ""))
    assert stream.getvalue() == f"  files     {'word ' * 12}word\n{' ' * 12}{'word ' * 6}word\n\n"


def test_bars_have_a_width_and_an_ascii_form() -> None:
    modern, old = (Screen(Terminal(terminal=False, encoding=name)) for name in ("utf-8", "ascii"))
    assert (modern.bar(0.5, 4), modern.bar(0.53, 4), modern.bar(2, 4)) == ("██  ", "██▏ ", "████")
    assert (old.bar(0.5, 4), old.bar(math.nan, 4)) == ("##  ", "    ")


def test_text_of_the_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\tb\x1b[2J\x07\nc\u202e") == "a   b?[2J?\nc?"


@pytest.mark.parametrize(("seconds", "text"), [(3, "5 s"), (22, "20 s"), (61, "a minute"), (200, "3 minutes")])
def test_durations_are_rough(seconds: float, text: str) -> None:
    assert duration(seconds) == text
