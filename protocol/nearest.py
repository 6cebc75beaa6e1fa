"""Names that are not known, with the known one that was probably meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Final, ParamSpec, TypeVar

_ALIKE: Final = 0.6
"""Likeness of two names, from 0 to 1, from which one is taken for a misspelt other."""

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(name: str, known: Collection[str], alike: float = _ALIKE) -> str:
    """Return ``: did you mean 'NAME'?`` with the nearest of the ``known`` names; empty if none is near."""
    found = difflib.get_close_matches(name, known, 1, alike)
    return f": did you mean {found[0]!r}?" if found else ""


def names_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """Make ``call`` name the nearest argument where it gets a keyword that it does not have: a TypeError."""
    parameters = inspect.signature(call).parameters.values()
    known = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [name for name in known if name != "self"]
    what = call.__qualname__.removesuffix(".__init__")

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                nearest = did_you_mean(name, known, 0.0) + f" Its arguments are {', '.join(known)}"
                raise TypeError(f"{what}() has no argument {name!r}{nearest}")
        return call(*args, **kwargs)

    return checked
