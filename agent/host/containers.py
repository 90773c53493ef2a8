"""Containers as endpoints, through the Docker-compatible API of their engine (Docker, podman).

Rule 1: an engine is believed about what there is, which addresses it gave and which labels its user did; which interface leads
to a container is asked from the kernel (peers.py).
Rule 2: an engine that cannot be asked changes nothing: what was attached stays as it was seen last, and this is said. When it
is back everything is listed again.
Rule 3: a container followed by name is whichever has the name; made anew, it is attached anew.

    /events ─> which container ─┐
    netlink ─> whose veth went ─┼─> inspect ─> its namespace ─> peers ─> settings by index ─> report
    a list after connecting ────┘

Of an event only the container's id is read: a look at what is now is right whichever events were lost or came twice.

Labels of an endpoint: the container's own that fit Kubernetes' syntax, then `container: NAME`, then those the operator says
here; the later wins. Not the image: its name fits in no label. The container's own labels are also its image's (LABEL): where
people may run any image, policies that allow select by a label that is said here.

Addresses: those the engine gave. What is seen inside is the container's own saying, whose root may have changed it; it counts
where the engine names none. Containers that share a network (those of a podman pod, `--network container:NAME`) are one
endpoint, with the labels of all.

Docker's resolver (`nameserver 127.0.0.11`) is inside the container's namespace. The upstreams that resolv.conf shows as
`host(…)` it asks from the host's, past the veth: nothing is learned then, and what the container connects to is dropped.
podman's resolver has the bridge's address: a question to it crosses the veth and is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from agent.config import ContainerSettings, EndpointSettings, is_label
from agent.core.types import Address, packed
from agent.host.peers import Behind, NotPoliced, Peer, behind_file, behind_process
from agent.host.watch import NetworkWatch

log = logging.getLogger("namegate")

ENGINES: Final = (Path("/run/podman/podman.sock"), Path("/run/docker.sock"))
LABEL_CONTAINER: Final = "container"

# A request of an engine under load takes a second; one that holds a container's lock while it starts it, several.
_ANSWER_S_MAX: Final = 10.0
_AGAIN_AFTER_S: Final = 0.1
_AGAIN_AFTER_S_MAX: Final = 10.0
# An engine makes a network anew in some tenths of a second, and says nothing when it is done.
_LOOKS_AFTER_S: Final = (0.1, 0.5, 2.0)
_NOT_CONNECTED: Final = 900  # aiodocker's status
_RESOLV_CONF_BYTES_MAX: Final = 64 << 10
_ASKED_FROM_HOST: Final = re.compile(r"^# ExtServers: \[.*\bhost\(([^)]*)\)", re.MULTILINE)

_DETACHED: Final = "container {} is not policed: it was detached by command, until the agent starts again"

Report = Callable[[str, Mapping[int, EndpointSettings] | None, Sequence[str], Sequence[str]], None]
Objection = Callable[[Mapping[int, EndpointSettings]], str | None]


class ContainerError(Exception):
    """A container that cannot be attached; the text is a sentence."""


class Attached(NamedTuple):
    """A container that is followed by its name from now on; interfaces: none while it does not run."""

    name: str
    interfaces: tuple[str, ...]
    warnings: tuple[str, ...]


class ContainerWatch:
    """Finds containers and says so, engine by engine.

    report(owner, found, problems, warnings): all that this owner (`owner_of` an engine) has now, by its interface; what
    is wrong; what is as it was meant and is to be seen. found is None until the engine has been listed once: what the process
    before knew of it stays till then.
    """

    def __init__(self, entries: Sequence[ContainerSettings], report: Report) -> None:
        self._report = report
        self._network: NetworkWatch | None = None
        self._engines: dict[Path, _Engine] = {}
        for entry in entries:
            self._engine(entry.engine).entries.append(entry)

    @property
    def owners(self) -> frozenset[str]:
        """Who may report something."""
        return frozenset(map(owner_of, self._engines))

    def start(self) -> None:
        """In the loop's thread."""
        self._network = NetworkWatch(asyncio.get_running_loop(), self._network_changed)
        for engine in self._engines.values():
            engine.start()

    async def listed(self) -> None:
        """Until each engine known at this moment has said what it has, or cannot be asked: a source of labels at start."""
        await asyncio.gather(*(engine.asked.wait() for engine in self._engines.values()))

    async def follow(self, name: str, engine: Path | None, settings: EndpointSettings, objection: Objection) -> Attached:
        """By command; name: or an id, of which the container's name is followed. The settings' interface is of no account, and
        its labels come before the container's own. objection: why what it comes to may not be said of its interfaces, by index.
        Raises ContainerError, and follows nothing then.
        """
        path = engine or _first_engine()
        if path is None:
            raise ContainerError(
                f"no container engine listens at {' or '.join(map(str, ENGINES))}: start it (`systemctl start podman.socket`), "
                "or say its socket with --engine"
            )
        return await self._engine(path).follow(name, settings, objection)

    def resume(self, name: str, engine: Path | None, settings: EndpointSettings) -> None:
        """What `follow` was told before a restart; the container need not be there."""
        self._engine(engine or _first_engine() or ENGINES[0]).followed[name] = settings

    def unfollow(self, name: str) -> bool:
        """No container of this name is attached any more, also by the configuration, until it is followed by command or the
        agent starts again. Was there any?
        """
        were = {engine.unfollow(name) for engine in self._engines.values()}
        return True in were

    async def close(self) -> None:
        if self._network is not None:
            self._network.close()
            self._network = None
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def _engine(self, path: Path) -> _Engine:
        if path not in self._engines:
            self._engines[path] = _Engine(path, self._report)
            if self._network is not None:
                self._engines[path].start()
        return self._engines[path]

    def _network_changed(self) -> None:
        assert self._network is not None
        gone = self._network.take_gone()
        if gone:
            for engine in self._engines.values():
                engine.lose(gone)


