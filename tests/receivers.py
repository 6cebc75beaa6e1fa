"""The receivers of what the engine sends and writes: every command is put into bytes, and read again."""

from __future__ import annotations

from collections.abc import Iterable

from gradserver.engine import records
from gradserver.engine.commands import Command, Record, Send
from gradserver.engine.link import decode_order, decode_report
from gradserver.protocol import wire
from gradserver.protocol.messages import Ordered, Reported


def check(commands: Iterable[Command]) -> None:
    """Fail if a receiver of any of ``commands`` would refuse it."""
    for command in commands:
        match command:
            case Send(_, message, payloads):
                wire.decode([wire.encode(message), *payloads])
                if isinstance(message, Ordered):
                    decode_order(payloads[0])
                elif isinstance(message, Reported):
                    decode_report(payloads[0], 0.0)
            case Record(record):
                records.decode(*records.encode(record))
