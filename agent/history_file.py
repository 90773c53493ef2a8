"""The name history on disk: what was seen before a reboot explains the drops after it.

    line 1     {"history": "namegate", "version": 1}
    line 2 …   [name, address in hex, first seen, last seen, lives until, name asked, targets of its aliases …], oldest first

Rule 1: nothing is judged by it, so nothing waits for it, and nothing that is wrong with it stops the agent.
Rule 2: its times are the wall clock's; the core's clock begins anew at each boot.
Rule 3: written whole, synced in a thread, put in the old one's place by rename(2): whoever dies when, a whole one is there.
Rule 4: a torn last line is dropped; a file that is not ours, or of a newer version, is left as it is, and no other is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent.core.history import NameHistory, Seen
from agent.state import StateError, address_of, header_of, new_file, read_text, write_all

log = logging.getLogger("namegate")

VERSION: Final = 1
# So much of a day is lost when the process is killed; writing 100,000 entries takes a second of work all in all.
SAVE_EVERY_S: Final = 180.0
# About 2 ms of encoding: between two slices the loop looks at its sockets.
SLICE_ENTRIES: Final = 250


def booted_at() -> float:
    """What the wall clock showed, as it goes now, when CLOCK_BOOTTIME was 0."""
    return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)


class HistoryFile:
    """A history and its file. Times of both are converted by `zero`, which is `booted_at`."""

    def __init__(
        self, path: Path, history: NameHistory, every_s: float = SAVE_EVERY_S, zero: Callable[[], float] = booted_at
    ) -> None:
        self._path = path
        self._history = history
        self._every_s = every_s
        self._zero = zero
        self._is_ours = True
        self._notes_saved = 0
        self._has_failed = False
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def load(self, now: float) -> None:
        """What processes before have seen. now: seconds of CLOCK_BOOTTIME."""
        try:
            self._history.restore(_read(self._path, now, self._zero()), now)
        except StateError as error:
            self._is_ours = False
            log.warning("no name history is kept on disk: %s", error)

    def start(self) -> None:
        """Save what is new from time to time, until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Save what is new, and no more from then on."""
        self._ending.set()
        if self._task is not None:
            await self._task

    async def _keep(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._every_s)
            await self._save()
        await self._save()  # what was noted while the one before was written

    async def _save(self) -> None:
        notes = self._history.notes
        if notes == self._notes_saved or not self._is_ours:
            return
        zero, entries = self._zero(), self._history.entries()
        octets = [(json.dumps({"history": "namegate", "version": VERSION}) + "\n").encode()]
        for first in range(0, len(entries), SLICE_ENTRIES):
            octets.append("".join(_line(seen, zero) for seen in entries[first : first + SLICE_ENTRIES]).encode())
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(_replace, self._path, octets)
        except OSError as error:
            if not self._has_failed:
                log.warning("the name history %s cannot be written: %s", self._path, error.strerror)
            self._has_failed = True
        else:
            self._notes_saved, self._has_failed = notes, False


def _replace(path: Path, octets: Iterable[bytes]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = new_file(path)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for some in octets:
            write_all(fd, some)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    new.rename(path)


def _read(path: Path, now: float, zero: float) -> Iterator[Seen]:
    """In the core's times. What the file says is still to come is of a clock that was wrong: it is taken for just now."""
    text = read_text(path)
    if text is None or header_of(path, text, "history", VERSION) is None:
        return
    for number, line in enumerate(text.split("\n")[1:-1], 2):
        try:
            yield _seen(json.loads(line), now, zero)
        except (ValueError, TypeError):
            raise StateError(f"{path}:{number}: an entry that is none: move the file away") from None


def _line(seen: Seen, zero: float) -> str:
    times = [round(at + zero, 3) for at in (seen.first_at, seen.last_at, seen.until)]
    return json.dumps([seen.name, seen.address.hex(), *times, *seen.chain]) + "\n"


def _seen(line: Sequence[Any], now: float, zero: float) -> Seen:
    """Raises ValueError and TypeError."""
    name, address, first_at, last_at, until, *chain = line
    last = min(float(last_at) - zero, now)
    first = min(float(first_at) - zero, last)
    return Seen(str(name), address_of(address), None, tuple(map(str, chain)), first, last, float(until) - zero)
