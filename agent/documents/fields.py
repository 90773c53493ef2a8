"""A field of a policy document: a node, the way to it, and the one who hears what is wrong with it.

Every reader here says what is wrong and then gives None (or leaves out the bad part), so that reading goes on and all mistakes
of a file come at once. What was read of a file with mistakes is never used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from agent.documents import yaml_tree
from agent.documents.remarks import Remarks

_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)")
# Nothing in a policy is larger; far more digits would be expensive to turn into a number.
_DIGITS_MAX = 9
_SHOWN_CHARACTERS_MAX = 60

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Field:
    """path: from the document's top, such as `spec.egress[0].toPorts`. line: of the key, where there is one."""

    node: yaml_tree.Node
    line: int
    path: str
    remarks: Remarks

    def mistake(self, message: str) -> None:
        self.remarks.mistake(self.line, self.path, message)

    def caution(self, message: str) -> None:
        self.remarks.caution(self.line, self.path, message)

    @property
    def is_list(self) -> bool:
        return isinstance(self.node, yaml_tree.Sequence)

    @property
    def is_number(self) -> bool:
        return isinstance(self.node, yaml_tree.Scalar) and self.node.kind == "a number"

    def items(self) -> list[Field] | None:
        """The items of a list."""
        if not isinstance(self.node, yaml_tree.Sequence):
            self._expected("a list; write '- ' in front of each item, or [] for none")
            return None
        return [Field(node, node.line, f"{self.path}[{place}]", self.remarks) for place, node in enumerate(self.node.items)]

    def parts(self, known: Collection[str], refused: Mapping[str, str] | None = None) -> dict[str, Field] | None:
        """The fields of a mapping by key; says so of each key that repeats or is none of `known`.

        refused: keys that have a meaning elsewhere but none here, with a sentence for each.
        """
        found = self.any_parts()
        if found is None:
            return None
        for key, part in list(found.items()):
            if key in known:
                continue
            if refused is not None and key in refused:
                part.mistake(f"{key} is not supported: {refused[key]}")
            else:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
                part.mistake(f"unknown field {_shown(key)}; {hint}")
            del found[key]
        return found

    def any_parts(self) -> dict[str, Field] | None:
        """The fields of a mapping whose keys are the writer's own; says so of each key that repeats or is no text."""
        if not isinstance(self.node, yaml_tree.Mapping):
            self._expected("a mapping; write 'key: value' lines, or {} for none")
            return None
        found: dict[str, Field] = {}
        for key, node in self.node.entries:
            path = f"{self.path}.{_shown(key.text, quoted=False)}" if self.path else _shown(key.text, quoted=False)
            if key.kind != "text":
                self.remarks.mistake(key.line, path, f'the key {_shown(key.text)} is {key.kind} in YAML; write "{key.text}"')
            elif key.text in found:
                first = found[key.text].line
                self.remarks.mistake(key.line, path, f"this key is given twice, first in line {first}; keep one of them")
            else:
                found[key.text] = Field(node, key.line, path, self.remarks)
        return found

    def peek(self, key: str) -> Field | None:
        """One field of a mapping; says nothing, whatever is wrong."""
        if isinstance(self.node, yaml_tree.Mapping):
            for name, node in self.node.entries:
                if name.text == key:
                    return Field(node, name.line, f"{self.path}.{key}".lstrip("."), self.remarks)
        return None

    def text(self) -> str | None:
        if not isinstance(self.node, yaml_tree.Scalar):
            self._expected("text")
            return None
        if self.node.kind == "nothing":
            self.mistake('the field has no value; give it one, or "" where empty text is meant, or take it out')
            return None
        if self.node.kind != "text":
            quoted = f'"{_shown(self.node.text, quoted=False)}"'
            self.mistake(f"{_shown(self.node.text)} is {self.node.kind} in YAML; put it in quotes: {quoted}")
            return None
        return self.node.text

    def value(self, read: Callable[[str], tuple[T, str | None]]) -> T | None:
        """The field's text as one of the readers of `values` takes it."""
        text = self.text()
        return None if text is None else self.converted(text, read)

    def converted(self, text: str, read: Callable[[str], tuple[T, str | None]]) -> T | None:
        """The same for a part of the field's text."""
        try:
            value, doubt = read(text)
        except ValueError as error:
            self.mistake(str(error))
            return None
        if doubt is not None:
            self.caution(doubt)
        return value

    def whole_number(self, low: int, high: int) -> int | None:
        if not isinstance(self.node, yaml_tree.Scalar):
            self._expected("a number")
            return None
        text = self.node.text
        if self.node.kind != "a number" or not _WHOLE_NUMBER.fullmatch(text):
            self.mistake(f"{_shown(text)} is no whole number; write {low} to {high}, without quotes and leading zeros")
            return None
        if len(text) > _DIGITS_MAX or not low <= int(text) <= high:
            self.mistake(f"{_shown(text)} is out of range; write {low} to {high}")
            return None
        return int(text)

    def truth(self) -> bool | None:
        if (
            isinstance(self.node, yaml_tree.Scalar)
            and self.node.kind == "a truth value"
            and self.node.text in {"true", "false"}
        ):
            return self.node.text == "true"
        self._expected("true or false")
        return None

    def _expected(self, what: str) -> None:
        if isinstance(self.node, yaml_tree.Sequence):
            found = "a list"
        elif isinstance(self.node, yaml_tree.Mapping):
            found = "a mapping"
        elif self.node.kind == "nothing":
            found = "no value"
        else:
            found = _shown(self.node.text)
        self.mistake(f"here stands {found}; it must be {what}")


def _shown(text: str, *, quoted: bool = True) -> str:
    """One line of bounded length, whatever the text is: it goes to a terminal."""
    shown = repr(text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…")
    return shown if quoted else shown[1:-1]
