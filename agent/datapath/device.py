"""The interception device: a veth pair of the agent's own, to which every endpoint's DNS is redirected.

What arrives at it is made local by one rule, whatever address was asked: `iif DEVICE lookup TABLE`, and in the table `local
default dev lo`. Why a device, and why these sysctls, which are set on it and on nothing else:

  an address     without one, reverse path filtering refuses every packet of the interface, however it is set
  rp_filter=2    the packets come in by another interface than the one that leads back to their sender; 2 beats `all`=1
  accept_local=1 an uplink's own packets have the host's addresses as their source
  accept_ra=0    and no IPv6 address: nobody but us sends here; disable_ipv6=1 on the other side, or it would solicit routers

The address is 192.0.0.8, which IANA keeps as a dummy (RFC 7600), of host scope: it is chosen as a source for nothing.

Nothing of somebody else is used or replaced: see in_the_way(). The device's alias notes what the agent wants the next start to
know; it goes with the device.

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


class Rule(NamedTuple):
    """One of the policy routing rules (ip-rule(8)), as far as it can meet ours. mark, mask: 0, 0 where it looks at no mark."""

    family: int
    priority: int
    table: int
    interface: str
    mark: int
    mask: int

    def __str__(self) -> str:
        mark = f" fwmark {self.mark:#x}/{self.mask:#x}" if self.mask else ""
        interface = f" iif {self.interface}" if self.interface else ""
        return f"{self.priority}: from all{mark}{interface} lookup {self.table}"


def rules() -> list[Rule]:
    """Of both families, without the kernel's first, which looks at the host's own addresses."""
    from pyroute2 import IPRoute

    found = []
    with IPRoute() as netlink:
        for family in _families():
            for message in netlink.get_rules(family):
                mark = message.get_attr("FRA_FWMARK")
                mask = message.get_attr("FRA_FWMASK")
                found.append(
                    Rule(
                        family,
                        message.get_attr("FRA_PRIORITY") or 0,
                        message.get_attr("FRA_TABLE") or message["table"],
                        message.get_attr("FRA_IIFNAME") or "",
                        mark or 0,
                        0 if mark is None and mask is None else 0xFFFF_FFFF if mask is None else mask,
                    )
                )
    return [rule for rule in found if rule.priority]


def in_the_way(device: Device) -> list[str]:
    """Why the device cannot be what it is to be: what of others has its name, priority or table. A sentence and remedy each."""
    from pyroute2 import IPRoute

    others = [rule for rule in rules() if not rule.interface]
    said = [
        f"the rule `{rule}` of somebody else comes before ours and may take DNS away: choose another `datapath.rule-priority`, "
        f"before that one, instead of {device.priority}"
        for rule in others
        if _comes_before(rule, device)
    ]
    users = [f"the rule `{rule}`" for rule in others if rule.table == device.table]
    with IPRoute() as netlink:
        found = netlink.link_lookup(ifname=device.name)
        if found and not _is_ours(netlink.get_links(found[0])[0]):
            said.append(f"{device.name} is an interface of somebody else: choose another `datapath.device`")
        users += [
            f"a route to {route.get_attr('RTA_DST') or 'everywhere'}"
            for family in _families()
            for route in netlink.get_routes(family=family, table=device.table)
            if route["dst_len"] or route.get_attr("RTA_OIF") != _LOOPBACK
        ]
    said += [
        f"routing table {device.table} is in use by somebody else ({by}): choose another `datapath.routing-table`"
        for by in users
    ]
    return list(dict.fromkeys(said))  # a rule of both families is one


def _comes_before(rule: Rule, device: Device) -> bool:
    """One that looks at a mark is for packets that have it, and only disputes the place."""
    return rule.priority == device.priority or (rule.priority < device.priority and not rule.mask)


def noted(device: Device) -> str:
    """What provide() was given to note; empty where the device is not there."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        for index in netlink.link_lookup(ifname=device.name):
            return str(netlink.get_links(index)[0].get_attr("IFLA_IFALIAS") or "")
    return ""


def provide(device: Device, note: str) -> int:
    """Makes what is missing of the device and its rules; gives its ifindex. Raises DatapathError, and has then made nothing
    where somebody else is in the way."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def unless_there(call: Callable[[], object]) -> None:
        try:
            call()
        except NetlinkError as problem:
            if problem.code != errno.EEXIST:
                raise

    try:
        if obstacles := in_the_way(device):
            raise DatapathError(errno.EEXIST, "; ".join(obstacles))
        with IPRoute() as netlink:
            found = netlink.link_lookup(ifname=device.name)
            if not found:
                netlink.link("add", ifname=device.name, kind="veth", peer={"ifname": device.peer})
                found = netlink.link_lookup(ifname=device.name)
            ifindex = int(found[0])
            netlink.link("set", index=ifindex, ifalias=note)
            _set_sysctls(device.name, _SYSCTLS)
            _set_sysctls(device.peer, _SYSCTLS_PEER)
            for name in (device.name, device.peer):
                for index in netlink.link_lookup(ifname=name):
                    netlink.link("set", index=index, state="up")
            unless_there(lambda: netlink.addr("add", index=ifindex, address=_ADDRESS, prefixlen=32, scope=_SCOPE_HOST))
            for family in _families():
                netlink.route(
                    "replace",
                    family=family,
                    dst=_FAMILIES[family],
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
        for family in _families():
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
        if not any(rule.table == device.table for rule in rules()):  # or another agent's rule leads to the same routes
            for family in _FAMILIES:
                with contextlib.suppress(NetlinkError):
                    netlink.flush_routes(family=family, table=device.table, oif=_LOOPBACK)
        for index in netlink.link_lookup(ifname=device.name):
            if _is_ours(netlink.get_links(index)[0]):
                netlink.link("del", index=index)


def _is_ours(link: object) -> bool:
    information = link.get_attr("IFLA_LINKINFO")  # type: ignore[attr-defined]
    return information is not None and information.get_attr("IFLA_INFO_KIND") == "veth"


def _families() -> list[socket.AddressFamily]:
    """Those that this host speaks. Where IPv6 is off on lo, as by `all.disable_ipv6=1`, the kernel takes no route to it."""
    disabled = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
    has_ipv6 = disabled.exists() and disabled.read_text(encoding="ascii").strip() == "0"
    return [family for family in _FAMILIES if family == socket.AF_INET or has_ipv6]


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
