"""Every example runs, in processes of its own, and ends as it says it does."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import ROOT, STARTED_WITHIN, Daemon, Program, wait_until

EXAMPLES = ROOT / "examples"
MOST_LINES = 80


def output_of(*arguments: str | Path) -> list[str]:
    """Return the output of a program that must succeed."""
    with Program(*map(str, arguments), loaded="torch", as_usual=True) as program:
        status = program.end(STARTED_WITHIN)
        assert status == 0, "\n".join([*program.output(), *program.complaints()])
        return program.output()


def test_every_example_is_tested_here_short_and_says_how_to_run_it() -> None:
    tests = Path(__file__).read_text()
    for example in sorted(EXAMPLES.glob("*.py")):
        text = example.read_text()
        assert tests.count(f'"{example.name}"') == 1, example.name
        assert len(text.splitlines()) < MOST_LINES, example.name
        assert re.search(rf"^    (python|pytest|torchrun .*) examples/{example.name}$", text, re.MULTILINE), (
            example.name
        )


def test_local_cluster() -> None:
    ends = [f"part {4 * rank}, left {(rank - 1) % 4}" for rank in range(4)]
    same = "mean [1.5, 1.5, 1.5], weighted 2.333, max 3, root 102, all [0, 1, 2, 3]"
    assert output_of(EXAMPLES / "local_cluster.py") == [f"rank {rank}: {same}, {end}" for rank, end in enumerate(ends)]


def test_own_gradients() -> None:
    two, one = output_of(EXAMPLES / "own_gradients.py")
    assert two.endswith("replicas identical: True")
    difference = re.fullmatch(r"one worker: loss 0\.0\d+; weights differ by (\S+) at most", one)
    assert difference, one
    assert float(difference[1]) < 1e-5


def test_own_tests_of_a_trainer() -> None:
    options = ("-m", "pytest", "-p", "no:cacheprovider", "--quiet")
    assert "3 passed" in output_of(*options, EXAMPLES / "test_trainer_example.py")[-1]


def shown_in_the_readme() -> list[str]:
    """Return what rank 0 prints, without what `gradserver run` puts in front."""
    (shown,) = re.findall(
        r"^```text\n(\[0\] epoch .*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [line.removeprefix("[0] ") for line in str(shown).splitlines() if line.startswith("[0] ")]


def without_figures(line: str) -> str:
    return re.sub(r"loss \d\.\d{4}|weights [0-9a-f]{16}(…|[0-9a-f]{48})$", "#", line)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_train_ddp(world_size: int) -> None:
    """Test with assigned ranks: the worker that prints the losses has rank 0."""
    with Daemon("--workers", str(world_size)) as daemon, ExitStack() as stack:
        programs = [
            stack.enter_context(
                Program(
                    str(EXAMPLES / "train_ddp.py"),
                    environment={"GRADSERVER_URL": daemon.url},
                    loaded="torch",
                    as_usual=True,
                )
            )
            for _ in range(world_size)
        ]
        assert [program.end(STARTED_WITHIN) for program in programs] == [0] * world_size
        lines = [line for program in programs for line in program.output()]
    losses = [float(line.split()[3]) for line in lines if line.startswith("epoch")]
    weights = {line.split()[-1] for line in lines if line.startswith("rank")}
    if world_size == 2:
        told = [line for line in sorted(lines) if line.startswith(("epoch", "rank 0"))]
        assert [without_figures(line) for line in told] == [without_figures(line) for line in shown_in_the_readme()]
    assert len(losses) == 5
    assert losses[-1] < 0.6 * losses[0]
    assert all(line.endswith("over 444 samples") for line in lines if line.startswith("epoch"))
    assert len(weights) == 1
    assert sum(line.startswith("rank") for line in lines) == world_size


def test_before_and_after(tmp_path: Path) -> None:
    """Test that both learn as much, and that the second one goes on from where it was killed, on disks of their own."""
    before = EXAMPLES / "before_ddp.py"
    run = "-m", "torch.distributed.run", "--nproc-per-node", "2", str(before)
    with Program(*run, environment={"CHECKPOINT": str(tmp_path / "before.pt")}, loaded="torch") as program:
        assert program.end(STARTED_WITHIN) == 0
        losses = [float(line.split()[-1]) for line in program.output() if line.startswith("epoch")]
    with Daemon("--workers", "2") as daemon:

        def start(stack: ExitStack) -> list[Program]:
            common = {"GRADSERVER_URL": daemon.url, "WORLD_SIZE": "2", "CHECKPOINTS": str(tmp_path / "checkpoints")}
            example = str(EXAMPLES / "after_ddp.py")
            return [
                stack.enter_context(Program(example, environment={**common, "RANK": str(rank)}, loaded="torch"))
                for rank in (0, 1)
            ]

        with ExitStack() as stack:
            killed = start(stack)
            killed[0].expect("epoch 1, step 32: ", timeout=STARTED_WITHIN)
            for program in killed:
                program.send_signal(signal.SIGKILL)
        with ExitStack() as stack:
            programs = start(stack)
            assert [program.end(STARTED_WITHIN) for program in programs] == [0, 0]
            (*_, last) = programs[0].output()
    assert last.startswith("epoch 3, step 64: loss ")
    assert abs(float(last.split()[-1]) - losses[-1]) < 0.2
    assert losses[-1] < 0.8 * losses[0]


def test_checkpoint(tmp_path: Path) -> None:
    """Test that after a kill and a restart it ends with the weights of an undisturbed run."""
    with Daemon("--workers", "2") as daemon:

        def start(stack: ExitStack, directory: str, pause: float = 0.0) -> list[Program]:
            """Start both workers with given ranks: each has a dropout of its own."""
            common = {"GRADSERVER_URL": daemon.url, "CHECKPOINTS": str(tmp_path / directory), "PAUSE": str(pause)}
            example = str(EXAMPLES / "checkpoint.py")
            return [
                stack.enter_context(
                    Program(example, environment={**common, "RANK": str(rank), "WORLD_SIZE": "2"}, loaded="torch")
                )
                for rank in (0, 1)
            ]

        def weights(programs: list[Program]) -> set[str]:
            assert [program.end(STARTED_WITHIN) for program in programs] == [0, 0]
            return {program.output()[-1] for program in programs}

        with ExitStack() as stack:
            undisturbed = weights(start(stack, "one"))
        assert len(undisturbed) == 1
        with ExitStack() as stack:
            start(stack, "two", pause=0.05)
            wait_until((tmp_path / "two" / "round-000000010.gsckpt").exists, "a checkpoint", STARTED_WITHIN)
        wait_until(lambda: not daemon.snapshot()["groups"], "the coordinator has noticed")
        with ExitStack() as stack:
            programs = start(stack, "two")
            assert {int(program.expect("from round ", STARTED_WITHIN)) % 10 for program in programs} == {0}
            assert weights(programs) == undisturbed


def test_elastic() -> None:
    """Test a later worker that joins, and a frozen one that joins again and has equal weights in the end."""
    with (
        Daemon("--workers", "1:8", "--gather", "0", "--frozen-after", "1") as daemon,
        ExitStack() as stack,
    ):

        def start(name: str) -> Program:
            environment = {"GRADSERVER_URL": daemon.url, "GRADSERVER_NAME": name, "PAUSE": "0.01"}
            return stack.enter_context(Program(str(EXAMPLES / "elastic.py"), environment=environment, loaded="torch"))

        def round_of(program: Program, name: str) -> int:
            return int(program.expect(f"{name}: from round ", STARTED_WITHIN))

        first, second = start("first"), start("second")
        assert 0 in {round_of(first, "first"), round_of(second, "second")}
        wait_until(lambda: len(daemon.group()["members"]) == 2, "both train", STARTED_WITHIN)
        begun = daemon.group()["round"]
        second.send_signal(signal.SIGSTOP)
        wait_until(lambda: len(daemon.group()["members"]) == 1, "the other goes on", STARTED_WITHIN)
        second.send_signal(signal.SIGCONT)

        second.expect("joining again", STARTED_WITHIN)
        assert round_of(second, "second") > begun
        assert [program.end(STARTED_WITHIN) for program in (first, second)] == [0, 0]
        told = second.output()[1]
        assert "this worker, 'second' (rank " in told
        assert "was left out of group 'default'" in told
        ends = {program.output()[-1].partition(": ")[2] for program in (first, second)}
        assert len(ends) == 1
        assert ends.pop().startswith("round ")
