"""The verdict of a packet in plain Python: what the program is compared with in tests, and what answers "why".

The numbers are those of bpf/verdict.h, where each step is said in words. Written from that list, not from its C: it shares
with the program only the numbers of abi.py. Pure; times are nanoseconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.core.types import (
    IDENTITY_ANY,
    IDENTITY_WORLD,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_SCTP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    PROTOCOLS_WITH_PORTS,
    SCOPE_STATIC,
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
from agent.datapath.abi import FlowState, Reason, significant_bits, unmapped

NS: Final = 1_000_000_000
ENDED_NS: Final = 120 * NS
CONNECTIONLESS_NS: Final = 60 * NS
OPENING_NS: Final = 60 * NS
SETTLED_NS: Final = 21_600 * NS
CLOSED_NS: Final = 10 * NS
FRAGMENT_NS: Final = 60 * NS
QUESTIONS_PER_SECOND: Final = 2_000
QUESTION_BURST: Final = 500

_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10
_ABORT, _SHUTDOWN_COMPLETE = 6, 14
_ETHERTYPES_VLAN: Final = (0x8100, 0x88A8)
_FRAGMENT_HEADER: Final = 44
_AUTHENTICATION_HEADER: Final = 51
_NO_NEXT_HEADER: Final = 59
_ROUTING_HEADER: Final = 43
_EXTENSIONS: Final = (0, _ROUTING_HEADER, _FRAGMENT_HEADER, _AUTHENTICATION_HEADER, 60)
_EXTENSIONS_MAX: Final = 8
_OPTIONS_MAX: Final = 16
_SOURCE_ROUTES: Final = (131, 137)
_ALL_DHCP_SERVERS: Final = bytes.fromhex("ff020000000000000000000000010002")
_LIMITED_BROADCAST: Final = b"\xff\xff\xff\xff"
_EAPOL, _LLDP = 0x888E, 0x88CC
_NOT_BRIDGED: Final = bytes.fromhex("0180c20000")  # and an octet below 16


class Kind(enum.IntEnum):
    FLOW = 0
    SINGLE = 1
    ERROR = 2
    ARP = 3
    NEIGHBOUR = 4
    ROUTER = 5
    LINK = 6


class Part(enum.IntEnum):
    WHOLE = 0
    FIRST = 1
    LATER = 2


class Origin(enum.IntEnum):
    WIRE = 0
    AGENT = 1
    ANSWER = 2
    MARKED = 3
    FORWARDED = 4  # toward an uplink: routed on; of an uplink's answer for an address: that one is; of ND: led off its link


class FlowKey(NamedTuple):
    endpoint: int
    local: Address
    remote: Address
    local_port: int
    remote_port: int
    protocol: int


@dataclass(slots=True)
class Flow:
    last: int
    identity: int
    set: int
    cookie: int
    policy_port: int
    direction: Direction
    state: FlowState = FlowState.LIVE
    settled: bool = False
    closing: frozenset[Direction] = frozenset()
    audited: bool = False
    exempt: bool = False

    @property
    def is_closed(self) -> bool:
        return len(self.closing) == 2


class FragmentKey(NamedTuple):
    endpoint: int
    source: Address
    destination: Address
    number: bytes
    following: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class Packet:
    """What a frame says. `about`: of an ICMP error, the tuple of its cause; claims: addresses that ARP or ND speaks for."""

    source: Address
    destination: Address
    protocol: int = 0
    source_port: int = 0
    destination_port: int = 0
    policy_port: int = 0
    kind: Kind = Kind.FLOW
    part: Part = Part.WHOLE
    number: bytes = b""
    following: int = 0
    place: int = 0
    flags: int = 0
    is_end: bool = False
    vlans: int = 0
    hops: int = 0
    payload: bytes = b""
    claims: tuple[Address, ...] = ()

    @property
    def is_opening(self) -> bool:
        if self.part is Part.LATER:
            return False
        return self.protocol != PROTOCOL_TCP or self.flags & (_SYN | _ACK | _RST | _FIN) == _SYN

    def may_open(self, direction: Direction) -> bool:
        if self.kind is not Kind.FLOW or self.part is Part.LATER:
            return False
        if direction is Direction.EGRESS:
            return self.protocol != PROTOCOL_TCP or not self.flags & _RST
        return self.is_opening

    @property
    def is_answer(self) -> bool:
        """Says who has an address, as every ARP packet does."""
        return self.kind is Kind.ARP or len(self.claims) == 2

    @property
    def end(self) -> int:
        """Of what a first fragment holds, in units of 8 bytes."""
        return -(-len(self.payload) // 8)


@dataclass(frozen=True, slots=True)
class Judgement:
    """reason: a DROP_* also where audit lets the packet pass; identity: of the remote, 0 where it was not asked for."""

    reason: Reason
    audited: bool = False
    identity: int = 0
    cookie: int = 0

    @property
    def passes(self) -> bool:
        return self.audited or not self.reason.is_drop


class _Drop(Exception):
    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Model:
    """The tables, and the verdict by them."""

    endpoints: dict[int, EndpointValue] = field(default_factory=dict)
    groups: dict[int, GroupValue] = field(default_factory=dict)
    policy: dict[PolicyKey, PolicyValue] = field(default_factory=dict)
    ipcache: dict[IpcacheKey, int] = field(default_factory=dict)
    own_addresses: set[OwnAddressKey] = field(default_factory=set)
    flows: dict[FlowKey, Flow] = field(default_factory=dict)
    fragments: dict[FragmentKey, tuple[int, Packet]] = field(default_factory=dict)
    question_due_by_endpoint: dict[int, int] = field(default_factory=dict)
    questions_per_second: int = QUESTIONS_PER_SECOND
    question_burst: int = QUESTION_BURST

    def apply(self, writes: Iterable[Write]) -> None:
        for write in writes:
            if write.table is Table.OWN_ADDRESSES:
                change = self.own_addresses.discard if write.value is None else self.own_addresses.add
                change(write.key)  # type: ignore[arg-type]
                continue
            rows: dict[Key, Value] = getattr(self, write.table.value)
            if write.value is None:
                rows.pop(write.key, None)
            else:
                rows[write.key] = write.value

    def judge(
        self,
        ifindex: int,
        direction: Direction,
        frame: bytes,
        now: int,
        origin: Origin = Origin.WIRE,
        vlans: int = 0,
    ) -> Judgement:
        """Verdict of one frame, whose flows and fragments are remembered. vlans: 1 when the card took a tag off."""
        endpoint = self.endpoints.get(ifindex)
        if endpoint is None:  # 1.
            return Judgement(Reason.DROP_NO_ENDPOINT)
        group = self.groups.get(endpoint.group)
        if group is None:
            return Judgement(Reason.DROP_NO_GROUP)
        try:
            packet = parse(frame, vlans)  # 2.
        except _Drop as drop:
            return Judgement(drop.reason, audited=group.audit)
        judgement, packet = self._judge_or_drop(packet, endpoint, group, direction, now, origin)
        if packet.part is Part.FIRST and judgement.passes:
            self.fragments[_fragment_key(packet, endpoint, direction)] = (now, packet)
        return judgement

    def explain(self, ifindex: int, direction: Direction, packet: Packet, now: int) -> Judgement:
        """Verdict of a packet that is only thought of: nothing is remembered."""
        endpoint = self.endpoints.get(ifindex)
        if endpoint is None:
            return Judgement(Reason.DROP_NO_ENDPOINT)
        group = self.groups.get(endpoint.group)
        if group is None:
            return Judgement(Reason.DROP_NO_GROUP)
        flows = {key: replace(flow) for key, flow in self.flows.items()}
        thought = Model(self.endpoints, self.groups, self.policy, self.ipcache, self.own_addresses, flows)
        return thought._judge_or_drop(packet, endpoint, group, direction, now, Origin.WIRE)[0]

    def _judge_or_drop(
        self, packet: Packet, endpoint: EndpointValue, group: GroupValue, direction: Direction, now: int, origin: Origin
    ) -> tuple[Judgement, Packet]:
        try:
            judgement, packet = self._judge(packet, endpoint, group, direction, now, origin)
        except _Drop as drop:
            judgement = Judgement(drop.reason)
        return replace(judgement, audited=judgement.reason.is_drop and group.audit), packet  # 12.

    def _judge(
        self, packet: Packet, endpoint: EndpointValue, group: GroupValue, direction: Direction, now: int, origin: Origin
    ) -> tuple[Judgement, Packet]:
        outward = direction is Direction.EGRESS
        if packet.kind is Kind.LINK:  # 3b.
            if endpoint.orientation is not Orientation.UPLINK:
                raise _Drop(Reason.DROP_ETHERTYPE)
            return Judgement(Reason.PASS_NEIGHBOUR), packet
        if packet.kind in {Kind.ARP, Kind.NEIGHBOUR, Kind.ROUTER}:  # 3.
            if packet.part is not Part.WHOLE:
                raise _Drop(Reason.DROP_FRAGMENT)
            is_led_away = outward and endpoint.orientation is Orientation.BEHIND and origin is Origin.FORWARDED
            if not _is_on_link(packet, direction, is_led_away=is_led_away):
                raise _Drop(Reason.DROP_NEIGHBOUR_CLAIM)
            may_claim = all(self._may_claim(endpoint, claim) for claim in packet.claims)
            may_claim = may_claim or (origin is Origin.FORWARDED and self._is_answer_for_another(endpoint, packet))
            if outward and (packet.kind is Kind.ROUTER or not may_claim):
                raise _Drop(Reason.DROP_NEIGHBOUR_CLAIM)
            return Judgement(Reason.PASS_NEIGHBOUR), packet
        if self._is_dhcp(endpoint, packet, direction):  # 3a.
            return Judgement(Reason.PASS_DHCP), packet
        passing = self._pass_on(endpoint, group, packet, direction, now, origin)  # 4.
        if passing is not None:
            return Judgement(passing), packet
        if outward and not self._is_own(endpoint, packet.source):  # 5.
            raise _Drop(Reason.DROP_SOURCE)
        if _is_martian(packet.source, packet.destination):
            raise _Drop(Reason.DROP_MARTIAN)
        is_to_host = self._is_own(endpoint, packet.destination) or _is_to_many(packet.destination)
        is_host = endpoint.orientation is Orientation.UPLINK
        if not outward and is_host and not is_to_host and origin is Origin.FORWARDED:  # 4b.
            return Judgement(Reason.PASS_FORWARDED), packet
        if packet.part is Part.LATER:  # 6.
            at, first = self.fragments.get(_fragment_key(packet, endpoint, direction), (None, None))
            if at is None or first is None or now - at > FRAGMENT_NS or packet.place < first.end:
                raise _Drop(Reason.DROP_FRAGMENT)
            packet = replace(first, part=Part.LATER, vlans=packet.vlans, flags=0)

        about = packet
        if packet.kind is Kind.ERROR:  # 7c.
            if packet.part is not Part.WHOLE:
                raise _Drop(Reason.DROP_FRAGMENT)
            about = _parse_about(packet)
            if packet.destination != about.source:
                raise _Drop(Reason.DROP_UNRELATED)
            if outward and is_host and not self._is_own(endpoint, about.destination) and not _is_to_many(about.destination):
                return Judgement(Reason.PASS_FORWARDED), packet  # 4c.
        key = _flow_key(endpoint.endpoint, about, outward if about is packet else not outward)
        flow = None if packet.kind is Kind.SINGLE else self.flows.get(key)
        is_opened_anew = packet.kind is Kind.FLOW and packet.is_opening
        if flow and _is_over(flow, key.protocol, direction if is_opened_anew else None, now):  # 7a.
            flow = None
        if flow and flow.exempt and outward and packet.kind is Kind.FLOW:  # 7e.
            is_kernels = origin is Origin.MARKED and packet.protocol == PROTOCOL_TCP and not packet.is_opening
            flow = flow if is_kernels else None

        is_barred = is_alone = False
        if flow and flow.state is FlowState.ENDED:  # 7d.
            if packet.kind is Kind.ERROR:
                raise _Drop(Reason.DROP_FLOW_ENDED)
            flow.last = now
            is_barred = not packet.is_opening
            peer_may = packet.protocol == PROTOCOL_TCP and flow.direction is Direction.INGRESS
            if not outward and (is_barred or not peer_may):
                raise _Drop(Reason.DROP_FLOW_ENDED)
        elif flow and _is_syn(packet) and flow.direction is not direction:  # 7b.
            is_alone = True
        elif flow:
            if not flow.exempt and (flow.set != group.set or (flow.audited and not group.audit)):
                return self._judge_again(flow, key, packet, endpoint, group, direction, now), packet  # 11.
            if packet.kind is Kind.FLOW:
                _note(flow, packet, direction, now)
            reason = Reason.PASS_FLOW if packet.kind is Kind.FLOW else Reason.PASS_RELATED
            if flow.audited:
                reason = Reason.PASS_AUDIT
            return Judgement(reason, identity=flow.identity, cookie=flow.cookie), packet  # 7.
        if packet.kind is Kind.ERROR:
            raise _Drop(Reason.DROP_UNRELATED)

        identity = self.identity_of(endpoint.scope, key.remote)  # 8.
        row = self.strongest(group.set, identity, direction, packet.protocol, packet.policy_port)  # 9.
        cookie = row.cookie if row else 0
        reason = _in_words(row, group, direction)
        if reason is Reason.PASS_REDIRECT:
            return Judgement(self._redirect(packet, endpoint, now), identity=identity, cookie=cookie), packet
        if reason is Reason.PASS_POLICY and is_barred:
            reason = Reason.DROP_FLOW_ENDED
        elif (reason is Reason.PASS_POLICY or group.audit) and packet.may_open(direction) and not (is_alone or is_barred):
            opened = Flow(now, identity, group.set, cookie, packet.policy_port, direction)  # 10.
            opened.audited = reason is not Reason.PASS_POLICY
            _note(opened, packet, direction, now)
            self.flows[key] = opened
        return Judgement(reason, identity=identity, cookie=cookie), packet

    def _judge_again(
        self,
        flow: Flow,
        key: FlowKey,
        packet: Packet,
        endpoint: EndpointValue,
        group: GroupValue,
        direction: Direction,
        now: int,
    ) -> Judgement:
        present = self.identity_of(endpoint.scope, key.remote)
        rows = [
            (self.strongest(group.set, identity, flow.direction, key.protocol, flow.policy_port), identity)
            for identity in (present, flow.identity)
        ]
        row, identity = max(rows, key=lambda found: found[0].verdict if found[0] else 0)  # the first of equals: the present one
        cookie = row.cookie if row else 0
        reason = _in_words(row, group, flow.direction)
        is_of_flow = packet.kind is Kind.FLOW
        if reason is Reason.PASS_POLICY or group.audit:
            flow.audited = reason is not Reason.PASS_POLICY
            flow.set, flow.cookie, flow.identity = group.set, cookie, identity
            if is_of_flow:
                _note(flow, packet, direction, now)
            if reason is Reason.PASS_POLICY:
                reason = Reason.PASS_FLOW if is_of_flow else Reason.PASS_RELATED
        else:
            flow.last, flow.state = now, FlowState.ENDED
        if reason is Reason.PASS_REDIRECT:
            is_sent = is_of_flow and direction is Direction.EGRESS
            reason = self._redirect(packet, endpoint, now) if is_sent else Reason.DROP_FLOW_ENDED
        return Judgement(reason, identity=identity, cookie=cookie)

    def _is_dhcp(self, endpoint: EndpointValue, packet: Packet, direction: Direction) -> bool:
        if not (endpoint.dhcp or endpoint.orientation is Orientation.UPLINK):
            return False
        if packet.protocol != PROTOCOL_UDP or packet.part is not Part.WHOLE:
            return False
        ports, source, destination = (packet.source_port, packet.destination_port), packet.source, packet.destination
        if len(source) == 4:
            if direction is Direction.INGRESS:
                return ports == (67, 68)
            may_ask = not any(source) or self._is_own(endpoint, source)
            return ports == (68, 67) and destination == _LIMITED_BROADCAST and may_ask
        if direction is Direction.INGRESS:
            return ports == (547, 546) and _is_link_local(destination)
        is_on_link = _is_link_local(destination) or destination == _ALL_DHCP_SERVERS
        return ports == (546, 547) and _is_link_local(source) and is_on_link

    def _pass_on(
        self, endpoint: EndpointValue, group: GroupValue, packet: Packet, direction: Direction, now: int, origin: Origin
    ) -> Reason | None:
        """4: what passes whatever the policy says, because of who sent it."""
        if direction is Direction.INGRESS:
            if origin is Origin.ANSWER:
                return Reason.PASS_ANSWER
            is_cookie = origin is Origin.MARKED and packet.flags & (_SYN | _ACK | _RST | _FIN) == _SYN | _ACK
            is_for_it = endpoint.orientation is Orientation.UPLINK or self._is_own(endpoint, packet.destination)
            return Reason.PASS_AGENT if is_for_it and (origin is Origin.AGENT or is_cookie) else None
        if endpoint.orientation is not Orientation.UPLINK or origin not in {Origin.AGENT, Origin.FORWARDED}:
            return None
        leaves_flow = packet.may_open(direction) and (origin is Origin.AGENT or self._is_own(endpoint, packet.source))
        if leaves_flow:  # 4a.
            key = _flow_key(endpoint.endpoint, packet, is_source_local=True)
            flow = self.flows.get(key)
            if flow is None or not flow.exempt or _is_over(flow, key.protocol, direction if packet.is_opening else None, now):
                flow = Flow(now, 0, group.set, 0, packet.policy_port, direction, exempt=True)
            _note(flow, packet, direction, now)
            self.flows[key] = flow
        return Reason.PASS_AGENT if origin is Origin.AGENT else Reason.PASS_FORWARDED

    def _redirect(self, packet: Packet, endpoint: EndpointValue, now: int) -> Reason:
        if packet.protocol not in {PROTOCOL_TCP, PROTOCOL_UDP}:
            return Reason.DROP_NOT_FOR_GATE
        if packet.vlans:
            return Reason.DROP_VLAN_REDIRECT
        if packet.part is not Part.WHOLE:
            return Reason.DROP_FRAGMENT
        if packet.is_opening and not self._may_ask(endpoint.endpoint, now):
            return Reason.DROP_QUESTION_LIMIT
        return Reason.PASS_REDIRECT

    def _may_ask(self, endpoint: int, now: int) -> bool:
        """9a: a whole burst at once, then one each time a question's share of the second has passed."""
        if not self.questions_per_second:
            return True
        share = NS // self.questions_per_second
        due = max(self.question_due_by_endpoint.get(endpoint, 0), now) + share
        if due - now > self.question_burst * share:
            return False
        self.question_due_by_endpoint[endpoint] = due
        return True

    def identity_of(self, scope: int, address: Address) -> int:
        """8. The closest prefix in the endpoint's scope, else in the static one, else world."""
        for each in (scope, SCOPE_STATIC):
            for length in range(len(address) * 8, -1, -1):
                identity = self.ipcache.get(IpcacheKey(each, Prefix.masked(address, length)))
                if identity is not None:
                    return identity
        return IDENTITY_WORLD

    def strongest(self, number: int, identity: int, direction: Direction, protocol: int, port: int) -> PolicyValue | None:
        """9. Of the identity's closest row and that of any identity: the stronger, then the closer, then the identity's."""
        found = [self._closest(number, each, direction, protocol, port) for each in (identity, IDENTITY_ANY)]
        rows = [row for row in found if row is not None]
        return max(rows, key=lambda row: (row[1].verdict, significant_bits(row[0])))[1] if rows else None

    def _closest(
        self, number: int, identity: int, direction: Direction, protocol: int, port: int
    ) -> tuple[PolicyKey, PolicyValue] | None:
        for port_bits in range(16, -1, -1):
            masked = port >> (16 - port_bits) << (16 - port_bits)
            key = PolicyKey(number, identity, direction, protocol, masked, port_bits)
            if protocol and key in self.policy:
                return key, self.policy[key]
        key = PolicyKey(number, identity, direction, 0, 0, 0)
        return (key, self.policy[key]) if key in self.policy else None

    def _is_own(self, endpoint: EndpointValue, address: Address) -> bool:
        return OwnAddressKey(endpoint.endpoint, address) in self.own_addresses

    def _may_claim(self, endpoint: EndpointValue, address: Address) -> bool:
        return not any(address) or _is_link_local(address) or self._is_own(endpoint, address)

    def _is_answer_for_another(self, endpoint: EndpointValue, packet: Packet) -> bool:
        """3c, but for the routing: whether an uplink claims one address more than its own, as a proxy does."""
        if endpoint.orientation is not Orientation.UPLINK or not packet.is_answer or not any(packet.claims[-1]):
            return False
        return packet.source == packet.claims[-1] or self._may_claim(endpoint, packet.source)


