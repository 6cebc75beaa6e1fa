"""Texts that members and servers choose do no more on terminals and in logs than stand in their line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import zmq

from gradserver import cli
from gradserver.protocol.errors import GradServerError, PlanMismatchError
from gradserver.protocol.harmless import harmless, one_line
from gradserver.protocol.log import log
from gradserver.protocol.messages import Failure, Scope
from gradserver.protocol.wire import encode
from tests.cluster import Daemon, joined
from tests.strangers import impostor

BAD = "a\x1b]0;title\x07b\r\n11-27 22:00:00,000 I forged \u202eline\x9b2J\u2028"
SIGNS = {*BAD} - {*BAD.encode("ascii", "ignore").decode()} | {"\x1b", "\x07", "\r", "\x9b"}


def is_harmless(text: str) -> bool:
    return not SIGNS & {*text}


def test_what_is_replaced() -> None:
    assert harmless(BAD) == "a?]0;title?b?\n11-27 22:00:00,000 I forged ?line?2J?"
    assert one_line(BAD) == "a?]0;title?b??11-27 22:00:00,000 I forged ?line?2J?"
    assert one_line("Größe 7 µs, 漢字") == "Größe 7 µs, 漢字"
    assert one_line("\ud800\udc9b") == "??"


def test_the_log_keeps_a_record_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradserver"):
        log.info("worker %s left: %s", "w", BAD)
    (record,) = caplog.records
    assert record.getMessage() == f"worker w left: {one_line(BAD)}"


def test_an_error_of_another_process_is_harmless() -> None:
    error = Failure(Scope.CONNECTION, "PlanMismatchError", BAD).exception()
    assert isinstance(error, PlanMismatchError)
    assert error.message == one_line(BAD)
    facts: dict[str, str | int | tuple[str, ...]] = {"workers": (BAD, "w1"), "worker": BAD, "reason": BAD, "unknown": 3}
    for kind in ("WorkerLostError", "JoinRefusedError", "CoordinatorStoppedError", "DisagreementError"):
        told = Failure(Scope.CONNECTION, kind, BAD, dict(facts)).exception()
        assert is_harmless(f"{told} {told.fields}".replace("\\x", "")), kind


def test_the_reason_of_a_member_reaches_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon("--workers", "2") as daemon, joined(daemon.url, 2) as (first, second):
        second.abort(BAD)
        with pytest.raises(GradServerError) as caught:
            first.barrier(timeout=20)
        assert "title" in str(caught.value)
        assert is_harmless(str(caught.value))
        assert "\n" not in str(caught.value)
        assert cli.main(["status", daemon.url]) == 0
        shown = capsys.readouterr().out
        assert "forged" in shown
        assert is_harmless(shown)
        assert not any(line.startswith("11-27") for line in shown.splitlines())
    logged = daemon.complaints()
    assert any("forged" in line for line in logged)
    assert is_harmless("".join(line.rstrip("\n") for line in logged))
    assert not any(line.startswith("11-27") for line in logged)


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_the_failure_of_a_server_reaches_no_terminal_raw(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_: Sequence[bytes]) -> Sequence[bytes]:
        return [encode(Failure(Scope.CONNECTION, "CoordinatorError", BAD))]

    with impostor(zmq.ROUTER, answer) as url:
        assert cli.main([command, url]) != 0
    told = capsys.readouterr()
    assert "title" in told.out + told.err
    assert is_harmless(told.out + told.err)
    assert not any(line.startswith("11-27") for line in (told.out + told.err).splitlines())
