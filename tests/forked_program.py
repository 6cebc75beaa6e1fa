"""Programs of `tests.test_forks`: ``echo …``, which a fork server makes, and ``run FOLDER``, which has one itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradserver.tools.common.forks import ForkServer
from gradserver.tools.common.processes import Family, inherited_environment


def echo() -> int:
    """Say what this process is, and each line that comes. Return 3."""
    print(os.getpid(), os.getsid(0), os.environ.get("GRADSERVER_TEST_SAYS"), *sys.argv[1:], flush=True)
    for line in sys.stdin:
        if line == "fail\n":
            raise ValueError("it was told to")
        print(f"heard {line}", end="", file=sys.stderr, flush=True)
        print(line, end="", flush=True)
    return 3


def run(folder: Path) -> int:
    """Start two processes, say the ids of all, and wait to be killed."""
    environment = inherited_environment()
    forks = ForkServer(["json"], environment, folder / "forks.log")
    forks.await_ready(60.0)
    with Family(folder, environment) as family:
        children = [family.start(name, "-m", "tests.forked_program", "echo", starter=forks.start) for name in "ab"]
        server = Path(f"/proc/{children[0].process.pid}/stat").read_text().rpartition(")")[2].split()[1]
        print(server, *(child.process.pid for child in children), flush=True)
        while True:
            family.hear(60.0)


if __name__ == "__main__":
    sys.exit(echo() if sys.argv[1] == "echo" else run(Path(sys.argv[2])))