def _is_link_local(address: Address) -> bool:
    return len(address) == 16 and address[0] == 0xFE and address[1] & 0xC0 == 0x80


def _is_to_many(address: Address) -> bool:
    if len(address) == 16:
        return address[0] == 0xFF
    return address[0] >> 4 == 0xE or address == _LIMITED_BROADCAST


def _is_martian(source: Address, destination: Address) -> bool:
    if _is_to_many(source):
        return True
    for address in (source, destination):
        is_loopback = address[0] == 127 if len(address) == 4 else address == bytes(15) + b"\1"
        if is_loopback or not any(address):
            return True
    return False


def _in_words(row: PolicyValue | None, group: GroupValue, direction: Direction) -> Reason:
    if row is None:
        is_closed = group.default_deny_egress if direction is Direction.EGRESS else group.default_deny_ingress
        return Reason.DROP_POLICY if is_closed else Reason.PASS_POLICY
    if row.verdict is Verdict.ALLOW:
        return Reason.PASS_POLICY
    if row.verdict is Verdict.DENY:
        return Reason.DROP_DENY
    return Reason.PASS_REDIRECT if direction is Direction.EGRESS else Reason.DROP_POLICY


def _is_syn(packet: Packet) -> bool:
    return packet.kind is Kind.FLOW and packet.protocol == PROTOCOL_TCP and packet.is_opening


