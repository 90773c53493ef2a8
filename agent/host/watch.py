"""The kernel's notice that interfaces or addresses changed. What changed is looked up afresh, not read from the message: a
notice that was lost (the socket's buffer is full) then costs nothing but its own lateness.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

# From <linux/rtnetlink.h>: links, IPv4 and IPv6 addresses, IPv4 and IPv6 routes.
_GROUPS: Final = 0x1 | 0x10 | 0x100 | 0x40 | 0x400
_MESSAGES_MAX: Final = 256


class NetworkWatch:
    """Calls `changed` once for each burst of notices, in the network namespace of the caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        self._socket.bind((0, _GROUPS))
        loop.add_reader(self._socket.fileno(), self._hear)

    def _hear(self) -> None:
        with contextlib.suppress(OSError):  # nothing more, or more than the buffer holds: something changed either way
            for _ in range(_MESSAGES_MAX):
                self._socket.recv(65_536)
        self._changed()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
