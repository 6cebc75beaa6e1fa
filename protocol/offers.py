"""Offers: what each worker can do, as it says when it joins. A group's plane follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

import msgpack

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.checks import ascii_text, choice, listed, unpack
from gradserver.protocol.declared import Field, nested, several
from gradserver.protocol.fields import Count, Rate, Seconds
from gradserver.protocol.limits import GIB, MAX_DEVICES, MAX_LABEL, MAX_TROUBLE, MAX_URL, MAX_WORLD_SIZE
from gradserver.protocol.planes import AUTO, CHANNELS, GLOO, IN_PROCESS, NCCL, PLANES, TCP, WISHES

_BACKENDS: Final = 8
"""Back ends in an offer, at most."""
_label: Final = ascii_text(MAX_LABEL)

Label = Annotated[str, Field(_label)]
PlaneName = Annotated[str, Field(choice(PLANES))]


class Device(NamedTuple):
    """A CUDA device that a worker sees. ``memory`` is in bytes; ``uuid`` is empty if torch does not tell it."""

    name: Label
    uuid: Label
    memory: Count


class Offer(NamedTuple):
    """Description of a worker, as it gives it when it joins.

    Attributes:
        plane: the plane that it demands; "auto" if it goes by any.
        channel: its way to the coordinator, as the plane that has no other.
        host: name of its host.
        host_id: equal for processes that run on one host, or that GRADSERVER_HOST puts there.
        torch: version of torch; empty if it had not imported torch.
        backends: back ends of torch.distributed that it has.
        nccl: version of NCCL; empty if it has none.
        driver: version of the CUDA driver.
        devices: CUDA devices that it sees. The first one is its own.
        trouble: the reason for which it has no torch, no device or no NCCL.
        store: address ``HOST:PORT`` or ``HOST:FOLDER`` of the store that it keeps as a rendezvous; empty if none.
        rate: rate of its link to the coordinator in Gbit/s, as it has measured; 0 if it has not.
        trip: round trip to the coordinator in seconds; 0 if it has not measured it.
    """

    plane: Annotated[str, Field(choice(WISHES))] = AUTO
    channel: Annotated[str, Field(choice(CHANNELS))] = TCP
    host: Label = ""
    host_id: Label = ""
    torch: Label = ""
    backends: Annotated[tuple[str, ...], Field(listed(_label, _BACKENDS))] = ()
    nccl: Label = ""
    driver: Label = ""
    devices: Annotated[tuple[Device, ...], several(nested(Device), MAX_DEVICES)] = ()
    trouble: Annotated[str, Field(ascii_text(MAX_TROUBLE))] = ""
    store: Annotated[str, Field(ascii_text(MAX_URL))] = ""
    rate: Rate = 0.0
    trip: Seconds = 0.0


UNTOLD: Final = Offer()
"""The offer of a worker that has told nothing."""
THREAD: Final = Offer(channel=IN_PROCESS)
"""The offer of a worker that is a thread of the coordinator's process."""
OFFER: Final = nested(Offer)
OneOffer = Annotated[Offer, OFFER]

_packb = msgpack.Packer(autoreset=True, unicode_errors="replace").pack


def pack_offers(offers: Sequence[Offer]) -> tuple[bytes, ...]:
    """Return the payload that carries ``offers``, if there are any."""
    if not offers:
        return ()
    packed: bytes = _packb([OFFER.write(offer) for offer in offers])
    return (packed,)


def unpack_offers(payloads: Sequence[Buffer]) -> tuple[Offer, ...]:
    """Return the offers in a payload, if there is one. MalformedMessageError if it holds anything else."""
    if not payloads:
        return ()
    return tuple(map(OFFER.check, unpack(payloads[0], "no offers", MAX_WORLD_SIZE, maps=False)))


def backend_of(offers: Iterable[Offer]) -> str:
    """Return the back end of a direct plane: NCCL if each worker has a CUDA device, and else gloo."""
    return NCCL if all(offer.devices for offer in offers) else GLOO


def by_host(offers: Sequence[Offer]) -> list[list[int]]:
    """Return the places of offers by host. Hosts, and places in each, are in the order of the offers."""
    hosts: dict[str, list[int]] = {}
    for place, offer in enumerate(offers):
        hosts.setdefault(offer.host_id or offer.host, []).append(place)
    return list(hosts.values())


def summary(offers: Sequence[Offer]) -> str:
    """Describe the devices of some workers in a line: how many, of which kinds, and with how much memory."""
    own = [offer.devices[0] for offer in offers if offer.devices]
    hosts = len(by_host(offers))
    where = f"on {hosts} hosts" if hosts > 1 else "on 1 host"
    without = len(offers) - len(own)
    kinds = Counter((device.name, round(device.memory / GIB)) for device in own)
    parts = [f"{count} × {name} ({memory} GiB)" for (name, memory), count in sorted(kinds.items())]
    if without:
        parts.append(f"{without} × CPU")
    mixed = "heterogeneous, " if len(parts) > 1 else ""
    return f"{', '.join(parts)}, {mixed}{where}"
