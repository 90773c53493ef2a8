"""The host's side of a run's network: a veth pair, addresses that nobody here has, and NAT to wherever the host's routes lead.

Everything follows from one number N, and that is the first for which the kernel lets us make `ngrunN`: making an interface is
atomic, so runs that start together need no lock.

    ngrunN (host)            eth0 (inside)
    10.213.x.y/30            10.213.x.y+1       the N-th /30 of the first of the candidates that no route of the host's overlaps
    fd6e:6761:7465:N::1/64   …::2               a ULA (RFC 4193) that never leaves the host: NAT, as for IPv4
    fe80::1                  fe80::2            made by us: the kernel's own would be unusable for a second (DAD)
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.host import netlink
from agent.runner import CannotRun

if TYPE_CHECKING:
    import nftables

    from agent.host.firewall import Firewall

PREFIX: Final = "ngrun"
INSIDE: Final = "eth0"

_CANDIDATES: Final = ("10.213.0.0/16", "172.29.0.0/16", "192.168.0.0/16", "100.99.0.0/16", "198.18.0.0/16")
_V6: Final = ipaddress.IPv6Network("fd6e:6761:7465::/48")
_RUNS_MAX: Final = 1 << 14  # /30 networks of a /16

# An interface whose carrier the kernel thinks about has no queue, and what is sent meanwhile is lost. It thinks for a second at
# most (linkwatch), and only where the indexes of both ends happen to be equal.
_CARRIER_S_MAX: Final = 3.0
_LOOK_AGAIN_S: Final = 0.0005

_RTA_DST: Final = 1
_RTA_OIF: Final = 4
_RTN_UNICAST: Final = 1
_RTN_LOCAL: Final = 2
_LEGACY_TABLES: Final = (Path("/proc/net/ip_tables_names"), Path("/proc/net/ip6_tables_names"))
_HOOKS_THAT_DROP: Final = ('"prerouting"', '"input"', '"forward"')
_NEW_WITHOUT_IPV6: Final = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
_SIOCGIFFLAGS: Final = 0x8913
_IFF_RUNNING: Final = 0x40


@dataclass(frozen=True, slots=True)
class Link:
    number: int
    network: ipaddress.IPv4Network
    network6: ipaddress.IPv6Network | None  # None: the host has no way out by IPv6

    @classmethod
    def of(cls, said: Sequence[Any]) -> Link:
        """From what `said` gives."""
        number, network, network6 = said
        return cls(number, ipaddress.IPv4Network(network), network6 and ipaddress.IPv6Network(network6))

    def said(self) -> list[object]:
        """For a message."""
        return [self.number, str(self.network), self.network6 and str(self.network6)]

    @property
    def interface(self) -> str:
        return f"{PREFIX}{self.number}"

    @property
    def gateway(self) -> str:
        return str(self.network[1])

    @property
    def addresses(self) -> list[str]:
        """What is said from inside comes from these."""
        return [str(network[2]) for network in (self.network, self.network6) if network is not None]

    def inside(self) -> list[str]:
        """Lines for ip(8) inside."""
        lines = ["link set lo up", f"link set {INSIDE} addrgenmode none", f"addr add {self.addresses[0]}/30 dev {INSIDE}"]
        if self.network6 is not None:
            lines += [f"addr add {self.network6[2]}/64 dev {INSIDE} nodad", f"addr add fe80::2/64 dev {INSIDE} nodad"]
        lines += [f"link set {INSIDE} up", f"route add default via {self.gateway}"]
        if self.network6 is not None:
            lines += [f"route add ::/0 via {self.network6[1]} dev {INSIDE}"]
        return lines

    def outside(self, pid: int) -> list[str]:
        lines = [f"link add {self.interface} type veth peer name {INSIDE} netns {pid}"]
        lines += [f"link set {self.interface} addrgenmode none", f"addr add {self.gateway}/30 dev {self.interface}"]
        if self.network6 is not None:
            lines += [f"addr add {self.network6[1]}/64 dev {self.interface} nodad"]
            lines += [f"addr add fe80::1/64 dev {self.interface} nodad"]
        return [*lines, f"link set {self.interface} up"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of the host's network a run has to fit into. uplinks: the interfaces that default routes leave by."""

    network: ipaddress.IPv4Network
    network6: ipaddress.IPv6Network | None
    uplinks: tuple[str, ...]


def surroundings() -> Surroundings:
    """Raises CannotRun."""
    try:
        routes = [*netlink.dump(netlink.GET_ROUTE, socket.AF_INET), *netlink.dump(netlink.GET_ROUTE, socket.AF_INET6)]
        names = dict(socket.if_nameindex())
    except OSError as problem:
        raise CannotRun(f"the host's routes cannot be read: {problem.strerror}") from None
    taken: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
    uplinks: dict[str, None] = {}
    has_ipv6 = False
    for message in routes:
        family, length, *_, kind, _ = message.fixed
        interface = names.get(int.from_bytes(message.attributes.get(_RTA_OIF, b""), "little"), "")
        if kind not in {_RTN_UNICAST, _RTN_LOCAL} or interface.startswith(PREFIX):
            continue
        if length == 0:
            uplinks |= {interface: None} if interface else {}
            has_ipv6 |= family == socket.AF_INET6 and kind == _RTN_UNICAST and interface != "lo"
        elif _RTA_DST in message.attributes:
            network = ipaddress.ip_network((message.attributes[_RTA_DST], length), strict=False)
            taken.append(network)
    if has_ipv6:
        with contextlib.suppress(OSError):
            has_ipv6 = _NEW_WITHOUT_IPV6.read_text(encoding="ascii").strip() != "1"
    free = [network for network in map(ipaddress.IPv4Network, _CANDIDATES) if not _overlaps(network, taken)]
    if not free:
        raise CannotRun(f"routes of this host lead into every network that a run could have: {', '.join(_CANDIDATES)}")
    return Surroundings(free[0], _V6 if has_ipv6 and not _overlaps(_V6, taken) else None, tuple(uplinks))


