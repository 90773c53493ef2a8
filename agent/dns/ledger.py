"""Questions that were read and are not answered yet, in memory that outlives their reader.

A datagram that was read is in no queue any more: if its reader is killed, the question is lost, and a stub resolver asks again
after five seconds. So the kernel is told to put it here: memory without a name (memfd_create(2)) whose descriptor the holder
has as well (`agent.holder`). It is struck out when its answer leaves; who reads the sockets next begins with what is left.

    pages     its number, 0 for none:64 | when it was read last:64 | address family:32 | pad:32        64, each of 64 slots
    headers   struct mmsghdr (`batches`), whose last word is the datagram's length: 0 where there is none, or none any more
    slots     who sent it:32 octets | the address it was sent to:64 octets | the message:416 octets

Rule 1: the kernel writes the length when the rest is there (recvmmsg(2)), and no signal comes between that and the queue: a
death at any moment leaves a question in the one or in the other.
Rule 2: nothing waits for room: pages are used in turn. A question that is never answered (it was none) is written over in time,
or too old to matter; of one that is longer than a slot the end is not here, so it is lost with its reader.
"""

from __future__ import annotations

import os
import socket
from struct import Struct
from typing import Final

from agent.core.types import Address
from agent.dns.batches import (
    BATCH,
    DATAGRAM_OCTETS_MAX,
    HEADER,
    HEADER_OCTETS,
    IOVEC,
    IOVEC_OCTETS,
    LENGTH_AT,
    Memory,
    receive,
)

PAGES: Final = 64
SLOTS: Final = PAGES * BATCH  # four seconds, the life of a question, at a thousand a second
# A question that is older has been answered, or never will be.
AGE_S_MAX: Final = 4.0

_PAGE: Final = Struct("=QdI4x")
_HEADERS_AT: Final = PAGES * _PAGE.size
_SLOTS_AT: Final = _HEADERS_AT + SLOTS * HEADER_OCTETS
SLOT_OCTETS: Final = 512
_SENDER_OCTETS: Final = 32
_CONTROL_OCTETS: Final = 64
_MESSAGE_AT: Final = _SENDER_OCTETS + _CONTROL_OCTETS
MESSAGE_OCTETS_NOTED: Final = SLOT_OCTETS - _MESSAGE_AT
OCTETS: Final = _SLOTS_AT + SLOTS * SLOT_OCTETS

_PAGE_OCTETS: Final = BATCH * HEADER_OCTETS
_LENGTH: Final = Struct("=I")
_SIZES: Final = Struct("=40xQ8xI4x")  # of a header: the octets of control data, and of the datagram

# struct sockaddr_in and sockaddr_in6; a cmsghdr; and the same again, of the address asked. Ports are in network order.
_SLOT_V4: Final = Struct(f"!2xH4s24x16x2xH4s40x{MESSAGE_OCTETS_NOTED}s")
_SLOT_V6: Final = Struct(f"!2xH4x16s4s4x16x2xH4x16s24x{MESSAGE_OCTETS_NOTED}s")
_CONTROL_SEEN: Final[dict[int, int]] = {socket.AF_INET: socket.CMSG_SPACE(16), socket.AF_INET6: socket.CMSG_SPACE(28)}
_NO_SCOPE: Final = bytes(4)

assert _SLOT_V4.size == _SLOT_V6.size == SLOT_OCTETS


class Noted:
    """A question as it was read, and so who asked. scope: of a link-local client, as the kernel has it."""

    __slots__ = ("client", "client_port", "message", "port", "scope", "server", "slot")

    def __init__(
        self, slot: int, client: Address, client_port: int, scope: bytes, server: Address, port: int, message: bytes
    ) -> None:
        self.slot = slot
        self.client = client
        self.client_port = client_port
        self.scope = scope
        self.server = server
        self.port = port
        self.message = message


