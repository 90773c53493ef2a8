"""Desired and realized kernel tables.

Rule 1: only a kernel's answer changes `realized`.
Rule 2: a row's revision is that at which its present value was asked for; asking again for the same value does not move it.
Rule 3: a row is written by one write at a time; what is wanted meanwhile waits for the answer.

Why two dictionaries and a difference instead of a queue of writes: a burst of changes to one row costs one write, and a failed
write needs no bookkeeping, it is still a difference.
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.core.types import IpcacheKey, Key, PolicyKey, Table, Value, Write

# A failed write is tried again after 20 ms, then twice as late each time: the reply that waits for it (1 s) sees five retries.
RETRY_FIRST_S: Final = 0.02
RETRY_LAST_S: Final = 1.0

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.E2BIG})


class Row:
    __slots__ = ("revision", "value")

    def __init__(self, value: Value, revision: int) -> None:
        self.value = value
        self.revision = revision


class RowReference:
    """A row as it stood when somebody began to wait for it."""

    __slots__ = ("key", "revision", "table")

    def __init__(self, table: Table, key: Key, revision: int) -> None:
        self.table = table
        self.key = key
        self.revision = revision


class Failure(NamedTuple):
    errno: int
    since: float
    attempts: int
    retry_at: float


class Revisions:
    """One number for all tables, so that any two changes can be ordered."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