def life_of(protocol: int, state: FlowState, *, is_settled: bool, is_closed: bool) -> int:
    """How long after its last packet a flow is one."""
    if state is FlowState.ENDED:
        return ENDED_NS
    if protocol not in {PROTOCOL_TCP, PROTOCOL_SCTP}:
        return CONNECTIONLESS_NS
    if is_closed:
        return CLOSED_NS
    return SETTLED_NS if is_settled else OPENING_NS


def _is_over(flow: Flow, protocol: int, opened_anew: Direction | None, now: int) -> bool:
    """7a. opened_anew: of a packet that would open a flow, which way it goes."""
    if flow.state is FlowState.LIVE and opened_anew is not None:
        is_in_use = protocol == PROTOCOL_TCP and flow.settled and opened_anew is flow.direction
        if flow.is_closed or is_in_use:
            return True
    return now - flow.last > life_of(protocol, flow.state, is_settled=flow.settled, is_closed=flow.is_closed)


def _note(flow: Flow, packet: Packet, direction: Direction, now: int) -> None:
    if not flow.is_closed:
        flow.last = now
    if packet.protocol == PROTOCOL_TCP and packet.part is not Part.LATER:
        flow.settled = flow.settled or not packet.flags & _SYN
        if packet.flags & (_FIN | _RST):
            flow.closing |= {direction}
    if packet.protocol == PROTOCOL_SCTP:
        flow.settled = flow.settled or direction is not flow.direction
        if packet.is_end:
            flow.closing = frozenset(Direction)


