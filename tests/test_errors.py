"""Tests of the error tree: as it is drawn, and on its way through a message."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gradserver.protocol import errors
from gradserver.protocol.errors import (
    ERRORS,
    CoordinatorError,
    DeadlineError,
    GradServerError,
    InvalidArgumentError,
    NonFiniteError,
    UsageError,
    WorkerLostError,
)
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.harmless import one_line
from gradserver.protocol.limits import MAX_TEXT
from gradserver.protocol.messages import Failure, Message, Scope
from gradserver.protocol.wire import decode, encode


def through_the_wire(message: Message) -> Failure:
    decoded, payloads = decode([encode(message)])
    assert isinstance(decoded, Failure)
    assert not payloads
    return decoded


def drawn_tree() -> dict[str, str]:
    """Return the parent of each class, read from the drawing in the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        match = re.match(r"^((?:[│ ] {3})*(?:[├└]── )?)([A-Z]\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else ""
    return parents


def test_the_drawing_is_the_tree() -> None:
    parents = {name: kind.__bases__[0].__name__ for name, kind in ERRORS.items() if kind is not GradServerError}

    assert drawn_tree() == {"GradServerError": "", **parents}


def test_every_class_is_exported_under_its_name() -> None:
    assert set(errors.__all__) == {"ERRORS", *ERRORS}
    for name, kind in ERRORS.items():
        assert getattr(errors, name) is kind


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidArgumentError, ValueError),
        (UsageError, RuntimeError),
        (DeadlineError, TimeoutError),
        (CoordinatorError, ConnectionError),
    ],
)
def test_errors_are_also_what_python_calls_them(kind: type[GradServerError], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert str(kind("what went wrong")) == "what went wrong"


def test_a_field_that_was_not_given_reads_as_its_default() -> None:
    error = NonFiniteError("NaN", bucket="block.3")

    assert (error.bucket, error.worker, error.rank, error.round) == ("block.3", "", -1, -1)


def test_a_field_that_a_class_does_not_have_is_a_mistake() -> None:
    with pytest.raises(TypeError, match=r"WorkerLostError has no field \['bucket'\]"):
        WorkerLostError("gone", bucket="block.3")


def test_saying_it_again_gives_a_fresh_error() -> None:
    error = WorkerLostError("gone", worker="w1", rank=1)
    again = error.again()

    assert again is not error
    assert (type(again), again.message, again.fields) == (WorkerLostError, "gone", {"worker": "w1", "rank": 1})


def test_an_error_can_be_copied() -> None:
    error = copy.copy(DeadlineError("late", missing=("'w1' (rank 1)",), round=3))

    assert (error.message, error.missing, error.round) == ("late", ("'w1' (rank 1)",), 3)


_VALUES: dict[object, st.SearchStrategy[object]] = {
    str: st.text(max_size=30),
    int: st.integers(-(2**63), 2**63 - 1),
    tuple[str, ...]: st.lists(st.text(max_size=10), max_size=32).map(tuple),
}


def _shown(value: Any) -> Any:
    """Return ``value`` as it arrives: a text has nothing that a terminal would take for more than text."""
    return (
        tuple(map(_shown, value)) if isinstance(value, tuple) else one_line(value) if isinstance(value, str) else value
    )


@pytest.mark.parametrize("kind", ERRORS.values(), ids=str)
@given(data=st.data())
def test_every_error_arrives_as_it_was_sent(kind: type[GradServerError], data: st.DataObject) -> None:
    hints = typing.get_type_hints(kind, vars(errors))
    fields = {name: data.draw(_VALUES[hints[name]]) for name in sorted(kind._FIELDS) if data.draw(st.booleans())}
    error = kind(data.draw(st.text(max_size=MAX_TEXT)), **fields)
    key = data.draw(st.none() | st.just(ExchangeKey(Stream.TRANSFER, 5, 6, 7, 8)))

    message = through_the_wire(Failure.of(error, Scope.EXCHANGE, key))
    arrived = message.exception()

    assert type(arrived) is kind
    shown = {name: _shown(value) for name, value in error.fields.items()}
    assert (arrived.message, arrived.fields) == (_shown(error.message), shown)
    assert all(getattr(arrived, name) == value for name, value in shown.items())
    assert (message.scope, message.key) == (Scope.EXCHANGE, key)


def test_a_class_that_this_version_does_not_know_becomes_the_root() -> None:
    error = through_the_wire(Failure(Scope.CONNECTION, "FutureError", "something new", {"rank": 3})).exception()

    assert type(error) is GradServerError
    assert (error.message, error.fields) == ("something new", {})


def test_a_name_that_is_no_error_class_becomes_the_root() -> None:
    for name in ("", "ERRORS", "Exception", "__class__"):
        assert type(Failure(Scope.CONNECTION, name, "text").exception()) is GradServerError


def test_a_field_that_this_version_does_not_know_is_dropped() -> None:
    sent = Failure(Scope.CONNECTION, "WorkerLostError", "gone", {"rank": 3, "host": "a", "args": "b", "_FIELDS": "c"})
    error = through_the_wire(sent).exception()

    assert type(error) is WorkerLostError
    assert error.fields == {"rank": 3}


def test_a_long_list_is_cut_short() -> None:
    error = DeadlineError("late", missing=tuple(f"w{rank}" for rank in range(100)))

    arrived = through_the_wire(Failure.of(error, Scope.EXCHANGE)).exception()

    assert arrived.fields == {"missing": tuple(f"w{rank}" for rank in range(32))}


def test_facts_that_cannot_travel_stay_behind() -> None:
    error = NonFiniteError("NaN", bucket=None, rank=2)

    assert Failure.of(error, Scope.CONNECTION).fields == {"rank": 2}


@given(
    st.sampled_from(["late", "x" * (MAX_TEXT + 1), "\U0001f680" * 9000, "\udc80" * 9]),
    st.sampled_from(["", "name", "ü" * 3000]),
    st.integers(0, 40),
)
def test_a_failure_always_fits_into_a_header(text: str, name: str, items: int) -> None:
    error = DeadlineError(text, missing=(name,) * items, bucket=text)

    arrived = through_the_wire(Failure.of(error, Scope.EXCHANGE)).exception()

    assert type(arrived) is DeadlineError
    assert arrived.message == text.encode(errors="replace").decode()[:MAX_TEXT]


def test_what_ended_a_script_is_told_in_words() -> None:
    assert errors.raised(ValueError("no data left")) == "it raised ValueError: no data left"
    assert errors.raised(KeyError()) == "it raised KeyError"
    assert errors.raised(KeyboardInterrupt()) == "it was interrupted (Ctrl-C)"
