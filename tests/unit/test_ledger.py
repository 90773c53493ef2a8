"""What was read and not answered, as the process after finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from agent.core.types import packed
from agent.dns.ledger import _MESSAGE_OCTETS_MAX, AGE_S_MAX, SLOTS, Ledger

V4 = (packed("198.51.100.53"), 53, ("192.0.2.6", 40000))
V6 = (packed("2001:db8:53::53"), 5353, ("fe80::2", 40001, 0, 7))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.close()


@pytest.fixture
def left(ledger: Ledger) -> Iterator[Ledger]:
    """The same memory, as another process sees it that got a descriptor."""
    left = Ledger(os.dup(ledger.descriptor))
    yield left
    left.close()


def test_what_is_not_struck_out_is_left(ledger: Ledger, left: Ledger) -> None:
    """In the order of its coming, with everything an answer needs."""
    numbers = [ledger.note(*V4, b"one", 10.0), ledger.note(*V6, b"two", 10.0), ledger.note(*V4, b"three", 10.0)]
    ledger.strike(numbers[2])
    assert left.left(11.0) == [(numbers[0], *V4, b"one"), (numbers[1], *V6, b"two")]
    left.strike(numbers[0])
    assert [noted.message for noted in ledger.left(11.0)] == [b"two"]


def test_the_process_after_counts_on(ledger: Ledger) -> None:
    """Its first question does not take the place of one that is left."""
    ledger.note(*V4, b"one", 10.0)
    after = Ledger(os.dup(ledger.descriptor))
    after.note(*V4, b"two", 10.0)
    assert [noted.message for noted in after.left(11.0)] == [b"one", b"two"]
    after.close()


def test_slots_are_used_in_turn(ledger: Ledger, left: Ledger) -> None:
    """A question whose slot was used again is lost, and striking it out does not strike out the other."""
    first = ledger.note(*V4, b"first", 10.0)
    for number in range(SLOTS):
        ledger.note(*V4, b"%d" % number, 10.0)
    ledger.strike(first)
    assert [noted.message for noted in left.left(10.0)] == [b"%d" % number for number in range(SLOTS)]


def test_what_is_too_old_or_too_long_is_not_left(ledger: Ledger, left: Ledger) -> None:
    """Its asker has given up, or asks again."""
    ledger.note(*V4, b"old", 10.0)
    ledger.note(*V4, bytes(_MESSAGE_OCTETS_MAX), 10.1)
    assert ledger.note(*V4, bytes(_MESSAGE_OCTETS_MAX + 1), 10.1) == 0
    ledger.strike(0)
    assert [len(noted.message) for noted in left.left(10.0 + AGE_S_MAX)] == [_MESSAGE_OCTETS_MAX]


def test_a_question_is_cut_short_by_a_death(ledger: Ledger, left: Ledger) -> None:
    """A slot without its number is none: whatever else stands in it."""
    number = ledger.note(*V4, b"before", 10.0)
    ledger._memory[number * 512 : number * 512 + 8] = bytes(8)
    assert left.left(10.0) == []


def test_memory_of_another_size_is_refused() -> None:
    """And the descriptor is not kept open."""
    descriptor = os.memfd_create("small")
    with pytest.raises(ValueError, match="mmap"):
        Ledger(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
