"""Rows that somebody else took from the kernel are written again, in the order they need; memory follows from itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from agent.core.events import RowsLost
from agent.core.tables import Row
from agent.core.types import SCOPE_SHARED, IpcacheKey, PolicyKey, Prefix, Table, packed
from agent.derived import Contradiction, contradictions
from tests.sim.simulation import histories
from tests.sim.world import World, allow, any_question

A, B = "192.0.2.101", "192.0.2.102"
KEY_A, KEY_B = (IpcacheKey(SCOPE_SHARED, Prefix.of(packed(text))) for text in (A, B))


@pytest.fixture
def world() -> World:
    """Name a is allowed and learned."""
    world = World()
    world.start(allow("a.example."), any_question())
    world.resolve("a.example.", A)
    assert world.passes(A)
    return world


def found_in(world: World) -> list[Contradiction]:
    return [found for found in contradictions(world.engine) if found is not None]


def test_every_lost_row_is_written_again(world: World) -> None:
    """Each row of each table by itself, then all at once; the counts of the tables stay right."""
    before = {table: dict(rows) for table, rows in world.kernel.rows.items()}
    counted = dict(world.engine.reconciler.ipcache.rows_by_family)
    every = [(table, key) for table, rows in before.items() for key in rows]
    assert {table for table, _ in every} == set(Table)
    for lost in [*([one] for one in every), every]:
        for table, key in lost:
            del world.kernel.rows[table][key]
        world.handle(RowsLost(tuple(lost)))
        assert world.kernel.rows == before
    assert world.engine.reconciler.ipcache.rows_by_family == counted
    assert not any(table.pending or table.in_flight for table in world.engine.reconciler.tables.values())


def test_a_reply_waits_for_a_row_that_was_lost(world: World) -> None:
    """The name is known and its row was there; now it is not, and the client must not have the address before it is again."""
    world.auto = False
    del world.kernel.rows[Table.IPCACHE][KEY_A]
    world.handle(RowsLost(((Table.IPCACHE, KEY_A),)))
    answers = len(world.answers)
    world.reply(world.ask("a.example."), A)
    assert len(world.answers) == answers
    world.write_one()
    assert world.passes(A)
    assert len(world.answers) == answers + 1


def test_no_row_names_an_identity_whose_policy_row_was_lost(world: World) -> None:
    """I2: another address of the name waits until the policy row is back, also when that fails at first."""
    row = world.engine.reconciler.ipcache.desired[KEY_A]
    lost = next(key for key in world.kernel.rows[Table.POLICY] if isinstance(key, PolicyKey) and key.identity == row.value)
    del world.kernel.rows[Table.POLICY][lost]
    world.kernel.fail(Table.POLICY, 1)
    world.handle(RowsLost(((Table.POLICY, lost),)))
    world.reply(world.ask("a.example."), B)
    assert KEY_B not in world.kernel.rows[Table.IPCACHE]
    world.advance(0.1)
    assert lost in world.kernel.rows[Table.POLICY]
    assert world.passes(B)


def test_a_row_on_its_way_is_let_be(world: World) -> None:
    """Whoever read the kernel meanwhile saw the state before or after; the answer to the write says which."""
    world.auto = False
    table = world.engine.reconciler.ipcache
    before = table.realized[KEY_A]
    table.want(KEY_A, 2)
    world.engine.handle(RowsLost(()), world.now)
    world.perform()
    assert KEY_A in table.in_flight
    world.handle(RowsLost(((Table.IPCACHE, KEY_A),)))
    assert len(world.waiting_writes) == 1
    world.kernel.fail(Table.IPCACHE, 1)
    world.write_one()
    assert table.realized[KEY_A] == before


# --- memory ----------------------------------------------------------------------------------------------------------------


def test_memory_follows_from_itself_in_every_history() -> None:
    """Whatever names, endpoints, policies and failures came and went: at rest nothing contradicts anything."""
    pairs_compared: list[int] = []

    class Compared(histories()):  # type: ignore[misc]
        @invariant()
        def nothing_contradicts_anything(self) -> None:
            if not hasattr(self, "sim"):
                return
            engine = self.sim.engine
            is_under_way = (
                engine.groups._plan or engine.groups.is_behind or engine.groups.is_inheriting or engine.sets.is_behind
            )
            if not is_under_way and not any(table.pending for table in engine.reconciler.tables.values()):
                assert not found_in(self.sim.world)
                pairs_compared.append(len(engine.dns_cache))

    profile = settings(
        max_examples=20,
        stateful_step_count=50,
        database=None,
        phases=(Phase.generate,),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(2)(Compared), settings=profile)
    assert sum(pairs_compared) > 20


def _bag_loses_an_address(world: World) -> None:
    (selector,) = world.engine.names.selectors.values()
    selector.remove_labels(SCOPE_SHARED, (packed(A),), "a.example.")


def _bag_gains_an_address(world: World) -> None:
    (selector,) = world.engine.names.selectors.values()
    selector.add_labels(SCOPE_SHARED, (packed(B),), "a.example.")


def _labels_are_others(world: World) -> None:
    world.engine.ipcache.metadata.upsert(KEY_A, "a.example.", frozenset({"fqdn:b.example."}))


def _row_names_another_identity(world: World) -> None:
    rows = world.engine.reconciler.ipcache.desired
    rows[KEY_A] = Row(2, rows[KEY_A].revision)


def _row_is_not_wanted(world: World) -> None:
    del world.engine.reconciler.ipcache.desired[KEY_A]


def _set_lacks_a_row(world: World) -> None:
    world.engine.reconciler.policy.desired.popitem()


def _group_is_not_wanted(world: World) -> None:
    world.engine.reconciler.groups.desired.clear()


@pytest.mark.parametrize(
    ("mistake", "table"),
    [
        (_bag_loses_an_address, "bags"),
        (_bag_gains_an_address, "bags"),
        (_labels_are_others, "labels"),
        (_row_names_another_identity, "identities"),
        (_row_is_not_wanted, "ipcache"),
        (_set_lacks_a_row, "policy"),
        (_group_is_not_wanted, "groups"),
    ],
)
def test_a_contradiction_is_found_where_it_is(world: World, mistake: Callable[[World], None], table: str) -> None:
    """One mistake in one table; before it there was none."""
    assert not found_in(world)
    mistake(world)
    assert table in {found.table for found in found_in(world)}
