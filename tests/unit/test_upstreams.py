"""Asking upstreams over real sockets on loopback; no root."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import dns.message
import pytest

from agent.core.events import AskUpstream, Reply, UpstreamFailed
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, packed
from agent.dns import upstreams as module
from agent.dns.carriers import mixed
from agent.dns.upstreams import Upstreams
from agent.dns.wire import read_question

PATIENCE_SECONDS = 5.0
Events = list[Reply | UpstreamFailed]


class Told:
    """What the core would be told, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[Events] = []
        self.sizes: list[int] = []
        self._more = asyncio.Event()

    def __call__(self, events: Events) -> None:
        self.batches.append(events)
        self.sizes.append(len(events))
        self._more.set()

    async def events(self, count: int) -> Events:
        """The next `count` events, taken out."""
        while sum(map(len, self.batches)) < count:
            self._more.clear()
            await self._more.wait()
        events = [event for batch in self.batches for event in batch]
        self.batches.clear()
        return events

    async def reply(self) -> tuple[int, bytes]:
        """The next event, which is a reply: whose, and what it says."""
        (event,) = await self.events(1)
        assert isinstance(event, Reply)
        return event.transaction, event.message


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Play the story in a loop of its own, with a bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await story()

    asyncio.run(bounded())


@contextmanager
def asking(seed: int = 1) -> Iterator[tuple[Upstreams, Told]]:
    told = Told()
    upstreams = Upstreams(asyncio.get_running_loop(), 0, told, random.Random(seed))
    try:
        yield upstreams, told
    finally:
        upstreams.close()


@contextmanager
def udp_server(address: str = "127.0.0.1") -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as opened:
        opened.setblocking(False)
        opened.bind((address, 0))
        yield opened


class TcpServer:
    """Accepted connections and what came on them; the test answers by hand."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: list[asyncio.StreamWriter] = []
        self.asked: asyncio.Queue[tuple[bytes, asyncio.StreamWriter]] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(2), "big")
                self.asked.put_nowait((await reader.readexactly(length), writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def tcp_server() -> AsyncIterator[TcpServer]:
    served = TcpServer()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        for writer in served.connections:
            writer.close()
        await server.wait_closed()


def effect(
    transaction: int, port: int, protocol: int = PROTOCOL_UDP, server: str = "127.0.0.1", name: str = "A.test."
) -> AskUpstream:
    message = dns.message.make_query(name, "A", id=0x4242).to_wire()
    return AskUpstream(transaction, packed(server), port, protocol, message, read_question(message).section)


def reply_to(query: bytes, address: str = "192.0.2.1") -> bytes:
    message = dns.message.make_response(dns.message.from_wire(query))
    message.answer = [dns.rrset.from_text(message.question[0].name, 60, "IN", "A", address)]
    return message.to_wire()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(2, "big") + message


async def receive(server: socket.socket) -> tuple[bytes, tuple[str, int]]:
    return await asyncio.get_running_loop().sock_recvfrom(server, 65535)


# --- UDP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_reply_has_the_clients_id_and_is_otherwise_the_upstreams(address: str) -> None:
    """The upstream sees another id and the rest as the client wrote it; the core gets the upstream's octets but for the id."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server(address) as server:
            asked = effect(7, server.getsockname()[1], server=address)
            upstreams.ask(asked)
            query, sender = await receive(server)
            assert query[2:] == asked.message[2:]
            assert query[:2] != asked.message[:2]
            reply = reply_to(query)
            server.sendto(reply, sender)
            assert await told.reply() == (7, b"\x42\x42" + reply[2:])
            assert len(upstreams) == 0

    run(story)


