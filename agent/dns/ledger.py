"""Questions that were read and are not answered yet, in memory that outlives their reader.

A datagram that was read is in no queue any more: if its reader is killed, the question is lost, and a stub resolver asks again
after five seconds. So it is noted here before it is taken from the queue, in memory without a name (memfd_create(2)) whose
descriptor the holder has as well (`agent.holder`), and struck out when its answer leaves. Who reads the sockets next begins
with what is left.

    slot      number:64 | read at:64 | server:128 | client:128 | client's scope:32 | server's port:16 | client's port:16 | …
              … octets of an address:8 | pad:8 | octets of the message:16 | the message

Rule 1: the number is written last and struck out first. A slot that was cut short by a death has none.
Rule 2: nothing waits for room: slots are used in turn. A question that is never answered (it was none) is written over in time,
or too old to matter; one that is longer than a slot is not noted.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from agent.core.types import Address

SLOT_OCTETS: Final = 512
# Four seconds, the life of a question, at a thousand a second.
SLOTS: Final = 4096
# A question that is older has been answered, or never will be.
AGE_S_MAX: Final = 4.0

_NUMBER: Final = Struct("=Q")
_NOTED: Final = Struct("=d16s16sIHHBxH")
_MESSAGE_AT: Final = _NUMBER.size + _NOTED.size
_MESSAGE_OCTETS_MAX: Final = SLOT_OCTETS - _MESSAGE_AT


class Noted(NamedTuple):
    """client: a socket address as Python has them."""

    number: int
    server: Address
    port: int
    client: Any
    message: bytes


class Ledger:
    """descriptor: of the memory of a process before, which is ours then; None for new memory."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("namegate-questions") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self.descriptor, SLOTS * SLOT_OCTETS)
            self._memory = mmap.mmap(self.descriptor, SLOTS * SLOT_OCTETS)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise
        self._next = 1 + max(number for number, _ in self._numbers())

    def note(self, server: Address, port: int, client: Any, message: bytes, now: float) -> int:
        """The number to strike it out by. now: seconds of CLOCK_MONOTONIC."""
        octets = len(message)
        if octets > _MESSAGE_OCTETS_MAX:
            return 0
        number, memory = self._next, self._memory
        self._next += 1
        at = number % SLOTS * SLOT_OCTETS
        family = socket.AF_INET if len(server) == 4 else socket.AF_INET6
        sender = socket.inet_pton(family, client[0].partition("%")[0])
        scope = client[3] if family == socket.AF_INET6 else 0
        _NUMBER.pack_into(memory, at, 0)
        _NOTED.pack_into(memory, at + _NUMBER.size, now, server, sender, scope, port, client[1], len(server), octets)
        memory[at + _MESSAGE_AT : at + _MESSAGE_AT + octets] = message
        _NUMBER.pack_into(memory, at, number)
        return number

    def strike(self, number: int) -> None:
        at = number % SLOTS * SLOT_OCTETS
        if number and _NUMBER.unpack_from(self._memory, at)[0] == number:
            _NUMBER.pack_into(self._memory, at, 0)

    def left(self, now: float) -> list[Noted]:
        """What is not struck out and not too old, in the order of its coming; we are the one who notes from now on."""
        self._next = max(self._next, 1 + max(number for number, _ in self._numbers()))
        return [self._noted(number, at) for number, at in sorted(self._numbers()) if number and self._age(at, now) < AGE_S_MAX]

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    def _numbers(self) -> Iterator[tuple[int, int]]:
        for at in range(0, SLOTS * SLOT_OCTETS, SLOT_OCTETS):
            yield _NUMBER.unpack_from(self._memory, at)[0], at

    def _age(self, at: int, now: float) -> float:
        return now - float(_NOTED.unpack_from(self._memory, at + _NUMBER.size)[0])

    def _noted(self, number: int, at: int) -> Noted:
        _, server, sender, scope, port, client_port, size, octets = _NOTED.unpack_from(self._memory, at + _NUMBER.size)
        message = self._memory[at + _MESSAGE_AT : at + _MESSAGE_AT + octets]
        if size == 4:
            return Noted(number, server[:4], port, (socket.inet_ntop(socket.AF_INET, sender[:4]), client_port), message)
        return Noted(number, server, port, (socket.inet_ntop(socket.AF_INET6, sender), client_port, 0, scope), message)
