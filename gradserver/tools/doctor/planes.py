"""The plane that a group would have: of workers like this one, and of a coordinator's groups with this worker."""

from __future__ import annotations

from typing import Any, Final

from gradserver.engine.control.planes import Candidate, Case, choose
from gradserver.protocol.means import mean_of
from gradserver.protocol.offers import Device, Offer
from gradserver.protocol.planes import DIRECT, GLOO, NCCL, SHM, TCP
from gradserver.tools.doctor.report import Report, Section

_HOSTED: Final = "127.0.0.1:1"
"""Address of the rendezvous that a worker with torch.distributed would host."""


def examine(report: Report, offer: Offer, status: dict[str, Any] | None, here: bool) -> None:
    """Add the planes, and why. ``status`` is the coordinator's, which is on this host if ``here``."""
    section = report.section("plane", "plane, and why")
    own = offer._replace(channel=SHM if here else TCP, store=_HOSTED if offer.backends else "")
    _of_this_machine(section, own)
    for name, group in () if status is None else status["groups"].items():
        members = [Candidate(one["name"], _offer_in(one.get("offer"))) for one in group["members"]]
        shown = group["plane"]
        now = f"{shown['name']}, because {shown['reason']}" if shown["reason"] else shown["name"]
        workers = [*members, Candidate("this worker", own)]
        facts = shown["leaves_late"], shown["has_commits"], shown["mode"], mean_of(shown["mean"])
        then = choose(Case(workers, *facts), shown["coordinator_demands"])
        value = {"now": shown["name"], "with_this_worker": then.plane, "reason": then.reason}
        section.add(f"group_{name}", value, f"{now}. With a worker of this machine: {then}")


def _of_this_machine(section: Section, own: Offer) -> None:
    """Add the plane of a group that is on this machine alone: one worker for each device, or two without any."""
    offers = [own._replace(devices=(device,)) for device in own.devices]
    if len(offers) < 2:
        offers = [own, own]
    names = ["this worker", *(f"worker {number} like it" for number in range(2, len(offers) + 1))]
    workers = [Candidate(name, offer) for name, offer in zip(names, offers, strict=True)]
    choice = choose(Case(workers))
    section.add("workers_like_this_one", {"plane": choice.plane, "reason": choice.reason}, str(choice))
    if choice.plane == DIRECT:
        return
    back_end = NCCL if own.devices else GLOO
    demanded = choose(Case(workers), DIRECT)
    why = demanded.reason.partition(", and ")[2]
    can = f"possible, over {back_end}" if demanded.plane == DIRECT else f"not possible: {why}"
    section.add("direct_on_demand", demanded.plane == DIRECT, can)


def _offer_in(shown: dict[str, Any] | None) -> Offer:
    """Return an offer as a status shows it."""
    if shown is None:
        return Offer()
    known = {key: shown[key] for key in Offer._fields}
    devices = tuple(Device(*(device[key] for key in Device._fields)) for device in shown["devices"])
    return Offer(**{**known, "backends": tuple(shown["backends"]), "devices": devices})
