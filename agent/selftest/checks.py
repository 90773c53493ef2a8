"""What is checked, one after the other, with the real agent in the host's namespace."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import yaml

from agent.control import ControlError
from agent.control.client import Control
from agent.core.types import Address, packed, text_of
from agent.datapath.datapath import what_is_missing_of_bpffs, what_is_missing_of_rights
from agent.dns.wire import Rcode
from agent.selftest import internet
from agent.selftest.capture import Capture, Packet, missing
from agent.selftest.internet import EXPIRING, EXPIRING_ADDRESS, PORT, STEADY, STEADY_ADDRESS, STRANGERS, Internet
from agent.selftest.network import NAME_SERVER, TOOLS, Lacking, Network

POLICY: Final = f"*.test:{PORT}/tcp\n*.test:{PORT}/udp\n"
DENIED: Final = "denied.example"
# The first start on a machine compiles the datapath.
READY_S_MAX: Final = 40.0
PATIENCE_S: Final = 3.0
EXPIRY_S_MAX: Final = 10.0
# Around the restart: a datagram each, and sometimes more.
PAUSE_S: Final = 0.002
CONNECT_EVERY: Final = 10
STRANGER_EVERY: Final = 25
AFTER_RESTART_S: Final = 0.5
# The row of one address is on its way when the next is asked for.
NAMES_AT_ONCE: Final = 4
NEXT_NAME_AFTER_S: Final = 0.0003
CONNECT_S_MAX: Final = 0.5
# The client asks faster than one endpoint may: what is proved is the gate, not the limit.
NO_LIMIT: Final = {"questions-per-second": 0}

_SLOW: Final = "the machine may have been too slow: try again when it has time"
_DOCTOR: Final = "`namegate doctor` looks for a cause; please report it with its output"
_GATE: Final = f"do not rely on the gate here; {_DOCTOR}"


class Check(NamedTuple):
    """said: what was seen, in figures. bad: where it is not good, what is wrong, and what to do."""

    check: str
    is_good: bool
    said: str
    bad: str | None = None


def _check(check: str, said: str, *faults: tuple[bool, str]) -> Check:
    """faults: whether there is one, and what it is; the first counts."""
    bad = next((sentence for is_there, sentence in faults if is_there), None)
    return Check(check, bad is None, said, bad)


def what_is_missing() -> str | None:
    """Before anything is touched: the first thing this environment lacks."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing: install iproute2 and util-linux"
    problem = what_is_missing_of_rights() or what_is_missing_of_bpffs(Path("/sys/fs/bpf/namegate-selftest"))
    return None if problem is None else problem.sentence


def run(names: int, known_bad: Sequence[str] = ()) -> Generator[Check, None, None]:
    """Each check when it is over. Raises Lacking. known_bad: mistakes of agent/core/known_bad.py that the agent is to make."""
    with Network() as network, Internet(network) as servers, contextlib.ExitStack() as stack:
        captures = Capture(network, "client", "eth0"), Capture(network, "internet", "eth0")
        for capture in captures:
            stack.callback(capture.close)
        agent = stack.enter_context(_Agent(network, known_bad))
        agent.start()
        stack.enter_context(network.inside("client"))
        checks = _Checks(agent, servers, *captures)
        stack.callback(checks.close)
        yield checks.unresolved_addresses()
        yield checks.fresh_names(names)
        yield checks.denied_name()
        yield checks.end_of_a_lifetime()
        yield checks.restart()
        yield checks.nothing_else()
        if checks.near.lost or checks.far.lost:
            raise Lacking(f"the captures lost {checks.near.lost + checks.far.lost} packets: this run proves nothing, try again")