def _flow_key(endpoint: int, packet: Packet, is_source_local: bool) -> FlowKey:
    source, destination = (packet.source, packet.source_port), (packet.destination, packet.destination_port)
    local, remote = (source, destination) if is_source_local else (destination, source)
    return FlowKey(endpoint, local[0], remote[0], local[1], remote[1], packet.protocol)


def _fragment_key(packet: Packet, endpoint: EndpointValue, direction: Direction) -> FragmentKey:
    return FragmentKey(endpoint.endpoint, packet.source, packet.destination, packet.number, packet.following, direction)


# --- reading a frame (2.) --------------------------------------------------------------------------------------------


def _read(data: bytes, offset: int, size: int) -> bytes:
    part = data[offset : offset + size]
    if len(part) != size:
        raise _Drop(Reason.DROP_MALFORMED)
    return part


def _number(data: bytes, offset: int) -> int:
    return int.from_bytes(_read(data, offset, 2), "big")


def parse(frame: bytes, vlans: int = 0) -> Packet:
    """A frame to a packet; what must not be judged further leaves as an exception of this file."""
    offset = 12
    ethertype = _number(frame, offset)
    while ethertype in _ETHERTYPES_VLAN:
        vlans += 1
        if vlans > 2:
            raise _Drop(Reason.DROP_VLAN)
        offset += 4
        ethertype = _number(frame, offset)
    body = frame[offset + 2 :]
    match ethertype:
        case 0x0800:
            return _parse_transport(replace(_parse_ipv4(body, is_whole=True), vlans=vlans))
        case 0x86DD:
            return _parse_transport(replace(_parse_ipv6(body, is_whole=True), vlans=vlans))
        case 0x0806:
            return _parse_arp(body)
        case _:
            return _parse_link(ethertype, _read(frame, 0, 6), vlans)


