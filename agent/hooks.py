"""Our programs on interfaces: put on and taken off one after the other, in a thread: the kernel takes 10 to 30 ms for each.

An interface that is being set up may refuse them for a moment, and one that never takes them is tried a few times a minute.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.core.events import Attach, Detach
from agent.core.types import Orientation
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath
from agent.datapath.errors import DatapathError

log = logging.getLogger("namegate")

AGAIN_AFTER_S: Final = 0.1
AGAIN_AFTER_S_MAX: Final = 10.0


class Problem(NamedTuple):
    reason: str
    again_after_s: float


NOT_YET: Final = Problem("it is not attached yet", AGAIN_AFTER_S)


class Hooks:
    """endpoints: those there are now, by number. attached: those with our programs on them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, datapath: Datapath, endpoints: Mapping[int, object]) -> None:
        self.attached: set[int] = set()
        self._loop = loop
        self._datapath = datapath
        self._endpoints = endpoints
        self._work: collections.deque[Attach | Detach] = collections.deque()
        self._working: asyncio.Task[None] | None = None
        self._problems: dict[int, Problem] = {}

    def change(self, effect: Attach | Detach) -> None:
        self._work.append(effect)
        if self._working is None:
            self._working = self._loop.create_task(self._work_off())

    def problem_of(self, endpoint: int) -> str | None:
        """Why our programs are not on it."""
        return None if endpoint in self.attached else self._problems.get(endpoint, NOT_YET).reason

    async def at_rest(self) -> None:
        """Returns when all that was asked for is done, or was tried."""
        while self._working is not None:
            await asyncio.wait([self._working])

    async def states(self, hooks: Sequence[tuple[int, Orientation]]) -> list[HookState]:
        """What the kernel has on these interfaces, by index."""
        return await asyncio.to_thread(lambda: [self._datapath.hook_state(*hook) for hook in hooks])

    def close(self) -> None:
        if self._working is not None:
            self._working.cancel()

    async def _work_off(self) -> None:
        try:
            while self._work:
                effect = self._work.popleft()
                await (self._attach(effect) if isinstance(effect, Attach) else self._detach(effect))
        finally:
            self._working = None

    async def _attach(self, effect: Attach) -> None:
        if effect.endpoint not in self._endpoints:
            return  # it went while others were attached
        try:
            await asyncio.to_thread(self._datapath.attach, effect)
        except DatapathError as error:
            before = self._problems.get(effect.endpoint, NOT_YET)
            if before.reason != str(error):
                log.error("endpoint %d: %s is NOT enforced: %s", effect.endpoint, effect.interface, error)
            again_after_s = min(2 * before.again_after_s, AGAIN_AFTER_S_MAX)
            self._problems[effect.endpoint] = Problem(str(error), again_after_s)
            self._loop.call_later(before.again_after_s, self.change, effect)
            return
        self._problems.pop(effect.endpoint, None)
        log.info("endpoint %d: %s is enforced", effect.endpoint, effect.interface)
        self.attached.add(effect.endpoint)
        if self.attached >= self._endpoints.keys():
            try:
                others = await asyncio.to_thread(self._datapath.detach_others)
            except DatapathError as error:
                log.error("what was policed before cannot be let go: %s", error)
            else:
                for interface in others:
                    log.info("%s is no endpoint any more: detached", interface)

    async def _detach(self, effect: Detach) -> None:
        self.attached.discard(effect.endpoint)
        self._problems.pop(effect.endpoint, None)
        try:
            await asyncio.to_thread(self._datapath.detach, effect)
        except DatapathError as error:
            log.error(
                "endpoint %d: %s is no endpoint any more, but cannot be let go: %s", effect.endpoint, effect.interface, error
            )
            return
        log.info("endpoint %d: %s is no endpoint any more: detached", effect.endpoint, effect.interface)
