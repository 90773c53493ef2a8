"""How long an address is open: bug cases about lifetimes, flows that use an address, and addresses that names share.

Shown elsewhere, and not written twice:

    case 18                           tests/netns (two endpoints and a live connection), tests/sim/test_simulation.py (I5)
    case 64, the reason of the drop   `drops` names what was seen on the address (case 30); that it says "expired" is not built
    case 65, the hour's bound         tests/sim/test_gate.py
"""

from __future__ import annotations

import itertools

import pytest

from agent.core.dns_cache import Pair
from agent.core.events import Tick
from agent.core.types import SCOPE_SHARED, packed
from tests import packets
from tests.bug_scene import Scene

A_TEST = "a.test:443/tcp"


def lifetime_of(scene: Scene, name: str, address: str) -> float:
    """Seconds that the listing shows."""
    return scene.world.engine.dns_cache.lifetimes[Pair(SCOPE_SHARED, name, packed(address))].lives_until - scene.world.now


def test_case_059_a_ttl_of_zero_lives_for_the_floor() -> None:
    """It is no error, and a client that connects at once or within the minute gets through."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 0 A 198.51.100.60")
    assert lifetime_of(scene, "a.test.", "198.51.100.60") == 60
    scene.at(0.3)
    assert scene.passes("198.51.100.60")
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 0 A 198.51.100.60")
    scene.at(55)
    assert scene.passes("198.51.100.60")
    assert not scene.passes("198.51.100.61")


def test_case_061_an_expiry_pass_in_the_same_tick_takes_nothing() -> None:
    """Learned and looked through at the same time, and once a second after it."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 0 A 198.51.100.61")
    scene.world.handle(Tick())
    for second in range(61):
        scene.at(second)
        assert scene.is_in_kernel("198.51.100.61"), second
    scene.at(61)
    assert not scene.is_in_kernel("198.51.100.61")


def test_case_062_the_ttl_of_an_alias_does_not_matter() -> None:
    """The address record's own counts."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 1 CNAME b.test.", "b.test 90 A 198.51.100.62")
    assert lifetime_of(scene, "a.test.", "198.51.100.62") == 90
    for second in (2, 50):
        scene.at(second)
        assert scene.passes("198.51.100.62")


def test_case_064_an_application_that_keeps_the_address() -> None:
    """A connection keeps it open for a minute after its last packet; without one it closes with its lifetime."""
    scene = Scene("a.test:443/tcp\nb.test:443/tcp")
    scene.resolve("a.test", "a.test 5 A 198.51.100.64")
    scene.resolve("b.test", "b.test 5 A 198.51.100.66")
    scene.at(20)
    assert scene.passes("198.51.100.64")
    scene.at(75)
    assert not scene.passes("198.51.100.66")
    scene.at(95)
    assert not scene.passes("198.51.100.64")
    (seen,) = scene.world.engine.proxy.history.on(packed("198.51.100.64"), scene.world.now)
    assert (seen.name, seen.until < scene.world.now) == ("a.test.", True)


def test_case_065_a_running_flow_keeps_the_address_for_new_ones() -> None:
    """Packets every ten seconds for six minutes: never cut, and a new connection passes with no new lookup."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "198.51.100.65")
    assert scene.packet("198.51.100.65", 443, source_port=40_000).passes
    for second in range(10, 371, 10):
        scene.at(second)
        assert scene.packet("198.51.100.65", 443, source_port=40_000, flags=packets.ACK).passes
    scene.at(371)
    assert scene.passes("198.51.100.65")
    scene.at(440)
    assert not scene.passes("198.51.100.65")


