"""How many each has, and who has most: kept, not looked for.

A count falls by one at a time, so the greatest one does: owners stand in rows by their count, and only the row of the greatest
is asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Tally(Generic[K]):
    """Counts by owner; an owner without any is not there. Everything takes the same time, however many there are."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[K, int] = {}
        self._owners_by_count: dict[int, dict[K, None]] = {}
        self._most = 0

    def add(self, owner: K, more: int = 1) -> None:
        count = self._counts.get(owner, 0)
        self._move(owner, count, count + more)
        self._most = max(self._most, count + more)
        self.total += more

    def take(self, owner: K) -> None:
        """One less; KeyError where there is none."""
        count = self._counts[owner]
        self._move(owner, count, count - 1)
        if self._most not in self._owners_by_count:
            self._most -= 1
        self.total -= 1

    def _move(self, owner: K, before: int, after: int) -> None:
        if before:
            owners = self._owners_by_count[before]
            del owners[owner]
            if not owners:
                del self._owners_by_count[before]
        if after:
            self._counts[owner] = after
            self._owners_by_count.setdefault(after, {})[owner] = None
        else:
            del self._counts[owner]

    def __len__(self) -> int:
        """How many owners there are."""
        return len(self._counts)

    def of(self, owner: K) -> int:
        return self._counts.get(owner, 0)

    def greatest(self) -> K:
        """Who has most; of several, who has had so many for longest. KeyError where nobody has any."""
        return next(iter(self._owners_by_count[self._most]))
