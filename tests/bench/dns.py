"""DNS proxies side by side: what 100,000 questions cost each, with real map writes, beside a floor written in C.

    load in a client's namespace          proxy in the host's namespace            upstream in the internet's namespace
    (core 0; checks every reply)  ──────> (core 1; one at a time is asked)  ─────> (core 0)

Rule 1: load, upstream, cores and network are the same for all. namegate is the command as it is shipped, with its programs at
the endpoint's interface: it is asked as a workload asks, by the address of a server, and intercepts. The others are asked at
an address of their own, by a second client, at whose interface nothing is attached.
Rule 2: the cost is the CPU time of the proxy's process, which holds the kernel's work in its socket calls and map writes. What
the kernel does for a datagram on its way to the proxy (namegate's programs as well) is the sender's time, on core 0.
Rule 3: contestants take turns, round by round, in an order that moves; a figure is the median of the rounds.
Rule 4: a reply that is lost or wrong is counted, and one of namegate's fails the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final, Self

import yaml

from agent.control import ControlError
from agent.control.client import Control
from tests.bench.harness import ROUNDS_JUDGED_MIN, Spread, machine
from tests.netns.lab import Lab, LabError, built

QUESTION: Final = "what a DNS question costs, beside a floor in C and other proxies"

_SOURCES: Final = Path(__file__).parent
_UPSTREAM: Final = "198.51.100.54"  # beside the lab's own name server
_READY_S_MAX: Final = 90.0
_OUTSTANDING: Final = 64
_SILENCE_MS: Final = 2_000
# Longer than any run, so that nothing is forgotten meanwhile: the floor forgets nothing either.
_TTL_S: Final = 86_400
# A peer that is slow asks fewer questions a round: what takes it longer is measured no better.
_PEER_ROUND_S: Final = 2.0
_PEER_QUESTIONS_MIN: Final = 500
_LATENCY_QUESTIONS: Final = 1_000
_FRESH_NAMES: Final = 4_000_000  # a little less than namegate and the upstream have room for
_PER: Final = 100_000  # questions, in every figure that is shown

NAMEGATE: Final = "namegate"
FLOOR: Final = "floor"
ECHO: Final = "echo"
DNSMASQ: Final = "dnsmasq-nftset"

# What is to be reached beside the floors_max of each workload: namegate's share of dnsmasq, the floor's of two echoes.
_DNSMASQ_MAX: Final = 0.2
_FLOOR_MAX: Final = 1.2


@dataclass(frozen=True, slots=True)
class Workload:
    """kind: the letter of its names (dns_upstream.c). names: how many are asked in turn; 0: each question a new one.

    warm_up: how many questions are asked before anything is measured.
    """

    name: str
    text: str
    kind: str
    names: int
    warm_up: int
    floors_max: float


WORKLOADS: Final = (
    Workload("warm1", "1 A, known", "o", 1_000, 2_000, 2.5),
    Workload("warm4", "2 CNAME + 2 A, known", "c", 1_000, 2_000, 2.5),
    Workload("warm20", "20 A, known", "t", 1_000, 2_000, 2.5),
    Workload("cold", "1 A, each a new name and address", "o", 0, 500, 2.5),
    # An address not seen in the warm-up is one in tens of thousands.
    Workload("rotating", "8 of one name's 4,096 A", "r", 1, 6_000, 8.0),
)


@dataclass(frozen=True, slots=True)
class Cores:
    """load: of what asks and what answers. proxy: of the contestants."""

    load: int
    proxy: int

    @classmethod
    def chosen(cls) -> Cores:
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[0], cores[-1])


@dataclass(frozen=True, slots=True)
class Asked:
    """One run of the load."""

    asked: int
    lost: int
    wrong: int
    seconds: float
    p50_us: float
    p99_us: float


@dataclass(slots=True)
class Proxy:
    """One that runs. pid: of its process. namespace: whence it is asked. next_number: of a name nobody has asked it for."""

    name: str
    pid: int
    namespace: str
    server: str
    port: int
    next_number: int = 1_000


def cpu_ns(pid: int) -> int:
    """CPU time of the process so far, all threads. The clock's number is made as in the kernel's posix-timers.h."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def ksoftirqd_of(core: int) -> int:
    """The process id of the kernel's thread for packets on this core."""
    comms = (path for path in Path("/proc").glob("[0-9]*/comm") if path.read_text().strip() == f"ksoftirqd/{core}")
    return int(next(comms).parent.name)


