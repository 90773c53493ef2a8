"""Whose the names are, where all of them together have a bound (limits.names).

Who asks for ever new names below a pattern would have every place, and nobody else's new name could be opened. So a name is on
the account of the endpoint that asked for it, and where there is no place left, names of those who have many make way.

Rule 1: an account gives way to those that have no more than it has, and only if it has half of an equal share at least. Such
accounts have half of all names or more, so that a few names looked at in turn are enough to find some.
Rule 2: of what was looked at, those of the largest account go first, and of these the ones longest unused; never one with a
live flow.
Rule 3: a name that a second endpoint asked for too is on nobody's account, or a flood could begin with its neighbours' names
and have them pushed out as its own. So are names that the process before had learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from agent.core.crowd import LOOK_LASTS_S
from agent.core.tally import Tally
from agent.core.types import Address

Account = int | None  # an endpoint, or nobody

# For one name that comes, so many are looked at; of these so many addresses go at once, and the next names find places.
LOOKED_AT_ONCE = 256
MADE_AT_ONCE = 32


class Place(NamedTuple):
    """A name that has one. addresses: how many. answered_at: last."""

    name: str
    account: Account
    addresses: int
    answered_at: float


class Places:
    """live_s: how long after its last packet a flow counts as live."""

    def __init__(self, live_s: float) -> None:
        self.accounts: Tally[Account] = Tally()
        self.hand = ""  # the name that was looked at last, as the name manager orders them
        self.leaving: tuple[str, ...] = ()
        self._live_s = live_s
        self._looks: dict[tuple[int, Address], tuple[float, float | None]] = {}  # -> when, and when a flow was seen last

    def choose(self, places: Iterable[Place], account: Account) -> None:
        """Who of these may make way for a name of this account, if no flow needs them: `leaving`."""
        least = max(self.accounts.of(account), self.accounts.total / (2 * len(self.accounts)))
        giving = [place for place in places if self.accounts.of(place.account) >= least]
        giving.sort(key=lambda place: (-self.accounts.of(place.account), place.answered_at))
        addresses = itertools.accumulate((place.addresses for place in giving), initial=0)
        self.leaving = tuple(place.name for place, before in zip(giving, addresses, strict=False) if before < MADE_AT_ONCE)
        self._looks.clear()

    def look(self, scope: int, address: Address, seen_at: float | None, now: float) -> None:
        if self.leaving:
            self._looks[scope, address] = now, seen_at

    def is_known(self, scope: int, address: Address, now: float) -> bool:
        """Is what flows say of it as good as new?"""
        look = self._looks.get((scope, address))
        return look is not None and look[0] >= now - LOOK_LASTS_S

    def is_live(self, scope: int, address: Address, now: float) -> bool:
        look = self._looks.get((scope, address))
        return look is not None and look[1] is not None and look[1] + self._live_s >= now
