"""Tables, barriers, identities, DNS cache: each noun's own promises, where a whole world would hide which one broke."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.barrier import Barriers
from agent.core.crowd import HEAP_SLACK, Crowd
from agent.core.dns_cache import DnsCache, Pair
from agent.core.identity import IdentityAllocator, NoRoom
from agent.core.reconciler import Reconciler
from agent.core.rules import Fqdn
from agent.core.settings import Settings
from agent.core.tables import RETRY_FIRST_S, RETRY_LAST_S, KernelTable, Revisions
from agent.core.types import (
    LABEL_WORLD,
    SCOPE_SHARED,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    Orientation,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Value,
    Verdict,
    Write,
    packed,
)
from tests.sim.world import UPSTREAM, World, allow, any_question

A, B = packed("192.0.2.101"), packed("192.0.2.102")
ROW = IpcacheKey(SCOPE_SHARED, Prefix.of(A))

# --- tables --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def table() -> KernelTable:
    return KernelTable(Table.GROUPS, Revisions())


def due(table: KernelTable, now: float = 0.0) -> list[Write]:
    return table.due(now, 100, puts=True) + table.due(now, 100, puts=False)


def test_asking_again_for_the_same_value_does_not_move_its_revision(table: KernelTable) -> None:
    """Who waits for a row waits for the moment its value was first asked for."""
    assert table.want(1, 10).revision == table.want(1, 10).revision
    (write,) = due(table)
    table.written(write, 0, 0.0)
    assert table.is_settled(table.want(1, 10))
    assert not due(table)


def test_a_burst_of_changes_costs_one_write(table: KernelTable) -> None:
    """Only the last value is written."""
    for value in (10, 11, 12):
        table.want(1, value)
    assert [write.value for write in due(table)] == [12]


def test_back_to_the_value_in_flight(table: KernelTable) -> None:
    """A, then B, then A while the first A is on its way: one write, and all three are settled by it."""
    references = [table.want(1, 10)]
    (write,) = due(table)
    references += [table.want(1, 11), table.want(1, 10)]
    assert not due(table), "a row is written by one write at a time"
    table.written(write, 0, 0.0)
    assert all(table.is_settled(reference) for reference in references)
    assert not table.pending


def test_another_value_while_one_is_in_flight(table: KernelTable) -> None:
    """The acknowledgement settles the first and not the second."""
    first = table.want(1, 10)
    (write,) = due(table)
    second = table.want(1, 11)
    table.written(write, 0, 0.0)
    assert table.is_settled(first)
    assert not table.is_settled(second)
    assert [write.value for write in due(table)] == [11]


@pytest.mark.parametrize("error", [0, errno.EAGAIN])
def test_dropped_while_in_flight(table: KernelTable, error: int) -> None:
    """A row that arrived is deleted; one that failed never was there, and nothing is left to do."""
    table.want(1, 10)
    (write,) = due(table)
    gone = table.drop(1)
    table.written(write, error, 0.0)
    assert table.is_settled(gone) == bool(error)
    assert [write.value for write in due(table)] == ([] if error else [None])
    assert not table.failures


def test_wanted_again_while_its_deletion_is_in_flight(table: KernelTable) -> None:
    """The kernel may still show it, but it is not settled: it is about to go, and has to come back."""
    table.want(1, 10)
    table.written(due(table)[0], 0, 0.0)
    table.drop(1)
    (deletion,) = due(table)
    again = table.want(1, 10)
    assert not table.is_settled(again)
    table.written(deletion, 0, 0.0)
    assert not table.is_settled(again)
    assert [write.value for write in due(table)] == [10]


def test_deleting_what_the_kernel_has_not_is_done(table: KernelTable) -> None:
    """Its absence is what was asked for."""
    table.want(1, 10)
    table.written(due(table)[0], 0, 0.0)
    table.drop(1)
    table.written(due(table)[0], errno.ENOENT, 0.0)
    assert not table.pending
    assert not table.realized


def test_retries_come_later_and_later(table: KernelTable) -> None:
    """Doubling up to a second; `next_retry` says when, and nothing is written before."""
    table.want(1, 10)
    now, waits = 0.0, []
    for _ in range(9):
        (write,) = due(table, now)
        table.written(write, errno.EAGAIN, now)
        assert not due(table, now)
        retry_at = table.next_retry()
        assert retry_at is not None
        waits.append(retry_at - now)
        now = retry_at
    assert waits[:3] == pytest.approx([RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S])
    assert waits[-1] == pytest.approx(RETRY_LAST_S)
    assert table.failures[1].since == 0.0
    table.want(1, 11)
    assert [write.value for write in due(table, now)] == [11], "a new value does not wait for the old one's retry"


@given(st.lists(st.sampled_from(("want 1", "want 2", "drop", "write", "ok", "fail", "tick"))))
def test_a_row_always_gets_where_it_is_wanted(steps: list[str]) -> None:
    """Whatever happens in whatever order: when the faults end, the kernel holds what is wanted and everybody is told."""
    table, now = KernelTable(Table.GROUPS, Revisions()), 0.0
    kernel: dict[Key, Value] = {}
    flying: list[Write] = []
    references = []

    def land(error: int) -> None:
        write = flying.pop()
        if not error:
            if write.value is None:
                kernel.pop(1, None)
            else:
                kernel[1] = write.value
        table.written(write, error, now)

    for step in [*steps, "ok", "tick", *["write", "ok", "tick"] * 3]:
        match step:
            case "want 1" | "want 2":
                references.append(table.want(1, int(step[-1])))
            case "drop":
                references.append(table.drop(1))
            case "write":
                flying += due(table, now)
                assert len(flying) <= 1
            case "ok" | "fail" if flying:
                land(0 if step == "ok" else errno.EAGAIN)
            case "tick":
                now += RETRY_LAST_S
    assert kernel == {key: row.value for key, row in table.desired.items()}
    assert table.realized == table.desired
    assert all(table.is_settled(reference) for reference in references)
    assert not table.pending
    assert not table.failures


# --- order of writes and barriers ------------------------------------------------------------------------------------------


def test_a_row_waits_for_the_policy_rows_of_its_identity_alone() -> None:
    """I2, and no more than I2."""
    reconciler = Reconciler()
    key = PolicyKey(1, 100, Direction.EGRESS, 6, 443, 16)
    reconciler.policy.want(key, PolicyValue(Verdict.ALLOW, 1))
    reconciler.ipcache.want(ROW, 100)
    reconciler.ipcache.want(IpcacheKey(SCOPE_SHARED, Prefix.of(B)), 101)
    first = reconciler.batch(0.0)
    assert [(write.table, write.value) for write in first if write.table is Table.IPCACHE] == [(Table.IPCACHE, 101)]
    reconciler.written([(write, 0) for write in first], 0.0)
    assert [write.value for write in reconciler.batch(0.0)] == [100]


def test_an_endpoint_waits_for_its_groups_row() -> None:
    """The group may still point to a set that was never meant for this endpoint."""
    reconciler = Reconciler()
    reconciler.groups.want(7, GroupValue(1, True, False, False))
    reconciler.written([(write, 0) for write in reconciler.batch(0.0)], 0.0)
    reconciler.groups.want(7, GroupValue(2, True, False, False))
    reconciler.endpoints.want(101, EndpointValue(1, 7, SCOPE_SHARED, Orientation.BEHIND))
    (flip,) = reconciler.batch(0.0)
    assert flip.table is Table.GROUPS
    reconciler.written([(flip, errno.EAGAIN)], 0.0)
    assert not reconciler.batch(0.0)
    (flip,) = reconciler.batch(1.0)
    reconciler.written([(flip, 0)], 1.0)
    assert [write.table for write in reconciler.batch(1.0)] == [Table.ENDPOINTS]


def test_a_full_policy_map_is_told_to_who_waits_for_the_address() -> None:
    """The ipcache row that cannot be written for lack of a policy row fails with that row's name."""
    reconciler = Reconciler()
    reconciler.policy.want(PolicyKey(1, 100, Direction.EGRESS, 6, 443, 16), PolicyValue(Verdict.ALLOW, 1))
    barrier = reconciler.barriers.take([reconciler.ipcache.want(ROW, 100)], must_be_present=True)
    (write,) = reconciler.batch(0.0)
    reconciler.written([(write, errno.ENOSPC)], 0.0)
    assert barrier.errno == errno.ENOSPC
    assert (barrier.error or "").startswith("policy row 1 100")
    assert reconciler.barriers.over == [barrier]


