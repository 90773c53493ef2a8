"""The facade on a real kernel: real packets through real hooks, restarts, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.events import Attach, Detach
from agent.core.types import (
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Orientation,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Verdict,
    Write,
    packed,
)
from agent.datapath import syscall
from agent.datapath.abi import Reason
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath, Settings, cleanup
from agent.datapath.errors import DatapathError
from tests.bpf import lab as labs
from tests.bpf.lab import CLIENT, CLIENT6, HOST, HOST6, Lab, inside

pytestmark = pytest.mark.root

_HOSTS = 1 << 24
_SERVER, _SERVER6 = "203.0.113.53", "2001:db8:53::53"


@dataclass(frozen=True)
class Scene:
    lab: Lab
    settings: Settings

    @property
    def attach(self) -> Attach:
        return Attach(1, self.lab.interface, self.lab.ifindex, Orientation.BEHIND)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Datapath]:
        """A datapath with the endpoint's rows, in the host's namespace; not yet attached."""
        with inside(self.lab.host):
            datapath = Datapath.open(self.settings)
            try:
                assert not any(datapath.apply(self.rows()))
                yield datapath
            finally:
                datapath.close()

    def rows(self) -> list[Write]:
        return [
            Write(Table.ENDPOINTS, self.attach.ifindex, EndpointValue(1, 1, 1, Orientation.BEHIND)),
            Write(Table.GROUPS, 1, GroupValue(1, default_deny_egress=True, default_deny_ingress=True, audit=False)),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT)), True),
            Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT6)), True),
            *(_row(0, protocol, 53, Verdict.REDIRECT) for protocol in (6, 17)),
            *(_row(_HOSTS, protocol, kind, Verdict.ALLOW) for protocol, kind in ((1, 8), (58, 128), (6, 80), (17, 80))),
        ]


def _row(identity: int, protocol: int, port: int, verdict: Verdict) -> Write:
    return Write(Table.POLICY, PolicyKey(1, identity, Direction.EGRESS, protocol, port, 16), PolicyValue(verdict, 3))


def _is(address: str, identity: int | None) -> Write:
    return Write(Table.IPCACHE, IpcacheKey(1, Prefix.parse(address)), identity)


@pytest.fixture
def scene() -> Iterator[Scene]:
    number = os.getpid()
    settings = Settings(
        pin_directory=Path(f"/sys/fs/bpf/namegate-test-{number}"),
        ipcache_rows=1_024,
        policy_rows=1_024,
        flow_rows=1_024,
        fragment_rows=256,
        last_seen_rows=1_024,
    )
    with labs.lab() as lab:
        try:
            yield Scene(lab, settings)
        finally:
            with inside(lab.host):
                cleanup(settings)


def _counted(datapath: Datapath, reason: Reason) -> int:
    return sum(counter.packets for counter in datapath.counters() if counter.reason is reason)


@contextlib.contextmanager
def _echo(*addresses: str) -> Iterator[None]:
    """UDP echo at port 80, in the namespace of the caller."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for address in addresses:
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
            stack.enter_context(made)
            made.bind((address, 80))
            sockets.append(made)
        stop_reading, stop = os.pipe()
        poll = select.poll()
        for fd in (stop_reading, *(each.fileno() for each in sockets)):
            poll.register(fd, select.POLLIN)

        def serve() -> None:
            while True:
                ready = {fd for fd, _ in poll.poll(30_000)}
                if stop_reading in ready or not ready:
                    return
                for each in (each for each in sockets if each.fileno() in ready):
                    data, asker = each.recvfrom(512)
                    each.sendto(data.upper(), asker)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            os.write(stop, b"x")
            thread.join()
            os.close(stop)
            os.close(stop_reading)


@pytest.mark.parametrize(("address", "protocol"), [(HOST, 1), (HOST6, 58)])
def test_packets(scene: Scene, address: str, protocol: int) -> None:
    """Before its row an address is closed, by a row it opens, without the row it is closed again but for what runs."""
    with scene.opened() as datapath, _echo(address):
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
        assert _counted(datapath, Reason.DROP_POLICY) == len(dropped)

        assert datapath.apply([_is(address, _HOSTS)]) == [0]
        assert scene.lab.ping(address)
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 80, b"a") == b"A"
        assert datapath.last_seen(1, packed(address)) is not None
        assert datapath.flow_identities() == {_HOSTS}
        assert datapath.rule_counters()[3][0] >= 4

        assert datapath.apply([_is(address, None)]) == [0]
        assert scene.lab.ping(address)  # the same flow: an echo is one by its identifier
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 80, b"a") != b"A"


@pytest.mark.parametrize(("address", "error"), [(HOST, "OSError"), (HOST6, "PermissionError")])
def test_refusal(scene: Scene, address: str, error: str) -> None:
    """A denied client hears of it at once: connect() is refused, a datagram is answered with an error."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        assert scene.lab.asks(socket.SOCK_STREAM, address, 443, b"a") == "ConnectionRefusedError"
        assert scene.lab.asks(socket.SOCK_DGRAM, address, 443, b"a") == error
        assert _counted(datapath, Reason.PASS_ANSWER) == _counted(datapath, Reason.DROP_POLICY) == 2


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
            datapath.apply([_is(HOST, _HOSTS)])
            assert scene.lab.ping(HOST)
        finally:
            datapath.close()
            cleanup(scene.settings)


def test_spoofed_source(scene: Scene) -> None:
    """A second address of the client, of which the endpoint's rows know nothing, gets nowhere."""
    with scene.opened() as datapath:
        datapath.apply([_is(HOST, _HOSTS)])
        datapath.attach(scene.attach)
        assert not any(datapath.apply([Write(Table.OWN_ADDRESSES, OwnAddressKey(1, packed(CLIENT)), None)]))
        assert not scene.lab.ping(HOST)
        assert _counted(datapath, Reason.DROP_SOURCE) + _counted(datapath, Reason.DROP_NEIGHBOUR_CLAIM) > 0


