"""TCP connections of clients: messages behind two octets of length (RFC 1035 4.2.2), answered in any order (RFC 7766 6.2.1.1).

Rule 1: one client cannot keep another out: at a bound the connection that made no progress for longest gives way, of the
client's own when it is the client's bound. A client is an endpoint, whatever addresses it uses. Questions inside a connection
pass by the program, which limits an endpoint's others (DECISIONS 21): here they wait.
Rule 2: part of a message is no progress, so a sender of one octet a second cannot stay for ever.
Rule 3: who is told of the end of a connection is told from the loop, never from inside a call of ours: an answer may fail to be
sent while the core's effects are being performed, and the core is not entered twice.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Hashable
from struct import Struct

from agent.core.events import AskerGone, Query
from agent.core.types import PROTOCOL_TCP, Address
from agent.dns.bounds import Counters, Limits

# One wake-up accepts at most this many, so that a flood of connections leaves room for everything else in between.
ACCEPT_MAX = 64
MESSAGE_OCTETS_MAX = 65535
# How long to leave the queue of new connections alone when there is no descriptor for the next one.
ACCEPT_PAUSE_SECONDS = 0.1
# Rather than until the very next question is due, for which all connections of a client would wake up.
PUT_OFF_SECONDS = 0.05

_LENGTH = Struct("!H")
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Turn:
    """Who asked: one question of a connection. Equality is identity."""

    __slots__ = ("connection",)

    def __init__(self, connection: Connection) -> None:
        self.connection = connection


class Connections:
    """All connections accepted from `listeners`, which listen on loopback and get what the gate assigns to them.

    client_of: whose address it is.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listeners: list[socket.socket],
        limits: Limits,
        counters: Counters,
        on_queries: Callable[[list[Query]], None],
        on_gone: Callable[[AskerGone], None],
        client_of: Callable[[Address], Hashable] = lambda address: address,
    ) -> None:
        self.loop = loop
        self.limits = limits
        self.counters = counters
        self.hand_over = on_queries
        self._on_gone = on_gone
        self._listeners = listeners
        self._own = [server_and_port(listener) for listener in listeners]
        self._held: dict[Connection, None] = {}
        self._held_by_client: dict[Hashable, dict[Connection, None]] = {}
        self._client_of = client_of
        self._due_by_client: dict[Hashable, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._listen()

    def _listen(self) -> None:
        self._timers.pop("pause", None)
        for listener in self._listeners:
            self.loop.add_reader(listener.fileno(), self._accept, listener)

    def _pause(self) -> None:
        """The queue stays readable while we cannot accept; looking at it again at once would be all we do."""
        if "pause" not in self._timers:
            for listener in self._listeners:
                self.loop.remove_reader(listener.fileno())
            self._timers["pause"] = self.loop.call_later(ACCEPT_PAUSE_SECONDS, self._listen)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_MAX):
            try:
                accepted, sender = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self.counters.connections_refused += 1
                    self._pause()
                    return
                continue  # the client gave up before we took it (accept(2))
            server, port = server_and_port(accepted)
            if (server, port) in self._own:
                self.counters.connections_refused += 1
                accepted.close()
            else:
                self._admit(accepted, packed_of(listener.family, sender[0]), server, port)

    def _admit(self, accepted: socket.socket, sender: Address, server: Address, port: int) -> None:
        client = self._client_of(sender)
        of_client = self._held_by_client.get(client, {})
        if len(of_client) >= self.limits.connections_per_client_max:
            has_room = self._make_room(of_client)
        else:
            has_room = len(self._held) < self.limits.connections_max or self._make_room(self._held)
        if not has_room:
            self.counters.connections_refused += 1
            accepted.close()
            return
        connection = Connection(self, accepted, client, sender, server, port)
        self._held[connection] = None
        self._held_by_client.setdefault(client, {})[connection] = None
        if "sweep" not in self._timers:
            self._timers["sweep"] = self.loop.call_later(self.limits.idle_seconds / 4, self._sweep)

    def _make_room(self, held: dict[Connection, None]) -> bool:
        idle = [connection for connection in held if connection.is_idle]
        if not idle:
            return False
        min(idle, key=lambda connection: connection.progress_at).close()
        self.counters.connections_idle += 1
        return True

    def _sweep(self) -> None:
        del self._timers["sweep"]
        now = self.loop.time()
        self._due_by_client = {client: due for client, due in self._due_by_client.items() if due > now}
        before = now - self.limits.idle_seconds
        for connection in [connection for connection in self._held if connection.progress_at < before]:
            connection.close()
            self.counters.connections_idle += 1
        if self._held:
            self._timers["sweep"] = self.loop.call_later(self.limits.idle_seconds / 4, self._sweep)

    def may_ask(self, client: Hashable) -> bool:
        """One more question, by the same reckoning as in bpf/verdict.h, 9a."""
        if not self.limits.questions_per_second:
            return True
        step, now = 1 / self.limits.questions_per_second, self.loop.time()
        due = max(self._due_by_client.get(client, now), now)
        if due - now + step > self.limits.question_burst * step:
            return False
        self._due_by_client[client] = due + step
        return True

    def drop(self, connection: Connection, open_turns: list[Turn]) -> None:
        """The connection closed itself; these questions of it were open."""
        del self._held[connection]
        of_client = self._held_by_client[connection.client]
        del of_client[connection]
        if not of_client:
            del self._held_by_client[connection.client]
        for turn in open_turns:
            self.loop.call_soon(self._on_gone, AskerGone(turn))

    def __len__(self) -> int:
        return len(self._held)

    def stop(self) -> None:
        """Accept nobody any more; who is connected is served on."""
        pause = self._timers.pop("pause", None)
        if pause is not None:
            pause.cancel()
        for listener in self._listeners:
            self.loop.remove_reader(listener.fileno())

    def close(self) -> None:
        """Close every connection and listener; nobody is told."""
        self.stop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._on_gone = _nobody
        for connection in list(self._held):
            connection.close()
        for listener in self._listeners:
            listener.close()


