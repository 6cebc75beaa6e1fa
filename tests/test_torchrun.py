"""torchrun with the coordinator as its rendezvous: agents that begin, begin again, die, and are done."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from gradserver.protocol.url import parse_url
from gradserver.status import fetch
from gradserver.torch import rendezvous
from gradserver.torch.rendezvous import Rendezvous, Seen, Status, create, judge
from tests.cluster import PATHS, PATIENCE, ROOT, STARTED_WITHIN, Daemon, Program, Task, together, wait_until
from tests.torchrun_program import ENTRY

SOON = 5.0
"""Seconds within which an agent hears of another one's end, on a busy machine."""
LOOK = 0.2
"""Seconds between two looks of agents in threads at the status."""


@pytest.fixture(autouse=True)
def no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take GRADSERVER_URL away, and what a rendezvous sets."""
    monkeypatch.setenv("GRADSERVER_URL", "")
    monkeypatch.delenv("GRADSERVER_URL")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents in threads look at the status often."""
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", LOOK)
    monkeypatch.setattr(rendezvous, "_MARK_SECONDS", 3 * LOOK)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


def free_port() -> int:
    """Return a port that was free just now, and is not given to processes that ask for any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(url: str, nodes: int | tuple[int, int] = 2, job: str = "job", **options: Any) -> RendezvousParameters:
    least, most = nodes if isinstance(nodes, tuple) else (nodes, nodes)
    endpoint = url.removeprefix("tcp://")
    return RendezvousParameters("gradserver", endpoint, job, least, most, **{"join_timeout": 20, **options})


class Agents(ExitStack):
    """Agents of one job in threads. Those that are not closed when the block ends are closed then."""

    def __init__(self, url: str, nodes: int | tuple[int, int] = 2, **options: Any) -> None:
        super().__init__()
        self._asked = url, nodes, options

    def new(self, **options: Any) -> Rendezvous:
        url, nodes, given = self._asked
        made = create(asked(url, **{"nodes": nodes, **given, **options}))
        self.callback(made.shutdown)
        return made


def meet(*agents: Rendezvous) -> list[RendezvousInfo]:
    """Let agents meet. Return what each of them is told."""
    return together(agents, Rendezvous.next_rendezvous)


def master(info: RendezvousInfo) -> str:
    """Return where the processes of a training are to meet."""
    assert info.bootstrap_store_info is not None
    return f"{info.bootstrap_store_info.master_addr}:{info.bootstrap_store_info.master_port}"


def hears(agent: Rendezvous, count: int = 1) -> None:
    """Wait until an agent hears that all begin again."""
    wait_until(lambda: agent.num_nodes_waiting() == count, f"it hears of {count}", SOON)


def dies(agent: Rendezvous) -> None:
    """End an agent as SIGKILL would: its connection ends without a word."""
    assert agent._worker is not None
    agent._worker._session.traffic.channel.close()
    assert agent._watch is not None
    agent._watch.end()


# ── what a status means ───────────────────────────────────────────────────────────────────────────────


def group(names: str, waiting: int = 0, joining: int = 0, broken: str | None = None, closed_by: str = "") -> Status:
    """Return the status of a group with members of these names, each a letter."""
    members = [{"name": name} for name in names]
    learners = [{"name": str(number)} for number in range(joining)]
    return Status(
        {"members": members, "waiting": [{}] * waiting, "joining": learners, "gone": [], "broken": broken}, closed_by
    )


@pytest.mark.parametrize(
    ("status", "most", "seen"),
    [
        (Status(None), 2, Seen()),
        (Status(None, "b"), 2, Seen(0, "b")),
        (group("ab"), 2, Seen()),
        (group("ab", waiting=3), 2, Seen()),
        (group("ab", waiting=3), 4, Seen(2)),
        (group("ab", joining=1), 4, Seen(1)),
        (group("a", broken="'b' was lost"), 2, Seen(1)),
        (group("a", waiting=2, broken="'b' left"), 2, Seen(2)),
        (group("a"), 4, Seen(1)),
        (group("a", waiting=1, closed_by="b"), 4, Seen(0, "b")),
        (group("", waiting=1, closed_by="b"), 4, Seen(0, "b")),
        (group(""), 2, Seen()),
        (group("", waiting=1), 2, Seen(1)),
        (group("xy", waiting=1), 2, Seen(1)),
    ],
)
def test_a_status_tells_a_member_whether_to_begin_again(status: Status, most: int, seen: Seen) -> None:
    assert judge(status, "a", 2, most) == seen


# ── what is asked for ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("endpoint", "options", "message"),
    [
        ("host:0", {}, "port 0, which is for one node: 2 nodes need the port of a coordinator"),
        ("host:x", {}, "'host:x' must be an integer"),
        ("host", {"join_timeout": "soon"}, "--rdzv-conf has join_timeout=soon: expected seconds above 0"),
        ("host", {"read_timeout": 0}, "--rdzv-conf has read_timeout=0"),
        ("host", {"job": ""}, "the same --rdzv-id"),
    ],
)
def test_options_that_cannot_be_right(endpoint: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(asked(endpoint, **options))


def test_an_endpoint_has_many_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    def url(endpoint: str) -> str:
        return create(asked(endpoint))._wanted.url

    assert url("10.0.0.1:7500") == url("tcp://10.0.0.1:7500") == "tcp://10.0.0.1:7500"
    assert url("10.0.0.1") == "tcp://10.0.0.1:7411"
    assert url("[::1]:7500") == "tcp://[::1]:7500"
    assert url("") == "tcp://127.0.0.1:7411"
    monkeypatch.setenv("GRADSERVER_URL", "tcp://10.0.0.9:7412")
    assert url("") == "tcp://10.0.0.9:7412"


def test_the_host_of_the_endpoint_is_known_by_its_addresses() -> None:
    assert create(asked("127.0.0.1:7411"))._wanted.is_host
    assert create(asked("localhost:7411"))._wanted.is_host
    assert not create(asked("192.0.2.1:7411"))._wanted.is_host
    assert not create(asked("no.such.host.invalid:7411"))._wanted.is_host
    assert not create(asked("127.0.0.1:7411", is_host="false"))._wanted.is_host


# ── agents that meet ──────────────────────────────────────────────────────────────────────────────────


def test_agents_meet_and_share_a_store(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        both = agents.new(), agents.new()
        told = meet(*both)
        assert sorted(one.rank for one in told) == [0, 1]
        assert {one.world_size for one in told} == {2}
        told[0].store.set("key", "value")
        assert told[1].store.get("key") == b"value"
        assert len({master(one) for one in told}) == 1
        assert os.environ["GRADSERVER_URL"] == daemon.url
        assert [agent.num_nodes_waiting() for agent in both] == [0, 0]
        assert (both[0].get_backend(), both[0].get_run_id(), both[0].use_agent_store) == ("gradserver", "job", True)


def test_a_training_may_have_a_store_of_its_own(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with Agents(daemon.url) as agents:
        both = agents.new(), agents.new()
        first, second = meet(*both)
        assert first.bootstrap_store_info == second.bootstrap_store_info
        assert int(master(first).rpartition(":")[2]) != both[0]._store.port
        assert not agents.new().use_agent_store


def test_an_agent_that_begins_again_takes_the_others_along(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        one, other = agents.new(), agents.new()
        before = meet(one, other)
        again = Task(one.next_rendezvous)
        hears(other)
        told = [other.next_rendezvous(), again.result()]
        assert sorted(info.rank for info in told) == [0, 1]
        assert {master(info) for info in told}.isdisjoint({master(info) for info in before})
        time.sleep(3 * LOOK)
        assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)


def test_another_agent_takes_the_place_of_one_that_died(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        dies(one)
        hears(other)
        meet(other, agents.new())


def test_a_closed_rendezvous_is_closed_for_all(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        assert one.shutdown()
        wait_until(other.is_closed, "the other hears of it", SOON)
        assert other.num_nodes_waiting() == 0  # its training goes on
        late = Task(agents.new().next_rendezvous)
        assert f"closed by {one._name!r}: the job is over" in str(late.error(RendezvousClosedError))
        for agent in (one, other):
            with pytest.raises(RendezvousClosedError, match="the rendezvous 'job' was closed by"):
                agent.next_rendezvous()
    with Agents(daemon.url) as agents:  # another job may have its id
        meet(agents.new(), agents.new())


def test_an_agent_that_waits_for_the_others_hears_that_they_are_done(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        again = Task(one.next_rendezvous)
        hears(other)
        assert other.shutdown()  # its training has failed too often
        assert f"closed by {other._name!r}" in str(again.error(RendezvousClosedError, SOON))


def test_a_node_that_is_not_needed_waits_for_a_place(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with Agents(daemon.url, join_timeout=3) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        spare = agents.new()
        waits = Task(spare.next_rendezvous)
        assert not waits.ended(3.5)  # for longer than it has patience with a rendezvous that is not complete
        assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
        assert "is complete without this node, which waits until one is missing" in caplog.text
        dies(one)
        hears(other)
        assert {other.next_rendezvous().rank, waits.result().rank} == {0, 1}


def test_each_size_of_groups_that_a_coordinator_may_have_serves() -> None:
    with Daemon("--workers", "*=1:8", "--gather", "0.5") as daemon, Agents(daemon.url) as agents:
        one, other = agents.new(), agents.new()
        alone = Task(one.next_rendezvous)
        assert not alone.ended(2.0)  # the group has begun with it meanwhile
        told = [other.next_rendezvous(), alone.result()]
        assert {info.world_size for info in told} == {2}
        again = Task(one.next_rendezvous)
        hears(other)
        assert {other.next_rendezvous().rank, again.result().rank} == {0, 1}


@pytest.mark.parametrize("plane", ["direct", "hierarchical", "shm"])
def test_a_coordinator_may_demand_a_plane(plane: str) -> None:
    with Daemon("--plane", plane) as daemon, Agents(daemon.url) as agents:
        assert {told.rank for told in meet(agents.new(), agents.new())} == {0, 1}


# ── a coordinator that is lost ────────────────────────────────────────────────────────────────────────


def restarted(daemon: Daemon, *options: str) -> Program:
    """Kill a coordinator, and start another one at its address."""
    daemon.send_signal(signal.SIGKILL)
    daemon.end()
    words = "-m", "gradserver", "serve", "--bind", daemon.url, *options
    program = Program(*words)
    program.expect("listening on ")
    return program


def test_a_coordinator_that_is_started_again_disturbs_no_agent(tmp_path: Path) -> None:
    options = "--state-dir", str(tmp_path / "state")
    with Daemon(*options) as daemon:
        agents = Agents(daemon.url)
        one, other = agents.new(), agents.new()
        meet(one, other)
        with restarted(daemon, *options), agents:
            time.sleep(1.0)  # while they look
            assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)
            dies(one)
            hears(other)
            meet(other, agents.new())


def test_a_coordinator_without_memory_is_met_at_anew(daemon: Daemon) -> None:
    agents = Agents(daemon.url)
    one, other = agents.new(), agents.new()
    meet(one, other)
    with restarted(daemon), agents:
        time.sleep(1.0)
        assert (one.num_nodes_waiting(), other.num_nodes_waiting()) == (0, 0)  # their trainings may not need it
        again = Task(one.next_rendezvous)
        hears(other)
        assert {other.next_rendezvous().rank, again.result().rank} == {0, 1}


def test_agents_start_a_coordinator_where_none_is() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with Agents(url) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        (starter,) = [agent for agent in (one, other) if agent._coordinator is not None]
        (rest,) = {one, other} - {starter}
        dies(rest)
        hears(starter)
        meet(starter, agents.new())
    assert starter._coordinator is not None
    assert starter._coordinator.wait(PATIENCE) == 0  # it has ended with the last one


def test_a_single_node_needs_no_port() -> None:
    with Agents("127.0.0.1:0", 1) as agents:
        (told,) = meet(agents.new())
        assert (told.rank, told.world_size) == (0, 1)
        assert fetch(os.environ["GRADSERVER_URL"])["groups"].keys() == {"torchrun/job"}


# ── numbers of nodes that change ──────────────────────────────────────────────────────────────────────


def test_the_number_of_nodes_may_grow_and_shrink() -> None:
    with Agents(f"127.0.0.1:{free_port()}", (1, 3), last_call_timeout=1) as agents:
        first, second, third = agents.new(), agents.new(), agents.new()
        assert first.next_rendezvous().world_size == 1
        joins = Task(second.next_rendezvous)
        hears(first)
        assert [first.next_rendezvous().world_size, joins.result().world_size] == [2, 2]
        joins = Task(third.next_rendezvous)
        hears(first)
        hears(second)
        assert [info.world_size for info in meet(first, second)] == [3, 3]
        assert joins.result().world_size == 3
        dies(third)
        hears(first)
        hears(second)
        assert [info.world_size for info in meet(first, second)] == [2, 2]
        second.shutdown()
        wait_until(first.is_closed, "it hears that the job is over", SOON)


def test_a_coordinator_has_to_know_of_numbers_that_change(daemon: Daemon) -> None:
    with Agents(daemon.url, (1, 3)) as agents, pytest.raises(RendezvousStateError) as told:
        agents.new().next_rendezvous()
    assert "gradserver serve --groups any --workers 'torchrun/job=1:3'" in str(told.value)
    with Daemon("--workers", "*=2:3", "--gather", "0.2") as other, Agents(other.url, (1, 3), join_timeout=3) as agents:
        both = [Task(agents.new().next_rendezvous) for _ in range(2)]
        assert {"has 2:3 for them" in str(one.error(RendezvousStateError)) for one in both} == {True}


# ── what is wrong ─────────────────────────────────────────────────────────────────────────────────────


def test_a_rendezvous_that_is_not_complete_in_time_says_which_nodes_came(daemon: Daemon) -> None:
    with Agents(daemon.url, 3, join_timeout=1) as agents:
        both = [Task(agents.new().next_rendezvous) for _ in range(2)]
        texts = [str(one.error(RendezvousTimeoutError)) for one in both]
    assert all("'job' of 3 nodes was not complete in time" in text for text in texts)
    assert any(f"{socket.gethostname()}:{os.getpid()}" in text and "missing: 1 more" in text for text in texts)


def test_a_node_that_does_not_come_back_is_named(daemon: Daemon) -> None:
    with Agents(daemon.url, join_timeout=2) as agents:
        one, other = agents.new(), agents.new()
        meet(one, other)
        dies(one)
        hears(other)
        error = Task(other.next_rendezvous).error(RendezvousTimeoutError)
    assert f"Of the last rendezvous are missing: {one._name!r}" in str(error)


def test_another_number_of_nodes_is_refused(daemon: Daemon) -> None:
    with Agents(daemon.url) as agents:
        first = Task(agents.new().next_rendezvous)
        wait_until(lambda: daemon.group("torchrun/job").get("waiting"), "the first one waits")
        error = Task(agents.new(nodes=3).next_rendezvous).error(RendezvousStateError)
        assert "--nnodes is 3: " in str(error)
        assert "Give all nodes the same --nnodes" in str(error)
        assert {agents.new().next_rendezvous().rank, first.result().rank} == {0, 1}


def test_an_endpoint_without_a_coordinator_is_told_of() -> None:
    with Agents(f"127.0.0.1:{free_port()}", is_host="false", read_timeout=1) as agents:
        error = Task(agents.new().next_rendezvous).error(RendezvousConnectionError)
    assert "no coordinator listens at tcp://127.0.0.1:" in str(error)
    assert "is --rdzv-endpoint right?" in str(error)


def test_an_endpoint_that_is_something_else_is_told_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with Agents(url, join_timeout=2, read_timeout=1) as agents:
            error = Task(agents.new().next_rendezvous).error(RendezvousConnectionError)
    assert "did not answer as a gradserver coordinator" in str(error)


def test_a_coordinator_that_serves_other_groups_is_told_of() -> None:
    with Daemon("--workers", "4") as daemon, Agents(daemon.url) as agents:
        error = Task(agents.new().next_rendezvous).error(RendezvousConnectionError)
    assert "serves group 'default', and no group 'torchrun/job'" in str(error)
    assert "--groups any" in str(error)


# ── torchrun itself ───────────────────────────────────────────────────────────────────────────────────

WORKS = """
import os, sys, time
parent, folder = os.getppid(), sys.argv[1]
told = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "GRADSERVER_URL")]
print("began", *told, os.getpid(), flush=True)
while not os.path.exists(folder + "/over"):
    time.sleep(0.02)
    if os.getppid() != parent:
        sys.exit(1)
