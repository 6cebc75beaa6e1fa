"""Tests that a worker belongs to the process that connected: every use in a forked child raises at once."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.cluster import PATIENCE, ROOT, Daemon, worker_program


def check(met: dict[str, str], rank: int) -> None:
    """Check that the child's errors were UsageErrors only, which say what to do."""
    assert met.pop("rank") == f"{rank} of 2"
    for use, what in met.items():
        assert what.startswith("UsageError: this worker belongs to process "), (use, what)
        assert "call connect() in the child" in what


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_worker_that_is_used_in_a_forked_child_raises_at_once(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVER_CHANNEL", channel)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--quiet"))
        workers = [stack.enter_context(worker_program(daemon.url, "use_in_a_child", rank, 2)) for rank in range(2)]

        for rank, worker in enumerate(workers):
            check(json.loads(worker.expect("met ")), rank)
        for worker in workers:  # the parents continue as if there were no children
            worker.expect("ok")
            assert worker.end() == 0


def test_worker_of_a_local_cluster_is_its_processs_too() -> None:
    code = """
import json, os, gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from tests.worker_programs import met_in_a_child
with gradserver.LocalCluster(2) as cluster:
    cluster.run(lambda worker: worker.agree(simple_plan([("b0", 10)], FLOAT32)))
    if (child := os.fork()) == 0:
        print(json.dumps(met_in_a_child(cluster.workers[0], None)), flush=True)
        raise SystemExit(0)
    assert os.waitpid(child, 0)[1] == 0
    cluster.run(lambda worker: worker.barrier())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)

    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), 0)
