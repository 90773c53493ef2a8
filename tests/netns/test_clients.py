"""Real clients, unmodified, behind the gate: C libraries, languages, curl, and resolvers that forward.

Each looks a name up as its programs do and at once connects to port 443 of what it was told. The judge is the same client in a
namespace that no policy selects: what it gets from the upstream there it must get behind the gate, failures word for word.

The programs in `clients/` print, times in milliseconds:

    addresses 3.2 198.18.0.1 2001:db8:99::1          or          failed 0.8 Name or service not known
    connection 0.2 198.18.0.1 connected                          for the first address of each family

A lookup sees a resolv.conf and an nsswitch.conf of its own, mounts that end with it: the machine's are not touched.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from agent.datapath.loader import cache_directory
from tests.netns import pcap
from tests.netns.lab import BUILD_DIRECTORY, COMPILER, NAME_SERVERS, Client, Lab, built, fresh_address, fresh_name
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

SOURCES: Final = Path(__file__).parent / "clients"
FAILED_S_MAX: Final = 1.0
# A lost SYN is repeated after a second: who is connected sooner has lost none.
CONNECTED_S_MAX: Final = 0.9
# Where each write to the kernel is as much later, an address that is released too early is refused.
WRITE_DELAY_S: Final = 0.1

FRESH: Final = 100
MANY: Final = {*(f"198.51.100.{host}" for host in range(100, 200)), *(f"2001:db8:53::{host}" for host in range(100, 160))}
RECORDS: Final = {
    "four.test.": ["A 198.51.100.11"],
    "six.test.": ["AAAA 2001:db8:53::12"],
    "text.test.": ['TXT "no address"'],
    # Of either kind more than 1,232 bytes, which is what our upstream sends by UDP.
    "many.test.": [f"{'AAAA' if ':' in address else 'A'} {address}" for address in sorted(MANY)],
    "secret.example.": ["A 198.51.100.66", "AAAA 2001:db8:53::66"],
    # So that each n<i>.part.example exists and has no address.
    **{f"x.n{number}.part.example.": ["A 198.51.100.13"] for number in range(FRESH)},
}
# The second one makes n<i>.part.example an ancestor of what may be asked.
POLICY: Final = "*.test:443/tcp\nx.*.part.example:443/tcp\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client saw. failure: in its own words, empty if it has addresses. connections: to what, how it ended, seconds."""

    addresses: frozenset[str]
    failure: str
    took_s: float
    connections: tuple[tuple[str, str, float], ...]

    @property
    def is_connected(self) -> bool:
        """To each address it tried, with the first packet."""
        return bool(self.connections) and all(
            how == "connected" and took_s < CONNECTED_S_MAX for _, how, took_s in self.connections
        )


# Runs a command where the client is; gives back what it prints.
Run: TypeAlias = Callable[..., str]
LookUp: TypeAlias = Callable[[Run, str], Outcome]


def program(*command: str | Path) -> LookUp:
    """One of `clients/`."""

    def look_up(run: Run, name: str) -> Outcome:
        return _read(run(*command, name))

    return look_up


def compiled(
    compiler: tuple[str, ...] = COMPILER, *libraries: str, source: str = "lookup.c", setting: tuple[str, ...] = ()
) -> LookUp:
    """One of `clients/` that is compiled, with this in its environment."""

    def look_up(run: Run, name: str) -> Outcome:
        return _read(run("env", *setting, built(SOURCES / source, compiler=compiler, libraries=libraries), name))

    return look_up


def getent(run: Run, name: str) -> Outcome:
    """It does not connect: a program that does is told the addresses."""
    begun = time.monotonic()
    addresses = list(dict.fromkeys(line.split()[0] for line in run("getent", "ahosts", name).splitlines()))
    took_s = time.monotonic() - begun
    connections: list[tuple[str, str, float]] = []
    for is_v6 in (False, True):
        for address in [address for address in addresses if (":" in address) is is_v6][:1]:
            connections += _read(run(built(SOURCES / "lookup.c"), address)).connections
    return Outcome(frozenset(addresses), "" if addresses else "not found", took_s, tuple(connections))