def _parse_link(ethertype: int, to: bytes, vlans: int) -> Packet:
    is_for_one, is_not_bridged = not to[0] & 1, to[:5] == _NOT_BRIDGED and to[5] < 16
    if vlans or ethertype not in {_EAPOL, _LLDP} or not (is_not_bridged or (is_for_one and ethertype == _EAPOL)):
        raise _Drop(Reason.DROP_ETHERTYPE)
    return Packet(b"", b"", kind=Kind.LINK)


def _parse_arp(body: bytes) -> Packet:
    header = _read(body, 0, 28)
    if header[:6] != b"\0\1\x08\0\6\4":
        raise _Drop(Reason.DROP_MALFORMED)
    return Packet(header[14:18], header[24:28], kind=Kind.ARP, claims=(header[14:18],))


def _own_part(body: bytes, length: int) -> bytes:
    """A packet without the padding behind it. A field that is too short for the packet says 0 (RFC 2675, BIG TCP)."""
    if not length and len(body) > 0xFFFF:
        return body
    return _read(body, 0, length)


def _check_options(options: bytes) -> None:
    at = 0
    for _ in range(_OPTIONS_MAX):
        if at >= len(options) or options[at] == 0:
            return
        if options[at] == 1:
            at += 1
            continue
        if options[at] in _SOURCE_ROUTES:
            raise _Drop(Reason.DROP_SOURCE_ROUTE)
        length = _read(options, at + 1, 1)[0]
        if length < 2 or at + length > len(options):
            raise _Drop(Reason.DROP_MALFORMED)
        at += length
    if at < len(options):
        raise _Drop(Reason.DROP_EXTENSIONS)


