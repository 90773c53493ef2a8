"""ipcache metadata: who attached which labels to a prefix.

prefix -> resource -> labels, merged by union, so that two owners of one prefix never fight: each takes back only its own. The
key is (scope, prefix). Resources of scope 0 are `policy` (a named prefix), `host`, `endpoint:N` and `inherited`; of learned
scopes, the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, cast

from sortedcontainers import SortedList

from agent.core.prefixes import LengthsInUse
from agent.core.types import LABEL_HOST, LABEL_WORLD, SCOPE_STATIC, Address, IpcacheKey, LabelSet, Prefix

NO_LABELS: Final[LabelSet] = frozenset()
STATIC_LABELS_MAX: Final = 4_096
KEYS_AT_ONCE: Final = 64  # looked up together; one that is gone when its turn comes does no harm


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
        self._static_lengths = LengthsInUse()
        self._static_labels: dict[Prefix, LabelSet] = {}  # of the addresses looked at last, since a static prefix changed
        # Rows of single addresses by (scope, family), in order: those inside a prefix are found without looking at the others.
        self._addresses: dict[tuple[int, int], SortedList[IpcacheKey]] = {}

    def upsert(self, key: IpcacheKey, resource: str, labels: LabelSet) -> bool:
        """Attach labels; says whether anything changed."""
        if self.attached(key, resource) == labels:
            return False
        if key.scope == SCOPE_STATIC:
            self._static_labels.clear()
        attached = self._attached.get(key)
        if attached is None:
            self._attached[key] = _Single(resource, labels)
            if key.scope == SCOPE_STATIC:
                self._static_lengths.add(key.prefix)
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

    def adopt(self, resource: str, labels_by_key: Mapping[IpcacheKey, LabelSet]) -> None:
        """`upsert` of very many prefixes at a time, to which nobody has attached anything yet."""
        assert not self._attached.keys() & labels_by_key.keys()
        self._static_labels.clear()
        addresses: dict[tuple[int, int], list[IpcacheKey]] = {}
        for key, labels in labels_by_key.items():
            self._attached[key] = _Single(resource, labels)
            if key.scope == SCOPE_STATIC:
                self._static_lengths.add(key.prefix)
            if key.prefix.is_address:
                addresses.setdefault((key.scope, len(key.prefix.address)), []).append(key)
        for place, keys in addresses.items():
            self._addresses.setdefault(place, SortedList()).update(keys)

    def remove(self, key: IpcacheKey, resource: str) -> bool:
        """Take back what this resource attached; says whether anything changed."""
        if self.attached(key, resource) is None:
            return False
        if key.scope == SCOPE_STATIC:
            self._static_labels.clear()
        attached = self._attached[key]
        if isinstance(attached, _Merged):
            attached.take(resource)
        if isinstance(attached, _Single) or not attached.labels_by_resource:
            del self._attached[key]
            if key.scope == SCOPE_STATIC:
                self._static_lengths.remove(key.prefix)
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

    def labels_at(self, scope: int, address: Address) -> LabelSet:
        """`label_set` of an address, or without a row its `static_labels`."""
        # Asked for each question. A key and a prefix are tuples, and making them costs more than looking them up.
        place = address, len(address) * 8
        if (scope, place) not in cast("Mapping[tuple[int, tuple[Address, int]], object]", self._attached):
            labels = cast("Mapping[tuple[Address, int], LabelSet]", self._static_labels).get(place)
            if labels is not None:
                return labels
        prefix = Prefix.of(address)
        return self.label_set(IpcacheKey(scope, prefix)) or self.static_labels(prefix)

    def static_labels(self, prefix: Prefix) -> LabelSet:
        """What an address is by the static prefixes alone."""
        labels = self._static_labels.get(prefix)
        if labels is None:
            if len(self._static_labels) >= STATIC_LABELS_MAX:
                self._static_labels.clear()
            labels = self._static_labels[prefix] = self._find_static_labels(prefix)
        return labels

    def _find_static_labels(self, prefix: Prefix) -> LabelSet:
        closest = NO_LABELS
        for around in self._static_lengths.around(prefix):
            labels = self._union(IpcacheKey(SCOPE_STATIC, around))
            if labels is None:
                continue
            named = frozenset(label for label in labels if label.startswith("cidr:"))
            others = labels - named
            if around.is_address and others:
                # The host or an endpoint; its closest named prefix is this one, or further up.
                closest |= others
            if named:
                closest |= named
                break
        return closest if any(not label.startswith("cidr:") for label in closest) else closest | {LABEL_WORLD}

    def addresses_inside(self, prefix: Prefix) -> Iterator[IpcacheKey]:
        """Rows of single addresses, of every scope, that this prefix holds. Rows may come and go between two of them."""
        for scope, family in list(self._addresses):
            if family != len(prefix.address):
                continue
            first, last, is_new = IpcacheKey(scope, prefix), IpcacheKey(scope, prefix.last), True
            while keys := list(islice(self._addresses[scope, family].irange(first, last, (is_new, True)), KEYS_AT_ONCE)):
                yield from keys
                first, is_new = keys[-1], False


HOST_LABELS: Final[LabelSet] = frozenset({LABEL_HOST})
