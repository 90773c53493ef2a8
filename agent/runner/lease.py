"""The agent's side of a run: find one or start one, have the interface attached, hear what was denied, come back when it ends.

Rule 1: an agent that was named is the only one that is asked. Else it is the administrator's, if it answers and is of our
network namespace; else the run agent, which all runs of this network namespace share, and which is started when there is none.
Rule 2: when the agent ends without having been asked to, the kernel goes on enforcing, and the same socket is tried until an
agent is there again: another one would not know what the first one left on the interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.control import ControlError
from agent.control.client import Control
from agent.control.runs import own_network_namespace, runs_socket
from agent.runner import CannotRun

# An agent starts in a second; the first one on a machine compiles the datapath, and that can take ten on a small one.
_START_S_MAX: Final = 15.0
# Loading and a busy kernel; the agent's own sentence comes before.
_ATTACH_S_MAX: Final = 30.0
_HELLO_S_MAX: Final = 2.0
_SUMMARY_S_MAX: Final = 3.0
_LOOK_AGAIN_S: Final = 0.005
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_LIMITS: Final = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK)
_ANSWER_OCTETS: Final = 1 << 16


class Agents:
    """named: the socket the caller named. administrators: the one that is tried else."""

    def __init__(self, named: Path | None, administrators: Path) -> None:
        namespace = own_network_namespace()
        self.is_ours = named is None and not _is_of(administrators, namespace)
        self.socket = named or (runs_socket(namespace) if self.is_ours else administrators)
        self._starting: subprocess.Popen[bytes] | None = None
        self._said = -1

    def ensure(self) -> None:
        """Start the run agent unless somebody listens; comes back before it is ready."""
        if self.is_ours and not self._is_starting() and not _listens(self.socket):
            self._start()

    def why_not(self) -> str:
        """What the agent that we started said before it ended; empty while it has not."""
        if self._starting is None or self._is_starting():
            return ""
        said = os.pread(self._said, 1 << 14, 0).decode(errors="replace").strip().splitlines()
        return said[-1].removeprefix("namegate: ") if said else f"it ended with {self._starting.returncode}"

    def _is_starting(self) -> bool:
        return self._starting is not None and self._starting.poll() is None

    def _start(self) -> None:
        """It lives on when we end, so it writes into memory and not into a pipe of ours."""
        if self._said >= 0:
            os.close(self._said)
        self._said = os.memfd_create("namegate-agent")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NAMEGATE_")}
        self._starting = subprocess.Popen(
            [sys.executable, "-m", "agent", "agent", "--for-runs"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            cwd=Path(__file__).parents[2],
            env=environment,
            start_new_session=True,
            preexec_fn=_be_nobodys,  # noqa: PLW1509 - there is one thread
        )


def _be_nobodys() -> None:
    """An agent is for the runs of others as well: the caller's limits and blocked signals are not its."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for limit in _LIMITS:
        _, hard = resource.getrlimit(limit)
        try:
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        except (OSError, ValueError):  # a container without CAP_SYS_RESOURCE
            resource.setrlimit(limit, (hard, hard))


def _is_of(control: Path, namespace: int) -> bool:
    try:
        said = Control(control, _HELLO_S_MAX).ask("hello")
    except ControlError:
        return False
    return isinstance(said, dict) and said.get("network_namespace") == namespace


def _listens(path: Path) -> bool:
    connection = _connection(path)
    if connection is not None:
        connection.close()
    return connection is not None