def _overlaps(network: Any, others: Sequence[Any]) -> bool:
    return any(network.version == other.version and network.overlaps(other) for other in others)


def connect(pid: int, around: Surroundings) -> Link:
    """A veth pair between here and the network namespace of this process; raises CannotRun."""
    taken = {name for _, name in socket.if_nameindex()}
    for number in range(_RUNS_MAX):
        if f"{PREFIX}{number}" in taken:
            continue
        base = int(around.network.network_address) + 4 * number
        network6 = None
        if around.network6 is not None:
            network6 = ipaddress.IPv6Network((int(around.network6.network_address) + (number << 64), 64))
        link = Link(number, ipaddress.IPv4Network((base, 30)), network6)
        problem = configure(link.outside(pid))
        if not problem:
            return link
        if "File exists" not in problem:
            raise CannotRun(f"no veth pair can be made: {problem}")
    raise CannotRun(f"{_RUNS_MAX} runs are going on already")


def configure(lines: Sequence[str]) -> str:
    """What ip(8) says when it fails; otherwise nothing."""
    try:
        done = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False)
    except OSError as problem:
        return f"ip cannot be run ({problem.strerror}): install iproute2"
    if not done.returncode:
        return ""
    return re.sub(r"\s*Command failed -:\d+\s*", "", done.stderr.strip()) or f"ip ended with {done.returncode}"


def await_carrier(interface: str) -> bool:
    """Does what is sent by this interface arrive?"""
    deadline = time.monotonic() + _CARRIER_S_MAX
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        while time.monotonic() < deadline:
            # struct ifreq: name:16 octets, flags:16
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, interface.encode().ljust(40, b"\0"))
            if int.from_bytes(answer[16:18], "little") & _IFF_RUNNING:
                return True
            time.sleep(_LOOK_AGAIN_S)
    return False


class AddressTranslation:
    """The run's addresses become the host's on their way out. The table has an owner, this process's netlink socket, and the
    kernel removes it with that (nft(8), `flags owner`, Linux 5.12)."""

    def __init__(self, link: Link) -> None:
        """Raises CannotRun."""
        self._nft = libnftables()
        rules = [f'oifname != "{link.interface}" ip saddr {link.network} masquerade']
        if link.network6 is not None:
            rules += [f'oifname != "{link.interface}" ip6 saddr {link.network6} masquerade']
        chain = "\n".join(["chain out {", "type nat hook postrouting priority srcnat", *rules, "}"])
        code, _, problem = self._nft.cmd(f"table inet namegate-run{link.number} {{\nflags owner\n{chain}\n}}")
        if code:
            raise CannotRun(f"nftables does not take the run's NAT: {problem.strip().splitlines()[0]}")


def libnftables() -> nftables.Nftables:
    try:
        import nftables
    except ImportError:
        raise CannotRun("Python's nftables library is missing: apt install python3-nftables") from None
    return nftables.Nftables()


def firewall() -> Firewall | None:
    """The host's; None where it drops nothing for sure, or cannot be read (`namegate doctor` says why).

    Listing the chains takes no time where listing thousands of rules does.
    """
    nft = libnftables()
    nft.set_json_output(True)
    code, said, _ = nft.cmd("list chains")
    legacy = any(path.exists() and path.read_text(encoding="ascii").strip() for path in _LEGACY_TABLES)
    if not code and not legacy and not any(hook in said for hook in _HOOKS_THAT_DROP):
        return None
    from agent.host.firewall import Firewall, Unreadable

    try:
        return Firewall.read()
    except Unreadable:
        return None


def require_passage(through: Firewall, link: Link, uplinks: Sequence[str], device: str) -> None:
    """Raises CannotRun with what the owner of each chain has to do that drops what a run sends, its replies, or what it asks on
    its way to the agent, whose device that is. For runs of every number."""
    behind = through.obstacles_behind(link.interface, uplinks[0] if len(uplinks) == 1 else "")
    sent = [
        (chain, remedy.replace(link.interface, f"{PREFIX}{'*' if remedy.startswith('nft') else '+'}"))
        for chain, _, remedy in behind
    ]
    asked = [(chain, remedy) for chain, _, remedy in through.obstacles(device)]
    if not sent and not asked:
        return
    what = " and ".join(what for what, found in (("what a run sends", sent), ("the names it asks for", asked)) if found)
    chains = ", ".join(dict.fromkeys(chain for chain, _ in (*sent, *asked)))
    remedies = "".join(f"\n  {remedy}" for remedy in dict.fromkeys(remedy for _, remedy in (*sent, *asked)))
    raise CannotRun(f"the host's firewall drops {what} ({chains}). To let it pass:{remedies}")
