"""What a client in the lab sends besides questions: frames of its own making, steady streams, conversations.

And what the kernel counted of it, read from the pinned tables by bpftool and not through the agent.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from agent.core.types import packed
from agent.datapath.abi import Reason
from tests.netns import pcap
from tests.netns.lab import Capture, Client, Lab
from tests.netns.running import RunningAgent

# Numbered datagrams at a steady pace to an echo server, until standard input ends; then how many came back.
_STREAM = """
import contextlib, select, socket, sys, time
address, port, pace = sys.argv[1], int(sys.argv[2]), 1 / float(sys.argv[3])
s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
s.connect((address, port))
s.setblocking(False)
sent, heard, begun = 0, set(), time.monotonic()
print("streaming", flush=True)

def hear(within):
    while select.select([s], [], [], max(0, within))[0]:
        with contextlib.suppress(OSError):  # refused: an ICMP message came back
            heard.add(s.recv(64))

while not select.select([sys.stdin], [], [], 0)[0]:
    time.sleep(max(0, begun + sent * pace - time.monotonic()))
    with contextlib.suppress(OSError):
        s.send(str(sent).encode())
    sent += 1
    hear(0)
hear(0.5)
print(sent, len(heard), flush=True)
"""

# One connection. A line of standard input is sent, and the line that comes back, or what became of it, is printed; of a
# number, so many lines are sent 10 ms apart, and the count of those that came back is printed, with that of segments that
# were sent twice.
_CONVERSATION = """
import socket, struct, sys, time
address, port, patience = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
s = socket.create_connection((address, port), timeout=patience)
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
print("connected", s.getsockname()[1], flush=True)

def said(line):
    try:
        s.sendall(line)
        heard = b""
        while not heard.endswith(b"\\n"):
            more = s.recv(4096)
            if not more:
                return "closed"
            heard += more
        return "echoed" if heard == line else "another line"
    except TimeoutError:
        return "silence"
    except OSError as error:
        return error.strerror.lower()

for line in sys.stdin:
    if line.strip().isdigit():
        echoed = 0
        for number in range(int(line)):
            echoed += said(b"line %d\\n" % number) == "echoed"
            time.sleep(0.01)
        again = struct.unpack_from("I", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0]
        print(echoed, again, flush=True)
    elif line == "listen\\n":
        try:
            print("heard" if s.recv(4096) else "closed", flush=True)
        except TimeoutError:
            print("silence", flush=True)
        except OSError as error:
            print(error.strerror.lower(), flush=True)
    else:
        print(said(line.encode()), flush=True)
"""

_FRAMES = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind((sys.argv[1], 0))
for line in sys.stdin:
    s.send(bytes.fromhex(line))
"""


class Stream:
    """A client that sends datagrams at a steady pace and counts what comes back."""

    def __init__(self, lab: Lab, address: str, port: int, per_second: int = 500, *, client: Client | None = None) -> None:
        self._process = _start(lab, (client or lab.client).namespace, _STREAM, address, str(port), str(per_second))
        assert _line(self._process) == "streaming"

    def end(self) -> tuple[int, int]:
        """How many were sent, and how many came back."""
        said, _ = self._process.communicate("end\n", timeout=20)
        sent, heard = map(int, said.split())
        return sent, heard