def curl(run: Run, name: str) -> Outcome:
    """It looks up both kinds, connects to one address, and does not like that its request is echoed."""
    said = "%{remote_ip} %{time_namelookup} %{time_connect} %{errormsg}"
    begun = time.monotonic()
    told = run("curl", "--silent", "--max-time", "5", "--output", "/dev/null", "--write-out", said, f"http://{name}:443/")
    took_s = time.monotonic() - begun
    address, looked_up, connected, failure = told.split(" ", 3)
    if not address:
        return Outcome(frozenset(), failure, took_s, ())
    connection = (address, "connected" if float(connected) else failure, float(connected) - float(looked_up))
    return Outcome(frozenset({address}), "", float(looked_up), (connection,))


def _read(text: str) -> Outcome:
    addresses: frozenset[str] = frozenset()
    failure, took_s, connections = "", 0.0, []
    for line in text.splitlines():
        kind, took_ms, rest = line.split(" ", 2)
        if kind == "connection":
            address, how = rest.split(" ", 1)
            connections.append((address, how, float(took_ms) / 1e3))
        else:
            took_s = float(took_ms) / 1e3
            addresses, failure = (frozenset(rest.split()), "") if kind == "addresses" else (frozenset(), rest)
    return Outcome(addresses, failure, took_s, tuple(connections))


GO: Final = ("env", f"GOCACHE={BUILD_DIRECTORY / 'go'}", "GO111MODULE=off", "go", "build", "-buildvcs=false")
CLIENTS: Final[dict[str, LookUp]] = {
    "getent": getent,
    "musl": compiled(("musl-gcc", *COMPILER[1:])),
    "c-ares": compiled((*COMPILER, "-DCARES", "-DCARES_NO_DEPRECATED"), "-lcares"),
    "curl": curl,
    "python": program(sys.executable, SOURCES / "lookup.py", "socket"),
    "dnspython": program(sys.executable, SOURCES / "lookup.py", "dnspython"),
    "go": compiled(GO, source="lookup.go", setting=("GODEBUG=netdns=go",)),
    "node-lookup": program("node", SOURCES / "lookup.js", "lookup"),
    "node-resolve": program("node", SOURCES / "lookup.js", "resolve"),
    "resolved": getent,
    "unbound": getent,
    "dnsmasq": getent,
}
# Forwarders in the client's own namespace, which getent asks instead of the lab's name server.
FORWARDERS: Final = {"resolved": "127.0.0.53", "unbound": "127.0.0.1", "dnsmasq": "127.0.0.2"}

# As systemd's unit has it, but for the unit: no rights but these, a /run of its own. D-Bus is not there, and it starts without.
_RESOLVED: Final = """
mount -t tmpfs none /run
mkdir -p /run/systemd/resolve /run/systemd/resolved.conf.d
chown 65534:65534 /run/systemd/resolve
printf '[Resolve]\nDNS=%s\nFallbackDNS=\nLLMNR=no\nMulticastDNS=no\n' "$2" >/run/systemd/resolved.conf.d/lab.conf
rights=+net_bind_service,+net_raw,+setpcap
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps $rights --ambient-caps $rights -- "$1"
"""
_UNBOUND: Final = """
server:
  interface: 127.0.0.1
  do-daemonize: no
  use-syslog: no
  username: ""
  chroot: ""
  pidfile: ""
  local-zone: "test." nodefault
remote-control:
  control-enable: no
forward-zone:
  name: "."
  forward-addr: SERVER
"""
# A name server and its search list may differ from one lookup to the next; a mount is made in a millisecond.
_PLACE: Final = """
mount --bind "$1" /etc/resolv.conf
mount --bind "$2" /etc/nsswitch.conf
shift 2
exec "$@" </dev/null
"""


