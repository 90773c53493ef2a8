"""A start takes over the tables of the process before, or makes new ones; between the two nothing is lost and nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from agent.core.events import Detach
from agent.core.types import Orientation, Table, Verdict, packed
from agent.datapath import abi, pins, syscall
from agent.datapath.abi import Reason
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath, Settings, cleanup, pinned_map_id
from agent.datapath.errors import DatapathError
from tests.bpf.lab import CLIENT, HOST, HOST6, Lab, inside
from tests.bpf.scene import (
    HOSTS,
    SERVER,
    Scene,
    answer_one,
    counted,
    echo,
    known_as,
    link_ids,
    programs_on,
    row,
    transparent_socket,
)

pytestmark = pytest.mark.root

_WINDOW = 8


class Stream:
    """Datagrams of one flow to the host's echo, some always on the way; counts what did not come back."""

    def __init__(self, lab: Lab) -> None:
        self.sent = 0
        self.lost = 0
        self._lab = lab
        self._is_ending = False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._thread.join()

    def go_on(self) -> None:
        """Until so many more are sent that all which were on the way have come back, or are lost."""
        with self._moved:
            target = self.sent + 2 * _WINDOW
            assert self._moved.wait_for(lambda: self.sent >= target or self.lost, 10)

    def _run(self) -> None:
        waiting: set[bytes] = set()
        with inside(self._lab.client), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            asker.settimeout(1)
            asker.connect((HOST, 80))
            while not self.lost and (waiting or not self._is_ending):
                try:
                    if len(waiting) < _WINDOW and not self._is_ending:
                        number = b"%d" % self.sent
                        asker.send(number)
                        waiting.add(number)
                        with self._moved:
                            self.sent += 1
                            self._moved.notify()
                    else:
                        waiting.remove(asker.recv(64))
                except OSError:  # nothing for a second, or a refusal
                    with self._moved:
                        self.lost = len(waiting)
                        self._moved.notify()


def _drops(datapath: Datapath) -> int:
    return sum(counter.packets for counter in datapath.counters() if counter.reason.is_drop)


def _pins(scene: Scene) -> list[str]:
    """Of tables, below the directory; the layout's name is left out."""
    found = (pin.relative_to(scene.settings.pin_directory).parts for pin in scene.settings.pin_directory.glob("maps*/*/*"))
    return sorted(f"{directory}/{name}" for directory, _, name in found)


_PINS_WHOLE = sorted(f"maps/{name}" for name in abi.KEPT_MAPS)


def _started(scene: Scene) -> int:
    """A first process that enforces and has gone; the id of its policy map."""
    with scene.opened() as datapath:
        datapath.apply([known_as(HOST, HOSTS)])
        datapath.attach(scene.attach)
        assert not datapath.is_taken_over
        return datapath.policy_map_id


def test_nothing_lost(scene: Scene) -> None:
    """Start after start: rows stay in force, a flow without a row of its own goes on, and not one of its packets is lost."""
    first = _started(scene)
    with inside(scene.lab.host), echo(HOST), Stream(scene.lab) as stream:
        links = link_ids(scene.settings)
        stream.go_on()
        for _ in range(5):
            assert pinned_map_id(scene.settings) == first
            with scene.opened(take_over=True) as datapath:
                assert datapath.is_taken_over
                assert not datapath.why_not
                assert datapath.policy_map_id == first
                stream.go_on()
                datapath.attach(scene.attach)
                stream.go_on()
                assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
                assert scene.lab.asks(socket.SOCK_DGRAM, HOST, 80, b"a") == b"A"  # a new flow, by the row of the first
                datapath.apply([known_as(HOST, None)])
                assert scene.lab.asks(socket.SOCK_DGRAM, HOST, 80, b"a") != b"A"
                stream.go_on()  # an old one, by what is remembered of it
                assert _drops(datapath) == counted(datapath, Reason.DROP_POLICY) > 0
                datapath.apply([known_as(HOST, HOSTS)])
        assert link_ids(scene.settings) == links
        assert _pins(scene) == _PINS_WHOLE
    assert stream.lost == 0
    assert stream.sent > 12 * _WINDOW


def test_without_tcx(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel before TCX the filter is replaced in place, and loses nothing either."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no such attach type")

    monkeypatch.setattr(syscall, "tcx_attach", refuse)
    monkeypatch.setattr(syscall, "tcx_programs", refuse)
    _started(scene)
    with inside(scene.lab.host), echo(HOST), Stream(scene.lab) as stream:
        stream.go_on()
        with scene.opened(take_over=True) as second:
            assert second.is_taken_over
            second.attach(scene.attach)
            assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
            stream.go_on()
            assert _drops(second) == 0
    assert stream.lost == 0


