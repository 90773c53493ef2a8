"""Eyes of the tests: a command in a terminal of a given size, and what a person would see there (pyte draws it)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

from tests.netns.lab import NETNS_DIRECTORY, Lab

READY_S_MAX = 30.0
_ROOT = Path(__file__).parents[2]


class Terminal:
    """Runs the command in the lab's host namespace. Use as a context manager; at its end the command is killed."""

    def __init__(self, lab: Lab, command: Sequence[str | Path], columns: int, lines: int) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.heard = b""
        self.exit_code: int | None = None
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(_ROOT)}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        arguments = ["nsenter", f"--net={NETNS_DIRECTORY / lab.host}", *map(str, command)]
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            os.execvpe(arguments[0], arguments, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self.exit_code is None:
            os.waitpid(self.pid, 0)
        os.close(self._terminal)
        if error is not None:
            error.add_note("the terminal showed:\n" + "\n".join(self.display))

    @property
    def display(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def see(self, what: Callable[[list[str]], bool], within_s: float = READY_S_MAX) -> list[str]:
        """Look until the screen is as wanted; gives it back."""
        look([self], lambda: what(self.display), within_s)
        return self.display

    def see_text(self, text: str, within_s: float = READY_S_MAX) -> list[str]:
        return self.see(lambda lines: any(text in line for line in lines), within_s)

    def end(self, within_s: float = READY_S_MAX) -> int:
        """Wait for the end of the command; its exit code, 128 + n for a signal."""
        deadline = time.monotonic() + within_s
        while select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0] and self.read():
            pass
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.exit_code = code if code >= 0 else 128 - code
        return self.exit_code

    def fileno(self) -> int:
        return self._terminal

    def read(self) -> bool:
        """Take what is there to be shown; False when the command has ended."""
        try:
            octets = os.read(self._terminal, 1 << 16)
        except OSError:  # the last process has closed it
            return False
        self.heard += octets
        self._stream.feed(octets)
        return bool(octets)


def look(terminals: Sequence[Terminal], what: Callable[[], bool], within_s: float = READY_S_MAX) -> None:
    """At several at once, so that none of them waits for its reader."""
    deadline, ended = time.monotonic() + within_s, set[Terminal]()
    while not what():
        left = deadline - time.monotonic()
        assert left > 0, "what was wanted was never seen"
        assert len(ended) < len(terminals), "the command ended, and what was wanted was never seen"
        for terminal in select.select([each for each in terminals if each not in ended], [], [], min(left, 0.1))[0]:
            if not terminal.read():
                ended.add(terminal)
