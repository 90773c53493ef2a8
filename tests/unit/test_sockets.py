"""The listeners in a network namespace of their own, with nft's TPROXY in the gate program's place.

TPROXY hands a packet to a socket exactly as bpf_sk_assign does, so what is asserted here holds for both: the address asked, and
from where the reply leaves.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.core.events import AskerGone, Query, SendReply
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, packed
from agent.dns import sockets as module
from agent.dns.bounds import Limits
from agent.dns.replies import IP_TRANSPARENT, IPV6_TRANSPARENT
from agent.dns.sockets import Listeners

pytestmark = pytest.mark.root

PATIENCE_SECONDS = 5.0
MARK = 0xA00
PORT = 10053
CLIENT, CLIENT6 = "192.0.2.10", "2001:db8:1::10"
HOST, HOST6 = "192.0.2.1", "2001:db8:1::1"
FOREIGN, FOREIGN6 = "203.0.113.53", "2001:db8:53::53"

RULES = f"""
table ip gate {{
  chain hand_over {{
    type filter hook prerouting priority mangle
    iif "veth-host" meta l4proto {{ tcp, udp }} th dport {{ 53, 5353 }} tproxy to 127.0.0.1:{PORT} meta mark set 1 accept
  }}
}}
table ip6 gate {{
  chain hand_over {{
    type filter hook prerouting priority mangle
    iif "veth-host" meta l4proto {{ tcp, udp }} th dport {{ 53, 5353 }} tproxy to [::1]:{PORT} meta mark set 1 accept
  }}
}}
"""


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets opened here live in the namespace (setns(2), which Python has from 3.12 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet = 0x40000000
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, clone_newnet):
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        assert libc.setns(home, clone_newnet) == 0, "cannot come home: every later test would run in the wrong namespace"
        os.close(home)
        os.close(there)


class Net:
    """Two namespaces, `client` and `host`, and what the host's sockets handed over."""

    def __init__(self) -> None:
        self.client = f"ngsock{os.getpid()}c"
        self.host = f"ngsock{os.getpid()}h"

    def build(self) -> None:
        for name in (self.client, self.host):
            command("ip", "netns", "add", name)
            self.run_in(name, "ip", "link", "set", "lo", "up")
        command(
            *("ip", "link", "add", "veth-host", "netns", self.host, "type", "veth"),
            *("peer", "name", "veth-client", "netns", self.client),
        )
        for name, device, address, address6 in (
            (self.host, "veth-host", HOST, HOST6),
            (self.client, "veth-client", CLIENT, CLIENT6),
        ):
            self.run_in(name, "ip", "address", "add", f"{address}/24", "dev", device)
            self.run_in(name, "ip", "address", "add", f"{address6}/64", "dev", device, "nodad")
            self.run_in(name, "ip", "link", "set", device, "up")
        self.run_in(self.client, "ip", "route", "add", "default", "via", HOST)
        self.run_in(self.client, "ip", "-6", "route", "add", "default", "via", HOST6)
        for family, everything in (("-4", "0.0.0.0/0"), ("-6", "::/0")):
            self.run_in(self.host, "ip", family, "rule", "add", "fwmark", "1", "lookup", "100")
            self.run_in(self.host, "ip", family, "route", "add", "local", everything, "dev", "lo", "table", "100")
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.host}", "nft", "-f", "-"], input=RULES, text=True, check=True, timeout=10
        )

    def run_in(self, namespace: str, *words: str) -> None:
        command("nsenter", f"--net=/run/netns/{namespace}", *words)

    def remove(self) -> None:
        for name in (self.client, self.host):
            if Path(f"/run/netns/{name}").exists():
                command("ip", "netns", "delete", name)


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    if os.geteuid():
        pytest.skip("needs root")
    made = Net()
    try:
        made.build()
        yield made
    finally:
        made.remove()


