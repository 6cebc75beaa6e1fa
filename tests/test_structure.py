"""Each figure of `tests.structure` counts what it should in small sources, and today's source is within all limits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests import structure
from tests.structure import DATA_GROUP, EXCHANGE, GROUP, Figure, Result, Source, StructureError, main

Write = Callable[[dict[str, str]], Source]

CLASSES = {
    "gradserver/engine/control/group.py": (
        "class Group:\n    name: str\n    away: dict\n    late: dict\n    own: int = 0\n    calm: int = 0\n"
        "def start(group: Group):\n    group.own = 1\n"
    ),
    "gradserver/engine/data/group.py": "class Group:\n    plan: int\n    due: dict\n    away: dict\n",
    "gradserver/engine/data/exchange.py": "class Exchange:\n    cut: dict\n    last: int\n",
}
EVENTS = (
    "class Open: pass\nclass Shut: pass\nclass Attach: pass\nclass Seat: pass\n"
    "RemoteOrder = Open | Shut\nOrder = RemoteOrder | Attach\n"
)
ERRORS = "class LostError(Exception): pass\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files, and read them as the source."""

    def written(files: dict[str, str]) -> Source:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, "utf-8")
        return Source(tmp_path)

    return written


def engine(**modules: str) -> dict[str, str]:
    return {f"gradserver/engine/{name}.py": text for name, text in modules.items()}


def control(**modules: str) -> dict[str, str]:
    return {f"gradserver/engine/control/{name}.py": text for name, text in modules.items()}


def data(**modules: str) -> dict[str, str]:
    return {f"gradserver/engine/data/{name}.py": text for name, text in modules.items()}


# ── writes ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "statement",
    [
        "group.away = {}",
        "group.calm, group.away = 1, {}",
        "group.away |= {}",
        "group.away: dict = {}",
        "group.away[3] = 1",
        "group.away[3][4] += 1",
        "del group.away",
        "del group.away[3]",
        "group.away.pop(3)",
        "group.away[3].append(4)",
        "self._group.away.clear()",
        "self.groups['a'].away.update({})",
        "for group.away in (): pass",
    ],
)
def test_each_way_to_write_a_field_counts(write: Write, statement: str) -> None:
    text = f"def change(self, group):\n    {statement}\n"
    found = structure.written_outside(write(CLASSES | control(leaving=text)), GROUP)
    assert "away: control.leaving" in found
    assert set(found) <= {"away: control.leaving", "calm: control.leaving"}


@pytest.mark.parametrize(
    "statement",
    [
        "now = group.away",
        "group.away.get(3)",
        "group.away[3].stage = 1",
        "group.unknown = 1",
        "away = group",
        "other.away = 1",
    ],
)
def test_what_does_not_write_a_field_does_not_count(write: Write, statement: str) -> None:
    text = f"def change(group, other):\n    {statement}\n"
    assert structure.written_outside(write(CLASSES | control(leaving=text)), GROUP) == {}


def test_which_group_is_written_follows_from_annotations_imports_and_packages(write: Write) -> None:
    source = write(
        CLASSES
        | control(
            leaving="def a(group):\n    group.away = {}\n",
            restore="from gradserver.engine.control import group\ndef a(new: 'group.Group'):\n    new.late = {}\n",
            turns="def a(group: str):\n    group.late = {}\n",
        )
        | data(
            closing="def a(group):\n    group.away = {}\n",
            failures="from gradserver.engine.data.group import Group as G\ndef a(one: G | None):\n    one.due = {}\n",
            completion="def a(exchange):\n    exchange.cut[1] = 2\n",
        )
        | engine(
            shard="from gradserver.engine.data.group import Group\ndef a(group):\n    group.away = {}\n",
            policy="def a(group):\n    group.late = {}\n",
        )
        | {"gradserver/cli.py": "from gradserver.engine.control.group import Group\ndef a(group):\n    group.own = 1\n"}
    )
    assert structure.written_outside(source, GROUP) == {"away: control.leaving": 1, "late: control.restore": 1}
    assert structure.written_outside(source, DATA_GROUP) == {"away: data.closing, shard": 1, "due: data.failures": 1}
    assert structure.written_outside(source, EXCHANGE) == {"cut: data.completion": 1}


