"""Name history: which names were seen on an address, also after their lifetime: so that a drop can be explained.

Nothing is judged by it. Bounded by number and age; the ones not seen for longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from agent.core.multimap import MultiMap
from agent.core.types import Address

KEPT_S: Final = 24 * 3_600.0
# A name that is asked all the time is noted so often.
NOTED_WITHIN_S: Final = 10.0
OTHERS_MAX: Final = 16


class Seen:
    """chain: the name asked, then the targets of its aliases. until: when its lifetime ends or ended.

    endpoint: who was answered last; None where a process before answered it: numbers of endpoints begin anew at each boot.
    others: who was before, the last of them last; at most OTHERS_MAX.
    """

    __slots__ = ("address", "chain", "endpoint", "first_at", "last_at", "name", "others", "until")

    def __init__(
        self,
        name: str,
        address: Address,
        endpoint: int | None,
        chain: tuple[str, ...],
        first_at: float,
        last_at: float,
        until: float,
        others: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.address = address
        self.endpoint = endpoint
        self.chain = chain
        self.first_at = first_at
        self.last_at = last_at
        self.until = until
        self.others = others

    def is_known_to(self, endpoint: int) -> bool:
        """Was it answered itself?"""
        return endpoint == self.endpoint or endpoint in self.others


class NameHistory:
    def __init__(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self.notes = 0  # since the start: whoever keeps a copy knows from it whether anything is new
        self._seen: OrderedDict[tuple[Address, str], Seen] = OrderedDict()  # the one not seen for longest first
        self._names_by_address: MultiMap[Address, str] = MultiMap()

    def note(self, name: str, address: Address, endpoint: int, chain: tuple[str, ...], until: float, now: float) -> None:
        """An answer for `name` held the address."""
        before = self._seen.pop((address, name), None)
        first_at = before.first_at if before is not None else now
        others = before.others if before is not None else ()
        if before is not None and before.endpoint not in (None, endpoint):
            others = (*(other for other in others if other not in (before.endpoint, endpoint)), before.endpoint)[-OTHERS_MAX:]
        self.notes += 1
        self._put(Seen(name, address, endpoint, chain, first_at, now, until, others))

    def is_due(self, name: str, address: Address, endpoint: int, chain: tuple[str, ...], now: float) -> bool:
        """Is there anything in it that was not noted a moment ago?"""
        # As the dictionary it also is: this is asked of each address of each answer, and `OrderedDict.get` costs twice as much.
        seen: dict[tuple[Address, str], Seen] = self._seen
        before = seen.get((address, name))
        return before is None or now - before.last_at >= NOTED_WITHIN_S or before.endpoint != endpoint or before.chain != chain

    def restore(self, seen: Iterable[Seen], now: float) -> None:
        """What processes before have seen, as far as it is not too old; before anything is noted."""
        assert not self._seen, "what was noted is newer"
        for one in sorted(seen, key=lambda one: one.last_at):
            if one.last_at > now - KEPT_S:
                self._put(one)

    def _put(self, seen: Seen) -> None:
        self._seen[seen.address, seen.name] = seen
        self._names_by_address.add(seen.address, seen.name)
        if len(self._seen) > self.entries_max:
            self._forget_oldest()

    def entries(self) -> list[Seen]:
        """All of it, the one not seen for longest first."""
        # As the dictionary it also is: twenty times as fast, and in the same order where nothing is moved to an end.
        return list(dict.values(self._seen))

    def on(self, address: Address, now: float) -> list[Seen]:
        """Names seen on the address in the last day, the one seen last first."""
        found = [self._seen[address, name] for name in self._names_by_address.of(address)]
        return sorted((seen for seen in found if seen.last_at > now - KEPT_S), key=lambda seen: seen.last_at, reverse=True)

    def expire(self, now: float) -> None:
        """Forget what is too old, a little at a time: called for every answer."""
        for _ in range(2):
            oldest = next(iter(self._seen.values()), None)
            if oldest is None or oldest.last_at > now - KEPT_S:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (address, name), _ = self._seen.popitem(last=False)
        self._names_by_address.discard(address, name)

    def __len__(self) -> int:
        return len(self._seen)
