"""Name manager: names and FQDN selectors to labels on prefixes. It owns all identity management of learned addresses.

    answer -> DNS cache -> selectors that match the name -> metadata of the prefix (resource: the name) -> ipcache row
                                                       `-> bags of the selectors

A name no selector wants is remembered, so that a selector that comes later finds it, and costs no row and no wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sortedcontainers import SortedList

from agent.core.dns_cache import DnsCache, Pair
from agent.core.guard import AddressGuard
from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.ipcache import Ipcache
from agent.core.names import PatternIndex
from agent.core.records import PairGone, PairRecord, Record
from agent.core.rules import Fqdn
from agent.core.selectors import FqdnSelector
from agent.core.tables import RowReference
from agent.core.types import LABEL_WORLD, Address, IpcacheKey, LabelSet, Prefix


class Learned(NamedTuple):
    """What an answer led to: the rows its addresses need, and the pairs that are new by it."""

    rows: list[RowReference]
    added: list[Pair]


class _Matched(NamedTuple):
    """Selectors that match a name, in order, and their labels."""

    selectors: tuple[FqdnSelector, ...]
    labels: LabelSet


class NameManager:
    """names_max bounds the names remembered, addresses_max the addresses of one name."""

    def __init__(
        self, cache: DnsCache, ipcache: Ipcache, identities: IdentityAllocator, *, names_max: int, addresses_max: int
    ) -> None:
        self.cache = cache
        self.selectors: dict[Fqdn, FqdnSelector] = {}
        self.names_max = names_max
        self.addresses_max = addresses_max
        self.guard = AddressGuard()
        self._index: PatternIndex[Fqdn] = PatternIndex()
        self._ipcache = ipcache
        self._identities = identities
        self._selectors_by_name: dict[str, tuple[FqdnSelector, ...]] = {}  # of names in the cache
        self._matched: dict[tuple[FqdnSelector, ...], _Matched] = {}  # a million names of one pattern share one of these
        self._names_in_order: SortedList[str] = SortedList()  # the same names, reversed label by label
        self.records: list[Record] = []  # what the journal has to learn, since somebody looked

    # --- selectors ---------------------------------------------------------------------------------------------------

    def register(self, *peers: Fqdn) -> list[RowReference]:
        """One user more for each; gives back the rows of what they hold already. Raises NoRoom, and then nothing changed."""
        new: list[FqdnSelector] = []
        try:
            for peer in dict.fromkeys(peers):
                if peer not in self.selectors:
                    selector = FqdnSelector(peer)
                    selector.identity = self._ipcache.identity_of(frozenset({selector.label, LABEL_WORLD}))
                    self.selectors[peer] = selector
                    self._index.add(peer.pattern, peer)
                    new.append(selector)
            self._match_again(self._known_names_of(new))
        except NoRoom:
            self._end(new)
            raise
        for peer in peers:
            self.selectors[peer].users += 1
        return [row for peer in dict.fromkeys(peers) for row in self.rows_of(self.selectors[peer])]

    def unregister(self, *peers: Fqdn) -> list[RowReference]:
        """One user less for each; gives back the rows that change by it."""
        ended: list[FqdnSelector] = []
        for peer in peers:
            selector = self.selectors[peer]
            selector.users -= 1
            if not selector.users:
                ended.append(selector)
        rows = [row for selector in ended for row in self.rows_of(selector)]
        self._end(ended)
        return [self._ipcache.reference(row.key) for row in rows]

    def _end(self, selectors: Iterable[FqdnSelector]) -> None:
        names: dict[str, None] = {}
        for selector in selectors:
            del self.selectors[selector.peer]
            self._index.remove(selector.peer.pattern, selector.peer)
            # Of a registration that found no room, some of its names may not be in the bags yet.
            names.update(dict.fromkeys(self._known_names_of([selector])))
        self._match_again(names, beyond_bound=True)
        self._matched = {key: matched for key, matched in self._matched.items() if set(selectors).isdisjoint(key)}
        for selector in selectors:
            assert selector.identity is not None
            self._identities.release(selector.identity)

    def rows_of(self, selector: FqdnSelector) -> list[RowReference]:
        return [
            self._ipcache.reference(IpcacheKey(scope, Prefix.of(address)))
            for scope, bag in selector.bags.items()
            for address in bag
        ]

    def _known_names_of(self, selectors: Iterable[FqdnSelector]) -> Iterator[str]:
        """Names in the cache that these may match: below the literal suffix of each, found without looking at the others."""
        for selector in selectors:
            if selector.is_exact:
                if selector.peer.pattern in self._selectors_by_name:
                    yield selector.peer.pattern
            else:
                start = _reversed(selector.suffix)
                yield from map(_reversed, list(self._names_in_order.irange(start, start + _AFTER_DOT)))

    def _match_again(self, names: Iterable[str], *, beyond_bound: bool = False) -> None:
        """The selectors of these names may have changed."""
        for name in names:
            before, after = self._selectors_by_name[name], self._match(name)
            if before != after:
                self._selectors_by_name[name] = after
                for pair in self.cache.pairs_of(name):
                    self._relabel(pair, before, after, beyond_bound=beyond_bound)

    def _match(self, name: str) -> tuple[FqdnSelector, ...]:
        matching = [self.selectors[peer] for peer in self._index.matching(name)]
        selectors = sorted((s for s in matching if s.takes(name)), key=lambda selector: selector.label)
        return self._shared(tuple(selectors)).selectors

    def _shared(self, selectors: tuple[FqdnSelector, ...]) -> _Matched:
        matched = self._matched.get(selectors)
        if matched is None:
            matched = self._matched[selectors] = _Matched(selectors, frozenset(selector.label for selector in selectors))
        return matched

    def selectors_of(self, name: str) -> tuple[FqdnSelector, ...]:
        selectors = self._selectors_by_name.get(name)
        return self._match(name) if selectors is None else selectors

    def labels_of(self, name: str) -> LabelSet:
        return self._shared(self.selectors_of(name)).labels

    # --- names -------------------------------------------------------------------------------------------------------

    def learn(self, name: str, records: Iterable[tuple[Address, int]], scope: int, now: float) -> Learned:
        """Take in the addresses of one answer, each with its TTL in seconds.

        Raises NoRoom when the identities' bound is reached; what this answer added is taken back then.
        """
        selectors = self._selectors_by_name.get(name)
        if selectors is None:
            selectors = self._match(name)
            if len(self._selectors_by_name) >= self.names_max and name not in self._selectors_by_name:
                raise NoRoom(f"all {self.names_max} names are in use (limits.names)")
        learned = Learned([], [])
        try:
            for address, ttl in records:
                pair = Pair(scope, name, address)
                if self.cache.update(pair, ttl, now):
                    self._know(name, selectors)
                    learned.added.append(pair)
                    self._relabel(pair, (), selectors)
                record = self.cache.unsaved(pair)
                if record is not None:
                    self.records.append(record)
                if any(self._may_hold(selector, address) for selector in selectors):
                    learned.rows.append(self._ipcache.reference(IpcacheKey(scope, Prefix.of(address))))
        except NoRoom:
            self.take_back(learned.added)
            raise
        while len(self.cache.addresses(scope, name)) > self.addresses_max:
            self._evict_one(scope, name, keep={address for _, _, address in learned.added})
        return learned

    def _know(self, name: str, selectors: tuple[FqdnSelector, ...]) -> None:
        if name not in self._selectors_by_name:
            self._selectors_by_name[name] = selectors
            self._names_in_order.add(_reversed(name))

    def _evict_one(self, scope: int, name: str, keep: set[Address]) -> None:
        """Over the bound of one name: the address whose lifetime ends first goes, one of the last answer only if all are."""
        pairs = [Pair(scope, name, address) for address in self.cache.addresses(scope, name)]
        self.forget(min(pairs, key=lambda pair: (pair.address in keep, self.cache.lifetimes[pair].lives_until, pair)))

    def _relabel(
        self, pair: Pair, before: tuple[FqdnSelector, ...], after: tuple[FqdnSelector, ...], *, beyond_bound: bool = False
    ) -> None:
        key = IpcacheKey(pair.scope, Prefix.of(pair.address))
        if after and self.guard.forbids(pair.address) is not None:
            after = tuple(selector for selector in after if self._may_hold(selector, pair.address))
        if after:
            self._ipcache.upsert(key, pair.name, self._shared(after).labels, beyond_bound=beyond_bound)
        elif before:
            self._ipcache.remove(key, pair.name)
        for selector in before:
            if selector not in after:
                selector.remove_labels(pair.scope, (pair.address,), pair.name)
        for selector in after:
            selector.add_labels(pair.scope, (pair.address,), pair.name)

    def _may_hold(self, selector: FqdnSelector, address: Address) -> bool:
        """Does the address guard let this address through for the selector's policy?"""
        return self.guard.forbids(address, selector.peer.allowed) is None

    def change_guard(self, guard: AddressGuard, changed: Iterable[Address]) -> None:
        """The host's addresses changed: what names say of these is judged again."""
        self.guard = guard
        for address in changed:
            for pair in self.cache.pairs_by_address.of(address):
                selectors = self._selectors_by_name[pair.name]
                self._relabel(pair, selectors, selectors, beyond_bound=True)

    def keep(self, pair: Pair, until: float) -> None:
        """A flow uses the address past its lifetime."""
        self.cache.keep(pair, until)
        record = self.cache.unsaved(pair)
        if record is not None:
            self.records.append(record)

    def restore(self, record: PairRecord) -> None:
        """A pair of the process before; no selector is there yet that could want it."""
        pair = Pair(record.scope, record.name, record.address)
        self.cache.restore(pair, record.lives_until, record.kept_until)
        self._know(pair.name, ())

    def holds(self, pairs: Iterable[Pair]) -> bool:
        """Is each of these addresses still one of its name's?"""
        return all(pair in self.cache.lifetimes for pair in pairs)

    def take_back(self, added: Iterable[Pair]) -> None:
        """An answer that cannot be released leaves nothing behind."""
        for pair in added:
            self.forget(pair)

    def forget(self, pair: Pair) -> None:
        """The address is no longer one of the name's."""
        selectors = self._selectors_by_name.get(pair.name, ())
        if self.cache.remove(pair):
            self.records.append(PairGone(*pair))
            self._relabel(pair, selectors, ())
            if pair.name not in self.cache.scopes_by_name:
                del self._selectors_by_name[pair.name]
                self._names_in_order.remove(_reversed(pair.name))

    @property
    def scopes(self) -> set[int]:
        """Scopes in which anything is known."""
        return set(self.cache.addresses_by_scope)

    def copy_scope(self, source: int, target: int, labels: LabelSet, now: float) -> None:
        """An endpoint gets a scope of its own: what its selectors hold in the old one is good in the new one. Raises NoRoom."""
        for name in list(self.cache.addresses_by_scope.get(source, ())):
            if labels & self.labels_of(name):
                pairs = [Pair(source, name, address) for address in self.cache.addresses(source, name)]
                ends = [(pair.address, round(self.cache.lifetimes[pair].lives_until - now)) for pair in pairs]
                self.learn(name, ends, target, now)

    def forget_scope(self, scope: int) -> None:
        """Nobody looks into this scope any more."""
        for name in list(self.cache.addresses_by_scope.get(scope, ())):
            for address in list(self.cache.addresses(scope, name)):
                self.forget(Pair(scope, name, address))


# Between a dot and the sign after it, in order, are all names below a suffix.
_AFTER_DOT = "/"


def _reversed(name: str) -> str:
    """`www.example.com.` to `.com.example.www` and back: names below one suffix stand together."""
    return ".".join(reversed(name.split(".")))
