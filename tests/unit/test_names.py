"""Names and patterns, one promise a test; the peers' cases are in tests/cases, a naive twin is here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import cache

import dns.name
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.names import (
    EVERY_NAME,
    NamePattern,
    NameSyntaxError,
    PatternIndex,
    from_wire,
    is_ancestor_of_match,
    matches_everything,
    normalise_name,
    normalise_pattern,
)

# --- spelling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("Cilium.IO", "cilium.io."),
        ("cilium.io.", "cilium.io."),
        ("*", EVERY_NAME),
        ("***.", EVERY_NAME),
        ("*.*", "*.*."),
        ("****.Example.com", "**.example.com."),
        ("a***b.**.example.com", "a*b.*.example.com."),
        ("**a.example.com", "*a.example.com."),
        ("bücher.example", "xn--bcher-kva.example."),
        ("BÜCHER。example", "xn--bcher-kva.example."),
        ("*.bücher.example", "*.xn--bcher-kva.example."),
        ("_sip._tcp.example.org", "_sip._tcp.example.org."),
    ],
)
def test_one_meaning_has_one_spelling(text: str, pattern: str) -> None:
    """Case, final dot, alphabet and runs of stars never make two selectors out of one."""
    assert normalise_pattern(text) == pattern
    assert normalise_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "write a name"),
        ("192.0.2.7", "cidr:192.0.2.7/32"),
        ("192.0.2.7.", "cidr:192.0.2.7/32"),
        ("2001:db8::7", "cidr:2001:db8::7/128"),
        ("[2001:db8::7]", "cidr:2001:db8::7/128"),
        ("fe80::1%eth0", "cidr:fe80::1/128"),
        ("１９２.0.2.7", "cidr:192.0.2.7/32"),
        ("300.0.2.7", "at most 255"),
        ("http://a.example", "name in it alone"),
        ("10.0.0.0/8", "toCIDR"),
        ("a.example:443", "toPorts"),
        ("a..example", "one dot"),
        (".a.example", "none in front"),
        (" a.example", "take it out"),
        ("a.example\u200b", "take it out"),
        ("a\ufe0f.example", "U\\+FE0F"),
        ("a\\.b.example", "take it out"),
        ("x" * 64 + ".example", "63"),
        ("a." * 129, "DNS allows"),
        ("a." * 4096, "DNS allows"),
        ("ü*.example", "a label of its own"),
        ("＊.ü.example", "write '\\*'"),
        ("\ud800.example", "take it out"),
        ("a\u0378.example", "xn-- form|take it out"),
    ],
)
def test_what_is_no_name_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    """A person who reads the sentence knows what to write instead."""
    with pytest.raises(NameSyntaxError, match=remedy):
        normalise_pattern(text)


def test_an_exact_name_has_no_star_and_may_be_the_root() -> None:
    """`matchName` is exact, so a star in it is a mistake, not a pattern."""
    assert normalise_name(".") == "."
    with pytest.raises(NameSyntaxError, match="matchPattern"):
        normalise_name("*.example.com")


@given(st.text(max_size=30))
@example("ß.example")
@example("İ.example")
def test_any_text_is_spelled_once_or_refused(text: str) -> None:
    """Normalising never raises anything else, and normalising again changes nothing."""
    try:
        pattern = normalise_pattern(text)
    except NameSyntaxError:
        return
    assert normalise_pattern(pattern) == pattern
    assert pattern.isascii()


labels_on_the_wire = st.lists(st.binary(min_size=1, max_size=20), max_size=6)


@given(labels_on_the_wire)
@example([b"a.b", b"c\\d", b'"().;@$ ', bytes(range(1, 60))])
def test_text_of_a_wire_name_is_what_dnspython_says(labels: list[bytes]) -> None:
    """Octets of every kind, also dots inside a label, have the presentation form of an independent judge."""
    name = dns.name.Name([*labels, b""]).canonicalize()
    wire = name.to_wire()
    assert wire is not None
    assert from_wire(wire) == name.to_text()


@pytest.mark.parametrize(
    "wire", [b"", b"\1a", b"\2a\0", b"\1a\0\0", b"\1a\0b\0", b"\xc0\x0c", b"\x40" + b"a" * 64 + b"\0", b"\1a" * 128 + b"\0"]
)
def test_what_is_no_wire_name_is_refused(wire: bytes) -> None:
    """Compressed, truncated, with something behind the root, too long: a ValueError, never half a name."""
    with pytest.raises(ValueError, match="wire form"):
        from_wire(wire)


# --- one pattern, beside a naive twin --------------------------------------------------------------------------------

LETTERS = "ab-_"


@cache
def naive_labels(pattern: str, label: str) -> bool:
    """A star eats nothing or one letter more: exponential without the cache, and obvious."""
    if not pattern:
        return not label
    if pattern[0] == "*":
        return naive_labels(pattern[1:], label) or (bool(label) and label[0] in LETTERS and naive_labels(pattern, label[1:]))
    return bool(label) and pattern[0] == label[0] and naive_labels(pattern[1:], label[1:])


def naive_matches(pattern: str, name: str) -> bool:
    if pattern == EVERY_NAME:
        return name == "." or all(label and all(letter in LETTERS for letter in label) for label in name[:-1].split("."))
    wanted, labels = pattern[:-1].split("."), name[:-1].split(".")
    if pattern.startswith("**."):
        depth = len(labels) - len(wanted) + 1
        return depth > 0 and naive_matches(".".join(["*"] * depth + wanted[1:]) + ".", name)
    return len(wanted) == len(labels) and all(
        bool(label) and naive_labels(want, label) for want, label in zip(wanted, labels, strict=True)
    )


name_labels = st.text(LETTERS, min_size=1, max_size=4)
names = st.lists(name_labels | st.sampled_from(["a\\.b", "\\000", "*"]), min_size=1, max_size=4).map(
    lambda labels: ".".join(labels) + "."
)
patterns = st.lists(st.text(LETTERS + "**", min_size=1, max_size=5), min_size=1, max_size=4).map(
    lambda labels: normalise_pattern(".".join(labels))
)


@given(patterns, names | st.just("."))
@example("*a*.b.", "aa.b.")
@example("**.a.", "a.a.")
@example("a*a.", "a.")
@example("*a*a*.", "a.")
@example("*b*ab.", "ab.")
def test_matching_is_what_the_naive_twin_says(pattern: str, name: str) -> None:
    """Two ways to read a pattern, one answer."""
    assert NamePattern(pattern).matches(name) == naive_matches(pattern, name)


@pytest.mark.parametrize("name", ["a", "", "a..b.", ".a.", "..", "a.b"])
@pytest.mark.parametrize("pattern", ["*", "*.", "**.b.", "*.b.", "a.*."])
def test_text_that_is_no_name_matches_nothing(pattern: str, name: str) -> None:
    """Without a final dot, or with an empty label, there is nothing to match."""
    assert not NamePattern(normalise_pattern(pattern)).matches(name)


def test_every_name_means_more_in_a_dns_rule() -> None:
    """A name of odd octets may be asked under `*`, but no selector takes what it resolves to."""
    every = NamePattern(EVERY_NAME)
    assert every.matches("a.example.")
    assert every.matches(".")
    assert not every.matches("a\\.b.example.")
    assert every.matches_question("a\\.b.example.")
    assert not NamePattern("*.example.").matches_question("a\\.b.example.")
    assert matches_everything(normalise_pattern("**."))
    assert not matches_everything("**.com.")


@given(patterns, st.lists(name_labels, max_size=3))
@example("**.b.", ["a"])
@example("a.b.", ["b"])
def test_an_ancestor_has_a_match_below_it_and_others_have_none(pattern: str, labels: list[str]) -> None:
    """Trying out what stands below: up to three labels of stars' food and of the pattern's own text."""
    name = "".join(label + "." for label in labels) or "."
    food = {"a", *(label.replace("*", "") or "a" for label in pattern.replace("**.", "*.").split(".") if label)}
    depth = max(pattern.count("."), len(labels) + 1) - len(labels)
    below = (
        "".join(label + "." for label in extra) + name.removeprefix(".") for extra in itertools.product(food, repeat=depth)
    )
    found = any(naive_matches(pattern, candidate) for candidate in below)
    assert is_ancestor_of_match(name, pattern) == found


def seconds_of(work: Callable[[], object]) -> float:
    """The best of several: other processes only ever add."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize(
    "pattern", ["*a" * 20 + "*", "*a" * 20 + "*b", "*" * 20 + "b", "**." + "*a" * 20 + "b", "*ab" * 10 + "*ac"]
)
def test_no_pattern_makes_a_name_expensive(pattern: str) -> None:
    """Sixteen times the name costs about sixteen times the time; a quadratic matcher takes 256 times, backtracking for ever."""
    compiled = NamePattern(normalise_pattern(pattern))
    short, long = "a" * 4_000 + ".", "a" * 64_000 + "."
    growth = seconds_of(lambda: compiled.matches(long)) / seconds_of(lambda: compiled.matches(short))
    assert growth < 64, f"16 times the name took {growth:.0f} times as long"


