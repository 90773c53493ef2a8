"""Attaching while the agent runs: by command, as long as a connection lives, and as container engines report.

Rule 1: `attach` is answered when the interface is policed as was said; refused, everything is as it was before.
Rule 2: an agent for runs ends when nobody has held a lease for IDLE_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from agent.attachments import COMMAND, LEASE, Attachment, Attachments, Followed, PolicyText, own_policies
from agent.config import ENDPOINT_KEYS, ConfigError, ContainerSettings, EndpointSettings, endpoint_of
from agent.control import ControlError
from agent.documents.remarks import PolicyError
from agent.drops import Drops
from agent.hooks import Hooks
from agent.host import forwarding
from agent.host.containers import ContainerError, ContainerWatch
from agent.host.endpoints import HostEndpoints, absent
from agent.host.interfaces import links
from agent.leases import Lease, Row

# Who holds a lease connects again when the agent has started anew; until then it is policed as before.
LEASE_KEPT_S: Final = 5.0
IDLE_S: Final = 2.0
POLICED_S_MAX: Final = 30.0


class World(Protocol):
    """What attaching needs of the shell. host_endpoints, hooks, drops: theirs. look_now: returns when the engine knows of all
    that is there by now. judged: every endpoint of now is judged, or why not. problem_of: why this interface is no endpoint.
    watch: every question of this endpoint is told to its lease from now on, or no longer.
    """

    host_endpoints: HostEndpoints
    hooks: Hooks
    drops: Drops

    def look_around(self) -> None: ...
    async def look_now(self) -> None: ...
    async def judged(self, policies: None, patience_s: float) -> str | None: ...
    def problem_of(self, interface: str) -> str | None: ...
    def watch(self, endpoint: int, *, is_watched: bool) -> None: ...


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
        self._world = world
        self._attachments = attachments
        self._device = device
        self._clock = clock
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._is_watching_containers = bool(containers or attachments.followed)
        self._containers = ContainerWatch(containers, self._report)
        for each in attachments.followed.values():
            self._containers.resume(each.container, Path(each.engine) if each.engine else None, each.settings)

    def start(self, listed: Callable[[], None]) -> None:
        """listed: called when every engine has said what it has."""
        is_leased = any(each.owner == LEASE for each in self._attachments.by_ifindex.values())
        self._loop.call_later(LEASE_KEPT_S if is_leased else IDLE_S, self._drop_unclaimed)
        self._containers.start()
        if self._is_watching_containers:
            self._listing = self._loop.create_task(self._listed(listed))
        else:
            listed()

    async def close(self) -> None:
        await self._containers.close()

    def keep_only(self, ifindexes: set[int]) -> None:
        """Interfaces that are there; an attachment ends with its own."""
        self._attachments.remove(self._attachments.by_ifindex.keys() - ifindexes)

    async def attach(self, arguments: Mapping[str, Any]) -> Row | Lease:
        if arguments.get("container"):
            return await self._follow(str(arguments["container"]), arguments)
        attachment = await self._attachment(arguments)
        before = self._attachments.by_ifindex.get(attachment.ifindex)
        self._attachments.put(attachment)
        self._world.host_endpoints.take_back(attachment.ifindex)
        try:
            number = await self._police(attachment)
            has_ipv6 = arguments.get("forwarding") is True and await self._forward(attachment.settings.interface)
        except BaseException:
            if self._attachments.by_ifindex.get(attachment.ifindex) is attachment:
                self._attachments.restore(attachment.ifindex, before)
                self._world.look_around()
            raise
        answer: Row = {"endpoint": number, "interface": attachment.settings.interface}
        if attachment.owner != LEASE:
            return answer
        lease = Lease(number, attachment.ifindex, {**answer, "ipv6": has_ipv6}, self._clock, self._end)
        self.leases[number] = lease
        self._world.watch(number, is_watched=True)
        return lease

    async def detach(self, ifindex: int) -> None:
        self._world.host_endpoints.release(ifindex)
        self._attachments.remove([ifindex])
        await self._world.look_now()

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
        try:
            policies = None if texts is None else own_policies(texts)
        except PolicyError as error:
            raise ControlError(str(error), 1) from None
        link = (await asyncio.to_thread(links)).get(settings.interface)
        if link is None:
            raise ControlError(absent(settings.interface), 1)
        return Attachment(link.ifindex, settings, LEASE if arguments.get("lease") is True else COMMAND, texts, policies)

    def _settings(self, said: Mapping[str, object]) -> EndpointSettings:
        try:
            return endpoint_of(said, self._device)
        except ConfigError as error:
            raise ControlError("; ".join(f"{each.field}: {each.message}" for each in error.mistakes), 1) from None

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

    async def _forward(self, interface: str) -> bool:
        """Has it IPv6 to the outside?"""
        try:
            changed, has_ipv6 = await asyncio.to_thread(forwarding.enable, interface)
        except OSError as error:
            raise ControlError(f"forwarding cannot be turned on for {interface}: {error.strerror}", 1) from None
        if changed:
            self._attachments.sysctls = {**changed, **self._attachments.sysctls}
            self._attachments.save()
        return has_ipv6

    async def _end(self, lease: Lease) -> None:
        self._world.drops.read()
        if self.leases.get(lease.endpoint) is lease:
            del self.leases[lease.endpoint]
            self._world.watch(lease.endpoint, is_watched=False)
            self._drop_unclaimed()

    def _drop_unclaimed(self) -> None:
        """Leases that nobody holds; where none is left, so are the switches that were turned for them."""
        claimed = {lease.ifindex for lease in self.leases.values()}
        leased = {each.ifindex for each in self._attachments.by_ifindex.values() if each.owner == LEASE}
        if leased - claimed:
            self._attachments.remove(leased - claimed)
            self._world.look_around()
        if claimed:
            return
        if self._attachments.sysctls:
            forwarding.put_back(self._attachments.sysctls)
            self._attachments.sysctls = {}
            self._attachments.save()
        if self._idle is not None:
            self._loop.call_later(IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self._idle is not None and not self.leases:
            self._idle()

    # --- containers ------------------------------------------------------------------------------------------------------

    async def _follow(self, container: str, arguments: Mapping[str, Any]) -> Row:
        settings = self._settings({**{key: arguments.get(key) for key in ENDPOINT_KEYS}, "interface": "container"})
        engine = str(arguments.get("engine") or "")
        try:
            attached = await self._containers.follow(container, Path(engine) if engine else None, settings)
        except ContainerError as error:
            raise ControlError(str(error), 1) from None
        self._attachments.followed[attached.name] = Followed(attached.name, engine, settings)
        self._attachments.save()
        await self._world.look_now()
        problem = await self._world.judged(None, POLICED_S_MAX)
        if problem is not None:
            raise ControlError(f"container {attached.name} is not enforced: {problem}", 1)
        await self._world.hooks.at_rest()
        return {"container": attached.name, "interfaces": attached.interfaces, "warnings": attached.warnings}

    def _report(self, owner: str, found: Mapping[int, EndpointSettings] | None, problems: Sequence[str]) -> None:
        self.problems[owner] = list(problems)
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
