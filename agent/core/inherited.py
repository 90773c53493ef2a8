"""Sets of the process before, which judge until the first flip of this one.

Nobody here knows the rules behind them. So when an address or a network gets more labels than it had, because this process's
policies name more or its journal knows more, the identity it moves to means nothing to them, and what they allowed would be
shut until the flip (I5, I7). The rows of the identity it had are copied to the one it gets: by the rules of before the labels
that were added change nothing. What counts is the identity it had when this process began: labels that came since, and go again
because a policy does not fit, were never known to these sets.

Never the other way: what lost a label that is not a network's, such as an address that was an endpoint's and is the host's
now, gets nothing from what it was. Of nested networks the closest one names an address, and one further in is named in its
place; what the sets say of the outer one holds for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent.core.tables import PolicyTable
from agent.core.types import IDENTITY_WORLD, SCOPE_STATIC, IpcacheKey, Key, LabelSet, PolicyKey, PolicyValue, Prefix, Value


class InheritedSets:
    """labels_by_identity: of every identity there is, those of the process before among them."""

    def __init__(self, policy: PolicyTable, labels_by_identity: Mapping[int, LabelSet]) -> None:
        self._policy = policy
        self._ipcache_rows: Mapping[Key, Value] = {}
        self._labels_by_identity = labels_by_identity
        self._rows_by_identity: dict[int, dict[PolicyKey, PolicyValue]] = {}
        self._copied: list[PolicyKey] = []

    def adopt(self, rows: Mapping[Key, Value], ipcache_rows: Mapping[Key, Value]) -> None:
        """The policy rows of before, and the ipcache's as they stood."""
        self._ipcache_rows = ipcache_rows
        self._policy.adopt(rows)
        for key, value in rows.items():
            assert isinstance(key, PolicyKey)
            assert isinstance(value, PolicyValue)
            self._rows_by_identity.setdefault(key.identity, {})[key] = value

    def follow(self, key: IpcacheKey, identity: int) -> None:
        """The row is about to name this identity: to the sets of before it is what the row's addresses were to them."""
        if not self._rows_by_identity:
            return
        before = self._identity_before(key)
        if before == identity or not self._adds_labels(before, identity):
            return
        for row, value in list(self._rows_by_identity.get(before, {}).items()):
            copy = row._replace(identity=identity)
            rows = self._rows_by_identity.setdefault(identity, {})
            if copy not in rows:
                rows[copy] = value
                self._policy.want(copy, value)
                self._copied.append(copy)

    def let_go(self) -> Iterator[int]:
        """The first policies of this process are in force. Step by step; gives back what each cost."""
        while self._rows_by_identity:
            yield len(self._rows_by_identity.popitem()[1]) // 8
        while self._copied:
            self._policy.drop(self._copied.pop())
            yield 1
        yield from self._policy.let_inherited_go()

    def _identity_before(self, key: IpcacheKey) -> int:
        """By the row itself, else by the closest static network around it, else the world."""
        identity = self._ipcache_rows.get(key)
        length = key.prefix.length
        while identity is None and length >= 0:
            identity = self._ipcache_rows.get(IpcacheKey(SCOPE_STATIC, Prefix.masked(key.prefix.address, length)))
            length -= 1
        if identity is None:
            return IDENTITY_WORLD
        assert isinstance(identity, int)
        return identity

    def _adds_labels(self, before: int, after: int) -> bool:
        had, has = (self._labels_by_identity.get(identity, frozenset()) for identity in (before, after))
        return bool(had) and all(label in has for label in had if not label.startswith("cidr:"))