def owner_of(engine: Path) -> str:
    return f"containers of {engine}"


def _first_engine() -> Path | None:
    return next((each for each in ENGINES if each.is_socket()), None)


class _Shown(NamedTuple):
    """What the engine says of a container. pid: 0 while it does not run; sandbox: the file of its network namespace, or empty;
    resolv_conf: the file that is its /etc/resolv.conf, or empty.
    """

    number: str
    name: str
    labels: Mapping[str, str]
    pid: int
    sandbox: str
    addresses: frozenset[Address]
    resolv_conf: str


class _Container(NamedTuple):
    """One that is of interest and runs, as it was seen last."""

    name: str
    found: dict[int, EndpointSettings]
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class _Engine:
    """One engine's containers, by id."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self.entries: list[ContainerSettings] = []
        self.followed: dict[str, EndpointSettings] = {}
        self.asked = asyncio.Event()
        self.listed = asyncio.Event()
        self._report = report
        self._released: set[str] = set()
        self._containers: dict[str, _Container] = {}
        self._trouble = ""
        self._said: tuple[dict[int, EndpointSettings] | None, list[str], list[str]] = None, [], []
        self._due: set[str] = set()
        self._is_due = asyncio.Event()
        self._again_after_s = _AGAIN_AFTER_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It never does by itself: that is our own mistake."""
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"the watch of {self.path} failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def follow(self, name: str, settings: EndpointSettings, objection: Objection) -> Attached:
        try:
            async with _Api(self.path) as api:
                shown = await api.inspect(name)
            if shown is None:
                raise ContainerError(f"{self.path} has no container {name}")
            # What is said before the first list is done would be all there is.
            async with asyncio.timeout(_ANSWER_S_MAX):
                await self.listed.wait()
        except (_Silent, TimeoutError) as error:
            raise ContainerError(self._not_asked(error)) from None
        why = await self._objection(shown, settings, objection)
        if why is not None:
            raise ContainerError(why)
        before = self.followed.get(shown.name), shown.name in self._released
        self.followed[shown.name] = settings
        self._released.discard(shown.name)
        container = await self._see(shown)
        if container is not None and not container.found:
            self._forget(shown.name, *before)
            await self._see(shown)
            raise ContainerError("; ".join(container.problems) or f"container {shown.name} has no network: nothing gets out")
        self._say()
        if container is None:
            return Attached(shown.name, (), (f"container {shown.name} does not run: it is policed when it starts",))
        warnings = container.problems + container.warnings
        return Attached(shown.name, tuple(each.interface for each in container.found.values()), warnings)

    async def _objection(self, shown: _Shown, settings: EndpointSettings, objection: Objection) -> str | None:
        """Where others share its network its labels are added, and nothing is replaced."""
        if not shown.pid:
            if self.followed.get(shown.name, settings) == settings:
                return None
            return (
                f"container {shown.name} is attached already, with other settings: "
                f"`namegate detach --container {shown.name}` first, and it can be attached as something else"
            )
        to_be = await asyncio.to_thread(_seen, shown, _labelled(settings, shown.name, shown.labels))
        others = (each.found for number, each in self._containers.items() if number != shown.number)
        shared = {ifindex for found in others for ifindex in found}
        return objection({ifindex: each for ifindex, each in to_be.found.items() if ifindex not in shared})

    def _forget(self, name: str, settings: EndpointSettings | None, was_released: bool) -> None:
        del self.followed[name]
        if settings is not None:
            self.followed[name] = settings
        if was_released:
            self._released.add(name)

    def unfollow(self, name: str) -> bool:
        numbers = [number for number, container in self._containers.items() if container.name == name]
        if name in self._released or (name not in self.followed and not numbers):
            return False
        self.followed.pop(name, None)
        self._released.add(name)
        for number in numbers:
            del self._containers[number]
            self._look_soon(number)  # it may be in the configuration, too
        self._say()
        return True

    def lose(self, gone: frozenset[int]) -> None:
        """These interfaces went."""
        loop = asyncio.get_running_loop()
        for number, container in self._containers.items():
            if gone & container.found.keys():
                for after_s in _LOOKS_AFTER_S:
                    loop.call_later(after_s, self._look_soon, number)

    # --- the engine ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with _Api(self.path) as api:
                    await self._watch(api)
            except _Silent as error:
                trouble = self._not_asked(error)
                if trouble != self._trouble:
                    log.warning("%s", trouble)
                self._trouble = trouble
                self.asked.set()
                self._say()
            await asyncio.sleep(self._again_after_s)
            self._again_after_s = min(self._again_after_s * 2, _AGAIN_AFTER_S_MAX)

    async def _watch(self, api: _Api) -> None:
        """Until the engine ends its events; raises _Silent."""
        hearing = asyncio.get_running_loop().create_task(self._hear(api))
        hearing.add_done_callback(lambda _: self._is_due.set())
        try:
            there = await api.running()
            for number in self._containers.keys() - there.keys():
                del self._containers[number]
            for number, (name, labels) in there.items():
                if self._settings(name, labels) is not None:
                    await self._look(api, number)
            self._trouble, self._again_after_s = "", _AGAIN_AFTER_S
            self.asked.set()
            self.listed.set()
            self._say()
            while not hearing.done():
                await self._is_due.wait()
                self._is_due.clear()
                while self._due:
                    await self._look(api, self._due.pop())
                self._say()
            await hearing
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)

    async def _hear(self, api: _Api) -> None:
        async for number in api.events():
            if number is None:
                self._due.update(self._containers)
            else:
                self._due.add(number)
            self._is_due.set()

    def _look_soon(self, number: str) -> None:
        self._due.add(number)
        self._is_due.set()

    def _not_asked(self, error: Exception) -> str:
        return f"the container engine at {self.path} cannot be asked ({error}): what is attached stays, what is new is not seen"

    # --- its containers --------------------------------------------------------------------------------------------------

    async def _look(self, api: _Api, number: str) -> None:
        shown = await api.inspect(number)
        if shown is None:
            self._containers.pop(number, None)
        else:
            await self._see(shown)

    async def _see(self, shown: _Shown) -> _Container | None:
        """What is policed of it from now on; None where it does not run, or is of no interest."""
        settings = self._settings(shown.name, shown.labels)
        if settings is None or not shown.pid:
            self._containers.pop(shown.number, None)
            return None
        if shown.name in self._released:
            container = _Container(shown.name, {}, (_DETACHED.format(shown.name),))
        else:
            container = await asyncio.to_thread(_seen, shown, settings)
            if shown.name in self._released or self._settings(shown.name, shown.labels) != settings:
                return await self._see(shown)  # a command came meanwhile
        before = self._containers.get(shown.number)
        self._containers[shown.number] = container
        sentences = container.problems + container.warnings
        if before is None or before.problems + before.warnings != sentences:
            for sentence in sentences:
                log.warning("%s", sentence)
        return container

    def _settings(self, name: str, labels: Mapping[str, str]) -> EndpointSettings | None:
        """None where it is of no interest; without interface and addresses."""
        settings = self.followed.get(name)
        if settings is None:
            for entry in self.entries:
                if entry.select.items() <= labels.items():
                    settings = EndpointSettings(
                        "", entry.labels, audit=entry.audit, learn=entry.learn, denied=entry.denied, line=entry.line
                    )
                    break
            else:
                return None
        return _labelled(settings, name, labels)

    def _say(self) -> None:
        """If it is something new. An engine of which nothing is wanted (any more) may be gone."""
        found: dict[int, EndpointSettings] | None = None
        containers = sorted(self._containers.values(), key=lambda each: each.name)
        if self.listed.is_set():
            found = {}
            for container in containers:
                for ifindex, settings in container.found.items():
                    shared = found.setdefault(ifindex, settings)
                    found[ifindex] = dataclasses.replace(shared, labels={**settings.labels, **shared.labels})
        problems = [self._trouble] if self._trouble and (self.entries or self.followed) else []
        problems += [problem for container in containers for problem in container.problems]
        warnings = [warning for container in containers for warning in container.warnings]
        if (found, problems, warnings) != self._said:
            self._said = found, problems, warnings
            self._report(owner_of(self.path), found, problems, warnings)