def test_case_067_an_answer_of_the_other_family_removes_nothing() -> None:
    """Answers add up, an empty one too."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "2001:db8::61", qtype="AAAA")
    assert scene.passes("2001:db8::61")
    scene.at(20)
    scene.resolve("a.test", "198.51.100.67")
    assert scene.passes("2001:db8::61")
    scene.at(40)
    scene.resolve("a.test", qtype="AAAA")
    assert scene.passes("2001:db8::61")
    assert scene.passes("198.51.100.67")


def test_case_068_an_answer_from_a_cache_brings_the_address_back() -> None:
    """What was forgotten meanwhile is in the kernel again before the second reply leaves."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 3600 A 198.51.100.68")
    names = scene.world.engine.names
    for pair in list(names.cache.lifetimes):
        names.forget(pair)
    scene.world.handle(Tick())
    assert not scene.passes("198.51.100.68")
    scene.world.auto = False
    asker = scene.ask("a.test")
    with pytest.raises(ValueError):  # no answer yet
        scene.reply(asker, "a.test 3000 A 198.51.100.68")
    while not scene.is_in_kernel("198.51.100.68"):
        assert not scene.world.answers_of(asker)
        scene.world.write_one()
    assert scene.answer_of(asker).addresses == ["198.51.100.68"]
    assert scene.passes("198.51.100.68")


def test_case_070_entries_expire() -> None:
    """There at half a minute, gone from the kernel a while after its end, with nobody asking."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 10 A 198.51.100.70")
    scene.at(30)
    assert scene.is_in_kernel("198.51.100.70")
    scene.at(75)
    assert not scene.is_in_kernel("198.51.100.70")


def test_case_071_an_address_that_is_answered_no_more_goes() -> None:
    """Though the name lives on."""
    scene = Scene(A_TEST)
    scene.resolve("a.test", "a.test 10 A 198.51.100.171")
    for second in range(60, 200, 30):
        scene.at(second)
        scene.resolve("a.test", "a.test 10 A 198.51.100.172")
    scene.at(200)
    assert not scene.passes("198.51.100.171")
    assert scene.passes("198.51.100.172")
    assert scene.learned == {"a.test.": {"198.51.100.172"}}


def test_case_072_an_address_that_is_answered_again_is_never_absent() -> None:
    """Ten minutes, a pass each second, a look at the kernel's row each tenth of one."""
    scene = Scene(A_TEST)
    for tenth in range(6_000):
        scene.at(tenth / 10)
        if tenth % 400 == 0:
            scene.resolve("a.test", "a.test 10 A 198.51.100.72")
        assert scene.is_in_kernel("198.51.100.72"), tenth / 10
    scene.at(700)
    assert not scene.is_in_kernel("198.51.100.72")


@pytest.mark.parametrize("order", ["aba", "bab", "ab", "ba", "bba"])
def test_case_074_ports_of_all_names_on_an_address_are_united(order: str) -> None:
    """In every order of arrival; with the narrow name alone the address stays narrow."""
    scene = Scene("a.test\nb.test:443/tcp")
    asked = set()
    for name in order:
        scene.resolve(f"{name}.test", "198.51.100.74")
        asked.add(name)
        assert scene.passes("198.51.100.74", 443)
        assert scene.passes("198.51.100.74", 80) == ("a" in asked)


def test_case_075_an_address_learned_late_keeps_the_ports_of_its_rule() -> None:
    """A name below a pattern, after the policy came."""
    scene = Scene("*.a.test:443/tcp")
    scene.resolve("x.a.test", "198.51.100.75")
    assert not scene.passes("198.51.100.75", 22)
    assert scene.passes("198.51.100.75", 443)


def test_case_077_a_name_opens_no_address_by_itself() -> None:
    """Without a lookup nothing is open; with one, its address alone."""
    scene = Scene(A_TEST)
    for address in ("203.0.113.8", "203.0.113.9"):
        assert not scene.passes(address)
    scene.resolve("a.test", "203.0.113.8")
    assert scene.passes("203.0.113.8")
    assert not scene.passes("203.0.113.9")


@pytest.mark.parametrize("lines", list(itertools.permutations(["a.test:80/tcp", "a.test:443/tcp"])))
def test_case_081_one_name_in_several_lines(lines: tuple[str, ...]) -> None:
    """The ports are united."""
    scene = Scene("\n".join(lines))
    scene.resolve("a.test", "198.51.100.82")
    assert [scene.passes("198.51.100.82", port) for port in (80, 443, 22)] == [True, True, False]
