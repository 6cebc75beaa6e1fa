"""One worker process of a benchmark, started as ``python -m gradserver.tools.bench.worker_main``.

Takes requests on standard input and answers on standard output, one line of JSON each:

    {"do": "seat", "seat": …}                  set its role                         {"port": …}
    {"do": "join", "addresses": …}             connect                              {}
    {"do": "prepare", "case": …, "names": …}   set up these contenders of a case    {}
    {"do": "check", "name": …}                 verify a contender's results         {"wrong": …, …}
    {"do": "run", "name": …, "count": …}       measure                              `cost.Timed`'s fields
    {"do": "end"}                              leave
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from gradserver.tools.bench.contenders import KINDS, Contestant
from gradserver.tools.bench.member import Member
from gradserver.tools.bench.spec import Case, Seat
from gradserver.tools.common.processes import reserve_stdout


class Process:
    """Answerer of requests."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.contestants: dict[str, Contestant] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, and return the answer."""
        do = request["do"]
        if do == "seat":
            self.member = Member(Seat.from_dict(request["seat"]))
            return {"port": self.member.port}
        assert self.member is not None
        if do == "join":
            self.member.join([(host, port) for host, port in request["addresses"]])
            return {}
        if do == "prepare":
            self.prepare(self.member, Case.from_dict(request["case"]), request["names"])
            return {}
        contestant = self.contestants[request["name"]]
        if do == "check":
            return contestant.check()
        return contestant.timed(request["count"])._asdict()

    def prepare(self, member: Member, case: Case, names: list[str]) -> None:
        """Set up the contenders of a new case, in their order, which is the same in all processes."""
        self.release()
        for spec in case.contenders:
            if spec.name in names:
                self.contestants[spec.name] = _kind(spec.kind)(member, case, spec)

    def release(self) -> None:
        """Release the resources of the last case's contenders."""
        for contestant in self.contestants.values():
            contestant.close()
        self.contestants.clear()

    def close(self) -> None:
        """Leave all groups."""
        self.release()
        if self.member is not None:
            self.member.close()


def main() -> int:
    """Answer requests until it is told to end, or its parent has ended."""
    answer = reserve_stdout()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, _leave)
    process = Process()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "end":
            break
        try:
            done = process.answer(request)
        except Exception as error:  # any error: the parent shows it and ends the run
            traceback.print_exc()
            answer(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            return 1
        answer(json.dumps(done))
    process.close()
    return 0


def _kind(name: str) -> Callable[..., Contestant]:
    if name in KINDS:
        return KINDS[name]
    from gradserver.tools.bench.training import TRAINING_KINDS  # imported here: the other suites do not need it

    return TRAINING_KINDS[name]


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit in order, which releases memberships and shared memory."""
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