def _parse_ipv4(body: bytes, *, is_whole: bool) -> Packet:
    """is_whole: it is all there; of the packet that an ICMP error is about it rarely is."""
    header = _read(body, 0, 20)
    words = header[0] & 15
    if header[0] >> 4 != 4 or words < 5:
        raise _Drop(Reason.DROP_MALFORMED)
    if is_whole:
        body = _own_part(body, _number(header, 2))
        _check_options(_read(body, 20, words * 4 - 20))
    packet = Packet(header[12:16], header[16:20], header[9], payload=body[words * 4 :])
    place = _number(header, 6)
    if not place & 0x3FFF:
        return packet
    part = Part.LATER if place & 0x1FFF else Part.FIRST
    return replace(packet, part=part, number=header[4:6], following=packet.protocol, place=place & 0x1FFF)


def _parse_ipv6(body: bytes, *, is_whole: bool) -> Packet:
    header = _read(body, 0, 40)
    if header[0] >> 4 != 6:
        raise _Drop(Reason.DROP_MALFORMED)
    packet = Packet(header[8:24], header[24:40], hops=header[7])
    if any(len(unmapped(address)) == 4 for address in (packet.source, packet.destination)):
        raise _Drop(Reason.DROP_MALFORMED)
    if is_whole:
        body = header + _own_part(body[40:], _number(header, 4))
    protocol, offset, is_fragment = header[6], 40, False
    for _ in range(_EXTENSIONS_MAX):
        if protocol not in _EXTENSIONS:
            break
        extension = _read(body, offset, 8)
        if protocol == _ROUTING_HEADER and extension[3]:
            raise _Drop(Reason.DROP_SOURCE_ROUTE)
        if protocol == _FRAGMENT_HEADER:
            if is_fragment:
                raise _Drop(Reason.DROP_MALFORMED)
            is_fragment = True
            place = _number(extension, 2)
            protocol, offset = extension[0], offset + 8
            packet = replace(packet, number=extension[4:8], following=protocol, place=place >> 3)
            if place & 0xFFF9 and protocol in _EXTENSIONS:
                raise _Drop(Reason.DROP_FRAGMENT)
            if place >> 3:
                return replace(packet, part=Part.LATER, protocol=protocol, payload=body[offset:])
            if place & 1:
                packet = replace(packet, part=Part.FIRST)
            continue
        size = (extension[1] + 2) * 4 if protocol == _AUTHENTICATION_HEADER else (extension[1] + 1) * 8
        protocol, offset = extension[0], offset + size
    if protocol in _EXTENSIONS or protocol == _NO_NEXT_HEADER:
        raise _Drop(Reason.DROP_EXTENSIONS)
    if is_whole and offset > len(body):
        raise _Drop(Reason.DROP_MALFORMED)
    return replace(packet, protocol=protocol, payload=body[offset:])