class Scene:
    """The lab's first client is policed, its second one is not; both have the forwarders."""

    def __init__(self, lab: Lab, agent: RunningAgent) -> None:
        self.lab = lab
        self.agent = agent
        self._numbers = itertools.count()
        self._nsswitch = lab.directory / "nsswitch.conf"
        self._nsswitch.write_text("passwd: files\ngroup: files\nhosts: files dns\n")
        unbound = lab.directory / "unbound.conf"
        unbound.write_text(_UNBOUND.replace("SERVER", NAME_SERVERS[0]))
        for client in lab.clients:
            self._forward(client, "resolved", "unshare", "-m", "sh", "-e", "-c", _RESOLVED, "sh", _resolved(), NAME_SERVERS[0])
            self._forward(client, "unbound", "unbound", "-d", "-c", unbound)
            command = ("dnsmasq", "-k", "--no-resolv", "--no-hosts", "-C", "/dev/null", "--user=root", "--pid-file=")
            self._forward(
                client, "dnsmasq", *command, "--listen-address=127.0.0.2", "--bind-interfaces", f"--server={NAME_SERVERS[0]}"
            )

    def _forward(self, client: Client, which: str, *command: str | Path) -> None:
        """Start it and ask until it answers."""
        path = self.lab.directory / f"{which}-{client.endpoint}.log"
        with path.open("w") as log:
            process = self.lab.start(client.namespace, *command, stdout=log)
        question = ("dig", f"@{FORWARDERS[which]}", "four.test", "+tries=1", "+time=1", "+short")
        deadline = time.monotonic() + 20
        while self.lab.run(client.namespace, *question, check=False).stdout != "198.51.100.11\n":
            assert process.poll() is None, path.read_text()
            assert time.monotonic() < deadline, path.read_text()

    def fresh(self) -> int:
        """Of a name nobody asked before."""
        number = next(self._numbers)
        assert number < FRESH
        return number

    @contextlib.contextmanager
    def slow_writes(self) -> Iterator[None]:
        self.agent.inject(delay=WRITE_DELAY_S)
        try:
            yield
        finally:
            self.agent.inject(delay=0)

    def look_up(
        self, which: str, name: str, *, search: str = "none.example test", ndots: int = 1, is_policed: bool = True
    ) -> Outcome:
        """What this client makes of the name, behind the gate or where there is none."""
        client = self.lab.clients[0 if is_policed else 1]
        server = FORWARDERS.get(which, NAME_SERVERS[0])
        resolv = self.lab.directory / "resolv.conf"
        resolv.write_text(f"nameserver {server}\nsearch {search}\noptions ndots:{ndots}\n")

        def run(*command: str | Path) -> str:
            place = ("unshare", "-m", "sh", "-e", "-c", _PLACE, "sh", resolv, self._nsswitch)
            done = self.lab.run(client.namespace, *place, *command, check=False)
            assert not done.stderr, done.stderr
            return done.stdout

        return CLIENTS[which](run, name)


def addresses_of(number: int) -> set[str]:
    return {fresh_address(number), fresh_address(number, 6)}


def _resolved() -> Path:
    """The system's, or what scripts/setup has unpacked: the package would make it the resolver of this machine."""
    installed = Path("/usr/lib/systemd/systemd-resolved")
    return installed if installed.exists() else cache_directory() / "systemd-resolved"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Lab(clients=2, records=RECORDS, fresh=FRESH, ports=(443,)) as lab:
        policed = [{"interface": lab.client.endpoint, "addresses": list(lab.client.addresses)}]
        with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("agent"), endpoints=policed) as agent:
            yield Scene(lab, agent)


each_client = pytest.mark.parametrize("which", CLIENTS)
# What some do nowhere: musl took up TCP in 1.2.4, and ends its search, like dnspython, at a name that exists.
CANNOT: Final = {("musl", "TCP"), ("musl", "search past NODATA"), ("dnspython", "search past NODATA")}


def is_all(which: str, seen: Outcome, addresses: set[str]) -> bool:
    """Has it them all, and is connected? Of curl one is known."""
    is_found = seen.addresses == addresses or (which == "curl" and len(seen.addresses & addresses) == 1)
    return is_found and seen.is_connected