class KernelTable:
    """One table: what is wanted, what the kernel is known to hold, and the difference."""

    def __init__(self, name: Table, revisions: Revisions) -> None:
        self.name = name
        self.desired: dict[Key, Row] = {}
        self.realized: dict[Key, Row] = {}
        self.pending: dict[Key, int] = {}  # key -> revision of the change that is still to be made
        self.in_flight: dict[Key, tuple[Row | None, int]] = {}  # what is being written, and the change's revision
        self.failures: dict[Key, Failure] = {}
        # Acknowledged, or so already, since somebody looked: key, revision, and whether there is a row now.
        self.settled: list[tuple[Key, int, bool]] = []
        self.withdrawn: list[Key] = []  # dropped since somebody looked
        self.inherited: dict[Key, None] = {}  # found in the kernel at start, and nobody has said yet whether they are wanted
        self._fresh: dict[Key, None] = {}  # pending and not waiting for a retry, oldest first
        self._retries: list[tuple[float, int, Key]] = []
        self._revisions = revisions

    # --- wanting -----------------------------------------------------------------------------------------------------

    def want(self, key: Key, value: Value) -> RowReference:
        """Ask for a row; the reference says at which revision its present value was asked for."""
        row = self.desired.get(key)
        if row is None or row.value != value:
            row = Row(value, self._revisions.next())
            self.desired[key] = row
            self.inherited.pop(key, None)
            self._differs(key, row.revision)
        return RowReference(self.name, key, row.revision)

    def drop(self, key: Key) -> RowReference:
        """Ask for the absence of a row."""
        if self.desired.pop(key, None) is None:
            return RowReference(self.name, key, self.pending.get(key, 0))
        revision = self._revisions.next()
        self.withdrawn.append(key)
        self._differs(key, revision)
        return RowReference(self.name, key, revision)

    def adopt(self, rows: Mapping[Key, Value]) -> None:
        """Rows of the process before, as the kernel has them: judged by as they stand, until they are wanted or let go."""
        revision = self._revisions.next()
        for key, value in rows.items():
            self.realized[key] = Row(value, revision)
            self.inherited[key] = None
            self.ended(key, None, value, 0)

    def let_inherited_go(self) -> Iterator[int]:
        """Step by step what nobody has wanted since the start is to be deleted. Gives back what each cost."""
        while self.inherited:
            key, _ = self.inherited.popitem()
            self._differs(key, self._revisions.next())
            yield 1

    def lost(self, key: Key) -> None:
        """The kernel was read and does not hold the row as it was written, by somebody else's hand: it is written anew."""
        before = self.realized.get(key)
        if before is None or key in self.in_flight:
            return
        del self.realized[key]
        self.inherited.pop(key, None)
        self.ended(key, before, None, 0)
        desired = self.desired.get(key)
        self._differs(key, desired.revision if desired is not None else self._revisions.next())

    def reference(self, key: Key) -> RowReference:
        """The row as it stands, to wait for."""
        row = self.desired.get(key)
        return RowReference(self.name, key, row.revision if row is not None else self.pending.get(key, 0))

    def is_there(self, key: Key) -> bool:
        """Does the kernel hold the row as it is wanted? Cheaper than a reference, and what nearly every reply needs to know."""
        row = self.desired.get(key)
        return row is not None and self.realized.get(key) is row

    def is_settled(self, reference: RowReference) -> bool:
        """Has the kernel acknowledged this change, or a later one of the same row?"""
        realized = self.realized.get(reference.key)
        if realized is not None and realized.revision >= reference.revision > 0:
            return True
        return reference.key not in self.pending and reference.key not in self.in_flight

    def _differs(self, key: Key, revision: int) -> None:
        realized, desired = self.realized.get(key), self.desired.get(key)
        if key not in self.in_flight:
            if desired is None and realized is None:
                self._settle(key, revision)
                return
            if desired is not None and realized is not None and desired.value == realized.value:
                self.realized[key] = desired
                self._settle(key, revision)
                return
        self.pending[key] = revision
        self.failures.pop(key, None)
        self._fresh[key] = None

    def _settle(self, key: Key, revision: int) -> None:
        self.settled.append((key, revision, key in self.realized))
        self.pending.pop(key, None)
        self._fresh.pop(key, None)
        self.failures.pop(key, None)

    # --- writing -----------------------------------------------------------------------------------------------------

    def due(self, now: float, rows_max: int, *, puts: bool, allowed: Callable[[Key, Value], bool] | None = None) -> list[Write]:
        """Up to `rows_max` writes that may be made now: puts, or deletions. They are in flight until `written` is called."""
        self._wake_retries(now)
        writes: list[Write] = []
        for key in self._fresh:
            if len(writes) >= rows_max:
                break
            row = self.desired.get(key)
            if (row is not None) is not puts or key in self.in_flight:
                continue
            if row is not None and allowed is not None and not allowed(key, row.value):
                continue
            writes.append(Write(self.name, key, row.value if row is not None else None))
        for write in writes:
            del self._fresh[write.key]
            self.in_flight[write.key] = (self.desired.get(write.key), self.pending[write.key])
            self.started(write.key, write.value)
        return writes

    def written(self, write: Write, error: int, now: float) -> None:
        """Take in what the kernel said."""
        assert write.key in self.in_flight, f"{self.name}: an answer to a write that was not made: {write.key}"
        row, revision = self.in_flight.pop(write.key)
        if row is None and error == errno.ENOENT:
            error = 0  # its absence is what was asked for
        before = self.realized.get(write.key)
        desired = self.desired.get(write.key)
        if error == 0:
            if row is None:
                self.realized.pop(write.key, None)
            else:
                self.realized[write.key] = row
        self.ended(write.key, before, write.value, error)
        if error != 0 and desired is row:
            self._failed(write.key, error, now)
        elif error == 0 and (desired.value if desired is not None else None) == write.value:
            if desired is not None:
                self.realized[write.key] = desired
            self._settle(write.key, self.pending[write.key])
        elif error != 0 and desired is None and before is None:
            # What could not be written is wanted no longer: the kernel never had it.
            self._settle(write.key, self.pending[write.key])
        else:
            # Something else is wanted by now: that is a new difference.
            if error == 0:
                self.settled.append((write.key, revision, row is not None))
            self._fresh[write.key] = None

    def _failed(self, key: Key, error: int, now: float) -> None:
        before = self.failures.get(key)
        attempts = before.attempts + 1 if before is not None else 1
        retry_at = now + min(RETRY_LAST_S, RETRY_FIRST_S * 2 ** min(attempts - 1, 16))
        self.failures[key] = Failure(error, before.since if before is not None else now, attempts, retry_at)
        heapq.heappush(self._retries, (retry_at, self._revisions.next(), key))

    def _wake_retries(self, now: float) -> None:
        while self._retries and self._retries[0][0] <= now:
            retry_at, _, key = heapq.heappop(self._retries)
            failure = self.failures.get(key)
            if failure is not None and failure.retry_at == retry_at and key not in self.in_flight:
                self._fresh[key] = None

    def next_retry(self) -> float | None:
        """When a failed write is to be tried again at the earliest."""
        while self._retries:
            retry_at, _, key = self._retries[0]
            failure = self.failures.get(key)
            if failure is not None and failure.retry_at == retry_at:
                return retry_at
            heapq.heappop(self._retries)
        return None

    # --- for tables that count something beside their rows -------------------------------------------------------------

    def started(self, key: Key, value: Value | None) -> None:
        """A write has begun."""

    def ended(self, key: Key, before: Row | None, value: Value | None, error: int) -> None:
        """A write has ended; `before` was realized until now."""


