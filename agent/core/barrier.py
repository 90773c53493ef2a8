"""Waiting for rows.

A barrier is the set of rows somebody waits for, each at the revision at which its present value was asked for. It is met when
each of them is realized at that revision or later, and fails as soon as one of them cannot be.

The race this prevents, as it stands in Cilium (two replies for one address, T0 to T6; replayed by `central-race.txt`):

    T0  reply 1 brings 192.0.2.1: the row is asked for at revision 5
    T1  reply 1 waits for revision 5
    T2  reply 2 brings 192.0.2.1: nothing changes
    T3  "nothing changed, so there is nothing to wait for": reply 2 leaves          <- wrong: the row is not written yet
    T4  the client's first packet is dropped
    T5  the row is written
    T6  reply 1 leaves

Here reply 2 takes its barrier from the row as it stands, revision 5 and not realized, and so waits with reply 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from agent.core.tables import KernelTable, RowReference
from agent.core.types import Key, Table


class Barrier:
    """What somebody waits for: met when nothing is missing, failed when `error` is a sentence."""

    __slots__ = ("error", "errno", "must_be_present", "missing")

    def __init__(self, *, must_be_present: bool) -> None:
        self.missing: set[tuple[Table, Key]] = set()
        self.must_be_present = must_be_present
        self.error: str | None = None
        self.errno = 0

    @property
    def is_met(self) -> bool:
        return not self.missing and self.error is None

    @property
    def is_over(self) -> bool:
        return not self.missing or self.error is not None


class Barriers:
    """All barriers that wait, found by the row they wait for."""

    def __init__(self, tables: Mapping[Table, KernelTable]) -> None:
        self._tables = tables
        self._waiting: dict[tuple[Table, Key], list[tuple[Barrier, int]]] = {}
        self.over: list[Barrier] = []  # met or failed since somebody looked

    def take(self, references: Iterable[RowReference], *, must_be_present: bool = False) -> Barrier:
        """Wait for these rows; met at once when the kernel has them already.

        must_be_present: a row that is withdrawn while one waits for it fails the barrier (a reply needs the row; whoever
        removes one needs only that the change was made).
        """
        barrier = Barrier(must_be_present=must_be_present)
        self.add(barrier, references)
        return barrier

    def add(self, barrier: Barrier, references: Iterable[RowReference]) -> None:
        """Wait for these as well."""
        for reference in references:
            table = self._tables[reference.table]
            if barrier.must_be_present and reference.key not in table.desired:
                barrier.error = f"{reference.table} row {row_text(reference.key)} was withdrawn"
            elif not table.is_settled(reference):
                key = (reference.table, reference.key)
                barrier.missing.add(key)
                self._waiting.setdefault(key, []).append((barrier, reference.revision))

    def row_settled(self, table: Table, key: Key, revision: int, *, is_present: bool) -> None:
        """The kernel acknowledged the change that was asked for at this revision.

        A row that is gone meets nobody who needs it: it is wanted again by now, or `row_withdrawn` has told them.
        """
        waiting = self._waiting.get((table, key))
        if waiting is None:
            return
        is_met = [wanted <= revision and (is_present or not barrier.must_be_present) for barrier, wanted in waiting]
        met = dict.fromkeys(barrier for (barrier, _), done in zip(waiting, is_met, strict=True) if done)
        self._keep(table, key, [entry for entry in waiting if entry[0] not in met])
        for barrier in met:
            self._one_less(barrier, table, key)

    def row_failed(self, table: Table, key: Key, errno: int, *, because_of: tuple[Table, Key] | None = None) -> None:
        """This row cannot be, as things stand; whoever waits for it is told. because_of: the row that failed, if another."""
        failed, failed_key = because_of or (table, key)
        for barrier, _ in self._waiting.pop((table, key), []):
            self._fail(barrier, f"{failed} row {row_text(failed_key)} cannot be written: {os.strerror(errno)}", errno)

    def row_withdrawn(self, table: Table, key: Key) -> None:
        """Nobody wants this row any more."""
        waiting = self._waiting.get((table, key))
        if waiting is None:
            return
        still = [(barrier, wanted) for barrier, wanted in waiting if not barrier.must_be_present]
        for barrier, _ in waiting:
            if barrier.must_be_present:
                self._fail(barrier, f"{table} row {row_text(key)} was withdrawn", 0)
        self._keep(table, key, still)

    def cancel(self, barrier: Barrier) -> None:
        """Nobody waits any more."""
        for key in barrier.missing:
            self._keep(*key, [entry for entry in self._waiting.get(key, []) if entry[0] is not barrier])
        barrier.missing.clear()

    def _one_less(self, barrier: Barrier, table: Table, key: Key) -> None:
        barrier.missing.discard((table, key))
        if not barrier.missing and barrier.error is None:
            self.over.append(barrier)

    def _fail(self, barrier: Barrier, error: str, errno: int) -> None:
        if barrier.error is None:
            barrier.error, barrier.errno = error, errno
            self.cancel(barrier)
            self.over.append(barrier)

    def _keep(self, table: Table, key: Key, waiting: list[tuple[Barrier, int]]) -> None:
        if waiting:
            self._waiting[(table, key)] = waiting
        else:
            self._waiting.pop((table, key), None)


def row_text(key: Key) -> str:
    """A row's key as people read it."""
    if isinstance(key, int):
        return str(key)
    return " ".join(str(int(part)) if isinstance(part, int) else str(part) for part in key if not isinstance(part, bytes))
