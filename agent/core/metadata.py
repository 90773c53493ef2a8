"""ipcache metadata: who attached which labels to a prefix.

prefix -> resource -> labels, merged by union, so that two owners of one prefix never fight: each takes back only its own. The
key is (scope, prefix). Resources of scope 0 are `policy` (a named prefix), `host`, `endpoint:N` and `inherited`; of learned
scopes, the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sortedcontainers import SortedList

from agent.core.types import LABEL_HOST, LABEL_WORLD, SCOPE_STATIC, IpcacheKey, LabelSet, Prefix

NO_LABELS: LabelSet = frozenset()


class _Single(NamedTuple):
    """What the only resource of a prefix attached: nearly every learned prefix has one."""

    resource: str
    labels: LabelSet


class _Merged:
    """What several resources attached. Counted, so that the union does not grow with the names on an address."""

    __slots__ = ("count_by_labels", "labels_by_resource")

    def __init__(self, first: _Single) -> None:
        self.labels_by_resource = {first.resource: first.labels}
        self.count_by_labels = {first.labels: 1}

    def put(self, resource: str, labels: LabelSet) -> None:
        self.take(resource)
        self.labels_by_resource[resource] = labels
        self.count_by_labels[labels] = self.count_by_labels.get(labels, 0) + 1

    def take(self, resource: str) -> None:
        labels = self.labels_by_resource.pop(resource, None)
        if labels is not None:
            self.count_by_labels[labels] -= 1
            if not self.count_by_labels[labels]:
                del self.count_by_labels[labels]


class Metadata:
    def __init__(self) -> None:
        self._attached: dict[IpcacheKey, _Single | _Merged] = {}
        # Named prefixes by (family, length), longest first: the closest one that holds an address is found in as many look-ups
        # as there are different lengths, whatever the number of prefixes.
        self._lengths: dict[int, list[int]] = {4: [], 16: []}
        self._count_by_length: dict[tuple[int, int], int] = {}
        # Rows of single addresses by (scope, family), in order: those inside a prefix are found without looking at the others.
        self._addresses: dict[tuple[int, int], SortedList[IpcacheKey]] = {}

    def upsert(self, key: IpcacheKey, resource: str, labels: LabelSet) -> bool:
        """Attach labels; says whether anything changed."""
        if self.attached(key, resource) == labels:
            return False
        attached = self._attached.get(key)
        if attached is None:
            self._attached[key] = _Single(resource, labels)
            if key.scope == SCOPE_STATIC:
                self._count(key.prefix, 1)
            if key.prefix.is_address:
                self._addresses.setdefault((key.scope, len(key.prefix.address)), SortedList()).add(key)
        elif isinstance(attached, _Merged):
            attached.put(resource, labels)
        elif attached.resource == resource:
            self._attached[key] = _Single(resource, labels)
        else:
            merged = self._attached[key] = _Merged(attached)
            merged.put(resource, labels)
        return True

    def remove(self, key: IpcacheKey, resource: str) -> bool:
        """Take back what this resource attached; says whether anything changed."""
        if self.attached(key, resource) is None:
            return False
        attached = self._attached[key]
        if isinstance(attached, _Merged):
            attached.take(resource)
        if isinstance(attached, _Single) or not attached.labels_by_resource:
            del self._attached[key]
            if key.scope == SCOPE_STATIC:
                self._count(key.prefix, -1)
            if key.prefix.is_address:
                self._addresses[key.scope, len(key.prefix.address)].remove(key)
        return True

    def attached(self, key: IpcacheKey, resource: str) -> LabelSet | None:
        """What this resource attached."""
        attached = self._attached.get(key)
        if isinstance(attached, _Merged):
            return attached.labels_by_resource.get(resource)
        return attached.labels if attached is not None and attached.resource == resource else None

    def _union(self, key: IpcacheKey) -> LabelSet | None:
        attached = self._attached.get(key)
        if isinstance(attached, _Merged):
            return NO_LABELS.union(*attached.count_by_labels)
        return attached.labels if attached is not None else None

    def label_set(self, key: IpcacheKey) -> LabelSet | None:
        """The complete label set of a row; None where no row is wanted.

        Labels of learned names, `cidr:` of the closest named prefix, and what the address is: an endpoint, the host, or world.
        """
        own = self._union(key)
        if own is None:
            return None
        if key.scope == SCOPE_STATIC and not key.prefix.is_address:
            return own | {LABEL_WORLD}
        return own | self.static_labels(key.prefix)

    def static_labels(self, prefix: Prefix) -> LabelSet:
        """What an address is by the static prefixes alone."""
        closest = NO_LABELS
        for length in self._lengths[len(prefix.address)]:
            if length > prefix.length:
                continue
            labels = self._union(IpcacheKey(SCOPE_STATIC, Prefix.masked(prefix.address, length)))
            if labels is None:
                continue
            named = frozenset(label for label in labels if label.startswith("cidr:"))
            others = labels - named
            if length == prefix.length == len(prefix.address) * 8 and others:
                # The host or an endpoint; its closest named prefix is this one, or further up.
                closest |= others
            if named:
                closest |= named
                break
        return closest if any(not label.startswith("cidr:") for label in closest) else closest | {LABEL_WORLD}

    def addresses_inside(self, prefix: Prefix) -> Iterator[IpcacheKey]:
        """Rows of single addresses, of every scope, that this prefix holds."""
        family = len(prefix.address)
        host_bits = family * 8 - prefix.length
        last = (int.from_bytes(prefix.address, "big") | (1 << host_bits) - 1).to_bytes(family, "big")
        for (scope, of), keys in self._addresses.items():
            if of == family:
                yield from keys.irange(IpcacheKey(scope, prefix), IpcacheKey(scope, Prefix(last, family * 8)))

    def _count(self, prefix: Prefix, by: int) -> None:
        family = len(prefix.address)
        count = self._count_by_length.get((family, prefix.length), 0) + by
        if count:
            self._count_by_length[family, prefix.length] = count
        else:
            del self._count_by_length[family, prefix.length]
        self._lengths[family] = sorted((length for of, length in self._count_by_length if of == family), reverse=True)


HOST_LABELS: LabelSet = frozenset({LABEL_HOST})