class PolicyTable(KernelTable):
    """The policy map, which also knows for each identity whether all its rows are realized (I2)."""

    def __init__(self, revisions: Revisions) -> None:
        super().__init__(Table.POLICY, revisions)
        self._missing_by_identity: dict[int, set[PolicyKey]] = {}
        self.incomplete: set[int] = set()  # identities some of whose rows nobody has asked for yet

    def want(self, key: Key, value: Value) -> RowReference:
        reference = super().want(key, value)
        self._missing(key)
        return reference

    def drop(self, key: Key) -> RowReference:
        reference = super().drop(key)
        assert isinstance(key, PolicyKey)
        self._present(key)
        return reference

    def lost(self, key: Key) -> None:
        super().lost(key)
        if key in self.desired:
            self._missing(key)

    def has_all_rows_of(self, identity: int) -> bool:
        return identity not in self._missing_by_identity and identity not in self.incomplete

    def ended(self, key: Key, before: Row | None, value: Value | None, error: int) -> None:
        assert isinstance(key, PolicyKey)
        if error == 0 and value is not None:
            self._present(key)

    def _missing(self, key: Key) -> None:
        assert isinstance(key, PolicyKey)
        if key in self.pending:
            self._missing_by_identity.setdefault(key.identity, set()).add(key)

    def _present(self, key: PolicyKey) -> None:
        missing = self._missing_by_identity.get(key.identity)
        if missing is not None:
            missing.discard(key)
            if not missing:
                del self._missing_by_identity[key.identity]


class IpcacheTable(KernelTable):
    """The ipcache, which also counts the rows that name an identity, on their way to the kernel or in it (I4)."""

    def __init__(self, revisions: Revisions) -> None:
        super().__init__(Table.IPCACHE, revisions)
        self._rows_by_identity: dict[int, int] = {}
        self.rows_by_family = {4: 0, 16: 0}  # realized; the families are two maps in the kernel

    def adopt(self, rows: Mapping[Key, Value]) -> None:
        for identity in rows.values():
            self._count(identity, 1)
        super().adopt(rows)

    def names(self, identity: int) -> bool:
        return identity in self._rows_by_identity

    def rows_of(self, identity: int) -> int:
        return self._rows_by_identity.get(identity, 0)

    def started(self, key: Key, value: Value | None) -> None:
        assert isinstance(key, IpcacheKey)
        self._count(value, 1)

    def ended(self, key: Key, before: Row | None, value: Value | None, error: int) -> None:
        if error != 0:
            self._count(value, -1)
            return
        assert isinstance(key, IpcacheKey)
        self.rows_by_family[len(key.prefix.address)] += (value is not None) - (before is not None)
        if before is not None:
            self._count(before.value, -1)

    def _count(self, identity: Value | None, by: int) -> None:
        if identity is None:
            return
        assert isinstance(identity, int)
        count = self._rows_by_identity.get(identity, 0) + by
        assert count >= 0, f"I4: identity {identity} lost a row it never had"
        if count:
            self._rows_by_identity[identity] = count
        else:
            del self._rows_by_identity[identity]
