"""The Python twin of bpf/abi.h: every byte that crosses between the kernel and the agent.

Rule 1: a struct is listed here with the names and the order of abi.h; a test compares offsets, sizes and enumerations.
Rule 2: numbers are in host order; `be16` fields and addresses are bytes in network order.

An address in a key is 16 bytes, IPv4 as ::ffff:a.b.c.d; only the ipcache tries keep IPv4 apart.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from agent.core.types import (
    Address,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    Orientation,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Value,
    Verdict,
    Write,
)


class FlowState(enum.IntEnum):
    LIVE = 0
    ENDED = 1


class Reason(enum.IntEnum):
    """Why a packet passed or was dropped; what each means stands in abi.h."""

    PASS_POLICY = 0
    PASS_FLOW = 1
    PASS_RELATED = 2
    PASS_NEIGHBOUR = 3
    PASS_AGENT = 4
    PASS_REDIRECT = 5
    PASS_AUDIT = 6
    PASS_ANSWER = 7
    PASS_DHCP = 8
    PASS_FORWARDED = 9
    DROP_NO_ENDPOINT = 10
    DROP_NO_GROUP = 11
    DROP_SOURCE = 12
    DROP_NEIGHBOUR_CLAIM = 13
    DROP_ETHERTYPE = 14
    DROP_VLAN = 15
    DROP_VLAN_REDIRECT = 16
    DROP_MALFORMED = 17
    DROP_EXTENSIONS = 18
    DROP_FRAGMENT = 19
    DROP_POLICY = 20
    DROP_DENY = 21
    DROP_FLOW_ENDED = 22
    DROP_UNRELATED = 23
    DROP_NO_GATE = 24
    DROP_NO_SOCKET = 25
    DROP_NOT_ASSIGNED = 26
    DROP_NOT_FOR_GATE = 27
    DROP_CANARY = 28
    DROP_SOURCE_ROUTE = 29
    DROP_MARTIAN = 30
    DROP_QUESTION_LIMIT = 31

    @property
    def is_drop(self) -> bool:
        """Of somebody's packet; a canary is nobody's."""
        return self >= Reason.DROP_NO_ENDPOINT and self is not Reason.DROP_CANARY

    @property
    def text(self) -> str:
        """What people read: `no-endpoint`; of what passed, `pass-flow`."""
        return self.name.removeprefix("DROP_").lower().replace("_", "-")


class Loss(enum.IntEnum):
    """What the program could not write down."""

    EVENT = 0
    COUNTER = 1
    FLOW = 2


SETTING_GATE_IFINDEX: Final = 0
SETTING_TELL_OPENED: Final = 1
ENDPOINT_NONE: Final = 0xFFFF_FFFF


class Field(NamedTuple):
    name: str
    format: str


class Layout:
    """A struct of abi.h: its name, its fields in order, and how it is packed."""

    def __init__(self, name: str, **formats: str) -> None:
        self.name = name
        self.fields = tuple(Field(field, text) for field, text in formats.items())
        self._struct = struct.Struct("=" + "".join(formats.values()))
        self.size = self._struct.size
        self.pack = self._struct.pack
        self.unpack = self._struct.unpack
        self.pack_into = self._struct.pack_into
        self.unpack_from = self._struct.unpack_from
        self.iter_unpack = self._struct.iter_unpack

    def offsets(self) -> dict[str, int]:
        found, offset = {}, 0
        for field in self.fields:
            found[field.name] = offset
            offset += struct.calcsize("=" + field.format)
        return found


U32 = Layout("u32", number="I")
U64 = Layout("u64", number="Q")
ENDPOINT_VALUE = Layout("endpoint_value", endpoint="I", group="I", scope="I", orientation="B", dhcp="?", silent="?", pad="s")
GROUP_VALUE = Layout("group_value", set="I", default_deny_egress="?", default_deny_ingress="?", audit="?", pad="s")
POLICY_KEY = Layout("policy_key", prefixlen="I", set="I", identity="I", direction="B", protocol="B", port="2s")
POLICY_VALUE = Layout("policy_value", verdict="B", significant_bits="B", pad="2s", cookie="I")
IPCACHE4_KEY = Layout("ipcache4_key", prefixlen="I", scope="I", address="4s")
IPCACHE6_KEY = Layout("ipcache6_key", prefixlen="I", scope="I", address="16s")
OWN_ADDRESS_KEY = Layout("own_address_key", endpoint="I", address="16s")
FLOW_KEY = Layout(
    "flow_key", endpoint="I", local="16s", remote="16s", local_port="2s", remote_port="2s", protocol="B", pad="3s"
)
FLOW_VALUE = Layout(
    "flow_value",
    last="Q",
    noted="Q",
    identity="I",
    set="I",
    cookie="I",
    policy_port="2s",
    direction="B",
    state="B",
    settled="B",
    closing="B",
    audited="B",
    exempt="B",
    pad="4s",
)
LAST_SEEN_KEY = Layout("last_seen_key", scope="I", address="16s")
FRAGMENT_KEY = Layout("fragment_key", endpoint="I", source="16s", destination="16s", id="I", next="B", direction="B", pad="2s")
FRAGMENT_VALUE = Layout(
    "fragment_value",
    at="Q",
    source_port="2s",
    destination_port="2s",
    policy_port="2s",
    end="H",
    protocol="B",
    kind="B",
    pad="6s",
)
COUNTER_KEY = Layout("counter_key", endpoint="I", reason="I")
COUNTER_VALUE = Layout("counter_value", packets="Q", bytes="Q")
ANSWER_VALUE = Layout("answer_value", since="Q", sent="Q")
EVENT = Layout(
    "event",
    at="Q",
    endpoint="I",
    ifindex="I",
    identity="I",
    cookie="I",
    length="I",
    policy_port="2s",
    reason="B",
    audited="B",
    source="16s",
    destination="16s",
    source_port="2s",
    destination_port="2s",
    protocol="B",
    direction="B",
    pad="2s",
)
LAYOUTS: Final = (
    ENDPOINT_VALUE,
    GROUP_VALUE,
    POLICY_KEY,
    POLICY_VALUE,
    IPCACHE4_KEY,
    IPCACHE6_KEY,
    OWN_ADDRESS_KEY,
    FLOW_KEY,
    FLOW_VALUE,
    LAST_SEEN_KEY,
    FRAGMENT_KEY,
    FRAGMENT_VALUE,
    COUNTER_KEY,
    COUNTER_VALUE,
    ANSWER_VALUE,
    EVENT,
)

# The maps of maps.h: key and value, and whether every processor has a value of its own.
MAPS: Final = {
    "endpoints": (U32, ENDPOINT_VALUE),
    "groups": (U32, GROUP_VALUE),
    "own_addresses": (OWN_ADDRESS_KEY, Layout("u8", number="B")),
    "policy": (POLICY_KEY, POLICY_VALUE),
    "ipcache4": (IPCACHE4_KEY, U32),
    "ipcache6": (IPCACHE6_KEY, U32),
    "flows": (FLOW_KEY, FLOW_VALUE),
    "ended": (FLOW_KEY, FLOW_VALUE),
    "fragments": (FRAGMENT_KEY, FRAGMENT_VALUE),
    "last_seen": (LAST_SEEN_KEY, U64),
    "counters": (COUNTER_KEY, COUNTER_VALUE),
    "rules": (U32, COUNTER_VALUE),
    "lost": (U32, U64),
    "answers": (U32, ANSWER_VALUE),
    "questions": (U32, U64),
    "settings": (U32, U32),
    "dns_sockets": (U32, U64),
}
# What outlives a load of the program. The one map that is missing, `scratch`, is the program's desk and made with it.
KEPT_MAPS: Final = (*MAPS, "events")

_POLICY_PREFIX_FIXED: Final = 72
_IPCACHE_PREFIX_FIXED: Final = 32
_V4_MAPPED: Final = bytes(10) + b"\xff\xff"
_DIRECTIONS: Final = {int(direction): direction for direction in Direction}
_VERDICTS: Final = {int(verdict): verdict for verdict in Verdict}


def mapped(address: Address) -> bytes:
    """Address to the 16 bytes of a key."""
    return address if len(address) == 16 else _V4_MAPPED + address


def unmapped(sixteen: bytes) -> Address:
    return sixteen[12:] if sixteen.startswith(_V4_MAPPED) else sixteen


def significant_bits(key: PolicyKey) -> int:
    """How many bits after the direction count: 0, or 8 for the protocol and up to 16 of the port."""
    return 8 + key.port_bits if key.protocol else 0


def shortened(key: PolicyKey, bits: int) -> PolicyKey:
    """The key of the row that says no more of this one than so many significant bits."""
    if bits < 8:
        return key._replace(protocol=0, port=0, port_bits=0)
    unsaid = 24 - bits
    return key._replace(port=key.port >> unsaid << unsaid, port_bits=bits - 8)


def pack_policy_key(key: PolicyKey) -> bytes:
    bits = _POLICY_PREFIX_FIXED + significant_bits(key)
    return POLICY_KEY.pack(bits, key.set, key.identity, key.direction, key.protocol, key.port.to_bytes(2, "big"))


def pack_ipcache_key(key: IpcacheKey) -> bytes:
    layout = IPCACHE4_KEY if len(key.prefix.address) == 4 else IPCACHE6_KEY
    return layout.pack(_IPCACHE_PREFIX_FIXED + key.prefix.length, key.scope, key.prefix.address)


def map_of(table: Table, key: Key) -> str:
    """Which map holds this row."""
    if table is Table.IPCACHE:
        return "ipcache4" if len(cast(IpcacheKey, key).prefix.address) == 4 else "ipcache6"
    return table.value


def _pack_own_address(key: OwnAddressKey) -> bytes:
    return OWN_ADDRESS_KEY.pack(key.endpoint, mapped(key.address))


# By table, for who packs very many: each takes the key, or key and value.
KEY_PACKERS: Final[Mapping[Table, Callable[[Any], bytes]]] = {
    Table.POLICY: pack_policy_key,
    Table.IPCACHE: pack_ipcache_key,
    Table.OWN_ADDRESSES: _pack_own_address,
    Table.GROUPS: U32.pack,
    Table.ENDPOINTS: U32.pack,
}
VALUE_PACKERS: Final[Mapping[Table, Callable[[Any, Any], bytes]]] = {
    Table.POLICY: lambda key, value: POLICY_VALUE.pack(value.verdict, significant_bits(key), b"", value.cookie),
    Table.IPCACHE: lambda _, value: U32.pack(value),
    Table.OWN_ADDRESSES: lambda _, __: b"\1",
    Table.GROUPS: lambda _, value: GROUP_VALUE.pack(*value, b""),
    Table.ENDPOINTS: lambda _, value: ENDPOINT_VALUE.pack(*value, b""),
}


def pack_key(table: Table, key: Key) -> bytes:
    return KEY_PACKERS[table](key)


def pack_value(write: Write) -> bytes:
    """Of a write that puts a value."""
    return VALUE_PACKERS[write.table](write.key, write.value)


def unpack_keys(name: str, keys: bytes) -> Iterator[Key]:
    """Keys of the map `name`; of a row that the core cannot have written, one that equals no key of the core's.

    Never raises: who else wrote into the map may have written anything. `core_key` looks more closely.
    """
    match name:
        case "policy":
            policy_key = PolicyKey._make
            for bits, number, identity, direction, protocol, port in POLICY_KEY.iter_unpack(keys):
                port_bits = bits - _POLICY_PREFIX_FIXED - (8 if protocol else 0)
                whither = _DIRECTIONS.get(direction, direction)
                yield policy_key((number, identity, whither, protocol, port[0] << 8 | port[1], port_bits))
        case "ipcache4" | "ipcache6":
            ipcache_key, prefix = IpcacheKey._make, Prefix._make
            for bits, scope, address in (IPCACHE4_KEY if name == "ipcache4" else IPCACHE6_KEY).iter_unpack(keys):
                yield ipcache_key((scope, prefix((address, bits - _IPCACHE_PREFIX_FIXED))))
        case "own_addresses":
            for endpoint, address in OWN_ADDRESS_KEY.iter_unpack(keys):
                yield OwnAddressKey(endpoint, unmapped(address))
        case _:
            for (number,) in U32.iter_unpack(keys):
                yield number


def core_key(name: str, key: bytes) -> Key | None:
    """The core's spelling of a key of the map `name`; None for one that the core has no word for.

    A trie holds bits behind the prefix as they were given, and does not look at them.
    """
    (found,) = unpack_keys(name, key)
    if isinstance(found, IpcacheKey):
        address, length = found.prefix
        return found._replace(prefix=Prefix.masked(address, length)) if 0 <= length <= 8 * len(address) else None
    if isinstance(found, PolicyKey):
        bits = POLICY_KEY.unpack(key)[0] - _POLICY_PREFIX_FIXED
        if found.direction not in _DIRECTIONS or not (bits == 0 or 8 <= bits <= 24):
            return None
        protocol, port_bits = (found.protocol, bits - 8) if bits else (0, 0)
        if bits and not protocol:
            return None  # the core writes no ports of every protocol
        return found._replace(protocol=protocol, port=found.port & (0xFFFF << 16 - port_bits & 0xFFFF), port_bits=port_bits)
    return found


def unpack_rows(name: str, keys: bytes, values: bytes) -> Iterator[tuple[Key, Value]]:
    """Rows of the map `name` as the core writes them: so many keys, and as many values.

    In one go, because a start reads all there are. A named tuple is made of a tuple: its own constructor takes twice as long.
    """
    match name:
        case "policy":
            policy_key, policy_value = PolicyKey._make, PolicyValue._make
            rows = zip(POLICY_KEY.iter_unpack(keys), POLICY_VALUE.iter_unpack(values), strict=True)
            for (bits, number, identity, direction, protocol, port), (verdict, _, _, cookie) in rows:
                port_bits = bits - _POLICY_PREFIX_FIXED - 8 if protocol else 0
                key = (number, identity, _DIRECTIONS[direction], protocol, port[0] << 8 | port[1], port_bits)
                yield policy_key(key), policy_value((_VERDICTS[verdict], cookie))
        case "ipcache4" | "ipcache6":
            ipcache_key, prefix = IpcacheKey._make, Prefix._make
            layout = IPCACHE4_KEY if name == "ipcache4" else IPCACHE6_KEY
            for (bits, scope, address), (identity,) in zip(layout.iter_unpack(keys), U32.iter_unpack(values), strict=True):
                yield ipcache_key((scope, prefix((address, bits - _IPCACHE_PREFIX_FIXED)))), identity
        case "own_addresses":
            for endpoint, address in OWN_ADDRESS_KEY.iter_unpack(keys):
                yield OwnAddressKey(endpoint, unmapped(address)), True
        case "groups":
            for (group,), value in zip(U32.iter_unpack(keys), GROUP_VALUE.iter_unpack(values), strict=True):
                number, egress, ingress, audit, _ = value
                yield group, GroupValue(number, egress, ingress, audit)
        case "endpoints":
            for (ifindex,), value in zip(U32.iter_unpack(keys), ENDPOINT_VALUE.iter_unpack(values), strict=True):
                endpoint, group, scope, orientation, dhcp, silent, _ = value
                yield ifindex, EndpointValue(endpoint, group, scope, Orientation(orientation), dhcp, silent)
        case _:
            raise ValueError(f"the core writes no table {name}")
