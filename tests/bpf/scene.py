"""An endpoint of the lab, its rows, and whom it talks to: what the tests of the datapath share."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from agent.core.events import Attach
from agent.core.types import (
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Orientation,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Verdict,
    Write,
    packed,
)
from agent.datapath import attach, syscall
from agent.datapath.abi import Reason
from agent.datapath.datapath import Datapath, Settings
from tests.bpf.lab import CLIENT, CLIENT6, Lab, inside

HOSTS = 1 << 24
SERVER, SERVER6 = "203.0.113.53", "2001:db8:53::53"


@dataclass(frozen=True)
class Scene:
    lab: Lab
    settings: Settings

    @property
    def attach(self) -> Attach:
        return Attach(1, self.lab.interface, self.lab.ifindex, Orientation.BEHIND)

    @contextlib.contextmanager
    def opened(self, *, take_over: bool = False) -> Iterator[Datapath]:
        """A datapath in the host's namespace, not yet attached; with the endpoint's rows, or with those it takes over."""
        with inside(self.lab.host):
            datapath = Datapath.open(self.settings, take_over=take_over)
            try:
                if not take_over:
                    assert not any(datapath.apply(self.rows()))
                yield datapath
            finally:
                datapath.close()

    def rows(self) -> list[Write]:
        return [
            Write(Table.ENDPOINTS, self.attach.ifindex, EndpointValue(1, 1, 1, Orientation.BEHIND)),
            Write(Table.GROUPS, 1, GroupValue(1, default_deny_egress=True, default_deny_ingress=True, audit=False)),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT)), True),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT6)), True),
            *(row(0, protocol, 53, Verdict.REDIRECT) for protocol in (6, 17)),
            *(row(HOSTS, protocol, kind, Verdict.ALLOW) for protocol, kind in ((1, 8), (58, 128), (6, 80), (17, 80))),
        ]


def row(identity: int, protocol: int, port: int, verdict: Verdict, port_bits: int = 16) -> Write:
    return Write(Table.POLICY, PolicyKey(1, identity, Direction.EGRESS, protocol, port, port_bits), PolicyValue(verdict, 3))


def known_as(address: str, identity: int | None) -> Write:
    return Write(Table.IPCACHE, IpcacheKey(1, Prefix.parse(address)), identity)


def counted(datapath: Datapath, reason: Reason) -> int:
    return sum(counter.packets for counter in datapath.counters() if counter.reason is reason)


@contextlib.contextmanager
def echo(*addresses: str) -> Iterator[None]:
    """UDP echo at port 80, in the namespace of the caller."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for address in addresses:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
            stack.enter_context(made)
            made.bind((address, 80))
            sockets.append(made)
        stop_reading, stop = os.pipe()
        poll = select.poll()
        for fd in (stop_reading, *(each.fileno() for each in sockets)):
            poll.register(fd, select.POLLIN)

        def serve() -> None:
            while True:
                ready = {fd for fd, _ in poll.poll(30_000)}
                if stop_reading in ready or not ready:
                    return
                for each in (each for each in sockets if each.fileno() in ready):
                    data, asker = each.recvfrom(512)
                    each.sendto(data.upper(), asker)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            os.write(stop, b"x")
            thread.join()
            os.close(stop)
            os.close(stop_reading)


def transparent_socket(key: int) -> socket.socket:
    """A socket as the proxy has it, for one row of dns_sockets."""
    v6 = key & 2
    made = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM if key & 1 else socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, 36, 0xA00)  # SO_MARK
    if v6:
        made.setsockopt(socket.IPPROTO_IPV6, 75, 1)  # IPV6_TRANSPARENT
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    else:
        made.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
    if not key & 1:
        made.setsockopt(socket.IPPROTO_IPV6 if v6 else socket.SOL_IP, 74 if v6 else 20, 1)  # RECVORIGDSTADDR
    made.bind(("::" if v6 else "", 10053))
    if key & 1:
        made.listen(4)
    made.settimeout(5)
    return made


def answer_one(listener: socket.socket, key: int) -> None:
    """Answers one question from the address that was asked."""
    if key & 1:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"from " + connection.getsockname()[0].encode() + b":" + connection.recv(512))
        return
    data, ancillary, _, asker = listener.recvmsg(512, 256)
    ((_, _, original),) = ancillary
    (port,) = struct.unpack_from(">H", original, 2)
    address = socket.inet_ntop(socket.AF_INET6, original[8:24]) if key & 2 else socket.inet_ntop(socket.AF_INET, original[4:8])
    with _transparent_reply(key, address, port) as reply:
        reply.sendto(b"from " + address.encode() + b":" + data, asker[:2])


@contextlib.contextmanager
def _transparent_reply(key: int, address: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if key & 2 else socket.AF_INET, socket.SOCK_DGRAM) as reply:
        reply.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reply.setsockopt(socket.SOL_SOCKET, 36, 0xA00)
        reply.setsockopt(socket.IPPROTO_IPV6 if key & 2 else socket.SOL_IP, 75 if key & 2 else 19, 1)
        reply.bind((address, port))
        yield reply


def programs_on(scene: Scene) -> list[str]:
    """Of both hooks of the endpoint's interface, whoever put them there."""
    hooks = attach.hooks(scene.lab.interface, scene.lab.ifindex, Orientation.BEHIND).values()
    return [name for hook in hooks for names in attach.neighbours(hook, scene.settings.pin_directory) for name in names]


def link_ids(settings: Settings) -> list[int]:
    """Empty on a kernel without TCX, where a filter is replaced and not a link updated."""
    found = []
    for pin in sorted((settings.pin_directory / "links").glob("*")):
        fd = syscall.get_pinned(str(pin))
        found.append(syscall.link_info(fd).id)
        os.close(fd)
    return found