class Scene:
    """The network, the upstream, and the proxies in it. Use as a context manager.

    lose, wrong: the upstream does not answer, or answers wrongly, one of so many questions; 0: never. profile: where the agent
    leaves what cProfile saw; its figures are worth nothing then.
    """

    def __init__(self, cores: Cores, *, lose: int = 0, wrong: int = 0, profile: Path | None = None) -> None:
        self.cores = cores
        self.proxies: dict[str, Proxy] = {}
        self._upstream_arguments = (str(_TTL_S), str(lose), str(wrong))
        self._profile = profile
        self._lab = Lab(clients=2)
        self._endpoint, self._other = self._lab.clients
        self._ports = itertools.count(5301)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lab)
            program = built(_SOURCES / "dns_upstream.c")
            self._start(self._lab.internet, self.cores.load, program, _UPSTREAM, 53, *self._upstream_arguments, log="upstream")
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._cleanup.close()

    def open(self, name: str) -> None:
        """Start this contestant and wait until it answers."""
        if name == NAMEGATE:
            self._open_agent()
        else:
            port = next(self._ports)
            command = _COMMANDS[name](self, self._other.gateways[0], port)
            pid = self._start(self._lab.host, self.cores.proxy, *command, log=name).pid
            self.proxies[name] = Proxy(name, pid, self._other.namespace, self._other.gateways[0], port)
        self._await_answer(self.proxies[name])

    def ask(
        self, proxy: Proxy, workload: Workload, count: int, *, outstanding: int = _OUTSTANDING, silence_ms: int = _SILENCE_MS
    ) -> Asked:
        """One run of the load. silence_ms: after so long without any reply the questions that have none are lost."""
        first = 0
        if not workload.names:
            first, proxy.next_number = proxy.next_number, proxy.next_number + count
        load = ("taskset", "-c", str(self.cores.load), built(_SOURCES / "dns_load.c"), proxy.server, str(proxy.port))
        what = (workload.kind, str(first), str(workload.names), str(count), str(outstanding), str(silence_ms))
        echo = ("echo",) if proxy.name == ECHO else ()
        done = self._lab.run(proxy.namespace, *load, *what, *echo, timeout_s=60 + count / 100)
        return Asked(**json.loads(done.stdout))

    def file(self, name: str, text: str) -> Path:
        path = self._lab.directory / name
        path.write_text(text)
        return path

    def nft(self, commands: str) -> None:
        self._lab.run(self._lab.host, "nft", "-f", self.file("commands.nft", commands))

    def _start(self, namespace: str, core: int, *command: object, log: str) -> subprocess.Popen[str]:
        with (self._lab.directory / f"{log}.log").open("w") as output:
            return self._lab.start(namespace, "taskset", "-c", str(core), *map(str, command), stdout=output)

    def _open_agent(self) -> None:
        directory = self._lab.directory
        control = Control(directory / "run" / "control.sock", patience=60)
        configuration = self.file("namegate.yaml", yaml.safe_dump(self._configuration(control.path)))
        profiler = ("-m", "cProfile", "-o", self._profile.absolute()) if self._profile else ()
        command = (sys.executable, *profiler, "-m", "agent", "agent", "-c", configuration)
        process = self._start(self._lab.host, self.cores.proxy, *command, log=NAMEGATE)
        self._cleanup.callback(self._lab.run, self._lab.host, sys.executable, "-m", "agent", "cleanup", "-c", configuration)
        self._cleanup.callback(process.wait, timeout=_READY_S_MAX)
        self._cleanup.callback(process.terminate)
        deadline = time.monotonic() + _READY_S_MAX
        while True:
            with contextlib.suppress(ControlError):
                status: Any = control.ask("status")
                if status["state"] == "enforcing":
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"the agent does not enforce:\n{(directory / f'{NAMEGATE}.log').read_text()}")
            time.sleep(0.05)
        self.proxies[NAMEGATE] = Proxy(NAMEGATE, process.pid, self._endpoint.namespace, _UPSTREAM, 53)

    def _configuration(self, control: Path) -> dict[str, object]:
        """As an operator would have it, but for the limits that this load is meant to pass."""
        directory = self._lab.directory
        policy = self.file("policy.txt", "*.bench.test:443/tcp\n")
        client = self._endpoint
        return {
            "endpoints": [{"interface": client.endpoint, "labels": {"app": "bench"}, "addresses": list(client.addresses)}],
            "policies": [str(policy)],
            "dns": {
                "upstreams": [_UPSTREAM],
                "allow-addresses": ["10.0.0.0/8"],
                "history-file": str(directory / "history"),
            },
            "control": {"socket": str(control)},
            "datapath": {
                "pin-directory": f"/sys/fs/bpf/{self._lab.host}",
                "questions-per-second": 0,
                "ipcache-rows": 1 << 23,
            },
            "limits": {"addresses-per-name": 8_192, "names": 1 << 22},
        }

    def _await_answer(self, proxy: Proxy) -> None:
        deadline = time.monotonic() + _READY_S_MAX
        while self.ask(proxy, WORKLOADS[0], 1, silence_ms=50).lost:
            if time.monotonic() > deadline:
                log = (self._lab.directory / f"{proxy.name}.log").read_text()
                raise LabError(f"{proxy.name} does not answer:\n{log}")


