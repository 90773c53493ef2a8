"""The interception device: a veth pair of the agent's own, to which every endpoint's DNS is redirected.

What arrives at it is made local by one rule, whatever address was asked: `iif DEVICE lookup TABLE`, and in the table `local
default dev lo`. Why a device, and why these sysctls, which are set on it and on nothing else:

  an address     without one, reverse path filtering refuses every packet of the interface, however it is set
  rp_filter=2    the packets come in by another interface than the one that leads back to their sender; 2 beats `all`=1
  accept_local=1 an uplink's own packets have the host's addresses as their source
  accept_ra=0    and no IPv6 address: nobody but us sends here; disable_ipv6=1 on the other side, or it would solicit routers

The address is 192.0.0.8, which IANA keeps as a dummy (RFC 7600), of host scope: it is chosen as a source for nothing.

Synchronous: pyroute2 runs an event loop of its own in here. Call it before the agent's loop runs.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from agent.datapath.errors import DatapathError

_ADDRESS: Final = "192.0.0.8"
_SCOPE_HOST: Final = 254
_ROUTE_LOCAL: Final = "local"
_LOOPBACK: Final = 1  # the loopback device has this number in every network namespace
_FAMILIES: Final = {socket.AF_INET: "0.0.0.0/0", socket.AF_INET6: "::/0"}
_SYSCTLS: Final = {
    "ipv4": {"rp_filter": "2", "accept_local": "1"},
    "ipv6": {"accept_ra": "0", "autoconf": "0", "addr_gen_mode": "1"},
}
_SYSCTLS_PEER: Final = {"ipv6": {"disable_ipv6": "1"}}


class Device(NamedTuple):
    """name: of the side packets are redirected to; table, priority: of the rule that makes them local."""

    name: str = "ng-gate"
    table: int = 2004
    priority: int = 9

    @property
    def peer(self) -> str:
        return f"{self.name[:10]}-peer"


def provide(device: Device) -> int:
    """Makes what is missing of the device and its rules; gives its ifindex. Raises DatapathError."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def unless_there(call: Callable[[], object]) -> None:
        try:
            call()
        except NetlinkError as problem:
            if problem.code != errno.EEXIST:
                raise

    try:
        with IPRoute() as netlink:
            found = netlink.link_lookup(ifname=device.name)
            if not found:
                netlink.link("add", ifname=device.name, kind="veth", peer={"ifname": device.peer})
                found = netlink.link_lookup(ifname=device.name)
            elif not _is_ours(netlink.get_links(found[0])[0]):
                raise DatapathError(
                    errno.EEXIST, f"{device.name} is an interface of somebody else: name another datapath.device"
                )
            ifindex = int(found[0])
            _set_sysctls(device.name, _SYSCTLS)
            _set_sysctls(device.peer, _SYSCTLS_PEER)
            for name in (device.name, device.peer):
                for index in netlink.link_lookup(ifname=name):
                    netlink.link("set", index=index, state="up")
            unless_there(lambda: netlink.addr("add", index=ifindex, address=_ADDRESS, prefixlen=32, scope=_SCOPE_HOST))
            for family, everything in _FAMILIES.items():
                if family == socket.AF_INET6 and not _has_ipv6():
                    continue
                netlink.route(
                    "replace",
                    family=family,
                    dst=everything,
                    type=_ROUTE_LOCAL,
                    scope=_SCOPE_HOST if family == socket.AF_INET else 0,
                    table=device.table,
                    oif=_LOOPBACK,
                )
                rule = {"family": family, "iifname": device.name, "table": device.table, "priority": device.priority}
                unless_there(partial(netlink.rule, "add", **rule))
    except NetlinkError as problem:
        if problem.code == errno.EPERM:
            raise DatapathError(errno.EPERM, "making the interception device needs root, or CAP_NET_ADMIN") from None
        raise DatapathError(problem.code, f"cannot make the interception device {device.name}: {problem}") from None
    return ifindex


def problems(device: Device) -> list[str]:
    """What of provide() is not there any more, one clause each; questions do not reach the proxy then, and are not answered."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        found = [netlink.get_links(index)[0] for index in netlink.link_lookup(ifname=device.name)]
        if not found:
            return [f"the device {device.name} is gone"]
        said = [] if found[0]["state"] == "up" else [f"the device {device.name} is down"]
        for family in _FAMILIES:
            if family == socket.AF_INET6 and not _has_ipv6():
                continue
            version = "IPv4" if family == socket.AF_INET else "IPv6"
            rules = [rule.get_attr("FRA_TABLE") for rule in netlink.get_rules(family) if _is_of(rule, device)]
            if device.table not in rules:
                said.append(f"the {version} rule `iif {device.name} lookup {device.table}` is gone")
            if not any(True for _ in netlink.get_routes(family=family, table=device.table)):
                said.append(f"the {version} route in table {device.table} is gone")
    for group, values in _SYSCTLS.items():
        for key, value in values.items():
            path = Path("/proc/sys/net") / group / "conf" / device.name / key
            if path.exists() and path.read_text(encoding="ascii").strip() != value:
                said.append(f"{key} of {device.name} is not {value}")
    return said


def _is_of(rule: object, device: Device) -> bool:
    return bool(rule.get_attr("FRA_IIFNAME") == device.name)  # type: ignore[attr-defined]


def remove(device: Device) -> None:
    """Takes away what provide() made. What is gone already is no error; an interface of somebody else stays."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as netlink:
        for family in _FAMILIES:
            with contextlib.suppress(NetlinkError):
                netlink.rule("del", family=family, iifname=device.name, table=device.table, priority=device.priority)
            with contextlib.suppress(NetlinkError):
                netlink.flush_routes(family=family, table=device.table, oif=_LOOPBACK)
        for index in netlink.link_lookup(ifname=device.name):
            if _is_ours(netlink.get_links(index)[0]):
                netlink.link("del", index=index)


def _is_ours(link: object) -> bool:
    information = link.get_attr("IFLA_LINKINFO")  # type: ignore[attr-defined]
    return information is not None and information.get_attr("IFLA_INFO_KIND") == "veth"


def _has_ipv6() -> bool:
    return Path("/proc/sys/net/ipv6").is_dir()


def _set_sysctls(name: str, values_by_family: Mapping[str, Mapping[str, str]]) -> None:
    """Of the caller's network namespace, which /proc/sys/net always shows."""
    for family, values in values_by_family.items():
        for key, value in values.items():
            path = Path("/proc/sys/net") / family / "conf" / name / key
            try:
                path.write_text(value, encoding="ascii")
            except FileNotFoundError:
                continue  # no IPv6 on this host
            except OSError as problem:
                raise DatapathError(problem.errno or errno.EIO, f"cannot set {path} to {value}: {problem.strerror}") from None
