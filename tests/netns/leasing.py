"""Who holds a lease of the agent: in this process, or in one that can be stopped and killed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent.control import ControlError

PATIENCE_S = 30.0


def _request(arguments: dict[str, object]) -> bytes:
    return json.dumps({"command": "attach", "arguments": {"lease": True, **arguments}}).encode() + b"\n"


class Lease:
    """One that this process holds. Use as a context manager. answer: of `attach`; raises ControlError where it is refused."""

    def __init__(self, control: Path, interface: str, **arguments: object) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(PATIENCE_S)
        try:
            self._connection.connect(str(control))
            self._connection.sendall(_request({"interface": interface, **arguments}))
            self._stream = self._connection.makefile("rb")
            said = self.line()
        except BaseException:
            self._connection.close()
            raise
        if "error" in said:
            self.close()
            raise ControlError(said["error"], said["exit"])
        self.answer: dict[str, Any] = said["data"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> int:
        return int(self.answer["endpoint"])

    def line(self) -> dict[str, Any]:
        """The next one; empty where the agent has ended the connection."""
        said: dict[str, Any] = json.loads(self._stream.readline() or b"{}")
        return said

    def fact(self) -> dict[str, Any]:
        fact: dict[str, Any] = self.line()["fact"]
        return fact

    def end(self) -> dict[str, Any]:
        """By shutting down our side; gives back the summary."""
        self._connection.shutdown(socket.SHUT_WR)
        while "summary" not in (said := self.line()):
            assert said, "the agent ended the connection without a summary"
        assert self.line() == {}
        summary: dict[str, Any] = said["summary"]
        return summary

    def await_loss(self) -> None:
        """Until the agent is dead: the stream ends, without a summary."""
        while said := self.line():
            assert "summary" not in said

    def close(self) -> None:
        self._stream.close()
        self._connection.close()


# Says what it hears to a file, so that nobody has to read along.
_HOLDER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(sys.stdin.readline().encode())
for line in connection.makefile():
    print(line, end="", flush=True)
"""


class LeaseProcess:
    """A lease held by a process of its own. Use as a context manager: at the end the process is killed."""

    def __init__(self, control: Path, heard: Path, interface: str, **arguments: object) -> None:
        self._heard = heard
        with heard.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, str(control)], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
            )
        assert self._process.stdin is not None
        self._process.stdin.write(_request({"interface": interface, **arguments}))
        self._process.stdin.close()
        self.await_line(lambda line: '"data"' in line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(timeout=PATIENCE_S)

    def await_line(self, is_wanted: Any) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in self._heard.read_text().splitlines():
                if is_wanted(line):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"not heard in {self._heard.read_text()[-1000:]!r}")
