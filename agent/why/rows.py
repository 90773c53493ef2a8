"""The rows by which a packet is judged: read from the kernel, from what the agent wants there, or from what would be there.

The judge is the model of the program (agent/datapath/model.py). It is given the few rows that its look-ups can meet; where the
kernel is asked, the kernel's own look-up finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from agent.core.barrier import row_text
from agent.core.engine import Engine
from agent.core.events import EndpointAdded
from agent.core.types import (
    IDENTITY_ANY,
    SCOPE_STATIC,
    Address,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Table,
    Value,
)
from agent.datapath.abi import shortened, significant_bits
from agent.datapath.maps import nested_identities
from agent.datapath.model import NS, Flow, FlowKey, Judgement, Model, Packet, parse
from agent.why.asked import Asked

# An endpoint without an address of the family sends from nowhere: a documentation address (RFC 5737, RFC 3849) stands for it.
NOWHERE = {4: bytes((192, 0, 2, 1)), 16: b"\x20\x01\x0d\xb8" + bytes(12)}


class Rows(Protocol):
    """`KernelTables` is one."""

    def row(self, table: Table, key: Key) -> Value | None: ...

    def identity_rows(self, scope: int, address: Address) -> dict[IpcacheKey, int]:
        """Those that hold the address, the widest first; of nested ones with the same identity only the widest."""
        ...

    def policy_rows(self, key: PolicyKey) -> dict[PolicyKey, PolicyValue]:
        """Those that hold what the key says, the closest first."""
        ...


class KeptRows:
    """Rows that somebody keeps in dictionaries. find: one row by its very key."""

    def __init__(self, find: Callable[[Table, Key], Value | None]) -> None:
        self.row = find

    def identity_rows(self, scope: int, address: Address) -> dict[IpcacheKey, int]:
        return nested_identities(self.row, scope, address)

    def policy_rows(self, key: PolicyKey) -> dict[PolicyKey, PolicyValue]:
        keys = (shortened(key, bits) for bits in (*range(significant_bits(key), 7, -1), 0))
        rows = ((each, self.row(Table.POLICY, each)) for each in keys)
        return {each: row for each, row in rows if isinstance(row, PolicyValue)}


def wanted_rows(engine: Engine) -> KeptRows:
    """What the agent wants the kernel to hold."""

    def find(table: Table, key: Key) -> Value | None:
        row = engine.reconciler.tables[table].desired.get(key)
        return None if row is None else row.value

    return KeptRows(find)


class Grounds(NamedTuple):
    """What a packet is judged by. engine: whose rules and names the rows come from."""

    engine: Engine
    rows: Rows


class Judged(NamedTuple):
    """model: with the rows that its look-ups met."""

    judgement: Judgement
    model: Model
    direction: Direction
    packet: Packet
    endpoint: EndpointValue | None
    group: GroupValue | None

    def closest_row(self, identity: int) -> tuple[PolicyKey, PolicyValue] | None:
        """Of this identity, in the set in force."""
        found = [row for row in self.model.policy.items() if row[0].identity == identity]
        return max(found, key=lambda row: significant_bits(row[0]), default=None)


def local_of(added: EndpointAdded, asked: Asked) -> Address:
    family = len(asked.remote)
    own = (each for each in (*added.addresses, *added.also_from) if len(each) == family)
    return asked.local or next(own, NOWHERE[family])


def closest_identity(rows: Rows, scope: int, address: Address) -> int:
    """What the address is to an endpoint of this scope."""
    model = Model(ipcache={**rows.identity_rows(scope, address), **rows.identity_rows(SCOPE_STATIC, address)})
    return model.identity_of(scope, address)


def judge(rows: Rows, added: EndpointAdded, asked: Asked, now: float) -> Judged:
    """As the first packet of a new flow. now: seconds of CLOCK_BOOTTIME."""
    packet = parse(asked.frame(local_of(added, asked)))
    return judge_packet(rows, added.ifindex, asked.direction, packet, now)


def judge_packet(
    rows: Rows, ifindex: int, direction: Direction, packet: Packet, now: float, flow: tuple[FlowKey, Flow] | None = None
) -> Judged:
    """flow: the one the packet may belong to."""
    model = Model()
    endpoint, group = rows.row(Table.ENDPOINTS, ifindex), None
    if isinstance(endpoint, EndpointValue):
        model.endpoints[ifindex] = endpoint
        group = rows.row(Table.GROUPS, endpoint.group)
        if isinstance(group, GroupValue):
            model.groups[endpoint.group] = group
            _take_rows(model, rows, endpoint, group, direction, packet, flow)
    if flow is not None:
        model.flows[flow[0]] = flow[1]
    judgement = model.explain(ifindex, direction, packet, int(now * NS))
    return Judged(
        judgement,
        model,
        direction,
        packet,
        endpoint if isinstance(endpoint, EndpointValue) else None,
        group if isinstance(group, GroupValue) else None,
    )


def _take_rows(
    model: Model,
    rows: Rows,
    endpoint: EndpointValue,
    group: GroupValue,
    direction: Direction,
    packet: Packet,
    flow: tuple[FlowKey, Flow] | None,
) -> None:
    for address in (packet.source, packet.destination):
        own = OwnAddressKey(endpoint.endpoint, address)
        if rows.row(Table.OWN_ADDRESSES, own):
            model.own_addresses.add(own)
    remote = packet.destination if direction is Direction.EGRESS else packet.source
    for scope in (endpoint.scope, SCOPE_STATIC):
        model.ipcache.update(rows.identity_rows(scope, remote))
    asked = {(direction, packet.policy_port)}
    identities = {model.identity_of(endpoint.scope, remote), IDENTITY_ANY}
    if flow is not None:
        identities.add(flow[1].identity)
        asked.add((flow[1].direction, flow[1].policy_port))
    for identity in sorted(identities):
        for way, port in sorted(asked):
            model.policy.update(rows.policy_rows(PolicyKey(group.set, identity, way, packet.protocol, port, 16)))


class Difference(NamedTuple):
    """A row that is not in the kernel as the agent wants it. is_pending: it is about to be written."""

    table: Table
    key: Key
    wanted: Value | None
    kernel: Value | None
    is_pending: bool

    def __str__(self) -> str:
        texts = ["no row" if value is None else _value_text(value) for value in (self.wanted, self.kernel)]
        pending = ", and is about to be written" if self.is_pending else ""
        return f"{self.table} row {row_text(self.key)}: the agent wants {texts[0]}, the kernel has {texts[1]}{pending}"


def _value_text(value: Value) -> str:
    if isinstance(value, PolicyValue):
        return f"{value.verdict.name.lower()} (rule {value.cookie})"
    if isinstance(value, tuple):
        return ", ".join(f"{field}={int(part)}" for field, part in zip(value._fields, value, strict=True))
    return str(int(value))


def differences(engine: Engine, kernel: Model, wanted: Model) -> list[Difference]:
    """Between the rows that look-ups for the same thing meet in either. Where they part ways, what follows is another's."""
    found: list[Difference] = []
    for table in (Table.ENDPOINTS, Table.GROUPS, Table.OWN_ADDRESSES, Table.IPCACHE, Table.POLICY):
        if table is Table.POLICY and found:
            break
        found += differences_in(engine, table, _rows_of(kernel, table), _rows_of(wanted, table))
    return found


def differences_in(engine: Engine, table: Table, kernel: Mapping[Key, Value], wanted: Mapping[Key, Value]) -> list[Difference]:
    ours = engine.reconciler.tables[table]
    return [
        Difference(table, key, wanted.get(key), kernel.get(key), key in ours.pending or key in ours.in_flight)
        for key in {**wanted, **kernel}
        if kernel.get(key) != wanted.get(key)
    ]


def _rows_of(model: Model, table: Table) -> dict[Key, Value]:
    if table is Table.OWN_ADDRESSES:
        return dict.fromkeys(model.own_addresses, True)
    rows: dict[Key, Value] = getattr(model, table.value)
    return rows
