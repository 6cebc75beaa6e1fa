"""The error that broke a module's exchange: this replica is out of step with the others from then on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradserver.protocol.errors import GradServerError, OutOfStepError


class Breakage:
    """The error that broke an exchange, if one did.

    Attributes:
        text: what happened; empty if nothing is broken.
    """

    def __init__(self) -> None:
        self.text = ""
        self._abandonable = False
        """True if a backward broke it, and all exchanges are whole."""

    def check(self, abandons: bool = False) -> None:
        """Raise OutOfStepError if the exchange is broken; not if the caller ``abandons`` a round that can be."""
        if not self.text or (abandons and self._abandonable):
            return
        remedy = "close the worker and start again"
        if self._abandonable:
            remedy = f"call model.abandon_round() to go on with the gradients of the others, or {remedy}"
        raise OutOfStepError(f"{self.text}. This replica is out of step with the others: {remedy}")

    def fail(self, text: str) -> None:
        """Note that a backward failed when its round had begun."""
        self.text, self._abandonable = text, True

    def mend(self) -> None:
        """Note that the round was abandoned."""
        self.text = ""

    @contextmanager
    def by_errors(self, in_backward: bool = False) -> Iterator[None]:
        """Break the exchange by any error raised in here: for good, unless the computation ``in_backward`` failed."""
        try:
            yield
        except BaseException as error:
            self.text = f"an exchange failed ({type(error).__name__}: {error})"
            self._abandonable = in_backward and not isinstance(error, GradServerError)
            raise