def test_fields_of_a_members_parts_are_those_that_it_gives_itself(write: Write) -> None:
    organ = "class Turns:\n    def __init__(self):\n        self.said = []\n"
    session = "def close(member):\n    member.turns.said.clear()\n    member.turns.other = 1\n"
    source = write({"worker/member/turns.py": organ, "worker/session.py": session})
    assert structure.written_outside(source, (structure.MEMBER, "Turns")) == {"said: gradserver.worker.session": 1}


def test_a_field_counts_once_and_names_all_its_writers(write: Write) -> None:
    text = "def a(group):\n    group.away = {}\n    group.away[1] = 2\n"
    late = text + "    group.late = {}\n"
    found = structure.written_outside(write(CLASSES | control(forming=late, leaving=text)), GROUP)
    assert list(found.items()) == [("away: control.forming, control.leaving", 1), ("late: control.forming", 1)]


def test_a_class_of_state_is_found_wherever_it_is_and_must_be_there_once(write: Write) -> None:
    source = write(
        control(**{"tables/state": "class Group:\n    own: int\n", "leaving": "def a(group): group.own = 1"})
    )
    assert structure.written_outside(source, GROUP) == {"own: control.leaving": 1}
    with pytest.raises(StructureError, match=r"one Group is expected in gradserver\.engine\.data\.\*, there are 0"):
        structure.written_outside(source, DATA_GROUP)
    with pytest.raises(StructureError, match=r"there are 2: gradserver\.engine\.control\.group\.Group, "):
        structure.written_outside(write(CLASSES), GROUP)


# ── outputs of control ────────────────────────────────────────────────────────────────────────────────

IMPORTS = (
    "from gradserver.engine.control.group import Group\n"
    "from gradserver.engine.events import Attach, Open, Order, RemoteOrder, Seat\n"
    "from gradserver.protocol.errors import LostError\n"
    "Refusals = list[tuple[int, LostError]]\n"
)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        ("def a(group: Group, effects: object) -> None: ...", ["effects"]),
        ("def a(*, effects: object) -> bool: ...", ["effects"]),
        ("def a(commands: list[int]) -> None: ...", ["commands"]),
        ("def a(effects: object) -> Open: ...", ["effects", "orders"]),
        ("def a(effects: object) -> Attach | None: ...", ["effects", "orders"]),
        ("def a() -> list[RemoteOrder]: ...", ["orders"]),
        ("def a() -> tuple[int, list[Order]]: ...", ["orders"]),
        ("def a() -> Refusals: ...", ["refusals"]),
        ("def a() -> LostError | None: ...", ["refusals"]),
        ("def a() -> Open: ...", []),
        ("def a() -> LostError: ...", []),
        ("def a() -> tuple[Seat, ...]: ...", []),
        ("def a() -> None: raise LostError", []),
    ],
)
def test_each_output_of_a_function_of_control_counts(write: Write, function: str, kinds: list[str]) -> None:
    files = engine(events=EVENTS) | control(group="class Group: pass", leaving=IMPORTS + function)
    source = write(files | {"protocol/errors.py": ERRORS})
    assert list(structure.outputs(source)) == [(kind, "leaving.a") for kind in kinds]
    assert structure.kinds_of_outputs(source) == {f"{kind}: 1 functions": 1 for kind in kinds}
    returned = [kind for kind in kinds if kind in ("orders", "refusals")]
    assert structure.returned_outputs(source) == {f"leaving.a: {kind}": 1 for kind in returned}


def test_only_modules_of_control_count_there(write: Write) -> None:
    function = "def a(effects: object) -> None: ...\n"
    files = engine(events=EVENTS, shard=function) | data(closing=function) | control(registry=function)
    assert list(structure.outputs(write(files))) == [("effects", "registry.a")]


