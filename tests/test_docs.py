"""Tests that the documents are true: their code runs, their commands exist, and their messages are the real ones."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserver
from gradserver import cli
from gradserver.configuration import Settings
from gradserver.protocol import limits
from gradserver.protocol.compiled import loader
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import Pool
from gradserver.protocol.messages import Enlist
from gradserver.protocol.offers import Offer
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.protocol.transport import zeromq
from gradserver.protocol.transport.numbers import GAP_SECONDS
from gradserver.status import fetch
from gradserver.transport import binding, liveness
from gradserver.transport.handshake import ROLES
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import Daemon, Program, Task, coordinator, together, wait_until
from tests.commands import ROOT, check, lines_of, parse

DOCS = ROOT / "docs"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "deploy" / "README.md", *DOCS.rglob("*.md")])
LANGUAGES = {"sh", "python", "pycon", "text", "toml"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    section: str
    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> Iterator[Block]:
    section, language, begin, held = "", "", 0, list[str]()
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            if begin:
                held.append(line)
            elif line.startswith("## "):
                section = line.removeprefix("## ")
        elif begin:
            yield Block(document, section, language, begin, "".join(f"{each}\n" for each in held))
            begin, held = 0, []
        else:
            language, begin = line.removeprefix("```"), number


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def block_with(start: str, name: str) -> list[str]:
    """Return the lines of the block of a page that begins with ``start``."""
    (found,) = (block for block in BLOCKS if block.document == DOCS / name and block.text.startswith(start))
    return found.text.splitlines()


def scripts() -> dict[str, str]:
    """Return the Python blocks of each document, which are one script."""
    found: dict[str, str] = {}
    for block in blocks("python"):
        name = str(block.document.relative_to(ROOT))
        found[name] = found.get(name, "") + block.text
    return found


# ── code and commands ─────────────────────────────────────────────────────────────────────────────────


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_configuration_files_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "gradserver.toml"
    for block in blocks("toml"):
        path.write_text(block.text)
        assert cli.main(["config", "--config", str(path)]) == 0, block


def test_every_page_can_be_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}  # which is the README of the site
    assert sorted(page for page in pages if f"](docs/{page})" not in readme) == []


def test_readme_begins_with_what_it_is_how_to_install_it_and_a_session() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()[:30]
    assert lines[0] == "# gradserver"
    assert lines[2].startswith("gradserver keeps")
    assert any("pip install" in line for line in lines)
    assert "```pycon" in lines


@pytest.mark.parametrize("block", blocks("pycon"), ids=str)
def test_sessions_print_what_they_show(block: Block) -> None:
    session = doctest.DocTestParser().get_doctest(block.text, {}, str(block), str(block.document), block.line)
    said: list[str] = []
    assert doctest.DocTestRunner().run(session, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_commands_are_as_they_are_shown(block: Block) -> None:
    for line in lines_of(block.text):
        check(line)


def test_there_are_eight_scripts_and_the_readme_has_the_beginning_of_one() -> None:
    shown = scripts()
    del shown["docs/before-and-after.md"]  # two whole ones
    begun = shown.pop("README.md")
    pages = "audit", "gradients", "jobs-and-data", "modes", "one-process", "reference/modes", "robust-means", "training"
    assert set(shown) == {f"docs/{page}.md" for page in pages}
    assert shown["docs/training.md"].startswith(begun)


def test_the_scripts_before_and_after_are_the_examples() -> None:
    shown = [block.text for block in blocks("python") if block.document.name == "before-and-after.md"]
    assert shown == [(ROOT / "examples" / name).read_text() for name in ("before_ddp.py", "after_ddp.py")]


@pytest.mark.parametrize("name", ["docs/jobs-and-data.md", "docs/training.md"])
def test_scripts_train(name: str, tmp_path: Path) -> None:
    """Test the blocks of a page as one script, which every worker runs."""
    script = tmp_path / "train.py"
    digest = "print('weights', sum(p.double().sum().item() for p in network.parameters()))\n"
    first_print = '        print(f"epoch {epoch}: loss {loss.item():.3f}")\n'
    text = scripts()[name].replace(first_print, first_print + "del loss  # and its graph, which keeps the module\n")
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{text}{digest}")
    with Daemon("--workers", "2") as daemon, ExitStack() as stack:

        def start(rank: int) -> Program:
            environment = {"GRADSERVER_URL": daemon.url, "WORLD_SIZE": "2", "RANK": str(rank)}
            return stack.enter_context(Program(str(script), environment=environment, loaded="torch"))

        workers = [start(rank) for rank in (0, 1)]
        weights = [worker.expect("weights ", timeout=60) for worker in workers]
        assert [worker.end() for worker in workers] == [0, 0]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "name", ["docs/audit.md", "docs/modes.md", "docs/reference/modes.md", "docs/robust-means.md", "docs/gradients.md"]
)
def test_scripts_of_local_clusters_train(name: str) -> None:
    """Run the blocks of the page, each with a cluster of its own."""
    exec(compile(scripts()[name], name, "exec"), {})


def test_the_script_of_one_process_trains() -> None:
    """Test the blocks of the page as one script. It needs no coordinator."""
    namespace: dict[str, Any] = {}
    exec(compile(scripts()["docs/one-process.md"], "one-process.md", "exec"), namespace)
    assert namespace["loss"].item() < 5.0


def test_collectives_are_called_as_they_are_shown() -> None:
    calls = re.findall(r"^\| `(worker\..*?)` \|", (DOCS / "collectives.md").read_text(), re.MULTILINE)
    assert len(calls) == 11
    for text in calls:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        signature = inspect.signature(getattr(Worker, call.func.attr))
        bound = signature.bind(None, *call.args, **given)
        defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}
        shown = {name: value for name, value in given.items() if name not in ("source", "target")}
        assert shown == {name: defaults[name] for name in shown}, text
        assert bound.arguments


def test_names_of_the_package_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`gradserver\.(?!service)(\w+)", document.read_text()):
            submodule = (ROOT / "gradserver" / name).exists() or (ROOT / "gradserver" / f"{name}.py").exists()
            assert submodule or hasattr(gradserver, name), f"{document.name}: gradserver.{name}"


def test_the_reference_has_every_public_name_once() -> None:
    pages = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    names = re.findall(r"^::: gradserver\.(?:worker\.connect\.)?(\w+)$", pages, re.MULTILINE)
    assert sorted(names) == sorted(gradserver.__all__)


def test_files_that_are_named_exist() -> None:
    """Test links, and paths in the text. `make docs` checks the sections behind `#`."""
    for document in DOCUMENTS:
        text = document.read_text()
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        assert [link for link in links if not (document.parent / link.partition("#")[0]).exists()] == []
        paths = re.findall(r"`((?:deploy|docs|examples|gradserver|protocol|tests|worker)/[\w./-]+)`", text)
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_law_names_its_tests() -> None:
    rows = re.findall(r"^\| (L\d) .*\|(.*)\|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [law for law, _ in rows] == [f"L{number}" for number in range(1, 10)]
    assert all("tests/test_" in kept_by for _, kept_by in rows)


def test_numbers_are_those_of_the_code() -> None:
    demo, errors = ((DOCS / f"{name}.md").read_text() for name in ("demo", "errors"))
    pages = [DOCS / "architecture.md", *(DOCS / "architecture").glob("*.md")]
    architecture = " ".join(" ".join(page.read_text() for page in pages).split())  # lines may break anywhere
    timeout = inspect.signature(connect).parameters["timeout"].default
    assert f"| joining a group | `connect(timeout={timeout:g})`" in errors
    assert f"`gradserver serve --round-timeout`, {limits.ROUND_TIMEOUT / 60:g} minutes by default" in errors
    assert f"in `{parse('demo').out}/`" in demo
    assert f"credit of {limits.CREDIT_BYTES // limits.MIB} MiB (`--credit`) in each of four pools" in architecture
    assert len(Pool) == 4
    assert f"(at least {limits.MIN_SLICE_COST // limits.KIB} KiB)" in architecture
    assert f"a frame above {limits.MAX_FRAME_BYTES // limits.MIB} MiB" in architecture
    assert f"open groups ({limits.MAX_GROUPS} at most;" in architecture
    dead_after, frozen_after = (Settings().find(key).value for key in ("dead-after", "frozen-after"))
    for option, default in (("--dead-after", dead_after), ("--frozen-after", frozen_after)):
        assert f"| `{option} S` | {default:g} s |" in architecture
    assert f"closed after {liveness._SILENT:g}·S of silence" in architecture
    assert f"not open again {liveness._BACK:g}·S later" in architecture
    _, idle, interval, probes = binding._KEEPALIVE.values()
    assert f"host that is gone is closed after {idle + interval * probes} s, by the system" in architecture
    noticed = ROLES[Enlist].first_beat + liveness._BACK * frozen_after
    assert f"in that very moment is noticed after {noticed:.0f} s" in architecture
    assert f"after {limits.COORDINATOR_SILENCE:g} s of silence" in architecture
    assert f"a receiver waits {GAP_SECONDS:g} s" in architecture
    assert f"tcp, slice of {zeromq.ZERO_COPY_BYTES // limits.KIB} KiB and more" in architecture


def test_changelog_knows_this_version() -> None:
    assert gradserver.__version__ in (ROOT / "CHANGELOG.md").read_text()


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────

HEAD, BLOCK = Component("head.weight", (10, 64)), Component("blocks.7.down.weight", (4, 4))


def plan(head: Component = HEAD) -> Plan:
    return Plan((Bucket("lm_head", FLOAT32, (head,)), Bucket("block.7", FLOAT32, (BLOCK,))))


def template(text: str) -> str:
    """Return ``text`` without what differs from run to run: numbers, names, addresses, widths."""
    patterns = (
        (r"tcp://[\d.:]+", "URL"),
        (r"'[^']*'", "NAME"),
        (r"\d+(\.\d+)?", "#"),
        ("# round ", "# rounds "),
        (r" +", " "),
    )
    for pattern, instead in patterns:
        text = re.sub(pattern, instead, text)
    return text.strip()


@contextmanager
def pair(timeout: float = 20.0) -> Iterator[tuple[Worker, Worker]]:
    """Yield the two workers of the pages, with a round behind them."""
    with coordinator() as server, box_and_spot(server.url, timeout) as workers:
        together(workers, one_round)
        yield workers


@contextmanager
def box_and_spot(url: str, timeout: float) -> Iterator[tuple[Worker, Worker]]:
    box, spot = together((0, 1), lambda rank: connect(url, rank, 2, name=("box-0", "spot-3")[rank], timeout=timeout))
    with box, spot:
        yield box, spot


def one_round(worker: Worker) -> None:
    worker.agree(plan())
    worker.push(0, np.zeros(640, np.float32))
    worker.push(1, np.zeros(16, np.float32))
    worker.finish_round()


def exchange(worker: Worker, value: float = 0.0) -> None:
    worker.push(1, np.full(16, value, np.float32)).wait()


SPOT = """
import sys, numpy, gradserver
from tests.test_docs import one_round
worker = gradserver.connect(sys.argv[1], 1, 2, name="spot-3")
one_round(worker)
print("ready", flush=True)
sys.stdin.readline()
"""


def killed_worker() -> GradServerError:
    with (
        Daemon() as daemon,
        Program("-c", SPOT, daemon.url) as spot,
        connect(daemon.url, 0, 2, name="box-0", timeout=20.0) as box,
    ):
        one_round(box)
        spot.expect("ready")
        waiting = Task(exchange, box)
        spot.send_signal(signal.SIGKILL)
        return waiting.error(gradserver.WorkerLostError)


def failed_worker() -> GradServerError:
    with pair() as (box, spot):
        waiting = Task(exchange, box)
        with pytest.raises(RuntimeError), spot:
            raise RuntimeError("out of memory")
        return waiting.error(gradserver.WorkerLostError)


def late_worker() -> GradServerError:
    with pair(timeout=0.3) as (box, _):
        return Task(exchange, box).error(gradserver.DeadlineError)


def not_a_number() -> GradServerError:
    with pair() as (box, spot):
        first, second = Task(exchange, box), Task(exchange, spot, np.nan)
        assert str(first.error(gradserver.NonFiniteError)) == str(second.error(gradserver.NonFiniteError))
        return first.error(gradserver.NonFiniteError)


def other_module() -> GradServerError:
    with pair() as (box, spot):
        other = Component("head.weight", (12, 64))
        Task(box.agree, plan())
        return Task(spot.agree, plan(other)).error(gradserver.PlanMismatchError)


def deadlocked_workers() -> GradServerError:
    with pair() as (box, spot):
        waiting = Task(box.barrier)
        Task(exchange, spot)
        return waiting.error(gradserver.DeadlockError)


def absent_worker() -> GradServerError:
    with coordinator() as server, pytest.raises(gradserver.JoinTimeoutError) as caught:
        connect(server.url, 0, 2, name="box-0", timeout=0.3)
    return caught.value


def no_coordinator() -> GradServerError:
    with coordinator() as server:
        url = server.url
    with pytest.raises(gradserver.CoordinatorUnreachableError) as caught:
        connect(url, 0, 2, timeout=0.3)
    return caught.value


def killed_coordinator() -> GradServerError:
    with Daemon() as daemon, box_and_spot(daemon.url, 20.0) as (box, _):
        one = Task(box.all_reduce, np.zeros(1))
        daemon.send_signal(signal.SIGKILL)
        return one.error(gradserver.ConnectionLostError)


PROVOKED = [
    killed_worker,
    failed_worker,
    late_worker,
    not_a_number,
    other_module,
    deadlocked_workers,
    absent_worker,
    no_coordinator,
    killed_coordinator,
]


def test_error_messages_are_the_real_ones() -> None:
    """Test messages up to the … where one is cut short."""
    for shown, provoke in zip(block_with("WorkerLostError", "errors.md"), PROVOKED, strict=True):
        error = provoke()
        real, stem = template(f"{type(error).__name__}: {error}"), template(shown.removesuffix("…"))
        assert real.startswith(stem) if shown.endswith("…") else real == stem


def test_status_is_as_it_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVER_CHANNEL", "tcp")
    monkeypatch.setattr(loader._loader, "standing", loader.Standing("compiled", "by numba, ready after 0.6 s"))
    hosts = map(str, count())
    told = Offer(trouble="it was not imported before the worker joined")
    monkeypatch.setattr("gradserver.worker.connect.offer_of", lambda _: told._replace(host_id=next(hosts)))
    with coordinator() as server, box_and_spot(server.url, 20.0) as (box, spot):
        sizes = ((0, 64_000), (1, 16))
        together((box, spot), Worker.agree, plan(Component("head.weight", (1000, 64))))
        for number in range(2):
            pushed = [box.push(index, np.zeros(size, np.float32)) for index, size in sizes]
            wait_until(lambda: len(open_exchanges(server.url)) == 2, "two open exchanges")
            if number == 0:  # a whole round, for which spot-3 is the last to come
                time.sleep(0.5)  # it begins late
                for index, size in sizes:
                    spot.push(index, np.zeros(size, np.float32))
                box.finish_round()
                spot.finish_round()
        spot.push(0, np.zeros(64_000, np.float32))
        pushed[0].wait()
        assert cli.main(["status", server.url, "--interval", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert list(map(template, shown.splitlines())) == list(map(template, block_with("coordinator at", "observing.md")))


def open_exchanges(url: str) -> list[object]:
    found: list[object] = fetch(url)["groups"]["default"]["open"]
    return found
