"""Asking upstreams: which port or connection a question leaves on, and what the core is told.

Rule 1: a question goes by the transport the client used; its reply comes back with the client's id and otherwise as it came.
Rule 2: the core is told in batches, from the loop: everything that came in one turn of the loop is one list.
Rule 3: each question ends in at most one event, Reply or UpstreamFailed; after `forget` in none.

Why a pool of ports: a fresh socket for each question costs two to three times as much in all, and one socket gives a forger a
port to aim at. A pool that is filled with a fresh port each time something is asked, and then renewed in turn, keeps a forger
guessing, at the price of a socket call now and then: the port is one of 256 out of the kernel's 28,000, the id one of 65,536.
Why several connections: some resolvers answer the questions of a connection strictly one after the other (dnsmasq, nsd); one
slow name must not stand in everybody's way.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
from collections import OrderedDict
from collections.abc import Callable, Sequence

from agent.core.events import AskUpstream, Reply, UpstreamFailed
from agent.core.types import PROTOCOL_TCP, Address
from agent.dns.batches import BATCH, Receiver, Sender
from agent.dns.carriers import Asked, Carrier, Ledger, Port, Stream, sentence_of

PORTS_BITS = 8
PORTS_MAX = 1 << PORTS_BITS
# After this many questions the oldest port gives way: a port serves about as many questions, and the socket call costs each of
# them a third of a microsecond.
RENEW_AFTER_QUESTIONS = 64
STREAMS_PER_SERVER_MAX = 32
STREAMS_MAX = 256
# Shorter than what resolvers keep idle connections for (RFC 7766 6.2.3: seconds), so that mostly we close, not they.
STREAM_IDLE_SECONDS = 5.0
# With `dns.upstreams: asked` clients choose servers; the one unused longest gives way.
SERVERS_MAX = 16


class _Server:
    """The carriers to one upstream. Ports are in order of age but for the place where the next one is renewed."""

    __slots__ = ("asked", "oldest", "ports", "streams")

    def __init__(self) -> None:
        self.asked = 0
        self.oldest = 0
        self.ports: list[Port] = []
        self.streams: list[Stream] = []


class Unpredictable(random.SystemRandom):
    """The kernel's randomness, fetched for many ids at a time: a call for each costs more than all else about an id."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[int] = []

    def getrandbits(self, k: int) -> int:
        if k > 16:
            return super().getrandbits(k)
        if not self._left:
            self._left = list(memoryview(os.urandom(2048)).cast("H"))
        return self._left.pop() >> (16 - k)