def test_a_row_withdrawn_and_wanted_again_in_one_event_is_waited_for() -> None:
    """Nobody is told of the moment in between; the barrier is met when the row is back."""
    reconciler = Reconciler()
    barrier = reconciler.barriers.take([reconciler.ipcache.want(ROW, 100)], must_be_present=True)
    reconciler.ipcache.drop(ROW)
    reconciler.ipcache.want(ROW, 100)
    reconciler.settle()
    assert not barrier.is_over
    reconciler.written([(write, 0) for write in reconciler.batch(0.0)], 0.0)
    assert barrier.is_met


def test_a_withdrawn_row_fails_who_needs_it_and_satisfies_who_removes_it() -> None:
    """`must_be_present` is the difference."""
    reconciler = Reconciler()
    reference = reconciler.ipcache.want(ROW, 100)
    needs = reconciler.barriers.take([reference], must_be_present=True)
    removes = reconciler.barriers.take([reference])
    reconciler.ipcache.drop(ROW)
    reconciler.settle()
    assert needs.error is not None
    assert removes.is_met
    assert not reconciler.barriers._waiting


def test_a_cancelled_barrier_leaves_nothing() -> None:
    """However many rows it waited for, and whoever else waits for them."""
    revisions = Revisions()
    table = KernelTable(Table.GROUPS, revisions)
    barriers = Barriers({Table.GROUPS: table})
    references = [table.want(key, 1) for key in range(3)]
    first, second = barriers.take(references), barriers.take(references[:1])
    barriers.cancel(first)
    barriers.row_settled(Table.GROUPS, 0, revisions.last, is_present=True)
    assert second.is_met
    assert barriers.over == [second]
    assert not barriers._waiting


