"""What there is to say about policy files: mistakes refuse them, cautions do not.

All mistakes of all files are gathered before anything is refused, so that a person mends a file once and not line by line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Remark(NamedTuple):
    """A sentence about one place of a file.

    field: the way from the document's top, such as `spec.egress[0].toPorts`; empty where the place is the line itself.
    """

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (f"{self.file}:{self.line}", self.field, self.message) if part)


class Mistake(Remark):
    """Why a file is refused."""

    __slots__ = ()


class Caution(Remark):
    """What is taken, but may not be what was meant."""

    __slots__ = ()


class PolicyError(ValueError):
    """Policies cannot be taken; its text has one line for each mistake."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


# Nobody reads more at once, and a file of another kind would be wrong in every line.
MISTAKES_MAX = 1_000


class Remarks:
    """Gathers what is said about one file, at most MISTAKES_MAX of each kind."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.mistakes: list[Mistake] = []
        self.cautions: list[Caution] = []

    def mistake(self, line: int, field: str, message: str) -> None:
        if len(self.mistakes) < MISTAKES_MAX:
            self.mistakes.append(Mistake(self.file, line, field, message))

    def caution(self, line: int, field: str, message: str) -> None:
        if len(self.cautions) < MISTAKES_MAX:
            self.cautions.append(Caution(self.file, line, field, message))