def test_rows(scene: Scene) -> None:
    """The next process reads every row as the one before wrote it, of every table, family and shape."""
    more = [
        known_as(HOST, HOSTS),
        known_as(HOST6, HOSTS + 1),
        known_as("198.18.0.0/15", HOSTS + 2),
        known_as("2001:db8::/32", HOSTS + 3),
        *(known_as(f"10.98.{i >> 8}.{i & 255}", HOSTS + 4) for i in range(900)),
        row(HOSTS + 1, 0, 0, Verdict.DENY, 0),
        row(HOSTS + 1, 132, 0x1F90, Verdict.ALLOW),
        row(HOSTS + 2, 17, 0, Verdict.ALLOW, 0),
        row(HOSTS + 3, 6, 0x8000, Verdict.ALLOW, 1),
    ]
    with scene.opened() as datapath:
        assert not any(datapath.apply(more))
        datapath.attach(scene.attach)
    expected: dict[Table, dict[object, object]] = {table: {} for table in Table}
    for write in (*scene.rows(), *more):
        expected[write.table][write.key] = write.value
    with scene.opened(take_over=True) as second:
        assert second.rows() == expected
        assert second.apply([known_as(HOST, None)]) == [0]
        del expected[Table.IPCACHE][known_as(HOST, None).key]
        assert second.rows() == expected


def test_what_was_seen_goes_on(scene: Scene) -> None:
    """Counters, flows, times and events of before, and of while nobody ran, are there."""
    with inside(scene.lab.host), echo(HOST):
        _started(scene)
        assert scene.lab.asks(socket.SOCK_DGRAM, HOST, 80, b"a") == b"A"
        assert scene.lab.asks(socket.SOCK_STREAM, HOST, 443, b"a") == "ConnectionRefusedError"
        with scene.opened(take_over=True) as second:
            (flow,) = second.flows()
            assert (flow.local, flow.remote, flow.remote_port) == (packed(CLIENT), packed(HOST), 80)
            assert second.flow_identities() == {HOSTS}
            assert second.last_seen(1, packed(HOST)) is not None
            assert second.rule_counters()[3] == (2, 2 * 43)
            (event,) = second.read_events()
            assert (event.reason, event.destination_port) == (Reason.DROP_POLICY, 443)
            second.attach(scene.attach)
            assert scene.lab.asks(socket.SOCK_STREAM, HOST, 443, b"a") == "ConnectionRefusedError"
            assert counted(second, Reason.DROP_POLICY) == 2
            assert len(second.read_events()) == 1


def test_questions_while_nobody_listens(scene: Scene) -> None:
    """The sockets of a process that is gone answer nothing, and say so; those of the next one answer, through its own gate."""
    with scene.opened() as datapath:
        listener = transparent_socket(0)
        datapath.set_dns_sockets({0: listener.fileno()})
        datapath.attach(scene.attach)
    listener.close()
    assert scene.lab.asks(socket.SOCK_DGRAM, SERVER, 53, b"question") == "OSError"
    with scene.opened(take_over=True) as second, transparent_socket(0) as listener:
        assert counted(second, Reason.DROP_NO_SOCKET) == 1
        assert second.gate_state() is HookState.FIRST  # that of before, with the tables taken over
        second.set_dns_sockets({0: listener.fileno()})
        assert second.gate_state() is HookState.FIRST
        proxy = threading.Thread(target=answer_one, args=(listener, 0))
        proxy.start()
        said = scene.lab.asks(socket.SOCK_DGRAM, SERVER, 53, b"question")
        proxy.join()
        assert said == b"from " + SERVER.encode() + b":question"
        second.attach(scene.attach)
        assert second.detach_others() == []
        assert second.gate_state() is HookState.FIRST


def test_a_socket_that_is_taken_over_stays_in_its_row(scene: Scene) -> None:
    """Nothing is written for it, and its row still goes when it is closed; another one takes the place of the first."""
    with scene.opened() as datapath, transparent_socket(1) as other:
        listener = transparent_socket(0)
        for _ in range(2):
            datapath.set_dns_sockets({0: listener.fileno()})
        row = functools.partial(syscall.map_lookup, datapath.tables._rows_by_map["dns_sockets"].fd, value_size=8)
        assert row(abi.U32.pack(0)) == listener.getsockopt(socket.SOL_SOCKET, 57, 8)
        listener.close()
        assert row(abi.U32.pack(0)) is None
        datapath.set_dns_sockets({1: other.fileno()})
        assert row(abi.U32.pack(1)) == other.getsockopt(socket.SOL_SOCKET, 57, 8)