class Proxy:
    """Listeners at work inside the host, and clients to ask them."""

    def __init__(self, net: Net, listeners: Listeners, stack: ExitStack) -> None:
        self.net = net
        self.listeners = listeners
        self.batches: list[int] = []
        self.queries: asyncio.Queue[Query] = asyncio.Queue()
        self.gone: asyncio.Queue[AskerGone] = asyncio.Queue()
        self._stack = stack
        listeners.start(asyncio.get_running_loop(), self._take, self.gone.put_nowait)

    def _take(self, queries: Sequence[Query]) -> None:
        self.batches.append(len(queries))
        for query in queries:
            self.queries.put_nowait(query)

    def open(self, kind: socket.SocketKind, address: str, *, in_client: bool = True) -> socket.socket:
        """A socket of the client's (or of the host's own), closed with the story."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with inside(self.net.client if in_client else self.net.host):
            return self._stack.enter_context(socket.socket(family, kind | socket.SOCK_NONBLOCK))

    async def ask(self, address: str, port: int, message: bytes) -> tuple[socket.socket, Query]:
        """A UDP client that takes an answer only from where it asked."""
        client = self.open(socket.SOCK_DGRAM, address)
        client.connect((address, port))
        client.send(message)
        return client, await self.queries.get()


async def received(opened: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(opened, 65535)


def run(net: Net, story: Callable[[Proxy], Awaitable[None]], limits: Limits | None = None) -> None:
    """Play the story with listeners inside the host's namespace, and in a bounded time."""

    async def bounded() -> None:
        with ExitStack() as stack:
            stack.enter_context(inside(net.host))
            listeners = Listeners(MARK, PORT, limits)
            stack.callback(listeners.close)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await story(Proxy(net, listeners, stack))

    asyncio.run(bounded())


@pytest.mark.parametrize(("server", "client"), [(FOREIGN, CLIENT), (FOREIGN6, CLIENT6), (HOST, CLIENT), (HOST6, CLIENT6)])
@pytest.mark.parametrize("port", [53, 5353])
def test_a_datagram_is_answered_from_where_it_was_sent(net: Net, server: str, client: str, port: int) -> None:
    """Any server's address, also the host's own, any port; a client that is connected to it takes the reply."""

    async def story(proxy: Proxy) -> None:
        asking, query = await proxy.ask(server, port, b"question")
        said = query.client, query.server, query.port, query.protocol, query.message
        assert said == (packed(client), packed(server), port, PROTOCOL_UDP, b"question")
        proxy.listeners.send([SendReply(query.asker, b"reply")])
        assert await received(asking) == b"reply"
        assert proxy.listeners.counters.replies_unsent == 0

    run(net, story)


@pytest.mark.parametrize(("server", "client"), [(FOREIGN, CLIENT), (FOREIGN6, CLIENT6), (HOST, CLIENT)])
def test_a_connection_is_accepted_in_the_servers_name(net: Net, server: str, client: str) -> None:
    """The handshake, the question and the reply, with the agent's mark on what we send."""

    async def story(proxy: Proxy) -> None:
        loop = asyncio.get_running_loop()
        asking = proxy.open(socket.SOCK_STREAM, server)
        await loop.sock_connect(asking, (server, 53))
        await loop.sock_sendall(asking, b"\x00\x08question")
        query = await proxy.queries.get()
        said = query.client, query.server, query.port, query.protocol, query.message
        assert said == (packed(client), packed(server), 53, PROTOCOL_TCP, b"question")
        accepted = query.asker.connection._socket  # type: ignore[attr-defined]
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == MARK
        proxy.listeners.send([SendReply(query.asker, b"reply")])
        assert await received(asking) == b"\x00\x05reply"
        asking.close()

    run(net, story)