def _connection(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


class Lease:
    """An interface's attachment that lives as long as this object's connection.

    interface, answer: what the agent said. is_lost: the agent ended; `again` is to be called after `wait_s`.
    """

    def __init__(self, agents: Agents, arguments: Mapping[str, object]) -> None:
        self._agents = agents
        self._request = json.dumps({"command": "attach", "arguments": arguments}).encode() + b"\n"
        self._connection: socket.socket | None = None
        self._heard = b""
        self._is_answered = False
        self._tries = 0
        self.is_lost = False

    def begin(self) -> None:
        """Ask, if somebody listens already; `attach` waits for the answer."""
        self._connect()

    def attach(self) -> dict[str, Any]:
        """The first time: the answer. Raises CannotRun."""
        deadline = time.monotonic() + _START_S_MAX
        while True:
            answer = self._attached(_ATTACH_S_MAX) if self._connection is not None or self._connect() else None
            if answer is not None:
                return answer
            why = self._agents.why_not()
            if time.monotonic() > deadline or (why and not _listens(self._agents.socket)):
                raise CannotRun(f"no agent for runs can be started: {why or f'it is not there after {_START_S_MAX:g} s'}")
            if not self._agents.is_ours:
                raise CannotRun(f"no agent answers at {self._agents.socket}: start it, or leave --control out")
            self._agents.ensure()
            time.sleep(_LOOK_AGAIN_S)

    def _attached(self, patience_s: float) -> dict[str, Any] | None:
        """None: the agent ended before it answered."""
        assert self._connection is not None
        self._connection.settimeout(patience_s)
        try:
            for message in self._messages():
                if "error" in message:
                    raise CannotRun(str(message["error"]))
                self._is_answered = True
                self._connection.setblocking(False)
                answer: dict[str, Any] = message["data"]
                return {**answer, "ipv6": bool(answer["ipv6"]), "device": str(answer["device"])}
        except TimeoutError:
            raise CannotRun(f"the agent at {self._agents.socket} did not attach the run within {patience_s:g} s") from None
        except (KeyError, TypeError, ValueError):
            self._lose()
            raise CannotRun(f"the agent at {self._agents.socket} is not understood: is it of another release?") from None
        return None

    def fileno(self) -> int:
        """To poll; -1: there is no connection now."""
        return -1 if self._connection is None else self._connection.fileno()

    def wait_s(self) -> float | None:
        return _RETRY_S[min(self._tries, len(_RETRY_S) - 1)] if self._connection is None else None

    def facts(self) -> Iterator[dict[str, Any]]:
        """What has been heard; after this `is_lost` may be true. Raises ControlError when an agent does not take us again."""
        with contextlib.suppress(BlockingIOError):
            for message in self._messages():
                if "error" in message:
                    self._lose()
                    raise ControlError(str(message["error"]))
                if not self._is_answered:
                    self._is_answered, self.is_lost, self._tries = True, False, 0
                elif "fact" in message:
                    yield message["fact"]

    def again(self) -> None:
        """One more try; what comes of it is heard by `facts`."""
        self._tries += 1
        if self._connect():
            assert self._connection is not None
            self._connection.setblocking(False)
        else:
            self._agents.ensure()

    def end(self) -> Iterator[dict[str, Any]]:
        """What is left to hear: {"fact": …} and, where there is an agent to give it, {"summary": …} as the last."""
        if self._connection is None or not self._is_answered:
            return
        with contextlib.suppress(OSError):
            self._connection.settimeout(_SUMMARY_S_MAX)
            self._connection.shutdown(socket.SHUT_WR)
            yield from self._messages()

    def _connect(self) -> bool:
        self._heard, self._is_answered = b"", False
        self._connection = _connection(self._agents.socket)
        if self._connection is None:
            return False
        with contextlib.suppress(OSError):  # a refusal can come before all was read: it is heard all the same
            self._connection.settimeout(_ATTACH_S_MAX)
            self._connection.sendall(self._request)
        return True

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Until the agent ends; BlockingIOError or TimeoutError where the connection is set so."""
        assert self._connection is not None
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                message: dict[str, Any] = json.loads(line)
                yield message
                continue
            try:
                octets = self._connection.recv(_ANSWER_OCTETS)
            except (ConnectionResetError, BrokenPipeError):
                octets = b""
            if not octets:
                self._lose()
                return
            self._heard += octets

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self.is_lost = None, True
