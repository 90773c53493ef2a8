"""A client that asks at a steady pace, whatever becomes of the answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.netns.lab import NAME_SERVERS, Client, Lab

# Asks each question once, for names n<i>.test in no order, until standard input ends.
_LOOKUPS = """
import collections, json, random, select, socket, sys, time

server, names, per_second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((server, 53))
s.setblocking(False)
asked_at, codes, took, sent, twice = {}, collections.Counter(), [], 0, 0
begun = time.monotonic()
print("asking", flush=True)

def hear(seconds):
    global twice
    while select.select([s], [], [], max(0, seconds))[0]:
        seconds = 0
        try:
            reply = s.recv(4096)
        except OSError as error:
            codes[str(error)] += 1
            continue
        at = asked_at.pop(int.from_bytes(reply[:2], "big"), None)
        if at is None:
            twice += 1
        else:
            codes[reply[3] & 15] += 1
            took.append(time.monotonic() - at)

ends_at = None
while ends_at is None or (asked_at and time.monotonic() < ends_at):
    now = time.monotonic()
    if ends_at is None and now >= begun + sent / per_second:
        sent += 1
        label = b"n%d" % random.randrange(names)
        message = (sent & 0xFFFF).to_bytes(2, "big") + bytes.fromhex("01000001000000000000")
        message += bytes([len(label)]) + label + b"\\x04test\\x00\\x00\\x01\\x00\\x01"
        asked_at[sent & 0xFFFF] = now
        s.send(message)
    if ends_at is None and select.select([sys.stdin], [], [], 0)[0]:
        ends_at = now + 3
    hear(begun + sent / per_second - time.monotonic() if ends_at is None else 0.01)
print(json.dumps({"sent": sent, "codes": codes, "twice": twice, "took": sorted(took)}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Looked:
    """codes: how often each result code, or error of the socket, came. twice: answers to what was answered. took: seconds that
    each answer took, the longest last; as many as were answered."""

    sent: int
    codes: Mapping[str, int]
    twice: int
    took: tuple[float, ...]

    def __str__(self) -> str:
        half, most = (self.took[len(self.took) // 2], self.took[-1]) if self.took else (0, 0)
        return (
            f"{self.sent} lookups, {len(self.took)} answered ({self.twice} of them twice) with {dict(self.codes)}: "
            f"half within {half * 1e3:.1f} ms, all within {most * 1e3:.0f} ms"
        )


class Lookups:
    """From before the body until after it; then `looked` says what came of them."""

    looked: Looked

    def __init__(self, lab: Lab, names: int, per_second: int = 200, *, client: Client | None = None) -> None:
        self._lab = lab
        self._client = client or lab.client
        self._command = (sys.executable, "-c", _LOOKUPS, NAME_SERVERS[0], str(names), str(per_second))

    def __enter__(self) -> Self:
        self._asking = self._lab.start(self._client.namespace, *self._command, stdin=subprocess.PIPE)
        assert self._asking.stdout is not None
        assert self._asking.stdout.readline() == "asking\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        said, _ = self._asking.communicate("end\n", timeout=20)
        seen = json.loads(said)
        self.looked = Looked(seen["sent"], seen["codes"], seen["twice"], tuple(seen["took"]))
