"""Datagrams sent without a pause, to see whether a single one gets past in the middle of a change."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.core.types import packed
from tests.netns import pcap
from tests.netns.lab import Lab

# Goes on whatever happens to the interface; one line once the first has left.
_FLOOD = """
import socket, sys, time
address, device = sys.argv[1:]
is_told, until = False, time.monotonic() + 60
while time.monotonic() < until:
    try:
        s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        while True:
            s.sendto(b"x", (address, 443))
            if not is_told: print("sending", flush=True)
            is_told = True
            time.sleep(0.001)
    except OSError:
        time.sleep(0.001)
"""


class Flood:
    """A datagram a millisecond to this address, port 443, through this interface as soon as there is one. A context manager."""

    def __init__(self, lab: Lab, namespace: str, address: str, device: str = "") -> None:
        self._sender = lab.start(namespace, sys.executable, "-c", _FLOOD, address, device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._sender.kill()
        self._sender.wait(timeout=10)

    def await_first(self) -> None:
        """Until the sender's own side has taken the first."""
        assert self._sender.stdout is not None
        assert self._sender.stdout.readline() == "sending\n"


def times_at(path: Path, address: str) -> list[float]:
    """When the capture saw a packet to this address; seconds of time.time()."""
    return [packet.at_ns / 1e9 for packet in pcap.read(path).packets if packet.destination == packed(address)]
