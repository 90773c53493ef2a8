"""The command line's end of the control socket: one question, one answer, or an answer and what follows; plain blocking socket.

Everything that can go wrong is a ControlError whose sentence says what to do; exit code 2, as nothing was answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.control import ControlError

_OCTETS_AT_ONCE: Final = 1 << 18


class Control:
    """patience: seconds without a byte from the agent after which it is given up."""

    def __init__(self, path: Path, patience: float = 10.0) -> None:
        self.path = path
        self.patience = patience

    def ask(self, command: str, /, **arguments: object) -> object:
        """The answer's data; raises ControlError."""
        request = _request(command, arguments)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self.patience)
            self._connect(connection)
            try:
                # A refusal can come before the request is read: then it is in the stream although sending fails.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(request)
                with connection.makefile("rb") as stream:
                    line = stream.readline()
            except TimeoutError:
                raise ControlError(f"the agent at {self.path} did not answer within {self.patience:g} s") from None
            except OSError as error:
                raise ControlError(f"the agent at {self.path} ended the connection: {error.strerror}") from None
        if not line.endswith(b"\n"):
            raise ControlError(f"the agent at {self.path} ended before it answered: its log says why")
        return _data(line)

    def listen(self, command: str, /, **arguments: object) -> Feed:
        """The answer and what follows it; raises ControlError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.patience)
            self._connect(connection)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(_request(command, arguments))
            return Feed(self.path, connection)
        except BaseException:
            connection.close()
            raise

    def _connect(self, connection: socket.socket) -> None:
        try:
            connection.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise ControlError(
                f"no agent is running (nobody listens at {self.path}): start it with `sudo namegate agent -c FILE`"
            ) from None
        except PermissionError:
            raise ControlError(f"{self.path} is for root: run the command with sudo") from None
        except TimeoutError:
            raise ControlError(f"the agent at {self.path} does not take connections") from None
        except OSError as error:
            raise ControlError(f"{self.path} cannot be asked: {error.strerror or error}") from None


class Feed:
    """What an agent goes on to say; use as a context manager. data: what it answered first."""

    def __init__(self, path: Path, connection: socket.socket) -> None:
        self._path = path
        self._connection = connection
        self._heard = b""
        while b"\n" not in self._heard:
            if not self._receive():
                raise ControlError(f"the agent at {path} did not answer in time")
        line, _, self._heard = self._heard.partition(b"\n")
        self.data = _data(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self, within_s: float | None = None) -> list[dict[str, Any]]:
        """What has come; waits for it at most so long. Raises ControlError when the agent has ended, after its last line."""
        self._connection.settimeout(within_s)
        if b"\n" not in self._heard:
            self._receive()
        *lines, self._heard = self._heard.split(b"\n")
        return [json.loads(line) for line in lines]

    def _receive(self) -> bool:
        try:
            octets = self._connection.recv(_OCTETS_AT_ONCE)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError as error:
            raise ControlError(f"the agent at {self._path} ended the connection: {error.strerror}") from None
        if not octets:
            raise ControlError(f"the agent at {self._path} ended")
        self._heard += octets
        return True


def _request(command: str, arguments: object) -> bytes:
    return json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"


def _data(line: bytes) -> object:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "data" in answer:
        return answer["data"]
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise ControlError(answer["error"], 1 if answer.get("exit") == 1 else 2)
    raise ControlError("the agent's answer is not understood: is it of another release?")
