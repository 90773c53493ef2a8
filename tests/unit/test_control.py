"""The control socket: both ends, over real sockets."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.control import REQUEST_BYTES_MAX, ControlError, server
from agent.control.client import Control
from agent.control.lock import AgentLock
from agent.control.server import ControlServer


async def echo(command: str, arguments: Mapping[str, object]) -> object:
    """What a shell would answer, in small."""
    if command == "refuse":
        raise ControlError("no such endpoint", 1)
    if command == "rows":
        count = arguments["count"]
        assert isinstance(count, int)
        return [{"row": number} for number in range(count)]
    return {"command": command, **arguments}


@asynccontextmanager
async def served(path: Path, answer: server.Answer = echo) -> AsyncIterator[ControlServer]:
    control = ControlServer(path, answer)
    await control.start()
    try:
        yield control
    finally:
        await control.close()


def with_server(path: Path, act: Callable[[], Awaitable[Any]], answer: server.Answer = echo) -> Any:
    """Runs `act` beside a server; for the blocking client use `asyncio.to_thread`."""

    async def both() -> Any:
        async with served(path, answer):
            return await act()

    return asyncio.run(both())


def ask(path: Path, command: str, **arguments: object) -> Callable[[], Awaitable[object]]:
    return lambda: asyncio.to_thread(Control(path, patience=5).ask, command, **arguments)


def raw(path: Path, request: bytes) -> bytes:
    """Everything the server says until it ends the connection, or one line."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(request)
        return connection.makefile("rb").readline()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "control.sock"


def test_a_question_is_answered(path: Path) -> None:
    """Command and arguments arrive, data comes back."""
    assert with_server(path, ask(path, "status", verbose=True)) == {"command": "status", "verbose": True}


@pytest.mark.parametrize("count", [0, 1, server.ROWS_PER_SLICE, server.ROWS_PER_SLICE + 1, 5 * server.ROWS_PER_SLICE])
def test_a_list_is_the_same_list_however_it_is_sliced(path: Path, count: int) -> None:
    """A million rows must not stop DNS, so they are encoded in slices: the seams must not show."""
    assert with_server(path, ask(path, "rows", count=count)) == [{"row": number} for number in range(count)]


def test_other_work_goes_on_between_slices(path: Path) -> None:
    """While a long list is written the loop runs something else at least once a slice."""
    turns = 0

    async def act() -> object:
        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 22)
            writer.write(b'{"command": "rows", "arguments": {"count": 20000}}\n')
            started = turns
            line = await reader.readline()
            writer.close()
            return len(json.loads(line)["data"]), turns - started
        finally:
            counting.cancel()

    rows, turned = with_server(path, act)
    assert rows == 20_000
    assert turned >= 20_000 // server.ROWS_PER_SLICE


def test_a_refusal_keeps_its_sentence_and_exit_code(path: Path) -> None:
    """1 is a no, 2 a wrong use: the command line ends with it."""
    with pytest.raises(ControlError, match="no such endpoint") as caught:
        with_server(path, ask(path, "refuse"))
    assert caught.value.exit_code == 1


def test_socket_and_directory_are_for_root(path: Path) -> None:
    """0600 in 0700, and nothing is left behind."""

    def modes() -> tuple[int, int]:
        return path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777

    old = os.umask(0)
    try:
        assert with_server(path, lambda: asyncio.to_thread(modes)) == (0o600, 0o700)
    finally:
        os.umask(old)
    assert list(path.parent.iterdir()) == []


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    """It may be somebody else's; the socket's own mode guards it."""
    tmp_path.chmod(0o755)
    with_server(tmp_path / "control.sock", ask(tmp_path / "control.sock", "status"))
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_socket_of_a_dead_agent_is_replaced(path: Path) -> None:
    """A killed agent leaves its socket and its lock file; the kernel let the lock go."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    path.with_name("control.sock.lock").touch()
    assert with_server(path, ask(path, "status")) == {"command": "status"}


def test_a_living_agent_is_not_replaced(path: Path) -> None:
    """The second is refused with a sentence, and the first goes on."""

    async def act() -> object:
        with pytest.raises(ControlError, match=r"an agent is already running \(.*control\.sock\): stop it first"):
            await ControlServer(path, echo).start()
        return await ask(path, "status")()

    assert with_server(path, act) == {"command": "status"}


def test_the_lock_can_be_held_before_there_is_a_socket(path: Path) -> None:
    """An agent that loads programs before it listens holds it from the start; the server neither takes nor gives it."""
    lock = AgentLock(path)
    lock.acquire()

    async def run() -> object:
        control = ControlServer(path, echo, lock)
        await control.start()
        try:
            return await ask(path, "status")()
        finally:
            await control.close()

    assert asyncio.run(run()) == {"command": "status"}
    with pytest.raises(ControlError, match="already running"):
        AgentLock(path).acquire()
    lock.release()


def test_a_file_that_is_no_socket_is_not_replaced(path: Path) -> None:
    """`control.socket` with a typing error must not delete somebody's file."""
    path.parent.mkdir()
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ControlError, match="is there and is not a socket"):
        with_server(path, ask(path, "status"))
    assert path.read_text(encoding="utf-8") == "precious"
    assert list(path.parent.iterdir()) == [path]


