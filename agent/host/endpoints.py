"""The configured interfaces as endpoints: which are there now, and under which number.

Rule 1: a number belongs to one interface as the kernel knows it (name and index) with one set of addresses; made anew or given
other addresses, it is another endpoint: nothing that was learned or allowed for the one before is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.config import EndpointSettings, Learn
from agent.core.events import EndpointAdded
from agent.core.records import EndpointRecord, Record
from agent.core.types import Address
from agent.host.interfaces import InterfaceMissing, Interfaces

# A policy's own `metadata.namespace` looks for the first, Cilium's peers for the second: they are one thing.
_NAMESPACE_LABELS: Final = ("namespace", "io.kubernetes.pod.namespace")


def with_namespace(labels: Mapping[str, str]) -> dict[str, str]:
    """Whichever label says the namespace, both do."""
    said = [labels[key] for key in _NAMESPACE_LABELS if key in labels]
    return {**dict.fromkeys(_NAMESPACE_LABELS, said[0]), **labels} if said else dict(labels)


class Present(NamedTuple):
    """by_number: the endpoints that are there. missing: of the others, interface to the sentence that says why not."""

    by_number: dict[int, EndpointAdded]
    missing: dict[str, str]


class HostEndpoints:
    """records: of the process before, whose numbers go on."""

    def __init__(self, settings: Sequence[EndpointSettings], records: Iterable[Record] = ()) -> None:
        self._settings = settings
        self._numbers: dict[tuple[str, int], tuple[int, frozenset[Address] | None]] = {}
        self._last = 0
        for record in records:
            if isinstance(record, EndpointRecord):
                self._numbers[record.interface, record.ifindex] = record.endpoint, None
                self._last = max(self._last, record.endpoint)

    def look(self, interfaces: Interfaces) -> Present:
        present = Present({}, {})
        for settings in self._settings:
            try:
                added = self._endpoint(settings, interfaces)
            except InterfaceMissing as reason:
                present.missing[settings.interface] = str(reason)
            else:
                present.by_number[added.endpoint] = added
        return present

    def _endpoint(self, settings: EndpointSettings, interfaces: Interfaces) -> EndpointAdded:
        ifindex = interfaces.ifindex(settings.interface)
        addresses = frozenset(settings.addresses) or (
            interfaces.addresses_on(ifindex) if settings.orientation else interfaces.addresses_behind(ifindex)
        )
        if not addresses:
            raise InterfaceMissing(
                f"{settings.interface} needs `addresses` in the configuration: the host has no route to a single address "
                "through it"
            )
        return EndpointAdded(
            self._number(settings.interface, ifindex, addresses),
            settings.interface,
            ifindex,
            with_namespace(settings.labels),
            tuple(sorted(addresses)),
            settings.orientation,
            audit=settings.audit,
            isolated=settings.learn is Learn.PER_ENDPOINT,
        )

    def _number(self, interface: str, ifindex: int, addresses: frozenset[Address]) -> int:
        number, before = self._numbers.get((interface, ifindex), (0, None))
        if number == 0 or before not in {None, addresses}:
            self._last = number = self._last + 1
        self._numbers[interface, ifindex] = number, addresses
        return number
