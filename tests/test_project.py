"""What can be checked by machine about the project itself: the walls, the words, the promises of its documents.

Everything else of style is for readers to judge.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

# What the core may import: the language's own data structures and arithmetic, and of other people's code only what computes.
# No clock, no randomness, no operating system; of two modules that have more, these parts.
PURE_MODULES = frozenset({
    "__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "errno", "functools",
    "hashlib", "heapq", "idna", "ipaddress", "itertools", "math", "operator", "re", "sortedcontainers", "string", "struct",
    "types", "typing",
})  # fmt: skip
PURE_PARTS = {"socket": re.compile(r"inet_(ntop|pton)|AF_INET6?|IPPROTO_\w+"), "os": re.compile(r"strerror")}
PURE_OF_AGENT = re.compile(
    r"agent\.core(\.\w+)*|agent\.dns\.(clamping|messages|removal|wire)\b.*|agent\.datapath\.(abi|model)\b.*"
)
PURE_FILES = (
    "agent/core/*.py", "agent/dns/clamping.py", "agent/dns/messages.py", "agent/dns/removal.py", "agent/dns/wire.py",
    "agent/datapath/abi.py", "agent/datapath/model.py",
)  # fmt: skip

FORBIDDEN_WORDS = frozenset(("pod", "acl", "ipmap", "tag", "util", "helper", "misc"))


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), relative(path))


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


# --- walls -----------------------------------------------------------------------------------------------------------


def is_pure(name: str) -> bool:
    """May the core import this? A module of which only parts are pure may be imported whole; its uses are judged then."""
    module, _, part = name.partition(".")
    if module == "agent":
        return PURE_OF_AGENT.fullmatch(name) is not None
    if module in PURE_PARTS:
        return not part or PURE_PARTS[module].fullmatch(part) is not None
    return module in PURE_MODULES


def impurities(module: ast.Module) -> list[str]:
    found = [f"line {line}: imports {name}" for line, name in imports(module) if not is_pure(name)]
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PURE_PARTS:
            if not is_pure(f"{node.value.id}.{node.attr}"):
                found.append(f"line {node.lineno}: uses {node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("open", "input", "print", "__import__", "exec", "eval"):
                found.append(f"line {node.lineno}: calls {node.func.id}")
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
            found.append(f"line {node.lineno}: is asynchronous")
    return found


@pytest.mark.parametrize("path", files(*PURE_FILES), ids=relative)
def test_the_core_is_pure(path: Path) -> None:
    """No clock, socket, randomness, bcc, pyroute2 or asyncio: what the core does follows from its events alone."""
    assert impurities(tree(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "from time import monotonic",
        "from agent.dns import sockets",
        "import agent.dns.upstreams",
        "def f():\n    import random",
        "import socket\nsocket.socket()",
        "from socket import create_connection",
        "async def f(): pass",
        "open('x')",
    ],
)
def test_the_check_of_purity_sees(code: str) -> None:
    assert impurities(ast.parse(code)) != []


def test_bcc_has_one_importer() -> None:
    """BCC brings a compiler of 140 MiB into the process that imports it: one module does, in a child."""
    importers = {
        relative(path)
        for path in files("agent/**/*.py", "tests/**/*.py", "scripts/**/*.py")
        if any(name.split(".")[0] == "bcc" for _, name in imports(tree(path)))
    }
    assert importers == {"agent/datapath/loader.py"}


# --- words -----------------------------------------------------------------------------------------------------------


def words(identifier: str) -> list[str]:
    """lower_case and CamelHumps taken apart; an HTTPServer is an http server. Plurals count as the word."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)
    return [part.lower() for part in parts]


def forbidden(identifier: str) -> bool:
    return any(word in FORBIDDEN_WORDS or word.removesuffix("s") in FORBIDDEN_WORDS for word in words(identifier))


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that this code gives; names that it only uses are other people's."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield 0, node.asname
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name


