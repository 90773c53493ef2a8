"""Selector cache: selector -> identities, with incremental updates to its users (the sets).

What a new identity costs must not grow with the number of selectors, nor a new selector with the number of identities: FQDN
selectors and identities find each other by the label the selector gives, CIDR selectors and identities by the prefix of the
identity's one `cidr:` label. The few other selectors are asked one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList

from agent.core.policy import LABEL_ENDPOINT, cidr_holds, peer_selects
from agent.core.prefixes import LengthsInUse
from agent.core.rules import Cidr, Endpoints, Fqdn, Peer
from agent.core.types import Label, LabelSet, Prefix


class SelectorCache:
    def __init__(self) -> None:
        self.users_by_selector: dict[Peer, set[int]] = {}
        self.identities_by_selector: dict[Peer, set[int]] = {}
        self._labels_by_identity: dict[int, LabelSet] = {}
        self._fqdn_by_label: dict[Label, Fqdn] = {}
        self._identities_by_label: dict[Label, set[int]] = {}
        self._prefixes: dict[int, SortedList[Prefix]] = {4: SortedList(), 16: SortedList()}  # of identities' labels, by family
        self._cidrs_by_prefix: dict[Prefix, dict[Cidr, None]] = {}
        self._cidr_lengths = LengthsInUse()
        self._others: dict[Peer, None] = {}

    def add_user(self, selector: Peer, user: int) -> frozenset[int]:
        """A set begins to use the selector; gives back the identities it selects now."""
        users = self.users_by_selector.get(selector)
        if users is None:
            users = self.users_by_selector[selector] = set()
            self._index(selector)
            self.identities_by_selector[selector] = self._select(selector)
        users.add(user)
        return frozenset(self.identities_by_selector[selector])

    def remove_user(self, selector: Peer, user: int) -> None:
        """A set ends, which may not use all of its selectors yet; a selector without users is forgotten."""
        users = self.users_by_selector.get(selector)
        if users is None or user not in users:
            return
        users.discard(user)
        if not users:
            del self.users_by_selector[selector], self.identities_by_selector[selector]
            self._unindex(selector)

    def add_identity(self, identity: int, labels: LabelSet) -> list[Peer]:
        """A new identity; gives back the selectors that select it."""
        self._labels_by_identity[identity] = labels
        for label in labels:
            identities = self._identities_by_label.get(label)
            if identities is None:
                identities = self._identities_by_label[label] = set()
                for prefix in _prefixes_of((label,)):
                    self._prefixes[len(prefix.address)].add(prefix)
            identities.add(identity)
        selectors = self.selectors_of(labels)
        for selector in selectors:
            self.identities_by_selector[selector].add(identity)
        return selectors

    def remove_identity(self, identity: int) -> list[Peer]:
        """Gives back the selectors that selected it."""
        labels = self._labels_by_identity.pop(identity)
        for label in labels:
            identities = self._identities_by_label[label]
            identities.discard(identity)
            if not identities:
                del self._identities_by_label[label]
                for prefix in _prefixes_of((label,)):
                    self._prefixes[len(prefix.address)].remove(prefix)
        selectors = self.selectors_of(labels)
        for selector in selectors:
            self.identities_by_selector[selector].discard(identity)
        return selectors

    def selectors_of(self, labels: LabelSet) -> list[Peer]:
        """The selectors in use that select this label set."""
        selectors: list[Peer] = [s for label in labels if (s := self._fqdn_by_label.get(label)) is not None]
        for prefix in _prefixes_of(labels):
            for around in self._cidr_lengths.around(prefix):
                selectors += [cidr for cidr in self._cidrs_by_prefix.get(around, ()) if cidr_holds(cidr, prefix)]
        selectors += [other for other in self._others if peer_selects(other, labels)]
        return selectors

    def _select(self, selector: Peer) -> set[int]:
        if isinstance(selector, Fqdn):
            return set(self._identities_by_label.get(selector.label, ()))
        if isinstance(selector, Cidr):
            inside = self._prefixes[len(selector.prefix.address)].irange(selector.prefix, selector.prefix.last)
            held = (self._identities_by_label[f"cidr:{prefix}"] for prefix in inside if cidr_holds(selector, prefix))
            return set().union(*held)
        candidates: Iterable[int] = self._labels_by_identity
        if isinstance(selector, Endpoints):
            candidates = self._identities_by_label.get(LABEL_ENDPOINT, ())
        return {identity for identity in candidates if peer_selects(selector, self._labels_by_identity[identity])}

    def _index(self, selector: Peer) -> None:
        if isinstance(selector, Fqdn):
            self._fqdn_by_label[selector.label] = selector
        elif isinstance(selector, Cidr):
            self._cidrs_by_prefix.setdefault(selector.prefix, {})[selector] = None
            self._cidr_lengths.add(selector.prefix)
        else:
            self._others[selector] = None

    def _unindex(self, selector: Peer) -> None:
        if isinstance(selector, Fqdn):
            del self._fqdn_by_label[selector.label]
        elif isinstance(selector, Cidr):
            cidrs = self._cidrs_by_prefix[selector.prefix]
            del cidrs[selector]
            if not cidrs:
                del self._cidrs_by_prefix[selector.prefix]
            self._cidr_lengths.remove(selector.prefix)
        else:
            del self._others[selector]


def _prefixes_of(labels: Iterable[Label]) -> Iterator[Prefix]:
    return (Prefix.parse(label.removeprefix("cidr:")) for label in labels if label.startswith("cidr:"))