# --- identities --------------------------------------------------------------------------------------------------------------


class Rows:
    """Which identities rows in the kernel name."""

    def __init__(self) -> None:
        self.named: set[int] = set()

    def __call__(self, identity: int) -> bool:
        return identity in self.named


X, Y = frozenset({"fqdn:x.", LABEL_WORLD}), frozenset({"fqdn:y.", LABEL_WORLD})


def test_an_identity_retires_only_after_a_pass_that_began_when_nothing_named_it() -> None:
    """Not while a row names it, not while a flow remembers it, not by a pass that began before."""
    rows = Rows()
    identities = IdentityAllocator(100, rows)
    number = identities.acquire(X)
    rows.named.add(number)
    identities.release(number)
    assert not identities.unused(), "a row on its way to the kernel or in it names the identity"
    rows.named.clear()
    candidates = identities.unused()
    assert list(identities.retire(candidates, frozenset({number}))) == []
    assert list(identities.retire(candidates, frozenset())) == [number]
    assert identities.acquire(X) > number, "I4: a number is never given twice"


def test_an_identity_used_again_during_the_pass_does_not_retire() -> None:
    """Also when it is unused again at the pass's end: a flow may have begun that the pass did not see."""
    identities = IdentityAllocator(100, Rows())
    number = identities.acquire(X)
    identities.release(number)
    candidates = identities.unused()
    assert identities.acquire(X) == number
    assert list(identities.retire(candidates, frozenset())) == []
    identities.release(number)
    assert list(identities.retire(candidates, frozenset())) == []
    assert list(identities.retire(identities.unused(), frozenset())) == [number]