def _labelled(settings: EndpointSettings, name: str, labels: Mapping[str, str]) -> EndpointSettings:
    own = {**labels, LABEL_CONTAINER: name}
    return dataclasses.replace(
        settings, labels={**{key: own[key] for key in sorted(own) if is_label(key, own[key])}, **settings.labels}
    )


# --- what the engine says of a container ---------------------------------------------------------------------------------


def _shown_of(answer: Mapping[str, Any]) -> _Shown:
    """Of /containers/ID/json. Raises KeyError, TypeError, ValueError or AttributeError where it is something else."""
    network = answer["NetworkSettings"]
    addresses = set()
    for each in (network, *(network.get("Networks") or {}).values()):
        for key in ("IPAddress", "GlobalIPv6Address"):
            if each.get(key):
                addresses.add(packed(each[key]))
    return _Shown(
        str(answer["Id"]),
        str(answer["Name"]).removeprefix("/"),
        {str(key): str(value) for key, value in (answer["Config"].get("Labels") or {}).items()},
        int(answer["State"].get("Pid") or 0),
        str(network.get("SandboxKey") or ""),
        frozenset(addresses),
        str(answer.get("ResolvConfPath") or ""),
    )


def _seen(shown: _Shown, settings: EndpointSettings) -> _Container:
    """For a thread: it reads files and enters the container's namespace."""
    name = shown.name
    try:
        behind = _behind(shown)
    except NotPoliced as error:
        return _Container(name, {}, () if error.is_harmless else (f"container {name} is not policed: {error}",))
    problems = [f"container {name}: {sentence}" for sentence in behind.unpoliced]
    asked = _asked_from_host(shown)
    if asked:
        problems.append(
            f"container {name}: its engine's resolver asks {asked} from the host, so its questions do not cross the interface "
            "and open nothing: set `dns` in the engine's daemon.json, or --dns of the container, to a server's address"
        )
    found = {}
    for peer in behind.peers:
        addresses = settings.addresses or _of_peer(peer, shown.addresses, is_only=len(behind.peers) == 1)
        found[peer.ifindex] = dataclasses.replace(settings, interface=peer.interface, addresses=addresses)
    warnings = tuple(f"container {name}: {sentence}" for sentence in behind.warnings)
    return _Container(name, found, tuple(problems), warnings)


