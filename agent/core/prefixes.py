"""Prefixes around a prefix: found in as many look-ups as there are different lengths in use, however many prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from agent.core.types import Prefix


class LengthsInUse:
    """How many prefixes of each family have each length."""

    def __init__(self) -> None:
        self._lengths: dict[int, list[int]] = {4: [], 16: []}  # by octets of an address; the longest first
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, prefix: Prefix) -> None:
        self._count(prefix, 1)

    def remove(self, prefix: Prefix) -> None:
        self._count(prefix, -1)

    def _count(self, prefix: Prefix, by: int) -> None:
        family = len(prefix.address)
        count = self._counts.get((family, prefix.length), 0) + by
        if count:
            self._counts[family, prefix.length] = count
        else:
            del self._counts[family, prefix.length]
        self._lengths[family] = sorted((length for of, length in self._counts if of == family), reverse=True)

    def around(self, prefix: Prefix) -> Iterator[Prefix]:
        """Which prefixes could be there and hold this one, itself among them; the longest first."""
        for length in self._lengths[len(prefix.address)]:
            if length <= prefix.length:
                yield Prefix.masked(prefix.address, length)
