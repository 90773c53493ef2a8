"""`namegate run` as somebody would type it, in a lab's host namespace: by itself, or at the prompt of a shell in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.netns.lab import NAME_SERVERS, Lab

READY_S_MAX = 30.0
_ROOT = Path(__file__).parents[2]

# /etc/resolv.conf is the lab's in a mount namespace of its own: the run agent takes its upstreams from there.
_WITH_RESOLV_CONF = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "agent", "run", *map(str, arguments)]


class Host:
    """The lab's host with a resolv.conf of its own. environment: of what is started here, without what says who called."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._resolv_conf = lab.directory / "resolv.conf"
        self._resolv_conf.write_text(f"# the lab's\nnameserver {NAME_SERVERS[0]}\nsearch test\noptions ndots:1\n")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SUDO_", "NAMEGATE_"))}
        self.environment = {**inherited, "PYTHONPATH": str(_ROOT)}

    def inside(self, *arguments: str | Path) -> list[str]:
        """The command in the network and mount namespace; it keeps its process id."""
        namespace = f"--net=/run/netns/{self.lab.host}"
        shell = ["unshare", "--mount", "sh", "-e", "-c", _WITH_RESOLV_CONF, "sh", str(self._resolv_conf)]
        return ["nsenter", namespace, *shell, *map(str, arguments)]

    def run(
        self,
        *arguments: str | Path,
        given: str | None = None,
        within_s: float = READY_S_MAX,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """One run to its end."""
        return subprocess.run(
            self.inside(*command(*arguments)),
            input=given,
            stdin=None if given is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            env={**self.environment, **(environment or {})},
            cwd=directory,
        )

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """A run that lasts, so that all others share its agent."""
        run = self.start("--", "sh", "-c", "echo started; exec sleep 600")
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "started\n"
            yield
        finally:
            run.kill()
            run.communicate()

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """One run; its output is to be read by the caller, who also ends it."""
        return subprocess.Popen(
            self.inside(*command(*arguments)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def look(self, *arguments: str) -> str:
        """What a command says in the host's network namespace."""
        return self.lab.run(self.lab.host, *arguments).stdout


class Typed:
    """A shell in a terminal of its own, at whose prompt somebody types. Use as a context manager.

    At the prompt `$N` is `namegate run`.
    """

    PROMPT = "ready> "

    def __init__(self, host: Host, *shell: str) -> None:
        self.heard = ""
        arguments = host.inside(*(shell or ("bash", "--norc", "--noprofile", "--noediting", "-i")))
        environment = {**host.environment, "PS1": self.PROMPT, "N": shlex.join(command()), "TERM": "xterm", "HISTFILE": ""}
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(arguments[0], arguments, environment)

    def __enter__(self) -> Self:
        self.expect(self.PROMPT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        if error is not None:
            error.add_note(f"the terminal showed: {self.heard[-2000:]!r}")

    def hang_up(self) -> None:
        """The terminal is gone."""
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def line(self, text: str) -> None:
        self.type(text + "\n")

    def expect(self, pattern: str, within_s: float = READY_S_MAX) -> str:
        """What is shown before the next place that matches; both are behind us then."""
        deadline = time.monotonic() + within_s
        while (found := re.search(pattern, self.heard)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._terminal], [], [], left)[0]:
                raise AssertionError(f"the terminal never showed {pattern!r}, but {self.heard!r}")
            try:
                self.heard += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
            except OSError:
                raise AssertionError(f"the terminal was closed, and had shown {self.heard!r}") from None
        before, self.heard = self.heard[: found.start()], self.heard[found.end() :]
        return before

    def hand_over(self, text: str) -> None:
        """A command line that makes a job the foreground, which it is when this returns; its echo is behind us then."""
        before = os.tcgetpgrp(self._terminal)
        self.say_to_echo(text)
        deadline = time.monotonic() + READY_S_MAX
        while os.tcgetpgrp(self._terminal) == before:
            assert time.monotonic() < deadline, f"{text} made nobody the foreground"
            time.sleep(0.005)

    def say(self, text: str, within_s: float = READY_S_MAX) -> str:
        """What a command line shows until the next prompt."""
        self.say_to_echo(text)
        return self.expect(self.PROMPT, within_s)

    def say_to_echo(self, text: str) -> None:
        self.line(text)
        self.expect(re.escape(text) + "\n")
