"""Attaching while the agent runs: by command, as long as a connection lives, and as container engines report.

Rule 1: `attach` is answered when the interface is policed as was said; refused, everything is as it was before.
Rule 2: a command does not change what is said of an endpoint: other labels can open it, and nobody would notice. Who means it
detaches it first. A lease and the OCI hook say what an interface is that was made for them.
Rule 3: an agent for runs ends when nobody has held a lease for IDLE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from agent.attachments import COMMAND, LEASE, Attachment, Attachments, Followed, PolicyText, own_policies
from agent.config import ENDPOINT_KEYS, ConfigError, ContainerSettings, EndpointSettings, endpoint_of, said_of
from agent.control import ControlError
from agent.core.rules import Policy
from agent.core.types import Orientation
from agent.documents.remarks import PolicyError
from agent.drops import Drops
from agent.facts import Row
from agent.hooks import Hooks
from agent.host import forwarding
from agent.host.containers import ContainerError, ContainerWatch
from agent.host.endpoints import HostEndpoints, absent
from agent.host.interfaces import links
from agent.leases import Lease

# Who holds a lease connects again when the agent has started anew; until then it is policed as before.
LEASE_KEPT_S: Final = 5.0
IDLE_S: Final = 2.0
POLICED_S_MAX: Final = 30.0


_UPLINK: Final = (
    "{} is an uplink of this host: a default route leaves by it, and policed like a workload's interface it would cut the "
    "host's own DNS; police it by an entry of `endpoints` in the configuration with `orientation: uplink`"
)

log = logging.getLogger("namegate")


class World(Protocol):
    """What attaching needs of the shell. host_endpoints, hooks, drops: theirs. look_now: returns when the engine knows of all
    that is there by now. judged: every endpoint of now is judged, or why not. problem_of: why this interface is no endpoint.
    watch: every question of this endpoint is told to its lease from now on, or no longer. unclosed: interfaces that no policy
    closes. warn_of_forwarding: where it is off and these endpoints need it.
    """

    host_endpoints: HostEndpoints
    hooks: Hooks
    drops: Drops

    def look_around(self) -> None: ...
    async def look_now(self) -> None: ...
    async def judged(self, policies: None, patience_s: float) -> str | None: ...
    def problem_of(self, interface: str) -> str | None: ...
    def watch(self, endpoint: int, *, is_watched: bool) -> None: ...
    def unclosed(self) -> list[str]: ...
    def warn_of_forwarding(self, numbers: Iterable[int]) -> None: ...


class Attaching:
    """idle: called when there has been no lease for a while; None for an agent that lives without. leases: by endpoint."""

    def __init__(
        self,
        world: World,
        attachments: Attachments,
        containers: Sequence[ContainerSettings],
        device: str,
        clock: Callable[[], float],
        idle: Callable[[], None] | None,
    ) -> None:
        self.leases: dict[int, Lease] = {}
        self.problems: dict[str, list[str]] = {}  # by who reported them
        self.warnings: dict[str, list[str]] = {}
        self._world = world
        self._attachments = attachments
        self._device = device
        self._coming: set[int] = set()  # interfaces that are being attached
        self._is_patient = True
        self._clock = clock
        self._idle = idle
        self._idle_at: asyncio.TimerHandle | None = None
        self._forwarded: dict[int, str] = {}  # index to name of what needs forwarding
        self._following: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_watching_containers = bool(containers or attachments.followed)
        self._containers = ContainerWatch(containers, self._report)
        for each in attachments.followed.values():
            self._containers.resume(each.container, Path(each.engine) if each.engine else None, each.settings)
        owners = {COMMAND, LEASE, *self._containers.owners}
        orphans = (each for each in attachments.by_ifindex.values() if each.owner not in owners and each.hooked is None)
        attachments.remove([each.ifindex for each in orphans])

    def start(self, listed: Callable[[], None]) -> None:
        """listed: called when every engine has said what it has."""
        self._loop.call_later(LEASE_KEPT_S if self._leased() else IDLE_S, self._lose_patience)
        self._containers.start()
        if self._is_watching_containers:
            self._listing = self._loop.create_task(self._listed(listed))
        else:
            listed()

    async def close(self) -> None:
        await self._containers.close()

    def attached(self) -> set[int]:
        """Indexes of interfaces."""
        return set(self._attachments.by_ifindex)

    def end_all(self, gone: set[int]) -> None:
        """An attachment ends with its interface."""
        self._attachments.remove(gone)

    def follow_routes(self) -> None:
        """The network changed: routes may leave by other interfaces now."""
        if self._forwarded and (self._following is None or self._following.done()):
            self._following = self._loop.create_task(self._follow_routes())

    async def attach(self, arguments: Mapping[str, Any]) -> Row | Lease:
        if arguments.get("container"):
            return await self._follow(str(arguments["container"]), arguments)
        attachment = await self._attachment(arguments)
        needs_forwarding = arguments.get("forwarding") is True
        if needs_forwarding and attachment.owner != LEASE:
            raise ControlError("`forwarding` lasts as long as a `lease`")
        ifindex, interface = attachment.ifindex, attachment.settings.interface
        if ifindex in self._coming:
            raise ControlError(f"{interface} is being attached at this moment", 1)
        is_by_command = attachment.owner != LEASE and attachment.hooked is None
        if is_by_command and (objection := self._objection(ifindex, attachment.settings, attachment.policies)) is not None:
            raise ControlError(objection, 1)
        was_endpoint = self._world.host_endpoints.in_force(interface, ifindex) is not None
        before = self._attachments.by_ifindex.get(ifindex)
        self._attachments.put(attachment)
        self._coming.add(ifindex)
        was_released = self._world.host_endpoints.take_back(ifindex)
        try:
            number = await self._police(attachment)
            has_ipv6 = needs_forwarding and await self._forward(interface)
            if needs_forwarding:
                self._forwarded[ifindex] = interface
        except BaseException:
            self._coming.discard(ifindex)
            if self._attachments.by_ifindex.get(ifindex) is attachment:
                self._attachments.restore(ifindex, before)
                if was_released:
                    self._world.host_endpoints.release(ifindex)
                self._world.look_around()
            self._clear()
            raise
        self._coming.discard(ifindex)
        for warning in arguments.get("warnings") or ():
            log.warning("%s: %s", interface, warning)
        answer: Row = {"endpoint": number, "interface": interface}
        if attachment.owner != LEASE:
            self._world.warn_of_forwarding([number])
            return {**answer, "was_endpoint": was_endpoint, "open": self._unclosed_of([interface])}
        first = {**answer, "ipv6": has_ipv6, "device": self._device}
        lease = Lease(number, ifindex, first, self._clock, self._end)
        self.leases[number] = lease
        self._world.watch(number, is_watched=True)
        return lease

    async def detach(self, ifindex: int) -> None:
        self._world.host_endpoints.release(ifindex)
        self._attachments.remove([ifindex])
        await self._world.look_now()

    async def hear_of_container(self, arguments: Mapping[str, Any]) -> Row:
        """The OCI hook let none start; its runtime may not show why."""
        log.error("container %s is not started: %s", arguments.get("container"), arguments.get("why"))
        return {}

    async def unfollow(self, container: str) -> Row:
        was_attached = self._containers.unfollow(container)
        if self._attachments.followed.pop(container, None) is not None:
            self._attachments.save()
        if not was_attached:
            raise ControlError(f"no container {container} is attached: `namegate endpoints` shows those that are", 1)
        await self._world.look_now()
        return {"container": container}

    # --- one interface ---------------------------------------------------------------------------------------------------

    async def _attachment(self, arguments: Mapping[str, Any]) -> Attachment:
        settings = self._settings({key: arguments.get(key) for key in ENDPOINT_KEYS})
        texts = _policy_texts(arguments.get("policies"))
        allowed = _networks(arguments.get("allow_addresses"))
        if allowed and texts is None:
            raise ControlError("`allow_addresses` is of an attachment's own `policies`")
        try:
            policies = None if texts is None else await asyncio.to_thread(own_policies, texts, allowed)
        except PolicyError as error:
            raise ControlError(str(error), 1) from None
        link = (await asyncio.to_thread(links)).get(settings.interface)
        if link is None:
            raise ControlError(absent(settings.interface), 1)
        if settings.orientation is Orientation.BEHIND and link.ifindex in await asyncio.to_thread(forwarding.uplinks):
            raise ControlError(_UPLINK.format(settings.interface), 1)
        hooked = settings.labels if arguments.get("hook") is True else None
        owner = LEASE if arguments.get("lease") is True else COMMAND
        return Attachment(link.ifindex, settings, owner, texts, policies, hooked, allowed)

    def _objection(self, ifindex: int, settings: EndpointSettings, policies: tuple[Policy, ...] | None) -> str | None:
        """Why a command may not say this of the interface: something else is in force of it."""
        interface = settings.interface
        present = self._world.host_endpoints.in_force(interface, ifindex)
        if present is None:
            return None
        now, then = said_of(present), said_of(settings)
        attachment = self._attachments.by_ifindex.get(ifindex)
        different = [key for key in ENDPOINT_KEYS[1:] if now[key] != then[key]]
        if policies != (attachment.policies if attachment is not None else None):
            different.append("policies")
        if not different:
            return None
        return (
            f"{interface} is an endpoint already, with other {', '.join(different)}, and they stay in force: "
            f"`namegate detach {interface}` first, and it can be attached as something else"
        )

    def _after_hook(self, ifindex: int, settings: EndpointSettings) -> EndpointSettings:
        """What the hook attached keeps its labels, and those of its container are added: that replaces nothing."""
        attachment = self._attachments.by_ifindex.get(ifindex)
        if attachment is None or attachment.hooked is None:
            return settings
        return dataclasses.replace(settings, labels=attachment.settings.labels)

    def _unclosed_of(self, interfaces: Iterable[str]) -> list[str]:
        return sorted({*interfaces} & {*self._world.unclosed()})

    def _settings(self, said: Mapping[str, object]) -> EndpointSettings:
        try:
            return endpoint_of(said, self._device)
        except ConfigError as error:
            said_wrong = (": ".join(filter(None, (each.field, each.message))) for each in error.mistakes)
            raise ControlError("; ".join(said_wrong), 1) from None

    async def _police(self, attachment: Attachment) -> int:
        """The endpoint's number, when it is enforced."""
        interface = attachment.settings.interface
        await self._world.look_now()
        number = self._world.host_endpoints.number_of(attachment.ifindex)
        if number is None:
            raise ControlError(self._world.problem_of(interface) or f"{interface} went while it was attached", 1)
        problem = await self._world.judged(None, POLICED_S_MAX)
        if problem is None:
            await self._world.hooks.at_rest()
            problem = self._world.hooks.problem_of(number)
        if problem is not None:
            raise ControlError(f"{interface} is not enforced: {problem}", 1)
        return number

    # --- leases ----------------------------------------------------------------------------------------------------------

    async def _forward(self, interface: str, *, also_again: bool = True) -> bool:
        """Has it IPv6 to the outside? also_again: switches that we turned before and somebody turned back."""
        try:
            switches, has_ipv6 = await asyncio.to_thread(forwarding.needed, interface)
            if not also_again:
                switches = {path: value for path, value in switches.items() if path not in self._attachments.sysctls}
            if switches:
                self._attachments.sysctls = {**switches, **self._attachments.sysctls}
                self._attachments.save()
                await asyncio.to_thread(forwarding.turn_on, switches)
        except OSError as error:
            raise ControlError(f"forwarding cannot be turned on for {interface}: {error.strerror}", 1) from None
        return has_ipv6

    async def _follow_routes(self) -> None:
        with contextlib.suppress(ControlError):  # it went, or goes
            await self._forward(next(iter(self._forwarded.values())), also_again=False)
        if not self._forwarded:
            self._clear()

    async def _end(self, lease: Lease) -> None:
        self._world.drops.read()
        if self.leases.get(lease.endpoint) is lease:
            del self.leases[lease.endpoint]
            self._forwarded.pop(lease.ifindex, None)
            self._world.watch(lease.endpoint, is_watched=False)
            if lease.ifindex in self._leased() - self._held():
                self._let_go({lease.ifindex})
            self._clear()

    def _leased(self) -> set[int]:
        return {each.ifindex for each in self._attachments.by_ifindex.values() if each.owner == LEASE}

    def _held(self) -> set[int]:
        """Interfaces whose leases somebody holds, or is about to."""
        return {lease.ifindex for lease in self.leases.values()} | self._coming

    def _let_go(self, ifindexes: set[int]) -> None:
        self._attachments.remove(ifindexes)
        self._world.look_around()

    def _lose_patience(self) -> None:
        """Who held a lease when the process before ended has come again by now."""
        self._is_patient = False
        self._clear()

    def _clear(self) -> None:
        """Leases that nobody holds; where none is left, so are the switches that were turned for them."""
        if not self._is_patient and self._leased() - self._held():
            self._let_go(self._leased() - self._held())
        if self._leased() | self._held():
            return
        if self._attachments.sysctls:
            forwarding.put_back(self._attachments.sysctls)
            self._attachments.sysctls = {}
            self._attachments.save_or_say()
        if self._idle is not None:
            if self._idle_at is not None:
                self._idle_at.cancel()
            self._idle_at = self._loop.call_later(IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self._idle is not None and not self._leased() | self._held():
            self._idle()

    # --- containers ------------------------------------------------------------------------------------------------------

    async def _follow(self, container: str, arguments: Mapping[str, Any]) -> Row:
        settings = self._settings({**{key: arguments.get(key) for key in ENDPOINT_KEYS}, "interface": "container"})
        engine = str(arguments.get("engine") or "")
        coming: set[int] = set()
        uplinks = await asyncio.to_thread(forwarding.uplinks)

        def objection(found: Mapping[int, EndpointSettings]) -> str | None:
            coming.update(found)
            for ifindex in found.keys() & uplinks:
                return _UPLINK.format(found[ifindex].interface)
            objections = (self._objection(ifindex, self._after_hook(ifindex, each), None) for ifindex, each in found.items())
            return next(filter(None, objections), None)

        try:
            attached = await self._containers.follow(container, Path(engine) if engine else None, settings, objection)
        except ContainerError as error:
            raise ControlError(str(error), 1) from None
        for ifindex in coming:
            self._world.host_endpoints.take_back(ifindex)
        self._attachments.followed[attached.name] = Followed(attached.name, engine, settings)
        self._attachments.save()
        await self._world.look_now()
        problem = await self._world.judged(None, POLICED_S_MAX)
        if problem is not None:
            raise ControlError(f"container {attached.name} is not enforced: {problem}", 1)
        await self._world.hooks.at_rest()
        return {
            "container": attached.name,
            "interfaces": attached.interfaces,
            "warnings": attached.warnings,
            "open": self._unclosed_of(attached.interfaces),
        }

    def _report(
        self, owner: str, found: Mapping[int, EndpointSettings] | None, problems: Sequence[str], warnings: Sequence[str]
    ) -> None:
        self.problems[owner], self.warnings[owner] = list(problems), list(warnings)
        if found is not None and self._attachments.report(owner, found):
            self._world.look_around()

    async def _listed(self, listed: Callable[[], None]) -> None:
        await self._containers.listed()
        await self._world.look_now()
        listed()


def _policy_texts(given: object) -> tuple[PolicyText, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ControlError("`policies` is a list of objects with `name` and `text`")
    return tuple(PolicyText(str(each.get("name", "policy")), str(each.get("text", ""))) for each in given)


def _networks(given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ControlError("`allow_addresses` is a list of networks")
    return tuple(given)