# --- the contestants -------------------------------------------------------------------------------------------------


def _floor(_: Scene, address: str, port: int) -> Sequence[object]:
    return (built(_SOURCES / "dns_floor.c"), address, port, _UPSTREAM, 53)


def _echo(_: Scene, address: str, port: int) -> Sequence[object]:
    return (built(_SOURCES / "dns_floor.c"), address, port)


def _dnsmasq(scene: Scene, address: str, port: int, *, cache: int) -> Sequence[object]:
    """With the limit lifted that this load would meet, and a set of its own in the kernel."""
    names = f"names{port}"
    scene.nft(f"add table inet bench\nadd set inet bench {names} {{ type ipv4_addr; }}\n")
    bare = ("--keep-in-foreground", "--conf-file=/dev/null", "--user=root", "--pid-file=", "--no-hosts", "--no-resolv")
    here = ("--bind-interfaces", f"--listen-address={address}", f"--port={port}", f"--server={_UPSTREAM}")
    size = (f"--cache-size={cache}", "--dns-forward-max=10000")
    return ("dnsmasq", *bare, *here, *size, f"--nftset=/bench.test/4#inet#bench#{names}")


def _dnsdist(scene: Scene, address: str, port: int) -> Sequence[object]:
    lines = (
        f'setLocal("{address}:{port}")',
        'setACL("0.0.0.0/0")',
        "setSecurityPollSuffix('')",
        "setMaxUDPOutstanding(65535)",
        f'newServer({{address="{_UPSTREAM}:53", sockets=64}})',
    )
    return ("dnsdist", "--supervised", "--disable-syslog", "-C", scene.file("dnsdist.conf", "\n".join(lines) + "\n"))


def _unbound(scene: Scene, address: str, port: int) -> Sequence[object]:
    """A forwarder that neither validates nor remembers, and hands out the addresses in the upstream's order."""
    text = f"""\
server:
  interface: {address}@{port}
  access-control: 0.0.0.0/0 allow
  do-ip6: no
  num-threads: 1
  module-config: "iterator"
  outgoing-range: 4096
  num-queries-per-thread: 4096
  rrset-roundrobin: no
  so-rcvbuf: 4m
  so-sndbuf: 4m
  username: ""
  chroot: ""
  directory: ""
  pidfile: ""
  use-syslog: no
  local-zone: "test." nodefault
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: {_UPSTREAM}
  forward-no-cache: yes
"""
    return ("unbound", "-d", "-c", scene.file("unbound.conf", text))


