"""The sockets towards the clients: questions in, replies out, from the address and port that were asked.

Rule 1: what a client sent reaches the core as it came, with the address and port it was sent to; the reply leaves from there.
Rule 2: everything a client can make us hold is bounded (`bounds.py`), and what is given up is counted.
Rule 3: nothing here looks into a DNS message.

How a datagram for a foreign address gets here: the gate program assigns it to a socket of ours with bpf_sk_assign, which asks
only that the socket is transparent, not what it is bound to. So the listeners are bound to loopback: their port is open to
nobody who is not sent here by the program, and who comes directly is ignored. The kernel tells the address asked with each
datagram (IP_RECVORIGDSTADDR); of a TCP connection it is getsockname(). SO_REUSEPORT is never set: before Linux 6.6
bpf_sk_assign refuses such a socket.

Where batched system calls go: `_DatagramListener.drain` gives the whole of one wake-up as one list and `Listeners.send` takes
a list; recvmmsg and sendmmsg replace the loops inside these two.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from struct import Struct
from typing import Any

from agent.core.events import AskerGone, Query
from agent.core.types import PROTOCOL_UDP, Address
from agent.dns.bounds import Counters, Limits
from agent.dns.connections import MESSAGE_OCTETS_MAX, Connections, Turn, packed_of, server_and_port
from agent.dns.ledger import Ledger, Noted
from agent.dns.replies import ReplySockets, transparent

# From <linux/in.h>, <linux/in6.h> and <asm-generic/socket.h>; Python 3.11 names none of them but SO_MARK.
IP_RECVORIGDSTADDR = IP_ORIGDSTADDR = 20
IPV6_RECVORIGDSTADDR = IPV6_ORIGDSTADDR = 74
SO_RXQ_OVFL = 40
SO_RCVBUFFORCE = 33
SO_NETNS_COOKIE = 71

FAMILIES = (socket.AF_INET, socket.AF_INET6)
LOOPBACK: dict[int, str] = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

# One wake-up takes at most this many datagrams, so that one flood leaves room for everything else in between.
DRAIN_MAX = 64
# About 5,000 questions as the kernel counts them: a pause of 50 ms at 100,000 questions a second.
RECEIVE_BUFFER_OCTETS = 4 << 20

# Room for the address asked and the count of lost datagrams, with their headers.
_SOCKADDR_OCTETS_MAX = 28
_ANCILLARY_OCTETS = socket.CMSG_SPACE(_SOCKADDR_OCTETS_MAX) + socket.CMSG_SPACE(4)
_COUNT = Struct("=I")


class DatagramAsker:
    """Who asked, over UDP. Each question is an asker of its own, also two from one socket: equality is identity."""

    __slots__ = ("client", "number", "port", "server")

    def __init__(self, client: Any, server: Address, port: int, number: int) -> None:
        self.client = client
        self.server = server
        self.port = port
        self.number = number  # in the ledger


class Listeners:
    """The four sockets the gate hands questions to, and the way back for the replies.

    mark: SO_MARK on everything that is sent, 0 for none. port: of all four on loopback, 0 for one that is free.
    kept: instead of new ones, the `descriptors` of a process before, with what waits in the queues and what it did not answer.
    OSError if a socket cannot be had (not root: EPERM).
    """

    def __init__(
        self,
        mark: int,
        port: int = 0,
        limits: Limits | None = None,
        kept: Sequence[int] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.counters = Counters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._datagrams: list[_DatagramListener] = []
        self._streams: list[socket.socket] = []
        self._replies = ReplySockets(mark)
        self._ledger = Ledger(kept[-1] if kept else None)
        try:
            for place, family in enumerate(FAMILIES):
                datagram = _adopted(kept[2 * place]) if kept else _datagram_socket(family, mark, port)
                self._datagrams.append(_DatagramListener(datagram, self.counters, self._ledger))
                self._streams.append(_adopted(kept[2 * place + 1]) if kept else _stream_socket(family, mark, port))
        except OSError:
            self.close()
            raise

    def sockets(self) -> dict[int, int]:
        """File descriptors by the sockmap's key: bit 1 is set for IPv6, bit 0 for TCP."""
        udp = {is_v6 << 1: listener.socket.fileno() for is_v6, listener in enumerate(self._datagrams)}
        return udp | {is_v6 << 1 | 1: listener.fileno() for is_v6, listener in enumerate(self._streams)}

    def descriptors(self) -> tuple[int, ...]:
        """What a process that goes on with these sockets needs: the four in the order of the keys, and the ledger's memory."""
        return (*(descriptor for _, descriptor in sorted(self.sockets().items())), self._ledger.descriptor)

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_queries: Callable[[list[Query]], None],
        on_gone: Callable[[AskerGone], None],
        client_of: Callable[[Address], Hashable] = lambda address: address,
    ) -> None:
        """Take questions from now on: `on_queries` gets those of one wake-up together, `on_gone` who no longer waits.

        client_of: to whom the bounds of connections apply.
        """
        self._loop = loop
        self._connections = Connections(loop, self._streams, self.limits, self.counters, on_queries, on_gone, client_of)
        for listener in self._datagrams:
            loop.add_reader(listener.socket.fileno(), _hand_over, listener, on_queries)
        left = [_asked(noted) for noted in self._ledger.left(loop.time())]
        if left:
            on_queries(left)

    def send(self, replies: Sequence[tuple[Hashable, bytes]]) -> None:
        """Let replies go, each to its asker, once; who is gone by then is counted."""
        for asker, message in replies:
            if isinstance(asker, DatagramAsker):
                self._send_datagram(asker, message)
            else:
                assert isinstance(asker, Turn), f"{asker!r} is no asker of these sockets"
                asker.connection.answer(asker, message)

    def _send_datagram(self, asker: DatagramAsker, message: bytes) -> None:
        try:
            self._replies.send(asker.server, asker.port, asker.client, message)
        except OSError:
            # A full send buffer among other things: the client asks again, as for any datagram that is lost.
            self.counters.replies_unsent += 1
        self._ledger.strike(asker.number)

    def stop(self) -> None:
        """Take nothing new: it stays in the queues. Who is connected is still heard, and all are answered."""
        if self._loop is not None and self._connections is not None:
            self._connections.stop()
            for listener in self._datagrams:
                self._loop.remove_reader(listener.socket.fileno())

    def close(self) -> None:
        """Close every socket; nobody is told."""
        self.stop()
        if self._connections is not None:
            self._connections.close()
        for stream in self._streams:
            stream.close()
        for listener in self._datagrams:
            listener.socket.close()
        self._replies.close()
        self._ledger.close()
        self._datagrams.clear()
        self._streams.clear()
        self._connections = self._loop = None


