"""The facade on a real kernel: real packets through real hooks, restarts, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from agent.core.events import Attach, Detach
from agent.core.types import (
    EndpointValue,
    Orientation,
    OwnAddressKey,
    Table,
    Write,
    packed,
)
from agent.datapath import syscall
from agent.datapath.abi import Reason
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath, cleanup
from agent.datapath.errors import DatapathError
from tests.bpf.lab import CLIENT, HOST, HOST6, inside
from tests.bpf.scene import (
    HOSTS,
    SERVER,
    SERVER6,
    Scene,
    answer_one,
    counted,
    echo,
    known_as,
    link_ids,
    programs_on,
    transparent_socket,
)

pytestmark = pytest.mark.root


@pytest.mark.parametrize(("address", "protocol"), [(HOST, 1), (HOST6, 58)])
def test_packets(scene: Scene, address: str, protocol: int) -> None:
    """Before its row an address is closed, by a row it opens, without the row it is closed again but for what runs."""
    with scene.opened() as datapath, echo(address):
        assert scene.lab.ping(address)
        datapath.attach(scene.attach)
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST

        assert not scene.lab.ping(address)
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 80, b"a") != b"A"
        dropped = [event for event in datapath.read_events() if event.reason is Reason.DROP_POLICY]
        assert {(event.protocol, event.destination, event.endpoint) for event in dropped} == {
            (protocol, packed(address), 1),
            (17, packed(address), 1),
        }
        assert counted(datapath, Reason.DROP_POLICY) == len(dropped)

        assert datapath.apply([known_as(address, HOSTS)]) == [0]
        assert scene.lab.ping(address)
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 80, b"a") == b"A"
        assert datapath.last_seen(1, packed(address)) is not None
        assert datapath.flow_identities() == {HOSTS}
        assert datapath.rule_counters()[3][0] >= 4

        assert datapath.apply([known_as(address, None)]) == [0]
        assert scene.lab.ping(address)  # the same flow: an echo is one by its identifier
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 80, b"a") != b"A"


@pytest.mark.parametrize(("address", "error"), [(HOST, "OSError"), (HOST6, "PermissionError")])
def test_refusal(scene: Scene, address: str, error: str) -> None:
    """A denied client hears of it at once: connect() is refused, a datagram is answered with an error."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        assert scene.lab.asks(socket.SOCK_STREAM, address, 443, b"a") == "ConnectionRefusedError"
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 443, b"a") == error
        assert counted(datapath, Reason.PASS_ANSWER) == counted(datapath, Reason.DROP_POLICY) == 2


def test_uplink(scene: Scene) -> None:
    """An uplink's hooks are the other way round: the host's own packets are judged where they leave, and refused there."""
    with inside(scene.lab.client):
        ifindex = socket.if_nametoindex("eth0")
        datapath = Datapath.open(scene.settings)
        try:
            datapath.apply([*scene.rows(), Write(Table.ENDPOINTS, ifindex, EndpointValue(1, 1, 1, Orientation.UPLINK))])
            datapath.attach(Attach(1, "eth0", ifindex, Orientation.UPLINK))
            assert datapath.hook_state(ifindex, Orientation.UPLINK) is HookState.FIRST
            assert not scene.lab.ping(HOST)
            assert scene.lab.asks(socket.SOCK_STREAM, HOST, 443, b"a") == "ConnectionRefusedError"
            assert scene.lab.asks(socket.SOCK_DGRAM, HOST6, 443, b"a") == "PermissionError"
            datapath.apply([known_as(HOST, HOSTS)])
            assert scene.lab.ping(HOST)
        finally:
            datapath.close()
            cleanup(scene.settings)


