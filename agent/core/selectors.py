"""FQDN selectors: bags of `cidr:` labels.

The bag says which addresses a selector holds, in each scope, and which names brought each of them, so that two names on one
address do not fight. Numbers (identities) are shared by addresses of equal label sets; the bag knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.core.names import NamePattern, matches_everything
from agent.core.rules import Fqdn
from agent.core.types import Address, Label, Prefix


def address_label(address: Address) -> Label:
    """`cidr:192.0.2.1/32`"""
    return f"cidr:{Prefix.of(address)}"


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
        self.bags: dict[int, dict[Label, set[str]]] = {}  # scope -> label -> names that brought it
        self._excepts = tuple(NamePattern(pattern) for pattern in peer.excepts)

    def takes(self, name: str) -> bool:
        """Of a name that the pattern matches: is it not excepted?"""
        return not any(pattern.matches(name) for pattern in self._excepts)

    def add_labels(self, scope: int, labels: Iterable[Label], name: str) -> None:
        """This name brings these addresses."""
        bag = self.bags.setdefault(scope, {})
        for label in labels:
            bag.setdefault(label, set()).add(name)

    def remove_labels(self, scope: int, labels: Iterable[Label], name: str) -> None:
        """This name brings them no longer."""
        bag = self.bags.get(scope, {})
        for label in labels:
            names = bag.get(label)
            if names is not None:
                names.discard(name)
                if not names:
                    del bag[label]
        if not bag:
            self.bags.pop(scope, None)
