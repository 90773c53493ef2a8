"""Forwarding, for who is behind an interface that was made for a run: turned on for that interface and for those that routes
leave by, and for nothing else, and put back when the last of them has gone.

IPv4 has a switch for each interface, which counts for what arrives there: the workload's packets on its own interface, their
replies on the others. IPv6 has had one since Linux 6.17 (`force_forwarding`); before, only the switch for the whole host, which
also makes it deaf to router advertisements: that is for its administrator to turn on, and without it a run has no IPv6.

    Documentation/networking/ip-sysctl.rst: forwarding, force_forwarding
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Final

from agent.host import netlink

_SYSCTLS: Final = Path("/proc/sys/net")
_RTA_OIF: Final = 4
_RTA_MULTIPATH: Final = 9
_RTN_UNICAST: Final = 1
_NEXTHOP_OCTETS: Final = 8  # struct rtnexthop: length:16 flags:8 hops:8 ifindex:32


def enable(interface: str) -> tuple[dict[str, str], bool]:
    """What was changed, path to the value before, and whether this interface has IPv6 to the outside. Raises OSError."""
    changed: dict[str, str] = {}
    outward = {family: _outward(family) for family in (socket.AF_INET, socket.AF_INET6)}
    names = dict(socket.if_nameindex())
    for index in {*outward[socket.AF_INET][0], socket.if_nametoindex(interface)}:
        _turn_on(f"ipv4/conf/{names[index]}/forwarding", changed)
    has_ipv6 = outward[socket.AF_INET6][1]
    if has_ipv6 and _read("ipv6/conf/all/forwarding") != "1":
        has_ipv6 = (_SYSCTLS / f"ipv6/conf/{interface}/force_forwarding").exists()
        for index in {*outward[socket.AF_INET6][0], socket.if_nametoindex(interface)} if has_ipv6 else ():
            _turn_on(f"ipv6/conf/{names[index]}/force_forwarding", changed)
    return changed, has_ipv6


def put_back(changed: dict[str, str]) -> None:
    """An interface that went meanwhile has taken its switch with it; one that somebody turned off since stays as it is."""
    for path, value in changed.items():
        if _read(path) == "1":
            (_SYSCTLS / path).write_text(value)


def _turn_on(path: str, changed: dict[str, str]) -> None:
    before = _read(path)
    if before is not None and before != "1":
        (_SYSCTLS / path).write_text("1")
        changed[path] = before


def _read(path: str) -> str | None:
    try:
        return (_SYSCTLS / path).read_text().strip()
    except FileNotFoundError:
        return None


def _outward(family: int) -> tuple[set[int], bool]:
    """The interfaces that routes leave by, loopback apart, and whether one of them is a default route."""
    found: set[int] = set()
    has_default = False
    for message in netlink.dump(netlink.GET_ROUTE, family):
        its_family, length, *_, kind, _ = message.fixed
        if its_family != family or kind != _RTN_UNICAST:
            continue
        hops = _hops(message.attributes)
        found |= hops
        has_default |= length == 0 and bool(hops)
    return found - {1}, has_default


def _hops(attributes: dict[int, bytes]) -> set[int]:
    if _RTA_OIF in attributes:
        return {int.from_bytes(attributes[_RTA_OIF], sys.byteorder)}
    nexthops, found = attributes.get(_RTA_MULTIPATH, b""), set()
    while len(nexthops) >= _NEXTHOP_OCTETS:
        found.add(int.from_bytes(nexthops[4:8], sys.byteorder))
        nexthops = nexthops[max(int.from_bytes(nexthops[:2], sys.byteorder), _NEXTHOP_OCTETS) :]
    return found