def test_spoofed_source(scene: Scene) -> None:
    """A second address of the client, of which the endpoint's rows know nothing, gets nowhere."""
    with scene.opened() as datapath:
        datapath.apply([known_as(HOST, HOSTS)])
        datapath.attach(scene.attach)
        assert not any(datapath.apply([Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT)), None)]))
        assert not scene.lab.ping(HOST)
        assert counted(datapath, Reason.DROP_SOURCE) + counted(datapath, Reason.DROP_NEIGHBOUR_CLAIM) > 0


@pytest.mark.parametrize("server", [SERVER, SERVER6, HOST, HOST6])
@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_questions_reach_the_proxy(scene: Scene, kind: socket.SocketKind, server: str) -> None:
    """DNS of both families and transports, to a foreign server or the host itself, arrives at the proxy and is answered."""
    key = (2 if ":" in server else 0) | (kind is socket.SOCK_STREAM)
    with scene.opened() as datapath, transparent_socket(key) as listener:
        assert datapath.gate_state() is HookState.ABSENT
        datapath.set_dns_sockets({key: listener.fileno()})
        assert datapath.gate_state() is HookState.FIRST
        datapath.attach(scene.attach)
        proxy = threading.Thread(target=answer_one, args=(listener, key))
        proxy.start()
        answer = scene.lab.asks(kind, server, 53, b"question")
        proxy.join()
        assert answer == b"from " + server.encode() + b":question"
        assert counted(datapath, Reason.PASS_REDIRECT) > 0
        assert not list(datapath.flows())


def test_no_listener(scene: Scene) -> None:
    """With the proxy's socket gone, a question is dropped with a reason of its own; nobody else gets it."""
    with scene.opened() as datapath:
        listener = transparent_socket(0)
        datapath.set_dns_sockets({0: listener.fileno()})
        datapath.attach(scene.attach)
        listener.close()
        assert scene.lab.asks(socket.SOCK_DGRAM, SERVER, 53, b"question") == "OSError"  # at once, not a timeout
        assert counted(datapath, Reason.DROP_NO_SOCKET) > 0


def test_restart_in_place(scene: Scene) -> None:
    """The process goes, the kernel goes on; the next one swaps its programs into the same places, with its own tables."""
    with scene.opened() as datapath:
        datapath.apply([known_as(HOST, HOSTS)])
        datapath.attach(scene.attach)
        links = link_ids(scene.settings)
    assert scene.lab.ping(HOST)
    with scene.opened() as second:
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.ABSENT
        assert scene.lab.ping(HOST)  # judged by the program of the first
        second.attach(scene.attach)
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        assert not scene.lab.ping(HOST)
    assert link_ids(scene.settings) == links
    assert sorted(path.name for path in scene.settings.pin_directory.iterdir()) == ["links" if links else "filters", "maps"]


@pytest.mark.usefixtures("tcx")
def test_foreign_program_in_front(scene: Scene) -> None:
    """A program that somebody puts before ours is seen; ours is put before those that were there."""
    with scene.opened() as datapath:
        first = syscall.tcx_attach(datapath._loaded.fds_by_program["gate"], scene.attach.ifindex, syscall.TCX_INGRESS)
        datapath.attach(scene.attach)
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        second = syscall.tcx_attach(datapath._loaded.fds_by_program["to_endpoint"], scene.attach.ifindex, syscall.TCX_INGRESS)
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.NOT_FIRST
        os.close(first)
        os.close(second)


def test_detach(scene: Scene) -> None:
    """Detached, the interface is as it was before."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        assert not scene.lab.ping(HOST)
        datapath.detach(Detach(1, scene.lab.interface, scene.attach.ifindex))
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.ABSENT
        assert scene.lab.ping(HOST)


def test_others_are_detached(scene: Scene) -> None:
    """What a process before had attached and this one does not want is found and let go."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
    with scene.opened() as second:
        assert second.detach_others() == [scene.lab.interface]
        assert scene.lab.ping(HOST)


