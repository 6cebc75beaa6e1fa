"""Trainers and torch's own wrappers over the backend: weights are those of gloo, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pytest

from gradserver.engine.records import Round
from tests.cluster import ROOT, Daemon, Program, marked, wait_until
from tests.test_late_restart import records

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples" / "trainers"
WEIGHTS = re.compile(r"rank (\d+) on .*?: (.*?weights [0-9a-f]{64})")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
SECONDS = 240.0
SAMPLES, EPOCHS = 1200, 4
"""Samples and epochs of the elastic examples."""


@cache
def outcomes(script: str, ranks: int, *options: str) -> dict[int, str]:
    """Run an example with so many ranks; 0 if it starts them itself. Return what each says at its end, by rank."""
    launcher = [*LAUNCHER, str(ranks)] if ranks else [sys.executable]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVER_")}
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *options],
        env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {int(rank): text for rank, text in WEIGHTS.findall(done.stdout + done.stderr)}
    assert sorted(found) == list(range(ranks or 2)), done.stdout + done.stderr
    return found


def weights(found: dict[int, str]) -> set[str]:
    return {text.rpartition("weights ")[2] for text in found.values()}


CASES = [
    pytest.param("torchrun_ddp.py", 2, (), id="DistributedDataParallel"),
    pytest.param("torchrun_ddp.py", 2, ("--accumulate", "4"), id="accumulation by require_backward_grad_sync"),
    pytest.param("lightning_ddp.py", 0, (), id="Lightning and torchmetrics"),
    pytest.param("accelerate_loop.py", 2, (), id="Accelerate"),
    pytest.param("transformers_trainer.py", 2, (), id="transformers"),
    pytest.param("ray_train.py", 0, (), id="Ray Train"),
]


@pytest.mark.parametrize(("script", "ranks", "options"), CASES)
def test_a_trainer_ends_with_the_bits_of_gloo(script: str, ranks: int, options: tuple[str, ...]) -> None:
    ours = outcomes(script, ranks, *options, "--backend", "gradserver")
    assert len(weights(ours)) == 1
    assert ours == outcomes(script, ranks, *options, "--backend", "gloo")


@pytest.mark.parametrize(("script", "ranks"), [("torchrun_ddp.py", 2), ("lightning_ddp.py", 0)])
def test_gradients_of_torchs_wrapper_as_rounds_have_the_bits_of_gloo(script: str, ranks: int) -> None:
    assert outcomes(script, ranks, "--rounds") == outcomes(script, ranks, "--backend", "gloo")


@pytest.mark.parametrize(
    ("replicate", "shard"), [("gradserver", "gloo"), ("gloo", "gradserver"), ("gradserver", "gradserver")]
)
def test_replicas_of_shards_have_the_bits_of_gloo(replicate: str, shard: str) -> None:
    ours = outcomes("fsdp2.py", 4, "--replicate", replicate, "--shard", shard)
    assert len(weights(ours)) == 1
    assert weights(ours) == weights(outcomes("fsdp2.py", 4, "--replicate", "gloo", "--shard", "gloo"))


def test_shards_without_replicas_have_the_bits_of_gloo() -> None:
    ours = outcomes("fsdp2.py", 2, "--replicate", "gradserver", "--shard", "gradserver")
    assert weights(ours) == weights(outcomes("fsdp2.py", 2, "--replicate", "gloo", "--shard", "gloo"))


@pytest.mark.parametrize("module", ["test_script", "test_ops", "test_sync"])
def test_accelerates_own_scripts_pass(module: str) -> None:
    """Test with a group that is there before: on CPUs Accelerate makes none of this backend."""
    program = (
        "import runpy, torch; torch.distributed.init_process_group('gradserver'); "
        f"runpy.run_module('accelerate.test_utils.scripts.{module}', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [*LAUNCHER, "2", "--no-python", sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ── processes that are left over ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("victim", "number"), [("driver", signal.SIGINT), ("driver", signal.SIGKILL), ("worker", signal.SIGKILL)]
)
def test_no_coordinator_is_left_over_behind_ray(victim: str, number: signal.Signals) -> None:
    mark = "LEFT_OVER", uuid.uuid4().hex
    script = str(EXAMPLES / "ray_train.py")
    own = dict([mark], OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with Program(script, "--epochs", "1000000", environment=own, loaded="") as driver:
        try:
            wait_until(lambda: any("epoch 100: loss" in line for line in driver.so_far()), "two workers train", SECONDS)
            ((coordinator, parent),) = coordinators(mark)
            os.kill(parent if victim == "worker" else driver.pid, number)
            wait_until(lambda: not coordinators(mark), f"coordinator {coordinator} has ended", 60.0)
        finally:
            for pid in marked(*mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def coordinators(mark: tuple[str, str]) -> list[tuple[int, int]]:
    """Return the process of each coordinator that a rank has started, and its parent."""
    pids = [pid for pid, command in marked(*mark).items() if "gradserver.torch.coordinator" in command]
    return [(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) for pid in pids]


# ── elastic jobs ──────────────────────────────────────────────────────────────────────────────────────────


class Elastic:
    """A coordinator, and workers that come and go.

    Args:
        stack: ends the processes.
        script: the workers' script.
        folder: the coordinator's state.
    """

    def __init__(self, stack: ExitStack, script: str, folder: Path) -> None:
        self._stack, self._script, self.folder = stack, EXAMPLES / script, folder
        self._options = "--workers", "2:4", "--gather", "60", "--state-dir", str(folder)
        self.daemon = stack.enter_context(Daemon(*self._options))
        self.workers: dict[str, Program] = {}

    def start(self, name: str) -> None:
        own = {"GRADSERVER_URL": self.daemon.url, "GRADSERVER_NAME": name, "PAUSE": "0.05", "OMP_NUM_THREADS": "1"}
        self.workers[name] = self._stack.enter_context(Program(str(self._script), environment=own, loaded=""))

    def replace_coordinator(self) -> None:
        """Kill the coordinator, and start it again."""
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.end()
        again = Program("-m", "gradserver", "serve", "--bind", self.daemon.url, *self._options)
        self._stack.enter_context(again)
        again.expect("listening on ")

    def wait_for(self, *names: str, rounds: int) -> None:
        """Wait until the group has these members, and then for so many more rounds."""

        def now() -> tuple[set[str], int]:
            group = self.daemon.group()
            return {one["name"] for one in group.get("members", ())}, group.get("round", 0)

        wait_until(lambda: now()[0] == set(names), f"the members are {names}", SECONDS)
        before = now()[1]
        wait_until(lambda: now()[1] >= before + rounds, f"{rounds} more rounds", SECONDS)

    def samples(self) -> float:
        """Return the weight of all contributions that counted: the number of samples in them."""
        found = {one.record.round: one.record.weights for one in records(self.folder) if isinstance(one, Round)}
        assert sorted(found) == list(range(len(found)))
        return sum(map(sum, found.values()))


@pytest.mark.parametrize("script", ["lightning_elastic.py", "accelerate_elastic.py"])
def test_an_elastic_job_uses_each_sample_once_while_workers_and_the_coordinator_die(
    script: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job = Elastic(stack, script, tmp_path / "state")
        for name in "abcd":
            job.start(name)
        job.wait_for("a", "b", "c", "d", rounds=5)
        job.workers["b"].send_signal(signal.SIGKILL)
        job.wait_for("a", "c", "d", rounds=5)
        job.replace_coordinator()
        job.start("e")
        job.wait_for("a", "c", "d", "e", rounds=5)
        ends = {job.workers[name].expect(f"{name}: round ", SECONDS) for name in "acde"}
        assert len(ends) == 1, "all have done the same rounds, and have the same weights"
        assert [job.workers[name].end(SECONDS) for name in "acde"] == [0] * 4
    assert job.samples() == SAMPLES * EPOCHS