# --- many patterns ---------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.booleans(), patterns | st.sampled_from([".", "*"]), st.integers(0, 3)), max_size=30)


@given(steps, st.lists(names | st.just("."), min_size=1, max_size=5))
def test_the_index_finds_what_looking_at_every_pattern_finds(history: list[tuple[bool, str, int]], asked: list[str]) -> None:
    """After any additions and removals, and leaves nothing behind when all is removed."""
    index: PatternIndex[int] = PatternIndex()
    kept: dict[tuple[str, int], None] = {}
    for is_added, pattern, value in history:
        if is_added:
            index.add(pattern, value)
            kept[pattern, value] = None
        elif (pattern, value) in kept:
            index.remove(pattern, value)
            del kept[pattern, value]
        else:
            with pytest.raises(KeyError):
                index.remove(pattern, value)
    for name in asked:
        expected = {value for pattern, value in kept if NamePattern(pattern).matches(name)}
        found = index.matching(name)
        assert (set(found), len(found)) == (expected, len(expected))
        assert set(index.matching_question(name)) == {v for p, v in kept if NamePattern(p).matches_question(name)}
        assert index.is_ancestor(name) == any(is_ancestor_of_match(name, pattern) for pattern, _ in kept)
    for pattern, value in kept:
        index.remove(pattern, value)
    assert not any(vars(index).values())


