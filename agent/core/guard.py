"""The address guard: which addresses a name may never stand for (DECISIONS 13).

Who answers for a name chooses its addresses. Without a guard an allowed name can be pointed at the machine itself, at the
cloud's metadata service or into the private network (DNS rebinding), and the policy would open them.

Rule 1: an address is judged by every address its packets may end at: a translator or a tunnel takes an IPv4 address out of an
IPv6 one. One guarded reading is enough.
Rule 2: a reading is let through by an allowed prefix that holds it or that holds the address it was read from. The prefix means
what it says: 10.0.0.0/8 lets through also the host's own address in it.
Rule 3: what documentation calls special but the internet routes like any other address is not guarded: the documentation and
benchmark ranges, the anycast relays, 192.0.0.170 and .171 by which hosts find their NAT64 prefix (RFC 7050).

Forms with an IPv4 address inside:

    ::ffff:0:0/96       mapped (RFC 4291 2.5.5.2): is the IPv4 address
    ::/96               compatible (RFC 4291 2.5.5.1), of automatic tunnels
    ::ffff:0:0:0/96     translated (RFC 2765 2.1), of stateless translators
    64:ff9b::/96        NAT64 (RFC 6052 2.1)
    64:ff9b:1::/48      NAT64 of a local network (RFC 8215): where the IPv4 address stands is that network's choice
    2002::/16           6to4 (RFC 3056 2)
    2001::/32           Teredo (RFC 4380 4): the server's, and inverted the client's, where packets end
    ...:[02]00:5efe:*   ISATAP (RFC 5214 6.1), under any prefix; one address in two billion looks so by chance

Not seen: IPv4 inside a NAT64 prefix of a network's own (RFC 6052 2.2), which looks like any other address. 240.0.0.0/4 is
guarded like private space because it is used as such; so are three metadata services at addresses that are not link-local.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from agent.core.types import Address, Prefix
from agent.dns.wire import unmapped


class Kind(enum.StrEnum):
    """Why an address is guarded; people read these words."""

    UNSPECIFIED = "unspecified"
    THIS_NETWORK = "this network"
    LOOPBACK = "loopback"
    LINK_LOCAL = "link-local"
    METADATA = "metadata"
    PRIVATE = "private"
    CGNAT = "CGNAT"
    ULA = "ULA"
    MULTICAST = "multicast"
    RESERVED = "reserved"
    BROADCAST = "broadcast"
    HOST = "host"


class _Range(NamedTuple):
    """A prefix as what its addresses have in common: `address >> shift == bits`. Twenty are tried for a new address."""

    octets: int
    shift: int
    bits: int

    @classmethod
    def of(cls, text: str) -> _Range:
        network = ipaddress.ip_network(text)
        shift = network.max_prefixlen - network.prefixlen
        return cls(network.max_prefixlen // 8, shift, int(network.network_address) >> shift)

    def holds(self, address: Address) -> bool:
        return len(address) == self.octets and int.from_bytes(address, "big") >> self.shift == self.bits


# The most telling first: the first that holds an address names it.
_KINDS: Final = tuple(
    (_Range.of(text), kind)
    for text, kind in (
        ("169.254.169.254", Kind.METADATA),  # nearly every cloud
        ("100.100.100.200", Kind.METADATA),  # Alibaba
        ("168.63.129.16", Kind.METADATA),  # Azure's wire server
        ("192.0.0.192", Kind.METADATA),  # Oracle, first generation
        ("0.0.0.0/32", Kind.UNSPECIFIED),  # Linux takes it for the machine itself
        ("0.0.0.0/8", Kind.THIS_NETWORK),
        ("127.0.0.0/8", Kind.LOOPBACK),
        ("169.254.0.0/16", Kind.LINK_LOCAL),
        ("10.0.0.0/8", Kind.PRIVATE),  # RFC 1918, with the next two
        ("172.16.0.0/12", Kind.PRIVATE),
        ("192.168.0.0/16", Kind.PRIVATE),
        ("100.64.0.0/10", Kind.CGNAT),  # RFC 6598
        ("224.0.0.0/4", Kind.MULTICAST),
        ("255.255.255.255/32", Kind.BROADCAST),
        ("240.0.0.0/4", Kind.RESERVED),
        ("fd00:ec2::254", Kind.METADATA),  # Amazon
        ("fd20:ce::254", Kind.METADATA),  # Google
        ("::/128", Kind.UNSPECIFIED),
        ("::1/128", Kind.LOOPBACK),
        ("fe80::/10", Kind.LINK_LOCAL),
        ("fec0::/10", Kind.PRIVATE),  # site-local, given up by RFC 3879 and still routed by Linux
        ("fc00::/7", Kind.ULA),  # RFC 4193
        ("ff00::/8", Kind.MULTICAST),
    )
)

# The same addresses are answered again and again; strangers can push entries out, never add to the bound.
KINDS_MAX: Final = 65536

_NOTHING_EMBEDDED: Final = bytes(4)


def _local_nat64(address: Address) -> tuple[Address, ...]:
    """RFC 6052 2.2 for each length the prefix inside 64:ff9b:1::/48 may have.

    The octets behind the IPv4 address are zero, so most addresses have one reading. Those that have several are judged by all:
    a public address may be taken for a guarded one, never the other way; a network that meets it allows its prefix.
    """
    found = [address[12:]]
    if not any(address[11:]):
        found.append(address[6:8] + address[9:11])
    if not any(address[12:]):
        found.append(address[7:8] + address[9:12])
    if not any(address[13:]):
        found.append(address[9:13])
    return tuple(reading for reading in found if reading != _NOTHING_EMBEDDED)


def _teredo(address: Address) -> tuple[Address, ...]:
    return address[4:8], bytes(octet ^ 0xFF for octet in address[12:])


def _last_four(address: Address) -> tuple[Address, ...]:
    return (address[12:],)


_EMBEDDINGS: Final[tuple[tuple[_Range, Callable[[Address], tuple[Address, ...]]], ...]] = (
    (_Range.of("::/96"), _last_four),
    (_Range.of("::ffff:0:0:0/96"), _last_four),
    (_Range.of("64:ff9b::/96"), _last_four),
    (_Range.of("64:ff9b:1::/48"), _local_nat64),
    (_Range.of("2002::/16"), lambda address: (address[2:6],)),
    (_Range.of("2001::/32"), _teredo),
)
_STARTS_OF_FORMS: Final = frozenset((0x00, 0x20))  # first octets of these
_ISATAP: Final = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")


def _readings(address: Address) -> tuple[tuple[Address, Kind | None], ...]:
    """Every address that packets to this one may end at, itself first, each with its kind by the table."""
    address = unmapped(address)
    kind = _kind_of(address)
    found = [address]
    # `::` and `::1` are what they are, not forms of 0.0.0.0 and 0.0.0.1; so is every other address that has a kind itself.
    if len(address) == 16 and kind is None:
        for form, embedded in _EMBEDDINGS:
            if form.holds(address):
                found += embedded(address)
        if address[8:12] in _ISATAP:
            found.append(address[12:])
    return ((address, kind), *[(reading, _kind_of(reading)) for reading in found[1:]])


def _first_octets(guarded: _Range) -> range:
    """What an address in it can begin with."""
    fixed = 8 * guarded.octets - guarded.shift
    if fixed >= 8:
        first = guarded.bits >> fixed - 8
        return range(first, first + 1)
    return range(guarded.bits << 8 - fixed, guarded.bits + 1 << 8 - fixed)


# By length and first octet: of most, no address is guarded.
_KINDS_BY_START: Final = {
    (octets, first): tuple(known for known in _KINDS if known[0].octets == octets and first in _first_octets(known[0]))
    for octets in (4, 16)
    for first in range(256)
}


def _kind_of(address: Address) -> Kind | None:
    for guarded, kind in _KINDS_BY_START[len(address), address[0]]:
        if guarded.holds(address):
            return kind
    return None


def _is_plain(address: Address) -> bool:
    """Is it, at a glance, neither guarded for its own sake nor a form of another? False says nothing."""
    if len(address) == 4:
        return not _KINDS_BY_START[4, address[0]]
    return address[0] not in _STARTS_OF_FORMS and not _KINDS_BY_START[16, address[0]] and address[8:12] not in _ISATAP


class AddressGuard:
    """Judges addresses for one host; made anew when the host's own addresses change.

    host: the host's own addresses, all of them. allowed: prefixes let through for every name (the agent's setting).
    """

    def __init__(self, host: Iterable[Address] = (), allowed: Iterable[Prefix] = ()) -> None:
        self._host = frozenset(host)
        self._allowed = tuple(allowed)
        self._kinds: dict[Address, Kind | None] = {}  # what was said of the last addresses, nothing allowed besides

    def forbids(self, address: Address, allowed: Collection[Prefix] = ()) -> Kind | None:
        """Why a name may not stand for this address; None if it may.

        allowed: prefixes let through besides the agent's (of the policies whose selectors want the name).
        """
        if _is_plain(address) and address not in self._host:
            return None  # what nearly every address is, said without looking at it twice
        if allowed:
            return self._judge(address, allowed)
        try:
            return self._kinds[address]
        except KeyError:
            if len(self._kinds) >= KINDS_MAX:
                self._kinds.clear()
            kind = self._kinds[address] = self._judge(address, ())
            return kind

    def forbids_any(self, records: Iterable[tuple[Address, int]], allowed: Collection[Prefix]) -> bool:
        """Is one of the addresses of an answer forbidden?"""
        return any(self.forbids(address, allowed) is not None for address, _ in records)

    def _judge(self, address: Address, allowed: Collection[Prefix]) -> Kind | None:
        for reading, kind in _readings(address):
            if reading in self._host:
                kind = Kind.HOST
            if kind is not None and not self._is_let_through(address, reading, allowed):
                return kind
        return None

    def _is_let_through(self, address: Address, reading: Address, allowed: Collection[Prefix]) -> bool:
        for prefixes in (self._allowed, allowed):
            for prefix in prefixes:
                if prefix.holds(reading) or prefix.holds(address):
                    return True
        return False
