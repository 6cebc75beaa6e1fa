"""Tests of the deployment files: their commands exist, and the scripts start real coordinators and workers."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gradserver.configuration import settings_of
from tests.cluster import PATHS
from tests.commands import ROOT, lines_of, parse

DEPLOY = ROOT / "deploy"
SCRIPTS = ["slurm.sbatch", "torchrun.sh"]

WORKER = """
import sys, numpy, gradserver
with gradserver.connect(timeout=30) as worker:
    ranks = worker.all_gather(numpy.array([worker.rank])).ravel().tolist()
    sys.stdout.write(f"rank {worker.rank} of {ranks} {sys.argv[1:]}\\n")  # in one piece: others write there, too
    worker.barrier()
    if "fail" in sys.argv and worker.rank == 1:
        sys.exit(3)
"""

# What Slurm's commands do as far as the script relies on it: two tasks, on this machine.
SRUN = """
import os, subprocess, sys
command = sys.argv[1:]
assert command.pop(0) == "--kill-on-bad-exit=1"
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}) for rank in (0, 1)
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import sys
assert sys.argv[1:] == ["show", "hostnames", "localhost,elsewhere"], sys.argv
print("localhost", "elsewhere", sep="\\n")
"""
# What torchrun does as far as the script relies on it.
TORCHRUN = """
import os, subprocess, sys
standalone, option, number, *command = sys.argv[1:]
assert (standalone, option) == ("--standalone", "--nproc-per-node"), sys.argv
workers = [
    subprocess.Popen([sys.executable, *command], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": number})
    for rank in range(int(number))
]
sys.exit(max(worker.wait() for worker in workers))
"""


class Machine:
    """A machine with commands of our making in front of its PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worker = folder / "train.py"
        self.worker.write_text(WORKER)
        self.install("gradserver", "import sys; from gradserver.cli import main; sys.exit(main())")

    def install(self, name: str, code: str) -> None:
        command = self.folder / name
        command.write_text(f"#!{sys.executable}\n{code}")
        command.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [DEPLOY / script, *arguments],
            env={**os.environ, "PATH": path, "PYTHONPATH": PATHS, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def bound(*arguments: str) -> str:
    """Return the address that a command of a coordinator listens on."""
    return str(settings_of(parse(*arguments)).find("bind").value)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ── scripts ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_executable_and_free_of_syntax_errors(name: str) -> None:
    assert os.access(DEPLOY / name, os.X_OK)
    assert (DEPLOY / name).read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_start_the_coordinator_by_options_that_exist(name: str) -> None:
    text = (DEPLOY / name).read_text()
    (command,) = re.findall(r"gradserver serve [^&;}\n]*", text)
    values = {"$first": "127.0.0.1", "$port": "7411", "$workers": "4"}
    words = [re.sub(r"\$\w+", lambda found: values[found[0]], word) for word in shlex.split(command)]
    assert bound(*words[1:]).startswith("tcp://")


def test_slurm_script_runs_a_coordinator_and_a_worker_for_each_task(machine: Machine) -> None:
    machine.install("srun", SRUN)
    machine.install("scontrol", SCONTROL)
    port = free_port()
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost,elsewhere", "GRADSERVER_PORT": str(port)}
    done = machine.run("slurm.sbatch", sys.executable, str(machine.worker), "--option", **job)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {rank} of [0, 1] ['--option']" for rank in (0, 1)
    ]
    assert not is_listening(port)


@pytest.mark.parametrize(
    ("command", "status"),
    [([sys.executable, "train.py", "fail"], 3), (["false"], 1)],  # the second before the coordinator is ready
    ids=["late", "at once"],
)
def test_slurm_script_fails_with_its_worker_and_ends_the_coordinator(
    machine: Machine, command: list[str], status: int
) -> None:
    machine.install("srun", SRUN)
    machine.install("scontrol", SCONTROL)
    port = free_port()
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost,elsewhere", "GRADSERVER_PORT": str(port)}
    done = machine.run(
        "slurm.sbatch", *(str(machine.worker) if word == "train.py" else word for word in command), **job
    )
    assert done.returncode == status, done.stderr
    assert not is_listening(port)


def test_slurm_script_asks_for_what_slurm_knows() -> None:
    options = re.findall(r"^#SBATCH (--[a-z-]+)=\S+$", (DEPLOY / "slurm.sbatch").read_text(), re.MULTILINE)
    assert options == ["--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-task", "--cpus-per-task"]


@pytest.mark.parametrize(("argument", "status"), [("--option", 0), ("fail", 3)])
def test_torchrun_script_starts_a_coordinator_and_ends_it(machine: Machine, argument: str, status: int) -> None:
    machine.install("torchrun", TORCHRUN)
    done = machine.run("torchrun.sh", "2", str(machine.worker), argument)
    assert done.returncode == status, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of [0, 1] ['{argument}']" for rank in (0, 1)]
    assert done.stderr.count("stopped") == 1


def test_torchrun_script_says_how_to_use_it(machine: Machine) -> None:
    done = machine.run("torchrun.sh")
    assert done.returncode == 1
    assert "usage: torchrun.sh" in done.stderr


@pytest.mark.long
def test_torchrun_script_with_torchrun_itself(machine: Machine) -> None:
    machine.install("torchrun", "import sys; from torch.distributed.run import main; sys.exit(main())")
    done = machine.run("torchrun.sh", "2", str(machine.worker))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of [0, 1] []" for rank in (0, 1)]


# ── the unit ──────────────────────────────────────────────────────────────────────────────────────────


def unit() -> dict[str, str]:
    """Return the unit's [Service] section; of several lines for one key, the last."""
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    parser.read(DEPLOY / "gradserver.service")
    return dict(parser["Service"])


def test_unit_starts_the_coordinator_by_options_that_exist() -> None:
    service = unit()
    assert "MemoryDenyWriteExecute" not in service, "numba could not compile"
    name, _, options = service["Environment"].strip('"').partition("=")
    program, *words = service["ExecStart"].replace(f"${name}", options).split()
    assert Path(program).name == "gradserver"
    assert bound(*words) == "tcp://127.0.0.1:7411"


def test_unit_has_no_rights() -> None:
    service = unit()
    assert service["CapabilityBoundingSet"] == ""
    assert {service[key] for key in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateDevices")} == {"yes"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "gradserver.service"
    installed = (DEPLOY / copy.name).read_text().replace("/opt/gradserver/bin/gradserver", sys.executable)
    copy.write_text(installed)
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ── the container ─────────────────────────────────────────────────────────────────────────────────────


def dockerfile(instruction: str) -> list[str]:
    """Return what follows each ``instruction``, continued lines joined."""
    lines = lines_of((DEPLOY / "Dockerfile").read_text())
    return [line.removeprefix(instruction).strip() for line in lines if line.startswith(f"{instruction} ")]


def test_container_starts_the_coordinator_by_options_that_exist() -> None:
    (entry,), (options,), (health,) = map(dockerfile, ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    entry_words, option_words = json.loads(entry), json.loads(options)
    assert entry_words == ["gradserver"]
    address = bound(*option_words)
    health_words = json.loads(health.partition("CMD")[2])
    assert parse(*health_words[1:]).url.rpartition(":")[2] == address.rpartition(":")[2]
    assert dockerfile("EXPOSE") == [address.rpartition(":")[2]]


def test_container_has_a_supported_python_no_torch_and_no_root() -> None:
    images = [image.split()[0] for image in dockerfile("FROM")]
    assert len(set(images)) == 1
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {images[0].partition(':')[2].removesuffix('-slim')}" in classifiers
    assert "torch" not in " ".join(dockerfile("RUN"))
    (user,) = dockerfile("USER")
    assert user.partition(":")[0] != "0"


def test_container_is_built_from_all_that_the_package_needs(tmp_path: Path) -> None:
    """Test that a wheel can be built from what is copied, and has all modules."""
    source = tmp_path / "source"
    source.mkdir()
    for copied in dockerfile("COPY"):
        *paths, target = copied.split()
        for path in [] if paths[0].startswith("--") else paths:
            if (ROOT / path).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / path, source / target, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / path, source / target)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"gradserver/cli.py", "gradserver/protocol/wire.py", "gradserver/worker/client.py"} <= set(
            archive.namelist()
        )
