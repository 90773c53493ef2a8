"""DNS cache: name <-> address with expiry, in each scope; the only source of (name, address).

A lifetime is max(TTL, floor), capped, for each (name, address); any answer extends it, none shortens it, and different
answers add up (DECISIONS 14). Its end is inclusive. Ends are found by a heap, not by looking at everything: an entry whose
end moved is put back when its old end comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from agent.core.records import PairRecord
from agent.core.types import Address

# Entries of the heap that mean nothing any more are let be up to as many as there are pairs, and a few.
HEAP_SLACK = 64


# A name that is asked all the time costs the journal one line a second, not one for each answer.
SAVED_WITHIN_S = 1.0


class Pair(NamedTuple):
    scope: int
    name: str
    address: Address


class Lifetime(NamedTuple):
    """lives_until: by TTL alone. kept_until: at least that, longer while flows use the address. looked_at: when, next."""

    lives_until: float
    kept_until: float
    looked_at: float
    saved_until: float  # what the journal says of kept_until


class DnsCache:
    """ttl_floor_s, ttl_cap_s: seconds."""

    def __init__(self, ttl_floor_s: float, ttl_cap_s: float) -> None:
        self.ttl_floor_s = ttl_floor_s
        self.ttl_cap_s = ttl_cap_s
        self.lifetimes: dict[tuple[int, str], dict[Address, Lifetime]] = {}  # (scope, name) -> address -> lifetime
        self.names_by_address: dict[tuple[int, Address], set[str]] = {}
        self.scopes_by_name: dict[str, set[int]] = {}
        self._ends: list[tuple[float, Pair]] = []
        self._count = 0

    def update(self, pair: Pair, ttl: int, now: float) -> bool:
        """Take in one record of an answer; says whether the pair is new. ttl in seconds, as it came."""
        ends = now + min(max(float(ttl), self.ttl_floor_s), self.ttl_cap_s)
        addresses = self.lifetimes.get((pair.scope, pair.name))
        if addresses is None:
            addresses = self.lifetimes[pair.scope, pair.name] = {}
            self.scopes_by_name.setdefault(pair.name, set()).add(pair.scope)
        before = addresses.get(pair.address)
        if before is not None:
            if ends > before.lives_until:
                addresses[pair.address] = before._replace(lives_until=ends, kept_until=max(ends, before.kept_until))
            return False
        addresses[pair.address] = Lifetime(ends, ends, ends, 0.0)
        self.names_by_address.setdefault((pair.scope, pair.address), set()).add(pair.name)
        self._count += 1
        self._look_again(pair, ends)
        return True

    def _look_again(self, pair: Pair, at: float) -> None:
        heapq.heappush(self._ends, (at, pair))
        if len(self._ends) > 2 * self._count + HEAP_SLACK:
            # Most are entries of pairs that went before their end: they would stay till then, however many they get.
            self._ends = [
                (lifetime.looked_at, Pair(scope, name, address))
                for (scope, name), addresses in self.lifetimes.items()
                for address, lifetime in addresses.items()
                if lifetime.looked_at < float("inf")
            ]
            heapq.heapify(self._ends)

    def restore(self, pair: Pair, lives_until: float, kept_until: float) -> None:
        """Of the process before: as it was."""
        self.update(pair, 0, kept_until - self.ttl_floor_s)
        self.lifetimes[pair.scope, pair.name][pair.address] = Lifetime(lives_until, kept_until, kept_until, kept_until)

    def unsaved(self, pair: Pair) -> PairRecord | None:
        """What the journal has to learn of the pair. Ends that moved by less than a second may wait for the next time."""
        lifetime = self.lifetimes[pair.scope, pair.name][pair.address]
        if lifetime.kept_until < lifetime.saved_until + SAVED_WITHIN_S:
            return None
        self.lifetimes[pair.scope, pair.name][pair.address] = lifetime._replace(saved_until=lifetime.kept_until)
        return PairRecord(*pair, lifetime.lives_until, lifetime.kept_until)

    def addresses(self, scope: int, name: str) -> dict[Address, Lifetime]:
        return self.lifetimes.get((scope, name), {})

    def pairs_of(self, name: str) -> Iterator[Pair]:
        for scope in self.scopes_by_name.get(name, ()):
            for address in self.lifetimes[scope, name]:
                yield Pair(scope, name, address)

    def due(self, now: float) -> list[Pair]:
        """Pairs whose end has passed. Each must be removed or kept by the caller: it is not found again otherwise."""
        due: list[Pair] = []
        while self._ends and self._ends[0][0] < now:
            at, pair = heapq.heappop(self._ends)
            addresses = self.lifetimes.get((pair.scope, pair.name), {})
            lifetime = addresses.get(pair.address)
            if lifetime is None or lifetime.looked_at != at:
                continue
            is_due = lifetime.kept_until < now
            looked_at = float("inf") if is_due else lifetime.kept_until
            addresses[pair.address] = lifetime._replace(looked_at=looked_at)
            if is_due:
                due.append(pair)
            else:
                self._look_again(pair, looked_at)
        return due

    def keep(self, pair: Pair, until: float) -> None:
        """A flow uses the address: look again at this time."""
        lifetime = self.lifetimes[pair.scope, pair.name][pair.address]
        self.lifetimes[pair.scope, pair.name][pair.address] = lifetime._replace(kept_until=until, looked_at=until)
        self._look_again(pair, until)

    def remove(self, pair: Pair) -> bool:
        """Forget the pair; says whether it was there."""
        addresses = self.lifetimes.get((pair.scope, pair.name))
        if addresses is None or addresses.pop(pair.address, None) is None:
            return False
        self._count -= 1
        if not addresses:
            del self.lifetimes[pair.scope, pair.name]
            scopes = self.scopes_by_name[pair.name]
            scopes.discard(pair.scope)
            if not scopes:
                del self.scopes_by_name[pair.name]
        names = self.names_by_address[pair.scope, pair.address]
        names.discard(pair.name)
        if not names:
            del self.names_by_address[pair.scope, pair.address]
        return True

    def __len__(self) -> int:
        """How many pairs there are."""
        return self._count

    def next_deadline(self) -> float | None:
        """The earliest end; something is due strictly after it."""
        return self._ends[0][0] if self._ends else None
