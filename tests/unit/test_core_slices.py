"""Long work in slices: what stands between two of them, and what is left when the rest cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.engine import ENDS_AT_ONCE
from agent.core.events import Tick
from agent.core.metadata import Metadata
from agent.core.multimap import MultiMap
from agent.core.rules import Cidr, Origin, Policy, Ports, Rule
from agent.core.settings import Settings
from agent.core.types import (
    PROTOCOL_UDP,
    SCOPE_OWN_FIRST,
    SCOPE_SHARED,
    SCOPE_STATIC,
    Direction,
    IpcacheKey,
    LabelSet,
    PolicyKey,
    Prefix,
    Table,
    packed,
)
from tests.sim.world import UPSTREAM, World, allow, any_question, subject

NAMES = tuple(f"{letter}.example." for letter in "abcdef")


def known(world: World) -> None:
    """Six names that may be asked, each with an address."""
    world.engine.names.pairs_at_once = 1
    for place, name in enumerate(NAMES, 1):
        world.resolve(name, f"198.51.100.{place}")


def until(world: World, condition: Callable[[], bool]) -> int:
    """How many ticks that takes."""
    for count in range(1_000):
        if condition():
            return count
        world.handle(Tick())
    raise AssertionError("never")


# --- selectors and known names ---------------------------------------------------------------------------------------------


def test_a_policy_is_in_force_only_when_every_known_name_has_its_labels() -> None:
    """Else an address the new policy allows would be shut for a while (I5); meanwhile questions are answered."""
    world = World()
    world.start(any_question())
    known(world)
    world.apply(any_question(), allow("*.example."), ticket="t")
    assert "t" not in world.settled
    assert not any(world.passes(f"198.51.100.{place}") for place in range(1, 7))
    assert world.resolve("g.example.", "198.51.100.7").addresses == ["198.51.100.7"]
    assert until(world, lambda: "t" in world.settled) >= len(NAMES) - 2
    assert all(world.passes(f"198.51.100.{place}") for place in range(1, 8))


@pytest.mark.parametrize("target", ["**.example.", "198.51.100.0/24"])
def test_a_policy_waits_for_the_rows_of_every_slice(target: str) -> None:
    """With a kernel that refuses the last ones for a while: not before they are written."""
    world = World()
    world.start(any_question(), allow("*.example.", port=80))
    known(world)
    world.engine.sets.rows_at_once = 4
    world.auto = False
    world.apply(any_question(), allow("*.example.", port=80), allow(target), ticket="t")
    changed = "fqdn:**.example." if target[0] == "*" else f"cidr:{target}"
    labels = world.engine.identities.labels_by_identity
    ipcache = world.engine.reconciler.ipcache.desired
    until(world, lambda: sum(changed in labels[int(str(row.value))] for row in ipcache.values()) >= 3)
    world.quiesce()
    world.kernel.fail(Table.IPCACHE, 1_000)
    until(world, lambda: not world.engine.groups.is_behind)
    for _ in range(3):
        world.quiesce()
        world.advance(0.1)
    assert "t" not in world.settled
    world.kernel.failing.clear()
    world.auto = True
    world.quiesce()
    world.advance(1.0)
    assert world.settled == {"start": None, "t": None}
    assert all(world.passes(f"198.51.100.{place}") for place in range(1, 7))


def test_a_policy_that_finds_no_room_half_way_is_refused_and_leaves_nothing() -> None:
    """The names that had its labels already lose them again."""
    world = World()
    world.start(any_question(), allow(*(f"*{letter}.example." for letter in "abc")))
    known(world)
    before = {key: world.engine.identities.labels_by_identity[row] for key, row in rows(world).items()}
    world.engine.identities.identities_max = len(world.engine.identities) + 2
    world.apply(any_question(), allow(*(f"*{letter}.example." for letter in "abc"), "**.example."), ticket="t")
    assert "t" not in world.settled, "one identity of its own and one combination there is room for"
    until(world, lambda: "t" in world.settled)
    assert "identities are in use" in (world.settled["t"] or "")
    until(world, lambda: not world.engine.groups.is_behind)
    assert {key: world.engine.identities.labels_by_identity[row] for key, row in rows(world).items()} == before
    assert all("**" not in selector.label for name in NAMES for selector in world.engine.names.selectors_of(name))
    assert not world.engine.reconciler.barriers._waiting


def rows(world: World) -> dict[IpcacheKey, int]:
    found = {}
    for key, row in world.engine.reconciler.ipcache.realized.items():
        assert isinstance(key, IpcacheKey)
        assert isinstance(row.value, int)
        found[key] = row.value
    return found


def test_a_selector_that_comes_back_while_it_is_leaving() -> None:
    """Names that still have the old one's label and names that lost it already: all have the new one's in the end."""
    world = World()
    world.start(any_question(), allow("*.example."))
    known(world)
    world.apply(any_question(), ticket="gone")
    assert world.settled["gone"] is None
    world.now += 1.1
    world.handle(Tick())
    world.handle(Tick())
    assert world.engine.groups.is_behind
    world.apply(any_question(), allow("*.example."), ticket="back")
    until(world, lambda: "back" in world.settled and not world.engine.groups.is_behind)
    assert all(world.passes(f"198.51.100.{place}") for place in range(1, 7))
    (selector,) = world.engine.names.selectors.values()
    assert set(selector.bags[SCOPE_SHARED]) == {packed(f"198.51.100.{place}") for place in range(1, 7)}
    assert len(world.engine.names._matched) <= 2, "nothing is kept of the selector that is gone"


# --- many sets --------------------------------------------------------------------------------------------------------------


def test_an_address_is_named_only_when_every_set_has_its_rows() -> None:
    """A new combination of labels: the reply is held over all the slices, others are answered between them (I2)."""
    world = World()
    policies = [allow("a*.example.", "*a.example.", port=1_000 + n, app=f"e{n}", name=f"p{n}") for n in range(1, 9)]
    world.start(*policies, endpoints={n: f"192.0.2.{10 + n}" for n in range(1, 9)})
    world.engine.sets.rows_at_once = 2
    asker = world.ask("aa.example.")
    world.reply(asker, "198.51.100.1")
    assert not world.answers_of(asker)
    assert not world.passes("198.51.100.1", 1_001)
    assert world.resolve("ab.example.", "198.51.100.2").addresses == ["198.51.100.2"], "nothing new: no wait"
    assert until(world, lambda: bool(world.answers_of(asker))) >= 3
    assert all(world.passes("198.51.100.1", 1_000 + n, endpoint=n) for n in range(1, 9))


# --- networks and known addresses --------------------------------------------------------------------------------------------


def test_a_network_comes_and_goes_over_known_addresses_in_slices() -> None:
    """In force only when every address inside has its label; meanwhile questions are answered, and new addresses have it."""
    world = World()
    world.start(any_question(), allow("*.example."))
    known(world)
    world.engine.sets.rows_at_once = 4
    world.apply(any_question(), allow("*.example."), allow("198.51.100.0/24", port=80), ticket="t")
    until(world, lambda: labelled(world) == 2)
    assert "t" not in world.settled
    assert world.resolve("g.example.", "198.51.100.7").addresses == ["198.51.100.7"]
    assert not any(world.passes(f"198.51.100.{place}", 80) for place in range(1, 8))
    until(world, lambda: "t" in world.settled)
    assert all(world.passes(f"198.51.100.{place}", port) for place in range(1, 8) for port in (80, 443))
    world.apply(any_question(), allow("*.example."), ticket="without")
    until(world, lambda: "without" in world.settled)
    world.now += 1.1
    assert until(world, lambda: labelled(world) == 0) >= 3


def labelled(world: World) -> int:
    """How many learned addresses have the label of the network."""
    labels = world.engine.identities.labels_by_identity
    return sum("cidr:198.51.100.0/24" in labels[row] for key, row in rows(world).items() if key.scope == SCOPE_SHARED)


# --- new sets ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", range(0, 34, 3))
def test_a_combination_that_comes_while_a_set_is_being_built(ticks: int) -> None:
    """Wherever the preparation stands: the set has its rows when it is in force, and the reply does not wait for that."""
    world = World()
    world.start(any_question(), allow("b.example."))
    world.engine.sets.rows_at_once = 1
    world.apply(any_question(), allow("b.example."), allow("a*.example.", "198.51.100.0/24"), allow("*a.example.", port=80))
    for _ in range(ticks):
        world.handle(Tick())
    assert world.resolve("aa.example.", "198.51.100.1").addresses == ["198.51.100.1"]
    assert world.engine.groups.is_behind
    until(world, lambda: not world.engine.groups.is_behind and not world.engine.sets.is_behind)
    assert world.passes("198.51.100.1", 443)
    assert world.passes("198.51.100.1", 80)


def test_a_set_that_was_begun_gives_its_number_to_nobody_else() -> None:
    """The process dies while a set is being built: rows of it may be in the kernel."""
    world = World()
    world.start(any_question(), allow("a.example."))
    world.engine.sets.rows_at_once = 1
    world.apply(any_question(), allow("a.example.", "b.example."))
    number = max(world.engine.sets.by_number)
    until(world, lambda: max(world.engine.sets.by_number) > number)
    begun = max(world.engine.sets.by_number)
    world.restart()
    assert min(world.engine.sets.by_number) > begun


def test_a_policy_that_turns_out_not_to_fit_leaves_nothing() -> None:
    """For what is known already it needs more than for itself; what is asked for next finds its rows gone."""
    world = World(Settings(upstreams=(UPSTREAM,), policy_rows_per_set_max=20))
    world.start(any_question(), allow(*(f"{letter}*.example." for letter in "abcde")))
    for number in range(32):
        letters = "".join(letter for place, letter in enumerate("abcde") if number >> place & 1)
        world.resolve(f"{letters or 'f'}.example.", f"198.51.100.{number}")
    before = dict(world.kernel.rows[Table.POLICY])
    world.engine.sets.rows_at_once = 4
    patterns = [f"*{letter}.example." for letter in "abcde"]
    world.apply(any_question(), allow(*(f"{letter}*.example." for letter in "abcde"), *patterns), ticket="much")
    world.apply(any_question(), allow(*(f"{letter}*.example." for letter in "abcde")), ticket="as before")
    until(world, lambda: "much" in world.settled)
    assert "more rows than one set holds: 20" in (world.settled["much"] or "")
    assert len(world.kernel.rows[Table.POLICY]) > len(before)
    until(world, lambda: "as before" in world.settled)
    assert world.settled["as before"] is None
    assert world.engine.names.selectors.keys() == world.engine.selector_cache.users_by_selector.keys()
    assert {key.set for key in world.kernel.rows[Table.POLICY] if isinstance(key, PolicyKey)} == in_force(world)


def test_an_old_set_goes_in_slices() -> None:
    """Its rows, its selectors and what they held."""
    world = World()
    world.start(any_question(), allow(*(f"n{number}.example." for number in range(40))))
    world.engine.sets.rows_at_once = 8
    world.apply(any_question(), ticket="t")
    until(world, lambda: "t" in world.settled)
    world.now += 1.1
    assert until(world, lambda: not world.engine.names.selectors) >= 10
    assert {key.set for key in world.kernel.rows[Table.POLICY] if isinstance(key, PolicyKey)} == in_force(world)


def in_force(world: World) -> set[int]:
    return {group.set for group in world.engine.groups.groups.values()}


# --- scopes ------------------------------------------------------------------------------------------------------------------


def named_server(*names: str) -> Policy:
    """A server of its own, which teaches: the endpoint gets a scope of its own (decision 5)."""
    peers = (Cidr(Prefix.parse("203.0.113.0/24")),)
    rule = Rule(Direction.EGRESS, peers, (Ports(PROTOCOL_UDP, 53, 53),), names=names, origin=Origin("s", 1))
    return Policy("s", subject("e1"), (rule,), default_deny_egress=True, default_deny_ingress=False)


def test_a_scope_is_filled_and_forgotten_in_slices() -> None:
    """In force when all is copied; given up again, all of it is forgotten, unless the endpoint comes back to it half way."""
    world = World()
    world.start(any_question(), allow("*.example."), endpoints={1: "192.0.2.11", 2: "192.0.2.12"})
    known(world)
    world.engine.sets.rows_at_once = 4
    own = SCOPE_OWN_FIRST + 1
    world.apply(named_server("*.example."), allow("*.example."), ticket="own")
    until(world, lambda: len(world.engine.dns_cache.addresses_by_scope.get(own, ())) == 3)
    assert "own" not in world.settled
    until(world, lambda: "own" in world.settled)
    assert all(world.passes(f"198.51.100.{place}") for place in range(1, 7))
    world.apply(any_question(), allow("*.example."), ticket="shared")
    until(world, lambda: "shared" in world.settled)
    world.now += 1.1
    until(world, lambda: len(world.engine.dns_cache.addresses_by_scope[own]) == 3)
    world.apply(named_server("*.example."), allow("*.example."), ticket="own again")
    until(world, lambda: "own again" in world.settled)
    until(world, lambda: not world.engine.groups.is_behind)
    assert all(world.passes(f"198.51.100.{place}") for place in range(1, 7))
    world.remove_endpoint(1)
    assert until(world, lambda: own not in world.engine.dns_cache.addresses_by_scope) >= 3


# --- what the process before left --------------------------------------------------------------------------------------------


def test_what_only_the_process_before_wanted_goes_in_slices() -> None:
    """A restart with another policy: a second after it is in force, some rows at a time."""
    world = World()
    world.start(any_question(), allow("*.example."), allow("198.51.100.0/24", port=80))
    known(world)
    world.restart(any_question(), allow("a.example."))
    world.engine.sets.rows_at_once = 4
    until(world, lambda: "start" in world.settled and not world.engine.groups.is_behind)
    assert world.engine.groups.is_inheriting
    world.now += 1.1
    assert until(world, lambda: not world.engine.groups.is_inheriting) >= 3
    assert [key.prefix.address for key in rows(world) if key.scope == SCOPE_SHARED] == [packed("198.51.100.1")]


# --- ends -------------------------------------------------------------------------------------------------------------------


def test_ends_at_one_time_are_taken_in_slices() -> None:
    """A tick takes some and is due again at once; in the end all are gone."""
    world = World()
    world.start(allow("*.example."))
    count = 3 * ENDS_AT_ONCE
    for place in range(count):
        world.resolve(f"n{place}.example.", f"198.51.100.{place}", ttl=60)
    world.now += 61.0
    world.handle(Tick())
    assert len(world.engine.dns_cache) == count - ENDS_AT_ONCE
    deadline = world.engine.next_deadline()
    assert deadline is not None
    assert deadline <= world.now
    until(world, lambda: len(world.engine.dns_cache) == 0)
    assert not rows(world).keys() - {IpcacheKey(SCOPE_STATIC, Prefix.of(packed("192.0.2.11")))}


# --- what a million addresses are kept in -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("kl"), st.integers(0, 3)), max_size=40))
def test_a_multimap_is_a_dictionary_of_sets_in_order(steps: list[tuple[bool, str, int]]) -> None:
    """Whatever is added and discarded, also what is there or is not."""
    several: MultiMap[str, int] = MultiMap()
    naive: dict[str, dict[int, None]] = {}
    for is_added, key, value in steps:
        there = value in naive.get(key, ())
        if is_added:
            assert several.add(key, value) is not there
            naive.setdefault(key, {})[value] = None
        else:
            assert several.discard(key, value) is there
            naive.get(key, {}).pop(value, None)
            if not naive.get(key, True):
                del naive[key]
        assert {k: list(several.of(k)) for k in several} == {k: list(values) for k, values in naive.items()}
        assert len(several) == len(naive)
        assert not several.of("elsewhere")


LABELS: tuple[LabelSet, ...] = (frozenset({"fqdn:a."}), frozenset({"fqdn:a.", "fqdn:b."}), frozenset({"fqdn:c."}))


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from((*LABELS, None))), max_size=30))
def test_a_prefix_has_the_labels_of_all_its_owners(steps: list[tuple[str, LabelSet | None]]) -> None:
    """Whoever attaches, changes or takes back, in any order."""
    metadata, naive = Metadata(), dict[str, LabelSet]()
    key = IpcacheKey(SCOPE_SHARED, Prefix.of(packed("198.51.100.1")))
    for resource, labels in steps:
        if labels is None:
            assert metadata.remove(key, resource) is (naive.pop(resource, None) is not None)
        else:
            assert metadata.upsert(key, resource, labels) is (naive.get(resource) != labels)
            naive[resource] = labels
        assert metadata.label_set(key) == (frozenset({"reserved:world"}).union(*naive.values()) if naive else None)
        assert {r: metadata.attached(key, r) for r in "xyz" if metadata.attached(key, r) is not None} == naive