# ── imports ───────────────────────────────────────────────────────────────────────────────────────────


def test_circles_are_found_in_every_package_and_with_imports_for_type_checking_alone(write: Write) -> None:
    checking = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gradserver.worker.session import Session\n"
    )
    source = write(
        {
            "worker/session.py": "from gradserver.worker.standing import Books\nclass Session: pass\n",
            "worker/standing.py": checking,
            "protocol/a.py": "import gradserver.protocol.b\n",
            "protocol/b.py": "def late():\n    from gradserver.protocol import c\n",
            "protocol/c.py": "from gradserver.protocol.a import x\n",
            "gradserver/cli.py": "import gradserver.worker.session\n",
            "gradserver/__init__.py": "from gradserver.cli import main\n",
        }
    )
    assert structure.circles(source) == {
        "gradserver.protocol.a, gradserver.protocol.b, gradserver.protocol.c": 1,
        "gradserver.worker.session, gradserver.worker.standing": 1,
    }


# ── listings of all kinds ─────────────────────────────────────────────────────────────────────────────

NAMES = "ABCDEFGH"
RECORDS = "".join(f"class {name}: pass\n" for name in NAMES) + f"Kind = {' | '.join(NAMES)}\n"
HERE = "gradserver/engine/records.py Kind names 8 of 8"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("TABLE names 6 of 8", "TABLE = (A, B, C, D, E, F)\n"),
        ("TABLE names 6 of 8", "TABLE: object = {A: 1, B: 2, C: 3, D: 4, E: 5, F: 6}\n"),
        ("take() names 6 of 8", "def take(x):\n    match x:\n        case A() | B() | C(1) | D() | E() | F(): pass\n"),
        ("Story.take() names 7 of 8", "class Story:\n    def take(self):\n        return A, B, C, D, E, F, G\n"),
        ("line 2 names 6 of 8", "register(A, B, C, D, E, F)\n"),
    ],
)
def test_each_place_that_names_all_kinds_counts(write: Write, place: str, text: str) -> None:
    files = {"gradserver/ledger/tables.py": f"from gradserver.engine.records import {', '.join(NAMES)}\n{text}"}
    found = structure.listings(write(files | engine(records=RECORDS)), "record")
    assert found == {HERE: 1, f"gradserver/ledger/tables.py {place}": 1}


def test_a_class_of_a_union_stands_for_those_that_derive_from_it(write: Write) -> None:
    names = "ABCDEFG"
    orders = "class Declared: pass\nclass Attach: pass\n" + "".join(f"class {name}(Declared): pass\n" for name in names)
    taken = f"from gradserver.engine.events import {', '.join(names)}, Attach\nTABLE = ({', '.join(names)}, Attach)\n"
    source = write(engine(events=orders + "Order = Declared | Attach\n", shard=taken))
    assert structure.listings(source, "order") == {"gradserver/engine/shard.py TABLE names 8 of 8": 1}


@pytest.mark.parametrize(
    "text",
    [
        "from gradserver.engine.records import A, B, C, D, E, F\n",  # an import alone
        "from gradserver.engine.records import A, B, C, D, E\nTABLE = A, B, C, D, E, A, B\n",  # too few
        "from gradserver.engine.records import Kind\ndef take(x: Kind) -> Kind: ...\n",  # all, without a name
        "from gradserver.engine.events import A, B, C, D, E, F\nTABLE = A, B, C, D, E, F\n",  # other classes
    ],
)
def test_what_does_not_name_all_kinds_does_not_count(write: Write, text: str) -> None:
    files = engine(records=RECORDS, events="class A: pass\n", restoring=text)
    assert structure.listings(write(files), "record") == {HERE: 1}