class Conversation:
    """A TCP connection of the client to an echo server, held open. port: the client's. patience_s: for each line."""

    def __init__(self, lab: Lab, address: str, port: int = 443, *, client: Client | None = None, patience_s: float = 1) -> None:
        self._process = _start(lab, (client or lab.client).namespace, _CONVERSATION, address, str(port), str(patience_s))
        said = _line(self._process).split()
        assert said[:1] == ["connected"], f"no connection to {address}"
        self.port = int(said[1])

    def say(self, line: str = "anybody there?") -> str:
        """`echoed`, `silence`, `connection reset by peer`, …"""
        self._tell(line)
        return _line(self._process)

    def listen(self) -> str:
        """Only wait: `heard`, `silence`, `connection reset by peer`, …"""
        return self.say("listen")

    def begin(self, lines: int) -> None:
        """Say so many lines, 10 ms apart; `echoed` waits for the end."""
        self._tell(str(lines))

    def echoed(self) -> tuple[int, int]:
        """Of the lines begun: how many came back, and how many segments of the connection were sent twice."""
        echoed, again = map(int, _line(self._process).split())
        return echoed, again

    def end(self) -> None:
        """By a reset: nothing of it is sent again later."""
        self._process.communicate(timeout=20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.end()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def _start(lab: Lab, namespace: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    return lab.start(namespace, sys.executable, "-c", script, *arguments, stdin=subprocess.PIPE)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- frames ----------------------------------------------------------------------------------------------------------


def send_frames(lab: Lab, frames: Sequence[bytes], client: Client | None = None) -> None:
    """From the client's interface to the host, past the client's own stack."""
    client = client or lab.client
    send_from(lab, client.namespace, client.device, lab.host, client.endpoint, frames)


def send_from_internet(lab: Lab, frames: Sequence[bytes]) -> None:
    """From the internet's side of the uplink to the host."""
    send_from(lab, lab.internet, "eth0", lab.host, lab.uplink, frames)


def send_from(lab: Lab, namespace: str, device: str, other: str, other_device: str, frames: Sequence[bytes]) -> None:
    """From one end of a link to the other; Ethernet addresses and the checksum of an IPv4 header are filled in."""
    macs = mac_of(lab, other, other_device) + mac_of(lab, namespace, device)
    sender = _start(lab, namespace, _FRAMES, device)
    said, _ = sender.communicate("\n".join((macs + summed(frame)[12:]).hex() for frame in frames), timeout=20)
    assert sender.returncode == 0, said


def summed(frame: bytes) -> bytes:
    """With the checksum of its IPv4 header: a router drops one that is wrong (RFC 1812 5.2.2)."""
    if frame[12:14] != b"\x08\x00":
        return frame
    total = sum(struct.unpack(">10H", frame[14:24] + bytes(2) + frame[26:34]))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return frame[:24] + struct.pack(">H", total ^ 0xFFFF) + frame[26:]


def mac_of(lab: Lab, namespace: str, device: str) -> bytes:
    (link,) = json.loads(lab.run(namespace, "ip", "-j", "link", "show", "dev", device).stdout)
    return bytes.fromhex(link["address"].replace(":", ""))


def seen(capture: Capture, *, source: str = "", destination: str = "") -> list[pcap.Packet]:
    """Packets of this capture, which has ended, from and to these addresses."""
    return [
        packet
        for packet in pcap.read(capture.path).packets
        if (not source or packet.source == packed(source)) and (not destination or packet.destination == packed(destination))
    ]


# --- what the kernel counted -----------------------------------------------------------------------------------------


def rows(agent: RunningAgent, table: str) -> list[tuple[bytes, list[bytes]]]:
    """Each key of a pinned table with its value; of a per-CPU table with one value for each processor."""
    (directory,) = (agent.pins / "maps").iterdir()
    line = ["bpftool", "-j", "map", "dump", "pinned", str(directory / table)]
    found: list[dict[str, Any]] = json.loads(subprocess.run(line, capture_output=True, timeout=20, check=True).stdout)
    return [(_bytes(row["key"]), [_bytes(one["value"]) for one in row.get("values", [row])]) for row in found]


def _bytes(octets: Iterable[str]) -> bytes:
    return bytes(int(octet, 16) for octet in octets)


def counts(agent: RunningAgent) -> Counter[str]:
    """Packets by reason, of all endpoints."""
    counted: Counter[str] = Counter()
    for key, values in rows(agent, "counters"):
        reason = Reason(int.from_bytes(key[4:8], sys.byteorder))
        counted[reason.text] += sum(int.from_bytes(value[:8], sys.byteorder) for value in values)
    return counted


def drop_counts(agent: RunningAgent) -> Counter[str]:
    """The same, of those that were dropped."""
    dropped = {reason.text for reason in Reason if reason.is_drop}
    return Counter({reason: packets for reason, packets in counts(agent).items() if reason in dropped})


@contextlib.contextmanager
def dropping(agent: RunningAgent, **wanted: int) -> Iterator[None]:
    """What the body sends is dropped in these numbers for these reasons (`flow_ended=1`), and nothing for any other."""
    before = drop_counts(agent)
    yield
    dropped = drop_counts(agent) - before
    assert dropped == {reason.replace("_", "-"): number for reason, number in wanted.items()}, agent.ask("drops")[-5:]


def reasons(agent: RunningAgent, destination: str) -> list[tuple[str, str | None]]:
    """Of the drops toward this address: reason, and what the packet lacked."""
    return [(row["reason"], row["why"]) for row in agent.ask("drops") if row["destination"] == destination]
