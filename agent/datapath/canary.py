"""A frame of the agent's own, put through an ingress hook: dropped and counted, it shows that the hook judges packets.

The list of programs says what is attached; only a packet says that the kernel runs it. The frame is made by BPF_PROG_TEST_RUN
of a program of four instructions, whose bpf_clone_redirect() puts it where a frame from the wire would arrive. What it is known
by, and why nobody else can make one, stands at is_canary() in bpf/datapath.c.

Its address is one that no bridge forwards (IEEE 802.1Q, 01-80-C2-00-00-0x), and nobody listens to its EtherType: where our
program does not take it out, the host throws it away.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from agent.datapath import syscall

_FRAME: Final = bytes.fromhex("0180c200000f 020000000000 88b5") + b"namegate".ljust(46, b"\0")
# A busy processor puts what arrives off to a thread of its own, which may wait for its turn.
_PATIENCE_S: Final = 0.25
_PAUSE_S: Final = 0.002

# r3 = BPF_F_INGRESS; r2 = context->cb[0], the ifindex; call bpf_clone_redirect; return what it returned
_PUT: Final = (
    struct.pack("=BBhi", 0xB7, 0x03, 0, 1)
    + struct.pack("=BBhi", 0x61, 0x12, 48, 0)
    + struct.pack("=BBhi", 0x85, 0, 0, 13)
    + struct.pack("=BBhi", 0x95, 0, 0, 0)
)
_CONTEXT: Final = struct.Struct("=8xI36xI16x")  # struct __sk_buff: mark at 8, cb at 48

_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 1


class Canary:
    """mark: of the program's own refusals. counted: how many canaries were dropped until now, by whatever hook."""

    def __init__(self, mark: int, counted: Callable[[], int]) -> None:
        self._mark = mark
        self._counted = counted
        self._program = syscall.program_load(_PUT, "put_canary")
        self._one_at_a_time = threading.Lock()  # or one hook's would be taken for another's

    def close(self) -> None:
        os.close(self._program)

    def is_dropped(self, ifindex: int) -> bool:
        """Puts one through the ingress of the interface, in the caller's network namespace; waits for _PATIENCE_S at most.

        True, too, of an interface that is down: nothing arrives there. Raises OSError.
        """
        with self._one_at_a_time:
            before = self._counted()
            ends_at = time.monotonic() + _PATIENCE_S
            is_in = False
            while True:
                if not is_in:
                    run = syscall.program_run(self._program, _FRAME, _CONTEXT.pack(self._mark, ifindex))
                    is_in = run.action == 0
                    if not is_in and not _is_up(ifindex):
                        return True
                if self._counted() > before:
                    return True
                if time.monotonic() > ends_at:
                    return False
                time.sleep(_PAUSE_S)


def _is_up(ifindex: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        request = struct.pack("=16sH14x", socket.if_indextoname(ifindex).encode(), 0)
        (flags,) = struct.unpack_from("=H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
    return bool(flags & _IFF_UP)
