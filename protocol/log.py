"""The package's log: each record is one harmless line, whatever formats it. Members choose much of what it says."""

from __future__ import annotations

import logging
from typing import Final

from gradserver.protocol.harmless import one_line

log: Final = logging.getLogger("gradserver")


def _made_harmless(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # the handlers tell of a record that cannot be formatted
        return True
    if not text.isprintable():
        record.msg, record.args = one_line(text), None
    return True


log.addFilter(_made_harmless)
