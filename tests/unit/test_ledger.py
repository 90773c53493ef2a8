"""What was read and not answered, as the process after finds it."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
from collections.abc import Iterator
from operator import attrgetter

import pytest

from agent.core.types import packed
from agent.dns.batches import BATCH
from agent.dns.ledger import AGE_S_MAX, MESSAGE_OCTETS_NOTED, PAGES, SLOTS, Ledger, Noted
from agent.dns.sockets import IP_RECVORIGDSTADDR, IPV6_RECVORIGDSTADDR

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class Questions:
    """A socket as the listeners have it, and a client of it."""

    def __init__(self, family: socket.AddressFamily) -> None:
        self.asked, self.client = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
        if family == socket.AF_INET:
            self.asked.setsockopt(socket.IPPROTO_IP, IP_RECVORIGDSTADDR, 1)
        else:
            self.asked.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, 1)
        self.asked.bind((LOOPBACK[family], 0))
        self.client.connect(self.asked.getsockname())

    def ask(self, *messages: bytes) -> None:
        for message in messages:
            self.client.send(message)
        assert select.select([self.asked], [], [], 5)[0]

    def close(self) -> None:
        self.asked.close()
        self.client.close()


@pytest.fixture
def v4() -> Iterator[Questions]:
    questions = Questions(socket.AF_INET)
    yield questions
    questions.close()


@pytest.fixture
def v6() -> Iterator[Questions]:
    questions = Questions(socket.AF_INET6)
    yield questions
    questions.close()


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


def read(ledger: Ledger, questions: Questions, now: float = 10.0) -> list[Noted]:
    """All that is there."""
    found: list[Noted] = []
    while batch := ledger.receive(questions.asked, now):
        found += batch
    return found


def messages(found: list[Noted]) -> list[bytes]:
    return [noted.message for noted in found]


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_what_is_read_is_whole(ledger: Ledger, family: str, request: pytest.FixtureRequest) -> None:
    """With who asked whom; nothing of it was there before, and an empty datagram is one too."""
    questions: Questions = request.getfixturevalue(family)
    longest = bytes(range(256)) * 255
    questions.ask(b"one", b"", longest)
    found = read(ledger, questions)
    assert messages(found) == [b"one", b"", longest]
    client, asked = questions.client.getsockname(), questions.asked.getsockname()
    for noted in found:
        assert (noted.client, noted.client_port) == (packed(client[0]), client[1])
        assert (noted.server, noted.port) == (packed(asked[0]), asked[1])
    assert ledger.receive(questions.asked, 10.0) == []


def test_what_is_not_struck_out_is_left(ledger: Ledger, left: Ledger, v4: Questions, v6: Questions) -> None:
    """In the order of its coming, with everything an answer needs."""
    v4.ask(b"one", b"two")
    one, two = read(ledger, v4)
    v6.ask(b"three")
    (three,) = read(ledger, v6, 10.5)
    ledger.strike(two)
    said = attrgetter("slot", "client", "client_port", "scope", "server", "port", "message")
    assert list(map(said, left.left(11.0))) == [said(one), said(three)]
    for noted in left.left(11.0):
        if noted.message == b"one":
            left.strike(noted)
    assert list(map(said, ledger.left(11.0))) == [said(three)]


def test_the_process_after_reads_on(ledger: Ledger, left: Ledger, v4: Questions) -> None:
    """Its first questions do not take the place of those that are left."""
    v4.ask(b"one")
    read(ledger, v4)
    assert messages(left.left(10.0)) == [b"one"]
    v4.ask(b"two")
    read(left, v4)
    assert messages(ledger.left(10.0)) == [b"one", b"two"]


def test_slots_are_used_in_turn(ledger: Ledger, left: Ledger, v4: Questions) -> None:
    """A question whose slot was used again is lost, and striking it out does not strike out the other."""
    v4.ask(b"first")
    (first,) = read(ledger, v4)
    for number in range(SLOTS):
        v4.ask(b"%d" % number)
        read(ledger, v4)
    ledger.strike(first)
    found = messages(left.left(10.0))
    assert found == [b"%d" % number for number in range(SLOTS)][-len(found) :]
    assert SLOTS - BATCH <= len(found) < SLOTS


def test_two_families_never_share_a_page(ledger: Ledger, left: Ledger, v4: Questions, v6: Questions) -> None:
    """One that asks much does not write over what the other asked a moment ago, until all pages were used."""
    v6.ask(b"rare")
    read(ledger, v6)
    for number in range((PAGES - 2) * BATCH):
        v4.ask(b"%d" % number)
        read(ledger, v4)
    v6.ask(b"rare too")
    read(ledger, v6)
    found = messages(left.left(10.0))
    assert b"rare" in found
    assert b"rare too" in found


def test_what_is_too_old_or_too_long_is_not_left(ledger: Ledger, left: Ledger, v4: Questions, v6: Questions) -> None:
    """Its asker has given up, or asks again."""
    v4.ask(b"old")
    read(ledger, v4)
    v6.ask(bytes(MESSAGE_OCTETS_NOTED), bytes(MESSAGE_OCTETS_NOTED + 1))
    assert len(read(ledger, v6, 10.1)) == 2
    assert [len(noted.message) for noted in left.left(10.0 + AGE_S_MAX)] == [MESSAGE_OCTETS_NOTED]


def test_a_reader_killed_at_any_moment(ledger: Ledger, left: Ledger, v4: Questions) -> None:
    """What it took from the queue and did not answer is left, and what it did not take is in the queue: nothing is lost."""
    asked = random.Random(5)
    number = answered = 0
    pipe, told = os.pipe()
    for _ in range(40):
        child = os.fork()
        if not child:
            while True:
                select.select([v4.asked], [], [])
                for noted in ledger.receive(v4.asked, 10.0):
                    if noted.message[-1] % 2:
                        ledger.strike(noted)
                        os.write(told, b"x")
        for _ in range(asked.randrange(40)):
            v4.client.send(struct.pack("!I", number))
            number += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = left.left(10.0) + read(left, v4)
        for noted in found:
            left.strike(noted)
        answered += len(found)
        ledger.left(10.0)
    os.set_blocking(pipe, False)
    try:
        told_of = len(os.read(pipe, 1 << 20))
    except BlockingIOError:
        told_of = 0
    # One that was killed between its answer and its word for it struck the question out.
    assert number - 40 <= answered + told_of <= number
    assert answered + told_of > 0
    os.close(pipe)
    os.close(told)


def test_an_error_costs_no_page(ledger: Ledger, left: Ledger, v4: Questions) -> None:
    """However often the kernel tells one: what waits is not written over."""
    v4.ask(*([b"question"] * BATCH))
    while len(left.left(10.0)) < BATCH:  # the next one begins a page
        ledger.receive(v4.asked, 10.0)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as refused,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody,
    ):
        nobody.bind(("127.0.0.1", 0))
        refused.connect(nobody.getsockname())
        nobody.close()
        for _ in range(2 * PAGES):
            refused.send(b"x")
            with pytest.raises(ConnectionRefusedError):
                ledger.receive(refused, 10.0)
    assert messages(left.left(10.0)) == [b"question"] * BATCH


def test_memory_of_another_size_is_refused() -> None:
    """And the descriptor is not kept open."""
    descriptor = os.memfd_create("small")
    with pytest.raises(ValueError, match="mmap"):
        Ledger(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(descriptor)
