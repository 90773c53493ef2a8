"""Name manager: names and FQDN selectors to labels on prefixes. It owns all identity management of learned addresses.

    answer -> DNS cache -> selectors that match the name -> metadata of the prefix (resource: the name) -> ipcache row
                                                       `-> bags of the selectors

A name no selector wants is remembered, so that a selector that comes later finds it, and costs no row and no wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from agent.core.dns_cache import DnsCache, Pair
from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.ipcache import Ipcache
from agent.core.names import PatternIndex
from agent.core.rules import Fqdn
from agent.core.selectors import FqdnSelector, address_label
from agent.core.tables import RowReference
from agent.core.types import LABEL_WORLD, Address, IpcacheKey, Label, Prefix


class Learned(NamedTuple):
    """What an answer led to: the rows its addresses need, and the pairs that are new by it."""

    rows: list[RowReference]
    added: list[Pair]


class NameManager:
    """names_max bounds the names remembered, addresses_max the addresses of one name."""

    def __init__(
        self, cache: DnsCache, ipcache: Ipcache, identities: IdentityAllocator, *, names_max: int, addresses_max: int
    ) -> None:
        self.cache = cache
        self.selectors: dict[Fqdn, FqdnSelector] = {}
        self.names_max = names_max
        self.addresses_max = addresses_max
        self._index: PatternIndex[Fqdn] = PatternIndex()
        self._ipcache = ipcache
        self._identities = identities
        self._selectors_by_name: dict[str, tuple[FqdnSelector, ...]] = {}  # of names in the cache

    # --- selectors ---------------------------------------------------------------------------------------------------

    def register(self, peer: Fqdn) -> list[RowReference]:
        """One user more; gives back the rows of what the selector holds already. Raises NoRoom, and then nothing changed."""
        selector = self.selectors.get(peer)
        if selector is None:
            selector = FqdnSelector(peer)
            selector.identity = self._ipcache.identity_of(frozenset({selector.label, LABEL_WORLD}))
            self.selectors[peer] = selector
            self._index.add(peer.pattern, peer)
            try:
                self._match_known_names()
            except NoRoom:
                self._end(selector)
                raise
        selector.users += 1
        return self.rows_of(selector)

    def unregister(self, peer: Fqdn) -> list[RowReference]:
        """One user less; gives back the rows that change by it."""
        selector = self.selectors[peer]
        selector.users -= 1
        if selector.users:
            return []
        rows = self.rows_of(selector)
        self._end(selector)
        return [self._ipcache.reference(row.key) for row in rows]

    def _end(self, selector: FqdnSelector) -> None:
        del self.selectors[selector.peer]
        self._index.remove(selector.peer.pattern, selector.peer)
        self._match_known_names(beyond_bound=True)
        assert selector.identity is not None
        self._identities.release(selector.identity)

    def rows_of(self, selector: FqdnSelector) -> list[RowReference]:
        return [
            self._ipcache.reference(IpcacheKey(scope, Prefix.parse(label.removeprefix("cidr:"))))
            for scope, bag in selector.bags.items()
            for label in bag
        ]

    def _match_known_names(self, *, beyond_bound: bool = False) -> None:
        """The selectors changed: every known name is matched again."""
        for name in list(self.cache.scopes_by_name):
            before, after = self._selectors_by_name.get(name, ()), self._match(name)
            if before != after:
                self._selectors_by_name[name] = after
                for pair in self.cache.pairs_of(name):
                    self._relabel(pair, before, after, beyond_bound=beyond_bound)

    def _match(self, name: str) -> tuple[FqdnSelector, ...]:
        matching = [self.selectors[peer] for peer in self._index.matching(name)]
        return tuple(sorted((s for s in matching if s.takes(name)), key=lambda selector: selector.label))

    def selectors_of(self, name: str) -> tuple[FqdnSelector, ...]:
        selectors = self._selectors_by_name.get(name)
        return self._match(name) if selectors is None else selectors

    def labels_of(self, name: str) -> frozenset[Label]:
        return frozenset(selector.label for selector in self.selectors_of(name))

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
                    self._selectors_by_name[name] = selectors
                    learned.added.append(pair)
                    self._relabel(pair, (), selectors)
                if selectors:
                    learned.rows.append(self._ipcache.reference(IpcacheKey(scope, Prefix.of(address))))
        except NoRoom:
            self.take_back(learned.added)
            raise
        while len(self.cache.addresses(scope, name)) > self.addresses_max:
            self._evict_one(scope, name, keep={address for _, _, address in learned.added})
        return learned

    def _evict_one(self, scope: int, name: str, keep: set[Address]) -> None:
        """Over the bound of one name: the address whose lifetime ends first goes, one of the last answer only if all are."""
        addresses = self.cache.addresses(scope, name)
        address = min(addresses, key=lambda a: (a in keep, addresses[a].lives_until, a))
        self.forget(Pair(scope, name, address))

    def _relabel(
        self, pair: Pair, before: tuple[FqdnSelector, ...], after: tuple[FqdnSelector, ...], *, beyond_bound: bool = False
    ) -> None:
        key = IpcacheKey(pair.scope, Prefix.of(pair.address))
        if after:
            labels = frozenset(selector.label for selector in after)
            self._ipcache.upsert(key, pair.name, labels, beyond_bound=beyond_bound)
        elif before:
            self._ipcache.remove(key, pair.name)
        label = address_label(pair.address)
        for selector in before:
            if selector not in after:
                selector.remove_labels(pair.scope, (label,), pair.name)
        for selector in after:
            if selector not in before:
                selector.add_labels(pair.scope, (label,), pair.name)

    def holds(self, pairs: Iterable[Pair]) -> bool:
        """Is each of these addresses still one of its name's?"""
        return all(pair.address in self.cache.addresses(pair.scope, pair.name) for pair in pairs)

    def take_back(self, added: Iterable[Pair]) -> None:
        """An answer that cannot be released leaves nothing behind."""
        for pair in added:
            self.forget(pair)

    def forget(self, pair: Pair) -> None:
        """The address is no longer one of the name's."""
        selectors = self._selectors_by_name.get(pair.name, ())
        if self.cache.remove(pair):
            self._relabel(pair, selectors, ())
            if pair.name not in self.cache.scopes_by_name:
                self._selectors_by_name.pop(pair.name, None)

    def copy_scope(self, source: int, target: int, labels: frozenset[Label], now: float) -> None:
        """An endpoint gets a scope of its own: what its selectors hold in the old one is good in the new one. Raises NoRoom."""
        for name in [name for name, scopes in self.cache.scopes_by_name.items() if source in scopes]:
            if labels & self.labels_of(name):
                lifetimes = dict(self.cache.addresses(source, name))
                self.learn(name, [(address, round(life.lives_until - now)) for address, life in lifetimes.items()], target, now)

    def forget_scope(self, scope: int) -> None:
        """Nobody looks into this scope any more."""
        for name in [name for name, scopes in self.cache.scopes_by_name.items() if scope in scopes]:
            for address in list(self.cache.addresses(scope, name)):
                self.forget(Pair(scope, name, address))