def test_a_lie_is_counted_and_the_truth_still_taken() -> None:
    """Another id, question, spelling or port, no response, no question, cut: none is told, nor ends the waiting."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as server, udp_server() as liar:
            upstreams.ask(effect(1, server.getsockname()[1]))
            query, sender = await receive(server)
            truth = reply_to(query)
            other_id = (int.from_bytes(query[:2], "big") ^ 1).to_bytes(2, "big")
            liar.sendto(reply_to(query, "203.0.113.66"), sender)
            server.sendto(other_id + truth[2:], sender)
            lies = [
                truth.replace(b"\x01A\x04test", b"\x01B\x04test"),
                truth.replace(b"\x01A\x04test", b"\x01a\x04test"),
                truth[:2] + b"\x01" + truth[3:],
                truth[:4] + b"\x00\x00" + truth[6:],
                truth[:11],
                truth[:2],
            ]
            for lie in (*lies, truth, truth):
                server.sendto(lie, sender)
            assert await told.reply() == (1, b"\x42\x42" + truth[2:])
            assert upstreams.counters.mismatched == len(lies)
            # The other id came before; the second truth came after, when nobody waited.
            assert upstreams.counters.late == 2

    run(story)


def test_what_comes_after_forget_is_late() -> None:
    """The core gave up: nothing is told, also when the reply is here already but the core was not told yet."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as server:
            place = server.getsockname()[1]
            upstreams.ask(effect(1, place))
            upstreams.ask(effect(2, place))
            queries = [await receive(server) for _ in range(2)]
            upstreams.forget(1)
            for query, sender in queries:
                server.sendto(reply_to(query), sender)
            assert [event.transaction for event in await told.events(1)] == [2]
            assert upstreams.counters.late == 1
            upstreams.forget(1)
            upstreams.forget(99)

    run(story)


def test_asking_again_at_once_replaces_the_try_before() -> None:
    """Of two tries that leave together only the second is sent and may answer, and nothing of the first is left."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as first, udp_server() as second:
            one, two = (effect(1, server.getsockname()[1]) for server in (first, second))
            upstreams.ask_all([one, two, effect(2, second.getsockname()[1])])
            assert len(upstreams) == 2
            for _ in range(2):
                query, sender = await receive(second)
                second.sendto(reply_to(query), sender)
            assert sorted(event.transaction for event in await told.events(2)) == [1, 2]
            with pytest.raises(BlockingIOError):
                first.recv(65535)
            assert not any(carrier.asked_by_number for carrier in upstreams._carriers)

    run(story)


def test_asking_again_replaces_the_try_before() -> None:
    """Of two tries only the second may answer, and a failure of the first that was not told yet is not told any more."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as first, udp_server() as second:
            upstreams.ask(effect(1, first.getsockname()[1]))
            query, sender = await receive(first)
            upstreams.ask(effect(1, second.getsockname()[1]))
            first.sendto(reply_to(query, "203.0.113.66"), sender)
            query, sender = await receive(second)
            second.sendto(reply_to(query), sender)
            events = await told.events(1)
            assert [type(event) for event in events] == [Reply]
            # With no room for a connection the first try of 2 fails at once.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "STREAMS_MAX", 0)
                upstreams.ask(effect(2, second.getsockname()[1], PROTOCOL_TCP))
            assert upstreams.counters.failed == 1
            upstreams.ask(effect(2, second.getsockname()[1]))
            query, sender = await receive(second)
            second.sendto(reply_to(query), sender)
            assert [type(event) for event in await told.events(1)] == [Reply]

    run(story)


@pytest.mark.parametrize("protocol", [PROTOCOL_UDP, PROTOCOL_TCP])
def test_a_refusing_upstream_fails_the_question(protocol: int) -> None:
    """An ICMP error or a reset becomes UpstreamFailed, from the loop and never from inside `ask`."""

    async def story() -> None:
        with asking() as (upstreams, told):
            with udp_server() as server:
                nobody = server.getsockname()[1]
            upstreams.ask(effect(1, nobody, protocol))
            assert not told.batches
            assert await told.events(1) == [UpstreamFailed(1, "connection refused")]
            assert (len(upstreams), upstreams.counters.failed) == (0, 1)

    run(story)


