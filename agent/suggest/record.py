"""A record: the agent's facts in a file, to be looked at later, elsewhere, without root.

    line 1     {"record": "namegate", "version": 1, "time": …, "host": …}
    line 2 …   facts as the agent told them; of the kind `endpoints` the rows of `namegate endpoints`, whenever they were asked
               for; of the kind `lost` how many facts are not there; of the kind `gap` how long no agent was heard

Rule 1: what is not there is said: lost facts, and the time in which no agent was heard.
Rule 2: a torn last line is dropped (the machine died); any other line that is none is a mistake.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from agent.control import ControlError
from agent.control.client import Feed
from agent.monitor.facts import KnownEndpoints, Row

VERSION: Final = 1
KINDS: Final = ("question", "verdict", "drop")
_LOOK_EVERY_S: Final = 0.5


class RecordError(Exception):
    """The file is no record; the message is a sentence with the file and, where it helps, the line."""


# --- reading ---------------------------------------------------------------------------------------------------------


def read_record(path: Path) -> Iterator[dict[str, Any]]:
    """Its lines, the first included; raises RecordError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                yield _line(path, number, line)
            if file.tell() == 0:
                raise RecordError(f"{path} is empty, and no record")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if number == 1 and not (isinstance(found, dict) and found.get("record") == "namegate"):
        raise RecordError(f"{path} is no record: `namegate record` writes them")
    if number == 1 and found["version"] != VERSION:
        raise RecordError(f"{path} is a record of version {found['version']}, this release reads {VERSION}")
    if not isinstance(found, dict) or (number > 1 and "kind" not in found):
        raise RecordError(f"{path}:{number}: this is no line of a record")
    return found


# --- writing ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Writes facts into a new file until its time or size has come. counts: lines by kind; lost: facts that are not there.

    listen: to facts of these kinds; ask: rows of `endpoints`. Both raise ControlError where no agent is.
    """

    def __init__(
        self,
        path: Path,
        listen: Callable[[Sequence[str]], Feed],
        ask: Callable[[], Iterable[Row]],
        *,
        for_s: float | None,
        octets_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._listen = listen
        self._ask = ask
        self._for_s = for_s
        self._octets_max = octets_max
        self._clock = clock
        self._octets = 0
        self.counts = dict.fromkeys(KINDS, 0)
        self.lost = 0
        self.gaps = 0

    def run(self, started: Callable[[], None]) -> None:
        """started: called when the agent listens. Raises ControlError where no agent is at the start, OSError of the file."""
        until = None if self._for_s is None else self._clock() + self._for_s
        with self._listen(KINDS) as feed, open(self._path, "xb", opener=_private) as file:
            try:
                head = {"record": "namegate", "version": VERSION, "time": _now(), "host": socket.gethostname()}
                self._write(file, [head])
                endpoints = KnownEndpoints(self._asked_into(file))
                started()
                self._hear(file, feed, endpoints, until)
                while not self._is_over(until):
                    self._wait_for_an_agent(file, endpoints, until)
            finally:
                os.fsync(file.fileno())

    def _asked_into(self, file: IO[bytes]) -> Callable[[], Iterable[Row]]:
        def asked() -> Iterable[Row]:
            rows = list(self._ask())
            self._write(file, [{"kind": "endpoints", "time": _now(), "endpoints": rows}])
            return rows

        return asked

    def _hear(self, file: IO[bytes], feed: Feed, endpoints: KnownEndpoints, until: float | None) -> None:
        """Until it is over or the agent ends."""
        with contextlib.suppress(ControlError):
            while not self._is_over(until):
                left = _LOOK_EVERY_S if until is None else max(0.001, min(_LOOK_EVERY_S, until - self._clock()))
                facts = [line["fact"] for line in feed.read(left) if "fact" in line]
                for fact in facts:
                    endpoints.of(fact)
                    if fact["kind"] == "lost":
                        self.lost += fact["count"]
                    else:
                        self.counts[fact["kind"]] += 1
                self._write(file, facts)

    def _wait_for_an_agent(self, file: IO[bytes], endpoints: KnownEndpoints, until: float | None) -> None:
        since = self._clock()
        while not self._is_over(until):
            try:
                feed = self._listen(KINDS)
            except ControlError:
                time.sleep(_LOOK_EVERY_S)
                continue
            with feed:
                self.gaps += 1
                self._write(file, [{"kind": "gap", "time": _now(), "seconds": round(self._clock() - since, 1)}])
                with contextlib.suppress(ControlError):
                    endpoints.ask()
                self._hear(file, feed, endpoints, until)
            return

    def _is_over(self, until: float | None) -> bool:
        return self._octets >= self._octets_max or (until is not None and self._clock() >= until)

    def _write(self, file: IO[bytes], rows: Iterable[Row]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self._octets += file.write(text.encode())
        file.flush()


def _private(path: str, flags: int) -> int:
    """Names that a workload asks for are nobody else's business."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _now() -> str:
    return dt.datetime.now().astimezone().isoformat(timespec="milliseconds")