def test_the_bound_holds_what_comes_and_not_what_goes() -> None:
    """Taking something away must always be possible."""
    identities = IdentityAllocator(3, Rows())  # host, world, one more
    identities.acquire(X)
    with pytest.raises(NoRoom, match=r"all 3 identities"):
        identities.acquire(Y)
    assert identities.acquire(Y, beyond_bound=True) > identities.acquire(X)


def test_a_removal_that_needs_a_new_identity_passes_the_bound() -> None:
    """A name goes from an address of three: what is left keeps passing, and nothing is raised."""
    world = World(Settings(upstreams=(UPSTREAM,), identities_max=7))
    world.start(allow("a.example.", "*.example."), allow("a.*", port=80, name="q"))
    assert world.resolve("a.example.", "192.0.2.101").addresses == ["192.0.2.101"]
    before = len(world.engine.identities)
    world.engine.identities.identities_max = before
    world.apply(allow("a.example.", "*.example."))
    world.advance(1.1)
    assert world.passes("192.0.2.101", 443)
    assert not world.passes("192.0.2.101", 80)


# --- DNS cache and name manager ---------------------------------------------------------------------------------------------


def test_no_end_is_left_of_pairs_that_went() -> None:
    """A full map and a client that asks again and again: each reply is learned and taken back."""
    cache = DnsCache(60.0, 86_400.0)
    for second in range(10_000):
        pair = Pair(SCOPE_SHARED, "a.example.", A)
        cache.add(pair, 3_600, float(second))
        assert cache.remove(pair)
    assert not cache._ends


@given(st.lists(st.tuples(st.sampled_from("ukrd"), st.sampled_from((A, B)), st.integers(0, 30)), max_size=40))
def test_each_end_comes_up_once_and_in_time(steps: list[tuple[str, bytes, int]]) -> None:
    """Against a dictionary: updated, kept, removed and looked at in any order."""
    cache, naive, now = DnsCache(5.0, 1e9), dict[bytes, float](), 0.0
    lives: dict[bytes, float] = {}
    for step, address, amount in steps:
        pair = Pair(SCOPE_SHARED, "a.example.", address)
        match step:
            case "u":
                lifetime = cache.lifetimes.get(pair)
                assert (lifetime is None) == (address not in naive)
                if lifetime is None:
                    cache.add(pair, amount, now)
                else:
                    cache.extend(lifetime, amount, now)
                lives[address] = max(lives.get(address, 0.0), now + max(5, amount))
                naive[address] = max(naive.get(address, 0.0), lives[address])
            case "k" if address in naive:
                naive[address] = max(naive[address], now + amount)
                cache.keep(pair, naive[address])
            case "r":
                assert cache.remove(pair) == (naive.pop(address, None) is not None)
                lives.pop(address, None)
            case "d":
                now += amount
                due_now = cache.due(now)
                assert sorted(pair.address for pair in due_now) == sorted(a for a, end in naive.items() if end < now)
                for gone in due_now:
                    cache.remove(gone)
                    del naive[gone.address], lives[gone.address]
        deadline = cache.next_deadline()
        assert not naive or (deadline is not None and deadline <= min(naive.values()))


def test_names_know_their_selectors_however_both_come_and_go() -> None:
    """The index in the manager says what matching every known name again would."""
    world = World()
    world.start(any_question())
    names = world.engine.names
    patterns = [Fqdn("a.example."), Fqdn("*.example."), Fqdn("**.example."), Fqdn("*", ("b.example.",)), Fqdn("b.*")]

    def known() -> dict[str, set[Fqdn]]:
        return {name: {s.peer for s in names.selectors_of(name)} for name in names.cache.scopes_by_name}

    def matched() -> dict[str, set[Fqdn]]:
        return {name: {s.peer for s in names._match(name)} for name in names.cache.scopes_by_name}

    for place, peer in enumerate(patterns):
        world.resolve(("a.example.", "b.example.", "x.a.example.", "b.test.", "c.")[place], f"192.0.2.{101 + place}")
        names.register(peer)
        assert known() == matched()
    for peer in patterns[::-1]:
        names.unregister(peer)
        assert known() == matched()
    assert not names.selectors