def test_an_error_of_an_earlier_question_does_not_take_the_next() -> None:
    """The kernel tells an ICMP error to the next call on the socket, whosoever it is: that question is still asked."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PORTS_MAX", 1)
            patch.setattr(module, "PORTS_BITS", 0)
            with udp_server() as server:
                place = server.getsockname()
            upstreams.ask(effect(1, place[1]))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
                server.bind(place)
                server.setblocking(False)
                # No turn of the loop in between, so the error of the first is still pending.
                upstreams.ask(effect(2, place[1]))
                query, sender = await receive(server)
                server.sendto(reply_to(query), sender)
                assert {type(event): event.transaction for event in await told.events(2)} == {UpstreamFailed: 1, Reply: 2}

    run(story)


def test_ports_and_ids_are_many() -> None:
    """64 questions: as many source ports, and ids that do not repeat (the bound of the peers' case: 48 and 60)."""

    async def story() -> None:
        with asking() as (upstreams, _), udp_server() as server:
            for transaction in range(64):
                upstreams.ask(effect(transaction, server.getsockname()[1]))
            seen = [await receive(server) for _ in range(64)]
            assert len({sender[1] for _, sender in seen}) == 64
            assert len({query[:2] for query, _ in seen}) >= 60

    run(story)


def test_the_pool_is_bounded_and_renewed_in_turn() -> None:
    """Full, it opens no more; every so many questions the oldest port gives way to a new one."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PORTS_MAX", 4)
            patch.setattr(module, "PORTS_BITS", 2)
            patch.setattr(module, "RENEW_AFTER_QUESTIONS", 8)
            ports: list[int] = []
            for transaction in range(40):
                upstreams.ask(effect(transaction, server.getsockname()[1]))
                query, sender = await receive(server)
                ports.append(sender[1])
                server.sendto(reply_to(query), sender)
                await told.events(1)
                assert len(upstreams._carriers) <= 4
            assert len(set(ports[:4])) == 4
            # Questions 8, 16, 24, 32 and 40 each opened a port; after four of them none of the first is left.
            assert len(set(ports)) == 4 + 5
            assert not set(ports[:4]) & set(ports[32:])

    run(story)


def test_a_retired_port_lives_as_long_as_its_question() -> None:
    """Renewal does not lose a reply that is on its way; then the port is closed."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PORTS_MAX", 1)
            patch.setattr(module, "PORTS_BITS", 0)
            patch.setattr(module, "RENEW_AFTER_QUESTIONS", 1)
            for transaction in (1, 2):
                upstreams.ask(effect(transaction, server.getsockname()[1]))
            (first, sender), _ = [await receive(server) for _ in range(2)]
            assert len(upstreams._carriers) == 2
            server.sendto(reply_to(first), sender)
            assert [event.transaction for event in await told.events(1)] == [1]
            assert len(upstreams._carriers) == 1

    run(story)


def _send_datagram(server: socket.socket, client: tuple[str, int], message: bytes) -> None:
    server.sendto(message, client)


def _send_on_stream(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(2, "big") + message)


@pytest.mark.parametrize("protocol", [PROTOCOL_UDP, PROTOCOL_TCP])
def test_a_mix_of_case_is_asked_and_taken_back(protocol: int) -> None:
    """The question leaves in a case of its own; only a reply that repeats it is taken, and has the client's again."""

    async def story() -> None:
        told = Told()
        upstreams = Upstreams(asyncio.get_running_loop(), 0, told, random.Random(3), mixes_case=True)
        with udp_server() as server:
            async with tcp_server() as tcp:
                port = server.getsockname()[1] if protocol == PROTOCOL_UDP else tcp.port
                question = effect(1, port, protocol, name="a-name-of-many-letters.example.")
                upstreams.ask(question)
                if protocol == PROTOCOL_UDP:
                    asked, client = await receive(server)
                    send = partial(_send_datagram, server, client)
                else:
                    asked, writer = await tcp.asked.get()
                    send = partial(_send_on_stream, writer)
                section = asked[12 : 12 + len(question.question)]
                assert section != question.question
                assert section.lower() == question.question
                assert len(asked) == len(question.message)
                assert asked[12 + len(section) :] == question.message[12 + len(section) :]
                reply = reply_to(asked)
                wrong = reply[:12] + section.swapcase() + reply[12 + len(section) :]
                send(wrong)
                send(reply)
                (answer,) = await told.events(1)
                assert isinstance(answer, Reply)
                assert answer.message == b"\x42\x42" + reply[2:12] + question.question + reply[12 + len(section) :]
                assert upstreams.counters.mismatched == 1
        upstreams.close()

    run(story)


def test_mixed_case_is_of_letters_alone() -> None:
    """Lengths, digits, type and class stay; with many draws every letter is seen in both cases."""
    section = effect(1, 53, name="a1-z.Zoo-9.example.").question
    seen = {mixed(section, random.Random(seed)) for seed in range(64)}
    assert {one.lower() for one in seen} == {section.lower()}
    assert {one[-4:] for one in seen} == {section[-4:]}
    for place, octet in enumerate(section[:-4]):
        assert len({one[place] for one in seen}) == (2 if chr(octet).isalpha() else 1)


