"""What is asked about: a packet that is only thought of, said in words, and its octets."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from agent.control import ControlError
from agent.core.names import normalise_name
from agent.core.types import (
    PORT_DNS,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_NAMES,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    PROTOCOLS_WITH_PORTS,
    Address,
    Direction,
    packed,
    text_of,
)

SYN: Final = 0x02
ACK: Final = 0x10
_NUMBERS: Final = {name: number for number, name in PROTOCOL_NAMES.items()}
_ECHO: Final = {4: 8, 16: 128}
# What is no protocol but stands before one (RFC 8200 4), or says that there is none.
_HEADERS: Final = frozenset((0, 43, 44, 51, 59, 60))
# Judged by the flow they are about, or by what they claim, and by no rule.
_ICMP: Final = (PROTOCOL_ICMP, PROTOCOL_ICMPV6)
_ICMP_ERRORS: Final = frozenset((3, 11, 12))
_ICMPV6_OTHERS: Final = frozenset((*range(1, 5), *range(130, 138), 143))
_PORT_LAST: Final = 65_535
_ANY_PORT: Final = 40_000


@dataclass(frozen=True, slots=True)
class Asked:
    """The first packet of a new flow. port: the one that is judged; of ICMP the type, of a protocol without ports 0.

    local: the endpoint's end; None: its own address of the family.
    """

    direction: Direction
    remote: Address
    protocol: int
    port: int
    local: Address | None = None

    @property
    def is_question(self) -> bool:
        return self.direction is Direction.EGRESS and self.port == PORT_DNS and self.protocol in (PROTOCOL_TCP, PROTOCOL_UDP)

    @property
    def what(self) -> str:
        """The protocol and, where there is one, port or type."""
        name = PROTOCOL_NAMES.get(self.protocol, str(self.protocol))
        return name if self.protocol not in (*PROTOCOLS_WITH_PORTS, *_ICMP) else f"{name}/{self.port}"

    def __str__(self) -> str:
        return f"{self.what} {'to' if self.direction is Direction.EGRESS else 'from'} {text_of(self.remote)}"

    def frame(self, local: Address) -> bytes:
        is_out = self.direction is Direction.EGRESS
        ports = (_ANY_PORT, self.port) if is_out else (self.port, _ANY_PORT)
        return frame_of(self.direction, local, self.remote, self.protocol, ports, kind=self.port, flags=SYN)


def read_packet(address: str, what: str, direction: Direction) -> Asked:
    """`tcp/443` (or `443/tcp`), `icmp`, `icmp/3`, `gre` by its number; raises ControlError."""
    remote = read_address(address)
    if remote is None:
        raise ControlError(
            f"{address!r} is no address: write `explain {address} {what}` as a name without a protocol, or ask it"
        )
    first, slash, second = what.lower().partition("/")
    if first.isdigit() and second and not second.isdigit():
        first, second = second, first
    protocol = _NUMBERS.get(first, int(first) if first.isdecimal() and int(first) < 256 else None)
    if protocol is None or (slash and not second.isdecimal()):
        raise ControlError(f"{what!r} is no protocol and port: write tcp/443, udp/53, icmp/8 or a protocol's number")
    if protocol in _ICMP:
        protocol = PROTOCOL_ICMP if len(remote) == 4 else PROTOCOL_ICMPV6
        number = int(second) if slash else _ECHO[len(remote)]
        if number > 255 or number in (_ICMP_ERRORS if len(remote) == 4 else _ICMPV6_OTHERS):
            raise ControlError(f"icmp/{number} is judged by the flow it is about, or by what it claims: no rule speaks of it")
    elif protocol in PROTOCOLS_WITH_PORTS:
        if not slash or int(second) > _PORT_LAST:
            raise ControlError(f"{what!r} has no port: write {first}/443")
        number = int(second)
    elif slash or (len(remote) == 16 and protocol in _HEADERS):
        raise ControlError(f"{what!r} has no port: write a protocol with ports, icmp, or the number of one alone")
    else:
        number = 0
    return Asked(direction, remote, protocol, number)


def read_address(text: str) -> Address | None:
    try:
        return packed(text.strip("[]"))
    except ValueError:
        return None


def read_name(text: str) -> str:
    """As the core writes names; raises ControlError."""
    try:
        return normalise_name(text)
    except ValueError as error:
        raise ControlError(f"{text!r} is neither an address nor a name: {error}") from None


def frame_of(
    direction: Direction,
    local: Address,
    remote: Address,
    protocol: int,
    ports: tuple[int, int],
    *,
    kind: int,
    flags: int,
) -> bytes:
    """An Ethernet frame as far as a judge reads it. ports: the local one and the remote one; of ICMP, kind and identifier."""
    source, destination = (local, remote) if direction is Direction.EGRESS else (remote, local)
    sent = ports if direction is Direction.EGRESS else ports[::-1]
    match protocol:
        case _ if protocol == PROTOCOL_TCP:
            body = struct.pack(">HHIIBBHHH", *sent, 0, 0, 5 << 4, flags, 0, 0, 0)
        case _ if protocol == PROTOCOL_UDP:
            body = struct.pack(">HHHH", *sent, 8, 0)
        case _ if protocol == PROTOCOL_SCTP:
            body = struct.pack(">HHQ", *sent, 0)
        case _ if protocol in _ICMP:
            body = struct.pack(">BBHHH", kind, 0, 0, ports[0], 0)
        case _:
            body = bytes(8)
    if len(source) == 4:
        head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0)
        ethertype = 0x0800
    else:
        head = struct.pack(">IHBB", 6 << 28, len(body), protocol, 64)
        ethertype = 0x86DD
    return bytes(12) + struct.pack(">H", ethertype) + head + source + destination + body