def _parse_transport(packet: Packet) -> Packet:
    data, protocol = packet.payload, packet.protocol
    if packet.part is Part.LATER:
        if packet.place * 8 + len(data) > 0xFFFF:
            raise _Drop(Reason.DROP_MALFORMED)
        return packet
    if protocol in PROTOCOLS_WITH_PORTS:
        _read(data, 0, {PROTOCOL_TCP: 20, PROTOCOL_SCTP: 12, PROTOCOL_UDP: 8}[protocol])
        ports = struct.unpack_from(">HH", data)
        packet = replace(packet, source_port=ports[0], destination_port=ports[1], policy_port=ports[1])
        if protocol == PROTOCOL_TCP:
            length = (data[12] >> 4) * 4
            if length < 20 or length > len(data):
                raise _Drop(Reason.DROP_MALFORMED)
            return replace(packet, flags=data[13])
        if protocol == PROTOCOL_SCTP:
            return replace(packet, is_end=data[12:13] in {bytes([_ABORT]), bytes([_SHUTDOWN_COMPLETE])})
        length = _number(data, 4)
        if length < 8 or (packet.part is Part.WHOLE and length > len(data)):
            raise _Drop(Reason.DROP_MALFORMED)
        return packet
    family_of = {PROTOCOL_ICMP: 4, PROTOCOL_ICMPV6: 16}
    if family_of.get(protocol) != len(packet.source):
        return packet
    header = _read(data, 0, 8)
    kind = header[0]
    packet = replace(packet, policy_port=kind, kind=Kind.SINGLE)
    if _is_echo(protocol, kind):
        number = _number(header, 4)
        return replace(packet, source_port=number, destination_port=number, kind=Kind.FLOW)
    if kind in ({3, 11, 12} if protocol == PROTOCOL_ICMP else {1, 2, 3, 4}):
        return replace(packet, kind=Kind.ERROR)
    if protocol == PROTOCOL_ICMP:
        return packet
    if kind in {130, 131, 132, 133, 135, 143}:
        return replace(packet, kind=Kind.NEIGHBOUR, claims=(packet.source,))
    if kind == 136:
        return replace(packet, kind=Kind.NEIGHBOUR, claims=(packet.source, _read(data, 8, 16)))
    return replace(packet, kind=Kind.ROUTER) if kind in {134, 137} else packet


