"""What a client in the lab does and sees: questions by dig, connections by a socket."""

from __future__ import annotations

import re
import subprocess
import sys
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