def _behind(shown: _Shown) -> Behind:
    """By the engine's own file where it shows one: a process id may be somebody else's by now."""
    if shown.sandbox:
        with contextlib.suppress(FileNotFoundError):
            return behind_file(shown.sandbox, shown.pid)
    return behind_process(shown.pid)


def _of_peer(peer: Peer, given: frozenset[Address], *, is_only: bool) -> tuple[Address, ...]:
    """What the engine gave; with several interfaces, what of it each has."""
    if not given:
        return peer.addresses
    return tuple(sorted(given)) if is_only else tuple(address for address in peer.addresses if address in given)


def _asked_from_host(shown: _Shown) -> str:
    """The upstream that Docker's resolver asks from the host's namespace; empty where there is none."""
    if not shown.resolv_conf:
        return ""
    try:
        with Path(shown.resolv_conf).open("rb") as stream:
            text = stream.read(_RESOLV_CONF_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    asked = _ASKED_FROM_HOST.search(text)
    return asked[1] if asked is not None else ""


# --- its API ---------------------------------------------------------------------------------------------------------


class _Silent(Exception):
    """The engine cannot be asked; the text says why, as part of a sentence."""


class _Api:
    """aiodocker, imported when it is used; every way in which it fails is a _Silent."""

    def __init__(self, path: Path) -> None:
        try:
            import aiodocker
            import aiohttp
        except ImportError:
            raise _Silent("the library aiodocker is missing: scripts/setup installs it") from None
        if not path.is_socket():
            raise _Silent("there is no such socket")
        self._docker = aiodocker.Docker(f"unix://{path}", timeout=aiohttp.ClientTimeout(total=_ANSWER_S_MAX))
        self._refusal = aiodocker.DockerError
        # The last ones: an answer that is not understood.
        self._failures = (aiodocker.DockerError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._docker.close()

    async def inspect(self, name: str) -> _Shown | None:
        """By name or id; None when there is none."""
        try:
            return _shown_of(await self._docker.containers.container(name).show())
        except self._failures as error:
            # podman: 500, when it went while it was looked at.
            if isinstance(error, self._refusal) and (error.status == 404 or "no such container" in error.message):
                return None
            raise self._silent(error) from None

    async def running(self) -> dict[str, tuple[str, Mapping[str, str]]]:
        """Id to name and labels. Other names (`/other/alias`) are those of old Docker links."""
        try:
            return {
                each["Id"]: (next(name[1:] for name in each["Names"] if "/" not in name[1:]), each["Labels"] or {})
                for each in await self._docker.containers.list()
            }
        except (*self._failures, StopIteration) as error:
            raise self._silent(error) from None

    async def events(self) -> AsyncIterator[str | None]:
        """The id of a container with which something happened; None: of some container."""
        docker = self._docker
        subscriber = docker.events.subscribe(create_task=False)  # type: ignore[no-untyped-call]
        # From a second ago on, so that nothing is missed between the list and the first event.
        since = int(dt.datetime.now(dt.UTC).timestamp()) - 1
        reading = asyncio.ensure_future(docker.events.run(since=since, filters=json.dumps({"type": ["container", "network"]})))
        try:
            while (event := await subscriber.get()) is not None:
                actor = event.get("Actor") or {}
                if event.get("Type") == "container":
                    yield str(actor["ID"])
                else:
                    yield (actor.get("Attributes") or {}).get("container")
            await reading
        except self._failures as error:
            raise self._silent(error) from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _silent(self, error: Exception) -> _Silent:
        if isinstance(error, self._refusal):
            return _Silent("nobody answers" if error.status == _NOT_CONNECTED else error.message)
        if isinstance(error, (KeyError, TypeError, AttributeError, StopIteration)):
            return _Silent("its answer is not understood")
        return _Silent(str(error) or "no answer")