def test_failed_attach(scene: Scene) -> None:
    """An interface that is not there is an error in one sentence, and leaves no pin."""
    with scene.opened() as datapath:
        with pytest.raises(DatapathError, match="ingress of gone0"):
            datapath.attach(Attach(1, "gone0", 9_999, Orientation.BEHIND))
        assert sorted(path.name for path in scene.settings.pin_directory.iterdir()) == ["maps-new"]


def test_failed_start_leaves_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program the kernel refuses: no pin, no device, no descriptor is left."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EACCES, "the verifier says no")

    with scene.opened():
        pass
    with inside(scene.lab.host):
        cleanup(scene.settings)
        before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(syscall, "program_load", refuse)
        with pytest.raises(DatapathError, match="cannot load the program"):
            Datapath.open(scene.settings)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert not scene.settings.pin_directory.exists()
        assert "ng-gate" not in {name for _, name in socket.if_nameindex()}


def test_cleanup(scene: Scene) -> None:
    """After cleanup the host has no pin, device, rule or program of ours, even when a pin is missing already."""
    with scene.opened() as datapath:
        datapath.set_dns_sockets({})
        datapath.attach(scene.attach)
    next((scene.settings.pin_directory / "maps").glob("*/*")).unlink()
    with inside(scene.lab.host):
        assert cleanup(scene.settings) == [scene.lab.interface]
        assert not scene.settings.pin_directory.exists()
        assert {name for _, name in socket.if_nameindex()} == {"lo", scene.lab.interface}
        assert programs_on(scene) == []
        assert cleanup(scene.settings) == []
    assert scene.lab.ping(HOST)


def test_full_map(scene: Scene) -> None:
    """A write the map has no room for is an errno of that write alone; deleting what is not there is none."""
    with scene.opened() as datapath:
        rows = [known_as(f"10.98.{i >> 8}.{i & 255}", HOSTS) for i in range(1_024)]
        assert datapath.apply(rows) == [0] * 1_024
        one_more = known_as("10.97.0.1", HOSTS)
        writes = [one_more, rows[0]._replace(value=None), one_more, known_as("10.96.0.1", None)]
        assert datapath.apply(writes) == [errno.ENOSPC, 0, 0, 0]
        assert datapath.fill(Table.IPCACHE) == (1_024, 1_024)
        assert sum(1 for _ in datapath.dump(Table.IPCACHE)) == 1_024


def test_without_tcx(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel before TCX the clsact filter does the same: enforced, replaced in place, removed without a trace."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no such attach type")

    monkeypatch.setattr(syscall, "tcx_attach", refuse)
    monkeypatch.setattr(syscall, "tcx_programs", refuse)
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        assert not scene.lab.ping(HOST)
        assert scene.lab.asks(socket.SOCK_STREAM, HOST, 443, b"a") == "ConnectionRefusedError"
    with scene.opened() as second:
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.ABSENT
        second.apply([known_as(HOST, HOSTS)])
        second.attach(scene.attach)
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        assert scene.lab.ping(HOST)
        second.detach(Detach(1, scene.lab.interface, scene.attach.ifindex))
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.ABSENT
        second.attach(scene.attach)
    with inside(scene.lab.host):
        assert cleanup(scene.settings) == [scene.lab.interface]
        assert _qdiscs(scene.lab.interface) == {"noqueue"}


def _qdiscs(interface: str) -> set[str]:
    said = subprocess.run(["tc", "qdisc", "show", "dev", interface], check=True, capture_output=True, text=True, timeout=20)
    return {line.split()[1] for line in said.stdout.splitlines()}


def test_within_a_running_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent attaches from its event loop, also where that takes netlink."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no such attach type")

    async def attach(datapath: Datapath) -> None:
        datapath.attach(scene.attach)
        assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST

    with scene.opened() as datapath:
        asyncio.run(attach(datapath))
        datapath.detach(Detach(1, scene.lab.interface, scene.attach.ifindex))
        monkeypatch.setattr(syscall, "tcx_attach", refuse)
        asyncio.run(attach(datapath))
