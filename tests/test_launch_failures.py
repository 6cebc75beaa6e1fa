"""The error that ended a worker, told apart from all others that its process prints: real processes, read in pieces."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradserver.tools.launch.failures import Failure, Tail, diagnose
from tests.cluster import ROOT

CAUSE = "raise ValueError('the real cause')"
LAST = "ValueError: the real cause"
DESTRUCTOR = "class Loader:\n    def __del__(self): raise AttributeError('no attribute _workers')\nloader = Loader()\n"
AT_EXIT = "import atexit\n@atexit.register\ndef clean_up(): raise OSError('cannot clean up')\n"
LATE_THREAD = (
    "import threading\n"
    "def late():\n"
    "    threading.main_thread().join()\n"
    "    raise KeyError('of a thread')\n"
    "threading.Thread(target=late).start()\n"
)
TASK = (
    "import asyncio\n"
    "async def fail(): raise OSError('of a task')\n"
    "async def main():\n"
    "    task = asyncio.ensure_future(fail())\n"
    "    task.set_name('t')\n"
    "    await asyncio.sleep(0)\n"
    "    kept.append(task)\n"
    "kept = []\n"
    "asyncio.run(main())\n"
)
CALLBACK = (
    "import asyncio\n"
    "loop = asyncio.new_event_loop()\n"
    "def fail(): raise OSError('of a callback')\n"
    "async def main():\n"
    "    loop.call_soon(fail)\n"
    "    await asyncio.sleep(0.01)\n"
    "    raise ValueError('the real cause')\n"
    "loop.run_until_complete(main())\n"
)
CHILD = (
    "import multiprocessing, os\n"
    "def fail(): raise OSError('of a child')\n"
    "child = multiprocessing.get_context('fork').Process(target=fail)\n"
    "try: raise ValueError('the real cause')\n"
    "finally:\n"
    "    import sys, traceback\n"
    "    traceback.print_exception(sys.exception()); sys.stderr.flush()\n"
    "    child.start(); child.join(); os._exit(1)\n"
)
TRACKER = (
    "import sys\n"
    f"import atexit; atexit.register(lambda: sys.stderr.write({chr(39) * 3}Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 239, in main\n'
    "    cache[rtype].remove(name)\n"
    "KeyError: '/psm_1'\n"
    f"{chr(39) * 3}))\n"
)
WARNING = "import atexit, warnings\natexit.register(lambda: warnings.warn('leaked', ResourceWarning))\n"
HOOK = "import sys\ndef hook(*_): raise OSError('of the hook')\nsys.excepthook = hook\n"
LOGGING = "import atexit, logging\ndef say(): logging.warning('%d', 'no number')\natexit.register(say)\n"
HANDLED = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"

BESIDE = (
    "_workers",
    "clean up",
    "of a thread",
    "of a task",
    "of a callback",
    "of a child",
    "psm_1",
    "leaked",
    "of the hook",
)
"""Words of errors that did not end the process, and of warnings."""
CASES = {
    "alone": (CAUSE, LAST),
    "destructor": (DESTRUCTOR + CAUSE, LAST),
    "at exit": (AT_EXIT + CAUSE, LAST),
    "thread": (LATE_THREAD + CAUSE, LAST),
    "task": (TASK + CAUSE, LAST),
    "task behind": (f"{TASK.replace('kept.append(task)', CAUSE)}", LAST),
    "callback": (CALLBACK, LAST),
    "child": (CHILD, LAST),
    "resource tracker": (TRACKER + CAUSE, LAST),
    "warning behind": (WARNING + CAUSE, LAST),
    "excepthook": (HOOK + CAUSE, LAST),
    "logging": (LOGGING + CAUSE, LAST),
    "handled before": (HANDLED + DESTRUCTOR + CAUSE, LAST),
    "all of them": (HANDLED + DESTRUCTOR + AT_EXIT + LATE_THREAD + LOGGING + CAUSE, LAST),
    "chain": (
        DESTRUCTOR + "try: 1 / 0\nexcept ZeroDivisionError as error: raise ValueError('the real cause') from error",
        LAST,
    ),
    "context": (AT_EXIT + "try: 1 / 0\nexcept ZeroDivisionError: raise ValueError('the real cause')", LAST),
    "note": (AT_EXIT + "error = ValueError('the real cause')\nerror.add_note('of rank 3')\nraise error", "of rank 3"),
    "group": (
        DESTRUCTOR + "raise ExceptionGroup('two', [ValueError('the real cause'), OSError(1)])",
        "ExceptionGroup: two",
    ),
    "syntax": ("x = = 3", "SyntaxError: invalid syntax"),
    "indentation": ("def f():\nreturn 3", "IndentationError: expected an indented block"),
    "syntax of a text": (DESTRUCTOR + "exec('x = = 3')", "SyntaxError: invalid syntax"),
    "a text at exit": (AT_EXIT.replace("raise OSError('cannot clean up')", "exec('x = = 3')") + CAUSE, LAST),
    "interrupted": (DESTRUCTOR + "raise KeyboardInterrupt", "KeyboardInterrupt"),
    "only a thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\nraise SystemExit(1)",
        "ZeroDivisionError: division by zero",
    ),
}


def stderr_of(tmp_path: Path, text: str) -> tuple[bytes, int]:
    """Run a script as a worker runs. Return its standard error and its status."""
    path = tmp_path / "train.py"
    path.write_text(text + "\n")
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    ran = subprocess.run([sys.executable, "-W", "default", path], stderr=subprocess.PIPE, env=environment, timeout=60)
    return ran.stderr, ran.returncode


def diagnosed(errors: bytes, status: int, cut: Callable[[], int] = lambda: 1 << 20) -> Failure:
    """Diagnose a worker with standard error that comes in pieces of these sizes."""
    tail, place = Tail(), 0
    while place < len(errors):
        size = cut()
        tail.feed(errors[place : place + size], float(place))
        place += size
    failure = Failure("rank 0", "host a", status, float(len(errors) + 1))
    diagnose(failure, tail, Tail())
    return failure


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_the_last_error_that_no_line_introduces(case: str, tmp_path: Path) -> None:
    script, last = CASES[case]
    errors, status = stderr_of(tmp_path, script)
    assert status != 0
    failure = diagnosed(errors, 1)
    report = failure.report.decode()
    assert last in report, errors.decode()
    assert not [beside for beside in BESIDE if beside in report.partition(last)[2]]
    assert "most recent call" not in report.partition(last)[2]


@pytest.mark.parametrize("case", CASES)
def test_the_pieces_in_which_output_comes_change_nothing(case: str, tmp_path: Path) -> None:
    errors, _ = stderr_of(tmp_path, CASES[case][0])
    whole = diagnosed(errors, 1)
    chance = random.Random(case)
    for most in (1, 7, 60, 500):
        in_pieces = diagnosed(errors, 1, lambda most=most: chance.randint(1, most))  # type: ignore[misc]
        assert in_pieces.report == whole.report
        if case != "only a thread":
            begin = errors.index(whole.report)
            assert begin - most <= in_pieces.at <= begin + 200, "the time at which the error began"


@pytest.mark.parametrize("most", [1, 7, 500])
@pytest.mark.parametrize("case", ["chain", "note", "destructor", "syntax"])
def test_the_text_that_torch_puts_in_front_of_lines_changes_nothing(case: str, most: int, tmp_path: Path) -> None:
    errors, _ = stderr_of(tmp_path, CASES[case][0])
    in_front = re.sub(rb"^(?=[^\n])", b"[rank13]: ", errors, flags=re.MULTILINE)
    chance = random.Random(case)
    assert diagnosed(in_front, 1, lambda: chance.randint(1, most)).report == diagnosed(errors, 1).report


LOST = (
    'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    dist.all_reduce(x)\n',
    "gradserver.WorkerLostError: 'b' (rank 1) was lost and is needed to go on: its process ended\n",
    "RuntimeError: Got the following error when running the callback: WorkerLostError: 'b' (rank 1) was lost and is "
    "needed to go on: its process ended\n\nAt:\n  work.py(9): wait\n",
)


@pytest.mark.parametrize("error", LOST[1:])
@pytest.mark.parametrize("front", ["", "[rank0]: "])
def test_an_error_that_follows_from_another_workers_end_is_known_in_each_form(error: str, front: str) -> None:
    text = "".join(front + line for line in (LOST[0] + error).splitlines(keepends=True))
    assert diagnosed(text.encode(), 1).follows
    assert not diagnosed(text.replace("WorkerLostError", "ValueError").encode(), 1).follows


def test_a_run_shows_the_cause_and_not_what_its_end_brings(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DESTRUCTOR + AT_EXIT + LATE_THREAD + CAUSE + "\n")
    command = [sys.executable, "-m", "gradserver", "run", "-n1", "--coordinator", "tcp://127.0.0.1:1", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    told = ran.stderr.partition("failed first")[2]
    assert ran.returncode == 1
    assert told.rstrip().endswith(LAST)
    assert not [beside for beside in BESIDE if beside in told]


ABORTED = (
    b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    f()\nValueError: the real cause\n'
    b"Fatal Python error: _enter_buffered_busy: could not acquire lock for <_io.BufferedWriter name='<stdout>'> at "
    b"interpreter shutdown, possibly due to daemon threads\nPython runtime state: finalizing (tstate=0x1)\n"
)
THROWN = (
    b"terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\n"
    b"Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent call first):\n"
    b"frame #0: c10::Error::Error + 0x96 (0x7f in libc10.so)\n\nFatal Python error: Aborted\n\n"
    b'Thread 0x1 (most recent call first):\n  File "train.py", line 3 in <module>\n'
)
SPAWNED = (
    b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    mp.spawn(f)\n'
    b"torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n"
    b'Traceback (most recent call last):\n  File "train.py", line 9, in f\n    g()\nValueError: the real cause\n\n'
)


def test_an_abort_while_the_interpreter_ends_does_not_hide_the_error_before() -> None:
    failure = diagnosed(ABORTED, -6)
    assert failure.report.startswith(b"Traceback")
    assert b"ValueError: the real cause" in failure.report


def test_a_fault_of_a_library_is_shown_with_its_words() -> None:
    failure = diagnosed(b"noise\n" + THROWN, -6)
    assert failure.report == THROWN
    assert failure.last_line() == "terminate called after throwing an instance of 'c10::Error'"


def test_the_error_of_a_spawned_child_is_the_cause() -> None:
    failure = diagnosed(SPAWNED, 1)
    assert failure.last_line() == "ValueError: the real cause"
