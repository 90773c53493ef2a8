"""Selector cache: selector -> identities, with incremental updates to its users (the sets).

What a new identity costs must not grow with the number of selectors: FQDN selectors are found by the label they give, CIDR
selectors by the identity's one `cidr:` label (remembered for each label); the few others are asked one by one.
"""

from __future__ import annotations

from agent.core.policy import peer_selects
from agent.core.rules import Cidr, Fqdn, Peer
from agent.core.types import Label, LabelSet


class SelectorCache:
    def __init__(self) -> None:
        self.users_by_selector: dict[Peer, set[int]] = {}
        self.identities_by_selector: dict[Peer, set[int]] = {}
        self._labels_by_identity: dict[int, LabelSet] = {}
        self._fqdn_by_label: dict[Label, Fqdn] = {}
        self._identities_by_label: dict[Label, set[int]] = {}
        self._cidrs: set[Cidr] = set()
        self._cidrs_by_label: dict[Label, tuple[Cidr, ...]] = {}
        self._others: set[Peer] = set()

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
        """A set ends; a selector without users is forgotten."""
        users = self.users_by_selector[selector]
        users.discard(user)
        if not users:
            del self.users_by_selector[selector], self.identities_by_selector[selector]
            self._unindex(selector)

    def add_identity(self, identity: int, labels: LabelSet) -> list[Peer]:
        """A new identity; gives back the selectors that select it."""
        self._labels_by_identity[identity] = labels
        for label in labels:
            self._identities_by_label.setdefault(label, set()).add(identity)
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
        selectors = self.selectors_of(labels)
        for selector in selectors:
            self.identities_by_selector[selector].discard(identity)
        return selectors

    def selectors_of(self, labels: LabelSet) -> list[Peer]:
        """The selectors in use that select this label set."""
        selectors: list[Peer] = [s for label in labels if (s := self._fqdn_by_label.get(label)) is not None]
        for label in labels:
            if label.startswith("cidr:"):
                selectors += self._cidrs_of(label)
        selectors += [other for other in self._others if peer_selects(other, labels)]
        return selectors

    def _cidrs_of(self, label: Label) -> tuple[Cidr, ...]:
        cidrs = self._cidrs_by_label.get(label)
        if cidrs is None:
            labels = frozenset({label})
            cidrs = self._cidrs_by_label[label] = tuple(c for c in self._cidrs if peer_selects(c, labels))
        return cidrs

    def _select(self, selector: Peer) -> set[int]:
        if isinstance(selector, Fqdn):
            return set(self._identities_by_label.get(selector.label, ()))
        return {identity for identity, labels in self._labels_by_identity.items() if peer_selects(selector, labels)}

    def _index(self, selector: Peer) -> None:
        if isinstance(selector, Fqdn):
            self._fqdn_by_label[selector.label] = selector
        elif isinstance(selector, Cidr):
            self._cidrs.add(selector)
            self._cidrs_by_label.clear()
        else:
            self._others.add(selector)

    def _unindex(self, selector: Peer) -> None:
        if isinstance(selector, Fqdn):
            del self._fqdn_by_label[selector.label]
        elif isinstance(selector, Cidr):
            self._cidrs.discard(selector)
            self._cidrs_by_label.clear()
        else:
            self._others.discard(selector)