@pytest.mark.parametrize("path", files("agent/**/*.py", "tests/**/*.py", "scripts/**/*.py"), ids=relative)
def test_python_uses_the_glossary(path: Path) -> None:
    """Words that mean something else here, or nothing at all, name nothing: not a file, not an identifier."""
    assert not forbidden(path.stem)
    assert [f"line {line}: {name}" for line, name in identifiers(tree(path)) if forbidden(name)] == []


@pytest.mark.parametrize("path", files("bpf/*.[ch]", "tests/**/*.[ch]"), ids=relative)
def test_c_uses_the_glossary(path: Path) -> None:
    """The same for C; comments and strings may speak freely."""
    code = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|#include[^\n]*', " ", path.read_text(), flags=re.DOTALL)
    # Words of the kernel and of C itself.
    ours = {name for name in re.findall(r"[A-Za-z_]\w*", code) if not name.startswith(("__", "skb", "BPF_", "bpf_"))}
    assert sorted(name for name in ours if forbidden(name)) == []


@pytest.mark.parametrize(("identifier", "is_forbidden"), [
    ("advantage", False), ("stage", False), ("Oracle", False), ("podium", False), ("utility", False), ("staged_rows", False),
    ("helper", True), ("make_helpers", True), ("PodName", True), ("HTTPTag", True), ("_misc", True), ("row_tags", True),
])  # fmt: skip
def test_words_are_taken_apart(identifier: str, is_forbidden: bool) -> None:
    assert forbidden(identifier) == is_forbidden


# --- promises of the documents and of the packaging ------------------------------------------------------------------


def test_commands_of_the_readme_exist() -> None:
    """Every scripts/… command that the README shows is an executable file of the checkout."""
    shown = set(re.findall(r"(?<![\w/.-])(scripts/[\w-]+)", (ROOT / "README.md").read_text()))
    assert {"scripts/demo", "scripts/test"} <= shown
    assert [command for command in sorted(shown) if not os.access(ROOT / command, os.X_OK)] == []


def figure() -> list[str]:
    """The nouns of the figure in ARCHITECTURE.md: the text in square brackets inside the block that opens with ```figure."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    block = re.search(r"^```figure\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None, "docs/ARCHITECTURE.md has no block that opens with ```figure"
    return re.findall(r"\[\s*([^\]]+?)\s*\]", block[1])


def test_every_noun_of_the_figure_is_in_the_code() -> None:
    """A box of the figure, [name manager], is a module or a class (NameManager) of the agent, or a file of bpf/."""
    nouns = figure()
    assert len(nouns) >= 10, "boxes of the figure are written in square brackets: [DNS cache]"
    known = {path.stem.lower() for path in files("bpf/*.[ch]")}
    for path in files("agent/**/*.py"):
        known.add((path.parent if path.stem == "__init__" else path).stem.lower())
        known |= {node.name.lower() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    known |= {name.replace("_", "") for name in known}
    assert [noun for noun in nouns if re.sub(r"[\s_-]", "", noun).lower() not in known] == []


def project() -> dict[str, object]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def requirements() -> list[Requirement]:
    table = project()
    dependencies, extras = table["dependencies"], table["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(extras, dict)
    return [Requirement(text) for text in [*dependencies, *(each for extra in extras.values() for each in extra)]]


def test_the_lock_holds_what_the_project_asks_for() -> None:
    """Each dependency has a lower bound, and the lock has a version of it that the bound allows."""
    lines = (line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#"))
    locked = dict(line.split("==") for line in lines)
    versions = {name.lower().replace("_", "-"): version for name, version in locked.items()}
    for requirement in requirements():
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), requirement
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_bcc_is_never_asked_of_the_package_index() -> None:
    """What is called bcc there is another project; ours is the distribution's python3-bpfcc."""
    assert "bcc" not in {requirement.name.lower() for requirement in requirements()}
    assert "python3-bpfcc" in (ROOT / "scripts" / "setup").read_text()
