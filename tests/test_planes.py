"""The choice of a group's plane: by what workers offer and demand, and what members are told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradserver.engine import Engine
from gradserver.engine.commands import Command, Record, Send
from gradserver.engine.control import journal
from gradserver.engine.control.planes import OBSTACLES, Candidate, Case, Choice, can_have_commits, choose
from gradserver.engine.effects import Effects
from gradserver.engine.events import Disconnected, Received, Restored, Tick
from gradserver.engine.journal_state import Dated, JournalState
from gradserver.engine.policy import Lateness, OnOutlier, Policy
from gradserver.engine.records import Chosen, Commits, Entered, Epoch, Told
from gradserver.protocol.errors import DisagreementError, GradServerError, JoinRefusedError
from gradserver.protocol.limits import MAX_PLANE_REASON
from gradserver.protocol.means import mean_of
from gradserver.protocol.messages import Enter, Failure, Join, Membership, Serve, Welcome
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.offers import Device, Offer, pack_offers, summary, unpack_offers
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO, DIRECT, PLANES
from tests.engine_harness import SEATS, Harness, plan_of
from tests.plane_tables import PAGE, page
from tests.test_restoring import FOUNDED, write
from tests.test_state_dir import opened, round_record

GIB = 1024**3


def gpu(number: int = 0, **other: Any) -> Offer:
    """Return the offer of a worker with a CUDA device of its own."""
    device = Device("NVIDIA H100", f"GPU-{number}", 80 * GIB)
    offer = Offer(AUTO, "tcp", "box", "box", "2.11.0", ("gloo", "nccl"), "2.27.3", "580.65", (device,), "", "box:29500")
    return offer._replace(**other)


CPU = gpu(devices=(), nccl="", backends=("gloo",), trouble="torch 2.11.0 is built without CUDA")
LEVELED = CPU._replace(plane="hierarchical")
NUMPY = Offer(host="spot", host_id="spot", trouble="it was not imported before the worker joined")
ONE_EACH = "each worker has a CUDA device of its own and NCCL 2.27.3"


def workers(*offers: Offer) -> list[Candidate]:
    return [Candidate(f"w{rank}", offer) for rank, offer in enumerate(offers)]


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────

CASES: list[tuple[list[Offer], str]] = [
    ([gpu(0), gpu(1)], f"direct, because {ONE_EACH}"),
    ([gpu(0)], "tcp, because 'w0' is alone"),
    ([gpu(0), CPU], "tcp, because 'w1' has no CUDA device (torch 2.11.0 is built without CUDA)"),
    ([gpu(0), NUMPY], "tcp, because 'w1' has no torch (it was not imported before the worker joined)"),
    ([gpu(0), Offer()], "tcp, because 'w1' has no torch"),
    ([CPU, CPU], "tcp, because 'w0' has no CUDA device (torch 2.11.0 is built without CUDA)"),
    ([gpu(0), gpu(0)], "tcp, because 'w0' and 'w1' have one CUDA device (NVIDIA H100, GPU-0)"),
    ([gpu(0), gpu(1), gpu(2, nccl="2.21.5")], "tcp, because 'w0' has NCCL 2.27.3, and 'w2' has 2.21.5"),
    ([gpu(0), gpu(1, nccl="", trouble="no NCCL here")], "tcp, because 'w1' has no NCCL (no NCCL here)"),
    ([gpu(0), gpu(1, devices=(Device("T4", "", GIB),))], "tcp, because 'w1' does not know its CUDA device's identity"),
    ([gpu(0, store=""), gpu(1, store="")], "tcp, because no worker hosts a rendezvous"),
    ([gpu(0, channel="shm"), CPU._replace(channel="shm")], "shm, because 'w1' has no CUDA device (torch 2.11.0 is"),
    ([gpu(0, channel="shm"), CPU], "tcp, because 'w1' has no CUDA device"),
    ([Offer(channel="in_process")] * 2, "in_process, because 'w0' is a thread of the coordinator's process"),
    ([gpu(0), CPU._replace(plane="shm")], "tcp, because 'w1' demands shm, and 'w0' is on another host than the"),
    ([CPU, CPU._replace(plane="direct")], "direct, because 'w1' demands it"),
    ([gpu(0), CPU._replace(plane="direct")], "direct, because 'w1' demands it"),
    ([gpu(0), gpu(1, plane="tcp")], "tcp, because 'w1' demands it"),
    ([gpu(0, plane="direct"), NUMPY], "tcp, because 'w0' demands direct, and 'w1' has no torch"),
    (
        [CPU, CPU._replace(plane="direct", torch="2.3.0+cpu")],
        "tcp, because 'w1' demands direct, and 'w0' has torch 2.11",
    ),
    ([Offer(), Offer()], "tcp"),
    (
        [gpu(0), gpu(1), gpu(2, host_id="other", nccl="2.21.5"), gpu(3, host_id="other", nccl="2.21.5")],
        "hierarchical, because 'w0' has NCCL 2.27.3, and 'w2' has 2.21.5, and workers on 'box' have one each",
    ),
    (
        [gpu(0), gpu(1), CPU._replace(host_id="other")],
        "hierarchical, because 'w2' has no CUDA device (torch 2.11.0 is built without CUDA), and workers on 'box' have",
    ),
    ([gpu(0), CPU._replace(host_id="other")], "tcp, because 'w1' has no CUDA device"),
    ([CPU, CPU._replace(host_id="other")], "direct, because each worker is on a host of its own: rounds go over the"),
    ([CPU, CPU._replace(host_id="other", plane="tcp")], "tcp, because 'w1' demands it"),
    ([CPU, NUMPY], "tcp, because 'w1' has no torch"),
    ([CPU, CPU, CPU._replace(host_id="other")], "tcp, because 'w0' has no CUDA device"),
    ([CPU._replace(plane="hierarchical"), CPU], "hierarchical, because 'w0' demands it"),
    ([LEVELED, CPU._replace(host_id="other")], "tcp, because 'w0' demands hierarchical, and each host has one worker"),
    ([LEVELED, NUMPY], "tcp, because 'w0' demands hierarchical, and 'w1' has no torch"),
    ([LEVELED, gpu(1, nccl=""), gpu(0)], "hierarchical, because 'w0' demands it"),
    (
        [gpu(0, plane="hierarchical"), gpu(1, nccl="", trouble="no NCCL here"), CPU._replace(host_id="other")],
        "tcp, because 'w0' demands hierarchical, and 'w1' has no NCCL (no NCCL here)",
    ),
    (
        [gpu(0, plane="hierarchical"), gpu(1, nccl="2.21.5"), CPU._replace(host_id="other")],
        "tcp, because 'w0' demands hierarchical, and 'w0' has NCCL 2.27.3, and 'w1' has 2.21.5",
    ),
    (
        [gpu(0, plane="hierarchical"), gpu(0), CPU._replace(host_id="other")],
        "tcp, because 'w0' demands hierarchical, and 'w0' and 'w1' have one CUDA device (NVIDIA H100, GPU-0)",
    ),
    (
        [gpu(0, plane="hierarchical"), gpu(1, devices=(Device("T4", "", GIB),))],
        "tcp, because 'w0' demands hierarchical, and 'w1' does not know its CUDA device's identity",
    ),
    (
        [LEVELED, CPU._replace(torch="2.3.0+cpu")],
        "tcp, because 'w0' demands hierarchical, and 'w0' has torch 2.11.0, and 'w1' has 2.3.0+cpu",
    ),
    ([LEVELED, CPU._replace(backends=("mpi",))], "tcp, because 'w0' demands hierarchical, and 'w1' has no gloo"),
    (
        [LEVELED._replace(store=""), CPU._replace(store=""), CPU._replace(host_id="other")],
        "tcp, because 'w0' demands hierarchical, and no worker hosts a rendezvous",
    ),
]


@pytest.mark.parametrize(("offers", "said"), CASES)
def test_the_plane_follows_from_what_all_offer_and_demand(offers: list[Offer], said: str) -> None:
    assert str(choose(Case(workers(*offers)))).startswith(said)


def test_on_the_cpu_the_direct_plane_is_taken_on_demand_only() -> None:
    assert choose(Case(workers(CPU, CPU))).plane == "tcp"
    assert choose(Case(workers(CPU, CPU)), demanded="direct") == Choice(
        "direct", "the coordinator (serve --plane) demands it", True
    )


def test_rounds_without_stragglers_are_not_direct() -> None:
    assert str(choose(Case(workers(gpu(0), gpu(1)), True))) == "tcp, because rounds are closed without stragglers"


def test_rounds_that_do_not_wait_for_all_are_not_direct() -> None:
    case = Case(workers(gpu(0), gpu(1)), True, mode="async")
    assert str(choose(case)) == "tcp, because rounds of mode 'async' do not wait for all workers"


def test_contributions_meet_where_something_is_to_follow_from_their_comparison() -> None:
    for rule in (OnOutlier.LEAVE_OUT, OnOutlier.HALT):
        case = Case(workers(gpu(0), gpu(1)), False, True, *Policy(1, 2, outliers=rule).case)
        assert str(choose(case)) == "tcp, because contributions are compared"
    assert choose(Case(workers(gpu(0), gpu(1)), False, True, *Policy(1, 2).case)).plane == "direct"


def test_a_robust_mean_goes_over_the_coordinator() -> None:
    case = Case(workers(gpu(0), gpu(1)), mean=mean_of("median"))
    assert str(choose(case)) == "tcp, because the mean is median, which needs each contribution"
    assert str(choose(case, "direct")).endswith("demands direct, and the mean is median, which needs each contribution")
    assert not can_have_commits(case, "auto")


def test_each_obstacle_of_a_plane_is_met_in_a_case() -> None:
    """Test that no row of the table is beyond reach: each is the first that is found in some case."""
    found = {str(choose(Case(workers(*offers)))) for offers, _ in CASES}
    for plane in AMONG_MEMBERS:
        met = {text for offers, _ in CASES for one in OBSTACLES[plane] if (text := _of(one, offers))}
        assert len(met) >= len(OBSTACLES[plane]) - 4, (met, found)
    assert OBSTACLES.keys() == {*PLANES}


def _of(obstacle: Any, offers: list[Offer]) -> str:
    from gradserver.engine.control.planes import Case

    text: str = obstacle.find(Case(workers(*offers), False))
    return obstacle.when if text else ""


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text("utf-8") == page(), "`python -m tests.plane_tables` writes it anew"


def test_a_reason_is_cut_where_names_are_long() -> None:
    long = [Candidate("\N{GRINNING FACE}" * 32, gpu(0)), Candidate("\N{GRINNING FACE}" * 31, gpu(0))]
    reason = choose(Case(long)).reason
    assert reason.endswith("…")
    assert MAX_PLANE_REASON - 8 < len(reason.encode()) <= MAX_PLANE_REASON


def test_the_summary_counts_kinds_of_devices_and_hosts() -> None:
    old = gpu(5, devices=(Device("Tesla T4", "GPU-5", 15 * GIB),), host_id="other")
    assert summary([gpu(0), gpu(1)]) == "2 × NVIDIA H100 (80 GiB), on 1 host"
    assert (
        summary([gpu(0), old, gpu(1), CPU])
        == "2 × NVIDIA H100 (80 GiB), 1 × Tesla T4 (15 GiB), 1 × CPU, heterogeneous, on 2 hosts"
    )


def test_offers_travel_in_one_payload() -> None:
    offers = (gpu(0), CPU, NUMPY, Offer())
    assert unpack_offers(pack_offers(offers)) == offers
    assert pack_offers(()) == ()
    assert unpack_offers(()) == ()


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\x01", pack_offers([gpu()] * 2)[0][:-1], b"\xdd" + b"\xff" * 4]
)
def test_other_bytes_are_no_offers(payload: bytes) -> None:
    with pytest.raises(GradServerError):
        unpack_offers([payload])


# ── what members are told ─────────────────────────────────────────────────────────────────────────────


def harness(policy: Policy | int = 2, **options: Any) -> Harness:
    made = Harness({"default": policy})
    made.engine = Engine(made.worlds, made.credit, **options)
    return made


def join(made: Harness, rank: int, offer: Offer, name: str = "") -> list[Command]:
    return made.receive(SEATS + rank, Join("default", name or f"w{rank}", -1, 0, 10.0, offer))


def told(made: Harness, rank: int, kind: type[Any]) -> Any:
    """Return the last message of a kind that a member got, with the offers of its payload."""
    found = [(message, payloads) for message, payloads in made.inbox[SEATS + rank] if isinstance(message, kind)]
    message, payloads = found[-1]
    assert replace(message, offers=()).with_offers(payloads) == message, "what travels is what threads are handed"
    return message


def refused(made: Harness, rank: int) -> GradServerError:
    (failure,) = [message for message, _ in made.inbox[SEATS + rank] if isinstance(message, Failure)]
    return failure.exception()


def test_members_are_welcomed_with_the_plane_its_reason_and_all_offers() -> None:
    made = harness()
    join(made, 0, gpu(0))
    join(made, 1, gpu(1))

    for rank in range(2):
        welcome: Welcome = told(made, rank, Welcome)
        assert (welcome.plane, welcome.plane_reason, welcome.demanded) == (DIRECT, ONE_EACH, False)
        assert welcome.offers == (gpu(0), gpu(1))
    assert "group 'default': plane direct, because each worker has" in "\n".join(log.text for log in made.logs)
    assert "devices: 2 × NVIDIA H100 (80 GiB), on 1 host" in "\n".join(log.text for log in made.logs)
    assert made.group()["plane"]["name"] == "direct"


def test_workers_that_tell_nothing_cost_no_payload_and_no_record() -> None:
    made = harness()
    made.join(SEATS, "w0")
    commands = made.join(SEATS + 1, "w1")

    assert [payloads for _, payloads in made.inbox[SEATS]] == [()]
    assert not [one for one in commands if isinstance(one, Record) and isinstance(one.record, Chosen)]


def test_the_plane_is_another_one_when_the_worker_that_lacked_something_has_gone() -> None:
    made = harness(Policy(1, 3))
    for rank, offer in enumerate((gpu(0), NUMPY, gpu(2))):
        join(made, rank, offer)
    assert told(made, 0, Welcome).plane == "tcp"

    made.lose(1)

    news: Membership = told(made, 2, Membership)
    assert (news.plane, news.plane_reason, news.offers) == (DIRECT, ONE_EACH, (gpu(0), gpu(2)))


def test_members_that_are_not_there_yet_have_no_offer_either() -> None:
    news = Membership(3, (0, 2), ("a", "c"), "", False, (2,), 7, DIRECT, "", (gpu(0), gpu(2)))
    assert news.behind(6).offers == (gpu(0),)
    assert news.behind(7).offers == (gpu(0), gpu(2))


def pair_that_lets_others_join() -> Harness:
    """Return an elastic group of two workers with a device each, which serves learners."""
    made = harness(Policy(1, 3, gather=1.0))
    join(made, 0, gpu(0))
    join(made, 1, gpu(1))
    made.wait(1.0)
    for rank in range(2):
        made.receive(SEATS + rank, Serve())
    return made


def test_a_learner_is_told_the_plane_that_it_would_bring() -> None:
    made = pair_that_lets_others_join()

    join(made, 2, NUMPY, "spot-3")

    welcome: Welcome = told(made, 2, Welcome)
    assert welcome.joins
    assert (welcome.plane, welcome.offers) == ("tcp", (gpu(0), gpu(1), NUMPY))
    assert welcome.plane_reason.startswith("'spot-3' has no torch")
    assert made.group()["plane"]["name"] == "direct", "it is not a member yet"
    made.receive(SEATS + 2, Enter())


def test_a_learner_wraps_modules_as_the_founder_was_told_to() -> None:
    """Test a founder that is alone, and has agreed on its module's gradients, and not yet on the commit of these."""
    made = harness(Policy(1, 3, gather=0.0))
    join(made, 0, CPU)
    made.propose(0, plan_of(2))
    join(made, 1, CPU)

    founder, learner = (told(made, rank, Welcome) for rank in range(2))
    assert learner.joins
    assert (founder.commits, learner.commits) == (True, True)


