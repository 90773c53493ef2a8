"""A crowd: a name with as many addresses as one may have. For each that comes another has to go (DECISIONS 14).

Rule 1: the one longest unused goes: neither answered nor seen in a flow since. Rule 2: never one with a live flow.

What flows say is known only by a look at the datapath, and a look at a thousand addresses for one new one would be dear. A use
can only be later than was known; so the addresses stand in the order of what is known, and only the first ones are looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from agent.core.types import Address

# The datapath writes a use down once a second: a look is as good for so long.
LOOK_LASTS_S = 1.0
# Entries of the heap that mean nothing any more are let be up to as many as there are addresses, and a few.
HEAP_SLACK = 64

_Order = tuple[float, float, Address]  # used, lives_until, address


class Crowd:
    """live_s: how long after its last packet a flow counts as live."""

    def __init__(self, answered: Iterable[tuple[Address, float, float]], live_s: float) -> None:
        """answered: (address, when it was answered last, when its lifetime ends) of each."""
        self._live_s = live_s
        self._order: list[_Order] = []
        self._entries: dict[Address, _Order] = {}
        self._looked_at: dict[Address, float] = {}
        self._live_until: dict[Address, float] = {}
        self._full_until = 0.0
        for address, at, lives_until in answered:
            self.answered(address, at, lives_until)

    def answered(self, address: Address, at: float, lives_until: float) -> None:
        before = self._entries.get(address)
        if before is None:
            self._full_until = 0.0
        self._put((max(at, before[0]) if before is not None else at, lives_until, address))

    def seen(self, address: Address, at: float | None, now: float) -> None:
        """The datapath was looked at: when a flow of the address was seen last; None: never."""
        entry = self._entries.get(address)
        if entry is None:
            return
        self._looked_at[address] = now
        if at is not None:
            self._live_until[address] = at + self._live_s
            if at > entry[0]:
                self._put((at, *entry[1:]))

    def gone(self, address: Address) -> None:
        for known in (self._entries, self._looked_at, self._live_until):
            known.pop(address, None)

    def _put(self, entry: _Order) -> None:
        self._entries[entry[2]] = entry
        heapq.heappush(self._order, entry)
        if len(self._order) > 2 * len(self._entries) + HEAP_SLACK:
            self._order = list(self._entries.values())
            heapq.heapify(self._order)

    def longest_unused(self, count: int, but: Collection[Address], now: float) -> list[Address]:
        """As far as is known; fewer than asked for where all others have live flows."""
        found: list[Address] = []
        passed: dict[Address, _Order] = {}
        live: list[Address] = []
        while now > self._full_until and self._order and len(found) < count:
            entry = heapq.heappop(self._order)
            address = entry[2]
            if self._entries.get(address) != entry or address in passed:
                continue  # answered twice at one moment, it stands there twice
            passed[address] = entry
            if self._live_until.get(address, now - 1) >= now:
                live.append(address)
            elif address not in but:
                found.append(address)
        for entry in passed.values():
            heapq.heappush(self._order, entry)
        if passed and len(live) == len(passed):
            # Who asks again and again does not look through all of them each time.
            self._full_until = min(self._live_until[address] for address in live)
        return found

    def is_known(self, address: Address, now: float) -> bool:
        """Is what flows say of it as good as new?"""
        return self._looked_at.get(address, -LOOK_LASTS_S - 1) >= now - LOOK_LASTS_S