_COMMANDS: Final[dict[str, Callable[[Scene, str, int], Sequence[object]]]] = {
    FLOOR: _floor,
    ECHO: _echo,
    DNSMASQ: functools.partial(_dnsmasq, cache=0),
    "dnsmasq-cache": functools.partial(_dnsmasq, cache=10_000),
    "dnsdist": _dnsdist,
    "unbound": _unbound,
}
CONTESTANTS: Final = (NAMEGATE, *_COMMANDS)


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """What one contestant did under one workload, round by round. cpu_s: for 100,000 questions.

    ksoftirqd_s: in the same time, of the kernel's thread for packets on the proxy's core, which is in nobody's process.
    """

    cpu_s: list[float] = field(default_factory=list)
    ksoftirqd_s: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    asked: int = 0
    lost: int = 0
    wrong: int = 0

    def add(self, cpu_ns: int, ksoftirqd_ns: int, loaded: Asked, lonely: Asked) -> None:
        self.cpu_s.append(cpu_ns / loaded.asked * _PER / 1e9)
        self.ksoftirqd_s.append(ksoftirqd_ns / loaded.asked * _PER / 1e9)
        self.per_second.append((loaded.asked - loaded.lost) / loaded.seconds if loaded.seconds else 0.0)
        self.p50_us.append(lonely.p50_us)
        self.p99_us.append(lonely.p99_us)
        self.count(loaded)
        self.count(lonely)

    def count(self, asked: Asked) -> None:
        self.asked += asked.asked
        self.lost += asked.lost
        self.wrong += asked.wrong


Table = dict[str, Line]  # by contestant


def measure(scene: Scene, workload: Workload, questions: int, rounds: int) -> Table:
    """The rounds of one workload. questions: of each round, for namegate and the floor; slow peers may ask fewer."""
    ksoftirqd = ksoftirqd_of(scene.cores.proxy)
    table = {name: Line() for name in scene.proxies}
    counts = {}
    for name, proxy in scene.proxies.items():
        before = cpu_ns(proxy.pid)
        asked = scene.ask(proxy, workload, min(workload.warm_up, questions))
        counts[name] = questions
        if name not in (NAMEGATE, FLOOR):
            fitting = int(_PEER_ROUND_S * 1e9 * asked.asked / (cpu_ns(proxy.pid) - before))
            counts[name] = min(questions, max(_PEER_QUESTIONS_MIN, fitting))
        table[name].count(asked)
    order = list(scene.proxies.values())
    for turn in range(rounds):
        start = turn % len(order)
        for proxy in [*order[start:], *order[:start]]:
            before, kernel_before = cpu_ns(proxy.pid), cpu_ns(ksoftirqd)
            loaded = scene.ask(proxy, workload, counts[proxy.name])
            spent = cpu_ns(proxy.pid) - before, cpu_ns(ksoftirqd) - kernel_before
            lonely = scene.ask(proxy, workload, min(_LATENCY_QUESTIONS, questions), outstanding=1)
            table[proxy.name].add(*spent, loaded, lonely)
    return table


def ratio(table: Table, name: str, reference: str) -> Spread | None:
    """How many times the reference's CPU time, round by round; None where one of them did not run."""
    if name not in table or reference not in table:
        return None
    return Spread.of([mine / theirs for mine, theirs in zip(table[name].cpu_s, table[reference].cpu_s, strict=True)])


