"""TCP connections of clients over loopback; no root: what the gate adds is in test_sockets.py."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent.core.events import AskerGone, Query
from agent.core.types import PROTOCOL_TCP, packed
from agent.dns import connections as module
from agent.dns.bounds import Counters, Limits
from agent.dns.connections import Connections

PATIENCE_SECONDS = 5.0


class Gate:
    """A listener, its connections, and everything they handed over."""

    def __init__(self, limits: Limits) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.listener.setblocking(False)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.counters = Counters()
        self.queries: asyncio.Queue[Query] = asyncio.Queue()
        self.gone: asyncio.Queue[AskerGone] = asyncio.Queue()
        self.batches: list[int] = []
        self.clients: list[asyncio.StreamWriter] = []
        loop = asyncio.get_running_loop()
        self.connections = Connections(loop, [self.listener], limits, self.counters, self._take, self.gone.put_nowait)
        # Here clients come directly, not by the gate program.
        self.connections._own.clear()

    def _take(self, queries: list[Query]) -> None:
        self.batches.append(len(queries))
        for query in queries:
            self.queries.put_nowait(query)

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self.clients.append(writer)
        return reader, writer


@contextmanager
def gate(**limits: Any) -> Iterator[Gate]:
    opened = Gate(Limits(**limits))
    try:
        yield opened
    finally:
        opened.connections.close()
        for writer in opened.clients:
            writer.transport.abort()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await story()
        await asyncio.sleep(0)  # closed transports let go of their sockets in the next turn

    asyncio.run(bounded())


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


async def message_from(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))


def answer(query: Query, message: bytes) -> None:
    query.asker.connection.answer(query.asker, message)  # type: ignore[attr-defined]


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


def test_a_message_octet_by_octet() -> None:
    """Length split as well; the message reaches the core whole, with who asked whom."""

    async def story() -> None:
        with gate() as opened:
            reader, writer = await opened.client()
            for octet in framed(b"question"):
                writer.write(bytes([octet]))
                await writer.drain()
                await asyncio.sleep(0)
            query = await opened.queries.get()
            said = query.client, query.server, query.port, query.protocol, query.message
            assert said == (packed("127.0.0.1"), packed("127.0.0.1"), opened.address[1], PROTOCOL_TCP, b"question")
            answer(query, b"reply")
            assert await message_from(reader) == b"reply"

    run(story)


def test_pipelined_questions_are_one_batch_and_answered_in_any_order() -> None:
    """Three in one segment: one hand-over; replies leave as they come. An empty message is a message."""

    async def story() -> None:
        with gate() as opened:
            reader, writer = await opened.client()
            writer.write(framed(b"a", b"", b"c"))
            queries = [await opened.queries.get() for _ in range(3)]
            assert [query.message for query in queries] == [b"a", b"", b"c"]
            assert opened.batches == [3]
            for query in (queries[2], queries[0]):
                answer(query, query.message.upper())
            assert [await message_from(reader) for _ in range(2)] == [b"C", b"A"]
            # The same turn twice is late, not a second reply.
            answer(queries[2], b"again")
            assert opened.counters.replies_late == 1

    run(story)


def test_open_questions_are_bounded_and_the_rest_waits() -> None:
    """Ten questions, room for two: each answer lets the next in, none is lost, and the client is not read meanwhile."""

    async def story() -> None:
        with gate(open_max=2) as opened:
            reader, writer = await opened.client()
            writer.write(framed(*(bytes([index]) for index in range(10))))
            for index in range(10):
                query = await opened.queries.get()
                assert query.message == bytes([index])
                assert len(query.asker.connection._open) <= 2  # type: ignore[attr-defined]
                answer(query, query.message)
                assert await message_from(reader) == bytes([index])
            assert max(opened.batches) <= 2

    run(story)


@pytest.mark.parametrize("open_max", [1, 2, 64])
def test_a_client_that_has_shut_its_side_gets_its_answers(open_max: int) -> None:
    """Also those whose questions still waited for room; then the connection is closed."""

    async def story() -> None:
        with gate(open_max=open_max) as opened:
            reader, writer = await opened.client()
            writer.write(framed(b"a", b"b") + b"\x00")
            writer.write_eof()
            for expected in (b"a", b"b"):
                query = await opened.queries.get()
                assert query.message == expected
                answer(query, expected)
                assert await message_from(reader) == expected
            assert await closed(reader)
            assert len(opened.connections) == 0

    run(story)


def test_a_broken_connection_tells_who_is_gone() -> None:
    """Every open question of it, each once; an answer that comes later is counted."""

    async def story() -> None:
        with gate() as opened:
            _, writer = await opened.client()
            writer.write(framed(b"a", b"b"))
            queries = [await opened.queries.get() for _ in range(2)]
            reset(writer)
            gone = [await opened.gone.get() for _ in range(2)]
            assert {event.asker for event in gone} == {query.asker for query in queries}
            answer(queries[0], b"late")
            assert opened.counters.replies_late == 1
            assert opened.gone.empty()

    run(story)


def test_nobody_is_told_from_inside_an_answer() -> None:
    """The answer that finds the connection broken tells of the other questions later: the core is not entered twice."""

    async def story() -> None:
        with gate() as opened:
            _, writer = await opened.client()
            writer.write(framed(b"a", b"b"))
            queries = [await opened.queries.get() for _ in range(2)]
            connection = queries[0].asker.connection  # type: ignore[attr-defined]
            connection._socket.shutdown(socket.SHUT_WR)
            answer(queries[0], b"into nothing")
            assert opened.gone.empty()
            assert (await opened.gone.get()).asker is queries[1].asker

    run(story)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, not a FIN."""
    opened = writer.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("sent", [b"", b"\x00", framed(b"question")[:-1], framed(b"ignored by the core")])