def test_the_sockmaps_keys(net: Net) -> None:
    """Bit 1 IPv6, bit 0 TCP; all four transparent, marked, on loopback, and not shared by SO_REUSEPORT."""

    async def story(proxy: Proxy) -> None:
        for key, descriptor in proxy.listeners.sockets().items():
            with socket.socket(fileno=os.dup(descriptor)) as opened:
                is_v6 = key >> 1
                assert opened.family == (socket.AF_INET6 if is_v6 else socket.AF_INET)
                assert opened.type == (socket.SOCK_STREAM if key & 1 else socket.SOCK_DGRAM)
                assert opened.getsockname()[:2] == ("::1" if is_v6 else "127.0.0.1", PORT)
                assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) == MARK
                assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
                level, option = (socket.IPPROTO_IPV6, IPV6_TRANSPARENT) if is_v6 else (socket.IPPROTO_IP, IP_TRANSPARENT)
                assert opened.getsockopt(level, option) == 1
        assert set(proxy.listeners.sockets()) == {0, 1, 2, 3}

    run(net, story)


def test_what_came_together_is_handed_over_together(net: Net) -> None:
    """Ten datagrams that wait are one batch of ten questions, each an asker of its own."""

    async def story(proxy: Proxy) -> None:
        client = proxy.open(socket.SOCK_DGRAM, FOREIGN)
        client.connect((FOREIGN, 53))
        for index in range(10):
            client.send(bytes([index]))
        queries = [await proxy.queries.get() for _ in range(10)]
        assert proxy.batches == [10]
        assert [query.message for query in queries] == [bytes([index]) for index in range(10)]
        assert len({query.asker for query in queries}) == 10

    run(net, story)


@pytest.mark.parametrize("server", [HOST, HOST6])
def test_a_resolver_of_the_host_keeps_its_questions(net: Net, server: str) -> None:
    """It listens on the address a client asks through us: the host's own questions reach it before and after our reply."""

    async def story(proxy: Proxy) -> None:
        resolver = proxy.open(socket.SOCK_DGRAM, server, in_client=False)
        resolver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        resolver.bind((server, 53))
        beside = proxy.open(socket.SOCK_DGRAM, server, in_client=False)
        beside.sendto(b"before", (server, 53))
        assert await received(resolver) == b"before"
        asking, query = await proxy.ask(server, 53, b"question")
        proxy.listeners.send([SendReply(query.asker, b"reply")])
        assert await received(asking) == b"reply"
        for message in (b"after", b"and again"):
            beside.sendto(message, (server, 53))
            assert await received(resolver) == message
        # Nor do our raw sockets collect what the host receives.
        for raw in (proxy.listeners._replies._v4, proxy.listeners._replies._v6):
            with pytest.raises(BlockingIOError):
                raw.recv(1)

    run(net, story)


@pytest.mark.parametrize("address", [HOST, "0.0.0.0"])
def test_no_address_and_no_port_of_the_host_is_occupied(net: Net, address: str) -> None:
    """A server that does not share its port, as nsd, starts before or after our replies, on its address or on all."""

    async def story(proxy: Proxy) -> None:
        async def both_answered() -> None:
            for asked in (HOST, FOREIGN):
                asking, query = await proxy.ask(asked, 53, b"question")
                proxy.listeners.send([SendReply(query.asker, b"reply")])
                assert await received(asking) == b"reply"

        await both_answered()
        server = proxy.open(socket.SOCK_DGRAM, HOST, in_client=False)
        server.bind((address, 53))
        await both_answered()
        beside = proxy.open(socket.SOCK_DGRAM, HOST, in_client=False)
        beside.sendto(b"beside", (HOST, 53))
        assert await received(server) == b"beside"
        assert proxy.listeners.counters.replies_unsent == 0

    run(net, story)


