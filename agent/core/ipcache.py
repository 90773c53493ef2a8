"""ipcache: from metadata to rows.

An upsert or a removal acts on the metadata, finds the identity of the label set that results, and asks for the row; what it
gives back can be waited for (`Barriers.take`). Identities that are new are told to whoever computes policy rows before the
row is asked for, so that the reconciler sees them missing and waits for them (I2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.metadata import HOST_LABELS, Metadata
from agent.core.tables import IpcacheTable, RowReference
from agent.core.types import LABEL_WORLD, SCOPE_STATIC, Address, IpcacheKey, Key, LabelSet, Prefix, Value, address_key

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
        self.is_there = table.is_there
        self.pending = table.pending  # rows that are not as they are wanted
        self._identities = identities
        self._identity_added = identity_added
        self.row_follows: Callable[[IpcacheKey, int], None] | None = None  # see inherited.py
        self._inherited: list[IpcacheKey] = []

    def upsert(self, key: IpcacheKey, resource: str, labels: LabelSet, *, beyond_bound: bool = False) -> RowReference:
        """Attach labels to a prefix; raises NoRoom, and then nothing has changed. beyond_bound: see `IdentityAllocator`.

        What that means for addresses inside a network is `resolve_inside`'s, here and in `remove`.
        """
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
        named = {
            identity: frozenset(label for label in labels if label.startswith("fqdn:"))
            for identity, labels in self._identities.labels_by_identity.items()
        }
        inherited: dict[IpcacheKey, LabelSet] = {}
        said: list[IpcacheKey] = []
        for key, identity in rows.items():
            assert isinstance(key, IpcacheKey)
            assert isinstance(identity, int)
            if key.scope != SCOPE_STATIC:
                labels = named.get(identity)
            else:
                labels = self._identities.labels_by_identity.get(identity, frozenset()) & {f"cidr:{key.prefix}"}
            if labels:
                inherited[key] = labels
                if LABEL_WORLD in self._identities.labels_by_identity[identity]:
                    said.append(key)
        self.metadata.adopt(RESOURCE_INHERITED, inherited)
        self._inherited = list(inherited)
        for key in said:
            self._resolve_row(key, beyond_bound=True)

    def let_inherited_go(self) -> Iterator[int]:
        """What somebody wants now has labels of its own by now. Step by step; gives back what each cost."""
        networks: list[Prefix] = []
        while self._inherited:
            key = self._inherited.pop()
            self.remove(key, RESOURCE_INHERITED)
            if key.scope == SCOPE_STATIC and self.metadata.label_set(key) is None:
                networks.append(key.prefix)
            yield 2
        for _ in self.resolve_inside(networks, beyond_bound=True):
            yield 2
        yield from self._table.let_inherited_go()

    def reference(self, key: Key) -> RowReference:
        """The row as it stands, to wait for."""
        return self._table.reference(key)

    def label_set(self, scope: int, address: Address) -> LabelSet:
        """What the datapath would take this address for, from an endpoint of this scope."""
        return self.metadata.labels_at(scope, address)

    def host_addresses(self, before: Iterable[Address], after: Iterable[Address]) -> None:
        """The host has these addresses now."""
        before, after = set(before), set(after)
        for address in after - before:
            # Names that workloads asked for must not keep the host from being known as the host.
            self.upsert(address_key(SCOPE_STATIC, address), RESOURCE_HOST, HOST_LABELS, beyond_bound=True)
        for address in before - after:
            self.remove(address_key(SCOPE_STATIC, address), RESOURCE_HOST)

    def resolve_inside(self, networks: Iterable[Prefix], *, beyond_bound: bool) -> Iterator[RowReference]:
        """These are named now, or not any more: addresses inside carry the label of the closest one that is.

        Step by step; gives back the row of each. Raises NoRoom.
        """
        outermost: Prefix | None = None
        for network in sorted(networks, key=lambda prefix: (len(prefix.address), prefix)):
            if outermost is None or not outermost.contains(network):
                outermost = network
                for key in self.metadata.addresses_inside(network):
                    self._resolve_row(key, beyond_bound)
                    yield self._table.reference(key)

    def _resolve(self, key: IpcacheKey, *, beyond_bound: bool) -> None:
        """The row follows its labels; of a static address, so do those of the same address in other scopes."""
        self._resolve_row(key, beyond_bound)
        if key.scope == SCOPE_STATIC and key.prefix.is_address:
            for other in self.metadata.addresses_inside(key.prefix):
                if other != key:
                    self._resolve_row(other, beyond_bound)

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