@pytest.mark.parametrize("commits", [True, False])
def test_modules_of_a_learner_have_commits_after_a_restart_if_those_of_others_have(
    commits: bool, tmp_path: Path
) -> None:
    write(tmp_path, *FOUNDED[:3], *([Commits("g")] if commits else []))
    with opened(tmp_path) as state:
        engine = Engine({"g": Policy(1, 2)}, incarnation=state.incarnation)
        engine.handle(Restored(state.restored), 0.0)
    assert engine.control.groups["g"].planes.commits is commits


# ── what is demanded ──────────────────────────────────────────────────────────────────────────────────


def test_different_demands_name_both_workers() -> None:
    made = harness(3)
    join(made, 0, gpu(0))
    join(made, 1, gpu(1, plane="tcp"))
    join(made, 2, gpu(2, plane="direct"))

    error = refused(made, 2)
    assert type(error) is DisagreementError
    assert error.message == (
        "'w2' demands plane 'direct' for group 'default', and 'w1' demands 'tcp': demand the same everywhere (plane= "
        "of connect, GRADSERVER_PLANE, serve --plane), or nothing (plane='auto')"
    )


def test_a_worker_cannot_demand_another_plane_than_the_coordinator() -> None:
    made = harness(plane="tcp")
    join(made, 0, gpu(0, plane="direct"))
    assert "and the coordinator (serve --plane) demands 'tcp'" in refused(made, 0).message


