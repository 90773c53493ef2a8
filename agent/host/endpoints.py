"""The host's interfaces as endpoints: which are there now, under which number, and from which addresses they may send.

Rule 1: an endpoint is an interface as the kernel knows it: by its index, for as long as it exists. Another name or other
addresses leave it what it is; made anew, under the same name or the same index, it is another endpoint, and nothing that was
learned or allowed for the one before is its own.
Rule 2: an interface that was attached (attachments.py) is what was said of it; another belongs to the configuration's entry
with its own name, else to the first whose pattern it matches. No longer matching, it is no endpoint. `lo` and the agent's own
device never are.
Rule 3: an interface is policed from the moment it is there. Without an address of its own everything it sends is dropped, which
is said; not to attach it would let everything pass.

Own addresses of what is behind an interface, without `addresses` in the configuration:

    routes       the host has a route to this single address through the interface
    neighbours   no other interface is in this interface's network, and somebody behind it uses the address: the host has it in
                 its neighbour table, or a packet claimed it

The program drops a claim to an address that is not the endpoint's (and so the host's neighbour table hears of none). It tells
us; the address becomes the endpoint's if it is in the interface's own network and neither the host's nor another endpoint's,
and the endpoint's next try passes, for ARP a second later. What a workload can get in this way is bounded, and leads to it
already: the host sends all of that network there and nowhere else. Where two interfaces are in one network, as a bridge's ports
are in the bridge's, nothing is learned: it could be somebody else's address.

An uplink's are those the host has on it. It may also send from what the host has on other interfaces, and what arrives for
these is the host's.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from agent.attachments import Attachment
from agent.config import ENDPOINTS_MAX, Denied, EndpointSettings, Learn
from agent.core.events import EndpointAdded
from agent.core.records import EndpointRecord, Record
from agent.core.types import Address, Orientation, Prefix, text_of
from agent.host.interfaces import Interfaces, Link

# A policy's own `metadata.namespace` looks for the first, Cilium's peers for the second: they are one thing.
_NAMESPACE_LABELS: Final = ("namespace", "io.kubernetes.pod.namespace")

# Of one endpoint. All endpoints share a table of 16,384 rows; a workload that claims what it can must not fill it.
CLAIMED_MAX: Final = 64

_TAP: Final = "tun"  # rtnetlink's word for both kinds; only taps carry Ethernet


def with_namespace(labels: Mapping[str, str]) -> dict[str, str]:
    """Whichever label says the namespace, both do."""
    said = [labels[key] for key in _NAMESPACE_LABELS if key in labels]
    return {**dict.fromkeys(_NAMESPACE_LABELS, said[0]), **labels} if said else dict(labels)


class Present(NamedTuple):
    """by_number: the endpoints that are there. wrong: interface to the sentence that says why it is not policed as meant."""

    by_number: dict[int, EndpointAdded]
    wrong: dict[str, str]


class _Found(NamedTuple):
    number: int
    name: str
    link: Link
    settings: EndpointSettings


class HostEndpoints:
    """records: of the process before, whose numbers go on. never: interfaces of the agent's own. attached: by index of the
    interface; looked at, never changed.
    """

    def __init__(
        self,
        settings: Sequence[EndpointSettings],
        records: Iterable[Record] = (),
        never: Collection[str] = (),
        attached: Mapping[int, Attachment] = MappingProxyType({}),
    ) -> None:
        self._attached = attached
        self._by_name = {each.interface: each for each in settings if not glob.has_magic(each.interface)}
        self._patterns = [
            (re.compile(fnmatch.translate(each.interface)), each) for each in settings if glob.has_magic(each.interface)
        ]
        self._never = frozenset({"lo", *never})
        self._numbers: dict[int, tuple[int, Orientation]] = {}  # ifindex -> number
        self._numbers_before: dict[tuple[str, int], int] = {}
        self._last = 0
        for record in records:
            if isinstance(record, EndpointRecord):
                self._numbers_before[record.interface, record.ifindex] = record.endpoint
                self._last = max(self._last, record.endpoint)
        self._owners: dict[Address, int] = {}
        self._host: frozenset[Address] = frozenset()
        self._networks: dict[int, frozenset[Prefix]] = {}  # number -> where claims count
        self._claimed: dict[int, set[Address]] = {}
        self._released: set[int] = set()  # indexes

    def release(self, ifindex: int) -> None:
        """By command: this interface is no endpoint any more, until this process ends or the interface does."""
        self._released.add(ifindex)

    def take_back(self, ifindex: int) -> bool:
        """It is to be an endpoint again. Was it released?"""
        was_released = ifindex in self._released
        self._released.discard(ifindex)
        return was_released

    def in_force(self, interface: str, ifindex: int) -> EndpointSettings | None:
        """What is said of it now, by whomever; None where it is no endpoint, or was released."""
        return None if ifindex in self._released else self._settings(interface, ifindex)

    def number_of(self, ifindex: int) -> int | None:
        """The endpoint's, as of the last look."""
        return self._numbers.get(ifindex, (None,))[0]

    def matching(self, links: Mapping[str, Link]) -> dict[str, tuple[Link, EndpointSettings]]:
        """The interfaces that are to be endpoints."""
        found = {}
        for name, link in links.items():
            settings = self._settings(name, link.ifindex)
            if settings is not None:
                found[name] = link, settings
        return found

    def look(self, interfaces: Interfaces, gone: Collection[int] = ()) -> Present:
        """What is there now. gone: indexes of interfaces that went since the look before, even if they are back."""
        wrong = {name: absent(name) for name in self._by_name if name not in interfaces.links}
        found = self._number(interfaces, gone, wrong)
        self._host = interfaces.host_addresses()
        self._owners = {}
        self._networks = {}
        addresses = {each.number: self._given(each, interfaces, wrong) for each in found}
        for each in found:
            addresses[each.number] += self._learned(each, interfaces)
            if not addresses[each.number] and each.name not in wrong:
                wrong[each.name] = _addressless(each)
        return Present({each.number: self._added(each, addresses[each.number], interfaces) for each in found}, wrong)

    def claim(self, number: int, address: Address) -> bool:
        """A packet of this endpoint claimed the address. Is it the endpoint's from now on? The next look has it then."""
        claimed = self._claimed.setdefault(number, set())
        if address in claimed or len(claimed) >= CLAIMED_MAX or not self._may_learn(number, address):
            return False
        claimed.add(address)
        return True

    # --- which, and under which number -------------------------------------------------------------------------------

    def _settings(self, name: str, ifindex: int) -> EndpointSettings | None:
        if name in self._never:
            return None
        if ifindex in self._attached:
            return self._attached[ifindex].settings
        if name in self._by_name:
            return self._by_name[name]
        return next((settings for pattern, settings in self._patterns if pattern.match(name)), None)

    def _number(self, interfaces: Interfaces, gone: Collection[int], wrong: dict[str, str]) -> list[_Found]:
        """Sorted by number: who was there first has an address that two claim."""
        numbers, self._numbers = self._numbers, {}
        found: list[_Found] = []
        self._released &= {link.ifindex for link in interfaces.links.values()} - set(gone)
        for name, (link, settings) in self.matching(interfaces.links).items():
            if link.ifindex in self._released:
                wrong[name] = f"{name} is not enforced: it was detached by command, until the agent starts again"
                continue
            if not link.is_ethernet:
                wrong[name] = f"{name} is not enforced: it carries no Ethernet frames (tun, WireGuard); police what uses it"
                continue
            if len(found) == ENDPOINTS_MAX:
                wrong[name] = f"{name} is not enforced: there are {ENDPOINTS_MAX} endpoints already"
                continue
            number, orientation = numbers.get(link.ifindex, (0, settings.orientation))
            if number == 0:
                number = self._numbers_before.pop((name, link.ifindex), 0)
            if number == 0 or link.ifindex in gone or orientation is not settings.orientation:
                self._last = number = self._last + 1
            self._numbers[link.ifindex] = number, settings.orientation
            found.append(_Found(number, name, link, settings))
        self._numbers_before.clear()
        self._claimed = {each.number: self._claimed.get(each.number, set()) for each in found}
        return sorted(found)

    def _added(self, each: _Found, addresses: tuple[Address, ...], interfaces: Interfaces) -> EndpointAdded:
        attached = self._attached.get(each.link.ifindex)
        settings, is_uplink = each.settings, each.settings.orientation is Orientation.UPLINK
        return EndpointAdded(
            each.number,
            each.name,
            each.link.ifindex,
            with_namespace(settings.labels),
            addresses,
            settings.orientation,
            audit=settings.audit,
            isolated=settings.learn is Learn.PER_ENDPOINT,
            dhcp=settings.dhcp if settings.dhcp is not None else is_uplink or each.link.kind == _TAP,
            silent=settings.denied is Denied.DROP,
            also_from=tuple(sorted(interfaces.addresses_beside(each.link.ifindex))) if is_uplink else (),
            policies=attached.policies if attached is not None else None,
        )

    # --- from which addresses ------------------------------------------------------------------------------------------

    def _given(self, each: _Found, interfaces: Interfaces, wrong: dict[str, str]) -> tuple[Address, ...]:
        """What configuration and routes say, but for what is another's."""
        if each.settings.orientation is Orientation.UPLINK:
            given = interfaces.addresses_on(each.link.ifindex)
        else:
            given = frozenset(each.settings.addresses) or interfaces.addresses_behind(each.link.ifindex)
            given -= self._host
        kept = []
        for address in sorted(given):
            owner = self._owners.setdefault(address, each.number)
            if owner == each.number:
                kept.append(address)
            else:
                wrong[each.name] = f"{each.name} may not send from {text_of(address)}: that is another endpoint's address"
        return tuple(kept)

    def _learned(self, each: _Found, interfaces: Interfaces) -> tuple[Address, ...]:
        """What somebody behind the interface uses in its own network; it stays as long as the interface and its network."""
        if each.settings.orientation is Orientation.UPLINK or each.settings.addresses:
            return ()
        self._networks[each.number] = interfaces.on_link(each.link.ifindex)
        claimed = {address for address in self._claimed[each.number] if self._may_learn(each.number, address)}
        for address in sorted(interfaces.neighbours(each.link.ifindex)):
            if len(claimed) < CLAIMED_MAX and self._may_learn(each.number, address):
                claimed.add(address)
        self._claimed[each.number] = claimed
        self._owners.update(dict.fromkeys(claimed, each.number))
        return tuple(sorted(claimed))

    def _may_learn(self, number: int, address: Address) -> bool:
        if address in self._host or address in self._owners:
            return False
        return any(_is_usable(address, network) for network in self._networks.get(number, ()))


def _is_usable(address: Address, network: Prefix) -> bool:
    """A host's in this network: not its first (IPv6: the routers'), nor its broadcast. Of two both are (RFC 3021, RFC 6164)."""
    if not network.contains(Prefix.of(address)):
        return False
    bits = len(address) * 8
    if network.length >= bits - 1:
        return True
    return address != network.address and not (bits == 32 and address == network.last.address)


def absent(name: str) -> str:
    return f"there is no interface {name} in this network namespace (`ip link` shows them)"


def _addressless(each: _Found) -> str:
    if each.settings.orientation is Orientation.UPLINK:
        return f"{each.name} has no address yet"
    return (
        f"{each.name} has no address yet, so everything it sends is dropped: give `addresses` in the configuration, or the "
        "host a route to a single address through it; where no other interface is in its network, one counts when it is used"
    )
