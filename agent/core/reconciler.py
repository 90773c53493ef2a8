"""What is to be written next, and what the kernel's answers mean.

The order (I2): policy rows of an identity first, in every set in force or in preparation, then the ipcache row that names it.
On the way back it is the owners' order: an identity's policy rows are dropped only when no ipcache row names it any more, a
set's only when no group points to it. An endpoint's row waits for its group's. Everything else that has to come after
something (a flip, an attachment) waits by a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agent.core.barrier import Barriers
from agent.core.known_bad import KnownBad
from agent.core.tables import NO_ROOM, IpcacheTable, KernelTable, PolicyTable, Revisions
from agent.core.types import EndpointValue, Key, PolicyKey, Table, Value, Write

# A row that fails for so long is called impossible to whoever waits for it; it stays wanted, and is tried on.
HOPELESS_AFTER_S: Final = 2.0
# About 2 ms of map writes (4 us each): between two batches the shell looks at its sockets.
BATCH_ROWS_MAX: Final = 512


class Reconciler:
    def __init__(self, known_bad: frozenset[KnownBad] = frozenset()) -> None:
        self.revisions = revisions = Revisions()
        self.policy = PolicyTable(revisions)
        self.ipcache = IpcacheTable(revisions)
        self.groups = KernelTable(Table.GROUPS, revisions)
        self.endpoints = KernelTable(Table.ENDPOINTS, revisions)
        self.own_addresses = KernelTable(Table.OWN_ADDRESSES, revisions)
        self.tables: dict[Table, KernelTable] = {
            table.name: table for table in (self.policy, self.own_addresses, self.groups, self.endpoints, self.ipcache)
        }
        self.barriers = Barriers(self.tables)
        self._known_bad = known_bad
        self._conditions = {Table.IPCACHE: self._may_be_named, Table.ENDPOINTS: self._may_be_joined}

    def batch(self, now: float) -> tuple[Write, ...]:
        """The next writes, in the order in which they have to be made; empty when nothing can be done now."""
        tables = [table for table in self.tables.values() if table.pending]
        if not tables:
            return ()
        writes: list[Write] = []
        if KnownBad.WRITE_ORDER_REVERSED in self._known_bad:
            tables.reverse()
        for puts in (True, False):
            for table in tables:
                allowed = self._conditions.get(table.name) if puts else None
                if len(writes) < BATCH_ROWS_MAX:
                    writes += table.due(now, BATCH_ROWS_MAX - len(writes), puts=puts, allowed=allowed)
        return tuple(writes)

    def _may_be_named(self, key: Key, value: Value) -> bool:
        assert isinstance(value, int)
        return self.policy.has_all_rows_of(value) or KnownBad.WRITE_ORDER_REVERSED in self._known_bad

    def _may_be_joined(self, key: Key, value: Value) -> bool:
        """An endpoint moves to a group only when the group points to the set it is meant to: the old one was never for it."""
        assert isinstance(value, EndpointValue)
        wanted, there = self.groups.desired.get(value.group), self.groups.realized.get(value.group)
        return wanted is not None and there is not None and wanted.value == there.value

    def written(self, results: Iterable[tuple[Write, int]], now: float) -> None:
        """Take in the kernel's answers; barriers that are over by them are in `barriers.over`."""
        for write, error in results:
            table = self.tables[write.table]
            table.written(write, error, now)
            failure = table.failures.get(write.key)
            if error and failure is not None and (error in NO_ROOM or now - failure.since >= HOPELESS_AFTER_S):
                self._tell_who_waits(write, error)
        self.settle()

    def _tell_who_waits(self, write: Write, error: int) -> None:
        self.barriers.row_failed(write.table, write.key, error)
        if isinstance(write.key, PolicyKey):
            # Rows that name the identity wait for this one (I2), and so whoever waits for them waits in vain.
            for key in self.ipcache.pending:
                row = self.ipcache.desired.get(key)
                if row is not None and row.value == write.key.identity:
                    self.barriers.row_failed(Table.IPCACHE, key, error, because_of=(write.table, write.key))

    def settle(self) -> None:
        """Tell the barriers what was acknowledged, was there already, or is wanted no longer."""
        for table in self.tables.values():
            if table.withdrawn:
                for key in table.withdrawn:
                    if key not in table.desired:
                        self.barriers.row_withdrawn(table.name, key)
                table.withdrawn.clear()
            if table.settled:
                for key, revision, is_present in table.settled:
                    self.barriers.row_settled(table.name, key, revision, is_present=is_present)
                table.settled.clear()

    def next_deadline(self) -> float | None:
        retries = [at for table in self.tables.values() if (at := table.next_retry()) is not None]
        return min(retries, default=None)
