"""Three judges of one packet, behind one face: the Python model, the native build, the program in the kernel.

A case is put to each of them with the same rows and the same frames, and each must say the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

import pytest

from agent.core.types import Direction, Write
from agent.datapath import abi, loader, maps, syscall
from agent.datapath.abi import Reason
from agent.datapath.model import NS, Model, Origin

IFINDEX: Final = 1  # test runs need an interface that exists everywhere; nothing is sent through it
MARK_AGENT, MARK_ANSWER = 0xA00, 0xB00
QUESTIONS_PER_SECOND, QUESTION_BURST = 1, 64  # so slow that a test's own time does not count
_SK_BUFF_SIZE: Final = 192
_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_ROUTING: Final = (
    "link set lo up",
    "addr add 192.0.2.10/32 dev lo",
    "addr add 2001:db8:0:a::10/128 dev lo nodad",  # a wider one would be a route to all its neighbours
    "link add away type veth peer name far",
    "addr add 192.0.2.250/32 dev away",
    "link set away up",
    "link set far up",
    "route add 10.0.0.0/8 dev away",
    "-6 route add 2001:db8:0:d::/64 dev away",
    "-6 route add 2001:db8:0:a::d00/120 dev away",  # a part of the client's own network
)
_ACTION_PASS, _ACTION_DROP, _ACTION_REDIRECT = -1, 2, 7


class Judge(Protocol):
    def apply(self, writes: Sequence[Write]) -> None: ...

    def advance(self, seconds: float) -> None: ...

    def judge(self, direction: Direction, frame: bytes, origin: Origin = Origin.WIRE, vlans: int = 0) -> Reason:
        """What the packet is counted as: PASS_AUDIT where audit lets it pass."""
        ...

    def flows(self) -> set[tuple[object, ...]]:
        """Of every flow: endpoint, addresses, ports, protocol; identity, set, cookie, direction, state, audited, exempt."""
        ...


class ModelJudge:
    def __init__(self) -> None:
        self.model = Model(questions_per_second=QUESTIONS_PER_SECOND, question_burst=QUESTION_BURST)
        self.now = 1_000_000 * NS

    def apply(self, writes: Sequence[Write]) -> None:
        self.model.apply(writes)

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * NS)

    def judge(self, direction: Direction, frame: bytes, origin: Origin = Origin.WIRE, vlans: int = 0) -> Reason:
        judgement = self.model.judge(IFINDEX, direction, frame, self.now, origin, vlans)
        return Reason.PASS_AUDIT if judgement.audited else judgement.reason

    def flows(self) -> set[tuple[object, ...]]:
        return {
            (*key, flow.identity, flow.set, flow.cookie, flow.direction, flow.state, flow.audited, flow.exempt)
            for key, flow in self.model.flows.items()
        }


def build_harness(directory: Path) -> Path:
    """The native build, with every warning an error and both sanitizers on."""
    source = Path(__file__).parent / "native" / "harness.c"
    output = directory / "harness"
    command = ["gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined,address"]
    limits = [f"-DQUESTIONS_PER_SECOND={QUESTIONS_PER_SECOND}", f"-DQUESTION_BURST={QUESTION_BURST}"]
    subprocess.run(
        [*command, *limits, "-fno-sanitize-recover=all", f"-I{loader.source_directory()}", "-o", str(output), str(source)],
        check=True,
        timeout=100,
    )
    return output


class NativeJudge:
    _TABLES = ("endpoints", "groups", "own_addresses", "policy", "ipcache4", "ipcache6")

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin
        assert self._process.stdout
        self._orders: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout
        self.now = 1_000_000 * NS

    def close(self) -> None:
        self._orders.close()
        self._answers.close()
        assert self._process.wait(timeout=10) == 0, "the native build was stopped by a sanitizer or an order it did not know"

    def _order(self, order: bytes, answer_size: int) -> bytes:
        self._orders.write(order)
        self._orders.flush()
        answer = self._answers.read(answer_size) if answer_size else b""
        assert len(answer) == answer_size, "the native build ended: see what the sanitizer wrote"
        return answer

    def apply(self, writes: Sequence[Write]) -> None:
        for write in writes:
            table = bytes([self._TABLES.index(abi.map_of(write.table, write.key))])
            key = abi.pack_key(write.table, write.key)
            order = b"D" + table + key if write.value is None else b"P" + table + key + abi.pack_value(write)
            self._order(order, 0)

    def advance(self, seconds: float) -> None:
        self._order(b"A" + struct.pack("=Q", int(seconds * NS)), 0)

    def judge(self, direction: Direction, frame: bytes, origin: Origin = Origin.WIRE, vlans: int = 0) -> Reason:
        order = struct.pack("=QIIBBB5x", self.now, IFINDEX, len(frame), direction, origin, vlans)
        _, _, reason, audited = struct.unpack("=IIBB2x", self._order(b"J" + order + frame, 12))
        return Reason.PASS_AUDIT if audited else Reason(reason)

    def flows(self) -> set[tuple[object, ...]]:
        (count,) = struct.unpack("=I", self._order(b"F", 4))
        size = abi.FLOW_KEY.size + abi.FLOW_VALUE.size
        rows = self._order(b"", count * size)
        return {
            _flow_of(rows[at : at + abi.FLOW_KEY.size], rows[at + abi.FLOW_KEY.size : at + size])
            for at in range(0, len(rows), size)
        }


def _flow_of(key: bytes, value: bytes) -> tuple[object, ...]:
    endpoint, local, remote, local_port, remote_port, protocol, _ = abi.FLOW_KEY.unpack(key)
    _, _, identity, number, cookie, _, direction, state, _, _, audited, exempt, _ = abi.FLOW_VALUE.unpack(value)
    ports = (int.from_bytes(port, "big") for port in (local_port, remote_port))
    tuple_ = (endpoint, abi.unmapped(local), abi.unmapped(remote), *ports, protocol)
    return (*tuple_, identity, number, cookie, direction, state, bool(audited), bool(exempt))


# Small tables: a test fills none of them, and each load of the program makes them anew.
SMALL_TABLES: Final = {
    "MARK_MASK": 0xF00,
    "MARK_AGENT": MARK_AGENT,
    "MARK_ANSWER": MARK_ANSWER,
    "ANSWERS_PER_SECOND": 0,  # so that a drop is a drop; refusals have tests of their own
    "QUESTIONS_PER_SECOND": QUESTIONS_PER_SECOND,
    "QUESTION_BURST": QUESTION_BURST,
    "ENDPOINTS_MAX": 64,
    "OWN_ADDRESSES_MAX": 64,
    "POLICY_MAX": 4096,
    "IPCACHE_MAX": 4096,
    "FLOWS_MAX": 4096,
    "ENDED_MAX": 1024,
    "LAST_SEEN_MAX": 4096,
    "FRAGMENTS_MAX": 1024,
    "COUNTERS_MAX": 1024,
    "RULES_MAX": 1024,
    "EVENT_PAGES": 16,
}


class KernelJudge:
    """BPF_PROG_TEST_RUN of the loaded programs. No packet leaves: a redirect is only reported.

    Runs in a network namespace of its own, whose host has the client's addresses and routes on to containers (10.0.0.0/8,
    2001:db8:0:d::/64, 2001:db8:0:a::d00/120): what a case says is routed on must be theirs. A run always has the same socket,
    which nobody finds: see can_show().
    """

    def __init__(self, defines: Mapping[str, int] = SMALL_TABLES) -> None:
        self._namespace = _routing_namespace()
        self.loaded = loader.load(loader.bytecode(defines))
        self.tables = maps.KernelTables(self.loaded.fds_by_map)
        self._sockets = [_listener(key) for key in range(4)]
        self.reset()

    def reset(self) -> None:
        """As after loading."""
        for name in (
            "endpoints",
            "groups",
            "own_addresses",
            "policy",
            "ipcache4",
            "ipcache6",
            "flows",
            "ended",
            "fragments",
            "last_seen",
            "questions",
        ):
            rows = self.tables._rows_by_map[name]
            for key, _ in list(rows.dump(rows.value.size)):
                rows.delete(key)
        self._forget_counts()
        self.tables.set_setting(abi.SETTING_GATE_IFINDEX, IFINDEX)
        self.set_listeners()

    def set_listeners(self) -> None:
        for number, each in enumerate(self._sockets):
            self.tables.set_dns_socket(number, each.fileno())

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self.loaded.close()
        os.close(self._namespace)

    def apply(self, writes: Sequence[Write]) -> None:
        assert not any(self.tables.apply(writes))

    def advance(self, seconds: float) -> None:
        """The kernel's clock is not ours, so what it wrote down is made older instead."""
        passed = int(seconds * NS)
        for name, places in (("flows", (0, 8)), ("ended", (0,)), ("fragments", (0,)), ("questions", (0,))):
            rows = self.tables._rows_by_map[name]
            for key, value in list(rows.dump(rows.value.size)):
                changed = bytearray(value)
                for place in places:
                    (at,) = struct.unpack_from("=Q", changed, place)
                    if at and at < passed:
                        pytest.skip("this machine has not been up for so long")
                    struct.pack_into("=Q", changed, place, at and at - passed)  # 0: never
                assert rows.put(key, bytes(changed)) == 0

    def judge(self, direction: Direction, frame: bytes, origin: Origin = Origin.WIRE, vlans: int = 0) -> Reason:
        assert not vlans, "a test run cannot say that the card took a tag off"
        program = "from_endpoint" if direction is Direction.EGRESS else "to_endpoint"
        mark = {Origin.AGENT: MARK_AGENT, Origin.MARKED: MARK_AGENT, Origin.ANSWER: MARK_ANSWER}.get(origin, 0)
        came_in_by = IFINDEX if direction is Direction.INGRESS or origin is Origin.FORWARDED else 0
        action = self.run(program, frame, mark, came_in_by=came_in_by).action
        counts = self._counts()
        self._forget_counts()
        ((reason, number),) = counts.items()
        assert number == 1, f"one packet is counted once, not {number} times"
        assert action == _action_of(reason), f"{reason.name} left the program with action {action}"
        return reason

    def run(
        self, program: str, frame: bytes, mark: int = 0, repeat: int = 1, *, came_in_by: int = IFINDEX, segments: int = 0
    ) -> syscall.ProgramRun:
        """segments: into so many the card will cut it up."""
        context = bytearray(_SK_BUFF_SIZE)
        struct.pack_into("=I", context, 8, mark)
        struct.pack_into("=II", context, 36, came_in_by, IFINDEX)
        if segments:
            struct.pack_into("=I", context, 164, segments)
            struct.pack_into("=I", context, 176, len(frame) // segments)
        with _in_namespace(self._namespace):
            return syscall.program_run(self.loaded.fds_by_program[program], frame, bytes(context), repeat)

    def _forget_counts(self) -> None:
        rows = self.tables._rows_by_map["counters"]
        for key, _ in list(self.tables._rows("counters")):
            rows.delete(key)

    def _counts(self) -> dict[Reason, int]:
        found: dict[Reason, int] = {}
        for counter in self.tables.counters():
            found[counter.reason] = found.get(counter.reason, 0) + counter.packets
        return found

    def flows(self) -> set[tuple[object, ...]]:
        return {_flow_of(key, value) for key, value in self.tables._rows("flows")}


def can_show(direction: Direction, origin: Origin) -> bool:
    """Whether a test run's packet can be of it: toward an endpoint it has the agent's mark and a socket, from one no socket of
    the agent's. (What its sockets send is seen in tests/netns/test_uplink.py.)"""
    return origin is not (Origin.MARKED if direction is Direction.INGRESS else Origin.AGENT)


def can_run(frame: bytes) -> bool:
    """Whether the kernel takes it for a test run: not without the whole IP header, and no more than goes into a page."""
    return {b"\x08\x00": 34, b"\x86\xdd": 54}.get(frame[12:14], 14) <= len(frame) <= 3_000


def _routing_namespace() -> int:
    """A network namespace that is gone with its file descriptor."""
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        _call_libc("unshare", _CLONE_NEWNET)
        try:
            for command in _ROUTING:
                subprocess.run(["ip", *command.split()], check=True, timeout=20)
            for family in ("ipv4/conf/lo/forwarding", "ipv6/conf/all/forwarding"):
                Path("/proc/sys/net", family).write_text("1", encoding="ascii")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _call_libc("setns", before.fileno(), _CLONE_NEWNET)


@contextlib.contextmanager
def _in_namespace(fd: int) -> Iterator[None]:
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        _call_libc("setns", fd, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call_libc("setns", before.fileno(), _CLONE_NEWNET)


def _call_libc(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def _action_of(reason: Reason) -> int:
    if reason is Reason.PASS_REDIRECT:
        return _ACTION_REDIRECT
    return _ACTION_DROP if reason.is_drop else _ACTION_PASS


def _listener(key: int) -> socket.socket:
    """For one row of dns_sockets; on the loopback address, where nobody asks."""
    family = socket.AF_INET6 if key & 2 else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM if key & 1 else socket.SOCK_DGRAM)
    made.bind(("::1" if key & 2 else "127.0.0.1", 0))
    if key & 1:
        made.listen(1)
    return made
