"""ipcache: from metadata to rows.

An upsert or a removal acts on the metadata, finds the identity of the label set that results, and asks for the row; what it gives
back can be waited for (`Barriers.take`). Identities that are new are told to whoever computes policy rows before the row is asked
for, so that the reconciler sees them missing and waits for them (I2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.metadata import HOST_LABELS, Metadata
from agent.core.tables import IpcacheTable, RowReference
from agent.core.types import SCOPE_STATIC, Address, IpcacheKey, Key, LabelSet, Prefix

RESOURCE_POLICY = "policy"
RESOURCE_HOST = "host"


class Ipcache:
    """identity_added: called for each identity that is new, before a row names it."""

    def __init__(
        self, table: IpcacheTable, identities: IdentityAllocator, identity_added: Callable[[int, LabelSet], None]
    ) -> None:
        self.metadata = Metadata()
        self._table = table
        self._identities = identities
        self._identity_added = identity_added
        self._identity_by_key: dict[IpcacheKey, int] = {}

    def upsert(self, key: IpcacheKey, resource: str, labels: LabelSet) -> RowReference:
        """Attach labels to a prefix; raises NoRoom, and then nothing has changed."""
        before = self.metadata.labels_by_resource.get(key, {}).get(resource)
        if self.metadata.upsert(key, resource, labels):
            try:
                self._resolve(key)
            except NoRoom:
                if before is None:
                    self.metadata.remove(key, resource)
                else:
                    self.metadata.upsert(key, resource, before)
                raise
            if key.scope == SCOPE_STATIC:
                self._resolve_learned_inside(key.prefix)
        return self._table.reference(key)

    def remove(self, key: IpcacheKey, resource: str) -> RowReference:
        """Take back what this resource attached to the prefix."""
        if self.metadata.remove(key, resource):
            try:
                self._resolve(key)
            except NoRoom:
                # What is left needs an identity that there is no room for: the address closes.
                self._identities.release(self._identity_by_key.pop(key))
                self._table.drop(key)
            if key.scope == SCOPE_STATIC:
                self._resolve_learned_inside(key.prefix)
        return self._table.reference(key)

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
            self.upsert(IpcacheKey(SCOPE_STATIC, Prefix.of(address)), RESOURCE_HOST, HOST_LABELS)
        for address in before - after:
            self.remove(IpcacheKey(SCOPE_STATIC, Prefix.of(address)), RESOURCE_HOST)

    def _resolve(self, key: IpcacheKey) -> None:
        labels = self.metadata.label_set(key)
        before = self._identity_by_key.get(key)
        if labels is None:
            self._identity_by_key.pop(key, None)
            self._table.drop(key)
        else:
            identity = self.identity_of(labels)
            self._identity_by_key[key] = identity
            self._table.want(key, identity)
        if before is not None:
            self._identities.release(before)

    def identity_of(self, labels: LabelSet) -> int:
        """The identity of a label set, one reference more; its policy rows are asked for if it is new. Raises NoRoom."""
        identity = self._identities.acquire(labels)
        while self._identities.new:
            new = self._identities.new.pop()
            self._identity_added(new, self._identities.labels_by_identity[new])
        return identity

    def _resolve_learned_inside(self, prefix: Prefix) -> None:
        """Learned rows carry the closest named prefix: they change with it. (So do addresses of the host and of endpoints.)"""
        for key in list(self.metadata.labels_by_resource):
            if key.prefix != prefix or key.scope != SCOPE_STATIC:
                inside = key.prefix.is_address and prefix.contains(key.prefix)
                if inside and self.metadata.label_set(key) is not None:
                    self._resolve(key)
