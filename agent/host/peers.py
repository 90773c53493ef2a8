"""Which of the host's interfaces lead into another network namespace: a container's, a service's, one of `ip netns`.

Rule 1: the namespace is looked at from inside, by a thread that enters it and ends; no other thread of the process moves.
Rule 2: a veth is theirs when the kernel says that its other side lies in our namespace. The index alone could be that of an
interface of a third one:

    ours (7: veth0) ═════ theirs (2: eth0, other side 7 of our namespace)         policed at veth0
                          theirs (3: eth1, other side 7 of another namespace)     leads to a router, a rootless engine, …

Rule 3: who has CAP_NET_ADMIN over our namespace can make himself a device on our uplink from inside his, since a link tells the
number of the namespace at its other end. He has it who has it in the user namespace that ours is of.

The OCI hook runs this before each container, so it imports little.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from agent.core.types import Address
from agent.host import netlink
from agent.host.interfaces import is_link_local

_OWN: Final = "/proc/self/ns/net"
_GET_USERNS: Final = 0xB701  # NS_GET_USERNS, <linux/nsfs.h>
CAP_NET_ADMIN: Final = 12
_CLONE_NEWNET: Final = 0x4000_0000

_IFLA_IFNAME: Final = 3
_IFLA_LINK: Final = 5
_IFLA_LINKINFO: Final = 18
_IFLA_LINK_NETNSID: Final = 37
_IFLA_INFO_KIND: Final = 1
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_IFF_LOOPBACK: Final = 0x8
_GET_NSID: Final = 90
_NETNSA_NSID: Final = 1
_NETNSA_FD: Final = 3
_REQUEST: Final = 0x1
_ERROR: Final = 2
_NOWHERE: Final = -1  # the kernel's number for a namespace that has none

_VETH: Final = "veth"
_TUN: Final = "tun"
_HARDWARE: Final = ""
# Their packets leave by the parent's driver, in whichever namespace that is.
_ON_A_PARENT: Final = frozenset({"macvlan", "ipvlan", "macvtap", "ipvtap", "vlan"})


class Peer(NamedTuple):
    """An interface of ours and the one at its other side; addresses: what that one has, but for link-local ones."""

    ifindex: int
    interface: str
    inside: str
    addresses: tuple[Address, ...]


class Behind(NamedTuple):
    """What leads into a namespace; at least one peer. unpoliced: a sentence for each other way out of it. warnings: for what
    those inside may do about it (rule 3).
    """

    peers: tuple[Peer, ...]
    unpoliced: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class NotPoliced(Exception):
    """Nothing of this namespace can be policed here; the text says why, and what could be. is_harmless: it has no way out."""

    def __init__(self, sentence: str, *, is_harmless: bool = False) -> None:
        super().__init__(sentence)
        self.is_harmless = is_harmless


class _Theirs(NamedTuple):
    """other_side: an index, of a namespace that has this number inside; where that is the same one, _NOWHERE."""

    name: str
    kind: str
    other_side: int
    namespace: int
    addresses: tuple[Address, ...]


def behind_process(pid: int, capabilities: int | None = None) -> Behind:
    """capabilities: the bounding set it is to have, one bit each; None: it has that already. Raises NotPoliced."""
    try:
        return behind_file(f"/proc/{pid}/ns/net", pid, capabilities)
    except FileNotFoundError:
        raise NotPoliced(f"there is no process {pid}") from None


def behind_name(name: str) -> Behind:
    """The namespace that `ip netns` knows by this name. Raises NotPoliced."""
    try:
        return behind_file(f"/run/netns/{name}")
    except FileNotFoundError:
        raise NotPoliced(f"there is no network namespace {name} (`ip netns` shows them)") from None


def behind_file(path: str, pid: int | None = None, capabilities: int | None = None) -> Behind:
    """What leads into the network namespace of this file, such as /proc/PID/ns/net. pid: of whom it is that is inside, if it is
    known. Raises NotPoliced and FileNotFoundError.
    """
    try:
        with _opened(path) as theirs, _opened(_OWN) as own:
            if os.path.samestat(os.fstat(theirs), os.fstat(own)):
                raise NotPoliced(
                    "it is in the host's own network namespace (host network mode), so it has no interface of its own: police "
                    "the host's uplink, or give it a network"
                )
            own_number, found = _Inside(theirs, own).look()
            warnings = () if (warning := _warning(theirs, own, pid, capabilities)) is None else (warning,)
        names = {message.fixed[2]: _text(message.attributes.get(_IFLA_IFNAME)) for message in netlink.dump(netlink.GET_LINK)}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPoliced(f"the network namespace {path} cannot be looked at: {error.strerror or error}") from None
    peers, others = [], []
    for each in found:
        if each.kind == _VETH and each.namespace == own_number != _NOWHERE and each.other_side in names:
            peers.append(Peer(each.other_side, names[each.other_side], each.name, each.addresses))
        elif (sentence := _way_out(each)) is not None:
            others.append((each, sentence))
    if peers:
        # Beside a veth of ours, a veth to elsewhere or a tap is mostly a container inside the container.
        return Behind(tuple(peers), tuple(sentence for each, sentence in others if each.kind not in (_VETH, _TUN)), warnings)
    if others:
        raise NotPoliced(others[0][1])
    raise NotPoliced("it has no interface but lo (network mode none): nothing gets out", is_harmless=True)


def _way_out(each: _Theirs) -> str | None:
    """Why what leaves by this interface cannot be policed; None: nothing leaves by it (a bridge, a tunnel's template)."""
    if each.kind == _VETH and each.namespace != _NOWHERE:
        return f"the other side of its {each.name} is in a third network namespace (a rootless engine's, a router's)"
    if each.kind in _ON_A_PARENT and each.namespace != _NOWHERE:
        return (
            f"its {each.name} ({each.kind}) sends through its parent and has no side here that could be policed: give it a veth"
            " (a bridge network)"
        )
    if each.kind == _TUN:
        return (
            f"its {each.name} is a tap of a program that makes the connections itself (slirp4netns, pasta): give it a veth (a "
            "bridge network of an engine that runs as root)"
        )
    if each.kind == _HARDWARE:
        return f"its {each.name} is a device of its own, with no side here that could be policed"
    return None


def _warning(theirs: int, own: int, pid: int | None, capabilities: int | None) -> str | None:
    """Rule 3. Where no process is known it is about who runs there and is of the same users as the namespace."""
    try:
        users = _users_of(theirs) if pid is None else Path(f"/proc/{pid}/ns/user").stat()
        if not os.path.samestat(users, _users_of(own)):
            return None
        if pid is None:
            return (
                "what runs there with CAP_NET_ADMIN, as from `ip netns exec`, administers the host's network too and can make "
                "itself a way out that is not policed"
            )
        if not (_bounding_set(pid) if capabilities is None else capabilities) >> CAP_NET_ADMIN & 1:
            return None
    except OSError:
        return None  # the process has ended
    return (
        "its root has CAP_NET_ADMIN and no user namespace of its own, so it administers the host's network too and can make "
        "itself a way out that is not policed: take the capability away, or give it a user namespace (--userns=auto)"
    )


def _users_of(namespace: int) -> os.stat_result:
    """The user namespace that a network namespace is of."""
    descriptor = fcntl.ioctl(namespace, _GET_USERNS)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _bounding_set(pid: int) -> int:
    """What root of that process may have at most, whoever it runs as now."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapBnd:"))


class _Inside(threading.Thread):
    """Looks at another network namespace from a thread of its own, which never comes back from there."""

    def __init__(self, theirs: int, own: int) -> None:
        super().__init__(name="namegate-inside")
        self._theirs = theirs
        self._own = own
        self._found: tuple[int, list[_Theirs]] = _NOWHERE, []
        self._error: OSError | None = None

    def look(self) -> tuple[int, list[_Theirs]]:
        """The number our namespace has there, and the interfaces but lo, in their order. Raises OSError."""
        self.start()
        self.join()
        if self._error is not None:
            raise self._error
        return self._found

    def run(self) -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).setns(self._theirs, _CLONE_NEWNET):  # os.setns is of Python 3.12
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            self._found = _number_of(self._own), _interfaces()
        except OSError as error:
            self._error = error


def _number_of(namespace: int) -> int:
    """Of the namespace of this descriptor, as the caller's namespace numbers others (ip-netns(8), nsid)."""
    body = struct.pack("=4xHHI", 8, _NETNSA_FD, namespace)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as asked:
        asked.settimeout(5)
        asked.send(netlink.HEADER.pack(netlink.HEADER.size + len(body), _GET_NSID, _REQUEST, 1, 0) + body)
        for kind, _, payload in netlink.messages(asked.recv(4096)):
            number = netlink.attributes(payload, 4).get(_NETNSA_NSID)
            if kind != _ERROR and number is not None:
                return int.from_bytes(number, sys.byteorder, signed=True)
    return _NOWHERE


def _interfaces() -> list[_Theirs]:
    addresses: dict[int, dict[Address, None]] = {}
    for message in netlink.dump(netlink.GET_ADDRESS):
        address = message.attributes.get(_IFA_LOCAL) or message.attributes.get(_IFA_ADDRESS)
        if address is not None and not is_link_local(address):
            addresses.setdefault(message.fixed[4], {})[address] = None
    found = []
    for message in netlink.dump(netlink.GET_LINK):
        _, _, ifindex, flags, _ = message.fixed
        if flags & _IFF_LOOPBACK:
            continue
        information = netlink.attributes(message.attributes.get(_IFLA_LINKINFO, b""))
        found.append(
            _Theirs(
                _text(message.attributes.get(_IFLA_IFNAME)),
                _text(information.get(_IFLA_INFO_KIND)),
                _integer(message.attributes.get(_IFLA_LINK), 0),
                _integer(message.attributes.get(_IFLA_LINK_NETNSID), _NOWHERE),
                tuple(addresses.get(ifindex, ())),
            )
        )
    return found


def _text(octets: bytes | None) -> str:
    return (octets or b"").rstrip(b"\0").decode(errors="replace")


def _integer(octets: bytes | None, default: int) -> int:
    return default if octets is None else int.from_bytes(octets, sys.byteorder, signed=True)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