def test_kinds_may_derive_from_one_class(write: Write) -> None:
    declared = "class Kind: pass\nclass Other: pass\n"
    records = "from gradserver.engine.declared import Kind\n" + "".join(f"class {name}(Kind): pass\n" for name in NAMES)
    table = f"from gradserver.engine.records import {', '.join(NAMES)}\nTABLE = A, B, C, D, E, F\n"
    files = {"gradserver/ledger/tables.py": table} | engine(declared=declared, records=records)
    assert structure.listings(write(files), "record") == {"gradserver/ledger/tables.py TABLE names 6 of 8": 1}


def test_kinds_are_known_by_any_name_and_from_any_module(write: Write) -> None:
    union = "from gradserver.protocol.resuming import C, D, E, F\nclass A: pass\nclass B: pass\n"
    union += "First = A | B | C\nMessage = First | D | E | F\n"
    table = "from gradserver.protocol import messages, resuming\nfrom gradserver.protocol.messages import A as One, C\n"
    table += "TABLE = One, messages.B, C, resuming.D, messages.E, resuming.F\n"
    files = {"protocol/messages.py": union, "protocol/wire.py": table}
    files["protocol/resuming.py"] = "".join(f"class {name}: pass\n" for name in "CDEF")
    files["gradserver/tools/demo/reports.py"] = "Message = int | str\n"  # another one
    assert structure.listings(write(files), "message") == {"protocol/wire.py TABLE names 6 of 6": 1}


def test_a_union_that_is_not_there_is_an_error(write: Write) -> None:
    with pytest.raises(StructureError, match=r"one Order is expected in gradserver\.engine\.\*, there are 0"):
        structure.listings(write(engine(events="Order = 1")), "order")


def test_a_class_from_which_none_derives_is_an_error(write: Write) -> None:
    with pytest.raises(StructureError, match=r"no class derives from gradserver\.engine\.events\.Order"):
        structure.listings(write(engine(events="class Order: pass")), "order")


# ── size, and English ─────────────────────────────────────────────────────────────────────────────────


def test_lines_are_counted_by_package_and_a_long_module_is_named(write: Write) -> None:
    source = write(
        {
            "gradserver/cli.py": "x = 1\n" * 701,
            "gradserver/engine/__init__.py": "x = 1\n" * 700,
            "gradserver/tools/chaos/relay.py": "x = 1\n" * 7,
            "worker/transport/tcp.py": "x = 1\n" * 5,
            "protocol/codecs/base.py": "x = 1\n" * 3,
        }
    )
    assert structure.lines_of_product(source) == {"gradserver": 701, "engine": 700, "worker": 5, "protocol": 3}
    assert structure.lines(source, "tools") == {"gradserver/tools/chaos/relay.py": 7}
    assert structure.long_modules(source) == {"gradserver/cli.py: 701 lines": 1}


def test_logic_has_no_blank_lines_docstrings_comments_or_imports(write: Write) -> None:
    text = '"""One\n\ntwo."""\nimport a\nfrom b import (\n    c,\n)\n\n# why\nX = (\n    1  # one\n)\n'
    text += 'class A:\n    """Docs."""\n    field = 1\n    def f(self):\n        """Docs."""\n'
    assert structure.lines(write({"worker/a.py": text}), "worker") == {"worker/a.py": 6}


def test_words_are_counted_in_docstrings_comments_strings_and_documents(write: Write) -> None:
    text = '"""Who comes."""\nwho = 1  # whoever it is, not Whole\nerror = f"of {who}, whose turn it is"\n# WHO\n'
    files = {"worker/a.py": text, "worker/b.py": "who = whose = 3\n", "README.md": "who, and who\nwhole\n"}
    source = write(files | {"docs/limits.md": "whose\n", "docs/reference/jobs.md": "who\n", "CHANGELOG.md": "who\n"})
    found = structure.words(source, structure.PERSONS)
    assert list(found.items()) == [
        ("worker/a.py", 4),
        ("README.md", 2),
        ("docs/limits.md", 1),
        ("docs/reference/jobs.md", 1),
    ]