def _nobody(_: AskerGone) -> None:
    """Whom to tell when we close ourselves."""


def server_and_port(opened: socket.socket) -> tuple[Address, int]:
    """What the socket is bound to; of a connection the gate assigned to us, what the client asked."""
    text, port = opened.getsockname()[:2]
    return packed_of(opened.family, text), port


def packed_of(family: int, text: str) -> Address:
    """The text of a socket address, which for link-local IPv6 ends in %interface, to an address."""
    return socket.inet_pton(family, text.partition("%")[0])


class Connection:
    """One connection. It closes itself when the client is done, breaks off, or stands still."""

    def __init__(
        self,
        connections: Connections,
        accepted: socket.socket,
        client: Hashable,
        sender: Address,
        server: Address,
        port: int,
    ) -> None:
        self.client = client
        self._sender = sender
        self.progress_at = connections.loop.time()
        self._connections = connections
        self._socket = accepted
        self._server = server
        self._port = port
        self._unread = bytearray()
        self._unsent = bytearray()
        self._open: dict[Turn, None] = {}
        self._is_ending = False  # the client has shut its side: answer what is open, then close
        self._is_closed = False
        self._parse_is_due = self._is_put_off = False
        self._reads = self._writes = False
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._settle()

    @property
    def is_idle(self) -> bool:
        """Nothing is lost if it is closed, but a message still arriving."""
        return not self._open and not self._unsent

    def answer(self, turn: Turn, message: bytes) -> None:
        if turn not in self._open:
            self._connections.counters.replies_late += 1
            return
        del self._open[turn]
        self.progress_at = self._connections.loop.time()
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        if not self._writes:
            self._write()

    def close(self) -> None:
        if self._is_closed:
            return
        self._want(reads=False, writes=False)
        self._is_closed = True
        self._socket.close()
        open_turns, self._open = list(self._open), {}
        self._connections.drop(self, open_turns)

    def _read(self) -> None:
        try:
            received = self._socket.recv(MESSAGE_OCTETS_MAX)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._unread += received
        self._is_ending = not received
        self._parse()

    @property
    def _has_room(self) -> bool:
        limits = self._connections.limits
        return not self._is_put_off and len(self._open) < limits.open_max and len(self._unsent) < limits.unsent_octets_max

    def _parse_again(self) -> None:
        """Whole messages may have waited for room. In a callback of its own: the batch before may still be worked on."""
        if self._unread and not self._parse_is_due:
            self._parse_is_due = True
            self._connections.loop.call_soon(self._parse)

    def _parse(self) -> None:
        """Hand over the whole messages that are here, as many as there is room for."""
        self._parse_is_due = False
        if self._is_closed:
            return
        unread = self._unread
        queries: list[Query] = []
        at = 0
        while self._has_room and len(unread) >= at + 2:
            end = at + 2 + (unread[at] << 8 | unread[at + 1])
            if len(unread) < end:
                break
            if not self._connections.may_ask(self.client):
                self._put_off()
                break
            turn = Turn(self)
            self._open[turn] = None
            queries.append(Query(turn, self._sender, self._server, self._port, PROTOCOL_TCP, bytes(unread[at + 2 : end])))
            at = end
        if queries:
            del unread[:at]
            self.progress_at = self._connections.loop.time()
        self._settle()
        if queries:
            self._connections.hand_over(queries)

    def _put_off(self) -> None:
        self._is_put_off = True
        self._connections.counters.connections_put_off += 1
        self._connections.loop.call_later(PUT_OFF_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._is_put_off = False
        self._parse()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent:
            del self._unsent[:sent]
            self.progress_at = self._connections.loop.time()
            self._parse_again()
        self._settle()

    def _settle(self) -> None:
        """Read and write as far as there is room and something to do; close when all is done.

        The end is only read when there was room, so by then every whole message has been handed over.
        """
        if self._is_ending and self.is_idle and not self._is_put_off:
            self.close()
            return
        self._want(reads=self._has_room and not self._is_ending, writes=bool(self._unsent))

    def _want(self, reads: bool, writes: bool) -> None:
        loop, descriptor = self._connections.loop, self._socket.fileno()
        if reads != self._reads:
            self._reads = reads
            if reads:
                loop.add_reader(descriptor, self._read)
            else:
                loop.remove_reader(descriptor)
        if writes != self._writes:
            self._writes = writes
            if writes:
                loop.add_writer(descriptor, self._write)
            else:
                loop.remove_writer(descriptor)
