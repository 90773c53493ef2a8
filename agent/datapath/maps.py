"""The kernel's tables, read and written.

Rule 1: a write is one system call whose buffers exist already, because it stands between a DNS reply and its client.
Rule 2: a refused write is a number in the result, not an exception: what it means is the reconciler's business. ENOENT on a
delete is success: the row is not there, which is what was wanted.
Rule 3: a dump is a generator. Whoever has little time takes a slice; rows that change meanwhile may be seen twice or never.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.core.types import (
    Address,
    Direction,
    IpcacheKey,
    Key,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Value,
    Verdict,
    Write,
)
from agent.datapath import abi, syscall
from agent.datapath.abi import FlowState, Layout, Loss, Reason
from agent.datapath.errors import refused
from agent.datapath.model import life_of
from agent.datapath.syscall import Batch

_NS: Final = 1_000_000_000
_SO_COOKIE: Final = 57  # <asm-generic/socket.h>
_CLOSED_BY_BOTH: Final = (1 << Direction.EGRESS) | (1 << Direction.INGRESS)
_CLOCKS_APART_S: Final = 1.0  # processors' clocks differ by far less, and remembering for a second more is nothing
_BATCH: Final = 1_024
_BATCH_MAX: Final = 1 << 16
_NO_BATCH: Final = {errno.EINVAL, errno.EOPNOTSUPP, 524}  # 524: ENOTSUPP, which user space was never meant to see

MAPS_OF: Final = {table: ("ipcache4", "ipcache6") if table is Table.IPCACHE else (table.value,) for table in Table}
_PER_CPU: Final = {"counters", "rules", "lost"}


class Flow(NamedTuple):
    """One row of `flows`. Ports of an ICMP echo are its identifier; last: seconds of CLOCK_BOOTTIME."""

    endpoint: int
    local: Address
    remote: Address
    local_port: int
    remote_port: int
    protocol: int
    identity: int
    set: int
    cookie: int
    direction: Direction
    state: FlowState
    audited: bool
    exempt: bool  # of an uplink: passes unjudged, see bpf/verdict.h 4a
    last: float
    ends: float  # when it is no flow any more, unless another packet comes
    policy_port: int
    is_settled: bool
    is_closed: bool


def _cookie_of(fd: int) -> bytes:
    """The number of a socket, which the kernel also gives as the value of its row."""
    with socket.socket(fileno=os.dup(fd)) as opened:
        return opened.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, abi.U64.size)


def _flow(key: bytes, value: bytes) -> Flow:
    endpoint, local, remote, local_port, remote_port, protocol, _ = abi.FLOW_KEY.unpack(key)
    fields = abi.FLOW_VALUE.unpack(value)
    last, _, identity, number, cookie, policy_port, direction, state, settled, closing, audited, exempt, _ = fields
    is_closed = closing == _CLOSED_BY_BOTH
    life = life_of(protocol, FlowState(state), is_settled=bool(settled), is_closed=is_closed)
    return Flow(
        endpoint,
        abi.unmapped(local),
        abi.unmapped(remote),
        int.from_bytes(local_port, "big"),
        int.from_bytes(remote_port, "big"),
        protocol,
        identity,
        number,
        cookie,
        Direction(direction),
        FlowState(state),
        bool(audited),
        bool(exempt),
        last / _NS,
        (last + life) / _NS,
        int.from_bytes(policy_port, "big"),
        bool(settled),
        is_closed,
    )


class Counter(NamedTuple):
    """endpoint: None for packets of no known endpoint."""

    endpoint: int | None
    reason: Reason
    packets: int
    bytes: int


class Fill(NamedTuple):
    used: int
    max: int


def _possible_processors() -> int:
    """As many values a per-CPU map has: also of processors that are not there yet."""
    last = Path("/sys/devices/system/cpu/possible").read_text(encoding="ascii").strip().split(",")[-1]
    return int(last.split("-")[-1]) + 1


class _Rows:
    """One map, with the buffers of its writes. They are never resized, so the kernel may know them by their addresses."""

    def __init__(self, name: str, fd: int, key: Layout, value: Layout) -> None:
        self.name = name
        self.fd = fd
        self.key_size = key.size
        self.value = value
        self.max_entries = syscall.map_info(fd).max_entries
        self._key, self._value = bytearray(key.size), bytearray(max(value.size, 8))
        self._shared = [syscall.shared(buffer) for buffer in (self._key, self._value)]
        addresses = [abi.U64.pack(syscall.address_of(buffer)) for buffer in self._shared]
        head = abi.U32.pack(fd) + bytes(4)
        self._put = syscall.new_attribute(head + b"".join(addresses))
        self._delete = syscall.new_attribute(head + addresses[0])

    def put(self, key: bytes, value: bytes) -> int:
        """0 or an errno."""
        self._key[:] = key
        self._value[: len(value)] = value
        return -syscall.call(syscall.MAP_UPDATE, self._put)

    def delete(self, key: bytes) -> int:
        """0 or an errno."""
        self._key[:] = key
        result = -syscall.call(syscall.MAP_DELETE, self._delete)
        return 0 if result == errno.ENOENT else result

    def get(self, key: bytes) -> bytes | None:
        """What the kernel answers for this key: of a trie the longest match; None: nothing."""
        self._key[:] = key
        result = -syscall.call(syscall.MAP_LOOKUP, self._put)
        if result == errno.ENOENT:
            return None
        if result:
            raise refused(f"read the map {self.name}", OSError(result, errno.errorcode.get(result, "")))
        return bytes(self._value[: self.value.size])

    def dump(self, value_size: int) -> Iterator[tuple[bytes, bytes]]:
        """All rows, one by one."""
        for batch in self.batches(value_size):
            for i in range(batch.length):
                key = batch.keys[i * self.key_size : (i + 1) * self.key_size]
                yield key, batch.values[i * value_size : (i + 1) * value_size]

    def batches(self, value_size: int) -> Iterator[Batch]:
        """All rows; many at once where the kernel can do that for this kind of map."""
        position: bytes | None = None
        while True:
            batch = self.batch(position, value_size, _BATCH)
            yield batch
            if batch.position is None:
                return
            position = batch.position

    def batch(self, position: bytes | None, value_size: int, limit: int) -> Batch:
        """About `limit` rows behind this position, one of a batch's; None: the first ones."""
        while True:
            try:
                return syscall.map_lookup_batch(self.fd, position, max(self.key_size, 4), self.key_size, value_size, limit)
            except OSError as problem:
                if problem.errno == errno.ENOSPC and limit < _BATCH_MAX:
                    limit *= 2  # one bucket of the hash holds more than that
                    continue
                if problem.errno in _NO_BATCH:
                    return self._one_by_one(position, value_size, limit)
                raise refused(f"read the map {self.name}", problem) from None

    def _one_by_one(self, position: bytes | None, value_size: int, limit: int) -> Batch:
        """A batch from a kernel that has none."""
        rows: list[tuple[bytes, bytes]] = []
        key = position
        for _ in range(limit):
            key = syscall.map_next_key(self.fd, key, self.key_size)
            if key is None:
                break
            value = syscall.map_lookup(self.fd, key, value_size)
            if value is not None:
                rows.append((key, value))
        keys, values = (b"".join(part) for part in zip(*rows, strict=True)) if rows else (b"", b"")
        return Batch(keys, values, len(rows), key)


