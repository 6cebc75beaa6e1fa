"""The check that a script leaves parameters alone while a first backward goes through them."""

from __future__ import annotations

from collections.abc import Sequence

from gradserver.protocol.errors import UsageError
from gradserver.worker.torch_ddp.buckets import Slot


class Untouched:
    """The parameters of a module, as they were in the first backward that exchanges.

    Args:
        slots: the parameters that are exchanged.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._versions: dict[str, int] | None = {}
        """Versions of the parameters when the first backward begins; None when it is over."""

    def begin(self) -> None:
        """Note the versions of the parameters, in the first backward."""
        if self._versions is not None:
            self._versions = {slot.name: slot.parameter._version for slot in self._slots}

    def end(self) -> None:
        """Raise UsageError if the first backward has changed a parameter.

        An optimizer that steps in a hook does that. It uses a gradient that is this worker's alone.
        """
        if self._versions:
            for slot in self._slots:
                if slot.parameter._version != self._versions[slot.name]:
                    raise UsageError(
                        f"parameter {slot.name!r} was changed during backward, before its gradient was averaged, as an "
                        f"optimizer does that steps in a hook (register_post_accumulate_grad_hook): step it after "
                        f"backward()"
                    )
        self._versions = None
