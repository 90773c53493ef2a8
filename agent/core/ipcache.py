"""ipcache: from metadata to rows.

An upsert or a removal acts on the metadata, finds the identity of the label set that results, and asks for the row; what it
gives back can be waited for (`Barriers.take`). Identities that are new are told to whoever computes policy rows before the
row is asked for, so that the reconciler sees them missing and waits for them (I2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.metadata import HOST_LABELS, Metadata
from agent.core.tables import IpcacheTable, RowReference
from agent.core.types import LABEL_WORLD, SCOPE_STATIC, Address, IpcacheKey, Key, LabelSet, Prefix, Value

RESOURCE_POLICY = "policy"
RESOURCE_HOST = "host"
RESOURCE_INHERITED = "inherited"


class Ipcache:
    """identity_added: called for each identity that is new, before a row names it."""

    def __init__(
        self, table: IpcacheTable, identities: IdentityAllocator, identity_added: Callable[[int, LabelSet], None]
    ) -> None:
        self.metadata = Metadata()
        self._table = table
        self._identities = identities
        self._identity_added = identity_added
        self.row_follows: Callable[[IpcacheKey, int], None] | None = None  # see inherited.py
        self._deferred: dict[IpcacheKey, None] | None = None
        self._inherited: list[IpcacheKey] = []

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Many changes of metadata, each row resolved once at the end. NoRoom comes then; what was attached stays attached."""
        assert self._deferred is None, "deferring does not nest"
        self._deferred = {}
        try:
            yield
        finally:
            keys, self._deferred = self._deferred, None
            for key in keys:
                self._resolve_row(key, beyond_bound=False)

    def upsert(self, key: IpcacheKey, resource: str, labels: LabelSet, *, beyond_bound: bool = False) -> RowReference:
        """Attach labels to a prefix; raises NoRoom, and then nothing has changed. beyond_bound: see `IdentityAllocator`."""
        before = self.metadata.attached(key, resource)
        if self.metadata.upsert(key, resource, labels):
            try:
                self._resolve(key, beyond_bound=beyond_bound)
            except NoRoom:
                if before is None:
                    self.metadata.remove(key, resource)
                else:
                    self.metadata.upsert(key, resource, before)
                self._resolve(key, beyond_bound=True)
                raise
        return self._table.reference(key)

    def remove(self, key: IpcacheKey, resource: str) -> RowReference:
        """Take back what this resource attached to the prefix."""
        if self.metadata.remove(key, resource):
            if self._inherited and self.row_follows is None:
                # The sets that knew no more than the process before judge no longer: nothing is open for its sake.
                self.metadata.remove(key, RESOURCE_INHERITED)
            self._resolve(key, beyond_bound=True)
        return self._table.reference(key)

    def adopt(self, rows: Mapping[Key, Value]) -> None:
        """Rows of the process before keep the labels of names and networks that their identities stand for, until let go.

        What an endpoint or the host was stays as it stands until its source has spoken: without that it would be the world.
        """
        self._table.adopt(rows)
        with self.deferred():
            unsaid: list[IpcacheKey] = []
            for key, identity in rows.items():
                assert isinstance(key, IpcacheKey)
                assert isinstance(identity, int)
                labels = self._identities.labels_by_identity.get(identity, frozenset())
                kinds = ("cidr:",) if key.scope == SCOPE_STATIC else ("fqdn:",)
                kept = frozenset(label for label in labels if label.startswith(kinds))
                if key.scope == SCOPE_STATIC:
                    kept &= {f"cidr:{key.prefix}"}
                if kept:
                    self._inherited.append(key)
                    self.upsert(key, RESOURCE_INHERITED, kept)
                if LABEL_WORLD not in labels:
                    unsaid.append(key)
            assert self._deferred is not None
            for key in unsaid:
                self._deferred.pop(key, None)

    def let_inherited_go(self) -> None:
        """What somebody wants now has labels of its own by now."""
        keys, self._inherited = self._inherited, []
        for key in keys:
            self.remove(key, RESOURCE_INHERITED)
        self._table.let_inherited_go()

    def reference(self, key: Key) -> RowReference:
        """The row as it stands, to wait for."""
        return self._table.reference(key)

    def label_set(self, scope: int, address: Address) -> LabelSet:
        """What the datapath would take this address for, from an endpoint of this scope."""
        prefix = Prefix.of(address)
        return self.metadata.label_set(IpcacheKey(scope, prefix)) or self.metadata.static_labels(prefix)

    def host_addresses(self, before: Iterable[Address], after: Iterable[Address]) -> None:
        """The host has these addresses now."""
        before, after = set(before), set(after)
        for address in after - before:
            # Names that workloads asked for must not keep the host from being known as the host.
            self.upsert(IpcacheKey(SCOPE_STATIC, Prefix.of(address)), RESOURCE_HOST, HOST_LABELS, beyond_bound=True)
        for address in before - after:
            self.remove(IpcacheKey(SCOPE_STATIC, Prefix.of(address)), RESOURCE_HOST)

    def _resolve(self, key: IpcacheKey, *, beyond_bound: bool) -> None:
        """The row follows its labels; of a static prefix, so do the addresses inside, which carry the closest one's label."""
        keys = [key]
        if key.scope == SCOPE_STATIC:
            keys += [other for other in self.metadata.addresses_inside(key.prefix) if other != key]
        if self._deferred is not None:
            self._deferred.update(dict.fromkeys(keys))
            return
        for one in keys:
            self._resolve_row(one, beyond_bound)

    def _resolve_row(self, key: IpcacheKey, beyond_bound: bool) -> None:
        labels = self.metadata.label_set(key)
        before = self._table.desired.get(key)
        if labels is None:
            self._table.drop(key)
        else:
            identity = self.identity_of(labels, beyond_bound=beyond_bound)
            if self.row_follows is not None:
                self.row_follows(key, identity)
            self._table.want(key, identity)
        if before is not None:
            assert isinstance(before.value, int)
            self._identities.release(before.value)

    def identity_of(self, labels: LabelSet, *, beyond_bound: bool = False) -> int:
        """The identity of a label set, one reference more; its policy rows are asked for if it is new. Raises NoRoom."""
        identity = self._identities.acquire(labels, beyond_bound=beyond_bound)
        while self._identities.new:
            new = self._identities.new.pop()
            self._identity_added(new, self._identities.labels_by_identity[new])
        return identity