@pytest.mark.parametrize(
    ("offers", "policy", "said"),
    [
        (
            (gpu(0), gpu(0, plane=DIRECT)),
            2,
            "'w0' and 'w1' have one CUDA device (NVIDIA H100, GPU-0). To go by it, give",
        ),
        (
            (NUMPY, CPU._replace(plane=DIRECT)),
            2,
            "'w0' has no torch (it was not imported before the worker joined). To",
        ),
        (
            (CPU._replace(plane=DIRECT), NUMPY),
            2,
            "'w1' has no torch (it was not imported before the worker joined). To",
        ),
        ((gpu(0), gpu(1, plane=DIRECT, nccl="2.1")), 2, "'w0' has NCCL 2.27.3, and 'w1' has 2.1. To go by it, install"),
        ((CPU._replace(channel="shm", plane="shm"), CPU), 2, "'w1' is on another host than the coordinator, or has"),
        ((CPU, CPU._replace(plane=DIRECT)), Policy(2, 2, lateness=Lateness(quorum=1)), "closed without stragglers. To"),
        ((CPU, CPU._replace(plane="in_process")), 2, "'w0' is another process than the coordinator. To go by it, use"),
    ],
)
def test_a_demand_that_is_impossible_names_what_to_change(
    offers: tuple[Offer, Offer], policy: Policy | int, said: str
) -> None:
    made = harness(policy)
    for rank, offer in enumerate(offers):
        join(made, rank, offer)

    error = refused(made, 1)
    assert type(error) is JoinRefusedError
    assert "group 'default' cannot go by plane" in error.message
    assert said in error.message
    assert not [message for message, _ in made.inbox[SEATS] if isinstance(message, Failure)], (
        "it costs the other nothing"
    )


