"""`gradserver doctor`: its options, and the order in which it looks at things."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable

from gradserver.json_text import json_text
from gradserver.printing import complain, say
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.offers import Offer
from gradserver.protocol.url import parse_target
from gradserver.tools.doctor import devices, link, machine, planes
from gradserver.tools.doctor.report import BROKEN, Report

_STATUS = "Exit status: 0 if there is nothing to change, 1 if there is, and 2 if training does not work before that."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options to `parser`."""
    parser.description = (
        "Show what this machine can do for a training, what a coordinator can do, how fast the link between them is, "
        "which plane gradients would take and why, and what to change."
    )
    parser.epilog = _STATUS
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="the coordinator's address, as tcp://HOST:PORT (default GRADSERVER_URL; without it only this machine is "
        "examined)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--no-rates",
        action="store_true",
        help="measure no rates. Otherwise the doctor sends 64 MiB each way at most, and 8 MiB if a group trains, over "
        "each channel, in a group of its own that ends after 20 seconds; and it copies 64 MiB to each CUDA device and "
        "back",
    )


def run(arguments: argparse.Namespace, told: Callable[[], Offer]) -> int:
    """Examine, print, and return the exit status. ``told`` gives what this process can do as a worker, with torch."""
    log = logging.getLogger("gradserver")
    level = log.level
    log.setLevel(logging.CRITICAL)  # workers of the measurement say nothing
    try:
        return _examined(arguments, told)
    finally:
        log.setLevel(level)


def _examined(arguments: argparse.Namespace, told: Callable[[], Offer]) -> int:
    url = arguments.url or os.environ.get("GRADSERVER_URL") or ""
    if url:
        try:
            parse_target(url)
        except InvalidArgumentError as error:
            complain("gradserver", error)
            return BROKEN
    report = Report()
    machine.examine(report)
    offer = told()
    devices.examine(report, offer, copies=not arguments.no_rates)
    found = link.examine(report, url, measures=not arguments.no_rates) if url else link.Found(here=True)
    planes.examine(report, offer, found.status, found.here)
    if arguments.json:
        print(json_text(report.as_json(), indent=2))
    else:
        say(*report.lines())
    return report.status
