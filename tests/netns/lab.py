"""A network of one's own: clients, a host that forwards, and an internet with real servers, all in namespaces.

    client 1 ── eth0 ═ ep1 ─┐
    client 2 ── eth0 ═ ep2 ─┤ host ── up0 ═ eth0 ── internet: nsd, TCP and UDP echo on tens of thousands of addresses
       …                    ┘

Rule 1: nothing here touches the machine itself: interfaces are made inside the namespaces, settings are written inside them.
Rule 2: whatever was started or made is gone after `with Lab(…)`, also when the body raised. Leftovers of a run that was killed
        are removed by the next Lab, which knows them by the number of the process that made them.
Rule 3: nothing waits by sleeping: a server is ready when it said so, a capture when tcpdump said so, and a capture is complete
        when tcpdump has taken as many packets as the kernel counted for it.

Addresses are those set aside for documentation and benchmarks (RFC 5737, RFC 3849, RFC 2544):

    192.0.2.0/24      2001:db8:1::/48      clients: client i has 192.0.2.(4i+2)/30 and 2001:db8:1:i::2/64; the host is one below
    203.0.113.0/24    2001:db8:2::/64      host (.1, ::1) and internet (.2, ::2)
    198.51.100.0/24   2001:db8:53::/64     servers; the name server is .53 and ::53
    198.18.0.0/15     2001:db8:99::/48     servers too: what the fresh names n<i>.test stand for

In the last two rows every address answers (`ip route add local … dev lo`, called AnyIP), so that a test may invent any.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

NETNS_DIRECTORY = Path("/run/netns")
BUILD_DIRECTORY = Path(__file__).parents[2] / ".build"
COMPILER = ("gcc", "-O2", "-Wall", "-Wextra", "-Werror")

NAME_SERVERS = ("198.51.100.53", "2001:db8:53::53")
SERVER_RANGES = ("198.51.100.0/24", "198.18.0.0/15", "2001:db8:53::/64", "2001:db8:99::/48")
HOST_UPLINK = ("203.0.113.1", "2001:db8:2::1")
INTERNET_UPLINK = ("203.0.113.2", "2001:db8:2::2")
CLIENTS_MAX = 63  # /30 networks in 192.0.2.0/24, the first left out

# A server that is not there after this long never will be; a large zone takes about a second for 100,000 names.
READY_S_MAX = 30.0
# The servers end by themselves after this long even if everything above them was killed.
SERVERS_LIFE_S = 900


def fresh_name(i: int) -> str:
    """The i-th name nobody asked before."""
    return f"n{i}.test."


def fresh_address(i: int, version: int = 4) -> str:
    """What the i-th fresh name stands for in this version of IP."""
    base = ipaddress.ip_address("198.18.0.0" if version == 4 else "2001:db8:99::")
    return str(base + i + 1)


@dataclass(frozen=True, slots=True)
class Client:
    """namespace: its own. device: its interface, inside. endpoint: the other side of that, in the host's namespace."""

    namespace: str
    device: str
    endpoint: str
    addresses: tuple[str, str]  # IPv4, IPv6
    gateways: tuple[str, str]  # the host, as the client sees it


class LabError(Exception):
    """The network could not be built or a program in it did not start: the machine's fault, not that of the code under test."""


