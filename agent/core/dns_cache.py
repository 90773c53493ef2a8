"""DNS cache: name <-> address with expiry, in each scope; the only source of (name, address).

A lifetime is max(TTL, floor), capped, for each (name, address); any answer extends it, none shortens it, and different
answers add up (DECISIONS 14). Its end is inclusive. Ends are found in their order, not by looking at everything: a pair whose
end moved is put back when its old end comes up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from sortedcontainers import SortedList

from agent.core.multimap import MultiMap
from agent.core.records import PairRecord
from agent.core.types import Address

# A name that is asked all the time costs the journal one line a second, not one for each answer.
SAVED_WITHIN_S: Final = 1.0


EVERY_LOOK: Final = 1 << 62
GIVEN_OUT: Final = float("inf")  # `looked_at` of a pair that is due, until it is kept or removed


class Pair(NamedTuple):
    scope: int
    name: str
    address: Address


class Lifetime:
    """lives_until: by TTL alone. kept_until: at least that, longer while flows use the address. looked_at: when, next.

    answered_at: last, in this process; of a pair that the process before left, 0. is_over: the pair was forgotten.
    """

    __slots__ = ("answered_at", "is_over", "kept_until", "lives_until", "looked_at", "saved_until")

    def __init__(self, lives_until: float, kept_until: float, saved_until: float, answered_at: float) -> None:
        self.lives_until = lives_until
        self.kept_until = kept_until
        self.looked_at = kept_until
        self.saved_until = saved_until  # what the journal says of kept_until; see SAVED_WITHIN_S
        self.answered_at = answered_at
        self.is_over = False


class DnsCache:
    """ttl_floor_s, ttl_cap_s: seconds."""

    def __init__(self, ttl_floor_s: float, ttl_cap_s: float) -> None:
        self.ttl_floor_s = ttl_floor_s
        self.ttl_cap_s = ttl_cap_s
        self.lifetimes: dict[Pair, Lifetime] = {}
        self.pairs_by_address: MultiMap[Address, Pair] = MultiMap()
        self.scopes_by_name: MultiMap[str, int] = MultiMap()
        self.addresses_by_scope: dict[int, MultiMap[str, Address]] = {}  # scope -> name -> addresses
        # Each pair once, at `looked_at`, but those that `due` gave out. No heap: to rid it of what went is to look at all.
        self._ends: SortedList[tuple[float, Pair]] = SortedList()

    def add(self, pair: Pair, ttl: int, now: float) -> Lifetime:
        """Take in one record of an answer, of a pair that is new. ttl in seconds, as it came."""
        ends = self._end(ttl, now)
        lifetime = Lifetime(ends, ends, 0.0, now)
        self._put(pair, lifetime)
        self._ends.add((ends, pair))
        return lifetime

    def extend(self, lifetime: Lifetime, ttl: int, now: float) -> None:
        """The same, of a pair that is known."""
        lifetime.answered_at = now
        ends = self._end(ttl, now)
        if ends > lifetime.lives_until:
            lifetime.lives_until = ends
            lifetime.kept_until = max(ends, lifetime.kept_until)

    def _end(self, ttl: int, now: float) -> float:
        return now + min(max(float(ttl), self.ttl_floor_s), self.ttl_cap_s)

    def _put(self, pair: Pair, lifetime: Lifetime) -> None:
        self.lifetimes[pair] = lifetime
        self.pairs_by_address.add(pair.address, pair)
        self.scopes_by_name.add(pair.name, pair.scope)
        names = self.addresses_by_scope.get(pair.scope)
        if names is None:
            names = self.addresses_by_scope[pair.scope] = MultiMap()
        names.add(pair.name, pair.address)

    def restore(self, records: Iterable[PairRecord]) -> None:
        """Pairs of the process before, each once: as they were."""
        ends: list[tuple[float, Pair]] = []
        for scope, name, address, lives_until, kept_until in records:
            pair = Pair(scope, name, address)
            self._put(pair, Lifetime(lives_until, kept_until, kept_until, 0.0))
            ends.append((kept_until, pair))
        self._ends.update(ends)

    def addresses(self, scope: int, name: str) -> Collection[Address]:
        """Not to be kept: it changes with the cache."""
        names = self.addresses_by_scope.get(scope)
        return names.of(name) if names is not None else ()

    def pairs_of(self, name: str) -> Iterator[Pair]:
        for scope in self.scopes_by_name.of(name):
            for address in self.addresses(scope, name):
                yield Pair(scope, name, address)

    def due(self, now: float, looks_max: int = EVERY_LOOK) -> list[Pair]:
        """Pairs whose end has passed. Each must be removed or kept by the caller: it is not found again otherwise.

        looks_max: what is left over then is still due, and `next_deadline` says so.
        """
        due: list[Pair] = []
        for _ in range(looks_max):
            if not self._ends or self._ends[0][0] >= now:
                break
            _, pair = self._ends.pop(0)
            lifetime = self.lifetimes[pair]
            is_due = lifetime.kept_until < now
            lifetime.looked_at = GIVEN_OUT if is_due else lifetime.kept_until
            if is_due:
                due.append(pair)
            else:
                self._ends.add((lifetime.looked_at, pair))
        return due

    def keep(self, pair: Pair, until: float) -> None:
        """A flow uses the address: look again at this time."""
        lifetime = self.lifetimes[pair]
        self._strike(pair, lifetime)
        lifetime.kept_until = lifetime.looked_at = until
        self._ends.add((until, pair))

    def _strike(self, pair: Pair, lifetime: Lifetime) -> None:
        if lifetime.looked_at < GIVEN_OUT:
            self._ends.remove((lifetime.looked_at, pair))

    def remove(self, pair: Pair) -> bool:
        """Forget the pair; says whether it was there."""
        lifetime = self.lifetimes.pop(pair, None)
        if lifetime is None:
            return False
        lifetime.is_over = True
        self._strike(pair, lifetime)
        self.pairs_by_address.discard(pair.address, pair)
        names = self.addresses_by_scope[pair.scope]
        names.discard(pair.name, pair.address)
        if pair.name not in names:
            self.scopes_by_name.discard(pair.name, pair.scope)
            if not names:
                del self.addresses_by_scope[pair.scope]
        return True

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.lifetimes)

    def next_deadline(self) -> float | None:
        """The earliest end; something is due strictly after it."""
        return self._ends[0][0] if self._ends else None
