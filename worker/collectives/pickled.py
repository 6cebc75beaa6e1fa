"""Objects that only pickle can carry: the one place that unpickles, for callers with ``allow_pickle=True``.

Unpickling runs whatever code the bytes name. It happens in workers only, and never in a coordinator. It happens in a
collective of objects, and never in gradserver's own messages. The caller must have allowed it.
"""

from __future__ import annotations

import pickle
from typing import Any

from gradserver.protocol.errors import InvalidArgumentError, MalformedMessageError


def to_pickle(value: object) -> bytes:
    """Pickle ``value``. InvalidArgumentError if that is not possible."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever the object's own methods raise
        raise InvalidArgumentError(f"a {type(value).__qualname__} cannot be pickled: {error}") from error


def from_pickle(data: bytes) -> Any:
    """Return the object that these bytes make, by running what they name. MalformedMessageError if they make none."""
    try:
        return pickle.loads(data)
    except Exception as error:  # as above
        raise MalformedMessageError(f"an object that cannot be unpickled: {type(error).__name__}: {error}") from error