def _transparent(key: int) -> socket.socket:
    """A socket as the proxy has it, for one row of dns_sockets."""
    v6 = key & 2
    made = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM if key & 1 else socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, 36, 0xA00)  # SO_MARK
    if v6:
        made.setsockopt(socket.IPPROTO_IPV6, 75, 1)  # IPV6_TRANSPARENT
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    else:
        made.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
    if not key & 1:
        made.setsockopt(socket.IPPROTO_IPV6 if v6 else socket.SOL_IP, 74 if v6 else 20, 1)  # RECVORIGDSTADDR
    made.bind(("::" if v6 else "", 10053))
    if key & 1:
        made.listen(4)
    made.settimeout(5)
    return made


def _answer(listener: socket.socket, key: int) -> None:
    """Answers one question from the address that was asked."""
    if key & 1:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"from " + connection.getsockname()[0].encode() + b":" + connection.recv(512))
        return
    data, ancillary, _, asker = listener.recvmsg(512, 256)
    ((_, _, original),) = ancillary
    (port,) = struct.unpack_from(">H", original, 2)
    address = socket.inet_ntop(socket.AF_INET6, original[8:24]) if key & 2 else socket.inet_ntop(socket.AF_INET, original[4:8])
    with _transparent_reply(key, address, port) as reply:
        reply.sendto(b"from " + address.encode() + b":" + data, asker[:2])


@contextlib.contextmanager
def _transparent_reply(key: int, address: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if key & 2 else socket.AF_INET, socket.SOCK_DGRAM) as reply:
        reply.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reply.setsockopt(socket.SOL_SOCKET, 36, 0xA00)
        reply.setsockopt(socket.IPPROTO_IPV6 if key & 2 else socket.SOL_IP, 75 if key & 2 else 19, 1)
        reply.bind((address, port))
        yield reply


@pytest.mark.parametrize("server", [_SERVER, _SERVER6, HOST, HOST6])
@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_questions_reach_the_proxy(scene: Scene, kind: socket.SocketKind, server: str) -> None:
    """DNS of both families and transports, to a foreign server or the host itself, arrives at the proxy and is answered."""
    key = (2 if ":" in server else 0) | (kind is socket.SOCK_STREAM)
    with scene.opened() as datapath, _transparent(key) as listener:
        assert datapath.gate_state() is HookState.ABSENT
        datapath.set_dns_sockets({key: listener.fileno()})
        assert datapath.gate_state() is HookState.FIRST
        datapath.attach(scene.attach)
        proxy = threading.Thread(target=_answer, args=(listener, key))
        proxy.start()
        answer = scene.lab.asks(kind, server, 53, b"question")
        proxy.join()
        assert answer == b"from " + server.encode() + b":question"
        assert _counted(datapath, Reason.PASS_REDIRECT) > 0
        assert not list(datapath.flows())


def test_no_listener(scene: Scene) -> None:
    """With the proxy's socket gone, a question is dropped with a reason of its own; nobody else gets it."""
    with scene.opened() as datapath:
        listener = _transparent(0)
        datapath.set_dns_sockets({0: listener.fileno()})
        datapath.attach(scene.attach)
        listener.close()
        assert scene.lab.asks(socket.SOCK_DGRAM, _SERVER, 53, b"question") == "OSError"  # at once, not a timeout
        assert _counted(datapath, Reason.DROP_NO_SOCKET) > 0


def _link_ids(settings: Settings) -> list[int]:
    found = []
    for pin in sorted((settings.pin_directory / "links").iterdir()):
        fd = syscall.get_pinned(str(pin))
        found.append(syscall.link_info(fd).id)
        os.close(fd)
    return found


def test_restart_in_place(scene: Scene) -> None:
    """The process goes, the kernel goes on; the next one swaps its programs into the same links, with its own tables."""
    with scene.opened() as datapath:
        datapath.apply([_is(HOST, _HOSTS)])
        datapath.attach(scene.attach)
        links = _link_ids(scene.settings)
    assert scene.lab.ping(HOST)
    with scene.opened() as second:
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.ABSENT
        assert scene.lab.ping(HOST)  # judged by the program of the first
        second.attach(scene.attach)
        assert second.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        assert not scene.lab.ping(HOST)
    assert _link_ids(scene.settings) == links
    assert sorted(path.name for path in scene.settings.pin_directory.iterdir()) == ["links", "maps"]


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
    next((scene.settings.pin_directory / "maps").iterdir()).unlink()
    with inside(scene.lab.host):
        assert cleanup(scene.settings) == [scene.lab.interface]
        assert not scene.settings.pin_directory.exists()
        assert {name for _, name in socket.if_nameindex()} == {"lo", scene.lab.interface}
        for side in (syscall.TCX_INGRESS, syscall.TCX_EGRESS):
            assert syscall.tcx_programs(scene.attach.ifindex, side) == ()
        assert cleanup(scene.settings) == []
    assert scene.lab.ping(HOST)


def test_full_map(scene: Scene) -> None:
    """A write the map has no room for is an errno of that write alone; deleting what is not there is none."""
    with scene.opened() as datapath:
        rows = [_is(f"10.98.{i >> 8}.{i & 255}", _HOSTS) for i in range(1_024)]
        assert datapath.apply(rows) == [0] * 1_024
        one_more = _is("10.97.0.1", _HOSTS)
        writes = [one_more, rows[0]._replace(value=None), one_more, _is("10.96.0.1", None)]
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
        second.apply([_is(HOST, _HOSTS)])
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