def are_ours(kept: Sequence[int], mark: int) -> bool:
    """Could they be `descriptors` of here and now? In another network namespace, or with another mark, they are of no use."""
    if len(kept) != 2 * len(FAMILIES) + 1:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        here = own.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
    for descriptor in kept[:-1]:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            there = opened.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        if there != here or mark_of(descriptor) != mark:
            return False
    return True


def mark_of(descriptor: int) -> int:
    """The SO_MARK of a socket."""
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        return opened.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)


def _adopted(descriptor: int) -> socket.socket:
    opened = socket.socket(fileno=descriptor)
    opened.setblocking(False)  # which it is: this tells Python
    return opened


def _asked(noted: Noted) -> Query:
    asker = DatagramAsker(noted.client, noted.server, noted.port, noted.number)
    client = packed_of(socket.AF_INET if len(noted.server) == 4 else socket.AF_INET6, noted.client[0])
    return Query(asker, client, noted.server, noted.port, PROTOCOL_UDP, noted.message)


def _hand_over(listener: _DatagramListener, on_queries: Callable[[list[Query]], None]) -> None:
    queries = listener.drain()
    if queries:
        on_queries(queries)


def _datagram_socket(family: socket.AddressFamily, mark: int, port: int) -> socket.socket:
    opened = transparent(family, socket.SOCK_DGRAM, mark)
    try:
        opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_OCTETS)
        opened.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, 1)
        else:
            opened.setsockopt(socket.IPPROTO_IP, IP_RECVORIGDSTADDR, 1)
        _bind(opened, port)
    except OSError:
        opened.close()
        raise
    return opened


def _stream_socket(family: socket.AddressFamily, mark: int, port: int) -> socket.socket:
    """What it accepts has its mark (the kernel copies it)."""
    opened = transparent(family, socket.SOCK_STREAM, mark)
    try:
        # A restart on the same port must not wait for the TIME_WAIT of connections of before.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(opened, port)
        opened.listen(1024)
    except OSError:
        opened.close()
        raise
    return opened


def _bind(opened: socket.socket, port: int) -> None:
    if opened.family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    opened.bind((LOOPBACK[opened.family], port))


class _DatagramListener:
    """A listener for UDP."""

    def __init__(self, opened: socket.socket, counters: Counters, ledger: Ledger) -> None:
        self.socket = opened
        self._ledger = ledger
        self._counters = counters
        self._own = server_and_port(opened)
        self._lost_before = 0

    def drain(self) -> list[Query]:
        """What has come, up to the bound; the loop calls again while there is more."""
        queries: list[Query] = []
        family = self.socket.family
        receive = self.socket.recvmsg
        now = time.monotonic()
        for _ in range(DRAIN_MAX):
            try:
                message, ancillary, _, sender = receive(MESSAGE_OCTETS_MAX, _ANCILLARY_OCTETS, socket.MSG_PEEK)
            except BlockingIOError:
                break
            except OSError:
                continue  # an error the kernel kept for us; told once, it is gone
            server, port = self._read_ancillary(ancillary)
            if server is None or (server, port) == self._own:
                self._counters.datagrams_direct += 1
            else:
                # Noted before it leaves the queue: a death at any moment leaves it in the one or in the other.
                asker = DatagramAsker(sender, server, port, self._ledger.note(server, port, sender, message, now))
                queries.append(Query(asker, packed_of(family, sender[0]), server, port, PROTOCOL_UDP, message))
            self.socket.recv(1)
        return queries

    def _read_ancillary(self, ancillary: list[tuple[int, int, bytes]]) -> tuple[Address | None, int]:
        """The address and port asked, from a sockaddr_in or sockaddr_in6; the count of lost datagrams is taken in."""
        server, port = None, 0
        for level, kind, data in ancillary:
            if kind == IP_ORIGDSTADDR and level == socket.IPPROTO_IP:
                server, port = data[4:8], int.from_bytes(data[2:4], "big")
            elif kind == IPV6_ORIGDSTADDR and level == socket.IPPROTO_IPV6:
                server, port = data[8:24], int.from_bytes(data[2:4], "big")
            elif kind == SO_RXQ_OVFL and level == socket.SOL_SOCKET:
                (lost,) = _COUNT.unpack(data)
                self._counters.datagrams_lost += (lost - self._lost_before) & 0xFFFF_FFFF
                self._lost_before = lost
        return server, port