def test_a_worker_that_is_back_does_not_share_the_device_with_what_it_was() -> None:
    made = harness(Policy(1, 2))
    join(made, 0, gpu(0, plane=DIRECT))
    join(made, 1, gpu(1))
    made.receive(SEATS, Serve())

    join(made, 2, gpu(1), "w1")  # its old connection still stands

    assert not [message for message, _ in made.inbox[SEATS + 2] if isinstance(message, Failure)]


# ── what is written down ──────────────────────────────────────────────────────────────────────────────


def test_the_choice_is_written_before_it_is_told() -> None:
    made = harness(incarnation=1, entropy=lambda: "ab" * 16)
    join(made, 0, gpu(0))
    commands = join(made, 1, gpu(1))

    kinds = [type(one.record if isinstance(one, Record) else one) for one in commands]
    assert kinds.index(Chosen) < kinds.index(Send)
    (record,) = [one.record for one in commands if isinstance(one, Record) and isinstance(one.record, Chosen)]
    assert record == Chosen("default", 1, DIRECT, ONE_EACH, False, (Told(0, gpu(0)), Told(1, gpu(1))))


CHOSEN = Chosen("g", 1, DIRECT, ONE_EACH, False, (Told(0, gpu(0)), Told(1, gpu(1))))


def test_the_next_coordinator_tells_the_same_plane_of_the_same_epoch(tmp_path: Path) -> None:
    """Test that members of one epoch agree on its plane, whichever coordinator has told them."""
    write(tmp_path, *FOUNDED[:3], CHOSEN, FOUNDED[3], round_record(0))
    with opened(tmp_path) as state:
        engine = Engine({"g": Policy(1, 2)}, incarnation=state.incarnation)
        engine.handle(Restored(state.restored), 0.0)
    group = engine.control.groups["g"]
    assert engine.snapshot(0.0)["groups"]["g"]["plane"]["reason"] == ONE_EACH  # type: ignore[index]

    commands = engine.handle(Received(5, Resume("g", 0, group.token(0), 0, "")), 1.0)

    sent = next(one for one in commands if isinstance(one, Send) and isinstance(one.message, Membership))
    news, payloads = sent.message, sent.payloads
    assert isinstance(news, Membership)
    assert (news.plane, news.plane_reason) == (DIRECT, ONE_EACH)
    assert unpack_offers(payloads) == (gpu(0), gpu(1))
    commands = engine.handle(Tick(), 60.0)
    last = [one.record for one in commands if isinstance(one, Record) and isinstance(one.record, Chosen)]
    assert last == [Chosen("g", group.members.epoch, "tcp", "'a' is alone", False)], "its offer is known"
    engine.handle(Disconnected(5, "done"), 61.0)