def test_others_are_detached(scene: Scene) -> None:
    """What the process before had attached, and this one does not want, is let go."""
    _started(scene)
    with scene.opened(take_over=True) as second:
        second.set_dns_sockets({})
        assert second.detach_others() == [scene.lab.interface]
        assert second.gate_state() is HookState.FIRST
        assert not (scene.settings.pin_directory / "links" / f"{scene.lab.ifindex}-ingress").exists()


def test_not_asked(scene: Scene) -> None:
    """Who cannot explain the rows gets tables of his own; the old ones count until his first hook, and are gone after it."""
    first = _started(scene)
    with scene.opened() as second:
        assert not second.is_taken_over
        assert second.policy_map_id != first
        assert pinned_map_id(scene.settings) == first
        assert scene.lab.ping(HOST)
        second.attach(scene.attach)
        assert not scene.lab.ping(HOST)
        assert pinned_map_id(scene.settings) == second.policy_map_id
    assert _pins(scene) == _PINS_WHOLE


def _assert_made_anew(scene: Scene, settings: Settings, first: int, why_not: str) -> None:
    """A start with these settings says why it makes new tables; they replace the old ones at its first hook."""
    anew = dataclasses.replace(scene, settings=settings)
    with inside(scene.lab.host):
        assert pinned_map_id(settings) is None
        with contextlib.closing(Datapath.open(settings, take_over=True)) as second:
            assert (second.is_taken_over, second.why_not) == (False, why_not)
            assert second.policy_map_id != first
            assert all(not rows for rows in second.rows().values())
            assert scene.lab.ping(HOST)  # by the programs and tables of before
            second.apply(scene.rows())
            second.attach(scene.attach)
            assert not scene.lab.ping(HOST)
            assert pinned_map_id(settings) == second.policy_map_id
        assert _pins(scene) == _PINS_WHOLE
        assert len(list((settings.pin_directory / "maps").iterdir())) == 1
    with anew.opened(take_over=True) as third:
        assert third.is_taken_over


def test_nothing_pinned(scene: Scene) -> None:
    """The first start of all has nothing to take over."""
    with inside(scene.lab.host):
        assert pinned_map_id(scene.settings) is None
        with contextlib.closing(Datapath.open(scene.settings, take_over=True)) as first:
            assert (first.is_taken_over, first.why_not) == (False, "no maps are pinned")
    assert not scene.settings.pin_directory.exists()


def test_other_size(scene: Scene) -> None:
    """A table of another size is not taken over, nor is any other then."""
    first = _started(scene)
    larger = dataclasses.replace(scene.settings, flow_rows=2_048)
    _assert_made_anew(scene, larger, first, "the pinned map flows is made for 1024 rows, not for 2048")


def test_other_layout(scene: Scene) -> None:
    """Tables of other declarations are not taken over, whatever their sizes."""
    first = _started(scene)
    (place,) = (scene.settings.pin_directory / "maps").iterdir()
    place.rename(place.with_name("0123456789ab"))
    _assert_made_anew(scene, scene.settings, first, "the pinned maps have another layout")


def test_other_shape(scene: Scene) -> None:
    """A map of another kind under a known name is not one of ours."""
    first = _started(scene)
    pin = next((scene.settings.pin_directory / "maps").glob("*/groups"))
    pin.unlink()
    hash_of_longer_values = syscall.map_create(1, 4, 16, 4_096, 0, "groups")
    syscall.pin(hash_of_longer_values, str(pin))
    os.close(hash_of_longer_values)
    _assert_made_anew(scene, scene.settings, first, "the pinned map groups has another shape")


