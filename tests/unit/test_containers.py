"""What is read of a container, and what follows from it; the engine's side is in tests/netns/test_containers.py."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agent import oci_hook
from agent.config import ContainerSettings, EndpointSettings
from agent.core.types import packed
from agent.host.containers import (
    ContainerError,
    ContainerWatch,
    _asked_from_host,
    _Engine,
    _of_peer,
    _Shown,
    _shown_of,
    owner_of,
)
from agent.host.peers import NotPoliced, Peer, behind_name, behind_process
from tests.netns.docker_answers import RESOLV_CONF, WEB, Docker, inspected

ADDRESSES = ("172.18.0.2", "2001:db8:18::2")


def shown(tmp_path: Path, resolv_conf: str = RESOLV_CONF) -> _Shown:
    file = tmp_path / "resolv.conf"
    file.write_text(resolv_conf)
    return _shown_of(inspected("/var/run/docker/netns/9d12daf2c33f", *ADDRESSES, str(file)))


def nothing(*_report: object) -> None:
    pass


def test_what_docker_says_of_a_container(tmp_path: Path) -> None:
    """The addresses are those of its networks; the empty ones on top are none."""
    said = shown(tmp_path)
    assert (said.number, said.name, said.pid) == (WEB, "shop-web-1", 4194304)
    assert said.sandbox == "/var/run/docker/netns/9d12daf2c33f"
    assert said.addresses == {packed("172.18.0.2"), packed("2001:db8:18::2")}
    gone = _shown_of(inspected("", *ADDRESSES, "", is_running=False))
    assert (gone.pid, gone.sandbox, gone.addresses) == (0, "", frozenset())


def test_labels_that_fit_are_the_endpoints_and_the_operators_win(tmp_path: Path) -> None:
    """Of the container's own those of Kubernetes' syntax; its name; then what is said here."""
    said = shown(tmp_path)
    engine = _Engine(Path("docker.sock"), nothing)
    assert engine._settings(said.name, said.labels) is None
    compose = {"com.docker.compose.project": "shop"}
    engine.entries = [
        ContainerSettings(engine.path, select={"app": "another"}),
        ContainerSettings(engine.path, select=compose, labels={"com.docker.compose.service": "front"}, audit=True),
        ContainerSettings(engine.path),
    ]
    settings = engine._settings(said.name, said.labels)
    assert settings is not None
    assert settings.labels == {**compose, "com.docker.compose.service": "front", "container": "shop-web-1"}
    assert settings.audit
    named = engine._settings("web", {"container": "somebody-else", "x" * 64: "1", "empty": "", "a": "b c"})
    assert named is not None
    assert named.labels == {"container": "web", "empty": ""}
    engine.followed["web"] = EndpointSettings("", {"container": "by-command"})
    followed = engine._settings("web", {})
    assert followed is not None
    assert followed.labels == {"container": "by-command"}
    assert engine.unfollow("web")
    assert not engine.unfollow("web")
    engine.entries.clear()
    assert engine._settings("web", {}) is None


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (RESOLV_CONF, "127.0.0.53"),
        (RESOLV_CONF.replace("host(127.0.0.53)", "192.0.2.53 host(192.0.2.54)"), "192.0.2.54"),
        (RESOLV_CONF.replace("host(127.0.0.53)", "192.0.2.53"), ""),
        ("nameserver 127.0.0.11\noptions ndots:0\n", ""),
        ("nameserver 192.0.2.53\n", ""),
    ],
)
def test_a_resolver_that_asks_from_the_host_is_seen(tmp_path: Path, text: str, asked: str) -> None:
    assert _asked_from_host(shown(tmp_path, text)) == asked


def test_addresses_are_the_engines_saying() -> None:
    """Not what its root made of them; of several interfaces each has those of its own. An engine may say none."""
    given = frozenset({packed("10.0.0.2"), packed("10.1.0.2")})
    peer = Peer(7, "veth0", "eth0", (packed("10.0.0.2"), packed("10.0.0.99")))
    assert _of_peer(peer, given, is_only=False) == (packed("10.0.0.2"),)
    assert _of_peer(peer, given, is_only=True) == (packed("10.0.0.2"), packed("10.1.0.2"))
    assert _of_peer(peer, frozenset(), is_only=True) == peer.addresses


def test_an_engine_that_is_not_there_changes_nothing_and_is_said(tmp_path: Path) -> None:
    """What it has is not known, which is not the same as nothing; the start does not wait for it."""
    reports: list[tuple[object, ...]] = []
    engine = tmp_path / "docker.sock"

    async def watch() -> None:
        containers = ContainerWatch([ContainerSettings(engine)], lambda *report: reports.append(report))
        containers.start()
        await asyncio.wait_for(containers.listed(), 5)
        with pytest.raises(ContainerError, match="cannot be asked"):
            await containers.follow("web", engine, EndpointSettings(""), lambda _: None)
        await containers.close()

    asyncio.run(watch())
    sentence = f"the container engine at {engine} cannot be asked (there is no such socket): what is attached stays, "
    assert reports == [(owner_of(engine), None, [f"{sentence}what is new is not seen"], [])]


def test_an_engine_that_was_named_by_mistake_troubles_nobody(tmp_path: Path) -> None:
    """Its container is refused, and that is all that is said of it."""
    reports: list[object] = []

    async def watch() -> None:
        containers = ContainerWatch([], lambda *report: reports.append(report))
        containers.start()
        with pytest.raises(ContainerError, match="there is no such socket"):
            await containers.follow("web", tmp_path / "typo.sock", EndpointSettings(""), lambda _: None)
        await asyncio.wait_for(containers.listed(), 5)
        assert not containers.unfollow("web")
        await containers.close()

    asyncio.run(watch())
    assert reports == []


def test_an_answer_that_is_not_understood_is_said(tmp_path: Path) -> None:
    """It ends nothing: the next try may be better."""
    path = tmp_path / "docker.sock"
    heard: asyncio.Queue[tuple[Mapping[int, EndpointSettings] | None, Sequence[str]]] = asyncio.Queue()

    async def watch() -> None:
        containers = ContainerWatch([ContainerSettings(path)], lambda *report: heard.put_nowait(report[1:3]))
        containers.start()
        found, problems = await asyncio.wait_for(heard.get(), 5)
        assert found is None
        assert "its answer is not understood" in problems[0]
        docker.container = None
        assert await asyncio.wait_for(heard.get(), 5) == ({}, [])
        await containers.close()

    broken = inspected("", *ADDRESSES, "")
    broken["State"]["Pid"] = {"of": "another release"}
    with Docker(path, broken) as docker:
        asyncio.run(watch())


def test_a_namespace_that_is_not_there_is_a_sentence() -> None:
    """Of a process, and by name; our own is the host's."""
    with pytest.raises(NotPoliced, match="there is no process 4194305"):
        behind_process(4194305)
    with pytest.raises(NotPoliced, match="there is no network namespace absent"):
        behind_name("absent")
    with pytest.raises(NotPoliced, match="host network mode"):
        behind_process(os.getpid())


# --- the hook --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"pid": "x"}', '{"pid": 4194305}'])
def test_the_hook_fails_closed(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is given: one line that says that the container does not start, and 1."""
    assert oci_hook.main(['{"control": "/nowhere"}'], io.StringIO(state)) == 1
    said = capsys.readouterr().err
    assert said.startswith("namegate: the container is not started: ")
    assert len(said.splitlines()) == 1
    assert oci_hook.main([], io.StringIO('{"pid": 1}')) == 1


def test_the_hooks_labels_are_those_of_the_annotations(tmp_path: Path) -> None:
    """From the state, or where the runtime leaves them out of it, from the bundle."""
    annotations = {"namegate.label.app": "web", "namegate.policed": "yes", "io.container.manager": "libpod"}
    (tmp_path / "config.json").write_text(json.dumps({"annotations": annotations}))
    assert oci_hook._labels({"annotations": annotations}) == {"app": "web"}
    assert oci_hook._labels({"bundle": str(tmp_path)}) == {"app": "web"}
