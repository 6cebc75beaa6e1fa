"""Figures about the structure of the source: ``python -m tests.structure`` prints each with its goal.

The source is read, never imported. Exit status 1 if a figure is worse than its limit; the places that it counts are
printed then. A limit is the figure of the day when it was set: lower it when the figure gets better. Size is counted in
lines of logic: no blank lines, docstrings, comments or imports. `FIGURES` has all limits and goals.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

FOLDERS: Final = {"gradserver": "gradserver", "protocol": "gradserver.protocol", "worker": "gradserver.worker"}
"""Folders of the source, and the package that each is."""
DOCUMENTS: Final = ("README.md", "docs/**/*.md")
TOOLS: Final = ("tools",)
"""Parts of the product that try it out."""

ENGINE: Final = "gradserver.engine."
ERRORS: Final = "gradserver.protocol.errors."
CONTROL: Final = ENGINE + "control."
DATA: Final = ENGINE + "data."
WORKER: Final = "gradserver.worker."
MEMBER: Final = WORKER + "member."

Where = tuple[str, str]
"""Key of a class or a union, wherever its module is: the beginning of the module's name, and its own name."""
GROUP: Final = (CONTROL, "Group")
DATA_GROUP: Final = (DATA, "Group")
EXCHANGE: Final = (DATA, "Exchange")
PARTS: Final[Mapping[str, tuple[Where, ...]]] = {
    **{name.lower(): ((CONTROL, name),) for name in ("Applicants", "Leases", "Plans", "Sessions", "Turns", "Turn")},
    **{name.lower(): ((DATA, name),) for name in ("Exchanges", "Listeners", "Sequences", "Stragglers", "Traffic")},
    **{name.lower(): ((CONTROL, name), (DATA, name)) for name in ("Learners", "Members", "Recovery", "Rounds")},
    "shards": ((CONTROL, "DataShards"),),
    "learner": ((CONTROL, "Learner"),),
    "current": ((DATA, "Round"),),
    "holder": ((DATA, "Holder"),),
}
"""Classes of which groups are made, by the name that a variable or a field of the class has."""
ORGANS: Final[Mapping[str, tuple[Where, ...]]] = {
    **{
        name.lower(): ((MEMBER, name),)
        for name in (
            *("Announced", "Attachment", "Backlog", "Donor", "Effects", "Exchanges", "Identity", "Inquiries"),
            *("Inventory", "Learner", "Leases", "Plans", "Recovery", "Retained", "Rounds", "Slots", "Stragglers"),
            *("Regions", "Turns"),
        )
    },
    "carry": ((MEMBER, "CarryOver"),),
    "queue": ((MEMBER, "SendQueue"),),
}
"""Classes of which a worker's member is made, by the name that a variable or a field of the class has."""
STATES: Final[Mapping[str, tuple[Where, ...]]] = {
    "group": (GROUP, DATA_GROUP),
    "exchange": (EXCHANGE,),
    **{name: (*PARTS.get(name, ()), *ORGANS.get(name, ())) for name in (*PARTS, *ORGANS)},
}
"""Classes of state, by the name that a variable or a field of the class has."""
MUTATORS: Final = frozenset(
    {
        *("append", "appendleft", "add", "insert", "extend", "extendleft", "update", "setdefault", "subtract"),
        *("pop", "popitem", "popleft", "remove", "discard", "clear", "difference_update", "intersection_update"),
        *("sort", "reverse"),
    }
)
"""Methods by which a list, deque, set, dict or counter changes."""
FAMILIES: Final[Mapping[str, Where]] = {
    "record": (ENGINE, "Kind"),
    "message": ("gradserver.protocol.", "Message"),
    "order": (ENGINE, "Order"),
    "report": (ENGINE, "Report"),
}
"""The union of all kinds of each, or the class from which they derive."""
MANY: Final = 6
"""A place that names as many kinds names every kind by hand."""
MAX_LINES: Final = 700
"""Lines of a module, at most."""
PERSONS: Final = ("who", "whoever", "whom", "whose", "somebody", "nobody", "everybody", "someone")
ALLOWED: Final = {"member whose buffers are sent": "the name of a bucket's component, which is part of the plan's hash"}
"""Texts that are not counted, with the reason of each."""
MAX_WORDS: Final = 25
"""Words of a sentence, at most."""
MASCULINE: Final = ("he", "him", "his")
OPENINGS: Final = ("What", "Whether", "Who", "Whoever", "Of", "Those", "Whom", "Whose", "How", "Why", "When", "Where")
"""First words of docstrings that begin with neither a verb nor a noun."""

