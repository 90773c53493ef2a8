"""YAML text to trees of scalars, sequences and mappings that know their lines.

Rule 1: whatever the text is, the only exception is `YamlError`, and it names a line.
Rule 2: nothing is converted. A scalar keeps its text and says what YAML 1.1 would make of it, so that `no`, `010` and `1:30`
are seen for the traps they are by whoever wants text or a number.
Rule 3: a tree is never larger or deeper than the bounds, counted with every alias written out. So whoever walks it needs no
bounds of his own, and nine lines of aliases to aliases are refused instead of becoming a billion nodes.

Why not PyYAML's composer: it recurses as deep as the text nests, takes an alias to a node that is not finished (a loop), and
keeps the last of two equal keys in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import yaml

# A policy of ten thousand names has some forty thousand nodes; the deepest field of a policy, in a List, is at depth 13.
NODES_MAX = 400_000
DEPTH_MAX = 40
EVENTS_MAX = 2 * NODES_MAX  # a collection has a begin and an end

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is twenty times as fast; wheels without it exist
_RESOLVER = yaml.resolver.Resolver()
_STANDARD = "tag:yaml.org,2002:"
_KINDS = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "a truth value",
    "null": "nothing",
    "timestamp": "a date",
    "merge": "a merge key",
    "value": "a default key",
}
TOO_DEEP = f"this is nested more than {DEPTH_MAX} deep; no policy is"


class YamlError(Exception):
    """The text is no YAML, or more than anybody needs; message is a sentence with the remedy."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        self.message = message
        super().__init__(f"line {line}: {message}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """kind: what YAML 1.1 takes the text for, in words of `_KINDS`; quoted, it is text."""

    line: int
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Sequence:
    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys may repeat: who reads it says so."""

    line: int
    entries: tuple[tuple[Scalar, Node], ...]


Node = Scalar | Sequence | Mapping


def read_documents(text: str) -> list[Node]:
    """The documents that are not empty; raises `YamlError`."""
    try:
        documents = list(_compose(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _explained(text, 0 if mark is None else mark.line, error) from error
    except yaml.YAMLError as error:
        raise YamlError(1, f"this is no YAML: {' '.join(str(error).split())}") from error
    return [document for document in documents if not (isinstance(document, Scalar) and document.kind == "nothing")]


def _explained(text: str, line: int, error: yaml.MarkedYAMLError) -> YamlError:
    """The parser's words are about tokens; the usual causes have better ones."""
    lines = text.split("\n")
    wrong = lines[line] if line < len(lines) else ""
    if "\t" in wrong[: len(wrong) - len(wrong.lstrip())]:
        return YamlError(line + 1, "YAML does not allow a tab as indentation; use spaces")
    if error.context is not None and "alias" in error.context:
        return YamlError(line + 1, 'a value that begins with * must stand in quotes, such as "*.example.com"')
    if error.context is not None and "flow level" in error.context:
        return YamlError(line + 1, TOO_DEEP)  # the parser has a bound of its own, far above ours
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return YamlError(
        line + 1, f"this is no YAML: {said}; look at the indentation, brackets and quotes here and in the line before"
    )


class _Built(NamedTuple):
    """A finished node and what it would be with its aliases written out."""

    node: Node
    nodes: int
    depth: int


@dataclass(slots=True)
class _Open:
    """A collection whose end has not come yet."""

    is_mapping: bool
    line: int
    anchor: str | None
    children: list[_Built] = field(default_factory=list)


def _compose(text: str) -> Iterator[Node]:
    finished: dict[str, _Built] = {}
    stack: list[_Open] = []
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        if count > EVENTS_MAX:
            raise YamlError(line, f"the file has more than {NODES_MAX} values; split it")
        if isinstance(event, yaml.DocumentStartEvent):
            finished = {}
        elif isinstance(event, yaml.CollectionStartEvent):
            _refuse_explicit_kind(event.tag, line)
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent), line, event.anchor))
            if len(stack) > DEPTH_MAX:
                raise YamlError(line, TOO_DEEP)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in finished:
                raise YamlError(
                    line, f"there is no anchor &{event.anchor} before *{event.anchor}; text that begins with * needs quotes"
                )
            yield from _placed(finished[event.anchor], stack)
        elif isinstance(event, yaml.ScalarEvent):
            _refuse_explicit_kind(event.tag, line)
            built = _Built(Scalar(line, event.value, _kind(event)), 1, 1)
            if event.anchor is not None:
                finished[event.anchor] = built
            yield from _placed(built, stack)
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = stack.pop()
            built = _closed(ended)
            if ended.anchor is not None:
                finished[ended.anchor] = built
            yield from _placed(built, stack)


def _placed(built: _Built, stack: list[_Open]) -> Iterator[Node]:
    """Into the innermost open collection; a node that is in none is a document."""
    if stack:
        stack[-1].children.append(built)
    else:
        yield built.node


def _closed(ended: _Open) -> _Built:
    nodes = 1 + sum(child.nodes for child in ended.children)
    depth = 1 + max((child.depth for child in ended.children), default=0)
    if nodes > NODES_MAX or depth > DEPTH_MAX:
        raise YamlError(ended.line, f"with its aliases written out this has more than {NODES_MAX} values; split the file")
    children = [child.node for child in ended.children]
    if not ended.is_mapping:
        return _Built(Sequence(ended.line, tuple(children)), nodes, depth)
    keys = children[::2]
    if not _are_scalars(keys):
        raise YamlError(ended.line, "a key is a list or a mapping here; a key is text")
    return _Built(Mapping(ended.line, tuple(zip(keys, children[1::2], strict=True))), nodes, depth)


def _are_scalars(nodes: list[Node]) -> TypeGuard[list[Scalar]]:
    return all(isinstance(node, Scalar) for node in nodes)


def _refuse_explicit_kind(kind: str | None, line: int) -> None:
    if kind is not None:
        raise YamlError(line, f"{kind} is not taken here; write the value without it, in quotes if it is text")


def _kind(event: yaml.ScalarEvent) -> str:
    if not event.implicit[0]:
        return "text"
    resolved: str = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))  # type: ignore[no-untyped-call]
    return _KINDS.get(resolved.removeprefix(_STANDARD), "text")


# YAML 1.2 5.1, without the byte order mark and without the line breaks that editors do not count (all but \n). For most of the
# others the C parser gives no line.
_UNPRINTABLE = re.compile("[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def line_of_unprintable(text: str) -> int | None:
    """Line of the first character that no text file has, or None."""
    found = _UNPRINTABLE.search(text)
    return None if found is None else text.count("\n", 0, found.start()) + 1