def test_the_lock_is_not_taken_on_a_file_that_lost_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder releases it, and so unlinks it, between open and flock of the next one: a third must still be kept out."""
    first, second, third = AgentLock(path), AgentLock(path), AgentLock(path)
    first.acquire()
    flock = fcntl.flock

    def late_flock(fd: int, operation: int) -> None:
        first.release()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    second.acquire()
    with pytest.raises(ControlError, match="already running"):
        third.acquire()
    second.release()
    third.acquire()
    third.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("request_line", "sentence"),
    [
        (b"status\n", "the request is not a line of JSON"),
        (b"\xff\n", "the request is not a line of JSON"),
        (b"[" * 50_000 + b"\n", "the request is not a line of JSON"),
        (b"[]\n", "a request is an object with `command` and `arguments`"),
        (b'{"command": "status", "argument": {}}\n', "a request is an object with `command` and `arguments`"),
        (b'{"command": 1}\n', "`command` is a text and `arguments` is an object"),
        (b'{"command": "status", "arguments": []}\n', "`command` is a text and `arguments` is an object"),
        (b"x" * (REQUEST_BYTES_MAX + 2), f"the request is longer than {REQUEST_BYTES_MAX} bytes"),
    ],
    ids=["word", "bytes", "deep", "list", "unknown key", "number", "arguments", "long"],
)
def test_a_request_that_is_none_gets_a_sentence(path: Path, request_line: bytes, sentence: str) -> None:
    """Nothing that comes through the socket ends the agent."""
    line = with_server(path, lambda: asyncio.to_thread(raw, path, request_line))
    assert json.loads(line) == {"error": sentence, "exit": 2}


def test_a_connection_takes_several_requests(path: Path) -> None:
    """Also after a refused one."""

    async def act() -> list[Any]:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"command": "refuse"}\n{"command": "status"}\n')
        lines = [json.loads(await reader.readline()) for _ in range(2)]
        writer.close()
        return lines

    assert with_server(path, act) == [{"error": "no such endpoint", "exit": 1}, {"data": {"command": "status"}}]


def test_clients_are_bounded(path: Path) -> None:
    """One more than there may be is told so; when one leaves there is room."""

    async def act() -> str:
        writers = [(await asyncio.open_unix_connection(path))[1] for _ in range(server.CLIENTS_MAX)]
        with pytest.raises(ControlError) as caught:
            await ask(path, "status")()
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        assert await ask(path, "status")() == {"command": "status"}
        return caught.value.sentence

    assert with_server(path, act) == f"{server.CLIENTS_MAX} clients are connected already: end one of them"


def test_silent_clients_are_let_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or thirty-two forgotten terminals would lock root out."""
    monkeypatch.setattr(server, "IDLE_SECONDS_MAX", 0.01)

    async def act() -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        async with asyncio.timeout(5):
            ended = await reader.read()
        writer.close()
        return ended

    assert with_server(path, act) == b""