def test_an_id_in_use_is_not_given_twice() -> None:
    """On one port, with a source of ids that repeats itself."""

    class Stutter(random.Random):
        def __init__(self) -> None:
            super().__init__()
            self.left = [5, 5, 5, 6]

        def getrandbits(self, k: int) -> int:
            return self.left.pop(0) if k == 16 else 0

    async def story() -> None:
        told = Told()
        upstreams = Upstreams(asyncio.get_running_loop(), 0, told, Stutter())
        with udp_server() as server, pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PORTS_MAX", 1)
            patch.setattr(module, "PORTS_BITS", 0)
            for transaction in (1, 2):
                upstreams.ask(effect(transaction, server.getsockname()[1]))
            assert [(await receive(server))[0][:2] for _ in range(2)] == [b"\x00\x05", b"\x00\x06"]
        upstreams.close()

    run(story)


def test_what_comes_together_is_told_together() -> None:
    """Replies on sixteen ports in one turn of the loop are one batch: the core makes one pass and one group of writes."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as server:
            for transaction in range(16):
                upstreams.ask(effect(transaction, server.getsockname()[1]))
            for query, sender in [await receive(server) for _ in range(16)]:
                server.sendto(reply_to(query), sender)
            await told.events(16)
            assert told.sizes == [16]

    run(story)


def test_servers_are_bounded() -> None:
    """The one unused longest gives way; its open question is still answered."""

    async def story() -> None:
        with asking() as (upstreams, told), udp_server() as first, udp_server() as other, pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SERVERS_MAX", 1)
            upstreams.ask(effect(1, first.getsockname()[1]))
            upstreams.ask(effect(2, other.getsockname()[1]))
            assert len(upstreams._servers) == 1
            query, sender = await receive(first)
            first.sendto(reply_to(query), sender)
            assert [event.transaction for event in await told.events(1)] == [1]
            assert len(upstreams._carriers) == 1

    run(story)


# --- TCP -------------------------------------------------------------------------------------------------------------


def test_a_tcp_question_in_pieces() -> None:
    """A reply that comes octet by octet, with two in one segment behind it."""

    async def story() -> None:
        with asking() as (upstreams, told):
            async with tcp_server() as server:
                upstreams.ask(effect(1, server.port, PROTOCOL_TCP))
                query, writer = await server.asked.get()
                assert query[2:] == effect(1, server.port).message[2:]
                reply = reply_to(query)
                for octet in framed(reply):
                    writer.write(bytes([octet]))
                    await writer.drain()
                    await asyncio.sleep(0)
                assert await told.reply() == (1, b"\x42\x42" + reply[2:])

    run(story)


def test_an_idle_connection_is_used_again_and_a_busy_one_is_not() -> None:
    """One slow name does not stand before another; at the bound questions share, and replies come in any order."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STREAMS_PER_SERVER_MAX", 2)
            async with tcp_server() as server:
                for transaction in (1, 2, 3):
                    upstreams.ask(effect(transaction, server.port, PROTOCOL_TCP, name=f"n{transaction}.test."))
                asked = [await server.asked.get() for _ in range(3)]
                assert len(server.connections) == 2
                # Backwards, those of one connection in one segment.
                for writer in server.connections:
                    writer.write(b"".join(framed(reply_to(query)) for query, came_on in reversed(asked) if came_on is writer))
                assert {event.transaction for event in await told.events(3)} == {1, 2, 3}
                upstreams.ask(effect(4, server.port, PROTOCOL_TCP))
                await server.asked.get()
                assert len(server.connections) == 2

    run(story)


def test_a_question_lost_with_a_used_connection_is_asked_once_more() -> None:
    """The upstream closes an idle connection while a question is on its way to it: asked again on a new one, but only once."""

    async def story() -> None:
        with asking() as (upstreams, told):
            async with tcp_server() as server:
                upstreams.ask(effect(1, server.port, PROTOCOL_TCP))
                query, writer = await server.asked.get()
                writer.write(framed(reply_to(query)))
                await told.events(1)
                upstreams.ask(effect(2, server.port, PROTOCOL_TCP))
                await server.asked.get()
                writer.close()
                query, again = await server.asked.get()
                assert again is not writer
                again.write(framed(reply_to(query)))
                assert [event.transaction for event in await told.events(1)] == [2]
                assert upstreams.counters.asked_again == 1
                upstreams.ask(effect(3, server.port, PROTOCOL_TCP))
                for _ in range(2):
                    _, closing = await server.asked.get()
                    closing.close()
                assert await told.events(1) == [UpstreamFailed(3, "the upstream closed the connection")]

    run(story)


