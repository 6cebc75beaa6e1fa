"""Errors with a text that is part of the interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradserver.protocol.errors import InvalidArgumentError


@contextmanager
def refused(error: type[InvalidArgumentError], text: str) -> Iterator[None]:
    """Check that the body raises exactly this error with exactly this text."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert str(caught.value) == text