def as_text(workload: Workload, table: Table, rounds: int) -> str:
    lines = [
        f"{workload.name}: {workload.text}  ({rounds} rounds)",
        f"  {'':<16}{'CPU s':>8} {'(range)':<18}{'x floor':>8}{'per s':>9}{'p50 us':>8}{'p99 us':>8}",
    ]
    for name, line in table.items():
        cpu, floors = Spread.of(line.cpu_s), ratio(table, name, FLOOR)
        spread = f"({cpu.smallest:.2f} to {cpu.largest:.2f})"
        times = f"{floors.median:.2f}" if floors else "-"
        lines.append(
            f"  {name:<16}{cpu.median:>8.2f} {spread:<18}{times:>8}{median(line.per_second):>9,.0f}"
            f"{median(line.p50_us):>8.0f}{median(line.p99_us):>8.0f}"
        )
        if (softirq_s := median(line.ksoftirqd_s)) > cpu.median / 20:
            lines.append(f"  {'':<16}and {softirq_s:.2f} of the core's ksoftirqd")
        if line.lost or line.wrong:
            lines.append(f"  {'':<16}{line.lost:,} lost and {line.wrong:,} wrong of {line.asked:,}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Target:
    """text: what was to be reached, and what was."""

    text: str
    is_met: bool


def targets(tables: dict[str, Table]) -> Iterator[Target]:
    """What can be said of the contestants and workloads that ran. tables: by workload."""
    for workload in WORKLOADS:
        table = tables.get(workload.name, {})
        if (floors := ratio(table, NAMEGATE, FLOOR)) is not None:
            text = f"{workload.name}: {floors.median:.2f} times the floor, to be at most {workload.floors_max}"
            yield Target(text, floors.median <= workload.floors_max)
        if (share := ratio(table, NAMEGATE, DNSMASQ)) is not None:
            text = f"{workload.name}: {share.median:.3f} of dnsmasq with nftset and no cache, to be at most {_DNSMASQ_MAX}"
            yield Target(text, share.median <= _DNSMASQ_MAX)
    if (echoes := ratio(tables.get("warm1", {}), FLOOR, ECHO)) is not None:
        # A hop to the upstream and back is a message sent and one received, as an echo is.
        text = f"the floor is {echoes.median / 2:.2f} times a socket echo and one upstream hop, to be at most {_FLOOR_MAX}"
        yield Target(text, echoes.median / 2 <= _FLOOR_MAX)
    lines = [table[NAMEGATE] for table in tables.values() if NAMEGATE in table]
    if lines:
        asked, failed = sum(line.asked for line in lines), sum(line.lost + line.wrong for line in lines)
        yield Target(f"{failed or 'none'} lost or wrong in {asked:,}", failed == 0)


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """`scripts/bench dns`."""
    names = {workload.name: workload for workload in WORKLOADS}
    parser = argparse.ArgumentParser(
        prog="scripts/bench dns",
        description="CPU seconds for 100,000 questions, questions a second on one core, latency of a question alone.",
        epilog="example: scripts/bench dns --only namegate,floor --workload warm1 --rounds 5",
    )
    everybody = ", ".join(CONTESTANTS)
    parser.add_argument("--only", metavar="NAMES", default=",".join(CONTESTANTS), help=f"of {everybody}")
    parser.add_argument("--workload", action="append", choices=names, help="may be repeated (default: all)")
    parser.add_argument("--questions", type=int, default=20_000, help="of each round (default: 20,000)")
    parser.add_argument("--rounds", type=int, default=ROUNDS_JUDGED_MIN, help=f"(default: {ROUNDS_JUDGED_MIN})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where cProfile leaves what it saw of the agent")
    chosen = parser.parse_args(arguments)
    contestants = chosen.only.split(",")
    workloads = [workload for workload in WORKLOADS if workload.name in (chosen.workload or names)]
    if unknown := set(contestants) - set(CONTESTANTS):
        parser.error(f"there is no contestant {min(unknown)!r}: there are {everybody}")
    if chosen.rounds < 1 or chosen.questions < 1:
        parser.error("--rounds and --questions are at least 1")
    is_cold = any(not workload.names for workload in workloads)
    if is_cold and chosen.rounds * (chosen.questions + _LATENCY_QUESTIONS) > _FRESH_NAMES:
        parser.error(f"there are {_FRESH_NAMES:,} names for the cold workload: fewer rounds or questions")
    if os.geteuid() != 0:
        print("bench: dns needs root: sudo scripts/bench dns", file=sys.stderr)
        return 2
    before = machine()
    cores = Cores.chosen()
    print(f"{before['cpu']}, {before['processors']} processors, kernel {before['kernel']}, Python {before['python']}")
    print(f"load average {before['load_average']}; load and upstream on core {cores.load}, proxy on core {cores.proxy}")
    print(f"CPU seconds for {_PER:,} questions, {_OUTSTANDING} outstanding; latency with one outstanding\n", flush=True)
    tables: dict[str, Table] = {}
    with Scene(cores, profile=chosen.profile) as scene:
        for name in CONTESTANTS:
            if name in contestants:
                scene.open(name)
        for workload in workloads:
            tables[workload.name] = measure(scene, workload, chosen.questions, chosen.rounds)
            print(as_text(workload, tables[workload.name], chosen.rounds), end="\n\n", flush=True)
    judged = list(targets(tables))
    for target in judged:
        print(f"{'pass' if target.is_met else 'MISS'}  {target.text}")
    if chosen.json:
        document = {
            "machine": before,
            "load_average_after": machine()["load_average"],
            "unit": f"seconds of CPU time for {_PER:,} questions",
            "workloads": {name: {who: asdict(line) for who, line in table.items()} for name, table in tables.items()},
            "targets": [asdict(target) for target in judged],
        }
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(target.is_met for target in judged) else 1
