"""What a packet costs: the programs by BPF_PROG_TEST_RUN beside an empty one, and forwarded traffic beside nftables.

Rule 1: in the kernel's own test run time is what the kernel says of it, so the clock of these races adds that up.
Rule 2: `hot` is one packet again and again: everything it needs is in the cache. `spread` is 10,000 packets to as many
addresses in random order, each run by itself: between two of them a whole system call and this program have used the caches,
for the empty program as well.
Rule 3: forwarded traffic is real, from one namespace through a second to a third. A flood of the smallest datagrams ends there
in a blackhole, and costs its sender what it costs the machine, for a veth does all the work in the sender's time: the dearest
case. A TCP stream is what throughput is about; its time is the wall's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from agent.core.events import Attach, Detach
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
from agent.datapath import loader, maps, syscall
from agent.datapath.datapath import Datapath, Settings, cleanup
from agent.datapath.events import EventRing
from tests.bench.harness import Bench, Contestant, Figure, Race, measure
from tests.bpf import lab as labs
from tests.netns.lab import built
from tests.packets import CLIENT, TCP, UDP, frame, tcp, udp

SIZES: Final = (1_000, 100_000, 1_000_000)
SPREAD: Final = 10_000
# What the project promises of a packet of a known flow, beyond an empty program.
ESTABLISHED_NS_MAX: Final = 250
GROWTH_MAX: Final = 1.3
FORWARDING_MAX: Final = 1 / 0.95

_IFINDEX: Final = 1  # test runs need an interface that exists everywhere; nothing is sent through it
_SK_BUFF_SIZE: Final = 192
_SET, _SCOPE, _IDENTITY, _PORT, _CLOSED_PORT = 1, 1, 1 << 24, 443, 444
_REPEAT_MAX: Final = 1_000_000
# Events that fit into the ring: a denial is measured with its event told.
_EVENTS_MAX: Final = 2_000

# Two instructions: TC_ACT_UNSPEC into register 0, and out.
_EMPTY: Final = struct.pack("=BBhi", 0xB7, 0, 0, -1) + struct.pack("=BBhi", 0x95, 0, 0, 0)


class _Kernel:
    """The programs with an ipcache of so many addresses, and the time they took."""

    def __init__(self, size: int) -> None:
        defines = {"IPCACHE_MAX": size + 1_024, "FLOWS_MAX": 4 * SPREAD, "LAST_SEEN_MAX": 4 * SPREAD}
        self._loaded = loader.load(loader.bytecode(defines))
        self.tables = maps.KernelTables(self._loaded.fds_by_map)
        self.events = EventRing(self._loaded.fds_by_map["events"])
        self.spent_ns = 0
        self._context = bytearray(_SK_BUFF_SIZE)
        struct.pack_into("=II", self._context, 36, _IFINDEX, _IFINDEX)
        self.empty = syscall.program_load(_EMPTY, "empty")
        self.program = self._loaded.fds_by_program["from_endpoint"]
        # Not one after the other, or neighbours would share all of the trie but its end.
        numbers = random.Random(size).sample(range(1 << 24), size)
        self.addresses = [(0xC600_0000 | number).to_bytes(4, "big") for number in numbers]
        rows = [
            Write(Table.ENDPOINTS, _IFINDEX, EndpointValue(1, 1, _SCOPE, Orientation.BEHIND)),
            Write(Table.GROUPS, 1, GroupValue(_SET, default_deny_egress=True, default_deny_ingress=True, audit=False)),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT)), True),
            *(_policy_row(protocol, _PORT) for protocol in (TCP, UDP)),
        ]
        rows += [Write(Table.IPCACHE, IpcacheKey(_SCOPE, Prefix.of(address)), _IDENTITY) for address in self.addresses]
        for at in range(0, len(rows), 512):
            assert not any(self.tables.apply(rows[at : at + 512]))

    def close(self) -> None:
        self.events.close()
        self._loaded.close()
        os.close(self.empty)

    def run(self, program: int, packet: bytes, repeat: int) -> None:
        while repeat > 0:
            times = min(repeat, _REPEAT_MAX)
            done = syscall.program_run(program, packet, bytes(self._context), times)
            self.spent_ns += done.nanoseconds * times
            repeat -= times

    def run_each(self, program: int, packets: Sequence[bytes], count: int) -> None:
        for number in range(count):
            self.run(program, packets[number % len(packets)], 1)

    def run_in_turn(self, program: int, packets: Sequence[bytes], count: int) -> None:
        """One packet is run again and again in one call, which does not disturb the caches."""
        if len(packets) == 1:
            self.run(program, packets[0], count)
        else:
            self.run_each(program, packets, count)

    def forget_flows(self) -> None:
        rows = self.tables._rows_by_map["flows"]
        for key, _ in list(rows.dump(rows.value.size)):
            rows.delete(key)

    def drain(self) -> None:
        while self.events.read(_EVENTS_MAX):
            pass

    def flows(self) -> int:
        return sum(1 for _ in self.tables.flows())


def _policy_row(protocol: int, port: int) -> Write:
    return Write(Table.POLICY, PolicyKey(_SET, _IDENTITY, Direction.EGRESS, protocol, port, 16), PolicyValue(Verdict.ALLOW, 1))


def _to(address: bytes, port: int, source_port: int = 40_000) -> bytes:
    return frame(CLIENT, ".".join(map(str, address)), UDP, udp(source_port, port))


class _Endpoint:
    """What it sends: to the same address again and again (`hot`), or to many in random order."""

    def __init__(self, kernel: _Kernel, *, hot: bool) -> None:
        self._kernel = kernel
        order = random.Random(len(kernel.addresses)).sample(kernel.addresses, min(SPREAD, len(kernel.addresses)))
        if hot:
            del order[1:]
        self._known = [_to(address, _PORT) for address in order]
        self._refused = [_to(address, _CLOSED_PORT) for address in order]
        self._new = [_to(order[number % len(order)], _PORT, 1_024 + number) for number in range(SPREAD)]
        self._reset = frame(CLIENT, ".".join(map(str, order[0])), TCP, tcp(40_000, _PORT, 4))

    def open_all(self, _: int) -> None:
        self._kernel.run_each(self._kernel.program, self._known, len(self._known))
        assert self._kernel.flows() >= len(self._known)

    def send_known(self, count: int) -> None:
        self._kernel.run_in_turn(self._kernel.program, self._known, count)

    def send_to_nobody(self, count: int) -> None:
        self._kernel.run_in_turn(self._kernel.empty, self._known, count)

    def send_reset(self, count: int) -> None:
        self._kernel.run(self._kernel.program, self._reset, count)

    def send_new(self, count: int) -> None:
        for sent in range(0, count, SPREAD):
            self._kernel.forget_flows()
            self._kernel.run_each(self._kernel.program, self._new, min(SPREAD, count - sent))

    def send_refused(self, count: int) -> None:
        for sent in range(0, count, _EVENTS_MAX):
            self._kernel.drain()
            self._kernel.run_in_turn(self._kernel.program, self._refused, min(_EVENTS_MAX, count - sent))


def _packet_races(kernels: Sequence[_Kernel]) -> Iterator[Race | Figure]:
    """Each size has tables and programs of its own; the clock is the time of all of them."""

    def clock() -> int:
        return sum(kernel.spent_ns for kernel in kernels)

    for hot in (True, False):
        where = "hot" if hot else f"spread over {SPREAD:,}"
        endpoints = {f"{len(kernel.addresses):,} addresses": _Endpoint(kernel, hot=hot) for kernel in kernels}
        reference = next(iter(endpoints))

        def race(title: str, contestants: list[Contestant], ratio_max: float | None = None) -> Race:
            return Race(f"{title}, {where}", reference, contestants, ratio_max, clock)  # noqa: B023, used before the next turn

        growth_max = GROWTH_MAX if hot else None
        empty = Race("", "empty", [Contestant("empty", endpoints[reference].send_to_nobody)], clock=clock)
        floor = measure(empty, 9).standings[0].ns.median
        yield Figure(f"an empty program, {where}", floor, "ns")
        known = race(
            "a packet of a known flow", [Contestant(n, e.send_known, e.open_all) for n, e in endpoints.items()], growth_max
        )
        yield known
        if hot:
            cost = max(standing.ns.median for standing in measure(known, 9).standings) - floor
            yield Figure("a packet of a known flow, hot, beyond an empty program", cost, "ns", ESTABLISHED_NS_MAX)
            yield race(
                "allowed, no flow made (a reset)", [Contestant(n, e.send_reset) for n, e in endpoints.items()], growth_max
            )
        yield race("a new flow allowed", [Contestant(n, e.send_new) for n, e in endpoints.items()])
        yield race("denied, its event told", [Contestant(n, e.send_refused) for n, e in endpoints.items()], growth_max)


# --- forwarded traffic -----------------------------------------------------------------------------------------------

_SINK_FIRST: Final = "198.18.0.0"
_SINK: Final = "203.0.113.2"
_KNOWN: Final = 100_000
_TRAFFIC_ROUND_NS: Final = 300_000_000

# Takes streams one after the other, and says with one octet that all of one has come.
_RECEIVER: Final = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
room = bytearray(1 << 20)
while True:
    stream, _ = listener.accept()
    while stream.recv_into(room):
        pass
    stream.sendall(b".")
    stream.close()
"""
_SENDER: Final = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
piece = bytes(1 << 20)
began = time.monotonic_ns()
for _ in range(int(sys.argv[3])):
    stream.sendall(piece)