def test_upgrade_under_traffic(scene: Scene) -> None:
    """Tables of another layout take the place of the old ones without a gap: a connection goes on, its flow opened anew by the
    client's next packet (what was on its way to the client at that moment is sent again), and of a stream that is denied not
    one packet gets through, before, between or after.
    """
    _started(scene)
    (place,) = (scene.settings.pin_directory / "maps").iterdir()
    with inside(scene.lab.host), _denied_stream(scene) as denied, _Conversation(scene.lab) as conversation:
        for number in range(5):
            place.rename(place.with_name(f"{number:012x}"))
            with scene.opened(take_over=True) as second:
                assert not second.is_taken_over
                assert not any(second.apply([*scene.rows(), known_as(HOST, HOSTS)]))
                conversation.go_on()
                assert not list(second.flows())  # the programs of before judge, by their own tables
                second.attach(scene.attach)
                conversation.go_on()
                assert {flow.remote_port for flow in second.flows()} == {80}
                assert {counter.reason for counter in second.counters() if counter.reason.is_drop} <= {Reason.DROP_POLICY}
            assert len(list((scene.settings.pin_directory / "maps").iterdir())) == 1
    assert denied.sent > 100
    assert denied.heard == 0


class _Conversation:
    """One connection of the client to port 80 of the host, on which a byte always goes to and fro."""

    def __init__(self, lab: Lab) -> None:
        self._moved = threading.Condition()
        self._exchanges = 0
        self._is_ending = False
        with inside(lab.host):
            self._listener = socket.create_server((HOST, 80))
        with inside(lab.client):
            self._client = socket.create_connection((HOST, 80), timeout=10)
        self._server, _ = self._listener.accept()
        self._threads = [threading.Thread(target=self._answer), threading.Thread(target=self._talk)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        for thread in reversed(self._threads):
            thread.join()
        for each in (self._client, self._server, self._listener):
            each.close()

    def go_on(self) -> None:
        """Until a byte that is sent from now on has come back."""
        with self._moved:
            target = self._exchanges + 2
            assert self._moved.wait_for(lambda: self._exchanges >= target, 10)

    def _talk(self) -> None:
        while not self._is_ending:
            self._client.sendall(b"x")
            if self._client.recv(1) != b"x":
                return
            with self._moved:
                self._exchanges += 1
                self._moved.notify()
        self._client.shutdown(socket.SHUT_WR)

    def _answer(self) -> None:
        while said := self._server.recv(1):
            self._server.sendall(said)


class _DeniedStream:
    """Datagrams to a port of the host that no rule allows, each from a port of its own; counts what arrives there."""

    def __init__(self, lab: Lab) -> None:
        self.sent = 0
        self.heard = 0
        self.is_ending = threading.Event()
        self._lab = lab

    def send(self) -> None:
        with inside(self._lab.client):
            while not self.is_ending.wait(0.001):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"denied", (HOST, 81))
                self.sent += 1


@contextlib.contextmanager
def _denied_stream(scene: Scene) -> Iterator[_DeniedStream]:
    stream = _DeniedStream(scene.lab)
    with inside(scene.lab.host), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind((HOST, 81))
        thread = threading.Thread(target=stream.send)
        thread.start()
        try:
            yield stream
        finally:
            stream.is_ending.set()
            thread.join()
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while listener.recv(64):
                    stream.heard += 1


@pytest.mark.parametrize("name", ["endpoints", "policy", "lost", "events", "dns_sockets"])
def test_torn(scene: Scene, name: str) -> None:
    """Of tables that are not whole nothing is used, and nothing is left."""
    first = _started(scene)
    next((scene.settings.pin_directory / "maps").glob(f"*/{name}")).unlink()
    missing = f"the map {name} is not among the pinned ones (No such file or directory)"
    _assert_made_anew(scene, scene.settings, first, missing)
    with inside(scene.lab.host):
        cleanup(scene.settings)
        assert not scene.settings.pin_directory.exists()


def test_anybody_may_write(scene: Scene) -> None:
    """Tables that somebody else could have put there are not believed."""
    first = _started(scene)
    maps = scene.settings.pin_directory / "maps"
    maps.chmod(0o777)
    _assert_made_anew(scene, scene.settings, first, f"others than root may write to {maps}")
    shutil.chown(scene.settings.pin_directory, 65_534)
    with inside(scene.lab.host):
        assert pinned_map_id(scene.settings) is None


@contextlib.contextmanager
def _another_process(scene: Scene, *, take_over: bool) -> Iterator[int]:
    """It has opened the datapath, and is killed at the end; the id of its policy map."""
    sizes = {field: value for field, value in dataclasses.asdict(scene.settings).items() if field.endswith("_rows")}
    command = [sys.executable, "-m", "tests.bpf.opener", str(scene.settings.pin_directory), json.dumps(sizes)]
    root = Path(__file__).parents[2]
    with inside(scene.lab.host):
        process = subprocess.Popen(
            [*command, *(["take-over"] if take_over else [])], stdout=subprocess.PIPE, text=True, cwd=root
        )
    assert process.stdout
    with process.stdout:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("take_over", [True, False])
