"""Commands in documents and scripts, compared with what exists: options, targets, extras, files."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gradserver
from gradserver import cli

ROOT = Path(gradserver.__file__).resolve().parent.parent
_OPTIONS = re.compile(r'GRADSERVER_OPTIONS="(.*)"')


def parse(*arguments: str) -> argparse.Namespace:
    """Parse ``gradserver arguments…``. AssertionError, with the parser's own words, if it is refused."""
    try:
        return cli._parser().parse_args(arguments)
    except SystemExit as refused:
        raise AssertionError(f"`gradserver {shlex.join(arguments)}` is refused") from refused


def lines_of(text: str) -> Iterator[str]:
    """Return the command lines of a shell script, without comments; continued lines are joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def check(line: str) -> None:
    """Check that every command of one line is known, and that all it names exists."""
    if options := _OPTIONS.search(line):
        parse("serve", *shlex.split(options[1]))
    for part in re.split(r"\s*(?:&&|\|\|?)\s*", line):
        words = shlex.split(part, comments=True)
        while words and words[0] in ("sudo", "exec"):
            del words[0]
        if words and words[-1] == "&":
            del words[-1]
        program = words[0].rpartition("/")[2]
        assert program in _CHECKS, f"{program!r} in {line!r}: how is that to be checked?"
        _CHECKS[program](words)


def _gradserver(words: Sequence[str]) -> None:
    parse(*words[1:])


def _make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    known = {*re.findall(r"^([a-z-]+):", text, re.MULTILINE), *re.findall(r"^([A-Z_]+ )\?=", text, re.MULTILINE)}
    assert {word.partition("=")[0] + " " * ("=" in word) for word in words[1:]} <= known, words


def _pip(words: Sequence[str]) -> None:
    assert words[1] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[2:]:
        project = re.fullmatch(r"(?:gradserver|\.)(?:\[(\w+)\])?", word)
        assert project, words
        assert project[1] is None or project[1] in extras, words


def _torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser  # here, as torch takes seconds to load

    arguments = get_args_parser().parse_args(words[1:])
    assert arguments.training_script.endswith(".py"), words


def _docker(words: Sequence[str]) -> None:
    _files(words)
    if words[1] == "run":
        _gradserver(words[words.index("gradserver") :])


def _files(words: Sequence[str]) -> None:
    """Check that all that looks like a file of this repository is one."""
    for word in words:
        if re.match(r"(deploy|docs|examples|tests)/", word):
            assert (ROOT / word).exists(), word


def _anything(_: Sequence[str]) -> None:
    """Accept the command of another program."""


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "gradserver": _gradserver,
    "make": _make,
    "pip": _pip,
    "torchrun": _torchrun,
    "docker": _docker,
    "git": _anything,
    "python": _files,
    "python3": _files,
    "cp": _files,
    "sbatch": _files,
    "srun": _files,
    "mpirun": _files,
    "torchrun.sh": _files,
    "export": _anything,
    "echo": _anything,
    "systemctl": _anything,
    "tee": _anything,
    ".": _anything,
}
