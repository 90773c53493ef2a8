"""Enforcement is claimed when the kernel lists our program first, with our tables, and a canary was counted as dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
from pathlib import Path

import pytest

from agent.core.events import Attach
from agent.core.types import EndpointValue, GroupValue, Orientation, Table, Write
from agent.datapath import loader, syscall
from agent.datapath.abi import Reason
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath, cleanup
from agent.datapath.errors import DatapathError
from tests.bpf.lab import HOST, inside
from tests.bpf.scene import Scene, counted, transparent_socket

pytestmark = pytest.mark.root


def _state(datapath: Datapath, scene: Scene) -> HookState:
    """Proved afresh."""
    datapath._proven.clear()
    return datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND)


def test_a_canary_is_nobodys_packet(scene: Scene) -> None:
    """It is counted by itself: not as a drop, not for an endpoint, not among the events; for a second one is enough."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)  # which proves it once
        before = datapath.counters()
        assert counted(datapath, Reason.DROP_CANARY) == 1
        for _ in range(5):
            assert datapath.hook_state(scene.attach.ifindex, Orientation.BEHIND) is HookState.FIRST
        assert counted(datapath, Reason.DROP_CANARY) == 1
        for _ in range(5):
            assert _state(datapath, scene) is HookState.FIRST
        assert counted(datapath, Reason.DROP_CANARY) == 6
        chatter = {Reason.DROP_CANARY, Reason.PASS_NEIGHBOUR}  # the client's kernel joins groups when it likes
        others = [counter for counter in datapath.counters() if counter.reason not in chatter]
        assert others == [counter for counter in before if counter.reason not in chatter]
        assert not Reason.DROP_CANARY.is_drop
        assert all(event.reason is not Reason.DROP_ETHERTYPE for event in datapath.read_events())


def test_under_audit(scene: Scene) -> None:
    """Where everything passes the canary does not: what is put through the hook reaches no stack."""
    with scene.opened() as datapath:
        datapath.apply([Write(Table.GROUPS, 1, GroupValue(1, default_deny_egress=True, default_deny_ingress=True, audit=True))])
        datapath.attach(scene.attach)
        assert scene.lab.ping(HOST)
        assert _state(datapath, scene) is HookState.FIRST


def test_a_program_that_counts_otherwise(scene: Scene) -> None:
    """That of before has our name and tables, but another mark: it lets the canary by uncounted until ours is in its place."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
    other = dataclasses.replace(scene, settings=dataclasses.replace(scene.settings, mark=0x500))
    with other.opened(take_over=True) as second:
        assert second.is_taken_over
        assert _state(second, scene) is HookState.SILENT
        second.attach(scene.attach)
        assert _state(second, scene) is HookState.FIRST


def test_the_program_of_before(scene: Scene) -> None:
    """With the tables taken over it judges by our rows: that is enforcement, before ours takes its place."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
    with scene.opened(take_over=True) as second:
        assert _state(second, scene) is HookState.FIRST
    with scene.opened() as third:  # with tables of its own
        assert _state(third, scene) is HookState.ABSENT


@pytest.mark.usefixtures("tcx")
def test_a_program_of_the_same_name(scene: Scene) -> None:
    """A name proves nothing: without our tables it is somebody's."""
    with scene.opened() as datapath:
        exit_unspec = bytes.fromhex("b7000000ffffffff9500000000000000")
        foreign = syscall.program_load(exit_unspec, "from_endpoint")
        link = syscall.tcx_attach(foreign, scene.attach.ifindex, syscall.TCX_INGRESS)
        assert _state(datapath, scene) is HookState.ABSENT
        datapath.attach(scene.attach)
        assert _state(datapath, scene) is HookState.FIRST  # ours went in front
        os.close(link)
        os.close(foreign)


