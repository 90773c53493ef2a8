"""What carries questions to one upstream and its replies back: a UDP port or a TCP connection, each with its own space of ids.

Rule 1: a reply is taken for a question only on the carrier the question left on, with the id it left with and the octets of its
question section (RFC 5452 9.1); the carriers are connected, so the kernel lets nobody but the upstream speak on them.
Rule 2: an id is random and not in use on its carrier. (Without the second part 0.02 to 0.04 % of questions were lost at load.)
Rule 3: what a carrier learns it tells its `Ledger`; it never calls the core.

The section is compared as it was sent, letter case included: an upstream that changes it would break a client that checks it,
and to a forger the client's own mix of cases is one more thing to guess. With `mixes_case` every question leaves in a mix of
our own (draft-vixie-dnsext-dns0x20), and the reply gets the client's back; for upstreams that are known to keep it.

Questions that are asked in one turn of the loop leave on one port: to whoever guesses it is as unknown for all of them as it
would be for each, and one call sends them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields
from struct import Struct
from typing import Final

from agent.core.events import AskUpstream
from agent.core.types import Address
from agent.dns.batches import Receiver, Sender

MESSAGE_OCTETS_MAX: Final = 65535
# A resolver that takes nothing for this many octets (hundreds of questions) is not going to answer in time either.
UNSENT_OCTETS_MAX: Final = 64 << 10

_LENGTH: Final = Struct("!H")
# What an ICMP error says about an earlier datagram is told by the next call on the socket (udp(7)).
_TOLD_LATE: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH}
_FLAG_QR: Final = 0x80
_ONE: Final = b"\x00\x01"


@dataclass(slots=True)
class Counters:
    """What came and was not taken, and what could not be asked; only ever grows."""

    late: int = 0  # no open question has this id on this carrier: answered, given up, or never asked
    mismatched: int = 0  # the id of an open question, but not its question: forged, or a broken upstream
    failed: int = 0  # told as UpstreamFailed
    asked_again: int = 0  # on a new connection, since the upstream closed a used one (RFC 7766 6.2.4)

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Asked:
    """A question on its way. question: its section as it was sent."""

    __slots__ = ("carrier", "effect", "is_retry", "number", "question")

    def __init__(self, effect: AskUpstream, carrier: Carrier, number: bytes, question: bytes, is_retry: bool) -> None:
        self.effect = effect
        self.carrier = carrier
        self.number = number
        self.question = question
        self.is_retry = is_retry


class Ledger(ABC):
    """Who is told: the upstreams."""

    def __init__(self, *, mixes_case: bool) -> None:
        self.counters = Counters()
        self.mixes_case = mixes_case

    @abstractmethod
    def answered(self, asked: Asked, message: bytes) -> None: ...

    @abstractmethod
    def failed(self, asked: Asked, why: str) -> None: ...

    @abstractmethod
    def unsent(self, effect: AskUpstream, why: str) -> None:
        """The kernel would not send it."""

    @abstractmethod
    def lost(self, asked: Asked, why: str) -> None:
        """The connection ended under the question; it had carried others, so a new one may do."""

    @abstractmethod
    def ended(self, carrier: Carrier) -> None: ...


class Carrier:
    """Questions open on one socket, by id. A retired one takes no more and closes when its last question is gone."""

    def __init__(self, ledger: Ledger, loop: asyncio.AbstractEventLoop, opened: socket.socket, source: random.Random) -> None:
        self.is_retired = False
        self.used_at = loop.time()
        self.asked_by_number: dict[bytes, Asked] = {}
        self._ledger = ledger
        self._loop = loop
        self._socket = opened
        self._random = source
        self._is_closed = False

    def enter(self, effect: AskUpstream, is_retry: bool = False) -> Asked:
        """Give the question an id; the caller sends it, as `message_of` has it."""
        asked_by_number, draw = self.asked_by_number, self._random.getrandbits
        number = draw(16).to_bytes(2, "big")
        while number in asked_by_number:
            number = draw(16).to_bytes(2, "big")
        question = effect.question
        if self._ledger.mixes_case:
            question = mixed(question, self._random)
        asked = asked_by_number[number] = Asked(effect, self, number, question, is_retry)
        return asked

    def forget(self, asked: Asked) -> None:
        """Nobody waits for the answer any more."""
        del self.asked_by_number[asked.number]
        self._close_if_done()

    def retire(self) -> None:
        self.is_retired = True
        self._close_if_done()

    def _take(self, message: bytes) -> None:
        asked = self.asked_by_number.get(message[:2])
        if asked is None:
            self._ledger.counters.late += 1
            return
        question = asked.question
        if (
            len(message) < 12
            or not message[2] & _FLAG_QR
            or message[4:6] != _ONE
            or message[12 : 12 + len(question)] != question
        ):
            self._ledger.counters.mismatched += 1
            return
        del self.asked_by_number[asked.number]
        if question is not asked.effect.question:
            message = message[:12] + asked.effect.question + message[12 + len(question) :]
        self._ledger.answered(asked, message)

    def _fail_all(self, tell: Callable[[Asked, str], None], why: str, but: Container[bytes] = ()) -> None:
        """but: the numbers of questions that are not meant."""
        meant = [asked for number, asked in self.asked_by_number.items() if number not in but]
        for asked in meant:
            del self.asked_by_number[asked.number]
        for asked in meant:
            tell(asked, why)

    def _close_if_done(self) -> None:
        if self.is_retired and not self.asked_by_number:
            self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._leave_loop()
        self._socket.close()
        self._ledger.ended(self)

    def _leave_loop(self) -> None:
        """Before the socket is closed."""


class Port(Carrier):
    """A UDP socket connected to the upstream, on a port that the kernel picked at random (RFC 6056 as Linux does it)."""

    def __init__(
        self, ledger: Ledger, loop: asyncio.AbstractEventLoop, source: random.Random, server: Address, port: int, mark: int
    ) -> None:
        opened = _open(socket.SOCK_DGRAM, server, mark)
        try:
            opened.connect(_place(server, port))
        except OSError:
            opened.close()
            raise
        super().__init__(ledger, loop, opened, source)
        self.descriptor = opened.fileno()

    def ask(self, effects: Sequence[AskUpstream], sender: Sender) -> list[Asked]:
        """Send a batch at most. What the kernel would not send is told as failed; the others are given back."""
        entered = [self.enter(effect) for effect in effects]
        failed = sender.send(self.descriptor, [message_of(asked) for asked in entered])
        if not failed:
            return entered
        for place, code in failed:
            asked = entered[place]
            if code in _TOLD_LATE:
                # It is about the questions before these, if there are any; a second try tells.
                with_fate = {other.number for other in entered}
                self._fail_all(self._ledger.failed, os.strerror(code).lower(), but=with_fate)
                code = dict(sender.send(self.descriptor, [message_of(asked)])).get(0, 0)
            if code:
                del self.asked_by_number[asked.number]
                self._ledger.unsent(asked.effect, os.strerror(code).lower())
        return [asked for asked in entered if asked.number in self.asked_by_number]

    def read(self, receiver: Receiver) -> None:
        """Take in what has come, a batch at most."""
        try:
            messages = receiver.receive(self.descriptor)
        except OSError as error:
            self._fail_all(self._ledger.failed, sentence_of(error))
        else:
            for message in messages:
                self._take(message)
        self._close_if_done()


class Stream(Carrier):
    """A TCP connection to the upstream: questions one behind the other, replies in any order (RFC 7766 6.2.1.1)."""

    def __init__(
        self, ledger: Ledger, loop: asyncio.AbstractEventLoop, source: random.Random, server: Address, port: int, mark: int
    ) -> None:
        opened = _open(socket.SOCK_STREAM, server, mark)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.connect(_place(server, port))
        except BlockingIOError:
            pass
        except OSError:
            opened.close()
            raise
        super().__init__(ledger, loop, opened, source)
        self._unsent = bytearray()
        self._unread = bytearray()
        self._has_answered = False
        self._is_connecting = self._writes = True
        loop.add_writer(opened.fileno(), self._write)
        loop.add_reader(opened.fileno(), self._read)

    def ask(self, effect: AskUpstream, is_retry: bool = False) -> Asked:
        """OSError if it takes nothing more."""
        if len(self._unsent) > UNSENT_OCTETS_MAX:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        asked = self.enter(effect, is_retry)
        self.used_at = self._loop.time()
        self._unsent += _LENGTH.pack(len(effect.message)) + message_of(asked)
        if not self._writes:
            # In a callback of its own: an error here would have to be told from inside the call.
            self._writes = True
            self._loop.add_writer(self._socket.fileno(), self._write)
        return asked

    def forget(self, asked: Asked) -> None:
        """A question that got no answer says that the connection may be dead without our knowing: it takes no new ones."""
        self.is_retired = True
        super().forget(asked)

    def _write(self) -> None:
        try:
            if self._is_connecting:
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self._is_connecting = False
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(sentence_of(error))
            return
        if not self._unsent:
            self._writes = False
            self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            received = self._socket.recv(MESSAGE_OCTETS_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(sentence_of(error))
            return
        if not received:
            self._end("the upstream closed the connection")
            return
        unread = self._unread
        unread += received
        at = 0
        while len(unread) >= at + 2:
            end = at + 2 + (unread[at] << 8 | unread[at + 1])
            if len(unread) < end:
                break
            self._take(bytes(unread[at + 2 : end]))
            self._has_answered = True
            at = end
        del unread[:at]
        self.used_at = self._loop.time()
        self._close_if_done()

    def _leave_loop(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())

    def _end(self, why: str) -> None:
        """Questions on a connection that had answered may have crossed the upstream's idle close: they are only lost."""
        self.is_retired = True
        self._fail_all(self._ledger.lost if self._has_answered else self._ledger.failed, why)
        self.close()


def message_of(asked: Asked) -> bytes:
    """What leaves: the client's message with our id, and in our mix of cases."""
    message = asked.effect.message
    if asked.question is asked.effect.question:
        return asked.number + message[2:]
    return asked.number + message[2:12] + asked.question + message[12 + len(asked.question) :]


def mixed(section: bytes, source: random.Random) -> bytes:
    """A question section with the case of each letter of its name drawn anew. Lengths of labels are below the letters."""
    name = section[:-4]
    coins = source.getrandbits(len(name))
    cased = bytes(
        octet ^ (0x20 if coins >> place & 1 else 0) if _is_letter(octet) else octet for place, octet in enumerate(name)
    )
    return cased + section[-4:]


def _is_letter(octet: int) -> bool:
    return 0x61 <= octet | 0x20 <= 0x7A


def _open(kind: socket.SocketKind, server: Address, mark: int) -> socket.socket:
    family = socket.AF_INET if len(server) == 4 else socket.AF_INET6
    opened = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if mark:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    except OSError:
        opened.close()
        raise
    return opened


def _place(server: Address, port: int) -> tuple[str, int]:
    return socket.inet_ntop(socket.AF_INET if len(server) == 4 else socket.AF_INET6, server), port


def sentence_of(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
