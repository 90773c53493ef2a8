"""`status` and `endpoints`: what is enforced and what is not, read from the kernel where the kernel can say it."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from agent.compiled import is_in_use
from agent.config import Config
from agent.control.listings import Listings, Row, counts
from agent.core.engine import Engine
from agent.core.types import Table
from agent.datapath.abi import Loss
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath
from agent.hooks import NOT_YET, Hooks
from agent.host.endpoints import HostEndpoints
from agent.host.interfaces import links

ENFORCING: Final = "enforcing"
AUDITED: Final = "audited: everything passes"
OPEN: Final = "open: no policy closes it"
_SOUND: Final = frozenset({ENFORCING, AUDITED, OPEN})


class Said(NamedTuple):
    """What the shell knows besides. wrong: interface to the sentence that says why it is not policed as meant. problems: what
    else makes it degraded; warnings: what does not, and is to be seen. counters: of the edges, by what they count.
    """

    wrong: Mapping[str, str]
    problems: list[str]
    warnings: list[str]
    is_starting: bool
    counters: Mapping[str, int]


class Status:
    """host_endpoints, said: asked each time. differences: of the kernel's rows in these tables (Verify)."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        datapath: Datapath,
        hooks: Hooks,
        listings: Callable[[], Listings],
        host_endpoints: Callable[[], HostEndpoints],
        said: Callable[[], Said],
        differences: Callable[..., list[Row]],
    ) -> None:
        self._config = config
        self._engine = engine
        self._datapath = datapath
        self._hooks = hooks
        self._listings = listings
        self._host_endpoints = host_endpoints
        self._said = said
        self._differences = differences
        self._started_at = dt.datetime.now(dt.UTC)

    async def endpoints(self) -> list[Row]:
        rows = self._listings().endpoints()
        hooks = [self._engine.groups.endpoints[int(str(row["endpoint"]))].added for row in rows]
        states = await self._hooks.states([(added.ifindex, added.orientation) for added in hooks])
        for row, state in zip(rows, states, strict=True):
            if state is not HookState.FIRST:
                row["state"] = state.sentence
            elif not row["default_deny"]:
                row["state"] = OPEN
            else:
                row["state"] = AUDITED if row["audit"] else ENFORCING
        return rows

    async def whole(self) -> Row:
        said = self._said()
        reasons = [f"source `{source}` has not reported" for source in sorted(self._engine.missing_sources)]
        endpoints = await self.endpoints()
        reasons += await self._unprotected(said.wrong)
        reasons += [
            f"{row['interface']}: {row['state']}"
            for row in endpoints
            if row["state"] not in _SOUND and row["endpoint"] in self._hooks.attached
        ]
        reasons += await asyncio.to_thread(self._datapath.gate_problems)
        reasons += self._foreign_rows()
        reasons += self._what_is_nearly_full()
        reasons += said.problems
        failed = self._listings().rows_failed()
        reasons += [f"{row['table']} row {row['row']}: {row['error']}" for row in failed[:20]]
        is_starting = said.is_starting or not self._engine.proxy.is_started
        return {
            "state": "starting" if is_starting else "degraded" if reasons else "enforcing",
            "reasons": reasons,
            "warnings": said.warnings,
            "not_enforced": [row["interface"] for row in endpoints if row["state"] in {AUDITED, OPEN}],
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "compiled": is_in_use(),
            **counts(self._engine),
            "dropped": sum(counter.packets for counter in self._datapath.counters() if counter.reason.is_drop),
            "events_lost": self._datapath.losses()[Loss.EVENT],
            "counters": self._counters(said.counters),
            "rows_failed": failed,
        }

    async def _unprotected(self, wrong: Mapping[str, str]) -> list[str]:
        """What is not policed as meant; also interfaces that came this moment, so the kernel is asked which there are."""
        there = self._host_endpoints().matching(await asyncio.to_thread(links))
        endpoints = self._engine.groups.endpoints
        noticed = {endpoint.added.ifindex for endpoint in endpoints.values()}
        said = dict(wrong)
        for name, (link, _) in there.items():
            if link.ifindex not in noticed:
                said.setdefault(name, f"{name} is unprotected: {NOT_YET.reason}")
        for number, endpoint in endpoints.items():
            problem = self._hooks.problem_of(number)
            if problem is not None:
                said[endpoint.added.interface] = f"{endpoint.added.interface} is unprotected: {problem}"
        return list(said.values())

    def _counters(self, edges: Mapping[str, int]) -> dict[str, int]:
        """What was given up, ignored or came late, by reason; what never happened is left out (I9)."""
        counted = {key.replace("_", " "): count for key, count in edges.items()} | self._engine.proxy.counters
        return {key: count for key, count in sorted(counted.items()) if count}

    def _foreign_rows(self) -> list[str]:
        """The few rows that decide over whole endpoints: somebody may have edited them since the last look at all."""
        return [
            f"{row['table']} row {row['row']} in the kernel is not as the agent wrote it: {row['so']}"
            for row in self._differences(Table.GROUPS, Table.ENDPOINTS)
        ]

    def _what_is_nearly_full(self) -> list[str]:
        """What has 2 % left: when it is full, the next reply or policy that needs a place is refused."""
        engine, tables = self._engine, self._config.datapath
        rows_by_family = engine.reconciler.ipcache.rows_by_family
        uses = {
            "identities": (len(engine.identities), self._config.limits.identities),
            "names": (len(engine.dns_cache.scopes_by_name), self._config.limits.names),
            "policy map": (len(engine.reconciler.policy.realized), tables.policy_rows),
            "ipcache of IPv4": (rows_by_family[4], tables.ipcache_rows),
            "ipcache of IPv6": (rows_by_family[16], tables.ipcache_rows),
        }
        return [f"{what}: {used} of {most} in use" for what, (used, most) in uses.items() if used >= most - most // 50]