@pytest.mark.usefixtures("tcx")
def test_attached_is_not_enforced(scene: Scene) -> None:
    """A hook that a start cannot prove is an error of attach(), and the programs stay: they may work all the same."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        first = syscall.tcx_attach(datapath._loaded.fds_by_program["gate"], scene.attach.ifindex, syscall.TCX_INGRESS)
        with pytest.raises(DatapathError, match="comes before ours"):
            datapath.attach(scene.attach)
        os.close(first)
        assert not scene.lab.ping(HOST)
        datapath.attach(scene.attach)


def test_an_interface_that_is_down(scene: Scene) -> None:
    """Nothing arrives there that could be judged: it is no failure."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        subprocess.run(["ip", "link", "set", scene.lab.interface, "down"], check=True, timeout=20)
        assert _state(datapath, scene) is HookState.FIRST
        subprocess.run(["ip", "link", "set", scene.lab.interface, "up"], check=True, timeout=20)
        assert _state(datapath, scene) is HookState.FIRST


def test_the_gate(scene: Scene) -> None:
    """The interception device's program is proved in the same way."""
    with scene.opened() as datapath, transparent_socket(0) as listener:
        datapath.set_dns_sockets({0: listener.fileno()})
        before = counted(datapath, Reason.DROP_CANARY)
        assert datapath.gate_state() is HookState.FIRST
        assert counted(datapath, Reason.DROP_CANARY) == before + 1


def test_an_uplink(scene: Scene) -> None:
    """Its ingress is the other program's hook. Its egress, where a device on the uplink may send anything, knows no canary."""
    with inside(scene.lab.client):
        ifindex = socket.if_nametoindex("eth0")
        with contextlib.closing(Datapath.open(scene.settings)) as datapath:
            datapath.apply([*scene.rows(), Write(Table.ENDPOINTS, ifindex, EndpointValue(1, 1, 1, Orientation.UPLINK))])
            datapath.attach(Attach(1, "eth0", ifindex, Orientation.UPLINK))
            assert counted(datapath, Reason.DROP_CANARY) == 1
            _send_marked(scene)
            assert counted(datapath, Reason.DROP_CANARY) == 1
            assert counted(datapath, Reason.DROP_ETHERTYPE) == 1
        cleanup(scene.settings)


def test_a_workload_cannot_make_one(scene: Scene) -> None:
    """The same frame from the wire has no mark: it is dropped for its EtherType, as any other."""
    with scene.opened() as datapath:
        datapath.attach(scene.attach)
        before = counted(datapath, Reason.DROP_CANARY)
        with inside(scene.lab.client):
            _send_marked(scene)
        assert counted(datapath, Reason.DROP_CANARY) == before
        assert counted(datapath, Reason.DROP_ETHERTYPE) == 1


def _send_marked(scene: Scene) -> None:
    """A frame as the agent's, out of the client's interface."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, scene.settings.mark_answer)
        raw.bind(("eth0", 0))
        with contextlib.suppress(OSError):  # of what is dropped at egress its sender is told
            raw.send(bytes.fromhex("0180c200000f 020000000000 88b5") + bytes(46))


# --- the program itself ----------------------------------------------------------------------------------------------


def test_the_cached_program_is_the_compiled_one(scene: Scene) -> None:
    """What is loaded from the cache has the digest that the kernel gave BCC's own load; altered bytecode is refused."""
    code = loader.bytecode(scene.settings.defines(), scene.settings.cache)
    with contextlib.closing(loader.load(code)) as loaded:
        for name in loader.PROGRAMS:
            assert syscall.program_info(loaded.fds_by_program[name]).digest == code.code_by_program[name].digest
    nothing_but_pass = bytes.fromhex("b7000000ffffffff9500000000000000")
    altered = {**code.code_by_program, "gate": code.code_by_program["gate"]._replace(instructions=nothing_but_pass, maps=())}
    with pytest.raises(DatapathError, match="gate is not what BCC compiled"):
        loader.load(dataclasses.replace(code, code_by_program=altered))


@pytest.fixture
def no_bpffs(scene: Scene) -> Scene:
    return dataclasses.replace(scene, settings=dataclasses.replace(scene.settings, pin_directory=Path("/tmp/namegate-pins")))


def test_no_bpffs(no_bpffs: Scene) -> None:
    """Pins on another file system are refused before anything is made, with the command that mounts one."""
    with inside(no_bpffs.lab.host), pytest.raises(DatapathError, match="mount -t bpf bpf"):
        Datapath.open(no_bpffs.settings)
    assert not no_bpffs.settings.pin_directory.exists()
