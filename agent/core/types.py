"""The values everything else is made of: addresses, prefixes, labels, rows.

An address is its packed form, 4 or 16 bytes in network order: it is what the wire has and what the kernel wants, it hashes
fast, and its length says the family. Text exists only at the edges. A v4-mapped IPv6 address is the IPv4 address.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
from typing import Final, NamedTuple

Address = bytes
Label = str
LabelSet = frozenset[Label]

# Reserved identities (numbers as in Cilium, so that people who know one can read the other).
IDENTITY_ANY: Final = 0
IDENTITY_HOST: Final = 1
IDENTITY_WORLD: Final = 2
IDENTITY_LOCAL_FIRST: Final = 1 << 24

LABEL_WORLD: Final = "reserved:world"
LABEL_HOST: Final = "reserved:host"

# Scopes of ipcache rows. An isolated endpoint's own scope is SCOPE_OWN_FIRST + its id.
SCOPE_STATIC: Final = 0
SCOPE_SHARED: Final = 1
SCOPE_OWN_FIRST: Final = 2

# IANA's numbers. Plain ones: to compare with a member of socket's enumerations takes several times as long.
PROTOCOL_ICMP: Final = 1
PROTOCOL_TCP: Final = 6
PROTOCOL_UDP: Final = 17
PROTOCOL_ICMPV6: Final = 58
PROTOCOL_SCTP: Final = 132
PROTOCOLS_WITH_PORTS: Final = (PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP)
PORT_DNS: Final = 53

PROTOCOL_NAMES: Final = {
    PROTOCOL_ICMP: "icmp",
    PROTOCOL_TCP: "tcp",
    PROTOCOL_UDP: "udp",
    PROTOCOL_ICMPV6: "icmpv6",
    PROTOCOL_SCTP: "sctp",
}


# What clients ask for.
_QUESTION_TYPES = {1: "A", 12: "PTR", 15: "MX", 16: "TXT", 28: "AAAA", 33: "SRV", 64: "SVCB", 65: "HTTPS"}


def question_type_text(number: int) -> str:
    """Another one as RFC 3597 writes it."""
    return _QUESTION_TYPES.get(number, f"TYPE{number}")


class Direction(enum.IntEnum):
    """Seen from the endpoint. The numbers are those of bpf/abi.h."""

    EGRESS = 0
    INGRESS = 1


class Verdict(enum.IntEnum):
    """Ordered by strength: where several apply the largest one holds. The numbers are those of bpf/abi.h."""

    ALLOW = 1
    REDIRECT = 2
    DENY = 3


class Orientation(enum.IntEnum):
    """Which hook of the interface sees what the endpoint sends. The numbers are those of bpf/abi.h."""

    BEHIND = 0  # host side of a veth, a tap: the endpoint's packets arrive at ingress
    UPLINK = 1  # the host's own interface: the endpoint's packets leave at egress


_V4_MAPPED: Final = bytes(10) + b"\xff\xff"


def packed(text: str) -> Address:
    """Text to address; raises ValueError."""
    address = ipaddress.ip_address(text).packed
    return address[12:] if len(address) == 16 and address.startswith(_V4_MAPPED) else address


def text_of(address: Address) -> str:
    """Address to its shortest text (RFC 5952)."""
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)


class Prefix(NamedTuple):
    """A canonical network: host bits are zero.

    address: 4 or 16 bytes; length: 0 to 32 or 128 bits.
    """

    address: Address
    length: int

    @classmethod
    def of(cls, address: Address) -> Prefix:
        """The /32 or /128 of one address."""
        return cls(address, len(address) * 8)

    @classmethod
    def masked(cls, address: Address, length: int) -> Prefix:
        """The prefix of this length that holds the address."""
        bits = len(address) * 8
        if not 0 <= length <= bits:
            raise ValueError(f"a prefix of this family has 0 to {bits} bits, not {length}")
        mask = ((1 << length) - 1) << (bits - length)
        return cls((int.from_bytes(address, "big") & mask).to_bytes(bits // 8, "big"), length)

    @classmethod
    def parse(cls, text: str) -> Prefix:
        """CIDR or bare address to prefix, host bits masked away; raises ValueError, also for an address with a zone."""
        if "%" in text:
            raise ValueError(f"{text!r} has a zone, which a network has not")
        network = ipaddress.ip_network(text, strict=False)
        address, length = network.network_address.packed, network.prefixlen
        if len(address) == 16 and length >= 96 and address.startswith(_V4_MAPPED):
            address, length = address[12:], length - 96
        return cls(address, length)

    @property
    def is_address(self) -> bool:
        return self.length == len(self.address) * 8

    @property
    def last(self) -> Prefix:
        """In order, every prefix inside this one stands between it and this: the /32 or /128 of its last address."""
        bits = len(self.address) * 8
        last = int.from_bytes(self.address, "big") | (1 << bits - self.length) - 1
        return Prefix.of(last.to_bytes(bits // 8, "big"))

    def contains(self, other: Prefix) -> bool:
        """Is every address of `other` one of mine? A prefix contains itself."""
        return self.length <= other.length and self.holds(other.address)

    def holds(self, address: Address) -> bool:
        """Is the address one of mine?"""
        if len(address) != len(self.address):
            return False
        others = len(address) * 8 - self.length
        return int.from_bytes(address, "big") >> others == int.from_bytes(self.address, "big") >> others

    def __str__(self) -> str:
        return f"{text_of(self.address)}/{self.length}"


class Table(enum.StrEnum):
    """The kernel's tables that the core fills; each is one kernel map, `ipcache` is two (by family)."""

    POLICY = "policy"
    IPCACHE = "ipcache"
    GROUPS = "groups"
    ENDPOINTS = "endpoints"
    OWN_ADDRESSES = "own_addresses"


class IpcacheKey(NamedTuple):
    scope: int
    prefix: Prefix


def address_key(scope: int, address: Address) -> IpcacheKey:
    """The row of one address."""
    # A named tuple is made of a tuple: its own constructor takes three times as long, and a new address needs several of these.
    return tuple.__new__(IpcacheKey, (scope, tuple.__new__(Prefix, (address, len(address) * 8))))


class PolicyKey(NamedTuple):
    """One row of the policy map.

    protocol 0 is every protocol (then port_bits is 0); port holds a block of ports of which the first `port_bits` (0 to 16)
    bits count, the others are zero. For ICMP the port is the type.
    """

    set: int
    identity: int
    direction: Direction
    protocol: int
    port: int
    port_bits: int


class PolicyValue(NamedTuple):
    verdict: Verdict
    cookie: int  # number of the rule that decided, for counters and events; 0: no rule of a file


class GroupValue(NamedTuple):
    set: int
    default_deny_egress: bool
    default_deny_ingress: bool
    audit: bool


class EndpointValue(NamedTuple):
    """Value of `endpoints`; its key is the interface's index.

    dhcp: it may ask for an address (an uplink may always); silent: what is denied it is dropped without an answer.
    """

    endpoint: int
    group: int
    scope: int
    orientation: Orientation
    dhcp: bool = False
    silent: bool = False


class OwnAddressKey(NamedTuple):
    """An address the endpoint may send from; the value is True."""

    endpoint: int
    address: Address


Key = IpcacheKey | PolicyKey | OwnAddressKey | int
Value = int | PolicyValue | GroupValue | EndpointValue | bool


class Write(NamedTuple):
    """One change of a kernel row: a value to put, or None to delete."""

    table: Table
    key: Key
    value: Value | None
