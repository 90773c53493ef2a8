"""The kernel's notice that interfaces or addresses changed. What changed is looked up afresh, not read from the message: a
notice that was lost (the socket's buffer is full) then costs nothing but its own lateness.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Final

from agent.host import netlink

# From <linux/rtnetlink.h>: links, IPv4 and IPv6 addresses, IPv4 and IPv6 routes.
_GROUPS: Final = 0x1 | 0x10 | 0x100 | 0x40 | 0x400
_LINK_GONE: Final = 17
_SO_RCVBUFFORCE: Final = 33
_MESSAGES_MAX: Final = 256
_BUFFER_BYTES: Final = 1 << 20  # some thousand notices: an engine that starts its containers


class NetworkWatch:
    """Calls `changed` once for each burst of notices, in the network namespace of the caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._gone: set[int] = set()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.bind((0, _GROUPS))
        loop.add_reader(self._socket.fileno(), self._hear)

    def take_gone(self) -> frozenset[int]:
        """Indexes of interfaces that went since this was asked last. One that is back by now may look the same, and has none of
        our programs any more: this is the one thing that a look cannot see.
        """
        self._read()
        gone, self._gone = frozenset(self._gone), set()
        return gone

    def _hear(self) -> None:
        self._read()
        self._changed()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nothing more, or more than the buffer holds: something changed either way
            for _ in range(_MESSAGES_MAX):
                for kind, _, payload in netlink.messages(self._socket.recv(65_536)):
                    # A port that leaves its bridge is told in the same words, of another family.
                    if kind == _LINK_GONE and payload[0] == socket.AF_UNSPEC:
                        self._gone.add(int.from_bytes(payload[4:8], sys.byteorder))

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
