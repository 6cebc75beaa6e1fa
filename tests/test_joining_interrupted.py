"""Workers that form a durable group: its coordinator or data shard is killed at each point of their joining."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserver import Worker, connect
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import CoordinatorUnreachableError, JoinTimeoutError
from gradserver.protocol.messages import Attend, Message, Welcome
from gradserver.protocol.plan import simple_plan
from gradserver.status import fetch
from gradserver.worker.member.recovery import Recovery
from gradserver.worker.session import Session
from gradserver.worker.transport.reconnect import ReconnectingChannel
from gradserver.worker.transport.tcp import TcpChannel
from tests.cluster import PATIENCE, Daemon, Program, Task, wait_until


def knows(channel: ReconnectingChannel) -> bool:
    """Return whether a worker knows that its first connection is over."""
    return channel._generation > 0 or not channel._up.is_set()


POINTS: dict[str, tuple[type, str]] = {
    "before it looks for a data shard": (TcpChannel, "add"),
    "before it says to a data shard which worker it is": (Session, "attend"),
    "before it asks whether that was lost": (TcpChannel, "ask"),
    "before it asks for shared memory": (TcpChannel, "share_memory"),
    "before it waits for the watch of its process": (TcpChannel, "settle"),
}


class Killing:
    """A coordinator with a further data shard, of which one is killed when a thread comes to some point, once.

    Args:
        stack: ends the processes.
        options: options of ``gradserver serve``.
        victim: "coordinator", which another one replaces, or "shard", which the coordinator replaces.
    """

    def __init__(self, stack: ExitStack, options: tuple[str, ...], victim: str) -> None:
        self._stack, self._options, self._victim = stack, options, victim
        self.daemon = stack.enter_context(Daemon(*options))
        self.channels: list[ReconnectingChannel] = []
        self._lock = threading.Lock()
        self.done = False

    def at(self, monkeypatch: pytest.MonkeyPatch, where: type, name: str) -> None:
        """Kill the victim at the first call of this method behind the Welcome, and go on when the worker knows."""
        method: Callable[..., Any] = getattr(where, name)
        create = ReconnectingChannel.__init__

        def noting(channel: ReconnectingChannel, *arguments: Any) -> None:
            create(channel, *arguments)
            self.channels.append(channel)

        def killing(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self.channels and not self.done:
                    self.done = True
                    wait_until(lambda: len(self.channels) == 2, "both have been let in")
                    self.kill()
                    wait_until(lambda: all(map(knows, self.channels)), "both know that")
            return method(*arguments, **options)

        monkeypatch.setattr(ReconnectingChannel, "__init__", noting)
        monkeypatch.setattr(where, name, killing)

    def kill(self) -> None:
        if self._victim == "shard":
            (shard,) = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children").read_text().split()
            os.kill(int(shard), signal.SIGKILL)
            return
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.end()
        again = Program("-m", "gradserver", "serve", "--bind", self.daemon.url, *self._options)
        self._stack.enter_context(again)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


CASES = [
    (channel, victim, point)
    for channel in ("tcp", "auto")
    for victim in ("coordinator", "shard")
    for point in POINTS
    if channel == "auto" or "memory" not in point
]
AT_ONCE = [CASES[1], CASES[4], CASES[-2]]
"""Cases that are no long tests."""


@pytest.mark.parametrize(
    ("channel", "victim", "point"),
    [pytest.param(*one, marks=() if one in AT_ONCE else pytest.mark.long) for one in CASES],
)
def test_a_founder_resumes_by_itself_wherever_its_joining_is_interrupted(
    channel: str, victim: str, point: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--workers", "2", "--shards", "2", "--state-dir", str(tmp_path)
    killing = Killing(stack, options, victim)
    killing.at(monkeypatch, *POINTS[point])

    def work(name: str) -> float:
        with connect(killing.daemon.url, name=name, timeout=PATIENCE, channel=channel) as worker:
            return exchanged(worker)

    tasks = [Task(work, name) for name in ("a", "b")]
    assert [task.result() for task in tasks] == [1.5, 1.5]
    assert killing.done


def test_a_founder_that_a_data_shard_does_not_know_asks_the_coordinator_and_resumes(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = stack.enter_context(Daemon("--workers", "2", "--shards", "2", "--state-dir", str(tmp_path)))
    send, lost = TcpChannel.send, list[Attend]()

    def losing(channel: TcpChannel, message: Message, *rest: Any, **options: Any) -> None:
        if isinstance(message, Attend) and not lost:
            lost.append(message)
        else:
            send(channel, message, *rest, **options)

    monkeypatch.setattr(TcpChannel, "send", losing)

    def work(name: str) -> float:
        with connect(daemon.url, name=name, timeout=PATIENCE) as worker:
            return exchanged(worker)

    tasks = [Task(work, name) for name in ("a", "b")]
    assert [task.result() for task in tasks] == [1.5, 1.5]
    assert lost


class LosingWelcome(Killing):
    """A coordinator that is lost with the Welcome of the worker that is called "b"; its other worker has its own.

    Attributes:
        welcomes: the Welcomes of "b", with the lost one.
    """

    def __init__(self, stack: ExitStack, options: tuple[str, ...]) -> None:
        super().__init__(stack, options, "coordinator")
        self.welcomes: list[Welcome] = []

    def first(self, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
        """Have one of both come back first; or the Welcome is not lost, but the connection is, right behind it."""
        receive, resume, create = Session.receive, Recovery.resume, ReconnectingChannel.__init__

        def losing(session: Session, message: Message, payloads: Any) -> None:
            if isinstance(message, Welcome) and message.names[message.rank] == "b":
                self.welcomes.append(message)
                if len(self.welcomes) == 1 and order != "neither":
                    self.lose()
                    if order == "a":
                        wait_until(self.is_back, "the other is back")
                    return
            receive(session, message, payloads)

        def waiting(*arguments: Any) -> Any:
            if order == "b":
                wait_until(lambda: len(self.welcomes) == 2, "b has its Welcome")
            return resume(*arguments)

        def noting(lasting: ReconnectingChannel, channel: TcpChannel, session: Session, *rest: Any) -> None:
            if order == "neither" and session.membership.rank == session.membership.names.index("b") and not self.done:
                self.lose()
                wait_until(lambda: channel.look() or session.closed, "b knows that")
            create(lasting, channel, session, *rest)
            self.channels.append(lasting)

        monkeypatch.setattr(ReconnectingChannel, "__init__", noting)
        monkeypatch.setattr(Session, "receive", losing)
        monkeypatch.setattr(Recovery, "resume", waiting)

    def is_back(self) -> bool:
        """Return whether "a" has said Resume."""
        try:
            return bool(fetch(self.daemon.url)["groups"]["default"]["state"] == "recovering")
        except CoordinatorUnreachableError:
            return False

    def lose(self) -> None:
        """Kill the coordinator, when "a" has its Welcome."""
        self.done = True
        wait_until(lambda: len(self.channels) == 1, "the other has its own")
        self.kill()


FIXED, ELASTIC = ["--workers", "2"], ["--workers", "1:2", "--gather", "60"]
SEVERAL_AT_ONCE = [("b", FIXED), ("neither", ELASTIC)]
"""Cases with two data shards that are no long tests."""


@pytest.mark.parametrize(
    ("first", "workers", "shards"),
    [
        pytest.param(*case, shards, marks=() if shards == "1" or case in SEVERAL_AT_ONCE else pytest.mark.long)
        for case in product(("a", "b", "neither"), (FIXED, ELASTIC))
        for shards in ("1", "2")
    ],
)
def test_a_founder_gets_the_welcome_again_that_is_lost_with_its_coordinator(
    first: str, workers: list[str], shards: str, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = LosingWelcome(stack, (*workers, "--shards", shards, "--state-dir", str(tmp_path)))
    losing.first(monkeypatch, first)

    def work(name: str) -> float:
        with connect(losing.daemon.url, name=name, timeout=PATIENCE) as worker:
            return exchanged(worker)

    tasks = [Task(work, name) for name in ("a", "b")]
    assert [task.result() for task in tasks] == [1.5, 1.5]
    before, again = losing.welcomes
    assert again == replace(before, incarnation=again.incarnation, again=True, shards=again.shards)


def test_a_coordinator_that_has_heard_of_a_worker_late_is_not_called_something_else(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a worker with a deadline before that of the coordinator, which counts from the time when it hears of it."""
    daemon, join = stack.enter_context(Daemon("--workers", "2")), Session.join
    monkeypatch.setattr(Session, "join", lambda session, what: join(session, replace(what, timeout=PATIENCE)))
    said = f"^the coordinator at {daemon.url} has not let this worker in within 0.5 s, and has not said yet what it"
    with pytest.raises(JoinTimeoutError, match=said):
        connect(daemon.url, timeout=0.5)


def exchanged(worker: Worker) -> float:
    """Return the mean of the ranks plus one, by buckets that all data shards have a part of."""
    worker.agree(simple_plan([(f"b{part}", 100_000) for part in range(4)], FLOAT32))
    data = [np.full(100_000, worker.rank + 1, np.float32) for _ in range(4)]
    for part, one in enumerate(data):
        worker.push(part, one)
    worker.finish_round()
    (found,) = {float(value) for one in data for value in np.unique(one)}
    return found
