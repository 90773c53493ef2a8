"""What a terminal is shown of a flood: as many lines a second as somebody can look at, and how many there were besides.

Into a pipe or a file everything is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Final

from agent.monitor.facts import Row
from agent.monitor.lines import what_of

LINES_PER_SECOND: Final = 100


class Pace:
    """line: of a fact, and of how many like it that came at once."""

    def __init__(self, line: Callable[[Row, int], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._line = line
        self._clock = clock
        self._until = 0.0
        self._room = 0
        self._unsaid = 0
        self._lost = 0

    def lines(self, facts: Iterable[Row]) -> Iterator[str]:
        """Those to write now; without facts, what is due to be said of the second that is over."""
        if self._clock() >= self._until:
            if self._unsaid:
                yield f"{self._unsaid:,} more are not shown: `-o json` has them all"
            if self._lost:
                yield self._line({"kind": "lost", "count": self._lost}, 1)
            self._until, self._room, self._unsaid, self._lost = self._clock() + 1, LINES_PER_SECOND, 0, 0
        for _, alike in groupby(facts, key=_alike):
            first, *others = alike
            if first["kind"] == "lost":
                self._lost += sum(fact["count"] for fact in (first, *others))
            elif self._room:
                self._room -= 1
                yield self._line(first, 1 + len(others))
            else:
                self._unsaid += 1 + len(others)


def _alike(fact: Row) -> tuple[Any, ...]:
    """What a line says besides its time."""
    return fact["kind"], fact.get("endpoint"), fact.get("audited"), what_of(fact)