# --- addresses -----------------------------------------------------------------------------------------------------------


@each_client
def test_an_allowed_name_works_the_first_time(scene: Scene, which: str) -> None:
    """Both families are connected with the first packet, although the kernel has the rows later than we the answers."""
    number = scene.fresh()
    with scene.slow_writes():
        seen = scene.look_up(which, fresh_name(number))
    assert is_all(which, seen, addresses_of(number)), seen
    assert seen.took_s >= WRITE_DELAY_S


@pytest.mark.parametrize("which", ["getent", "musl"])
def test_both_kinds_are_asked_at_once_from_one_socket(scene: Scene, which: str) -> None:
    """As the C libraries do: each answer finds its question although both are held."""
    number = scene.fresh()
    lab = scene.lab
    with lab.capture(lab.client.namespace, lab.client.device, "udp port 53", name=f"both-{which}") as wire, scene.slow_writes():
        assert is_all(which, scene.look_up(which, fresh_name(number)), addresses_of(number))
    packets = pcap.read(wire.path).packets
    assert [packet.destination_port == 53 for packet in packets] == [True, True, False, False]
    assert len({packet.source_port for packet in packets[:2]}) == 1


@each_client
@pytest.mark.parametrize(("name", "address"), [("four.test", "198.51.100.11"), ("six.test", "2001:db8:53::12")])
def test_a_name_of_one_family(scene: Scene, which: str, name: str, address: str) -> None:
    """That the other kind has no data spoils nothing."""
    seen = scene.look_up(which, name)
    assert is_all(which, seen, {address}), seen


@each_client
def test_a_long_answer_comes_by_tcp(scene: Scene, which: str) -> None:
    """Both kinds, whole, through a forwarder too; the addresses are open as from any answer."""
    seen = scene.look_up(which, "many.test")
    if (which, "TCP") in CANNOT and not seen.addresses:
        assert seen.failure == scene.look_up(which, "many.test", is_policed=False).failure
    else:
        assert is_all(which, seen, MANY), seen


# --- names that are not there ----------------------------------------------------------------------------------------------


@each_client
def test_a_denied_name_fails_in_under_a_second(scene: Scene, which: str) -> None:
    """With all that its search list makes of it. The name has addresses; nobody learns them."""
    seen = scene.look_up(which, "secret.example")
    assert (seen.addresses, seen.failure != "") == (frozenset(), True)
    assert seen.took_s < FAILED_S_MAX


@each_client
@pytest.mark.parametrize("name", ["absent.test", "text.test"])
def test_the_upstreams_own_no_passes(scene: Scene, which: str, name: str) -> None:
    """NXDOMAIN and NODATA: each client says what it says without us, and as soon."""
    seen = scene.look_up(which, name)
    assert (seen.addresses, seen.failure != "") == (frozenset(), True)
    assert seen.failure == scene.look_up(which, name, is_policed=False).failure
    assert seen.took_s < FAILED_S_MAX


@pytest.mark.parametrize("which", [which for which in CLIENTS if which != "node-resolve"])  # which knows no search list
@pytest.mark.parametrize(
    ("form", "search", "ndots", "ability"),
    [
        pytest.param("n{}", "none.example test", 1, "search", id="past-denied"),
        pytest.param("n{}", "part.example test", 1, "search past NODATA", id="past-a-denied-ancestor"),
        pytest.param("n{}.test", "none.example sub.none.example", 5, "search", id="ndots"),
    ],
)
def test_a_search_goes_on_to_the_name_that_is_meant(
    scene: Scene, which: str, form: str, search: str, ndots: int, ability: str
) -> None:
    """What the search list makes of a name is denied, NXDOMAIN or NODATA, and ends no search that the truth would not end."""
    number = scene.fresh()
    name = form.format(number)
    seen = scene.look_up(which, name, search=search, ndots=ndots)
    if (which, ability) in CANNOT:
        assert seen.failure == scene.look_up(which, name, search=search, ndots=ndots, is_policed=False).failure != ""
    else:
        assert is_all(which, seen, addresses_of(number)), seen