def test_a_lost_question_does_not_go_where_the_next_end_waits() -> None:
    """An upstream that restarts closes all its connections: the second try is on a new one, not on another idle one."""

    async def story() -> None:
        with asking() as (upstreams, told):
            async with tcp_server() as server:
                for transaction in (1, 2):
                    upstreams.ask(effect(transaction, server.port, PROTOCOL_TCP))
                for query, writer in [await server.asked.get() for _ in range(2)]:
                    writer.write(framed(reply_to(query)))
                await told.events(2)
                upstreams.ask(effect(3, server.port, PROTOCOL_TCP))
                await server.asked.get()
                before = list(server.connections)
                for writer in before:
                    writer.close()
                query, again = await server.asked.get()
                assert again not in before
                again.write(framed(reply_to(query)))
                assert [type(event) for event in await told.events(1)] == [Reply]

    run(story)


def test_a_question_is_lost_only_twice() -> None:
    """An upstream that answers one question a connection and closes: the second loss is a failure, not a third try."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STREAMS_PER_SERVER_MAX", 1)
            async with tcp_server() as server:
                for transaction in (1, 2):
                    upstreams.ask(effect(transaction, server.port, PROTOCOL_TCP))
                (query, writer), _ = [await server.asked.get() for _ in range(2)]
                writer.write(framed(reply_to(query)))
                writer.close()
                # The second again, on a new connection; a third question behind it is answered first.
                await server.asked.get()
                upstreams.ask(effect(3, server.port, PROTOCOL_TCP))
                query, writer = await server.asked.get()
                writer.write(framed(reply_to(query)))
                writer.close()
                events = await told.events(3)
                assert [event.transaction for event in events if isinstance(event, Reply)] == [1, 3]
                assert [event.transaction for event in events if isinstance(event, UpstreamFailed)] == [2]

    run(story)


def test_a_fresh_connection_that_closes_fails_its_questions() -> None:
    """No second try: this upstream does not answer over TCP."""

    async def story() -> None:
        with asking() as (upstreams, told):
            async with tcp_server() as server:
                upstreams.ask(effect(1, server.port, PROTOCOL_TCP))
                _, writer = await server.asked.get()
                writer.close()
                assert await told.events(1) == [UpstreamFailed(1, "the upstream closed the connection")]

    run(story)


def test_a_connection_that_let_a_question_wait_takes_no_more() -> None:
    """It may be dead without our knowing; its other questions stay, and it closes after the last."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STREAMS_PER_SERVER_MAX", 1)
            async with tcp_server() as server:
                for transaction in (1, 2):
                    upstreams.ask(effect(transaction, server.port, PROTOCOL_TCP))
                first, second = [await server.asked.get() for _ in range(2)]
                assert first[1] is second[1]
                upstreams.forget(1)
                upstreams.ask(effect(3, server.port, PROTOCOL_TCP))
                assert (await server.asked.get())[1] is not first[1]
                first[1].write(framed(reply_to(first[0])) + framed(reply_to(second[0])))
                assert [event.transaction for event in await told.events(1)] == [2]
                assert upstreams.counters.late == 1
                assert len(upstreams._carriers) == 1

    run(story)


def test_an_idle_connection_is_closed() -> None:
    """By us, before the upstream does."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STREAM_IDLE_SECONDS", 0.05)
            async with tcp_server() as server:
                upstreams.ask(effect(1, server.port, PROTOCOL_TCP))
                query, writer = await server.asked.get()
                writer.write(framed(reply_to(query)))
                await told.events(1)
                await server.connections[0].wait_closed()
                assert not upstreams._carriers

    run(story)


def test_an_upstream_that_takes_nothing_is_bounded() -> None:
    """Questions pile up to a bound, then fail at once."""

    async def story() -> None:
        with asking() as (upstreams, told), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STREAMS_PER_SERVER_MAX", 1)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                place = listener.getsockname()[1]
                # No turn of the loop: nothing is written, as with a peer whose window is closed.
                for transaction in range(3000):
                    upstreams.ask(effect(transaction, place, PROTOCOL_TCP))
                events = await told.events(1)
                assert {event.why for event in events if isinstance(event, UpstreamFailed)} == {"no buffer space available"}
                assert len(upstreams) + len(events) == 3000

    run(story)
