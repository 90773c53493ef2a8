"""What a client in the lab does and sees: questions by dig, connections by a socket."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.netns.lab import NAME_SERVERS, Client, Lab

_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("connected")
except TimeoutError:
    print("timed out")
except OSError as error:
    print((error.strerror or str(error)).lower())
"""

# Sends all messages of a round at once, the next round when as many replies came, on one socket; prints the replies.
_EXCHANGE = """
import json, socket, struct, sys, time
server, transport, within, rounds = json.load(sys.stdin)
replies, wanted, deadline = [], 0, time.monotonic() + within
family = socket.AF_INET6 if ":" in server else socket.AF_INET
s = socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)
s.settimeout(within)
heard = b""
try:
    s.connect((server, 53))
    while deadline > time.monotonic():
        if len(replies) == wanted:
            if not rounds: break
            messages = [bytes.fromhex(m) for m in rounds.pop(0)]
            wanted += len(messages)
            if transport == "tcp":
                s.sendall(b"".join(struct.pack("!H", len(m)) + m for m in messages))
            else:
                for m in messages: s.send(m)
        s.settimeout(max(0.001, deadline - time.monotonic()))
        received = s.recv(65535)
        if transport == "udp":
            replies.append(received)
            continue
        if not received: break
        heard += received
        while len(heard) >= 2 and len(heard) >= 2 + (length := int.from_bytes(heard[:2], "big")):
            replies.append(heard[2:2 + length])
            heard = heard[2 + length:]
except OSError as error:
    print(error, file=sys.stderr)
print(json.dumps([r.hex() for r in replies]))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """status: `NOERROR`, `NXDOMAIN`, … or `no answer`. error: the extended error's line, if there was one."""

    status: str
    addresses: tuple[str, ...]
    error: str
    took_ms: int
    server: str


def ask(
    lab: Lab, name: str, kind: str = "A", *options: str, client: Client | None = None, server: str = NAME_SERVERS[0]
) -> Answer:
    """One question, one try."""
    return _answer(start_asking(lab, name, kind, *options, client=client, server=server))


def start_asking(
    lab: Lab, name: str, kind: str = "A", *options: str, client: Client | None = None, server: str = NAME_SERVERS[0]
) -> subprocess.Popen[str]:
    """The question is on its way; `finish` waits for the answer."""
    namespace = (client or lab.client).namespace
    return lab.start(
        namespace, "dig", f"@{server}", name, kind, "+tries=1", "+time=6", "+noauthority", "+noadditional", *options
    )


def finish(asking: subprocess.Popen[str]) -> Answer:
    return _answer(asking)


def _answer(asking: subprocess.Popen[str]) -> Answer:
    said, _ = asking.communicate(timeout=20)
    status = re.search(r"status: (\w+)", said)
    records = re.findall(r"^\S+\s+\d+\s+IN\s+(?:A|AAAA)\s+(\S+)$", said, re.MULTILINE)
    error = re.search(r"; EDE: (.*)", said)
    took = re.search(r"Query time: (\d+)", said)
    server = re.search(r"SERVER: ([^#]+)#", said)
    return Answer(
        status[1] if status else "no answer",
        tuple(records),
        error[1] if error else "",
        int(took[1]) if took else -1,
        server[1] if server else "",
    )


def connect(lab: Lab, address: str, port: int = 443, *, client: Client | None = None, within_s: float = 1) -> str:
    """`connected`, `connection refused`, `timed out`, …"""
    namespace = (client or lab.client).namespace
    return lab.run(namespace, sys.executable, "-c", _CONNECT, address, str(port), str(within_s)).stdout.strip()


def exchange(
    lab: Lab,
    *rounds: Sequence[bytes],
    server: str = NAME_SERVERS[0],
    transport: str = "udp",
    namespace: str | None = None,
    within_s: float = 6,
) -> list[bytes]:
    """Any octets to port 53, from one socket or connection of the client: those of a round all at once, the next round when as
    many replies came. Gives the replies as they came."""
    wanted = json.dumps([server, transport, within_s, [[message.hex() for message in messages] for messages in rounds]])
    asking = lab.start(
        namespace or lab.client.namespace, sys.executable, "-c", _EXCHANGE, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, _ = asking.communicate(wanted, timeout=within_s + 10)
    return [bytes.fromhex(reply) for reply in json.loads(said)]