class Ledger:
    """descriptor: of the memory of a process before, which is ours then; None for new memory."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("namegate-questions") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self.descriptor, OCTETS)
            self._memory = Memory(OCTETS, self.descriptor)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise
        # Where the kernel finds everything is another place in each process.
        self._iovecs = Memory(SLOTS * 2 * IOVEC_OCTETS)
        self._tails = Memory(BATCH * DATAGRAM_OCTETS_MAX)
        self._blank: dict[int, bytes] = {family: self._headers_for(family) for family in (socket.AF_INET, socket.AF_INET6)}
        self._noted: list[Noted | None] = [None] * SLOTS  # what each slot was used for last, until it is struck out
        self._numbers = [0] * PAGES
        self._number = self._newest()  # of the page begun last
        self._next: dict[int, int] = {}  # family -> the next slot of its page, if that has one

    def _headers_for(self, family: int) -> bytes:
        """Empty headers for every slot."""
        headers = bytearray(SLOTS * HEADER_OCTETS)
        sender_octets = 16 if family == socket.AF_INET else 28
        for slot in range(SLOTS):
            start = self._memory.address + _SLOTS_AT + slot * SLOT_OCTETS
            at = slot * 2 * IOVEC_OCTETS
            IOVEC.pack_into(self._iovecs.octets, at, start + _MESSAGE_AT, MESSAGE_OCTETS_NOTED)
            tail = self._tails.address + slot % BATCH * DATAGRAM_OCTETS_MAX
            IOVEC.pack_into(self._iovecs.octets, at + IOVEC_OCTETS, tail, DATAGRAM_OCTETS_MAX)
            HEADER.pack_into(
                headers,
                slot * HEADER_OCTETS,
                *(start, sender_octets),
                *(self._iovecs.address + at, 2),
                *(start + _SENDER_OCTETS, _CONTROL_OCTETS, 0, 0),
            )
        return bytes(headers)

    # --- reading -----------------------------------------------------------------------------------------------------

    def receive(self, opened: socket.socket, now: float) -> list[Noted]:
        """Read what is there, as far as the page has room; [] for nothing.

        now: seconds of CLOCK_MONOTONIC. OSError for an error the kernel kept for us.
        """
        family = opened.family
        first = self._next.get(family)
        if first is None:
            first = self._next[family] = self._begin_page(family)
        page = first // BATCH
        _PAGE.pack_into(self._memory.octets, page * _PAGE.size, self._numbers[page], now, family)
        room = BATCH - first % BATCH
        count = receive(opened.fileno(), self._memory.address + _HEADERS_AT + first * HEADER_OCTETS, room)
        if count < room:
            self._next[family] = first + count
        else:
            self._next.pop(family, None)
        return self._read(family, first, count)

    def _begin_page(self, family: int) -> int:
        """The first slot of the page that is next; nobody knows any more what was in it."""
        in_use = {slot // BATCH for slot in self._next.values()}
        self._number += 1
        while self._number % PAGES in in_use:
            self._number += 1
        page = self._number % PAGES
        self._numbers[page] = self._number
        at = page * _PAGE_OCTETS
        self._memory.octets[_HEADERS_AT + at : _HEADERS_AT + at + _PAGE_OCTETS] = self._blank[family][at : at + _PAGE_OCTETS]
        return page * BATCH

    def _read(self, family: int, first: int, count: int) -> list[Noted]:
        read: list[Noted] = []
        octets = self._memory.octets
        headers_at, slots_at = _HEADERS_AT + first * HEADER_OCTETS, _SLOTS_AT + first * SLOT_OCTETS
        layout = _SLOT_V4 if family == socket.AF_INET else _SLOT_V6
        control_seen = _CONTROL_SEEN[family]
        for slot in range(first, first + count):
            control, length = _SIZES.unpack_from(octets, headers_at)
            fields = layout.unpack_from(octets, slots_at)
            headers_at, slots_at = headers_at + HEADER_OCTETS, slots_at + SLOT_OCTETS
            message = fields[-1][:length]
            if length > MESSAGE_OCTETS_NOTED:
                tail = slot % BATCH * DATAGRAM_OCTETS_MAX
                message += self._tails.octets[tail : tail + length - MESSAGE_OCTETS_NOTED]
            if control != control_seen:
                continue  # nobody says where it was sent to
            if layout is _SLOT_V4:
                client_port, client, port, server, _ = fields
                noted = Noted(slot, client, client_port, _NO_SCOPE, server, port, message)
            else:
                client_port, client, scope, port, server, _ = fields
                noted = Noted(slot, client, client_port, scope, server, port, message)
            self._noted[slot] = noted
            read.append(noted)
        return read

    # --- answering ---------------------------------------------------------------------------------------------------

    def strike(self, noted: Noted) -> None:
        """It is answered; nothing happens where the slot is another question's by now."""
        slot = noted.slot
        if self._noted[slot] is noted:
            self._noted[slot] = None
            _LENGTH.pack_into(self._memory.octets, _HEADERS_AT + slot * HEADER_OCTETS + LENGTH_AT, 0)

    # --- after a death -----------------------------------------------------------------------------------------------

    def left(self, now: float) -> list[Noted]:
        """What is not struck out and not too old, in the order of its coming; we are the one who reads from now on."""
        self._next.clear()
        self._number = self._newest()
        found: list[Noted] = []
        for _, read_at, family, page in sorted((*self._page(page), page) for page in range(PAGES)):
            if family and now - read_at < AGE_S_MAX:
                found += (noted for noted in self._read(family, page * BATCH, BATCH) if self._is_whole(noted.slot))
        return found

    def _is_whole(self, slot: int) -> bool:
        length: int = _LENGTH.unpack_from(self._memory.octets, _HEADERS_AT + slot * HEADER_OCTETS + LENGTH_AT)[0]
        return 0 < length <= MESSAGE_OCTETS_NOTED

    def _page(self, page: int) -> tuple[int, float, int]:
        """Its number, when it was read last, of which family."""
        number, read_at, family = _PAGE.unpack_from(self._memory.octets, page * _PAGE.size)
        return number, read_at, family

    def _newest(self) -> int:
        return max(self._page(page)[0] for page in range(PAGES))

    def close(self) -> None:
        for memory in (self._memory, self._iovecs, self._tails):
            memory.close()
        os.close(self.descriptor)