def test_a_client_that_does_not_read_is_let_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is as large as the table; it must not stay in our memory."""
    monkeypatch.setattr(server, "WRITE_SECONDS_MAX", 0.01)

    async def run() -> bytes:
        async with served(path) as control:
            reader, writer = await asyncio.open_unix_connection(path, limit=1024)
            writer.write(b'{"command": "status"}\n')
            await reader.readline()
            [connection] = control._connections
            writer.write(b'{"command": "rows", "arguments": {"count": 200000}}\n')
            async with asyncio.timeout(5):
                await connection
            received = await reader.read()
            writer.close()
            return received

    assert not asyncio.run(run()).endswith(b"]}\n")


def test_our_own_mistake_reaches_the_loops_handler(path: Path) -> None:
    """The client is not left waiting, and the shell decides what such a mistake means."""
    contexts: list[dict[str, Any]] = []

    async def broken(_command: str, _arguments: Mapping[str, object]) -> object:
        raise AssertionError("I4")

    async def act() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: contexts.append(context))
        await ask(path, "status")()

    with pytest.raises(ControlError, match="ended before it answered: its log says why"):
        with_server(path, act, broken)
    assert [str(context["exception"]) for context in contexts] == ["I4"]


def test_closing_ends_requests_in_progress(path: Path) -> None:
    """`apply --wait` of an agent that stops sees the connection end, and does not wait for its patience."""
    entered = threading.Event()

    async def never(_command: str, _arguments: Mapping[str, object]) -> object:
        entered.set()
        await asyncio.Event().wait()
        return None

    async def run() -> None:
        async with served(path, never):
            asking = asyncio.create_task(asyncio.to_thread(Control(path, patience=5).ask, "apply"))
            await asyncio.to_thread(entered.wait, 5)
        await asking

    with pytest.raises(ControlError, match="ended before it answered"):
        asyncio.run(run())


def test_no_agent_is_a_sentence_with_the_remedy(path: Path) -> None:
    """Also when a dead one's socket is still there."""
    sentence = f"no agent is running (nobody listens at {path}): start it with `sudo namegate agent -c FILE`"
    for is_left_over in (False, True):
        if is_left_over:
            path.parent.mkdir()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        with pytest.raises(ControlError) as caught:
            Control(path).ask("status")
        assert (caught.value.sentence, caught.value.exit_code) == (sentence, 2)


def test_a_path_too_long_for_a_socket_is_a_sentence(tmp_path: Path) -> None:
    """Not a traceback of the socket module."""
    with pytest.raises(ControlError, match="cannot be asked: AF_UNIX path too long"):
        Control(tmp_path / ("x" * 200)).ask("status")


def test_a_silent_agent_is_given_up(path: Path) -> None:
    """After the client's patience, with a sentence."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(ControlError, match=r"did not answer within 0\.05 s"):
            Control(path, patience=0.05).ask("status")
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("answer", [b"hello\n", b"{}\n", b'{"error": 5}\n', b"[]\n"])
def test_a_foreign_answer_is_a_sentence(path: Path, answer: bytes) -> None:
    """Something else may listen at the path."""
    path.parent.mkdir()

    def speak(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=speak, args=(listener,))
        thread.start()
        try:
            with pytest.raises(ControlError, match="is not understood: is it of another release"):
                Control(path, patience=5).ask("status")
        finally:
            thread.join()


_ASK_RAW = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(5)
try:
    connection.connect(sys.argv[1])
    print(connection.makefile().readline())
except PermissionError:
    print("permission")
"""


@pytest.mark.root
def test_only_root_is_heard() -> None:
    """The socket's mode keeps others out; were it changed, the kernel's word on the peer's user would."""
    path = Path(f"/tmp/namegate-test-{os.getpid()}") / "control.sock"
    path.parent.mkdir(mode=0o755)  # tmp_path is root's alone

    def as_nobody() -> str:
        # Not sys.executable: the checkout may be where nobody may not go.
        command = ["/usr/bin/python3", "-I", "-c", _ASK_RAW, str(path)]
        return subprocess.run(
            command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=True
        ).stdout

    async def act() -> tuple[str, str]:
        guarded = await asyncio.to_thread(as_nobody)
        path.chmod(0o666)
        return guarded, await asyncio.to_thread(as_nobody)

    try:
        guarded, opened = with_server(path, act)
    finally:
        path.parent.rmdir()
    assert guarded == "permission\n"
    assert json.loads(opened) == {"error": "the control socket is for root: run the command with sudo", "exit": 2}


# --- feeds -----------------------------------------------------------------------------------------------------------------


