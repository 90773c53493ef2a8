"""What the host's network says about itself: its interfaces and addresses, and who lives behind an interface.

Synchronous: before the loop starts, or in a thread beside it.
"""

from __future__ import annotations

import socket
import sys
from typing import Final, NamedTuple

from agent.core.types import Address, Prefix
from agent.host import netlink

_IFLA_IFNAME: Final = 3
_IFLA_LINKINFO: Final = 18
_IFLA_INFO_KIND: Final = 1
_ARPHRD_ETHER: Final = 1
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_RTA_DST: Final = 1
_RTA_OIF: Final = 4
_RTN_UNICAST: Final = 1
_NDA_DST: Final = 1
# reachable, stale, delay, probe, permanent: somebody has shown, or the operator has said, that this neighbour is there
_NEIGHBOUR_IS_KNOWN: Final = 0x02 | 0x04 | 0x08 | 0x10 | 0x80

_LINK_LOCAL: Final = Prefix.parse("fe80::/10")
_LOOPBACKS: Final = (Prefix.parse("127.0.0.0/8"), Prefix.parse("::1/128"))
_NOTHING: Final[frozenset[Address]] = frozenset()


class Link(NamedTuple):
    """kind: what rtnetlink calls it (`veth`, `tun`, `bridge`); empty for hardware."""

    ifindex: int
    kind: str = ""
    is_ethernet: bool = True


class Interfaces:
    """One look at interfaces, addresses, routes and neighbours of the network namespace the agent runs in. Raises OSError."""

    def __init__(self) -> None:
        self.links = links()
        self._addresses: dict[int, set[Address]] = {}
        self._on_link: dict[int, set[Prefix]] = {}
        for message in netlink.dump(netlink.GET_ADDRESS):
            family, length, _, _, ifindex = message.fixed
            address = message.attributes.get(_IFA_LOCAL) or message.attributes.get(_IFA_ADDRESS)
            if family in (socket.AF_INET, socket.AF_INET6) and address is not None:
                self._addresses.setdefault(ifindex, set()).add(address)
                if length < len(address) * 8 and not is_link_local(address):
                    prefix = Prefix.masked(message.attributes.get(_IFA_ADDRESS, address), length)
                    self._on_link.setdefault(ifindex, set()).add(prefix)
        self._host = _NOTHING.union(*self._addresses.values())
        self._alone = networks_alone(self._on_link)
        self._routed: dict[int, set[Address]] = {}
        for family, bits in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
            for message in netlink.dump(netlink.GET_ROUTE, family):
                its_family, length, *_, kind, _ = message.fixed
                if its_family == family and length == bits and kind == _RTN_UNICAST:
                    self._take_route(message.attributes)
        self._neighbours: dict[int, set[Address]] = {}
        for message in netlink.dump(netlink.GET_NEIGHBOUR):
            _, ifindex, state, *_ = message.fixed
            address = message.attributes.get(_NDA_DST)
            if address is not None and state & _NEIGHBOUR_IS_KNOWN:
                self._neighbours.setdefault(ifindex, set()).add(address)

    def _take_route(self, attributes: dict[int, bytes]) -> None:
        address, interface = attributes.get(_RTA_DST), attributes.get(_RTA_OIF)
        if address is not None and interface is not None and not is_link_local(address):
            self._routed.setdefault(int.from_bytes(interface, sys.byteorder), set()).add(address)

    def host_addresses(self) -> frozenset[Address]:
        """Every address of every interface, loopback included."""
        return self._host

    def addresses_on(self, ifindex: int) -> frozenset[Address]:
        """The host's own addresses on this interface, but for link-local ones, which several interfaces may have."""
        return frozenset(address for address in self._addresses.get(ifindex, ()) if not is_link_local(address))

    def addresses_beside(self, ifindex: int) -> frozenset[Address]:
        """What else the host may send from there: its link-local addresses, and what it has on other interfaces, but for what
        stays on them.
        """
        own = {address for address in self._addresses.get(ifindex, ()) if is_link_local(address)}
        elsewhere = self._host - self._addresses.get(ifindex, _NOTHING)
        return frozenset(own | {each for each in elsewhere if not is_link_local(each) and not _is_loopback(each)})

    def addresses_behind(self, ifindex: int) -> frozenset[Address]:
        """Addresses the host routes to this interface one by one: its /32 and /128 routes, except the host's own."""
        return frozenset(self._routed.get(ifindex, _NOTHING)) - self._host

    def on_link(self, ifindex: int) -> frozenset[Prefix]:
        """Prefixes whose addresses can be behind this interface and behind no other: its connected ones that nobody shares."""
        return frozenset(self._alone.get(ifindex, ()))

    def neighbours(self, ifindex: int) -> frozenset[Address]:
        """Addresses in the neighbour table of this interface."""
        return frozenset(self._neighbours.get(ifindex, _NOTHING))


def links() -> dict[str, Link]:
    """The interfaces that are there now, by name."""
    found = {}
    for message in netlink.dump(netlink.GET_LINK):
        name = message.attributes[_IFLA_IFNAME].rstrip(b"\0").decode(errors="replace")
        information = netlink.attributes(message.attributes.get(_IFLA_LINKINFO, b""))
        kind = information.get(_IFLA_INFO_KIND, b"").rstrip(b"\0").decode(errors="replace")
        _, hardware, ifindex, *_ = message.fixed
        found[name] = Link(ifindex, kind, hardware == _ARPHRD_ETHER)
    return found


def networks_alone(prefixes_by_ifindex: dict[int, set[Prefix]]) -> dict[int, set[Prefix]]:
    """Without those that overlap with one of another interface.

    Of two prefixes that overlap one contains the other. In order, what contains a prefix comes before it, and is open still.
    """
    found = [(prefix, ifindex) for ifindex, prefixes in prefixes_by_ifindex.items() for prefix in prefixes]
    shared: set[tuple[Prefix, int]] = set()
    containing: list[tuple[Prefix, int]] = []
    for prefix, ifindex in sorted(found, key=lambda each: (len(each[0].address), each)):
        while containing and not containing[-1][0].contains(prefix):
            containing.pop()
        others = [each for each in containing if each[1] != ifindex]
        shared.update(others)
        if others:
            shared.add((prefix, ifindex))
        containing.append((prefix, ifindex))
    alone: dict[int, set[Prefix]] = {}
    for prefix, ifindex in set(found) - shared:
        alone.setdefault(ifindex, set()).add(prefix)
    return alone


def is_link_local(address: Address) -> bool:
    return _LINK_LOCAL.contains(Prefix.of(address))


def _is_loopback(address: Address) -> bool:
    return any(network.contains(Prefix.of(address)) for network in _LOOPBACKS)
