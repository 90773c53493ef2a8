"""Long work in slices: what stands between two of them, and what is left when the rest cannot be."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from agent.core.engine import ENDS_AT_ONCE
from agent.core.events import Tick
from agent.core.metadata import Metadata
from agent.core.multimap import MultiMap
from agent.core.types import SCOPE_SHARED, SCOPE_STATIC, IpcacheKey, LabelSet, Prefix, Table, packed
from tests.sim.world import World, allow, any_question

NAMES = tuple(f"{letter}.example." for letter in "abcdef")


def known(world: World) -> None:
    """Six names that may be asked, each with an address."""
    world.engine.names.pairs_at_once = 1
    for place, name in enumerate(NAMES, 1):
        world.resolve(name, f"198.51.100.{place}")


def until(world: World, condition: Callable[[], bool]) -> int:
    """How many ticks that takes."""
    for count in range(100):
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


def test_a_policy_waits_for_the_rows_of_every_slice() -> None:
    """With a kernel that refuses the last ones for a while: not before they are written."""
    world = World()
    world.start(any_question())
    known(world)
    world.auto = False
    world.apply(any_question(), allow("*.example."), ticket="t")
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
