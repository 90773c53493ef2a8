"""The sockets towards the clients: questions in, replies out, from the address and port that were asked.

Rule 1: what a client sent reaches the core as it came, with the address and port it was sent to; the reply leaves from there.
Rule 2: everything a client can make us hold is bounded (`bounds.py`), and what is given up is counted.
Rule 3: nothing here looks into a DNS message.

How a datagram for a foreign address gets here: the gate program assigns it to a socket of ours with bpf_sk_assign, which asks
only that the socket is transparent, not what it is bound to. So the listeners are bound to loopback: their port is open to
nobody who is not sent here by the program, and who comes directly is ignored. The kernel tells the address asked with each
datagram (IP_RECVORIGDSTADDR); of a TCP connection it is getsockname(). SO_REUSEPORT is never set: before Linux 6.6
bpf_sk_assign refuses such a socket.

Datagrams come and go in batches (`batches.py`): one call takes in what is there, into the ledger, and one lets replies go.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Hashable, Sequence
from struct import Struct

from agent.core.events import AskerGone, Query, SendReply
from agent.core.types import PROTOCOL_UDP, Address
from agent.dns.batches import BATCH
from agent.dns.bounds import Counters, Limits
from agent.dns.connections import Connections, Turn, server_and_port
from agent.dns.fairness import Desk
from agent.dns.ledger import Ledger, Noted
from agent.dns.replies import ReplySockets, transparent

# From <linux/in.h>, <linux/in6.h> and <asm-generic/socket.h>; Python 3.11 names none of them but SO_MARK.
IP_RECVORIGDSTADDR = IP_ORIGDSTADDR = 20
IPV6_RECVORIGDSTADDR = IPV6_ORIGDSTADDR = 74
SO_RCVBUFFORCE = 33
SO_MEMINFO = 55
SO_NETNS_COOKIE = 71

FAMILIES = (socket.AF_INET, socket.AF_INET6)
LOOPBACK: dict[int, str] = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

# One wake-up takes at most this many datagrams, from where they stand in one line to where each client has its own.
DRAIN_MAX = 1024
# About 5,000 questions as the kernel counts them: a pause of 50 ms at 100,000 questions a second.
RECEIVE_BUFFER_OCTETS = 4 << 20

_MEMINFO = Struct("=9I")
_MEMINFO_DROPS = 8  # SK_MEMINFO_DROPS of <linux/sock_diag.h>


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
        self._counters = Counters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._desk: Desk[Query] | None = None
        self._datagrams: list[_DatagramListener] = []
        self._streams: list[socket.socket] = []
        self._replies = ReplySockets(mark)
        self._ledger = Ledger(kept[-1] if kept else None)
        try:
            for place, family in enumerate(FAMILIES):
                datagram = _adopted(kept[2 * place]) if kept else _datagram_socket(family, mark, port)
                self._datagrams.append(_DatagramListener(datagram, self._counters, self._ledger))
                self._streams.append(_adopted(kept[2 * place + 1]) if kept else _stream_socket(family, mark, port))
        except OSError:
            self.close()
            raise

    @property
    def counters(self) -> Counters:
        self._counters.datagrams_lost = sum(_lost(listener.socket) for listener in self._datagrams)
        return self._counters

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
        on_queries: Callable[[Sequence[Query]], None],
        on_gone: Callable[[AskerGone], None],
        client_of: Callable[[Address], Hashable] = lambda address: address,
    ) -> None:
        """Take questions from now on: `on_queries` gets those of one wake-up together, `on_gone` who no longer waits.

        client_of: to whom the bounds of connections apply, and who shares the time with whom.
        """
        self._loop = loop
        desk = self._desk = Desk(loop, on_queries, lambda query: client_of(query.client), self._drop)
        self._connections = Connections(loop, self._streams, self.limits, self._counters, desk.take, on_gone, client_of)
        for listener in self._datagrams:
            loop.add_reader(listener.socket.fileno(), _hand_over, listener, loop, desk)
        desk.take([_query(noted) for noted in self._ledger.left(loop.time())])

    def _drop(self, query: Query) -> None:
        """Its client asks more than its share; it will ask again."""
        self._counters.over_share += 1
        if isinstance(query.asker, Noted):
            self._ledger.strike(query.asker)
        else:
            assert isinstance(query.asker, Turn)
            query.asker.connection.close()

    @property
    def waiting(self) -> int:
        """Questions that were read and not handed over yet."""
        return len(self._desk.queue) if self._desk is not None else 0

    def forget(self, client: Hashable) -> None:
        """Nobody asks as this client any more."""
        if self._desk is not None:
            self._desk.queue.forget(client)

    def send(self, replies: Sequence[SendReply]) -> None:
        """Let replies go, each to its asker, once; who is gone by then is counted."""
        datagrams: list[tuple[Noted, bytes]] = []
        for reply in replies:
            asker = reply.asker
            if isinstance(asker, Noted):
                datagrams.append((asker, reply.message))
            else:
                assert isinstance(asker, Turn), f"{asker!r} is no asker of these sockets"
                asker.connection.answer(asker, reply.message)
        if datagrams:
            # A full send buffer among other things: the client asks again, as for any datagram that is lost.
            self._counters.replies_unsent += self._replies.send(datagrams)
            for noted, _ in datagrams:
                self._ledger.strike(noted)

    def stop(self) -> None:
        """Take nothing new: it stays in the queues. Who is connected is still heard, and all are answered."""
        if self._loop is not None and self._connections is not None:
            self._connections.stop()
            for listener in self._datagrams:
                self._loop.remove_reader(listener.socket.fileno())

    def close(self) -> None:
        """Close every socket; nobody is told."""
        self.stop()
        if self._desk is not None:
            self._desk.close()
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
        self._connections = self._loop = self._desk = None


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


def _query(noted: Noted) -> Query:
    """Each question is an asker of its own, also two from one socket."""
    return Query(noted, noted.client, noted.server, noted.port, PROTOCOL_UDP, noted.message)


def _lost(opened: socket.socket) -> int:
    """Datagrams the kernel dropped, for lack of room nearly always (sk_getsockopt, SO_MEMINFO)."""
    return int(_MEMINFO.unpack(opened.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, _MEMINFO.size))[_MEMINFO_DROPS])


def _hand_over(listener: _DatagramListener, loop: asyncio.AbstractEventLoop, desk: Desk[Query]) -> None:
    desk.take(listener.drain(loop.time()))


def _datagram_socket(family: socket.AddressFamily, mark: int, port: int) -> socket.socket:
    opened = transparent(family, socket.SOCK_DGRAM, mark)
    try:
        opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_OCTETS)
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

    def drain(self, now: float) -> list[Query]:
        """What has come, up to the bound; the loop calls again while there is more. now: seconds of CLOCK_MONOTONIC."""
        queries: list[Query] = []
        ledger, own = self._ledger, self._own
        for _ in range(DRAIN_MAX // BATCH):
            try:
                received = ledger.receive(self.socket, now)
            except OSError:
                continue  # an error the kernel kept for us; told once, it is gone
            for noted in received:
                if (noted.server, noted.port) == own:
                    self._counters.datagrams_direct += 1
                    ledger.strike(noted)  # or who takes over would not know it from a question
                else:
                    queries.append(_query(noted))
            if len(received) < BATCH // 2:
                break
        return queries