def test_killed_before_its_first_hook(scene: Scene, take_over: bool) -> None:
    """kill -9 between opening and attaching leaves what was in force in force, for the next to take over; nothing else."""
    first = _started(scene)
    with _another_process(scene, take_over=take_over) as its:
        assert (its == first) is take_over
        assert scene.lab.ping(HOST)
    assert scene.lab.ping(HOST)
    assert not scene.lab.ping(HOST6)
    with scene.opened(take_over=True) as third:
        assert third.is_taken_over
        assert third.policy_map_id == first
        assert _pins(scene) == _PINS_WHOLE
        third.attach(scene.attach)
        assert scene.lab.ping(HOST)


def test_published_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while new tables take the place of old ones: those under the known name are whole, and the new ones."""

    def die(path: Path) -> None:
        raise KeyboardInterrupt(str(path))

    _started(scene)
    with scene.opened() as second:
        new = second.policy_map_id
        with monkeypatch.context() as patched:
            patched.setattr(pins, "remove", die)
            with pytest.raises(KeyboardInterrupt):
                second.attach(scene.attach)
        second._is_published = True  # whoever is killed clears nothing away
    assert _pins(scene) == sorted([*_PINS_WHOLE, *(pin.replace("maps", "maps-new", 1) for pin in _PINS_WHOLE)])
    with scene.opened(take_over=True) as third:
        assert third.policy_map_id == new
        assert _pins(scene) == _PINS_WHOLE


def test_without_exchange(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel that cannot exchange names new tables take the place of old ones all the same."""

    def cannot(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(pins._LIBC, "renameat2", cannot)
    _started(scene)
    with scene.opened() as second:
        second.attach(scene.attach)
        assert pinned_map_id(scene.settings) == second.policy_map_id
    assert _pins(scene) == _PINS_WHOLE


def test_failed_start(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program the kernel refuses: tables, hooks, device and descriptors are as they were."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EACCES, "the verifier says no")

    first = _started(scene)
    with inside(scene.lab.host):
        with contextlib.closing(Datapath.open(scene.settings, take_over=True)) as second:
            rows = second.rows()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with monkeypatch.context() as patched:
            patched.setattr(syscall, "program_load", refuse)
            with pytest.raises(DatapathError, match="cannot load the program"):
                Datapath.open(scene.settings, take_over=True)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert pinned_map_id(scene.settings) == first
        assert _pins(scene) == _PINS_WHOLE
        with contextlib.closing(Datapath.open(scene.settings, take_over=True)) as third:
            assert third.rows() == rows
            assert third.gate_state() is HookState.ABSENT
        assert "ng-gate" in {name for _, name in socket.if_nameindex()}
    assert scene.lab.ping(HOST)
    assert not scene.lab.ping(HOST6)


@pytest.mark.usefixtures("tcx")
def test_failed_swap(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that cannot be taken over keeps its program: an interface that was judged is never left open."""
    swap, swapped = syscall.link_update, []

    def refuse_second(link: int, program: int) -> None:
        swapped.append(link)
        if len(swapped) == 2:
            raise OSError(errno.ENOMEM, "no memory")
        swap(link, program)

    _started(scene)
    with scene.opened(take_over=True) as second:
        with monkeypatch.context() as patched:
            patched.setattr(syscall, "link_update", refuse_second)
            with pytest.raises(DatapathError, match="cannot put the program on the egress"):
                second.attach(scene.attach)
        assert scene.lab.ping(HOST)
        assert not scene.lab.ping(HOST6)
        second.attach(scene.attach)
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        second.detach(Detach(1, scene.lab.interface, scene.attach.ifindex))
        assert scene.lab.ping(HOST6)


def test_cleanup(scene: Scene) -> None:
    """After two take-overs cleanup leaves nothing, and another start begins from nothing."""
    _started(scene)
    for _ in range(2):
        with scene.opened(take_over=True) as datapath:
            datapath.set_dns_sockets({})
            datapath.attach(scene.attach)
    with inside(scene.lab.host):
        assert cleanup(scene.settings) == [scene.lab.interface]
        assert not scene.settings.pin_directory.exists()
        assert {name for _, name in socket.if_nameindex()} == {"lo", scene.lab.interface}
        assert programs_on(scene) == []
        assert pinned_map_id(scene.settings) is None