def test_docstrings_that_begin_with_such_a_word_are_counted(write: Write) -> None:
    text = '"""What there is."""\nclass A:\n    """\n    Whether."""\n    x: int = 0\n    """Of the group."""\n'
    text += 'def f():\n    """Offer what is due."""\n    return "Who is it?"\n'
    assert structure.openings(write({"protocol/a.py": text})) == {"protocol/a.py": 3}


def test_sentences_that_are_too_long_are_counted_outside_of_tables_and_code(write: Write) -> None:
    words = "word " * 26
    prose = f'"""A {words.strip()}.\n\n- {words}\n\n    {words}\n{"word " * 12}   {words}\n└── {words}\n"""\n'
    source = write({"worker/a.py": prose, "tests/b.py": f'"""{words[5:]}"""\n# {words}\n'})
    assert structure.long_sentences(source) == {"worker/a.py": 2}


def test_comments_and_docstrings_of_tests_are_read_but_no_other_texts(write: Write) -> None:
    source = write({"tests/a.py": '"""Whose."""\nx = "nobody"  # somebody\n'})
    assert structure.words(source, structure.PERSONS) == {"tests/a.py": 2}
    assert structure.openings(source) == {"tests/a.py": 1}


# ── the table, and today's source ─────────────────────────────────────────────────────────────────────


@pytest.mark.long  # `make check` runs it, before the tests wherever changes are merged
def test_todays_source_is_within_all_limits(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([])
    assert status == 0, capsys.readouterr().out


def test_what_got_worse_is_named_with_its_places(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write({"worker/a.py": "x = 1\n" * 701, "worker/b.py": "# he\n"})
    figures = Figure("long modules", structure.long_modules, 0, 0), Figure("docstrings", structure.openings, 0, 0)
    monkeypatch.setattr(structure, "FIGURES", {"Size": figures})
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert main([]) == 1
    told = capsys.readouterr().out
    assert "worker/a.py: 701 lines" in told
    assert "worse: long modules is 1, the limit is 0" in told
    assert "worse: docstrings" not in told


def test_a_figure_that_got_better_asks_for_a_lower_limit() -> None:
    figure = Figure("figure", lambda source: {"a": len(source.modules)}, limit=3, goal=0)
    assert "lower its limit" in Result(figure, {"a": 2}).row()
    assert "lower its limit" not in Result(figure, {"a": 2, "b": 1}).row()
    assert "lower its limit" not in Result(replace(figure, room=1), {"a": 2}).row()
    assert "WORSE" in Result(figure, {"a": 2, "b": 2}).row()


def test_what_has_come_is_told_by_place() -> None:
    figure = Figure("figure", lambda source: {"a": len(source.modules)})
    before = Result(figure, {"a": 2, "b": 1, "c": 1})
    assert Result(figure, {"a": 5, "b": 1, "d": 1}).beyond(before).places == {"a": 3, "d": 1}


def test_the_places_of_figures_can_be_listed(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write({"protocol/a.py": '"""Of b."""\n' + "x = 1\n" * 701})
    figures = Figure("long modules", structure.long_modules), Figure("docstrings", structure.openings)
    monkeypatch.setattr(structure, "FIGURES", {"Size": figures})
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.count("protocol/a.py") == 2
    assert main(["--list", "long"]) == 0
    assert capsys.readouterr().out.count("protocol/a.py") == 1


def test_what_has_come_since_a_revision_is_told(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write({"protocol/a.py": "# whose\n", "protocol/b.py": "# whose\n"})
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q --no-gpg-sign -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    write({"protocol/a.py": "# whose, and whose\n"})
    words = partial(structure.words, which=structure.PERSONS)
    monkeypatch.setattr(structure, "FIGURES", {"English": (Figure("words", words),)})
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert main(["--since", "HEAD"]) == 0
    assert capsys.readouterr().out.endswith("words: 1\n    protocol/a.py\n")