class _Agent:
    """By its command, in the host's namespace."""

    def __init__(self, network: Network, known_bad: Sequence[str]) -> None:
        self._network = network
        self._control = Control(network.control, patience=10)
        self._known_bad = known_bad
        self._process: subprocess.Popen[bytes] | None = None
        self._reasons: list[str] = []
        self._log = network.directory / "agent.log"
        policy, self._file = network.directory / "policy.txt", network.directory / "namegate.yaml"
        policy.write_text(POLICY, encoding="ascii")
        config = {
            "endpoints": [{"interface": "ep0", "addresses": ["192.0.2.2", "2001:db8:1::2"]}],
            "policies": [str(policy)],
            "dns": {
                "upstreams": [NAME_SERVER],
                "ttl-floor": "1s",
                "keep-while-flow-seen": "1s",
                "history-file": "none",
            },
            "control": {"socket": str(network.control)},
            "datapath": {"pin-directory": str(network.pins), **NO_LIMIT},
            "testing": {"enabled": bool(known_bad), **({"known-bad": list(known_bad)} if known_bad else {})},
        }
        self._file.write_text(yaml.safe_dump(config), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when it enforces. Raises Lacking."""
        self.begin()
        until = time.monotonic() + READY_S_MAX
        while not self.is_enforcing():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                raise Lacking(f"the agent does not enforce here: {self._last_words()}")
            time.sleep(0.02)
        if self._known_bad:
            # As from a loop that writes what has piled up: a write right behind the reply loses packets too, but not for sure.
            self.ask("inject", delay=0.001)

    def begin(self) -> None:
        """It ends with this process, whatever ends this one."""
        command = ("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "agent", "agent", "-c", str(self._file))
        with self._network.inside("host"), self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def ask(self, command: str, **arguments: object) -> Any:
        return self._control.ask(command, **arguments)

    def is_enforcing(self) -> bool:
        with contextlib.suppress(ControlError):
            status = self.ask("status")
            self._reasons = status["reasons"]
            return bool(status["state"] == "enforcing")
        return False

    def _last_words(self) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "; ".join(self._reasons or said[-1:]) or "it says nothing"


class _Checks:
    """Called in the client's namespace."""

    def __init__(self, agent: _Agent, servers: Internet, near: Capture, far: Capture) -> None:
        self.near, self.far = near, far
        self._agent = agent
        self._servers = servers
        self._resolved: set[Address] = set()  # the client was told
        self._got_out = 0
        self._questions = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._questions.settimeout(PATIENCE_S)
        self._questions.connect((NAME_SERVER, 53))
        self._asked = 0
        self._refused: Counter[str] = Counter()  # questions, by what the kernel said

    def close(self) -> None:
        self._questions.close()

    def unresolved_addresses(self) -> Check:
        """Nobody has asked for a name yet: nothing leads to these."""
        refused = 0
        for address in STRANGERS:
            _say(address, b"stranger")
            refused += _connect(packed(address)) == "refused"
        near, far = self._captured()
        tried = len({packet.remote for packet in near})
        said = f"{tried} tried by TCP and UDP, {refused} refused at once, {len(far)} packets got out"
        return _check(
            "addresses that no name brought",
            said,
            (bool(far), f"what no name brought got out: {_GATE}"),
            (tried < len(STRANGERS), f"packets did not leave the client: {_SLOW}"),
            (refused < len(STRANGERS), f"nothing got out, but connections were not refused at once: {_SLOW}"),
        )

    def fresh_names(self, names: int) -> Check:
        """The client connects the moment it has read a reply, while others are on their way."""
        opened: list[str] = []
        self._refused.clear()
        for first in range(0, names, NAMES_AT_ONCE):
            opened += self._ask_and_connect(range(first, min(first + NAMES_AT_ONCE, names)))
        near, far = self._captured()
        firsts = {packet.remote for packet in near if packet.is_first}
        lost = {packet.remote for packet in missing((p for p in near if p.is_first), far)}
        answered = opened.count("connected")
        said = f"{names} names, {len(firsts)} first packets, {len(lost)} lost, {answered} answered"
        if len(opened) < names:
            said += f"; {names - len(opened)} names brought no address"
        refused = ", ".join(f"{count} x {error}" for error, count in self._refused.items())
        return _check(
            "fresh names, connected at once",
            said,
            (bool(lost), f"a name was answered before its address was open: {_GATE}"),
            (bool(refused), f"questions were refused ({refused}): {_DOCTOR}"),
            (len(opened) < names, f"questions were not answered with an address within {PATIENCE_S:g} s: {_SLOW}"),
            (not answered == len(firsts) == names, f"no first packet was lost, but connections were not answered: {_SLOW}"),
        )

    def _ask_and_connect(self, numbers: Sequence[int]) -> list[str]:
        """A name is asked twice, with another of the same address, and the first reply counts: all have to wait for the one
        row. The next address is asked while that is being written, and its replies have to wait for their own.
        """
        waiting: dict[bytes, int] = {}
        opened: dict[int, socket.socket] = {}

        def hear(seconds: float) -> None:
            until = time.monotonic() + seconds
            while waiting and select.select([self._questions], [], [], max(0.0, until - time.monotonic()))[0]:
                reply = self._questions.recv(4096)
                number = waiting.pop(reply[:2], None)
                if number is not None and number not in opened:
                    address = self._told(reply, 16 if number % 2 else 4)
                    if address is not None:
                        opened[number] = _begin_to_connect(address)

        try:
            for number in numbers:
                one, other = internet.fresh_names(number)
                for name in (one, one, other):
                    message = self._question(name, is_v6=number % 2 == 1)
                    waiting[message[:2]] = number
                    self._questions.send(message)
                hear(NEXT_NAME_AFTER_S)
            hear(PATIENCE_S)
        except OSError as error:
            self._refused[error.strerror or str(error)] += len(waiting)
        return [_outcome(stream) for stream in opened.values()]

    def denied_name(self) -> Check:
        reply = self._exchange(DENIED)
        code = Rcode(reply[3] & 15) if reply else None
        is_told = DENIED in self._servers.asked
        told = "the name server was ASKED" if is_told else "the name server never heard of it"
        return _check(
            "a name that no rule allows",
            f"{code.name if code is not None else 'no answer'}, {told}",
            (is_told, f"a denied name left the host: {_GATE}"),
            (code is None, f"a denied name was not answered: {_SLOW}"),
            (code not in (Rcode.NXDOMAIN, Rcode.REFUSED), f"a denied name was not answered as one: {_GATE}"),
        )

    def end_of_a_lifetime(self) -> Check:
        address = packed(EXPIRING_ADDRESS)
        is_told = self._ask(EXPIRING) == address
        first = _connect(address)
        until, began = time.monotonic() + EXPIRY_S_MAX, time.monotonic()
        while time.monotonic() < until and any(row["name"] == f"{EXPIRING}." for row in self._agent.ask("names")):
            time.sleep(0.1)
        took_s = time.monotonic() - began
        self._captured()
        self._resolved.discard(address)
        after = _connect(address)
        _, far = self._captured()
        return _check(
            "a lifetime that ends",
            f"{first}; {took_s:.1f} s later {after}, {len(far)} packets got out",
            (bool(far), f"an address stayed open after its lifetime: {_GATE}"),
            (not is_told, f"the name was not answered: {_SLOW}"),
            (first != "connected", f"its address was not open when it was answered: {_GATE}"),
            (after != "refused", f"nothing got out, but the connection was not refused at once: {_SLOW}"),
        )

    def restart(self) -> Check:
        """Killed without warning and started again under traffic."""
        address = self._ask(STEADY)
        self._captured()
        traffic = _Traffic()
        traffic.start()
        time.sleep(AFTER_RESTART_S)
        began = time.monotonic()
        self._agent.kill()
        time.sleep(AFTER_RESTART_S)
        self._agent.start()
        took_s = time.monotonic() - began
        time.sleep(AFTER_RESTART_S)
        traffic.stop()
        near, far = self._captured()
        meant = [packet for packet in near if packet.remote == address]
        lost = missing(meant, far)
        strange = len({packet.ports for packet in near if packet.remote != address})
        out = sum(packet.remote != address for packet in far)
        said = f"{took_s:.1f} s; {len(meant)} packets, {len(lost)} lost; {traffic.opened} of {traffic.tried} connections; "
        said += f"{strange} to others, {out} got out"
        return _check(
            "killed and started again",
            said,
            (bool(out), f"what no name brought got out while the agent was gone: {_GATE}"),
            (bool(lost), f"the kernel did not go on alone: {_GATE}"),
            (address is None or not meant or not strange, f"there was too little traffic to say anything: {_SLOW}"),
            (traffic.opened < traffic.tried, f"no packet was lost, but connections were not answered: {_SLOW}"),
        )

    def nothing_else(self) -> Check:
        """All that was seen on the internet, in all of the checks."""
        self._captured()
        said = f"{self._got_out} got out"
        return _check("packets to what was not resolved", said, (bool(self._got_out), f"something got out: {_GATE}"))

    def _captured(self) -> tuple[list[Packet], list[Packet]]:
        """What is there since the last time. What left the client before is on the internet by now, or is lost."""
        near = self.near.read()
        far = self.far.read()
        self._got_out += sum(packet.remote not in self._resolved for packet in far)
        return near, far

    def _ask(self, name: str) -> Address | None:
        return self._told(self._exchange(name), 4)

    def _told(self, reply: bytes, octets: int) -> Address | None:
        """The address at the end of a reply: nothing is looked at twice, the next packet is what counts."""
        if len(reply) < 12 or not reply[7]:
            return None
        self._resolved.add(reply[-octets:])
        return reply[-octets:]

    def _question(self, name: str, *, is_v6: bool = False) -> bytes:
        self._asked += 1
        return internet.question(self._asked, name, is_v6=is_v6)

    def _exchange(self, name: str) -> bytes:
        """The reply; empty where none came."""
        message = self._question(name)
        with contextlib.suppress(OSError):
            self._questions.send(message)
            while True:
                reply = self._questions.recv(4096)
                if reply[:2] == message[:2]:
                    return reply
        return b""


class _Traffic(threading.Thread):
    """To the steady address all the time, and sometimes to others. Threads are where they were started: with the client."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.tried = self.opened = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flow:
            flow.connect((STEADY_ADDRESS, PORT))
            count = 0
            while not self._is_over.wait(PAUSE_S):
                count += 1
                with contextlib.suppress(OSError):  # an earlier one was refused: the captures count
                    flow.send(count.to_bytes(4, "big"))
                if count % CONNECT_EVERY == 0:
                    self.tried += 1
                    self.opened += _connect(packed(STEADY_ADDRESS)) == "connected"
                if count % STRANGER_EVERY == 0:
                    _say(STRANGERS[0], count.to_bytes(4, "big"))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def _connect(address: Address) -> str:
    return _outcome(_begin_to_connect(address))


def _begin_to_connect(address: Address) -> socket.socket:
    stream = socket.socket(socket.AF_INET if len(address) == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    stream.setblocking(False)
    stream.connect_ex((text_of(address), PORT))
    return stream


def _outcome(stream: socket.socket) -> str:
    """`connected`, `refused`, or `no answer`: a lost first packet is sent again after a second."""
    with stream:
        if not select.select([], [stream], [], CONNECT_S_MAX)[1]:
            return "no answer"
        return "refused" if stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else "connected"


def _say(address: str, datagram: bytes) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.sendto(datagram, (address, PORT))