def test_a_connection_without_progress_is_closed(sent: bytes) -> None:
    """Empty, in the middle of a message, or with a question that nobody answers."""

    async def story() -> None:
        with gate(idle_seconds=0.1) as opened:
            reader, writer = await opened.client()
            writer.write(sent)
            assert await closed(reader)
            assert opened.counters.connections_idle == 1

    run(story)


def test_a_trickle_is_no_progress() -> None:
    """A sender of one octet now and then does not keep its place: the time is from the last whole message."""

    async def story() -> None:
        with gate(idle_seconds=0.2) as opened:
            reader, writer = await opened.client()

            async def trickle() -> None:
                while True:
                    writer.write(b"\x01")
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            assert await closed(reader)
            trickling.cancel()

    run(story)


@pytest.mark.parametrize("limits", [{"connections_per_client_max": 3}, {"connections_max": 3}])
def test_at_a_bound_the_idlest_connection_gives_way(limits: dict[str, int]) -> None:
    """One of the client's own, or of all; if every one has an open question, the new one is refused."""

    async def story() -> None:
        with gate(**limits) as opened:
            clients = []
            for _ in range(3):
                reader, writer = await opened.client()
                writer.write(framed(b"x"))
                clients.append((reader, writer, await opened.queries.get()))
            for index in (1, 0):
                answer(clients[index][2], b"y")
                assert await message_from(clients[index][0]) == b"y"
            _, fourth = await opened.client()
            fourth.write(framed(b"4"))
            assert (await opened.queries.get()).message == b"4"
            assert await closed(clients[1][0])
            assert (opened.counters.connections_idle, len(opened.connections)) == (1, 3)
            clients[0][1].write(framed(b"x"))
            await opened.queries.get()
            reader, _ = await opened.client()
            assert await closed(reader)
            assert opened.counters.connections_refused == 1

    run(story)


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """What is unsent is bounded: at most the bound and the replies of the open questions."""

    async def story() -> None:
        with gate(unsent_octets_max=1000, open_max=4, idle_seconds=0.3) as opened:
            reader, writer = await opened.client()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(3000):
                writer.write(framed(b"q"))
            worst = 0
            # Answered until the loop lets no more in: then the sweep closes the connection.
            while opened.counters.connections_idle == 0:
                try:
                    async with asyncio.timeout(0.05):
                        query = await opened.queries.get()
                except TimeoutError:
                    continue
                answer(query, bytes(60000))
                worst = max(worst, len(query.asker.connection._unsent))  # type: ignore[attr-defined]
            assert 1000 < worst <= 1000 + 5 * 60002

    run(story)


def test_without_descriptors_the_queue_is_left_alone_for_a_while() -> None:
    """EMFILE: not tried again at once, which would be all the loop does; taken when there is one again."""

    async def story() -> None:
        with gate() as opened, pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ACCEPT_PAUSE_SECONDS", 0.05)
            tries = 0

            class Exhausted:
                family = socket.AF_INET

                def accept(self) -> None:
                    nonlocal tries
                    tries += 1
                    raise OSError(24, "Too many open files")

            listen = opened.connections._accept
            loop = asyncio.get_running_loop()
            loop.add_reader(opened.listener.fileno(), lambda: listen(Exhausted()))  # type: ignore[arg-type]
            _, writer = await opened.client()
            writer.write(framed(b"x"))
            assert (await opened.queries.get()).message == b"x"
            assert tries == opened.counters.connections_refused == 1

    run(story)


def test_who_comes_directly_is_refused() -> None:
    """The listener's own address is nobody's server."""

    async def story() -> None:
        with gate() as opened:
            opened.connections._own.append((packed("127.0.0.1"), opened.address[1]))
            reader, _ = await opened.client()
            assert await closed(reader)
            assert opened.counters.connections_refused == 1

    run(story)


def test_a_client_asks_no_faster_over_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it pipelines over the burst waits, whichever connection it is on, and comes in time; another client's does not."""
    monkeypatch.setattr(module, "PUT_OFF_SECONDS", 0.01)

    async def story() -> None:
        with gate(questions_per_second=100, question_burst=4) as opened:
            begun = asyncio.get_running_loop().time()
            clients = [await opened.client() for _ in range(3)]
            for _, writer in clients:
                writer.write(framed(*[b"question"] * 4))
            for _ in range(12):
                answer(await opened.queries.get(), b"reply")
            took = asyncio.get_running_loop().time() - begun
            assert took > 8 / 100  # four at once, the other eight at the pace
            assert opened.counters.connections_put_off >= 2
            for reader, _ in clients:
                assert [await message_from(reader) for _ in range(4)] == [b"reply"] * 4
            opened.connections._client_of = lambda _: "another"
            _, writer = await opened.client()
            writer.write(framed(b"question"))
            await opened.queries.get()

    run(story)


def test_all_addresses_of_an_endpoint_are_one_client() -> None:
    """Or one with many addresses could hold every connection there may be."""

    async def story() -> None:
        with gate(connections_per_client_max=2) as opened:
            opened.connections._client_of = lambda address: 7 if address != packed("127.0.0.9") else address
            readers = []
            for number in range(3):
                reader, writer = await asyncio.open_connection(*opened.address, local_addr=(f"127.0.0.{number + 1}", 0))
                opened.clients.append(writer)
                writer.write(framed(b"question"))
                query = await opened.queries.get()
                assert query.client == packed(f"127.0.0.{number + 1}")
                answer(query, b"reply")
                await message_from(reader)
                readers.append(reader)
            assert await closed(readers[0])
            assert len(opened.connections) == 2

    run(story)