Places = Mapping[str, int]
"""Places that a figure counts, and how often each counts."""


class StructureError(Exception):
    """The source has not what a figure is about: the tables of this module are to follow the source."""


# ── the source ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Module:
    """One module: its name as it is imported, the path of its file, and its text."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, str]:
        """Names that are imported, anywhere, and what each stands for."""
        found = dict[str, str]()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            elif isinstance(node, ast.Import):
                found |= {one.asname: one.name for one in node.names if one.asname}
        return found

    @cached_property
    def imported(self) -> frozenset[str]:
        """Everything that import statements name, modules and what is in them."""
        plain = (one.name for node in self.nodes if isinstance(node, ast.Import) for one in node.names)
        return frozenset([*self.imports.values(), *plain])

    @cached_property
    def assigned(self) -> dict[str, ast.expr]:
        """Values that are assigned to names at the top."""
        return {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes at the top."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def logic(self) -> int:
        """Lines of logic: neither blank lines nor docstrings, comments or imports."""
        skipped: list[ast.stmt] = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped += [first for node in self.nodes if (first := _docstring(node))]
        left_out = {line for node in skipped for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        lines = ((number, line.strip()) for number, line in enumerate(self.text.splitlines(), 1))
        return sum(1 for number, line in lines if line and not line.startswith("#") and number not in left_out)

    @cached_property
    def strings(self) -> list[str]:
        """All string literals: docstrings, too."""
        return [node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

    @cached_property
    def comments(self) -> list[str]:
        """All comments."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token.string for token in tokens if token.type == tokenize.COMMENT]

    @cached_property
    def docstrings(self) -> list[str]:
        """Strings that stand by themselves: of modules, classes, functions, and of fields."""
        statements = (node.value for node in self.nodes if isinstance(node, ast.Expr))
        return [one.value for one in statements if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _docstring(node: ast.AST) -> ast.stmt | None:
    """Return the docstring of a module, class or function; None for another node."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return node.body[0] if ast.get_docstring(node, clean=False) is not None else None


class Source:
    """All modules by name, and all documents by path."""

    def __init__(self, root: Path) -> None:
        read = [module for folder, package in FOLDERS.items() for module in _modules(root, folder, package)]
        self.modules: Final = {module.name: module for module in read}
        self.tests: Final = tuple(_modules(root, "tests", "tests"))
        found = sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))
        self.documents: Final = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in found}

    def engine(self) -> Iterator[Module]:
        """Modules of the engine."""
        return (module for name, module in self.modules.items() if name.startswith(ENGINE))

    def origin(self, name: str) -> str:
        """Follow a full name through imports, to where it is defined."""
        module, _, last = name.rpartition(".")
        known = self.modules.get(module)
        if known is None or last not in known.imports or known.imports[last] == name:
            return name
        return self.origin(known.imports[last])

    def full_name(self, module: Module, expression: ast.AST) -> str:
        """Name what an expression like ``records.Group`` stands for; empty if it is no name."""
        match expression:
            case ast.Name(id=name):
                return self.origin(module.imports.get(name, f"{module.name}.{name}"))
            case ast.Attribute(value=value, attr=name) if owner := self.full_name(module, value):
                return self.origin(f"{owner}.{name}")
        return ""

    def named(self, module: Module, tree: ast.AST) -> set[str]:
        """Full names of all that ``tree`` names. Aliases stand for what they name."""
        found = set[str]()
        for node in ast.walk(tree):
            if name := self.full_name(module, node):
                found |= self.leaves(name)
        return found

    def leaves(self, name: str) -> set[str]:
        """Take a union or another alias of types apart; a class stands for itself."""
        module, _, last = name.rpartition(".")
        known = self.modules.get(module)
        if known is None or not isinstance(known.assigned.get(last), ast.BinOp | ast.Subscript):
            return {name}
        return self.named(known, known.assigned[last])

    def unions(self, where: Where) -> set[str]:
        """Full names of unions of types."""
        beginning, last = where
        found = {name for name, module in self.modules.items() if isinstance(module.assigned.get(last), ast.BinOp)}
        return {f"{name}.{last}" for name in found if name.startswith(beginning)}

    def classes(self, where: Where) -> dict[str, ast.ClassDef]:
        """Classes by full name."""
        beginning, last = where
        modules = (module for name, module in self.modules.items() if name.startswith(beginning))
        return {f"{module.name}.{last}": module.classes[last] for module in modules if last in module.classes}

    def kinds(self, family: str) -> set[str]:
        """Classes of a family. In place of a class from which others derive it has these."""
        found = set[str]()
        for base in self.bases(family):
            found |= self.derived(base) or {base}
        return found

    def bases(self, family: str) -> set[str]:
        """Classes in the union of a family, or else the class from which all of it derive."""
        where = FAMILIES[family]
        if unions := self.unions(where):
            return self.leaves(_single(where, unions))
        base = _single(where, self.classes(where))
        if not self.derived(base):
            raise StructureError(f"no class derives from {base}")
        return {base}

    def derived(self, base: str) -> set[str]:
        """Classes that derive from a class."""
        return {
            f"{module.name}.{name}"
            for module in self.modules.values()
            for name, made in module.classes.items()
            if any(self.full_name(module, one) == base for one in made.bases)
        }


def _single(where: Where, found: Iterable[str]) -> str:
    names = sorted(found)
    if len(names) != 1:
        raise StructureError(f"one {where[1]} is expected in {where[0]}*, there are {len(names)}: {', '.join(names)}")
    return names[0]


def _modules(root: Path, folder: str, package: str) -> Iterator[Module]:
    for path in sorted((root / folder).rglob("*.py")):
        inside = path.relative_to(root / folder).with_suffix("").parts
        name = ".".join([package, *inside]).removesuffix(".__init__")
        yield Module(name, path.relative_to(root).as_posix(), path.read_text("utf-8"))


# ── writes ────────────────────────────────────────────────────────────────────────────────────────────


class Writes(ast.NodeVisitor):
    """Collects fields of classes of state that one module writes, as (class, field).

    A write is an assignment to the field or to an item of it, `del` of these, or a call that changes it.
    What is written is told by annotations of parameters, then by the variable's name.
    """

    def __init__(self, source: Source, module: Module) -> None:
        self.found: set[tuple[str, str]] = set()
        self._source = source
        self._module = module
        self._parameters: list[dict[str, set[str]]] = []
        self.visit(module.tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Know the parameters of a function while it is read."""
        annotated = {one.arg: one.annotation for one in _parameters(node) if one.annotation}
        self._parameters.append({name: self._classes(annotation) for name, annotation in annotated.items()})
        self.generic_visit(node)
        self._parameters.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """See `x.field = …` and `del x.field`."""
        if not isinstance(node.ctx, ast.Load):
            self._write(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """See `x.field[…] = …` and `del x.field[…]`."""
        if not isinstance(node.ctx, ast.Load):
            self._write(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """See `x.field.append(…)`."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            self._write(node.func.value)
        self.generic_visit(node)

    def _write(self, target: ast.expr) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and (state := self._state(target.value)):
            self.found.add((state, target.attr))

    def _state(self, owner: ast.expr) -> str:
        """Tell which class of state ``owner`` is of; empty if of none."""
        match owner:
            case ast.Name(id=name):
                known = next((one[name] for one in reversed(self._parameters) if name in one), None)
                return self._by_name(name) if known is None else _only(known & self._states())
            case ast.Attribute(attr=name):
                return self._by_name(name.lstrip("_"))
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._by_name(name.removesuffix("s"))
        return ""

    def _by_name(self, name: str) -> str:
        """Tell the class by a variable's name. Of several it is the one that the module imports, or that is near it."""
        candidates = self._states(name)
        names = {state.rpartition(".")[2] for state in candidates}
        imported = {self._source.origin(one) for one in self._module.imports.values()}
        package = self._module.name.rpartition(".")[0] + "."
        if same := {one for one in imported if one.rpartition(".")[2] in names}:
            return _only(same & candidates)
        return _only({state for state in candidates if state.startswith(package)})

    def _states(self, variable: str | None = None) -> set[str]:
        every = (where for name, states in STATES.items() if variable in (None, name) for where in states)
        return {state for where in every for state in self._source.classes(where)}

    def _classes(self, annotation: ast.expr) -> set[str]:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        return self._source.named(self._module, annotation)


def _only(found: set[str]) -> str:
    return next(iter(found)) if len(found) == 1 else ""


def written_outside(source: Source, where: Where) -> Places:
    """Fields of a class of state that other modules of the engine, or of the worker, write."""
    classes = source.classes(where)
    state = _single(where, classes)
    body = classes[state].body
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    targets = (node for node in ast.walk(classes[state]) if isinstance(node, ast.Attribute))
    fields |= {one.attr for one in targets if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"}
    writers: dict[str, list[str]] = {}
    for module, found in _written(source).items():
        for _, field in sorted(one for one in found if one[0] == state and not state.startswith(module + ".")):
            writers.setdefault(field, []).append(module.removeprefix(ENGINE))
    most_first = sorted(fields & writers.keys(), key=lambda field: (-len(writers[field]), field))
    return {f"{field}: {', '.join(writers[field])}": 1 for field in most_first}


def parts_written_outside(source: Source, parts: Mapping[str, tuple[Where, ...]]) -> Places:
    """Fields of the parts of groups, or of a member, that other modules write."""
    classes = {where for found in parts.values() for where in found}
    return {
        f"{where[1]}.{place}": count
        for where in sorted(classes)
        for place, count in written_outside(source, where).items()
    }


@cache
def _written(source: Source) -> dict[str, set[tuple[str, str]]]:
    modules = (module for name, module in source.modules.items() if name.startswith((ENGINE, WORKER)))
    return {module.name: Writes(source, module).found for module in modules}


# ── outputs of control ────────────────────────────────────────────────────────────────────────────────


def outputs(source: Source) -> Iterator[tuple[str, str]]:
    """Outputs of functions of control, as (kind, function): what it leads to that is to be carried out.

    There are four kinds: a function adds to ``effects`` that it takes, or to ``commands``; it returns orders; or it
    returns refusals, which are errors that a peer is to be told of. An error that is raised is none of these: it
    concerns the message's sender alone. A function without effects may build one order or one error.
    """
    orders = source.kinds("order") | source.bases("order")
    for module in source.engine():
        if module.name.startswith(CONTROL):
            functions = (node for node in module.nodes if isinstance(node, ast.FunctionDef))
            for node in functions:
                name = f"{module.name.removeprefix(CONTROL)}.{node.name}"
                yield from ((kind, name) for kind in _outputs(source, module, node, orders))


def _outputs(source: Source, module: Module, node: ast.FunctionDef, orders: set[str]) -> Iterator[str]:
    taken = [one.arg for one in _parameters(node) if one.arg in ("effects", "commands")]
    yield from taken
    returned = source.named(module, node.returns) if node.returns else set()
    builds_one = not taken and node.returns is not None and returned == {source.full_name(module, node.returns)}
    if not builds_one and returned & orders:
        yield "orders"
    if not builds_one and any(one.startswith(ERRORS) for one in returned):
        yield "refusals"


def _parameters(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def kinds_of_outputs(source: Source) -> Places:
    """Kinds of outputs that functions of control have."""
    return {f"{kind}: {count} functions": 1 for kind, count in Counter(kind for kind, _ in outputs(source)).items()}


def returned_outputs(source: Source) -> Places:
    """Functions of control that return orders or refusals."""
    return {f"{name}: {kind}": 1 for kind, name in outputs(source) if kind in ("orders", "refusals")}


# ── imports ───────────────────────────────────────────────────────────────────────────────────────────


def circles(source: Source) -> Places:
    """Circles of imports: modules that all reach each other. Imports for type checking alone count, too."""
    direct = {name: _imported_modules(source, module) for name, module in source.modules.items()}
    reached = {name: _reachable(direct, name) for name in direct}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in direct}
    return {", ".join(sorted(circle)): 1 for circle in sorted(found, key=sorted) if len(circle) > 1}


def _imported_modules(source: Source, module: Module) -> set[str]:
    """Modules that a module names. What is no module itself stands for the module that it is in."""
    named = (one if one in source.modules else one.rpartition(".")[0] for one in module.imported)
    return {name for name in named if name in source.modules and name != module.name}


def _reachable(direct: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        new = [name for name in direct[todo.pop()] if name not in found]
        found.update(new)
        todo += new
    return found


# ── listings of all kinds ─────────────────────────────────────────────────────────────────────────────


def listings(source: Source, family: str) -> Places:
    """Places that name every kind of a family by hand: functions, and statements outside of these.

    Import statements are none: they follow from the other places.
    """
    kinds = source.kinds(family)
    named = {place: len(kinds & names) for place, names in _pieces(source).items()}
    return {f"{place} names {count} of {len(kinds)}": 1 for place, count in named.items() if count >= MANY}


@cache
def _pieces(source: Source) -> dict[str, set[str]]:
    """Full names that stand in each place of the source. An alias stands for itself."""
    return {
        f"{module.path} {name}": {source.full_name(module, node) for node in ast.walk(piece)}
        for module in source.modules.values()
        for name, piece in _pieces_of(module.tree.body)
    }


def _pieces_of(body: Iterable[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions as a whole, and statements outside of functions, by name."""
    for node in body:
        match node:
            case ast.ClassDef(name=name):
                yield from _pieces_of(node.body, f"{owner}{name}.")
            case ast.FunctionDef(name=name):
                yield f"{owner}{name}()", node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{owner}{name}", node
            case _:
                yield f"{owner}line {node.lineno}", node


# ── size ──────────────────────────────────────────────────────────────────────────────────────────────


def lines(source: Source, package: str) -> Places:
    """Logic of the modules of a package; ``gradserver`` is what belongs to no other package."""
    return {m.path: m.logic for m in source.modules.values() if _package(m) == package}


def lines_of_product(source: Source) -> Places:
    """Logic of all packages but the tools."""
    sizes = Counter[str]()
    for module in source.modules.values():
        sizes[_package(module)] += module.logic
    return {package: count for package, count in sizes.items() if package not in TOOLS}


def long_modules(source: Source) -> Places:
    """Modules that are longer than a module may be."""
    sizes = Counter({module.path: module.text.count("\n") for module in source.modules.values()})
    return {f"{path}: {count} lines": 1 for path, count in sizes.most_common() if count > MAX_LINES}


def _package(module: Module) -> str:
    parts = module.path.split("/")
    return parts[1] if parts[0] == "gradserver" and len(parts) > 2 else parts[0]


# ── English ───────────────────────────────────────────────────────────────────────────────────────────


def words(source: Source, which: Iterable[str]) -> Places:
    """Words in docstrings, comments, string literals, and in documents. Literals of tests may be anything."""
    pattern = re.compile(rf"\b(?:{'|'.join(which)})\b", re.IGNORECASE)
    texts = {
        module.path: [text for text in (*module.strings, *module.comments) if text not in ALLOWED]
        for module in source.modules.values()
    }
    texts |= {module.path: [*module.docstrings, *module.comments] for module in source.tests}
    texts |= {path: [text] for path, text in source.documents.items()}
    return _most_first({path: sum(len(pattern.findall(text)) for text in found) for path, found in texts.items()})


def openings(source: Source) -> Places:
    """Docstrings that begin with neither a verb nor a noun."""
    pattern = re.compile(rf"\s*(?:{'|'.join(OPENINGS)})\b")
    modules = (*source.modules.values(), *source.tests)
    return _most_first({m.path: sum(bool(pattern.match(text)) for text in m.docstrings) for m in modules})


def long_sentences(source: Source) -> Places:
    """Sentences of docstrings that have too many words. Tables, drawings and code do not count."""
    counts = Counter[str]()
    for module in (*source.modules.values(), *source.tests):
        sentences = (one for text in module.docstrings for one in _sentences(text))
        counts[module.path] = sum(len(one.split()) > MAX_WORDS for one in sentences)
    return _most_first(counts)


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring: of each paragraph, and of each item of a list."""
    prose = re.sub(r"^(?: |[│├└─]|.*\S {3,}\S|.* {2,}[│├└─]).*$", "", inspect.cleandoc(text), flags=re.MULTILINE)
    for piece in re.split(r"\n\s*\n|^[-*|] ", prose, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.:;?!])\s", piece)


def _most_first(counts: Mapping[str, int]) -> Places:
    return {place: count for place, count in Counter(counts).most_common() if count}


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Figure:
    """One figure: how it is counted, what it is not to exceed, and what it is to come to. Less is better.

    A limit that exceeds the figure by ``room`` or less need not be lowered.
    """

    what: str
    count: Callable[[Source], Places]
    limit: int | None = None
    goal: int | None = None
    room: int = 0


FIGURES: Final = {
    "Fields that other modules write": (
        Figure("control's Group", partial(written_outside, where=GROUP), 0, 0),
        Figure("data's Group", partial(written_outside, where=DATA_GROUP), 0, 0),
        Figure("parts of groups", partial(parts_written_outside, parts=PARTS), 0, 0),
        Figure("parts of a member", partial(parts_written_outside, parts=ORGANS), 0, 0),
        Figure("Exchange", partial(written_outside, where=EXCHANGE), 0, 0),
    ),
    "Outputs of control's functions": (
        Figure("kinds of outputs", kinds_of_outputs, 1, 1),
        Figure("functions that return orders or refusals", returned_outputs, 0, 0),
    ),
    "Imports": (Figure("circles", circles, 0, 0),),
    "Places that name every kind by hand": (
        Figure("records of the journal", partial(listings, family="record"), 2, 1),
        # Each receiver has a table of what it does with a message: control, a data shard, the server, a member.
        Figure("messages", partial(listings, family="message"), 4, 4),
        Figure("orders", partial(listings, family="order"), 1, 1),
        Figure("reports", partial(listings, family="report"), 1, 1),
    ),
    "Lines of logic": (
        *(
            Figure(package, partial(lines, package=package))
            for package in ("engine", "transport", "ledger", "gradserver", "worker", "protocol", *TOOLS)
        ),
        Figure(f"all but {', '.join(TOOLS)}", lines_of_product, 41_700, 27_000, room=6000),
        Figure(f"modules of more than {MAX_LINES} lines", long_modules, 0, 0),
    ),
    "English": (
        Figure(f"{', '.join(PERSONS[:4])}, … (people may be it)", partial(words, which=PERSONS), 0, 0),
        Figure(f"{', '.join(MASCULINE)}", partial(words, which=MASCULINE), 0, 0),
        Figure(f"docstrings that begin with {', '.join(OPENINGS[:3])}, …", openings, 0, 0),
        Figure(f"sentences of more than {MAX_WORDS} words in docstrings", long_sentences, 0, 0),
    ),
}


@dataclass(frozen=True)
class Result:
    """A figure as it is in the source."""

    figure: Figure
    places: Places

    @property
    def value(self) -> int:
        """The figure itself."""
        return sum(self.places.values())

    @property
    def is_worse(self) -> bool:
        """True if it exceeds its limit."""
        return self.figure.limit is not None and self.value > self.figure.limit

    def row(self) -> str:
        """One line of the table."""
        limit, goal = self.figure.limit, self.figure.goal
        is_better = limit is not None and self.value + self.figure.room < limit
        remark = "  WORSE" if self.is_worse else "  lower its limit" if is_better else ""
        return f"  {self.figure.what:<52}{self.value:>8,}{_shown(limit):>8}{_shown(goal):>8}{remark}"

    def listing(self) -> str:
        """All places, one in each line."""
        counted = self.value > len(self.places)
        counts = (f"{count:>8,}  {place}" if counted else f"    {place}" for place, count in self.places.items())
        return "\n".join([f"\n{self.figure.what}: {self.value:,}", *counts])

    def beyond(self, before: Result) -> Result:
        """Places that count more often than they did ``before``."""
        more = {place: count - before.places.get(place, 0) for place, count in self.places.items()}
        return Result(self.figure, {place: count for place, count in more.items() if count > 0})


def _shown(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def measure(source: Source) -> list[Result]:
    """Count every figure."""
    return [Result(figure, figure.count(source)) for figures in FIGURES.values() for figure in figures]


def table(results: Iterable[Result]) -> str:
    """All figures under their headings, for people."""
    by_figure = {result.figure: result for result in results}
    rows = [f"{'':<54}{'now':>8}{'limit':>8}{'goal':>8}"]
    for heading, figures in FIGURES.items():
        rows += [heading, *(by_figure[figure].row() for figure in figures)]
    return "\n".join(rows)


def at(revision: str) -> Source:
    """The source as it was in a revision of the repository."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        return Source(Path(folder))


def main(arguments: list[str]) -> int:
    """Print the table; 1 if something got worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--list", metavar="TEXT", nargs="?", const="", help="print the places of figures (with TEXT)")
    parser.add_argument("--since", metavar="REVISION", help="print places that have come since a revision")
    options = parser.parse_args(arguments)
    results = measure(Source(ROOT))
    worse = [result for result in results if result.is_worse]
    print(table(results))
    if options.since:
        before = measure(at(options.since))
        listed = [result.beyond(earlier) for result, earlier in zip(results, before, strict=True)]
    elif options.list is not None:
        listed = [result for result in results if options.list.lower() in result.figure.what.lower()]
    else:
        listed = worse
    print("\n".join(result.listing() for result in listed if result.places))
    for result in worse:
        print(f"\nworse: {result.figure.what} is {result.value:,}, the limit is {result.figure.limit:,}")
    if worse and not options.since:
        print("\n`python -m tests.structure --since REVISION` tells what has come since then")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
