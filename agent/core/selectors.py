"""FQDN selectors: bags of `cidr:` labels.

The bag says which addresses a selector holds, in each scope, and which names brought each of them, so that two names on one
address do not fight. Numbers (identities) are shared by addresses of equal label sets; the bag knows nothing of them.

In the bag a label stands as its address: a million labels are 70 MB as text, which nobody reads but people.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.core.multimap import MultiMap
from agent.core.names import NamePattern, matches_everything
from agent.core.rules import Fqdn
from agent.core.types import Address, Label


class FqdnSelector:
    """One `toFQDNs` entry in use.

    suffix: the literal labels at the pattern's end. users: sets that name it. identity: of the addresses held by just this
    selector, made in advance so that the first reply needs one map write.
    """

    __slots__ = ("_excepts", "bags", "identity", "is_exact", "label", "peer", "suffix", "users")

    def __init__(self, peer: Fqdn) -> None:
        self.peer = peer
        self.label: Label = peer.label
        self.is_exact = "*" not in peer.pattern
        self.suffix = "" if matches_everything(peer.pattern) else NamePattern(peer.pattern).suffix
        self.users = 0
        self.identity: int | None = None
        self.bags: dict[int, MultiMap[Address, str]] = {}  # scope -> address of the label -> names that brought it
        self._excepts = tuple(NamePattern(pattern) for pattern in peer.excepts)

    def takes(self, name: str) -> bool:
        """Of a name that the pattern matches: is it not excepted?"""
        return not any(pattern.matches(name) for pattern in self._excepts)

    def add_labels(self, scope: int, addresses: Iterable[Address], name: str) -> None:
        """This name brings the labels of these addresses."""
        bag = self.bags.get(scope)
        if bag is None:
            bag = self.bags[scope] = MultiMap()
        for address in addresses:
            bag.add(address, name)

    def remove_labels(self, scope: int, addresses: Iterable[Address], name: str) -> None:
        """This name brings them no longer."""
        bag = self.bags.get(scope)
        if bag is not None:
            for address in addresses:
                bag.discard(address, name)
            if not bag:
                del self.bags[scope]
