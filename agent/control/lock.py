"""One agent at a time: a lock beside the control socket, held for life.

The kernel takes the lock away from a process that dies, however it dies, so that a socket whose lock is free belongs to nobody.
Asking the socket itself would not do: two agents started together would both find it dead, and the second would take the
first one's name away.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from agent.control import ControlError


class AgentLock:
    """who: has the socket, for the sentence that refuses a second one."""

    def __init__(self, socket_path: Path, who: str = "an agent") -> None:
        self._who = who
        self.path = socket_path.with_name(socket_path.name + ".lock")
        self._fd = -1

    def acquire(self) -> None:
        """Raises ControlError when another process holds it. Makes the directory, for root only, when it is missing.

        `release` removes the file, so what was locked may have lost its name meanwhile, and then locks nothing: look again.
        """
        assert self._fd < 0, "a lock is acquired once"
        try:
            _make_directory(self.path.parent)
            while self._fd < 0:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_named(fd, self.path):
                        self._fd = fd
                finally:
                    if self._fd < 0:
                        os.close(fd)
        except BlockingIOError:
            socket_name = self.path.name.removesuffix(".lock")
            raise ControlError(f"{self._who} is already running ({self.path.with_name(socket_name)}): stop it first") from None
        except OSError as error:
            raise ControlError(f"{error.filename or self.path} cannot be made: {error.strerror}") from None

    def release(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def _make_directory(directory: Path) -> None:
    """For root only (0700); directories above it as usual."""
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
