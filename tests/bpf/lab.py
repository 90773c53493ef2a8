"""Two network namespaces and a veth between them, for one test: `host`, where the agent would run, and `client`.

Names carry the process's number, so that two runs do not meet. Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = itertools.count()

HOST, CLIENT = "10.99.0.1", "10.99.0.2"
HOST6, CLIENT6 = "2001:db8:99::1", "2001:db8:99::2"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, is in the namespace. bpffs stays where it is, which `ip netns exec` would hide."""
    with Path("/proc/thread-self/ns/net").open("rb") as before, Path("/run/netns", namespace).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(fd: int) -> None:
    if _LIBC.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True)
class Lab:
    host: str
    client: str
    interface: str = "ngv0"

    @property
    def ifindex(self) -> int:
        with inside(self.host):
            return socket.if_nametoindex(self.interface)

    def ping(self, address: str) -> bool:
        """One echo of the client, answered within a second? From a socket of our own: not every host has ping(8)."""
        is_v6 = ":" in address
        protocol = socket.IPPROTO_ICMPV6 if is_v6 else socket.IPPROTO_ICMP
        number = next(_NUMBERS) + 1
        answered = struct.pack(">BBxxHH", 129 if is_v6 else 0, 0, os.getpid() & 0xFFFF, number)
        with inside(self.client), socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_RAW, protocol) as raw:
            ends_at = time.monotonic() + 1
            raw.sendto(_echo_request(128 if is_v6 else 8, number), (address, 0))
            while (left := ends_at - time.monotonic()) > 0:
                raw.settimeout(left)
                try:
                    message = raw.recv(1_500)
                except OSError:
                    return False
                message = message if is_v6 else message[(message[0] & 15) * 4 :]
                if message[:2] + bytes(2) + message[4:8] == answered:
                    return True
        return False

    def asks(self, kind: socket.SocketKind, server: str, port: int, question: bytes) -> bytes | str:
        """What the client gets for a question: the answer, or the name of the error."""
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with inside(self.client), socket.socket(family, kind) as asker:
            asker.settimeout(1.5)
            try:
                asker.connect((server, port))
                asker.send(question)
                return asker.recv(512)
            except OSError as problem:
                return type(problem).__name__


def _echo_request(kind: int, number: int) -> bytes:
    """With its checksum, RFC 1071; of ICMPv6 the kernel writes it."""
    words = (kind << 8, 0, os.getpid() & 0xFFFF, number)
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">HHHH", words[0], ~total & 0xFFFF, *words[2:])


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    number = f"{os.getpid()}-{next(_NUMBERS)}"
    made = Lab(f"ngh-{number}", f"ngc-{number}")
    try:
        for name in (made.host, made.client):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", made.host, "link", "add", made.interface, "type", "veth", "peer", "name", "eth0", "netns", made.client)
        for name, device, v4, v6 in ((made.host, made.interface, HOST, HOST6), (made.client, "eth0", CLIENT, CLIENT6)):
            _ip("-n", name, "addr", "add", f"{v4}/24", "dev", device)
            _ip("-n", name, "-6", "addr", "add", f"{v6}/64", "dev", device, "nodad")
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", made.client, "route", "add", "default", "via", HOST)
        _ip("-n", made.client, "-6", "route", "add", "default", "via", HOST6)
        with inside(made.host):
            for family in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                Path("/proc/sys/net", family).write_text("1", encoding="ascii")
        yield made
    finally:
        for name in (made.host, made.client):
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)