stream.shutdown(socket.SHUT_WR)
assert stream.recv(1) == b"."
print(time.monotonic_ns() - began)
"""


class _Forwarding:
    """client -> host -> sink. `turn` says what stands in the way at the host: nothing, our programs, nftables."""

    def __init__(self, lab: labs.Lab, sink: str, datapath: Datapath) -> None:
        self._lab, self._sink, self._datapath = lab, sink, datapath
        self._attach = Attach(1, lab.interface, lab.ifindex, Orientation.BEHIND)
        self._in_the_way = "nothing"
        self.spent_ns = 0

    def turn(self, what: str) -> None:
        if what == self._in_the_way:
            return
        if self._in_the_way == "namegate":
            self._datapath.detach(Detach(1, self._lab.interface, self._lab.ifindex))
        elif self._in_the_way == "nftables":
            _nft(self._lab.host, "delete chain inet bench forward")
        if what == "namegate":
            self._datapath.attach(self._attach)
        elif what == "nftables":
            _nft(
                self._lab.host,
                "add chain inet bench forward { type filter hook forward priority 0; policy drop; }\n"
                "add rule inet bench forward ct state established,related accept\n"
                "add rule inet bench forward ip daddr @known meta l4proto { tcp, udp } th dport 443 accept\n",
            )
        self._in_the_way = what

    def flood(self, count: int, destinations: int) -> None:
        before = self._arrived()
        said = self._client_runs(str(built("flood.c")), _SINK_FIRST, str(_PORT), str(count), str(destinations))
        sent, cpu_ns = map(int, said.split())
        assert sent == count
        self.spent_ns += cpu_ns
        arrived = self._arrived() - before
        assert arrived >= count * 0.99, f"{self._in_the_way}: {arrived} of {count} packets arrived"

    def stream(self, mebibytes: int) -> None:
        self.spent_ns += int(self._client_runs(sys.executable, "-c", _SENDER, _SINK, str(_PORT), str(mebibytes)))

    def _client_runs(self, *command: str) -> str:
        inside = ("nsenter", f"--net=/run/netns/{self._lab.client}")
        return subprocess.run([*inside, *command], check=True, capture_output=True, text=True, timeout=120).stdout

    def _arrived(self) -> int:
        said = subprocess.run(
            ["ip", "-n", self._sink, "-j", "-s", "link", "show", "eth0"], check=True, capture_output=True, text=True, timeout=20
        ).stdout
        return int(json.loads(said)[0]["stats64"]["rx"]["packets"])


def _nft(namespace: str, commands: str) -> None:
    subprocess.run(
        ["nsenter", f"--net=/run/netns/{namespace}", "nft", "-f", "-"], input=commands, check=True, text=True, timeout=120
    )


def _known_addresses() -> list[bytes]:
    first = int.from_bytes(packed(_SINK_FIRST), "big")
    return [(first + number).to_bytes(4, "big") for number in range(_KNOWN)]


@contextlib.contextmanager
def _forwarding() -> Iterator[_Forwarding]:
    settings = Settings(
        pin_directory=Path(f"/sys/fs/bpf/namegate-bench-{os.getpid()}"), ipcache_rows=1 << 17, flow_rows=1 << 15, policy_rows=64
    )
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(labs.lab())
        sink = f"{lab.host}-sink"
        _ip("netns", "add", sink)
        stack.callback(_ip, "netns", "del", sink)
        _ip("-n", lab.host, "link", "add", "up0", "type", "veth", "peer", "name", "eth0", "netns", sink)
        for namespace, device, address in ((lab.host, "up0", "203.0.113.1/24"), (sink, "eth0", f"{_SINK}/24")):
            _ip("-n", namespace, "addr", "add", address, "dev", device)
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", lab.host, "route", "add", "198.18.0.0/15", "via", _SINK)
        _ip("-n", sink, "route", "add", "10.99.0.0/24", "via", "203.0.113.1")
        _ip("-n", sink, "route", "add", "blackhole", "198.18.0.0/15")
        known = _known_addresses()
        elements = ",".join(".".join(map(str, address)) for address in known)
        _nft(lab.host, "add table inet bench\nadd set inet bench known { type ipv4_addr; }\n")
        _nft(lab.host, f"add element inet bench known {{ {elements},{_SINK} }}\n")
        rows = [
            Write(Table.ENDPOINTS, lab.ifindex, EndpointValue(1, 1, _SCOPE, Orientation.BEHIND)),
            Write(Table.GROUPS, 1, GroupValue(_SET, default_deny_egress=True, default_deny_ingress=True, audit=False)),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(labs.CLIENT)), True),
            _policy_row(UDP, _PORT),
            _policy_row(TCP, _PORT),
            *(Write(Table.IPCACHE, IpcacheKey(_SCOPE, Prefix.of(address)), _IDENTITY) for address in (*known, packed(_SINK))),
        ]
        stack.enter_context(labs.inside(lab.host))
        datapath = Datapath.open(settings)
        stack.callback(cleanup, settings)
        stack.callback(datapath.close)
        for at in range(0, len(rows), 512):
            assert not any(datapath.apply(rows[at : at + 512]))
        receiver = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{sink}", sys.executable, "-c", _RECEIVER, _SINK, str(_PORT)],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(receiver.wait)
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        yield _Forwarding(lab, sink, datapath)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


def _forwarding_races(traffic: _Forwarding) -> Iterator[Race]:
    def race(title: str, reference: str, work: Callable[[int], None], ratio_max: float | None = None) -> Race:
        contestants = [
            Contestant(what, work, lambda _, what=what: traffic.turn(what))  # type: ignore[misc]
            for what in (reference, "namegate")
        ]
        return Race(title, reference, contestants, ratio_max, clock=lambda: traffic.spent_ns, round_ns=_TRAFFIC_ROUND_NS)

    yield race("a MiB of a TCP stream forwarded", "nothing", traffic.stream, FORWARDING_MAX)
    yield race("a MiB of a TCP stream forwarded", "nftables", traffic.stream)
    for destinations in (1, SPREAD):
        flood = functools.partial(traffic.flood, destinations=destinations)
        to = "one address" if destinations == 1 else f"{destinations:,} addresses"
        for reference in ("nothing", "nftables"):
            yield race(f"a datagram forwarded to {to}, {_KNOWN:,} known", reference, flood)


@contextlib.contextmanager
def _races() -> Iterator[Iterator[Race | Figure]]:
    def races() -> Iterator[Race | Figure]:
        with contextlib.ExitStack() as stack:
            kernels = [stack.enter_context(contextlib.closing(_Kernel(size))) for size in SIZES]
            yield from _packet_races(kernels)
        with _forwarding() as traffic:
            yield from _forwarding_races(traffic)

    yield races()


DATAPATH = Bench(
    "datapath",
    "what a packet costs, beside an empty program, at 1k to 1M known addresses; forwarded, beside nftables",
    _races,
    needs_root=True,
    is_long=True,
)