def nested_identities(find: Callable[[Table, Key], Value | None], scope: int, address: Address) -> dict[IpcacheKey, int]:
    """Ipcache rows that hold the address, the widest first; of nested ones with one identity only the widest can be told."""
    found: dict[IpcacheKey, int] = {}
    for length in range(len(address) * 8 + 1):
        key = IpcacheKey(scope, Prefix.masked(address, length))
        identity = find(Table.IPCACHE, key)
        if isinstance(identity, int) and identity != next(reversed(found.values()), None):
            found[key] = identity
    return found


class KernelTables:
    """All maps of one load of the program. fds: name of the map → its file descriptor, which stays the caller's."""

    def __init__(self, fds: Mapping[str, int]) -> None:
        self._rows_by_map = {name: _Rows(name, fds[name], key, value) for name, (key, value) in abi.MAPS.items()}
        self._processors = _possible_processors()

    # --- the core's tables -------------------------------------------------------------------------------------------

    def apply(self, writes: Sequence[Write]) -> list[int]:
        """Performs the writes in their order; one errno for each, 0 when it is done."""
        results = []
        for write in writes:
            rows = self._rows_by_map[abi.map_of(write.table, write.key)]
            key = abi.pack_key(write.table, write.key)
            results.append(rows.delete(key) if write.value is None else rows.put(key, abi.pack_value(write)))
        return results

    def dump(self, table: Table) -> Iterator[tuple[Key, Value]]:
        for name in MAPS_OF[table]:
            rows = self._rows_by_map[name]
            for batch in rows.batches(rows.value.size):
                yield from abi.unpack_rows(name, batch.keys, batch.values)

    def unlike(self, table: Table, rows: Iterable[tuple[Key, Value]]) -> list[tuple[Key, bytes | None]]:
        """Of these rows, those that the kernel has otherwise: what it answers for the key, of a trie the longest match.

        A lookup as the datapath's: what gives the right value is right. 2 us a row.
        """
        pack_key, pack_value = abi.KEY_PACKERS[table], abi.VALUE_PACKERS[table]
        maps = [self._rows_by_map[name] for name in MAPS_OF[table]]
        in_map = maps[0]
        found = []
        for key, value in rows:
            packed = pack_key(key)
            if len(maps) > 1:
                in_map = maps[0] if len(packed) == maps[0].key_size else maps[1]
            there = in_map.get(packed)
            if there != pack_value(key, value):
                found.append((key, there))
        return found

    def batch(self, name: str, position: bytes | None, limit: int) -> Batch:
        """About `limit` rows of the map `name` of the core, behind a batch's position; None: the first ones.

        The position in a trie is the key of the batch's last row; that of any row of it will do.
        """
        rows = self._rows_by_map[name]
        return rows.batch(position, rows.value.size, limit)

    def take_away(self, name: str, key: bytes) -> int:
        """Deletes a row of the map `name` that the core has no part in; 0 or an errno."""
        return self._rows_by_map[name].delete(key)

    def fill(self, table: Table) -> Fill:
        """Of `ipcache`, the fuller of its two maps: that one is full first."""
        rows_of = [self._rows_by_map[name] for name in MAPS_OF[table]]
        fills = [Fill(sum(batch.length for batch in rows.batches(rows.value.size)), rows.max_entries) for rows in rows_of]
        return max(fills, key=lambda fill: fill.used / fill.max)

    def row(self, table: Table, key: Key) -> Value | None:
        """One row by the kernel's own look-up; in a trie the row at which it ends."""
        name = abi.map_of(table, key)
        packed = abi.pack_key(table, key)
        value = self._value(name, packed)
        return None if value is None else next(abi.unpack_rows(name, packed, value))[1]

    def identity_rows(self, scope: int, address: Address) -> dict[IpcacheKey, int]:
        """Every ipcache row that holds the address, the widest first: a look-up finds no row that is longer than its key."""
        return nested_identities(self.row, scope, address)

    def policy_rows(self, key: PolicyKey) -> dict[PolicyKey, PolicyValue]:
        """Every policy row that holds what this key says, the closest first."""
        found: dict[PolicyKey, PolicyValue] = {}
        longest = abi.significant_bits(key)
        for bits in (*range(longest, 7, -1), 0):
            value = self._value("policy", abi.pack_policy_key(abi.shortened(key, bits)))
            if value is None:
                break
            verdict, stated, _, cookie = abi.POLICY_VALUE.unpack(value)
            found.setdefault(abi.shortened(key, min(bits, stated)), PolicyValue(Verdict(verdict), cookie))
        return found

    def _value(self, name: str, key: bytes) -> bytes | None:
        rows = self._rows_by_map[name]
        return syscall.map_lookup(rows.fd, key, rows.value.size)

    # --- what the program writes -------------------------------------------------------------------------------------

    def flows(self) -> Iterator[Flow]:
        """All there are, the ended ones too: those that newer flows pushed out come last."""
        listed = set()
        for key, value in self._rows("flows"):
            flow = _flow(key, value)
            if flow.state is FlowState.ENDED:
                listed.add(key)
            yield flow
        yield from (_flow(key, value) for key, value in self._rows("ended") if key not in listed)

    def flow_identities(self) -> frozenset[int]:
        """Identities that a flow may still be judged by.

        Not by an ended one, nor by one that is over: its row stays until somebody needs the room, perhaps for ever.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME) - _CLOCKS_APART_S
        flows = (_flow(key, value) for key, value in self._rows("flows"))
        return frozenset(flow.identity for flow in flows if flow.state is FlowState.LIVE and flow.ends > now)

    def last_seen(self, scope: int, address: Address) -> float | None:
        """When a packet of a flow with this address went by, in seconds of CLOCK_BOOTTIME and exact to one; None: never."""
        key = abi.LAST_SEEN_KEY.pack(scope, abi.mapped(address))
        value = syscall.map_lookup(self._rows_by_map["last_seen"].fd, key, 8)
        return None if value is None else int(abi.U64.unpack(value)[0]) / _NS

    def counters(self) -> list[Counter]:
        """Packets and bytes since the maps were made, by endpoint and reason."""
        found = []
        for key, value in self._rows("counters"):
            endpoint, reason = abi.COUNTER_KEY.unpack(key)
            known = None if endpoint == abi.ENDPOINT_NONE else endpoint
            found.append(Counter(known, Reason(reason), *self._sums(abi.COUNTER_VALUE, value)))
        return sorted(found, key=lambda counter: (counter.endpoint is None, counter.endpoint or 0, counter.reason))

    def packets_counted(self, endpoint: int | None, reason: Reason) -> int:
        """One of counters(), without reading the others."""
        rows = self._rows_by_map["counters"]
        key = abi.COUNTER_KEY.pack(abi.ENDPOINT_NONE if endpoint is None else endpoint, reason)
        value = syscall.map_lookup(rows.fd, key, self._value_size(rows))
        return 0 if value is None else self._sums(abi.COUNTER_VALUE, value)[0]

    def rule_counters(self) -> dict[int, tuple[int, int]]:
        """Packets and bytes by the cookie of the rule that decided."""
        found = {}
        for key, value in self._rows("rules"):
            packets, size = self._sums(abi.COUNTER_VALUE, value)
            found[int(abi.U32.unpack(key)[0])] = packets, size
        return found

    def losses(self) -> dict[Loss, int]:
        """What the program could not write down: events of a full ring, counters and flows of full maps."""
        return {Loss(abi.U32.unpack(key)[0]): self._sums(abi.U64, value)[0] for key, value in self._rows("lost")}

    # --- what the agent tells the program ----------------------------------------------------------------------------

    def set_setting(self, index: int, value: int) -> None:
        self._set("settings", index, abi.U32.pack(value))

    def set_dns_socket(self, key: int, fd: int) -> None:
        """key: (IPv6 ? 2 : 0) | (TCP ? 1 : 0); fd: a bound UDP or listening TCP socket. Its row goes when the socket does.

        One that is in the row already is left there: a process that took it over has nothing to change.
        """
        if syscall.map_lookup(self._rows_by_map["dns_sockets"].fd, abi.U32.pack(key), abi.U64.size) != _cookie_of(fd):
            self._set("dns_sockets", key, abi.U64.pack(fd))

    def drop_dns_socket(self, key: int) -> None:
        with contextlib.suppress(FileNotFoundError, OSError):
            syscall.map_delete(self._rows_by_map["dns_sockets"].fd, abi.U32.pack(key))

    def _set(self, name: str, index: int, value: bytes) -> None:
        result = self._rows_by_map[name].put(abi.U32.pack(index), value)
        if result:
            raise refused(f"write row {index} of the map {name}", OSError(result, errno.errorcode.get(result, "")))

    # -----------------------------------------------------------------------------------------------------------------

    def _rows(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        rows = self._rows_by_map[name]
        return rows.dump(self._value_size(rows))

    def _value_size(self, rows: _Rows) -> int:
        return -(-rows.value.size // 8) * 8 * self._processors if rows.name in _PER_CPU else rows.value.size

    @staticmethod
    def _sums(layout: Layout, values: bytes) -> tuple[int, ...]:
        """Of all processors."""
        each = [layout.unpack_from(values, offset) for offset in range(0, len(values), layout.size)]
        return tuple(map(sum, zip(*each, strict=True)))