def test_a_name_costs_the_same_at_a_hundred_patterns_and_at_thirty_thousand() -> None:
    """Three kinds of patterns, three hundred times as many: growth is asked for, not a time."""

    def filled(count: int) -> PatternIndex[int]:
        index: PatternIndex[int] = PatternIndex()
        for number in range(count):
            index.add(f"n{number}.example.", number)
            index.add(f"*.d{number}.example.", number)
            index.add(f"api{number}-*.example.com.", number)
        return index

    small, large = filled(33), filled(10_000)
    asked = ["x.d7.example.", "n7.example.", "api7-x.example.com.", "unknown.example.net."]

    def ask(index: PatternIndex[int]) -> None:
        for _ in range(200):
            for name in asked:
                index.matching(name)
                index.is_ancestor(name)

    assert [large.matching(name) for name in asked] == [[7], [7], [7], []]
    growth = seconds_of(lambda: ask(large)) / seconds_of(lambda: ask(small))
    assert growth < 8, f"300 times the patterns took {growth:.0f} times as long"


def test_by_which_of_its_patterns_a_value_has_a_name() -> None:
    """The longest, and never by another value's; whether a name is written out is asked by itself."""
    index: PatternIndex[int] = PatternIndex()
    for pattern, value in (("*.a.test.", 1), ("**.test.", 1), ("*", 1), ("x*.a.test.", 2), ("xy.a.test.", 2)):
        index.add(pattern, value)
    names = ("xy.a.test.", "b.test.", "example.")
    assert [index.pattern_of(1, name) for name in names] == ["*.a.test.", "**.test.", "*"]
    assert index.pattern_of(2, "xy.a.test.") == "x*.a.test."
    assert [index.writes_out(name) for name in names] == [True, False, False]
