"""The holder itself: what it keeps, whom it hears, and what it answers when no agent is there.

It ends at its first mistake: then its sockets close, and the program refuses questions like any denied packet, which a client
learns sooner than silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from functools import partial
from pathlib import Path

from agent.control import ControlError
from agent.control.lock import AgentLock
from agent.control.server import listener_at, user_of
from agent.core.events import AskerGone, Query, SendReply
from agent.dns.bounds import Limits
from agent.dns.messages import ExtendedError, refusal, servfail
from agent.dns.sockets import Listeners, mark_of
from agent.dns.wire import WireError, read_question
from agent.holder import KEPT, VERSION, Message, close_all, path_beside, receive, send

log = logging.getLogger("namegate")

# An answer is ready at once: a connection that stands still for two seconds has nothing to ask.
LIMITS = Limits(connections_max=256, connections_per_client_max=16, idle_seconds=2.0)
# How long connections are answered on that were accepted before an agent took over: it does not get them, and a connection that
# is closed takes a question on its way with it.
LINGER_S = 2.0


def run(control: Path, *, is_detached: bool) -> int:
    """Keep sockets, beside this control socket, until told to leave; the exit code. ControlError where one does already.

    is_detached: come back at once, as soon as there is somebody to connect to; a child goes on in a session of its own, without
    standard input and output, and so outlives the caller, its process group and its terminal.
    """
    path = path_beside(control)
    lock = AgentLock(path, "a holder")
    lock.acquire()
    try:
        listener = listener_at(path, socket.SOCK_SEQPACKET)
    except ControlError:
        lock.release()  # and what is at the path is somebody else's
        raise
    try:
        listener.listen()
        listener.setblocking(False)
        if is_detached and not _go_on_in_child():
            os._exit(0)  # nothing is closed or removed: the child has it
        loop = asyncio.new_event_loop()
        holder = _Holder(loop, listener)
        loop.run_forever()
        return holder.exit_code
    finally:
        # Before the process ends: who waits for the end of a connection finds nothing left.
        path.unlink(missing_ok=True)
        lock.release()


def _go_on_in_child() -> bool:
    """True in the child."""
    if os.fork():
        return False
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    if nowhere > 2:
        os.close(nowhere)
    return True


class _Holder:
    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self.exit_code = 0
        self._loop = loop
        self._listener = listener
        self._kept: tuple[int, ...] = ()
        self._agent: socket.socket | None = None  # the connection of who reads the sockets kept
        self._patience_s = 0.0
        self._served_at = 0.0  # when the agent began to
        self._alone_at: float | None = None  # since when somebody may wait for an answer
        self._alone: asyncio.TimerHandle | None = None  # when patience ends
        self._listeners: Listeners | None = None  # while we answer
        self._answered = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, loop.stop)
        loop.set_exception_handler(self._give_up)
        loop.add_reader(listener.fileno(), self._accept)

    def _give_up(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        log.critical("%s", context.get("message"), exc_info=error if isinstance(error, BaseException) else None)
        self.exit_code = 70  # EX_SOFTWARE
        self._loop.stop()

    # --- agents ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            if user_of(connection) not in (0, os.geteuid()):
                connection.close()
                return
            connection.setblocking(False)
            self._loop.add_reader(connection.fileno(), self._hear, connection)

    def _hear(self, connection: socket.socket) -> None:
        try:
            message, descriptors = receive(connection)
            self._obey(connection, message, descriptors)
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError):
            self._loop.remove_reader(connection.fileno())
            connection.close()
            if connection is self._agent:
                self._leave_alone()

    def _leave_alone(self) -> None:
        """Agents that die one soon after the other use up the same patience, or a question they read could wait for ever."""
        self._agent = None
        now = self._loop.time()
        if self._alone_at is None or now - self._served_at >= self._patience_s:
            self._alone_at = now
        self._alone = self._loop.call_at(self._alone_at + self._patience_s, self._answer)

    def _obey(self, connection: socket.socket, message: Message, descriptors: tuple[int, ...]) -> None:
        """Raises ValueError for what cannot be obeyed, OSError when the agent is gone."""
        command, patience = message.get("command"), message.get("patience")
        if command == "serve" and len(descriptors) == KEPT and isinstance(patience, float):
            self._keep(connection, descriptors, patience)
            send(connection, {"kept": len(descriptors)})
            return
        close_all(descriptors)
        if command == "take":
            send(connection, {"version": VERSION, "pid": os.getpid(), "answered": self._answered}, self._kept)
        elif command == "leave":
            self._loop.stop()
        else:
            raise ValueError(f"{message!r} is nothing that a holder does")

    def _keep(self, agent: socket.socket, descriptors: tuple[int, ...], patience_s: float) -> None:
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        if self._listeners is not None:
            log.info("an agent serves again; answered meanwhile: %d", self._answered)
            self._listeners.stop()
            self._loop.call_later(LINGER_S, self._listeners.close)
            self._listeners = None
        self._answered = 0
        close_all(self._kept)
        self._kept = descriptors
        self._agent, self._patience_s, self._served_at = agent, patience_s, self._loop.time()

    # --- no agent ----------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        self._alone = self._alone_at = None
        log.warning("no agent: questions are answered SERVFAIL")
        kept = [os.dup(descriptor) for descriptor in self._kept]
        self._listeners = Listeners(mark_of(kept[0]), limits=LIMITS, kept=kept)
        self._listeners.start(self._loop, partial(self._fail, self._listeners), _ignore)

    def _fail(self, listeners: Listeners, queries: list[Query]) -> None:
        replies: list[SendReply] = []
        for query in queries:
            try:
                reply: bytes | None = servfail(read_question(query.message), ExtendedError.NOT_READY, "no agent is running")
            except WireError as error:
                reply = refusal(query.message, error)
            if reply is not None:
                replies.append(SendReply(query.asker, reply))
        self._answered += len(replies)
        listeners.send(replies)


def _ignore(_: AskerGone) -> None:
    """Nobody's question is still open here."""
