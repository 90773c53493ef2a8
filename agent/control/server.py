"""The agent's end of the control socket.

Rule 1: only root is heard. The socket is 0600 from the instant it has a name, its directory 0700, and each peer's user is asked
from the kernel (SO_PEERCRED) besides.
Rule 2: nobody can hold the agent up: requests, clients, idle time and the time a client takes to read are bounded, and a long
answer is written in slices between which DNS goes on.
Rule 3: an answer that is a `Feed` makes the rest of the connection its own: lines, until the client ends its side; then the
last line. A client may stand still meanwhile for as long as it likes. Feeds are not among the clients that are bounded.
Rule 4: a request that cannot be answered gets a sentence. An exception other than ControlError is our own mistake: it goes to
the loop's exception handler, and the client sees the connection end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from agent.control import REQUEST_BYTES_MAX, ControlError
from agent.control.lock import AgentLock

Answer = Callable[[str, Mapping[str, object]], Awaitable[object]]


@runtime_checkable
class Feed(Protocol):
    """first: what the request is answered with. lines: what follows, as it comes. end: the client has ended its side, or is
    gone; gives the last line. It is not called when the agent itself ends.
    """

    first: Mapping[str, object]

    def lines(self) -> AsyncIterator[Mapping[str, object]]: ...

    async def end(self) -> Mapping[str, object]: ...


CLIENTS_MAX: Final = 256  # many runs that start at once; those that go on are feeds, which do not count
IDLE_SECONDS_MAX: Final = 60.0
WRITE_SECONDS_MAX: Final = 10.0
ROWS_PER_SLICE: Final = 200  # about 1 ms of json.dumps


class ControlServer:
    """Listens at `path` and gives each request to `answer`. One object is started once and closed once.

    lock: of this path and already acquired, where its owner touches what two agents must not share before it can listen; the
    owner releases it after `close`. Without it the server has its own.
    """

    def __init__(self, path: Path, answer: Answer, lock: AgentLock | None = None) -> None:
        self.path = path
        self._answer = answer
        self._lock = AgentLock(path)
        self._has_own_lock = lock is None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._feeding: set[asyncio.Task[None]] = set()  # those of them that are feeds

    async def start(self) -> None:
        """Raises ControlError when another agent lives at this path, or the path cannot be had."""
        if self._has_own_lock:
            self._lock.acquire()
        try:
            listener = listener_at(self.path)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=REQUEST_BYTES_MAX)
        except BaseException:
            self._lock.release()
            raise

    async def close(self) -> None:
        """Requests in progress are cut off: their clients see the connection end."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self.path.unlink(missing_ok=True)
        self._lock.release()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._ended)

    def _ended(self, connection: asyncio.Task[None]) -> None:
        self._connections.discard(connection)
        self._feeding.discard(connection)
        if not connection.cancelled() and (error := connection.exception()) is not None:
            loop = connection.get_loop()
            loop.call_exception_handler({"message": "control request failed", "exception": error, "task": connection})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) - len(self._feeding) > CLIENTS_MAX:
                await _send(writer, _refusal(f"{CLIENTS_MAX} clients are connected already: end one of them"))
                return
            user = user_of(writer.get_extra_info("socket"))
            if user not in (0, os.geteuid()):
                await _send(writer, _refusal("the control socket is for root: run the command with sudo"))
                return
            while await self._serve_one(reader, writer):
                pass
        except _ClientLost:
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Is there perhaps another request after this one?"""
        try:
            async with asyncio.timeout(IDLE_SECONDS_MAX):
                line = await reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, OSError):  # TimeoutError is an OSError
            return False
        except asyncio.LimitOverrunError:
            await _send(writer, _refusal(f"the request is longer than {REQUEST_BYTES_MAX} bytes"))
            return False
        try:
            command, arguments = _request(line)
            data = await self._answer(command, arguments)
        except ControlError as error:
            await _send(writer, _refusal(error.sentence, error.exit_code))
        else:
            if isinstance(data, Feed):
                await self._feed(reader, writer, data)
                return False
            await _send(writer, _slices(data))
        return True

    async def _feed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, feed: Feed) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._feeding.add(task)
        for line in _slices(feed.first):  # also for a client that has ended its side already
            writer.write(line)
        telling = task.get_loop().create_task(_tell(writer, feed))
        try:
            with contextlib.suppress(OSError):
                while await reader.read(REQUEST_BYTES_MAX):
                    pass
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        await _send(writer, iter([json.dumps(await feed.end()).encode() + b"\n"]))


async def _tell(writer: asyncio.StreamWriter, feed: Feed) -> None:
    """A client that is gone ends its side too, so nothing is done about it here."""
    with contextlib.suppress(OSError):
        async for each in feed.lines():
            writer.write(json.dumps(each).encode() + b"\n")
            await writer.drain()


def _request(line: bytes) -> tuple[str, Mapping[str, object]]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise ControlError("the request is not a line of JSON") from None
    if not isinstance(request, dict) or not request.keys() <= {"command", "arguments"}:
        raise ControlError("a request is an object with `command` and `arguments`")
    command, arguments = request.get("command"), request.get("arguments", {})
    if not isinstance(command, str) or not isinstance(arguments, dict):
        raise ControlError("`command` is a text and `arguments` is an object")
    return command, arguments


def _refusal(sentence: str, exit_code: int = 2) -> Iterator[bytes]:
    yield json.dumps({"error": sentence, "exit": exit_code}).encode() + b"\n"


def _slices(data: object) -> Iterator[bytes]:
    """The answer's line in pieces; a list is encoded piece by piece, each when its turn comes."""
    if not isinstance(data, list):
        yield json.dumps({"data": data}).encode() + b"\n"
        return
    yield b'{"data": ['
    for start in range(0, len(data), ROWS_PER_SLICE):
        rows = json.dumps(data[start : start + ROWS_PER_SLICE]).encode()
        yield (b", " if start else b"") + rows[1:-1]
    yield b"]}\n"


async def _send(writer: asyncio.StreamWriter, slices: Iterator[bytes]) -> None:
    for piece in slices:
        try:
            writer.write(piece)
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await writer.drain()
        except OSError as error:
            raise _ClientLost from error
        await asyncio.sleep(0)


class _ClientLost(Exception):
    """It went away, or does not read."""


def listener_at(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A bound socket; the lock is held, so what has the name now is dead.

    bind(2) gives the name the mode of the socket's own inode, so there is no instant at which others could connect.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ControlError(f"{path} is there and is not a socket: remove it, or set `control.socket`")
            path.unlink()
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ControlError(f"{path} cannot be made: {error.strerror or error}") from None
    except ControlError:
        listener.close()
        raise
    return listener


def user_of(peer: socket.socket) -> int:
    """Who made the other side of a connection."""
    credentials: tuple[int, int, int] = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return credentials[1]
