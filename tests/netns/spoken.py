"""An upstream that answers every question with octets it was told, and remembers what it was asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.netns.lab import Lab

_SPOKEN = """
import json, os, select, socket, sys

ANOTHER_PORT, IPV6_FREEBIND = 5353, 78

def opened(family, kind, server, port):
    s = socket.socket(family, kind)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The lab's addresses are local by route only.
    if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    s.bind((server, port))
    return s

servers = sys.argv[1:]
datagrams, listeners, elsewhere = {}, [], {}
for server in servers:
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    for port, kept in ((53, datagrams), (ANOTHER_PORT, elsewhere)):
        s = opened(family, socket.SOCK_DGRAM, server, port)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        kept[s] = server
    listeners.append(opened(family, socket.SOCK_STREAM, server, 53))
    listeners[-1].listen(64)
other_of = {s: next(o for o in elsewhere if elsewhere[o] == server) for s, server in datagrams.items()}
replies, how, asked, unread, commands = [], "", [], {}, b""

def answers(message):
    number = message[:2] if how != "another id" else (int.from_bytes(message[:2], "big") ^ 1).to_bytes(2, "big")
    return [number + reply[2:] for reply in replies]

print("ready", flush=True)
while True:
    for s in select.select([0, *datagrams, *listeners, *unread], [], [])[0]:
        if s == 0:
            commands += os.read(0, 1 << 20)
            *lines, commands = commands.split(b"\\n")
            for line in lines:
                if line == b"asked":
                    print(json.dumps(asked), flush=True)
                    asked.clear()
                else:
                    told, how = json.loads(line)
                    replies = [bytes.fromhex(reply) for reply in told]
                    print("told", flush=True)
        elif s in datagrams:
            message, peer = s.recvfrom(65535)
            asked.append(["udp", peer[1], message.hex()])
            for reply in answers(message):
                (other_of[s] if how == "another port" else s).sendto(reply, peer)
        elif s in listeners:
            connection, peer = s.accept()
            unread[connection] = b"", peer[1]
        else:
            heard, port = unread[s]
            received = s.recv(65535)
            if not received:
                del unread[s]
                s.close()
                continue
            heard += received
            while len(heard) >= 2 and len(heard) >= 2 + (length := int.from_bytes(heard[:2], "big")):
                message, heard = heard[2:2 + length], heard[2 + length:]
                asked.append(["tcp", port, message.hex()])
                for reply in answers(message):
                    s.sendall(len(reply).to_bytes(2, "big") + reply)
            unread[s] = heard, port
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """A question as the upstream saw it: transport, the source port, octets."""

    transport: str
    port: int
    message: bytes


class Server:
    """A program on the internet that is told what to do, a line at a time, and answers with a line."""

    def __init__(self, lab: Lab, program: str, *arguments: str) -> None:
        self._process = lab.start(lab.internet, sys.executable, "-c", program, *arguments, stdin=subprocess.PIPE)
        assert self._line() == "ready"

    def _said(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Spoken(Server):
    """On these addresses of the internet, port 53, until the lab ends. Silent until it is told something."""

    def __init__(self, lab: Lab, *servers: str) -> None:
        super().__init__(lab, _SPOKEN, *servers)

    def tell(self, *replies: bytes, how: str = "as asked") -> None:
        """To every question these replies, with its id; how: or with `another id`, or from `another port`."""
        assert self._said(json.dumps([[reply.hex() for reply in replies], how])) == "told"

    def asked(self) -> Sequence[Seen]:
        """What was asked since the last time."""
        return [Seen(transport, port, bytes.fromhex(message)) for transport, port, message in json.loads(self._said("asked"))]