class Lab:
    """The network; see the module. Use as a context manager.

    clients: how many. records: what the name server says: name to lines of a zone file without the name ("A 198.51.100.7",
    "60 IN CNAME other.example."); every name is allowed, for the zone is the root. fresh: how many fresh names there are
    besides. ttl_s: of everything that does not say its own. ports: where the internet echoes, over TCP and UDP.
    """

    _counter = itertools.count(1)

    def __init__(
        self,
        clients: int = 1,
        *,
        records: Mapping[str, Sequence[str]] | None = None,
        fresh: int = 0,
        ttl_s: int = 60,
        ports: Sequence[int] = (7, 80, 443),
    ) -> None:
        if not 1 <= clients <= CLIENTS_MAX:
            raise ValueError(f"a lab has 1 to {CLIENTS_MAX} clients, not {clients}")
        stem = f"nglab{os.getpid()}-{next(self._counter)}"
        self.host = f"{stem}-host"
        self.internet = f"{stem}-internet"
        self.uplink = "up0"
        self.clients = tuple(
            Client(
                namespace=f"{stem}-client{i}",
                device="eth0",
                endpoint=f"ep{i}",
                addresses=(f"192.0.2.{4 * i + 2}", f"2001:db8:1:{i:x}::2"),
                gateways=(f"192.0.2.{4 * i + 1}", f"2001:db8:1:{i:x}::1"),
            )
            for i in range(1, clients + 1)
        )
        self.directory = Path()
        self._records = records or {}
        self._fresh = fresh
        self._ttl_s = ttl_s
        self._ports = ports
        self._cleanup = contextlib.ExitStack()

    @property
    def client(self) -> Client:
        """The first one: most tests need no other."""
        return self.clients[0]

    def __enter__(self) -> Self:
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="namegate-lab-")))
            # For the next lab, should this process be killed.
            (self.directory / "owner").write_text(str(os.getpid()))
            self._cleanup = stack
            self._build()
            self._serve_names()
            self._serve_echo()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._cleanup.close()

    def run(
        self, namespace: str, *command: str | Path, timeout_s: float = 30, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a namespace to its end; with `check`, LabError with its output when it fails."""
        done = subprocess.run(
            [*_inside(namespace), *map(str, command)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def start(
        self,
        namespace: str,
        *command: str | Path,
        stdout: IO[str] | int | None = subprocess.PIPE,
        stderr: IO[str] | int | None = subprocess.STDOUT,
        stdin: int = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command in a namespace. It ends with the lab, its children too, and also when this process is killed.

        Who leaves `stdout` a pipe reads it, or starts something that says little: a full pipe stops the command.
        """
        process = subprocess.Popen(
            [*_inside(namespace), "setpriv", "--pdeathsig", "KILL", "--", *map(str, command)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,
        )
        self._cleanup.callback(_end, process)
        return process

    def capture(self, namespace: str, device: str, expression: str = "", *, name: str | None = None) -> Capture:
        """A capture of this device that is running when this returns. `expression`: which packets, in tcpdump's language."""
        path = self.directory / f"{name or f'{namespace}-{device}'}.pcap"
        return Capture(self, namespace, device, expression, path)

    def settle(self, namespace: str, values: Mapping[str, str | int]) -> None:
        """Write settings below /proc/sys/net of a namespace, {"ipv4/ip_forward": 1}."""
        script = "; ".join(f"echo {value} > /proc/sys/net/{key}" for key, value in values.items())
        self.run(namespace, "sh", "-e", "-c", script)

    # --- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        for namespace in (self.host, self.internet, *(client.namespace for client in self.clients)):
            _ip("netns", "add", namespace)
            self._cleanup.callback(_remove_namespace, namespace)
            # Without this an address is unusable for the second in which the kernel asks whether somebody else has it.
            self.settle(namespace, {"ipv6/conf/all/accept_dad": 0, "ipv6/conf/default/accept_dad": 0})
        self.settle(self.host, {"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1})

        host = ["link set lo up"]
        for client in self.clients:
            host += [f"link add {client.endpoint} type veth peer name {client.device} netns {client.namespace}"]
            host += [f"addr add {client.gateways[0]}/30 dev {client.endpoint}"]
            host += [f"addr add {client.gateways[1]}/64 dev {client.endpoint}", f"link set {client.endpoint} up"]
        # Last, so that its index is not the one its other side has: of a device whose two numbers are equal the kernel takes no
        # other side for granted, and may think about its carrier for a second.
        host += [f"link add {self.uplink} type veth peer name eth0 netns {self.internet}"]
        host += [f"addr add {HOST_UPLINK[0]}/24 dev {self.uplink}", f"addr add {HOST_UPLINK[1]}/64 dev {self.uplink}"]
        host += [f"link set {self.uplink} up"]
        host += [f"route add default via {INTERNET_UPLINK[0]}", f"-6 route add default via {INTERNET_UPLINK[1]}"]
        self._batch(self.host, host)

        internet = [f"addr add {INTERNET_UPLINK[0]}/24 dev eth0", f"addr add {INTERNET_UPLINK[1]}/64 dev eth0"]
        internet += [f"addr add {NAME_SERVERS[0]}/32 dev lo", f"addr add {NAME_SERVERS[1]}/128 dev lo"]
        internet += ["link set lo up", "link set eth0 up"]
        internet += [f"-6 route add local {r} dev lo" if ":" in r else f"route add local {r} dev lo" for r in SERVER_RANGES]
        internet += [f"route add 192.0.2.0/24 via {HOST_UPLINK[0]}", f"-6 route add 2001:db8:1::/48 via {HOST_UPLINK[1]}"]
        self._batch(self.internet, internet)
        for client in self.clients:
            lines = ["link set lo up", f"addr add {client.addresses[0]}/30 dev {client.device}"]
            lines += [f"addr add {client.addresses[1]}/64 dev {client.device}", f"link set {client.device} up"]
            lines += [f"route add default via {client.gateways[0]}", f"-6 route add default via {client.gateways[1]}"]
            self._batch(client.namespace, lines)
        self._await_links()

    def _await_links(self) -> None:
        """Until every interface has seen its carrier: an IPv6 route through one that has not is unreachable.

        Its link-local address is made by the same call in the kernel that wakes the routes.
        """
        links = [(self.host, self.uplink), (self.internet, "eth0")]
        for client in self.clients:
            links += [(self.host, client.endpoint), (client.namespace, client.device)]
        deadline = time.monotonic() + READY_S_MAX
        for namespace, device in links:
            while not _ip("-6", "-o", "addr", "show", "dev", device, "scope", "link", "-tentative", inside=namespace):
                if time.monotonic() > deadline:
                    raise LabError(f"{device} in {namespace} has no carrier after {READY_S_MAX} s")

    def _batch(self, namespace: str, lines: Sequence[str]) -> None:
        """Commands of ip(8), in one process for each family (a batch takes the family from its command line)."""
        for is_v6, group in itertools.groupby(lines, key=lambda line: line.startswith("-6 ")):
            family = ["-6"] if is_v6 else []
            text = "\n".join(line.removeprefix("-6 ") for line in group)
            _ip(*family, "-batch", "-", inside=namespace, given=text)

    # --- the internet's servers --------------------------------------------------------------------------------------

    def _serve_names(self) -> None:
        self.start_nsd(NAME_SERVERS, {".": self._write_zone()})
        # The line comes before the zone is served; a question waits for it.
        for server in NAME_SERVERS:
            self.run(self.internet, "dig", f"@{server}", ".", "SOA", "+tries=10", "+time=1", "+short")

    def start_nsd(self, addresses: Sequence[str], zones: Mapping[str, Path]) -> None:
        """One more name server on the internet: zone to its file, which is checked first."""
        files = "".join(f'zone:\n  name: "{zone}"\n  zonefile: "{file}"\n' for zone, file in zones.items())
        for zone, file in zones.items():
            # nsd itself would start all the same, and answer SERVFAIL.
            self.run(self.internet, "nsd-checkzone", zone, file)
        directory = Path(tempfile.mkdtemp(prefix="nsd-", dir=self.directory))
        configuration = directory / "nsd.conf"
        configuration.write_text(
            "server:\n"
            + "".join(f'  ip-address: "{address}"\n' for address in addresses)
            + f'  zonesdir: "{directory}"\n  pidfile: ""\n  username: ""\n  chroot: ""\n'
            f'  xfrdfile: "{directory}/xfrd.state"\n  xfrdir: "{directory}"\n'
            f'  zonelistfile: "{directory}/zones"\n'
            "  server-count: 1\n  rrl-ratelimit: 0\n  tcp-count: 500\n  verbosity: 1\n  hide-version: yes\n"
            f"remote-control:\n  control-enable: no\n{files}"
        )
        nsd = self.start(self.internet, "nsd", "-d", "-c", configuration)
        _await_line(nsd, "nsd started")

    def _write_zone(self) -> Path:
        lines = [f"$TTL {self._ttl_s}", "$ORIGIN .", ". SOA ns.test. hostmaster.test. 1 3600 600 86400 60", ". NS ns.test."]
        lines += [f"ns.test. A {NAME_SERVERS[0]}", f"ns.test. AAAA {NAME_SERVERS[1]}"]
        lines += [f"{name} {record}" for name, records in self._records.items() for record in records]
        for i in range(self._fresh):
            lines += [f"{fresh_name(i)} A {fresh_address(i)}", f"{fresh_name(i)} AAAA {fresh_address(i, 6)}"]
        zone = self.directory / "root.zone"
        zone.write_text("\n".join(lines) + "\n")
        return zone

    def _serve_echo(self) -> None:
        servers = self.start(self.internet, built("servers.c"), str(SERVERS_LIFE_S), *map(str, self._ports))
        _await_line(servers, "ready")


class Capture:
    """One tcpdump; made by `Lab.capture`, already listening. Use as a context manager or call `stop`.

    path: the file, complete after `stop`. taken, lost: packets in the file, and packets that the kernel had to drop because
    tcpdump was too slow; known after `stop`.
    """

    def __init__(self, lab: Lab, namespace: str, device: str, expression: str, path: Path) -> None:
        self.path = path
        self.taken = 0
        self.lost = 0
        # Immediate mode and an unbuffered file, so that what the kernel counted is what can be read; 512 bytes hold every
        # header and the DNS messages of the lab's names.
        self._tcpdump = lab.start(
            namespace,
            *("tcpdump", "-Z", "root", "-n", "-i", device, "-s", "512", "-B", "65536", "--immediate-mode", "-U"),
            *("--time-stamp-precision=nano", "-w", path, expression),
        )
        _await_line(self._tcpdump, "listening on")
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Wait until every packet counted so far is in the file, then end tcpdump. A second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        deadline = time.monotonic() + READY_S_MAX
        # On SIGUSR1 tcpdump says how many packets it has written, how many the filter let in, how many the kernel dropped.
        while True:
            self._tcpdump.send_signal(signal.SIGUSR1)
            line = _await_line(self._tcpdump, "dropped by kernel")
            found = re.search(r"(\d+) packets? captured, (\d+) packets? received by filter, (\d+) packets? dropped", line)
            if found is None:
                raise LabError(f"tcpdump says: {line}")
            self.taken, received, self.lost = map(int, found.groups())
            if self.taken + self.lost >= received:
                break
            if time.monotonic() > deadline:
                raise LabError(f"tcpdump took {self.taken} of {received} packets and no more in {READY_S_MAX} s")
        self._tcpdump.send_signal(signal.SIGINT)
        self._tcpdump.wait(timeout=READY_S_MAX)


def built(source: str | Path, *, compiler: Sequence[str] = COMPILER, libraries: Sequence[str] = ()) -> Path:
    """The program compiled from a file, one beside this module if only named; once for each content and way to compile it."""
    path = Path(__file__).parent / source
    digest = hashlib.sha256(repr((*compiler, *libraries)).encode() + path.read_bytes()).hexdigest()[:16]
    program = BUILD_DIRECTORY / f"{path.stem}-{digest}"
    if not program.exists():
        BUILD_DIRECTORY.mkdir(exist_ok=True)
        building = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler, "-o", building, path, *libraries], check=True)
        building.rename(program)
    return program


def _inside(namespace: str) -> tuple[str, str]:
    """`ip netns exec` and `ip -n` would also make mounts, with a /sys that lacks bpffs; this enters the network alone."""
    return ("nsenter", f"--net={NETNS_DIRECTORY / namespace}")


def _ip(*arguments: str, inside: str | None = None, given: str | None = None) -> str:
    command = [*(_inside(inside) if inside else ()), "ip", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _await_line(process: subprocess.Popen[str], wanted: str) -> str:
    """The first line of output that holds `wanted`; LabError with all that was said when it ends or is silent for too long."""
    assert process.stdout is not None
    deadline = time.monotonic() + READY_S_MAX
    heard = ""
    while (left := deadline - time.monotonic()) > 0:
        # Straight from the descriptor: Python's own buffer would hide lines from select.
        if not select.select([process.stdout], [], [], left)[0]:
            break
        chunk = os.read(process.stdout.fileno(), 65536).decode(errors="replace")
        heard += chunk
        complete = heard[: heard.rfind("\n") + 1]
        for line in complete.splitlines():
            if wanted in line:
                return line
        if not chunk:
            break
    raise LabError(f"{process.args!r} never said {wanted!r}, but: {heard.strip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the process and its children to end, make it a little later; children that linger end with their namespace."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            break
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _remove_namespace(namespace: str) -> None:
    """End everything that runs in it, and wait for that: a namespace lives on, interfaces and all, while a process is in it."""
    for pid in map(int, _ip("netns", "pids", namespace).split()):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], 5)
            finally:
                os.close(handle)
    _ip("netns", "del", namespace)


def _remove_leftovers() -> None:
    """Namespaces and files of labs whose process is gone."""
    if not NETNS_DIRECTORY.is_dir():
        return
    for path in NETNS_DIRECTORY.glob("nglab*"):
        found = re.fullmatch(r"nglab(\d+)-\d+-\w+", path.name)
        if found is not None and not Path("/proc", found[1]).exists():
            with contextlib.suppress(LabError):
                _remove_namespace(path.name)
    for path in Path("/sys/fs/bpf").glob("nglab*-host"):
        found = re.match(r"nglab(\d+)-", path.name)
        if found is not None and not Path("/proc", found[1]).exists():
            _remove_pins(path)
    for path in Path(tempfile.gettempdir()).glob("namegate-lab-*"):
        owner = path / "owner"
        if owner.exists() and not Path("/proc", owner.read_text()).exists():
            shutil.rmtree(path, ignore_errors=True)


def _remove_pins(directory: Path) -> None:
    """rmtree would open what is pinned; a pin is a name, and unlinking it is enough."""
    for path, directories, files in os.walk(directory, topdown=False):
        for name in files:
            Path(path, name).unlink(missing_ok=True)
        for name in directories:
            Path(path, name).rmdir()
    directory.rmdir()