class Ticks:
    """A feed of numbers, and whether its client has ended it."""

    def __init__(self, lines: int) -> None:
        self.first: Mapping[str, object] = {"lines": lines}
        self.ended = asyncio.Event()
        self._lines = lines

    async def lines(self) -> AsyncIterator[Mapping[str, object]]:
        for number in range(self._lines):
            yield {"tick": number}
        await asyncio.Event().wait()

    async def end(self) -> Mapping[str, object]:
        self.ended.set()
        return {"last": True}


def feeding(feeds: list[Ticks], lines: int = 2) -> server.Answer:
    async def answer(command: str, arguments: Mapping[str, object]) -> object:
        if command != "feed":
            return await echo(command, arguments)
        feeds.append(Ticks(lines))
        return feeds[-1]

    return answer


async def fed(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b'{"command": "feed"}\n')
    assert json.loads(await reader.readline()).keys() == {"data"}
    return reader, writer


def test_feeds_are_not_among_the_clients_that_are_bounded(path: Path) -> None:
    """Forty runs at a time do not keep a `status` out; when the server ends they are let go, without their last line."""
    feeds: list[Ticks] = []

    async def run() -> tuple[object, bytes]:
        async with served(path, feeding(feeds)):
            clients = [await fed(path) for _ in range(server.CLIENTS_MAX + 8)]
            answer = await ask(path, "status")()
            (reader, first), *others = clients
            for _, writer in others:
                writer.close()
            async with asyncio.timeout(5):
                await asyncio.gather(*(feed.ended.wait() for feed in feeds[1:]))
        rest = await reader.read()
        first.close()
        await first.wait_closed()
        return answer, rest

    answer, rest = asyncio.run(run())
    assert answer == {"command": "status"}
    assert b"last" not in rest
    assert not feeds[0].ended.is_set()


def test_a_feed_ends_with_its_clients_side(path: Path) -> None:
    """The answer, the lines, the last line, and the connection ends: whatever the client sends meanwhile, and however soon."""
    feeds: list[Ticks] = []

    async def act() -> list[Any]:
        heard = []
        for garbage in (b"", b'{"command": "status"}\n', b"\xff" * 200_000, b"\n" * 1000):
            reader, writer = await fed(path)
            writer.write(garbage)
            lines = [json.loads(await reader.readline()) for _ in range(2)]
            writer.write_eof()
            async with asyncio.timeout(5):
                heard.append(lines + [json.loads(line) for line in (await reader.read()).splitlines()])
            writer.close()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"command": "feed"}\n')
        writer.write_eof()
        async with asyncio.timeout(5):
            soon = [json.loads(line) for line in (await reader.read()).splitlines()]
        writer.close()
        return [*heard, [soon[0], soon[-1]]]

    *heard, soon = with_server(path, act, feeding(feeds))
    assert heard == [[{"tick": 0}, {"tick": 1}, {"last": True}]] * 4
    assert soon == [{"data": {"lines": 2}}, {"last": True}]
    assert all(feed.ended.is_set() for feed in feeds)


def test_a_client_of_a_feed_may_stand_still(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it likes: it is no client that does not read, and others are answered."""
    monkeypatch.setattr(server, "IDLE_SECONDS_MAX", 0.01)
    monkeypatch.setattr(server, "WRITE_SECONDS_MAX", 0.01)
    feeds: list[Ticks] = []
    many = 20_000

    async def act() -> bytes:
        reader, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(b'{"command": "feed"}\n')
        await reader.readline()
        for _ in range(3):
            assert await ask(path, "status")() == {"command": "status"}
            await asyncio.sleep(0.02)  # longer than any patience
        assert not feeds[0].ended.is_set()
        heard = b""
        while f'{{"tick": {many - 1}}}\n'.encode() not in heard:
            heard = heard[-100:] + await reader.read(1 << 16)
        writer.close()
        return heard

    with_server(path, act, feeding(feeds, many))


def test_a_request_may_have_ten_mebibytes(path: Path) -> None:
    """`attach` has the texts of its policies in it; what is larger than the bound is refused (above)."""
    text = "a.test:443/tcp\n" * (10 * 2**20 // 15)
    assert with_server(path, ask(path, "measure", text=text), measure) == len(text)


async def measure(_command: str, arguments: Mapping[str, object]) -> object:
    return len(str(arguments["text"]))
