"""What can be waited for: done when the kernel has acknowledged, at once when it already had, an error when it cannot be.

Five kinds of change give back something to wait for; each keeps each of the four promises.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from agent.core.events import RowsWritten, Tick
from agent.core.rules import Fqdn
from agent.core.tables import RowReference
from agent.core.types import SCOPE_SHARED, IpcacheKey, Prefix, Table, packed
from tests.sim.world import World, allow, any_question

A, B = "192.0.2.101", "192.0.2.102"
KEY_A, KEY_B, KEY_C = (IpcacheKey(SCOPE_SHARED, Prefix.of(packed(text))) for text in (A, B, "192.0.2.103"))

State = Callable[[], str]  # "waiting", "done", or the error


@dataclass(frozen=True)
class Change:
    """begin: makes the change. again: the same where it makes no difference any more. holds: does the kernel show it?"""

    name: str
    begin: Callable[[World], State]
    again: Callable[[World], State]
    holds: Callable[[World], bool]
    table: Table
    error: int

    def __str__(self) -> str:
        return self.name


def rows_of(world: World, rows: Iterable[RowReference]) -> State:
    barrier = world.engine.reconciler.barriers.take(rows)
    world.handle(Tick())
    return lambda: barrier.error or ("done" if barrier.is_met else "waiting")


def upsert(world: World) -> State:
    return rows_of(world, [world.engine.ipcache.upsert(KEY_C, "c.example.", frozenset({"fqdn:a.example."}))])


def remove(world: World) -> State:
    return rows_of(world, [world.engine.ipcache.remove(KEY_A, "a.example.")])


def register(world: World) -> State:
    return rows_of(world, world.engine.names.register(Fqdn("b.example.")))


def unregister(world: World) -> State:
    return rows_of(world, world.engine.names.unregister(Fqdn("a.example.")))


def unregister_one_of_two(world: World) -> State:
    world.engine.names.register(Fqdn("b.example."))
    return rows_of(world, world.engine.names.unregister(Fqdn("b.example.")))


def apply(world: World) -> State:
    ticket = object()
    world.apply(allow("b.example."), ticket=ticket)
    return lambda: world.settled[ticket] or "done" if ticket in world.settled else "waiting"


def has(key: IpcacheKey) -> Callable[[World], bool]:
    return lambda world: key in world.kernel.rows[Table.IPCACHE]


def has_not(key: IpcacheKey) -> Callable[[World], bool]:
    return lambda world: key not in world.kernel.rows[Table.IPCACHE]


CHANGES = [
    Change("upsert", upsert, upsert, has(KEY_C), Table.IPCACHE, errno.ENOSPC),
    Change("removal", remove, remove, has_not(KEY_A), Table.IPCACHE, errno.EPERM),
    Change("selector registration", register, register, has(KEY_B), Table.IPCACHE, errno.ENOSPC),
    Change("selector removal", unregister, unregister_one_of_two, has_not(KEY_A), Table.IPCACHE, errno.EPERM),
    Change("policy application", apply, apply, lambda w: w.passes(B) and not w.passes(A), Table.POLICY, errno.ENOSPC),
]
each_change = pytest.mark.parametrize("change", CHANGES, ids=str)


@pytest.fixture
def world() -> World:
    """Name a is allowed and learned, name b only learned; the kernel is slow from here."""
    world = World()
    world.start(allow("a.example."), any_question())
    world.resolve("a.example.", A)
    world.resolve("b.example.", B)
    assert world.passes(A)
    assert not world.passes(B)
    world.auto = False
    return world


def write_out(world: World, until: Callable[[], bool] = lambda: False) -> None:
    while world.waiting_writes and not until():
        world.write_one()


@each_change
def test_done_when_the_kernel_has_acknowledged_and_never_before(world: World, change: Change) -> None:
    """While a write is only asked for, or only made, its owner waits."""
    state = change.begin(world)
    assert not change.holds(world)
    while state() == "waiting":
        write = world.take_write()
        assert write is not None, "nothing left to write, and still waiting"
        error = world.kernel.apply(write)
        assert state() == "waiting"
        world.handle(RowsWritten(((write, error),)))
    assert state() == "done"
    assert change.holds(world)


@each_change
def test_done_at_once_when_the_kernel_already_had_it(world: World, change: Change) -> None:
    """No write, no wait."""
    change.begin(world)
    write_out(world)
    writes = world.kernel.writes
    assert change.again(world)() == "done"
    write_out(world)
    assert world.kernel.writes == writes


@each_change
def test_an_error_when_it_cannot_be(world: World, change: Change) -> None:
    """A full map at once, any other refusal after two seconds; the sentence names the row."""
    world.kernel.fail(change.table, 1_000, change.error)
    state = change.begin(world)
    write_out(world)
    if change.error != errno.ENOSPC:
        assert state() == "waiting"
        for _ in range(30):
            world.advance(0.1)
            write_out(world)
    assert f"{change.table} row " in state()
    assert "cannot be written" in state()
    assert not change.holds(world)


@each_change
def test_a_passing_fault_only_delays(world: World, change: Change) -> None:
    """Three refusals, then it works: no error, and done after that."""
    world.kernel.fail(change.table, 3, errno.EAGAIN)
    state = change.begin(world)
    write_out(world)
    assert state() == "waiting"
    for _ in range(40):
        world.advance(0.05)
        write_out(world)
    assert state() == "done"
    assert change.holds(world)


def test_a_refused_policy_leaves_the_one_in_force(world: World) -> None:
    """And nothing of what was prepared; the next application, with room, succeeds."""
    before = {table: dict(rows) for table, rows in world.kernel.rows.items()}
    world.kernel.rows_max[Table.POLICY] = len(before[Table.POLICY]) + 1
    state = apply(world)
    write_out(world)
    assert "No space" in state()
    world.advance(20.0)
    write_out(world)
    world.auto = True
    world.advance(20.0)
    assert world.kernel.rows[Table.POLICY].keys() == before[Table.POLICY].keys()
    world.kernel.rows_max.clear()
    assert apply(world)() == "done"


def test_an_endpoint_that_comes_during_a_refused_change_is_judged_by_the_policies_in_force(world: World) -> None:
    """It must not wait for a policy that never comes."""
    world.kernel.rows_max[Table.POLICY] = len(world.kernel.rows[Table.POLICY]) + 1
    world.apply(allow("b.example."), ticket="refused")
    world.add_endpoint(2, "192.0.2.12")
    write_out(world)
    assert "No space" in (world.settled["refused"] or "")
    assert world.attached.keys() == {1, 2}
    assert world.passes(A, endpoint=2)


def test_changes_asked_for_during_a_change_follow_it_without_a_further_event(world: World) -> None:
    """The last one wins, and both tickets are settled; nothing has to happen in between but the kernel's answers."""
    world.apply(allow("b.example."), ticket=1)
    world.apply(allow("c.example."), ticket=2)
    world.apply(allow("a.example.", "b.example."), ticket=3)
    write_out(world)
    assert world.settled[1] is world.settled[2] is world.settled[3] is None
    assert world.settled.keys() >= {1, 2, 3}
    assert world.passes(A)
    assert world.passes(B)


def test_a_flip_that_the_kernel_refuses_is_told_and_tried_on(world: World) -> None:
    """There is no way back, so the ticket gets the error, and the policy comes into force when the fault ends."""
    world.kernel.fail(Table.GROUPS, 1_000, errno.EPERM)
    state = apply(world)
    for _ in range(30):
        write_out(world)
        world.advance(0.1)
    assert "groups row 1 cannot be written" in state()
    assert not world.passes(B)
    world.kernel.failing.clear()
    world.advance(1.0)
    write_out(world)
    assert world.passes(B)
