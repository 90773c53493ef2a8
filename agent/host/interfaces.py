"""What the host's network says about itself: its addresses, and who lives behind an interface.

Netlink through pyroute2, synchronously: before the loop starts, or in a thread beside it.
"""

from __future__ import annotations

import socket
from typing import Any

from agent.core.types import Address, Prefix, packed


class InterfaceMissing(Exception):
    """The interface is not there; the sentence says which."""


class Interfaces:
    """One look at interfaces, addresses and routes of the network namespace the agent runs in. Raises OSError."""

    def __init__(self) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with IPRoute() as netlink:
                self._ifindex_by_name = {_attribute(link, "IFLA_IFNAME"): link["index"] for link in netlink.get_links()}
                self._addresses = list(netlink.get_addr())
                self._routes = [*netlink.get_routes(family=socket.AF_INET), *netlink.get_routes(family=socket.AF_INET6)]
        except NetlinkError as error:
            raise OSError(error.code, str(error)) from None

    def ifindex(self, name: str) -> int:
        """Raises InterfaceMissing."""
        index = self._ifindex_by_name.get(name)
        if index is None:
            raise InterfaceMissing(f"there is no interface {name} in this network namespace (`ip link` shows them)")
        return int(index)

    def host_addresses(self) -> frozenset[Address]:
        """Every address of every interface, loopback included."""
        return frozenset(packed(_address_of(message)) for message in self._addresses)

    def addresses_on(self, ifindex: int) -> frozenset[Address]:
        """The host's own addresses on this interface."""
        return frozenset(packed(_address_of(message)) for message in self._addresses if message["index"] == ifindex)

    def addresses_behind(self, ifindex: int) -> frozenset[Address]:
        """Addresses the host routes to this interface one by one: its /32 and /128 routes, except the host's own."""
        found = set()
        for route in self._routes:
            destination = _attribute(route, "RTA_DST")
            is_one = route["dst_len"] == (32 if route["family"] == socket.AF_INET else 128)
            if destination is not None and is_one and route["type"] == 1 and _attribute(route, "RTA_OIF") == ifindex:
                address = packed(destination)
                if not Prefix.parse("fe80::/10").contains(Prefix.of(address)):
                    found.add(address)
        return frozenset(found - self.host_addresses())


def _attribute(message: Any, name: str) -> Any:
    return message.get_attr(name)


def _address_of(message: Any) -> str:
    return str(_attribute(message, "IFA_LOCAL") or _attribute(message, "IFA_ADDRESS"))
