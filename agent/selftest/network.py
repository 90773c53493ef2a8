"""Three network namespaces, and what may be left of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agent.holder.client import dismiss
from agent.runner.kernel import CLONE_NEWNET, setns

TOOLS: Final = ("ip", "setpriv")
CLIENT: Final = ("192.0.2.2", "2001:db8:1::2")
NAME_SERVER: Final = "198.51.100.53"
SERVERS: Final = ("198.51.100.0/24", "198.18.0.0/15", "2001:db8:99::/48")

_STEM: Final = "ngself"
_NAMESPACES: Final = Path("/run/netns")
_PINS: Final = Path("/sys/fs/bpf")
_READY_S_MAX: Final = 10.0
_SETTINGS: Final = "net/ipv6/conf/all/accept_dad", "net/ipv6/conf/default/accept_dad"  # addresses can be used at once
_FORWARDING: Final = "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"

# client, host, internet; for `ip -batch`.
_LINES: Final = {
    "host": """
        link set lo up
        link add ep0 type veth peer name eth0 netns {client}
        link add up0 type veth peer name eth0 netns {internet}
        addr add 192.0.2.1/30 dev ep0
        addr add 2001:db8:1::1/64 dev ep0
        addr add 203.0.113.1/24 dev up0
        addr add 2001:db8:2::1/64 dev up0
        link set ep0 up
        link set up0 up
        route add default via 203.0.113.2
        route add ::/0 via 2001:db8:2::2
    """,
    "client": """
        link set lo up
        addr add 192.0.2.2/30 dev eth0
        addr add 2001:db8:1::2/64 dev eth0
        link set eth0 up
        route add default via 192.0.2.1
        route add ::/0 via 2001:db8:1::1
    """,
    "internet": """
        link set lo up
        addr add 203.0.113.2/24 dev eth0
        addr add 2001:db8:2::2/64 dev eth0
        link set eth0 up
        route add 192.0.2.0/24 via 203.0.113.1
        route add 2001:db8:1::/48 via 2001:db8:2::1
        route add local 198.51.100.0/24 dev lo
        route add local 198.18.0.0/15 dev lo
        route add local 2001:db8:99::/48 dev lo
    """,
}


class Lacking(Exception):
    """The environment lacks something; the text says what."""


class Network:
    """Use as a context manager. directory: for files. pins: where an agent in it has its own."""

    def __init__(self) -> None:
        stem = f"{_STEM}{os.getpid()}"
        self.namespaces = {place: f"{stem}-{place}" for place in _LINES}
        self.pins = _PINS / stem
        self.directory = Path()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _remove_leftovers()
        with contextlib.ExitStack() as undo:
            self.directory = Path(tempfile.mkdtemp(prefix=f"{_STEM}{os.getpid()}-"))
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            undo.callback(_remove_pins, self.pins)
            for place, namespace in self.namespaces.items():
                _ip("netns", "add", namespace)
                undo.callback(_remove_namespace, namespace)
                self._settle(place)
            for place, lines in _LINES.items():
                with self.inside(place):
                    _ip("-batch", "-", given=lines.format(**self.namespaces))
            self._await_links()
            undo.callback(dismiss, self.control)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # A second, impatient Ctrl-C must not end the removal.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        self._undo.close()
        for number, handler in before.items():
            signal.signal(number, handler)

    @property
    def control(self) -> Path:
        return self.directory / "control.sock"

    @contextlib.contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """This thread is in the network of the client, the host or the internet; so is what it starts, and its sockets stay."""
        with contextlib.ExitStack() as stack:
            own, there = (
                stack.enter_context(path.open("rb"))
                for path in (Path("/proc/thread-self/ns/net"), _NAMESPACES / self.namespaces[place])
            )
            setns(there.fileno(), CLONE_NEWNET)
            stack.callback(setns, own.fileno(), CLONE_NEWNET)
            yield

    def _settle(self, place: str) -> None:
        with self.inside(place):
            for name in (*_SETTINGS, *(_FORWARDING if place == "host" else ())):
                path = Path("/proc/sys", name)
                if not path.exists():
                    raise Lacking("this kernel has no IPv6")
                path.write_text("1" if name in _FORWARDING else "0", encoding="ascii")

    def _await_links(self) -> None:
        """Until each interface has seen its carrier: before, an IPv6 route through it leads nowhere."""
        until = time.monotonic() + _READY_S_MAX
        for place, devices in {"host": ("ep0", "up0"), "client": ("eth0",), "internet": ("eth0",)}.items():
            with self.inside(place):
                for device in devices:
                    while not _ip("-6", "-o", "addr", "show", "dev", device, "scope", "link", "-tentative"):
                        if time.monotonic() > until:
                            raise Lacking(f"{device} of the {place} has no carrier after {_READY_S_MAX:g} s")
                        time.sleep(0.005)


def _ip(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(["ip", *arguments], input=given, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise Lacking(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _remove_namespace(namespace: str) -> None:
    """With all that still runs in it: a namespace lives on while somebody is inside."""
    with contextlib.suppress(Lacking):
        for pid in map(int, _ip("netns", "pids", namespace).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "del", namespace)


def _remove_pins(directory: Path) -> None:
    """A pin is a name: unlinking is enough. rmtree would open what is pinned."""
    for path, directories, files in os.walk(directory, topdown=False):
        for name in files:
            Path(path, name).unlink(missing_ok=True)
        for name in directories:
            Path(path, name).rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()


def _remove_leftovers() -> None:
    """Of selftests whose process is gone."""

    def left_in(directory: Path) -> list[Path]:
        found = ((path, re.match(rf"{_STEM}(\d+)(-|$)", path.name)) for path in directory.glob(f"{_STEM}*"))
        return [path for path, match in found if match is not None and not Path("/proc", match[1]).exists()]

    for path in left_in(Path(tempfile.gettempdir())):
        dismiss(path / "control.sock")
        shutil.rmtree(path, ignore_errors=True)
    for path in left_in(_NAMESPACES):
        _remove_namespace(path.name)
    for path in left_in(_PINS):
        _remove_pins(path)
