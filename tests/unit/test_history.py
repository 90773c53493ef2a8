"""Name history: what a drop is explained by."""

from __future__ import annotations

from agent.core.history import KEPT_S, OTHERS_MAX, NameHistory
from agent.core.types import packed

ADDRESS = packed("198.51.100.7")
OTHER = packed("198.51.100.8")


def test_names_of_an_address_the_last_one_first() -> None:
    """Two names on one address; asking again moves the last time and keeps the first."""
    history = NameHistory(10)
    history.note("a.test.", ADDRESS, 1, ("a.test.",), 60.0, 0.0)
    history.note("b.test.", ADDRESS, 2, ("b.test.", "cdn.test."), 70.0, 10.0)
    history.note("a.test.", ADDRESS, 1, ("a.test.",), 80.0, 20.0)
    assert [(seen.name, seen.first_at, seen.last_at, seen.until) for seen in history.on(ADDRESS, 30.0)] == [
        ("a.test.", 0.0, 20.0, 80.0),
        ("b.test.", 10.0, 10.0, 70.0),
    ]
    assert history.on(OTHER, 30.0) == []


def test_who_was_answered_is_known_of_the_last_ones() -> None:
    """However many ask for one name after each other, it costs a bounded number of them."""
    history = NameHistory(10)
    for endpoint in (*range(1, OTHERS_MAX + 3), 5):
        history.note("a.test.", ADDRESS, endpoint, ("a.test.",), 60.0, float(endpoint))
    (seen,) = history.on(ADDRESS, 30.0)
    assert [number for number in range(OTHERS_MAX + 4) if seen.is_known_to(number)] == [*range(2, OTHERS_MAX + 3)]
    assert (seen.endpoint, len(seen.others)) == (5, OTHERS_MAX)


def test_it_outlives_the_lifetime_and_ends_after_a_day() -> None:
    """The address is closed by then; the name is still known."""
    history = NameHistory(10)
    history.note("a.test.", ADDRESS, 1, ("a.test.",), 60.0, 0.0)
    assert [seen.name for seen in history.on(ADDRESS, KEPT_S - 1)] == ["a.test."]
    assert history.on(ADDRESS, KEPT_S + 1) == []
    history.expire(KEPT_S + 1)
    assert len(history) == 0


def test_over_the_bound_the_one_not_seen_for_longest_goes() -> None:
    """Three names, room for two."""
    history = NameHistory(2)
    for at, name in enumerate(("a.test.", "b.test.", "a.test.", "c.test.")):
        history.note(name, ADDRESS, 1, (name,), 60.0, float(at))
    assert [seen.name for seen in history.on(ADDRESS, 5.0)] == ["c.test.", "a.test."]
    assert len(history) == 2