@pytest.mark.parametrize(("server", "address_octets"), [(FOREIGN, 4), (FOREIGN6, 16)])
@pytest.mark.parametrize("reply", [b"reply", b"even", b"", bytes(100), b"\xff" * 101])
def test_the_checksum_is_right_on_the_wire(net: Net, server: str, address_octets: int, reply: bytes) -> None:
    """As the client's interface sees the frame; a veth would let a wrong one pass, a cable would not."""

    async def story(proxy: Proxy) -> None:
        ethertype = 0x86DD if address_octets == 16 else 0x0800
        with inside(net.client), socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ethertype)) as wire:
            wire.setblocking(False)
            _, query = await proxy.ask(server, 53, b"question")
            proxy.listeners.send([SendReply(query.asker, reply)])
            while packed(server) not in (packet := await received(wire))[: 8 + address_octets + 4]:
                pass  # the question, and neighbours finding each other
        addresses = packet[8:40] if address_octets == 16 else packet[12:20]
        datagram = packet[40:] if address_octets == 16 else packet[20:]
        assert datagram[:2] == (53).to_bytes(2, "big")
        assert datagram[8 : 8 + len(reply)] == reply
        datagram = datagram[: 8 + len(reply)]
        summed = (
            addresses + bytes([0, socket.IPPROTO_UDP]) + len(datagram).to_bytes(2, "big") + datagram + bytes(len(reply) % 2)
        )
        total = sum(int.from_bytes(summed[at : at + 2], "big") for at in range(0, len(summed), 2))
        while total > 0xFFFF:
            total = (total >> 16) + (total & 0xFFFF)
        assert total == 0xFFFF
        assert datagram[6:8] != b"\x00\x00"

    run(net, story)


def test_a_reply_the_kernel_refuses_is_counted(net: Net) -> None:
    """Longer than any datagram: counted, and the others of the batch leave."""

    async def story(proxy: Proxy) -> None:
        _, first = await proxy.ask(FOREIGN, 53, b"question")
        asking, second = await proxy.ask(FOREIGN, 53, b"question")
        proxy.listeners.send([SendReply(first.asker, bytes(65535)), SendReply(second.asker, b"reply")])
        assert await received(asking) == b"reply"
        assert proxy.listeners.counters.replies_unsent == 1

    run(net, story)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_who_comes_directly_is_ignored(net: Net, loopback: str) -> None:
    """A process of the host that found the port: no question, no reply, counted."""

    async def story(proxy: Proxy) -> None:
        direct = proxy.open(socket.SOCK_DGRAM, loopback, in_client=False)
        direct.sendto(b"direct", (loopback, PORT))
        await proxy.ask(FOREIGN6 if ":" in loopback else FOREIGN, 53, b"question")
        assert proxy.listeners.counters.datagrams_direct == 1
        assert proxy.queries.empty()
        left = proxy.listeners._ledger.left(asyncio.get_running_loop().time())
        assert [noted.message for noted in left] == [b"question"], "who takes over would answer it"

    run(net, story)


def test_datagrams_the_kernel_lost_are_counted(net: Net) -> None:
    """With a receive buffer for a handful, what was not taken and what was counted make up what was sent."""

    async def story(proxy: Proxy) -> None:
        client = proxy.open(socket.SOCK_DGRAM, FOREIGN)
        client.connect((FOREIGN, 53))
        for burst in (1, 2):
            for _ in range(200):
                client.send(b"x")
            await proxy.queries.get()
            # The count comes with the first datagram that fits again.
            client.send(b"last")
            while (await proxy.queries.get()).message != b"last":
                pass
            assert proxy.listeners.counters.datagrams_lost > 0
            assert sum(proxy.batches) + proxy.listeners.counters.datagrams_lost == 201 * burst

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RECEIVE_BUFFER_OCTETS", 4096)
        run(net, story)


def test_a_large_reply_arrives_whole(net: Net) -> None:
    """Longer than any path's packet: in fragments, the client's own business (its EDNS size allowed it)."""

    async def story(proxy: Proxy) -> None:
        for server in (FOREIGN, FOREIGN6):
            asking, query = await proxy.ask(server, 53, b"question")
            reply = bytes(range(256)) * 32
            proxy.listeners.send([SendReply(query.asker, reply)])
            assert await received(asking) == reply

    run(net, story)


def test_a_port_that_is_taken_leaves_nothing_open(net: Net) -> None:
    """Four sockets or none: what was opened before the failure is closed (a leak is a warning, and so a failure, here)."""
    with inside(net.host), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as taken:
        taken.bind(("::1", PORT))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            Listeners(MARK, PORT)
        taken.close()
        Listeners(MARK, PORT).close()
