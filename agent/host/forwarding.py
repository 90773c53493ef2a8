"""Forwarding, for who is behind an interface that was made for a run: turned on for that interface and for those that routes
leave by, and for nothing else, and put back when the last of them has gone.

IPv4 has a switch for each interface, which counts for what arrives there: the workload's packets on its own interface, their
replies on the others. IPv6 has had one since Linux 6.17 (`force_forwarding`); before, only the switch for the whole host, which
also makes it deaf to router advertisements: that is for its administrator to turn on, and without it a run has no IPv6.

    Documentation/networking/ip-sysctl.rst: forwarding, force_forwarding
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.host import netlink
from agent.host.interfaces import links

_SYSCTLS: Final = Path("/proc/sys/net")
_IFLA_MASTER: Final = 10
_RTA_OIF: Final = 4
_RTA_GATEWAY: Final = 5
_RTA_MULTIPATH: Final = 9
_RTA_VIA: Final = 18  # a router of the other family
_BY_ROUTER: Final = frozenset({_RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA})
_AMONG_US: Final = frozenset({"veth", "bridge"})
_RTN_UNICAST: Final = 1
_NEXTHOP_OCTETS: Final = 8  # struct rtnexthop: length:16 flags:8 hops:8 ifindex:32


def needed(interface: str) -> tuple[dict[str, str], bool]:
    """The switches to turn on, each path with its value now, and whether this interface has IPv6 to the outside then. With each
    the host's switch of the same kind, for `put_back`.
    """
    switches: dict[str, str] = {}
    for_ipv4, _ = _outward(socket.AF_INET)
    for_ipv6, has_ipv6 = _outward(socket.AF_INET6)
    names = dict(socket.if_nameindex())
    for name in {interface, *(names[index] for index in for_ipv4 & names.keys())}:
        _add("ipv4", name, "forwarding", switches)
    if has_ipv6 and _read("ipv6/conf/all/forwarding") != "1":
        has_ipv6 = _read(f"ipv6/conf/{interface}/force_forwarding") is not None
        for name in {interface, *(names[index] for index in for_ipv6 & names.keys())} if has_ipv6 else ():
            _add("ipv6", name, "force_forwarding", switches)
    return switches, has_ipv6


class Off(NamedTuple):
    """Forwarding that a workload needs and has not. remedy: a command."""

    found: str
    remedy: str


def routed(behind: Mapping[str, int]) -> list[str]:
    """Of these interfaces, with their indexes, those whose packets the host forwards; of a bridge's ports the bridge does.
    Raises OSError.
    """
    ports = {message.fixed[2] for message in netlink.dump(netlink.GET_LINK) if _IFLA_MASTER in message.attributes}
    return [name for name, ifindex in behind.items() if ifindex not in ports]


def off(interfaces: Sequence[str], *, has_ipv6: bool) -> Off | None:
    """None where what these send is forwarded."""
    switches = {"ipv4/ip_forward": "ipv4/conf/{}/forwarding"}
    if has_ipv6:
        switches["ipv6/conf/all/forwarding"] = "ipv6/conf/{}/force_forwarding"
    names, stuck = [], set()
    for switch, own in switches.items():
        those = [name for name in interfaces if _read(own.format(name)) != "1"] if _read(switch) == "0" else []
        if those:
            names.append(f"net.{switch.replace('/', '.')}")
            stuck.update(those)
    if not names:
        return None
    found = f"{' and '.join(names)} is 0: what {', '.join(sorted(stuck))} sends goes no further than this host"
    return Off(found, "; ".join(f"sysctl -w {name}=1" for name in names))


def turn_on(switches: Mapping[str, str]) -> None:
    """Raises OSError; what was turned until then is for `put_back`."""
    for path in switches:
        if "/conf/all/" not in path:
            (_SYSCTLS / path).write_text("1")


def put_back(switches: Mapping[str, str]) -> None:
    """An interface that went meanwhile has taken its switch with it. Who turned all of them on or off since, by the host's
    switch, has the last word.
    """
    for path, value in switches.items():
        family, _, _, kind = path.split("/")
        of_host = f"{family}/conf/all/{kind}"
        if path != of_host and _read(of_host) == switches.get(of_host):
            with contextlib.suppress(OSError):  # it goes at this moment
                (_SYSCTLS / path).write_text(value)


def _add(family: str, interface: str, kind: str, switches: dict[str, str]) -> None:
    for name in (interface, "all"):
        path = f"{family}/conf/{name}/{kind}"
        before = _read(path)
        if before is None or (before == "1" and name == interface):
            return
        switches[path] = before


def _read(path: str) -> str | None:
    try:
        return (_SYSCTLS / path).read_text().strip()
    except OSError:
        return None


def _outward(family: int) -> tuple[set[int], bool]:
    """The interfaces that routes leave by, and whether one of them is a default route. Not other workloads' own: veths and
    bridges that no route by way of a router leaves by.
    """
    among_us = {link.ifindex for link in links().values() if link.kind in _AMONG_US} | {1}
    found: set[int] = set()
    has_default = False
    for message in netlink.dump(netlink.GET_ROUTE, family):
        its_family, length, *_, kind, _ = message.fixed
        if its_family != family or kind != _RTN_UNICAST:
            continue
        hops = _hops(message.attributes)
        is_by_router = length == 0 or bool(message.attributes.keys() & _BY_ROUTER)
        found |= hops if is_by_router else hops - among_us
        has_default |= length == 0 and bool(hops)
    return found, has_default


def uplinks() -> frozenset[int]:
    """The interfaces that default routes of this host leave by, in any table of either family. Raises OSError."""
    found: set[int] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in netlink.dump(netlink.GET_ROUTE, family):
            its_family, length, *_, kind, _ = message.fixed
            if its_family == family and kind == _RTN_UNICAST and length == 0:
                found |= _hops(message.attributes)
    return frozenset(found)


def _hops(attributes: dict[int, bytes]) -> set[int]:
    if _RTA_OIF in attributes:
        return {int.from_bytes(attributes[_RTA_OIF], sys.byteorder)}
    nexthops, found = attributes.get(_RTA_MULTIPATH, b""), set()
    while len(nexthops) >= _NEXTHOP_OCTETS:
        found.add(int.from_bytes(nexthops[4:8], sys.byteorder))
        nexthops = nexthops[max(int.from_bytes(nexthops[:2], sys.byteorder), _NEXTHOP_OCTETS) :]
    return found