"""
"""A training that needs no torch, and so begins at once. It ends when there is a certain file."""
SUMS = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gradserver")
steps, value = int(sys.argv[2]), torch.ones(1)
for step in range(steps):
    dist.all_reduce(value, dist.ReduceOp.AVG)
    if step % 10 == 0:
        print("step", step, flush=True)
    if steps > 1:
        time.sleep(0.05)
dist.all_reduce(value)
print("sum", value.item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


class Nodes(ExitStack):
    """Agents of torchrun in processes of their own, each as if it was a node, with a worker each."""

    def __init__(self, url: str, folder: Path, script: str = WORKS, *arguments: str) -> None:
        super().__init__()
        self.url, self._folder = url, folder
        path = folder / "train.py"
        path.write_text(script)
        self._script = str(path), str(folder), *arguments

    def start(self, *options: str) -> Program:
        """Start an agent."""
        words = "--rdzv-backend=gradserver", f"--rdzv-endpoint={self.url.removeprefix('tcp://')}", "--rdzv-id=job"
        path = os.pathsep.join([str(self._folder), str(ENTRY), PATHS])
        program = Program(
            str(ROOT / "tests" / "torchrun_program.py"),
            str(self._folder),
            *(*words, "--nnodes=2", "--nproc-per-node=1", *options, *self._script),
            environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            loaded="torch",
        )
        return self.enter_context(program)

    def over(self) -> None:
        """Have the trainings end."""
        (self._folder / "over").touch()


def began(agent: Program) -> tuple[str, int]:
    """Wait for the next beginning of an agent's training. Return what it was told, and its process."""
    rank, world, restarts, _, pid = agent.expect("began ", STARTED_WITHIN).split()
    return f"{rank} of {world}, restart {restarts}", int(pid)