def test_a_ledger_from_before_planes_is_read(tmp_path: Path) -> None:
    write(tmp_path, *FOUNDED, round_record(0))
    with opened(tmp_path) as state:
        engine = Engine({"g": 2}, incarnation=state.incarnation)
        engine.handle(Restored(state.restored), 0.0)
    assert engine.snapshot(0.0)["groups"]["g"]["plane"]["reason"] == ""  # type: ignore[index]


def test_what_is_restated_gives_the_same_choices() -> None:
    state = JournalState()
    later = Chosen("g", 3, "tcp", "'b' is gone", False, (Told(2, gpu(2)),))
    for record in (*FOUNDED[:3], CHOSEN, Epoch("g", 3, 4, ((0, "a"), (2, "c")), "x"), later):
        state.apply(Dated(0.0, record))
    again = JournalState()
    for dated in state.records():
        again.apply(dated)

    for fold in (state, again):
        group = fold.groups["g"]
        assert [(one.plane, one.reason) for one in map(group.chosen, (1, 2, 3)) if one is not None] == [
            (DIRECT, ONE_EACH),
            (DIRECT, ONE_EACH),
            ("tcp", "'b' is gone"),
        ]
        assert group.offers == {0: gpu(0), 1: gpu(1), 2: gpu(2)}
    state.apply(Dated(0.0, replace(round_record(4), epoch=3)))
    (restated,) = [dated.record for dated in state.records() if isinstance(dated.record, Chosen)]
    assert restated == replace(later, offers=(Told(0, gpu(0)), Told(2, gpu(2)))), (
        "an epoch that is over matters no more"
    )


def test_what_a_learner_offers_is_written_when_it_contributes_and_is_restated() -> None:
    """Test that a coordinator which is lost before the learner is a member does not take it for one without torch."""
    made = pair_that_lets_others_join()
    join(made, 2, gpu(2), "spot-3")
    group, effects = made.engine.control.groups["default"], Effects()
    group.learners.by_id[2].enter()
    journal.entered(group, effects)
    records = [one.record for one in effects.commands if isinstance(one, Record)]
    assert [type(record) for record in records] == [Entered, Chosen]
    assert records[1].offers == (Told(2, gpu(2)),)  # type: ignore[attr-defined]

    state = JournalState()
    told = Chosen("g", 1, DIRECT, ONE_EACH, False, (Told(2, gpu(2)),))
    for record in (*FOUNDED[:3], CHOSEN, Entered("g", 3, ((2, "c"),)), told):
        state.apply(Dated(0.0, record))
    (restated,) = [dated.record for dated in state.records() if isinstance(dated.record, Chosen)]
    assert Told(2, gpu(2)) in restated.offers
