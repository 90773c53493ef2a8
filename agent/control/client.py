"""The command line's end of the control socket: one question, one answer, plain blocking socket.

Everything that can go wrong is a ControlError whose sentence says what to do; exit code 2, as nothing was answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from agent.control import ControlError


class Control:
    """patience: seconds without a byte from the agent after which it is given up."""

    def __init__(self, path: Path, patience: float = 10.0) -> None:
        self.path = path
        self.patience = patience

    def ask(self, command: str, /, **arguments: object) -> object:
        """The answer's data; raises ControlError."""
        request = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
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