def is_gone(url: str) -> bool:
    """Tell whether nothing listens at a URL."""
    try:
        socket.create_connection(parse_url(url), timeout=1).close()
    except OSError:
        return True
    return False


def test_a_training_by_torchrun_needs_nothing_else(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with Nodes(url, tmp_path, SUMS, "1") as nodes:
        both = nodes.start(), nodes.start()
        assert {agent.expect("sum ", STARTED_WITHIN) for agent in both} == {"2.0 of 2"}
        assert [agent.end() for agent in both] == [0, 0]
        said = [line for agent in both for line in agent.complaints()]
    assert not [line for line in said if "Exception while registering" in line]
    wait_until(lambda: is_gone(url), "the coordinator has ended, too")


def test_a_training_process_that_is_killed_begins_again_with_all(daemon: Daemon, tmp_path: Path) -> None:
    with Nodes(daemon.url, tmp_path) as nodes:
        both = [nodes.start("--max-restarts=1") for _ in range(2)]
        first = [began(agent) for agent in both]
        assert {told for told, _ in first} == {"0 of 2, restart 0", "1 of 2, restart 0"}
        os.kill(first[0][1], signal.SIGKILL)
        again = [began(agent)[0] for agent in both]
        assert {told.partition(",")[0] for told in again} == {"0 of 2", "1 of 2"}
        assert [told.rpartition(" ")[2] for told in again] == ["1", "0"]  # the other one's has not failed
        nodes.over()
        assert [agent.end() for agent in both] == [0, 0]


def test_a_node_that_is_killed_has_its_place_taken(daemon: Daemon, tmp_path: Path) -> None:
    with Nodes(daemon.url, tmp_path) as nodes:
        one, other = nodes.start("--max-restarts=0"), nodes.start("--max-restarts=0")
        began(one), began(other)
        one.send_signal(signal.SIGKILL)
        third = nodes.start("--max-restarts=0")
        assert {began(other)[0], began(third)[0]} == {"0 of 2, restart 0", "1 of 2, restart 0"}
        nodes.over()
        assert (other.end(), third.end()) == (0, 0)


def test_a_node_that_fails_for_good_ends_the_others(daemon: Daemon, tmp_path: Path) -> None:
    with Nodes(daemon.url, tmp_path) as nodes:
        one, other = nodes.start("--max-restarts=0"), nodes.start("--max-restarts=1")
        (_, first), (_, second) = began(one), began(other)
        os.kill(first, signal.SIGKILL)
        assert one.end() == 1
        os.kill(second, signal.SIGKILL)  # as its exchange fails without the first
        assert other.end() == 1
        assert f"{one.pid}': the job is over, or that node has failed for good" in "\n".join(other.complaints())


def test_the_node_that_has_the_coordinator_may_be_killed_and_started_again(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with Nodes(url, tmp_path) as nodes:
        host = nodes.start()
        wait_until(lambda: not is_gone(url), "it has started a coordinator", STARTED_WITHIN)
        other = nodes.start("--rdzv-conf=is_host=false")
        began(host), began(other)
        host.send_signal(signal.SIGKILL)
        again = nodes.start()
        assert {began(again)[0], began(other)[0]} == {"0 of 2, restart 0", "1 of 2, restart 0"}
        time.sleep(1.0)  # in which the coordinator of before would end
        nodes.over()
        assert (again.end(), other.end()) == (0, 0)
    wait_until(lambda: is_gone(url), "the next coordinator has ended, too")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_no_process_is_left_by_a_node_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with Nodes(url, tmp_path) as nodes:
        host = nodes.start()
        wait_until(lambda: not is_gone(url), "it has started a coordinator", STARTED_WITHIN)
        other = nodes.start("--rdzv-conf=is_host=false,join_timeout=4,read_timeout=1")
        pids = [began(agent)[1] for agent in (host, other)]
        host.send_signal(number)
        host.end()
        wait_until(lambda: is_gone(url), "the coordinator has ended, too")
        assert other.end() == 1  # it has heard of that, and waits for another node
        assert "RendezvousConnectionError: no coordinator" in "\n".join(other.complaints())
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the trainings have ended")


@pytest.mark.long
def test_a_node_that_was_frozen_begins_again_with_the_others(daemon: Daemon, tmp_path: Path) -> None:
    with Nodes(daemon.url, tmp_path) as nodes:
        one, other = nodes.start("--max-restarts=0"), nodes.start("--max-restarts=0")
        began(one), began(other)
        one.send_signal(signal.SIGSTOP)
        wait_until(lambda: daemon.group("torchrun/job").get("state") == "forming", "the other one waits for it")
        one.send_signal(signal.SIGCONT)
        assert {began(one)[0], began(other)[0]} == {"0 of 2, restart 0", "1 of 2, restart 0"}
        nodes.over()
        assert (one.end(), other.end()) == (0, 0)


@pytest.mark.long
def test_a_training_goes_on_with_more_and_with_fewer_nodes(tmp_path: Path) -> None:
    with Nodes(f"tcp://127.0.0.1:{free_port()}", tmp_path) as nodes:
        options = "--max-restarts=0", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=1"
        one = nodes.start(*options)
        assert began(one)[0] == "0 of 1, restart 0"
        other = nodes.start(*options)
        assert {began(one)[0], began(other)[0]} == {"0 of 2, restart 0", "1 of 2, restart 0"}
        other.send_signal(signal.SIGKILL)
        assert began(one)[0] == "0 of 1, restart 0"
        nodes.over()
        assert one.end() == 0


@pytest.mark.long
def test_a_coordinator_that_is_started_again_costs_a_training_nothing(tmp_path: Path) -> None:
    options = "--state-dir", str(tmp_path / "state")
    with Daemon(*options) as daemon, Nodes(daemon.url, tmp_path, SUMS, "100") as nodes:
        both = nodes.start("--max-restarts=0"), nodes.start("--max-restarts=0")
        for agent in both:
            agent.expect("step 20", STARTED_WITHIN)
        with restarted(daemon, *options):
            assert {agent.expect("sum ", STARTED_WITHIN) for agent in both} == {"2.0 of 2"}
            assert [agent.end() for agent in both] == [0, 0]


@pytest.mark.long
def test_a_training_over_the_backend_begins_again(daemon: Daemon, tmp_path: Path) -> None:
    with Nodes(daemon.url, tmp_path, SUMS, "100") as nodes:
        both = [nodes.start("--max-restarts=1") for _ in range(2)]
        for agent in both:
            agent.expect("step 10", STARTED_WITHIN)
        (child,) = [int(pid) for pid in Path(f"/proc/{both[0].pid}/task/{both[0].pid}/children").read_text().split()]
        os.kill(child, signal.SIGKILL)
        for agent in both:
            agent.expect("step 0", STARTED_WITHIN)
        assert {agent.expect("sum ", STARTED_WITHIN) for agent in both} == {"2.0 of 2"}
        assert [agent.end() for agent in both] == [0, 0]
