"""The agent's end: take what the holder kept, have it keep what we use, see to it that there is one.

Rule 1: without a holder the agent works all the same, and `status` says what is lacking.
Rule 2: a holder is started only when this agent enforces: a start that fails leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agent.control.lock import AgentLock
from agent.dns.sockets import are_ours
from agent.holder import VERSION, close_all, path_beside, receive, send

log = logging.getLogger("namegate")

# It answers from memory; one that takes longer hangs.
PATIENCE_S = 2.0
# One that ends again and again is started once in this time.
START_EVERY_S = 1.0
# The interpreter starts within a tenth of a second; this is for a machine that swaps.
START_S_MAX = 10.0


class HolderLink:
    """The connection to the holder beside the control socket `control`, which by its end learns of ours.

    mark: of the sockets. patience_s: how long it waits for the next agent before it answers itself.
    is_starting, problem: what `status` says; problem is a sentence, empty while somebody keeps the sockets.
    """

    def __init__(self, control: Path, mark: int, patience_s: float) -> None:
        self._control = control
        self.is_starting = False
        self.problem = ""
        self._mark = mark
        self._patience_s = patience_s
        self._connection: socket.socket | None = None
        self._descriptors: Sequence[int] = ()
        self._starting: asyncio.Task[None] | None = None
        self._next_start_at = 0.0

    @property
    def is_there(self) -> bool:
        return self._connection is not None

    def take(self) -> tuple[int, ...]:
        """What was kept, for `Listeners`; nothing where there is no holder, or it is of no use here. Blocks for a moment."""
        try:
            self._connection = _connect(path_beside(self._control))
            send(self._connection, {"command": "take"})
            message, kept = receive(self._connection)
        except (OSError, EOFError, ValueError):
            self._hang_up()
            return ()
        if message.get("version") != VERSION:
            log.info("the holder of the DNS sockets is of another release: replaced")
            self._hang_up()
            dismiss(self._control)
        elif are_ours(kept, self._mark):
            log.info("process %s kept the DNS sockets and answered %s questions", message.get("pid"), message.get("answered"))
            return kept
        close_all(kept)
        return ()

    def serve(self, descriptors: Sequence[int]) -> None:
        """These sockets are to be kept, and nobody else reads from them from now on. Blocks for a moment."""
        self._descriptors = descriptors
        if self._connection is None:
            return
        try:
            self._hand_over(self._connection)
        except (OSError, EOFError, ValueError):
            self._hang_up()
        else:
            asyncio.get_running_loop().add_reader(self._connection.fileno(), self._lost)

    def require(self) -> None:
        """Let there be a holder, now and whenever it ends."""
        if self._connection is None and self._starting is None:
            self.is_starting = not self.problem
            self._starting = asyncio.get_running_loop().create_task(self._start())

    def close(self) -> None:
        """The holder keeps what it has."""
        if self._starting is not None:
            self._starting.cancel()
        self._hang_up()

    def _lost(self) -> None:
        """It never says anything unasked: this is its end."""
        self._hang_up()
        self.problem = "the holder of the DNS sockets ended: another one is being started"
        log.warning("%s", self.problem)
        self.require()

    async def _start(self) -> None:
        """Until there is one."""
        loop = asyncio.get_running_loop()
        while self._connection is None:
            await asyncio.sleep(self._next_start_at - loop.time())
            self._next_start_at = loop.time() + START_EVERY_S
            try:
                self._connection = await asyncio.to_thread(self._engage)
            except (OSError, EOFError, ValueError, subprocess.SubprocessError) as error:
                said = (error.stderr or "").strip() if isinstance(error, subprocess.CalledProcessError) else ""
                problem = f"nobody keeps the DNS sockets for the next agent: {said or error}"
                if problem != self.problem:
                    log.error("%s", problem)
                self.problem = problem
            else:
                loop.add_reader(self._connection.fileno(), self._lost)
                self.problem = ""
            self.is_starting = False
        self._starting = None

    def _engage(self) -> socket.socket:
        """A connection to a holder that has our sockets. Not in the loop: one that hangs is waited for."""
        connection = _reach(self._control)
        try:
            self._hand_over(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _hand_over(self, connection: socket.socket) -> None:
        send(connection, {"command": "serve", "patience": self._patience_s}, self._descriptors)
        receive(connection)

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()


def dismiss(control: Path) -> None:
    """End the holder beside this control socket, and leave nothing of it. ControlError when it is there and does not end."""
    path = path_beside(control)
    with contextlib.suppress(OSError, EOFError, ValueError), _connect(path) as connection:
        send(connection, {"command": "leave"})
        receive(connection)
    lock = AgentLock(path, "a holder")
    if path.is_socket() or lock.path.exists():
        lock.acquire()
        if path.is_socket():
            path.unlink()
        lock.release()


def _connect(path: Path) -> socket.socket:
    """OSError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _reach(control: Path) -> socket.socket:
    """A connection to a holder that is there, perhaps as a unit of its own, or is started for it. OSError, SubprocessError."""
    with contextlib.suppress(OSError):
        return _connect(path_beside(control))
    command = [sys.executable, "-m", "agent", "--control", str(control), "holder", "--detach"]
    here = Path(__file__).parents[2]  # where `agent` is found, also by an interpreter that is told nothing
    subprocess.run(command, cwd=here, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S_MAX, check=True)
    return _connect(path_beside(control))
