"""What the client talks to: a name server, and TCP and UDP on every address of the internet. Threads of this process."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from types import TracebackType
from typing import Final, Self

from agent.core.types import Address, packed
from agent.selftest.network import NAME_SERVER, Network

PORT: Final = 7
STEADY, STEADY_ADDRESS = "steady.test", "198.51.100.30"
EXPIRING, EXPIRING_ADDRESS = "expiring.test", "198.51.100.20"
STRANGERS: Final = ("198.51.100.90", "198.19.255.1", "2001:db8:99::dead")  # nobody's addresses

_TYPE_A, _TYPE_AAAA = 1, 28
_TTL_S: Final = 300
_EXPIRING_TTL_S: Final = 1


def fresh_names(number: int) -> tuple[str, str]:
    """Two of one address."""
    return f"n{number}.test", f"m{number}.test"


def fresh_address(number: int, *, is_v6: bool) -> Address:
    base = packed("2001:db8:99::1:0") if is_v6 else packed("198.18.0.0")
    return (int.from_bytes(base, "big") + number + 1).to_bytes(len(base), "big")


def question(number: int, name: str, *, is_v6: bool = False) -> bytes:
    """number: the message's id."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    kind = _TYPE_AAAA if is_v6 else _TYPE_A
    return (number & 0xFFFF).to_bytes(2, "big") + bytes.fromhex("01000001000000000000") + labels + b"\0\0%c\0\1" % kind


def _answer(message: bytes) -> tuple[str, bytes]:
    """The name that is asked, and the reply to it."""
    at, labels = 12, []
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode("latin-1"))
        at += 1 + message[at]
    name, end = ".".join(labels).lower(), at + 5
    kind = int.from_bytes(message[at + 1 : at + 3], "big")
    fresh = re.fullmatch(r"[mn](\d+)\.test", name)
    known = {STEADY: (STEADY_ADDRESS, _TTL_S), EXPIRING: (EXPIRING_ADDRESS, _EXPIRING_TTL_S)}
    data, ttl_s = b"", _TTL_S
    if fresh is not None:
        data = fresh_address(int(fresh[1]), is_v6=kind == _TYPE_AAAA)
    elif name in known and kind == _TYPE_A:
        data, ttl_s = packed(known[name][0]), known[name][1]
    head = message[:2] + (b"\x81\x80" if data else b"\x81\x83") + b"\0\1\0%c\0\0\0\0" % bool(data) + message[12:end]
    if not data:
        return name, head
    return name, head + b"\xc0\x0c" + message[at + 1 : end] + ttl_s.to_bytes(4, "big") + len(data).to_bytes(2, "big") + data


class Internet:
    """Use as a context manager. asked: names that reached the name server."""

    def __init__(self, network: Network) -> None:
        self.asked: set[str] = set()
        with network.inside("internet"):
            self._names = _datagrams(NAME_SERVER, 53)
            self._echo = _datagrams(STEADY_ADDRESS, PORT)
            self._streams = socket.create_server(("::", PORT), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
        works = (self._answer_names, self._send_back, self._take_in)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for opened in (self._names, self._echo, self._streams):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # wakes its thread; of a datagram socket it says ENOTCONN too
            opened.close()

    def _answer_names(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                message, asker = self._names.recvfrom(4096)
                if not message:
                    return
                name, reply = _answer(message)
                self.asked.add(name)
                self._names.sendto(reply, asker)

    def _send_back(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                datagram, sender = self._echo.recvfrom(2048)
                if not datagram:
                    return
                self._echo.sendto(datagram, sender)

    def _take_in(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._streams.accept()[0].close()


def _datagrams(address: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((address, port))
    return opened