def _is_echo(protocol: int, kind: int) -> bool:
    return kind in ({0, 8} if protocol == PROTOCOL_ICMP else {128, 129})


def _is_on_link(packet: Packet, direction: Direction, *, is_led_away: bool) -> bool:
    """Neighbour discovery and MLD whose two ends are on the endpoint's link (RFC 4861 6.1, RFC 3810 5)."""
    if packet.kind is Kind.ARP:
        return True
    other = packet.destination if direction is Direction.EGRESS else packet.source
    if _is_link_local(other):
        return True
    if packet.destination[0] == 0xFF:
        return packet.hops == 1 or packet.destination[1] & 15 == 2
    if direction is Direction.INGRESS and packet.hops == 255:
        return True
    return packet.destination[:8] == packet.source[:8] and not is_led_away


def _parse_about(packet: Packet) -> Packet:
    """What an ICMP error is about, as far as its first bytes say."""
    body = packet.payload[8:]
    about = (_parse_ipv4 if packet.protocol == PROTOCOL_ICMP else _parse_ipv6)(body, is_whole=False)
    if about.part is Part.LATER:
        raise _Drop(Reason.DROP_UNRELATED)
    if about.protocol in PROTOCOLS_WITH_PORTS:
        ports = struct.unpack(">HH", _read(about.payload, 0, 4))
        return replace(about, source_port=ports[0], destination_port=ports[1])
    if about.protocol in {PROTOCOL_ICMP, PROTOCOL_ICMPV6}:
        header = _read(about.payload, 0, 8)
        if not _is_echo(about.protocol, header[0]):
            raise _Drop(Reason.DROP_UNRELATED)
        return replace(about, source_port=_number(header, 4), destination_port=_number(header, 4))
    return about
