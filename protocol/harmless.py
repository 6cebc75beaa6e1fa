"""Texts of other processes, made fit for terminals and logs.

Names, reasons and errors come from members and servers, which may be false. Raw, they could move the cursor of a
terminal or set its title. Or they could begin a line that looks like one of the log.
"""

from __future__ import annotations


def harmless(text: str) -> str:
    """Replace all characters that a terminal would act upon, apart from line ends."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text.expandtabs(4))


def one_line(text: str) -> str:
    """Replace line ends too: the text stays within its line."""
    return text if text.isprintable() else harmless(text).replace("\n", "?")
