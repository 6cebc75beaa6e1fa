"""Errors whose text is part of what is promised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradserver.protocol.errors import InvalidArgumentError


@contextmanager
def refused(error: type[InvalidArgumentError], text: str) -> Iterator[None]:
    """The body raises exactly this error with exactly this text."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert str(caught.value) == text
