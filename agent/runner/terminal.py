"""The terminal: whose it is while COMMAND runs, and that it is given back.

COMMAND is in the runner's process group, so that a pipeline and the caller's shell have to do with one job as always: what the
terminal sends (Ctrl-C, Ctrl-Z) reaches COMMAND by itself, and the runner keeps out of it.

Where nobody else is in our group, no pipeline and no script, COMMAND gets a group of its own at once, as a shell would give it:
then its group has a number in its pid namespace, which some programs look at. The caller's shell knows of ours only. When it
makes a job the foreground again that went on in the background, it tells nobody; COMMAND is stopped when it reads (SIGTTIN);
Ctrl-C comes to us. Then we give it the terminal, and what came, as a shell does with its jobs.

What stops COMMAND stops the runner, so that the caller's shell notices.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

# They become root and wait for whom they start, in the same process group.
_ELEVATORS: Final = frozenset({"sudo", "doas", "pkexec", "su"})
_ANCESTORS_MAX: Final = 8


class Terminal:
    """fd: of the controlling terminal; -1: there is none. has_given_group: COMMAND got a group of its own."""

    def __init__(self) -> None:
        self.has_given_group = False
        try:
            self.fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            self.fd = -1
        self._group = os.getpgrp()

    def is_ours_alone(self) -> bool:
        """Are we its foreground, is nobody else in our group, and do all three standard descriptors lead there?"""
        if self.fd < 0 or self._foreground() != self._group:
            return False
        try:
            if not all(os.isatty(fd) for fd in range(3)) or len({os.fstat(fd).st_rdev for fd in range(3)}) != 1:
                return False
        except OSError:
            return False
        return _leads_to(self._group)

    def give(self, group: int) -> None:
        """To this process group, if it is ours to give."""
        if group != self._group and self._foreground() == self._group:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self.fd, group)

    def take_back(self, group: int | None = None) -> None:
        """From this group, or from one of which nobody is left."""
        foreground = self._foreground()
        if foreground not in {-1, self._group} and (foreground == group or not _is_there(foreground)):
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self.fd, self._group)  # SIGTTOU is blocked

    def pass_on(self, command: int, number: int) -> None:
        """To COMMAND's group, as it would be the foreground without us."""
        group = os.getpgid(command)
        self.give(group)
        os.killpg(group, number)

    def stopped(self, command: int, number: int) -> None:
        """COMMAND, this process, was stopped by this signal: give it what it asks for, or stop until somebody continues us."""
        if not _is_stopped(command):
            return  # the kernel had stopped us as well, and who continued us continued all
        group = os.getpgid(command)
        if number in {signal.SIGTTOU, signal.SIGTTIN} and group != self._group and self._foreground() == self._group:
            self.give(group)
        else:
            self.take_back(group)
            _stop(number)
            self.give(group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT) if group != self._group else os.kill(command, signal.SIGCONT)

    def _foreground(self) -> int:
        try:
            return os.tcgetpgrp(self.fd)
        except OSError:  # none, or it was closed
            return -1


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _stop(number: int) -> None:
    """Comes back when we are continued. Not with a handler: that would not stop, and not for a group that nobody watches."""
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _leads_to(leader: int) -> bool:
    """Is the leader of our group this process, or somebody who became root to start us?"""
    pid = os.getpid()
    for _ in range(_ANCESTORS_MAX):
        if pid == leader:
            return True
        try:
            _, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            pid = int(rest.split()[1])
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() not in _ELEVATORS:
                return False
        except (OSError, ValueError, IndexError):
            return False
    return False


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