def test_over_the_bound_of_one_name_the_address_longest_unused_goes() -> None:
    """Answered is used, whatever the TTL; so is a packet of a flow."""
    world = crowded("192.0.2.1", "192.0.2.2", "192.0.2.3")
    world.advance(61.0)
    world.last_seen[1, packed("192.0.2.1")] = world.now - 60.5  # no flow of it is live
    world.resolve("a.example.", "192.0.2.2", ttl=600)
    world.resolve("a.example.", "192.0.2.4", ttl=600)
    assert open_of(world) == [1, 2, 4], "3 was neither answered again nor used"
    world.advance(1.0)
    world.resolve("a.example.", "192.0.2.5", ttl=600)
    assert open_of(world) == [2, 4, 5], "1 was used later than its answer, but before the others'"


def test_an_address_with_a_live_flow_is_never_given_up_for_another() -> None:
    """If all have one the new answer is SERVFAIL, and counted; a minute after the last packet of one there is room."""
    world = crowded("192.0.2.1", "192.0.2.2", "192.0.2.3")
    world.advance(100.0)
    for number in (1, 2, 3):
        world.last_seen[1, packed(f"192.0.2.{number}")] = world.now
    assert world.resolve("a.example.", "192.0.2.4", ttl=600).rcode == "SERVFAIL"
    assert open_of(world) == [1, 2, 3]
    assert world.engine.proxy.counters["replies without room"] == 1
    world.advance(30.0)
    for number in (1, 3):
        world.last_seen[1, packed(f"192.0.2.{number}")] = world.now
    world.advance(31.0)
    assert world.resolve("a.example.", "192.0.2.4", ttl=600).rcode == "NOERROR"
    assert open_of(world) == [1, 3, 4]


def test_an_answer_with_more_addresses_than_a_name_may_have_is_refused() -> None:
    """None of them is open: a part would be a first packet lost."""
    world = crowded("192.0.2.1")
    assert world.resolve("a.example.", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5").rcode == "SERVFAIL"
    assert open_of(world) == [1]


def test_a_reply_waits_for_the_look_at_the_flows_and_not_beyond_the_deadline() -> None:
    """What flows say may come late, or never."""
    world = crowded("192.0.2.1", "192.0.2.2", "192.0.2.3")
    world.auto = False
    asker = world.ask("a.example.")
    world.reply(asker, "192.0.2.4")
    assert not world.answers_of(asker)
    world.advance(1.1)
    assert world.answer_of(asker).rcode == "SERVFAIL"
    assert not world.engine.proxy.transactions


def test_a_crowd_looks_at_one_address_for_each_that_comes() -> None:
    """A name that rotates through ten thousand addresses costs a look for each, not one for all it holds; memory neither."""
    crowd = Crowd(((packed(f"192.0.2.{number}"), 0.0, 100.0) for number in range(100)), live_s=60.0)
    looks = 0
    for number in range(10_000):
        now = 1.0 + number / 100
        new = packed(f"198.51.{100 + number // 250}.{number % 250}")
        (leaving,) = crowd.longest_unused(1, {new}, now)
        if not crowd.is_known(leaving, now):
            crowd.seen(leaving, None, now)
            looks += 1
        assert crowd.longest_unused(1, {new}, now) == [leaving]
        crowd.gone(leaving)
        crowd.answered(new, now, now + 100.0)
    assert looks == 10_000
    assert len(crowd._order) <= 2 * 100 + HEAP_SLACK + 1
    assert len(crowd._looked_at) + len(crowd._live_until) <= 200


def crowded(*addresses: str) -> World:
    """A name that may have three addresses, and has these."""
    world = World(Settings(upstreams=(UPSTREAM,), addresses_per_name_max=3))
    world.start(allow("a.example."))
    for address in addresses:
        world.resolve("a.example.", address, ttl=600)
        world.advance(0.1)
    return world


def open_of(world: World) -> list[int]:
    return [number for number in range(1, 10) if world.passes(f"192.0.2.{number}")]