class Upstreams(Ledger):
    """Questions to upstreams and what came of them.

    mark: SO_MARK on everything sent, 0 for none. source: where ids and the choice of ports come from; unpredictable in
    production. mixes_case: see `carriers`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mark: int,
        on_events: Callable[[list[Reply | UpstreamFailed]], None],
        source: random.Random | None = None,
        *,
        mixes_case: bool = False,
    ) -> None:
        super().__init__(mixes_case=mixes_case)
        self._loop = loop
        self._mark = mark
        self._on_events = on_events
        self._random = source or Unpredictable()
        self._asked_by_transaction: dict[int, Asked] = {}
        self._servers: OrderedDict[tuple[Address, int], _Server] = OrderedDict()
        self._carriers: dict[Carrier, None] = {}  # all that are open, the retired ones too
        self._streams_count = 0
        self._events_by_transaction: dict[int, Reply | UpstreamFailed] = {}
        self._flush_is_due = False
        self._sweep: asyncio.TimerHandle | None = None
        self._receiver, self._sender = Receiver(), Sender()
        # All ports in one place of the loop: many are ready at once, and a callback for each would cost more than the reading.
        self._ports: dict[int, Port] = {}
        self._poll = select.epoll()
        loop.add_reader(self._poll.fileno(), self._read)

    def ask(self, effect: AskUpstream) -> None:
        """`ask_all` of one."""
        self.ask_all((effect,))

    def ask_all(self, effects: Sequence[AskUpstream]) -> None:
        """Send the questions; of one transaction only the last try is open, here and before. Failure is told as an event."""
        datagrams: dict[tuple[Address, int], list[AskUpstream]] = {}
        for effect in {effect.transaction: effect for effect in effects}.values():
            self.forget(effect.transaction)
            if effect.protocol == PROTOCOL_TCP:
                self._ask_stream(effect)
            else:
                datagrams.setdefault((effect.server, effect.port), []).append(effect)
        for key, of_server in datagrams.items():
            for start in range(0, len(of_server), BATCH):
                self._ask_port(self._server(key), key, of_server[start : start + BATCH])

    def _ask_stream(self, effect: AskUpstream) -> None:
        try:
            self._asked_by_transaction[effect.transaction] = self._choose_stream(effect).ask(effect)
        except OSError as error:
            self.unsent(effect, sentence_of(error))

    def _ask_port(self, server: _Server, key: tuple[Address, int], effects: list[AskUpstream]) -> None:
        try:
            port = self._choose_port(server, key, len(effects))
        except OSError as error:
            for effect in effects:
                self.unsent(effect, sentence_of(error))
            return
        for asked in port.ask(effects, self._sender):
            self._asked_by_transaction[asked.effect.transaction] = asked

    def forget(self, transaction: int) -> None:
        """The core wants no answer any more; what still comes is late."""
        self._events_by_transaction.pop(transaction, None)
        asked = self._asked_by_transaction.pop(transaction, None)
        if asked is not None:
            asked.carrier.forget(asked)

    def __len__(self) -> int:
        """Questions open."""
        return len(self._asked_by_transaction)

    def close(self) -> None:
        """Close every socket; nothing more is told."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._asked_by_transaction.clear()
        self._events_by_transaction.clear()
        for carrier in list(self._carriers):
            carrier.close()
        self._servers.clear()
        if not self._poll.closed:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._receiver.close()
            self._sender.close()

    # --- choosing ---

    def _server(self, key: tuple[Address, int]) -> _Server:
        server = self._servers.get(key)
        if server is not None:
            self._servers.move_to_end(key)
            return server
        if len(self._servers) >= SERVERS_MAX:
            _, unused = self._servers.popitem(last=False)
            for carrier in (*unused.ports, *unused.streams):
                carrier.retire()
        server = self._servers[key] = _Server()
        return server

    def _choose_port(self, server: _Server, key: tuple[Address, int], questions: int) -> Port:
        """For so many questions at once; OSError if there is none to be had."""
        before, server.asked = server.asked, server.asked + questions
        is_full = len(server.ports) == PORTS_MAX
        if is_full and before // RENEW_AFTER_QUESTIONS == server.asked // RENEW_AFTER_QUESTIONS:
            return server.ports[self._random.getrandbits(PORTS_BITS)]
        try:
            port = Port(self, self._loop, self._random, *key, self._mark)
        except OSError:
            if not server.ports:
                raise
            # Short of descriptors: fewer ports are better than no answer.
            return server.ports[self._random.randrange(len(server.ports))]
        self._carriers[port] = None
        self._ports[port.descriptor] = port
        self._poll.register(port.descriptor, select.EPOLLIN)
        if is_full:
            server.ports[server.oldest].retire()
            server.ports[server.oldest] = port
            server.oldest = (server.oldest + 1) % PORTS_MAX
        else:
            server.ports.append(port)
        return port

    def _choose_stream(self, effect: AskUpstream, fresh: bool = False) -> Stream:
        """An idle connection, or a new one, or at the bound the one with the fewest questions."""
        server = self._server((effect.server, effect.port))
        usable = [stream for stream in server.streams if not stream.is_retired]
        least = min(usable, key=lambda stream: len(stream.asked_by_number), default=None)
        if least is not None and not fresh and not least.asked_by_number:
            return least
        if len(usable) < STREAMS_PER_SERVER_MAX and self._streams_count < STREAMS_MAX:
            stream = Stream(self, self._loop, self._random, effect.server, effect.port, self._mark)
            self._carriers[stream] = None
            self._streams_count += 1
            server.streams.append(stream)
            self._sweep = self._sweep or self._loop.call_later(STREAM_IDLE_SECONDS / 2, self._close_idle)
            return stream
        if least is None:
            raise OSError("too many connections to upstreams are open")
        return least

    def _close_idle(self) -> None:
        self._sweep = None
        before = self._loop.time() - STREAM_IDLE_SECONDS
        for server in self._servers.values():
            for stream in list(server.streams):
                if not stream.asked_by_number and stream.used_at < before:
                    stream.close()
        if self._streams_count:
            self._sweep = self._loop.call_later(STREAM_IDLE_SECONDS / 2, self._close_idle)

    def _read(self) -> None:
        """Ports have something. All of it is told together, at once."""
        for descriptor, _ in self._poll.poll(0):
            self._ports[descriptor].read(self._receiver)
        self._flush()

    # --- what carriers tell ---

    def answered(self, asked: Asked, message: bytes) -> None:
        del self._asked_by_transaction[asked.effect.transaction]
        self._tell(Reply(asked.effect.transaction, asked.effect.message[:2] + message[2:]))

    def failed(self, asked: Asked, why: str) -> None:
        del self._asked_by_transaction[asked.effect.transaction]
        self.unsent(asked.effect, why)

    def lost(self, asked: Asked, why: str) -> None:
        if asked.is_retry:
            self.failed(asked, why)
            return
        try:
            again = self._choose_stream(asked.effect, fresh=True).ask(asked.effect, is_retry=True)
        except OSError as error:
            self.failed(asked, sentence_of(error))
            return
        self.counters.asked_again += 1
        self._asked_by_transaction[asked.effect.transaction] = again

    def ended(self, carrier: Carrier) -> None:
        del self._carriers[carrier]
        if isinstance(carrier, Port):
            del self._ports[carrier.descriptor]  # its end takes it out of the poll
        elif isinstance(carrier, Stream):
            self._streams_count -= 1
            for server in self._servers.values():
                if carrier in server.streams:
                    server.streams.remove(carrier)

    def unsent(self, effect: AskUpstream, why: str) -> None:
        self.counters.failed += 1
        self._tell(UpstreamFailed(effect.transaction, why))

    def _tell(self, event: Reply | UpstreamFailed) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)
        self._events_by_transaction[event.transaction] = event

    def _flush(self) -> None:
        self._flush_is_due = False
        events = list(self._events_by_transaction.values())
        self._events_by_transaction.clear()
        if events:
            self._on_events(events)
