"""Name manager: names and FQDN selectors to labels on prefixes. It owns all identity management of learned addresses.

    answer -> DNS cache -> selectors that match the name -> metadata of the prefix (resource: the name) -> ipcache row
                                                       `-> bags of the selectors

A name no selector wants is remembered, so that a selector that comes later finds it, and costs no row and no wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple, cast

from sortedcontainers import SortedList

from agent.core.crowd import Crowd
from agent.core.dns_cache import SAVED_WITHIN_S, DnsCache, Lifetime, Pair
from agent.core.guard import AddressGuard
from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.ipcache import Ipcache
from agent.core.names import PatternIndex
from agent.core.places import LOOKED_AT_ONCE, Account, Place, Places
from agent.core.records import PairGone, PairRecord, Record
from agent.core.rules import Fqdn
from agent.core.selectors import FqdnSelector
from agent.core.tables import RowReference
from agent.core.types import LABEL_WORLD, Address, LabelSet, address_key

# About 2 ms of matching and labels: between two slices the shell looks at its sockets.
PAIRS_AT_ONCE: Final = 32
# A bound that was made smaller is reached by and by, so many addresses with each answer.
EVICTED_AT_ONCE: Final = 32
# A name that is not known is looked for when its reply is judged, held and learned.
MATCHES_MAX: Final = 1_024


class Learned:
    """What an answer led to: the rows its addresses need and the kernel does not hold, and the pairs that are new by it.

    lifetimes: of all its addresses, in their order.
    """

    __slots__ = ("added", "lifetimes", "rows")

    def __init__(self) -> None:
        self.rows: list[RowReference] = []
        self.added: list[Pair] = []
        self.lifetimes: list[Lifetime] = []


class Lesson:
    """An answer that changed nothing but lifetimes, as the next one like it does while all else is as it was (`repeat`)."""

    __slots__ = ("guard", "known", "lifetimes", "name", "records", "scope")

    def __init__(
        self,
        records: tuple[tuple[Address, int], ...],
        scope: int,
        name: str,
        known: _Known,
        guard: AddressGuard,
        lifetimes: list[Lifetime],
    ) -> None:
        self.records = records
        self.scope = scope
        self.name = name
        self.known = known
        self.guard = guard
        self.lifetimes = lifetimes


class _Matched(NamedTuple):
    """Selectors that match a name, in order, and their labels."""

    selectors: tuple[FqdnSelector, ...]
    labels: LabelSet


class _Known(NamedTuple):
    """What is known of a name beside its addresses. A million names share a few of these."""

    selectors: tuple[FqdnSelector, ...]
    account: Account


@dataclass(slots=True)
class _Stretch:
    """Known names in order, spelt backwards, from the first to the last: still to be matched again."""

    first: str
    last: str


class NameManager:
    """names_max bounds the names remembered, addresses_max the addresses of one name; live_s: see `Crowd`."""

    def __init__(
        self,
        cache: DnsCache,
        ipcache: Ipcache,
        identities: IdentityAllocator,
        *,
        names_max: int,
        addresses_max: int,
        live_s: float,
    ) -> None:
        self.cache = cache
        self.selectors: dict[Fqdn, FqdnSelector] = {}
        self.names_max = names_max
        self.addresses_max = addresses_max
        self.live_s = live_s
        self.guard = AddressGuard()
        self._index: PatternIndex[Fqdn] = PatternIndex()
        self._ipcache = ipcache
        self._identities = identities
        self._known_by_name: dict[str, _Known] = {}  # of names in the cache
        self._known: dict[Account, dict[tuple[FqdnSelector, ...], _Known]] = {}
        self._matches: dict[str, tuple[FqdnSelector, ...]] = {}  # of the names looked for last, since a selector came or went
        self._matched: dict[tuple[FqdnSelector, ...], _Matched] = {}  # a million names of one pattern share one of these
        self._names_in_order: SortedList[str] = SortedList()  # the same names, reversed label by label
        self._crowds: dict[tuple[int, str], Crowd] = {}
        self._places = Places(live_s)
        self._coming: deque[_Stretch] = deque()
        self._gone: deque[_Stretch] = deque()
        self.pairs_at_once = PAIRS_AT_ONCE
        self.records: list[Record] = []  # what the journal has to learn, since somebody looked

    # --- selectors ---------------------------------------------------------------------------------------------------

    def register(self, *peers: Fqdn) -> Iterator[RowReference]:
        """One user more for each; gives back the rows of what they hold. Raises NoRoom, and then nothing changed.

        Where many names are known it takes a while: until `is_coming` is false, `match_coming` goes on with it.
        """
        registered: list[Fqdn] = []
        try:
            registered.extend(self.registering(peers))  # when it raises, those before are in the list
            self.match_coming()
        except NoRoom:
            self.stop_coming()
            self.unregister(*registered)
            raise
        return (row for peer in dict.fromkeys(peers) for row in self._rows_of(self.selectors[peer]))

    def registering(self, peers: Iterable[Fqdn]) -> Iterator[Fqdn]:
        """`register` one by one, each given back when it is; known names are `match_coming`'s after the last. Raises NoRoom."""
        stretches: list[_Stretch] = []
        for peer in peers:
            selector = self.selectors.get(peer)
            if selector is None:
                selector = FqdnSelector(peer)
                selector.identity = self._ipcache.identity_of(frozenset({selector.label, LABEL_WORLD}))
                self.selectors[peer] = selector
                self._index.add(peer.pattern, peer)
                self._matches.clear()
                stretches += self._known_below(selector)
            selector.users += 1
            yield peer
        self._coming += _apart(stretches)

    def unregister(self, *peers: Fqdn) -> list[RowReference]:
        """One user less for each; gives back the rows that change by it, as far as `match_gone` is not needed for more."""
        for _ in self.unregistering(peers):
            pass
        return self.match_gone()

    def unregistering(self, peers: Iterable[Fqdn]) -> Iterator[Fqdn]:
        """`unregister` one by one; known names are `match_gone`'s after the last."""
        stretches: list[_Stretch] = []
        for peer in peers:
            selector = self.selectors[peer]
            selector.users -= 1
            if not selector.users:
                del self.selectors[peer]
                self._index.remove(peer.pattern, peer)
                self._matches.clear()
                assert selector.identity is not None
                self._identities.release(selector.identity)
                stretches += self._known_below(selector)
            yield peer
        self._gone += _apart(stretches)

    def _rows_of(self, selector: FqdnSelector) -> Iterator[RowReference]:
        for scope, bag in selector.bags.items():
            for address in bag:
                yield self._ipcache.reference(address_key(scope, address))

    # --- selectors and what is known -----------------------------------------------------------------------------------

    @property
    def is_coming(self) -> bool:
        """Are there known names whose labels lack a new selector's?"""
        return bool(self._coming)

    @property
    def is_leaving(self) -> bool:
        """Are there known names that have the label of a selector that is gone?"""
        return bool(self._gone)

    def match_coming(self) -> list[RowReference]:
        """One slice of the names that new selectors may match; gives back the rows that change. Raises NoRoom."""
        return self._match_slice(self._coming, beyond_bound=False)

    def match_gone(self) -> list[RowReference]:
        """One slice of the names that selectors which are gone may have matched; gives back the rows that change."""
        rows = self._match_slice(self._gone, beyond_bound=True)
        if not self._gone:
            self._matched = {s: m for s, m in self._matched.items() if all(self.selectors.get(x.peer) is x for x in s)}
            for known in self._known.values():
                for selectors in known.keys() - self._matched.keys():
                    del known[selectors]
        return rows

    def stop_coming(self) -> None:
        """The new selectors are not to be after all."""
        self._coming.clear()

    def _known_below(self, selector: FqdnSelector) -> list[_Stretch]:
        """Known names below the selector's literal suffix, found without looking at the others."""
        first = _reversed(selector.peer.pattern if selector.is_exact else selector.suffix)
        last = first if selector.is_exact else first + _AFTER_DOT
        return [_Stretch(first, last)] if next(self._names_in_order.irange(first, last), None) is not None else []

    def _match_slice(self, stretches: deque[_Stretch], *, beyond_bound: bool) -> list[RowReference]:
        rows: list[RowReference] = []
        left = self.pairs_at_once
        while stretches:
            stretch = stretches[0]
            for backwards in self._names_in_order.irange(stretch.first, stretch.last):
                if left <= 0:
                    return rows
                stretch.first = backwards + "\0"
                changed = self._match_again(_reversed(backwards), beyond_bound=beyond_bound)
                left -= 1 + len(changed)
                rows += changed
            stretches.popleft()
        return rows

    def _match_again(self, name: str, *, beyond_bound: bool) -> list[RowReference]:
        """The selectors of the name may have changed; gives back the rows that change with them."""
        known, after = self._known_by_name[name], self._match(name)
        before = known.selectors
        if before == after:
            return []
        self._known_by_name[name] = self._shared_known(after, known.account)
        pairs = list(self.cache.pairs_of(name))
        for pair in pairs:
            self._relabel(pair, before, after, beyond_bound=beyond_bound)
        return [self._ipcache.reference(address_key(pair.scope, pair.address)) for pair in pairs]

    def _match(self, name: str) -> tuple[FqdnSelector, ...]:
        selectors = self._matches.get(name)
        if selectors is None:
            matching = [self.selectors[peer] for peer in self._index.matching(name)]
            in_order = sorted((s for s in matching if s.takes(name)), key=lambda selector: selector.label)
            selectors = self._shared(tuple(in_order)).selectors
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            self._matches[name] = selectors
        return selectors

    def _shared(self, selectors: tuple[FqdnSelector, ...]) -> _Matched:
        matched = self._matched.get(selectors)
        if matched is None:
            matched = self._matched[selectors] = _Matched(selectors, frozenset(selector.label for selector in selectors))
        return matched

    def selectors_of(self, name: str) -> tuple[FqdnSelector, ...]:
        known = self._known_by_name.get(name)
        return self._match(name) if known is None else known.selectors

    def labels_of(self, name: str) -> LabelSet:
        return self._shared(self.selectors_of(name)).labels

    # --- names -------------------------------------------------------------------------------------------------------

    def may_lack_room(self, name: str, more: int, scope: int) -> bool:
        """Could so many more addresses be too many? A quick look; `make_room` knows."""
        return len(self.cache.addresses(scope, name)) + more > self.addresses_max

    def make_room(self, name: str, addresses: Collection[Address], scope: int, now: float) -> list[Address]:
        """Before `learn`: where the name has as many addresses as it may, those longest unused go.

        Gives back the addresses whose flows have to be looked at first (`look`); call again then. None: there is room.
        Raises NoRoom when too many of them have live flows.
        """
        known = self.cache.addresses(scope, name)
        new = sum(address not in known for address in addresses)
        if not new or len(known) + new <= self.addresses_max:
            return []
        crowd = self._crowds.get((scope, name))
        if crowd is None:
            lifetimes = ((address, self.cache.lifetimes[Pair(scope, name, address)]) for address in known)
            answered = ((address, lifetime.answered_at, lifetime.lives_until) for address, lifetime in lifetimes)
            crowd = self._crowds[scope, name] = Crowd(answered, self.live_s)
        count = min(len(known) + new - self.addresses_max, new + EVICTED_AT_ONCE)
        leaving = crowd.longest_unused(count, addresses, now)
        if len(leaving) < count:
            raise NoRoom(f"{name} has {len(known)} addresses and all are in use (limits.addresses-per-name)")
        unknown = [address for address in leaving if not crowd.is_known(address, now)]
        if not unknown:
            for address in leaving:
                self.forget(Pair(scope, name, address))
        return unknown

    def make_place(self, name: str, account: Account, now: float) -> list[tuple[int, Address]]:
        """Before `learn`: where all names are in use, others make way for one that is wanted (places.py).

        Gives back the addresses, with their scopes, whose flows have to be looked at first (`look`); call again then. None: as
        far as there can be, there is a place.
        """
        if len(self._known_by_name) < self.names_max or name in self._known_by_name or not self._match(name):
            return []
        places = self._places
        if not places.leaving:
            places.choose(self._some_places(), account)
        pairs = {one: list(self.cache.pairs_of(one)) for one in places.leaving}
        unknown = [
            (pair.scope, pair.address)
            for one in places.leaving
            if self.selectors_of(one)
            for pair in pairs[one]
            if not places.is_known(pair.scope, pair.address, now)
        ]
        if not unknown:
            places.leaving = ()
            for of_one in pairs.values():
                if not any(places.is_live(pair.scope, pair.address, now) for pair in of_one):
                    self.take_back(of_one)
        return unknown

    def _some_places(self) -> Iterator[Place]:
        """The next names in order, the first after the last."""
        order, hand = self._names_in_order, self._places.hand
        in_turn = chain(order.irange(hand, inclusive=(False, True)), order.irange(maximum=hand))
        for backwards in islice(in_turn, LOOKED_AT_ONCE):
            self._places.hand = backwards
            name = _reversed(backwards)
            answered = [self.cache.lifetimes[pair].answered_at for pair in self.cache.pairs_of(name)]
            yield Place(name, self._known_by_name[name].account, len(answered), max(answered))

    def look(self, name: str, scope: int, address: Address, seen_at: float | None, now: float) -> None:
        """When a flow of the address was seen last: asked for by `make_room` or `make_place`."""
        self._places.look(scope, address, seen_at, now)
        crowd = self._crowds.get((scope, name))
        if crowd is not None:
            crowd.seen(address, seen_at, now)

    def learn(
        self, name: str, records: Iterable[tuple[Address, int]], scope: int, now: float, account: Account = None
    ) -> Learned:
        """Take in the addresses of one answer, each with its TTL in seconds. account: who asked for it.

        Raises NoRoom when the identities' bound is reached; what this answer added is taken back then.
        """
        crowd = self._crowds.get((scope, name))
        known = self._known_by_name.get(name)
        if known is None:
            if len(self._known_by_name) >= self.names_max:
                raise NoRoom(f"all {self.names_max} names are in use (limits.names)")
            selectors = self._match(name)
        else:
            selectors = known.selectors
            if known.account is not None and account is not None and known.account != account:
                self._know(name, selectors, None)
        learned = Learned()
        # A `Pair` and an `IpcacheKey` are tuples; making one costs more than looking it up.
        lifetimes = cast("dict[tuple[int, str, Address], Lifetime]", self.cache.lifetimes)
        is_there = cast("Callable[[tuple[int, tuple[Address, int]]], bool]", self._ipcache.is_there)
        pending = self._ipcache.pending
        try:
            for address, ttl in records:
                lifetime = lifetimes.get((scope, name, address))
                if lifetime is None:
                    pair = Pair(scope, name, address)
                    lifetime = self.cache.add(pair, ttl, now)
                    if name not in self._known_by_name:
                        self._know(name, selectors, account)
                    learned.added.append(pair)
                    self._relabel(pair, (), selectors)
                else:
                    self.cache.extend(lifetime, ttl, now)
                learned.lifetimes.append(lifetime)
                if crowd is not None:
                    crowd.answered(address, now, lifetime.lives_until)
                if lifetime.kept_until >= lifetime.saved_until + SAVED_WITHIN_S:
                    self._save(scope, name, address, lifetime)
                if not selectors or not pending:
                    continue  # what a selector holds has a row, and every row is as it is wanted
                if not is_there((scope, (address, len(address) * 8))) and self._may_be_held(selectors, address):
                    learned.rows.append(self._ipcache.reference(address_key(scope, address)))
        except NoRoom:
            self.take_back(learned.added)
            raise
        return learned

    def lesson(self, name: str, records: tuple[tuple[Address, int], ...], scope: int, learned: Learned) -> Lesson | None:
        """After `learn` had nothing to add and no row to wait for; None for a name whose addresses are counted by use."""
        if (scope, name) in self._crowds:
            return None
        return Lesson(records, scope, name, self._known_by_name[name], self.guard, learned.lifetimes)

    def repeat(self, lesson: Lesson, now: float) -> bool:
        """`learn` the same again. False: something is different by now, and nothing was done."""
        if lesson.guard is not self.guard or self._known_by_name.get(lesson.name) is not lesson.known or self._ipcache.pending:
            return False
        if (lesson.scope, lesson.name) in self._crowds:
            return False
        for lifetime in lesson.lifetimes:
            if lifetime.is_over:
                return False
        for place, lifetime in enumerate(lesson.lifetimes):
            address, ttl = lesson.records[place]
            self.cache.extend(lifetime, ttl, now)
            if lifetime.kept_until >= lifetime.saved_until + SAVED_WITHIN_S:
                self._save(lesson.scope, lesson.name, address, lifetime)
        return True

    def _know(self, name: str, selectors: tuple[FqdnSelector, ...], account: Account) -> None:
        """The name is new, or it is on another account from now on."""
        before = self._known_by_name.get(name)
        if before is None:
            self._names_in_order.add(_reversed(name))
        else:
            self._off_account(before.account)
        self._known_by_name[name] = self._shared_known(selectors, account)
        self._places.accounts.add(account)

    def _shared_known(self, selectors: tuple[FqdnSelector, ...], account: Account) -> _Known:
        of_account = self._known.get(account)
        if of_account is None:
            of_account = self._known[account] = {}
        known = of_account.get(selectors)
        if known is None:
            known = of_account[selectors] = _Known(selectors, account)
        return known

    def _off_account(self, account: Account) -> None:
        self._places.accounts.take(account)
        if not self._places.accounts.of(account):
            del self._known[account]

    def _relabel(
        self, pair: Pair, before: tuple[FqdnSelector, ...], after: tuple[FqdnSelector, ...], *, beyond_bound: bool = False
    ) -> None:
        key = address_key(pair.scope, pair.address)
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

    def _may_be_held(self, selectors: Iterable[FqdnSelector], address: Address) -> bool:
        return any(self._may_hold(selector, address) for selector in selectors)

    def _may_hold(self, selector: FqdnSelector, address: Address) -> bool:
        """Does the address guard let this address through for the selector's policy?"""
        return self.guard.forbids(address, selector.peer.allowed) is None

    def change_guard(self, guard: AddressGuard, changed: Iterable[Address]) -> None:
        """The host's addresses changed: what names say of these is judged again."""
        self.guard = guard
        for address in changed:
            for pair in self.cache.pairs_by_address.of(address):
                selectors = self._known_by_name[pair.name].selectors
                self._relabel(pair, selectors, selectors, beyond_bound=True)

    def keep(self, pair: Pair, until: float) -> None:
        """A flow uses the address past its lifetime."""
        self.cache.keep(pair, until)
        lifetime = self.cache.lifetimes[pair]
        if lifetime.kept_until >= lifetime.saved_until + SAVED_WITHIN_S:
            self._save(*pair, lifetime)

    def _save(self, scope: int, name: str, address: Address, lifetime: Lifetime) -> None:
        """Ends that moved by less than a second may wait for the next time."""
        lifetime.saved_until = lifetime.kept_until
        self.records.append(PairRecord(scope, name, address, lifetime.lives_until, lifetime.kept_until))

    def restore(self, records: Collection[PairRecord]) -> None:
        """Pairs of the process before, each once; no selector is there yet that could want them."""
        self.cache.restore(records)
        known = self._shared_known((), None)
        self._known_by_name = dict.fromkeys((record.name for record in records), known)
        self._names_in_order.update(map(_reversed, self._known_by_name))
        if self._known_by_name:
            self._places.accounts.add(None, len(self._known_by_name))

    def holds(self, pairs: Iterable[Pair]) -> bool:
        """Is each of these addresses still one of its name's?"""
        return all(pair in self.cache.lifetimes for pair in pairs)

    def take_back(self, added: Iterable[Pair]) -> None:
        """An answer that cannot be released leaves nothing behind."""
        for pair in added:
            self.forget(pair)

    def forget(self, pair: Pair) -> None:
        """The address is no longer one of the name's."""
        if self.cache.remove(pair):
            known = self._known_by_name[pair.name]
            self.records.append(PairGone(*pair))
            self._relabel(pair, known.selectors, ())
            self._leave_crowd(pair)
            if pair.name not in self.cache.scopes_by_name:
                del self._known_by_name[pair.name]
                self._names_in_order.remove(_reversed(pair.name))
                self._off_account(known.account)

    def _leave_crowd(self, pair: Pair) -> None:
        crowd = self._crowds.get((pair.scope, pair.name))
        if crowd is not None:
            crowd.gone(pair.address)
            if len(self.cache.addresses(pair.scope, pair.name)) <= self.addresses_max // 2:
                del self._crowds[pair.scope, pair.name]

    @property
    def scopes(self) -> set[int]:
        """Scopes in which anything is known."""
        return set(self.cache.addresses_by_scope)

    def copy_scope(self, source: int, target: int, labels: LabelSet, now: float) -> Iterator[list[RowReference]]:
        """An endpoint gets a scope of its own: what its selectors hold in the old one is good in the new one.

        Name by name; gives back the rows of each. Raises NoRoom.
        """
        for name in list(self.cache.addresses_by_scope.get(source, ())):
            pairs = [Pair(source, name, address) for address in self.cache.addresses(source, name)]
            rows: list[RowReference] = []
            if pairs and labels & self.labels_of(name):
                ends = [(pair.address, round(self.cache.lifetimes[pair].lives_until - now)) for pair in pairs]
                rows = self.learn(name, ends, target, now).rows
            yield rows

    def pairs_in(self, scope: int) -> Iterator[Pair]:
        """What is known in a scope. Pairs may come and go between two of them."""
        for name in list(self.cache.addresses_by_scope.get(scope, ())):
            for address in list(self.cache.addresses(scope, name)):
                yield Pair(scope, name, address)


def _apart(stretches: list[_Stretch]) -> list[_Stretch]:
    """The same names, none of them twice."""
    apart: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.first, -len(stretch.last))):
        # Suffixes are one inside the other or have nothing in common.
        if not apart or stretch.last > apart[-1].last:
            apart.append(stretch)
    return apart


# Between a dot and the sign after it, in order, are all names below a suffix.
_AFTER_DOT: Final = "/"


def _reversed(name: str) -> str:
    """`www.example.com.` to `.com.example.www` and back: names below one suffix stand together."""
    return ".".join(reversed(name.split(".")))
