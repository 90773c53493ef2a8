"""Is everything in the kernel as the agent wrote it? Asked by people (`namegate verify`), and all the time in the background.

    names -> bags -> label sets -> identities -> desired rows      agent/derived.py, for people alone
                                                 realized rows -> the kernel's maps     here
                                                 attached endpoints -> programs on hooks
                                                 live flows -> identities

Rule 1: a slice of rows is read and compared in one go, and nobody but this thread writes what the core wants: what differs was
written by somebody else. A row whose write is on its way is left out: only the kernel knows yet what became of it.
Rule 2: each row that the kernel holds has to be one that is realized, and as it is; each realized row that was not among them
is looked up by itself. So no row is missed, lost or foreign, whatever comes and goes between two slices.
Rule 3: what is lost is written again by the reconciler, in its order; what is foreign is deleted at once.
Rule 4: a slice takes less than a millisecond (but for two that copy a table's keys: 2 to 3 ms where it has 100,000), and in the
background 120 times its length passes before the next: with what the loop itself needs, that is 1 % of a processor.

Not compared: `last_seen`, `questions`, `answers`, counters and fragments are what the program noted, nobody else knows better.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.control import ControlError
from agent.control.listings import Listings
from agent.core.engine import Engine
from agent.core.events import Attach, Event, RowsLost
from agent.core.tables import KernelTable
from agent.core.types import IDENTITY_ANY, Key, Table, text_of
from agent.datapath import abi
from agent.datapath.abi import FlowState
from agent.datapath.attach import HookState, interface_name
from agent.datapath.datapath import Datapath
from agent.datapath.errors import DatapathError
from agent.datapath.maps import MAPS_OF
from agent.datapath.syscall import Batch
from agent.derived import Contradiction, contradictions
from agent.differences import Difference
from agent.facts import Facts
from agent.hooks import Hooks

log = logging.getLogger("namegate")

Row = dict[str, Any]

# A slice ends with the first so many rows, or steps, that are over after this.
SLICE_S: Final = 0.0006
ROWS_AT_ONCE: Final = 64
STEPS_AT_ONCE: Final = 8
REST_PER_WORK: Final = 120
# Who asks waits for the answer, and everybody else for no more than a slice.
REST_PER_WORK_ASKED: Final = 1
LISTED_MAX: Final = 1_000
LOGGED_MAX: Final = 20  # of one round; the rest is counted
# What memory says of itself is between two states while a change is under way: only what it says twice counts.
SAID_AGAIN_AFTER_S: Final = 1.5

_TRIES: Final = {"policy", "ipcache4", "ipcache6"}


class Round:
    """One comparison of everything. mends: what is not as it should be is made so."""

    def __init__(self, *, mends: bool) -> None:
        self.mends = mends
        self.compared: collections.Counter[str] = collections.Counter()  # by table
        self.found = 0
        self.rows: list[Row] = []
        self._mended: list[Callable[[], bool]] = []  # for each row, asked at the end
        self.worked_s = 0.0
        self.longest_s = 0.0  # of one slice

    def add(self, row: Row, is_mended: Callable[[], bool]) -> None:
        self.found += 1
        if len(self.rows) < LISTED_MAX:
            self.rows.append(row)
            self._mended.append(is_mended)

    def told(self) -> list[Row]:
        return [{**row, "mended": done()} for row, done in zip(self.rows, self._mended, strict=True)]


class Verify:
    """take: of the shell. every_s: how often all is compared unasked, 0 for never."""

    def __init__(
        self,
        engine: Engine,
        datapath: Datapath,
        hooks: Hooks,
        facts: Facts,
        take: Callable[[Sequence[Event]], None],
        listings: Callable[[], Listings],
        every_s: float,
    ) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self._engine = engine
        self._datapath = datapath
        self._kernel = datapath.tables
        self._hooks = hooks
        self._facts = facts
        self._take = take
        self._listings = listings
        self._every_s = every_s
        self._watching: asyncio.Task[None] | None = None
        self._last: Row | None = None  # the last round in the background

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._every_s:
            self._watching = loop.create_task(self._watch())
            self._watching.add_done_callback(_raise)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    # --- in the background ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            one = Round(mends=True)
            try:
                await self._work_off(one, self._slices(one), REST_PER_WORK)
                await self._put_programs_back(one)
            except DatapathError as error:
                log.warning("the kernel's tables cannot be compared: %s", error)
            self._tell(one)
            self._last = {
                "rows": one.compared.total(),
                "found": one.found,
                "took_s": round(time.monotonic() - began, 3),
                "worked_ms": round(one.worked_s * 1000, 3),
                "longest_slice_ms": round(one.longest_s * 1000, 3),
            }
            await asyncio.sleep(max(0.0, began + self._every_s - time.monotonic()))

    def _tell(self, one: Round) -> None:
        """Of a round that mends."""
        rows = one.told()
        for row in rows[:LOGGED_MAX]:
            log.warning(
                "%s: %s row %s was %s instead of %s: %s",
                "somebody changed the kernel, mended" if row["mended"] else "NOT as it should be",
                *(row[key] for key in ("table", "row", "is", "should_be", "so")),
            )
        if one.found > LOGGED_MAX:
            log.warning("… and %d more of that round", one.found - LOGGED_MAX)
        for row in rows:
            self._facts.tell("repair", row)

    async def _put_programs_back(self, one: Round) -> None:
        """On interfaces from which somebody took them."""
        endpoints = self._engine.groups.endpoints
        hooks = {number: endpoints[number].added for number in self._hooks.attached if number in endpoints}

        def bare() -> list[int]:
            return [n for n, added in hooks.items() if not self._datapath.has_programs(added.ifindex, added.orientation)]

        for number in await asyncio.to_thread(bare):
            added = hooks[number]
            # It may have gone, or have been let go, this very moment.
            if number in self._hooks.attached and number in endpoints and interface_name(added.ifindex):
                self._note_hook(number, HookState.ABSENT, one)
        if one.found:
            await self._hooks.at_rest()

    def _note_hook(self, number: int, state: HookState, one: Round) -> None:
        """A program that is gone is put on again; one that somebody else's comes before is the administrator's to judge."""
        added = self._engine.groups.endpoints[number].added
        is_put_back = one.mends and state is HookState.ABSENT
        if is_put_back:
            self.counters["programs put back"] += 1
            self._hooks.change(Attach(number, added.interface, added.ifindex, added.orientation))
        row = _row("hooks", added.interface, HookState.FIRST.sentence, state.sentence, _HOOK_MEANS[state])
        one.add(row, lambda: is_put_back and self._datapath.has_programs(added.ifindex, added.orientation))

    # --- for people ------------------------------------------------------------------------------------------------------

    async def answer(self, arguments: Mapping[str, object]) -> Row:
        """All of it now. repair: what can be made as it should be, is."""
        began = time.monotonic()
        one = Round(mends=bool(arguments.get("repair")))
        try:
            await self._work_off(one, self._slices(one), REST_PER_WORK_ASKED)
            await self._work_off(one, self._flows(one), REST_PER_WORK_ASKED)
            await self._compare_memory(one)
            await self._look_at_hooks(one)
        except DatapathError as error:
            raise ControlError(error.sentence) from None
        if one.mends:
            self._tell(one)
        return {
            "compared": dict(one.compared),
            "took_s": round(time.monotonic() - began, 3),
            "repair": one.mends,
            "found": one.found,
            "differences": one.told(),
            "background": self._last,
        }

    def differences(self, *tables: Table) -> list[Row]:
        """Of a few small tables, at once; changes nothing."""
        one = Round(mends=False)
        for table in tables:
            collections.deque(self._slices_of(self._engine.reconciler.tables[table], one), maxlen=0)
        return one.rows

    async def _work_off(self, one: Round, slices: Iterator[object], rest_per_work: float) -> None:
        is_over = False
        while not is_over:
            began, worked_s = time.thread_time(), 0.0
            while not is_over and worked_s < SLICE_S:
                is_over = next(slices, slices) is slices
                worked_s = time.thread_time() - began
            one.worked_s += worked_s
            one.longest_s = max(one.longest_s, worked_s)
            await asyncio.sleep(rest_per_work * worked_s)

    # --- rows ------------------------------------------------------------------------------------------------------------

    def _slices(self, one: Round) -> Iterator[None]:
        for table in self._engine.reconciler.tables.values():
            yield from self._slices_of(table, one)

    def _slices_of(self, table: KernelTable, one: Round) -> Iterator[None]:
        keys = list(table.realized)
        one.compared[str(table.name)] += len(keys)
        unseen: set[Key] = set()
        for first in range(0, len(keys), ROWS_AT_ONCE):
            unseen.update(keys[first : first + ROWS_AT_ONCE])
            yield
        for name in MAPS_OF[table.name]:
            yield from self._look_through(table, name, unseen, one)
        while unseen:
            self._note(self._lost(table, [unseen.pop() for _ in range(min(len(unseen), ROWS_AT_ONCE))]), one)
            yield

    def _look_through(self, table: KernelTable, name: str, unseen: set[Key], one: Round) -> Iterator[None]:
        """Every row in the map: is it one of ours, and as it was written? Those of ours are taken out of `unseen`."""
        size, value_size = (layout.size for layout in abi.MAPS[name])
        realized, in_flight, pack_value = table.realized, table.in_flight, abi.VALUE_PACKERS[table.name]
        position: bytes | None = None
        while True:
            batch = self._kernel.batch(name, position, ROWS_AT_ONCE)
            found: list[Difference] = []
            for place, key in enumerate(abi.unpack_keys(name, batch.keys)):
                row, spelled = realized.get(key), key
                value = batch.values[place * value_size : (place + 1) * value_size]
                if row is None:
                    raw = batch.keys[place * size : (place + 1) * size]
                    known = abi.core_key(name, raw)
                    row = realized.get(known) if known is not None else None
                    if known is None or row is None:
                        if known not in in_flight:
                            found.append(Difference(table.name, name, raw, known, None, value))
                        continue
                    spelled = known
                unseen.discard(spelled)
                if value != pack_value(spelled, row.value) and spelled not in in_flight and spelled not in table.inherited:
                    raw = batch.keys[place * size : (place + 1) * size]
                    found.append(Difference(table.name, name, raw, spelled, row.value, value))
            self._note(found, one)
            if batch.position is None:
                return
            yield
            if name not in _TRIES:
                position = batch.position
            else:
                foreign = {each.raw for each in found if each.wanted is None}
                position = self._position(table, name, batch, frozenset() if one.mends else foreign) or position

    def _lost(self, table: KernelTable, keys: Iterable[Key]) -> list[Difference]:
        """Looked up one by one, as the datapath would: a row that came twice or never while others came and went is there."""
        name, realized, in_flight, inherited = table.name, table.realized, table.in_flight, table.inherited
        rows = [
            (key, row.value)
            for key in keys
            if (row := realized.get(key)) is not None and key not in in_flight and key not in inherited
        ]
        return [
            Difference(name, abi.map_of(name, key), abi.pack_key(name, key), key, realized[key].value, found)
            for key, found in self._kernel.unlike(name, rows)
        ]

    def _position(self, table: KernelTable, name: str, batch: Batch, stays: frozenset[bytes] | set[bytes]) -> bytes | None:
        """Where to go on in a trie: at the batch's last row that is there still. From one that is gone the kernel begins anew,
        and kernels before 6.13 may then leave rows out.
        """
        size = abi.MAPS[name][0].size
        for end in range(batch.length * size, 0, -size):
            raw = batch.keys[end - size : end]
            if raw in stays or abi.core_key(name, raw) in table.realized:
                return raw
        return None

    def _note(self, found: Sequence[Difference], one: Round) -> None:
        if not found:
            return
        listings = self._listings()
        told = [each.told(listings) for each in found[: LISTED_MAX - len(one.rows)]]
        told += [{}] * (len(found) - len(told))  # counted
        lost = tuple((each.table, each.key) for each in found if each.wanted is not None and each.key is not None)
        if one.mends and lost:
            self.counters["kernel rows written again"] += len(lost)
            self._take([RowsLost(lost)])
        for each, row in zip(found, told, strict=True):
            one.add(row, self._mended(each, one))

    def _mended(self, each: Difference, one: Round) -> Callable[[], bool]:
        if not one.mends:
            return bool
        if each.wanted is None:
            self.counters["foreign kernel rows deleted"] += 1
            error = self._kernel.take_away(each.map_name, each.raw)
            return lambda: error == 0
        table, key = self._engine.reconciler.tables[each.table], each.key
        assert key is not None
        return lambda: key in table.desired and table.is_there(key)

    # --- what is not a row of the core's ---------------------------------------------------------------------------------

    def _flows(self, one: Round) -> Iterator[None]:
        """A flow is judged by the identity it remembers: that has to be one (I4)."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for count, flow in enumerate(self._datapath.flows()):
            if count % ROWS_AT_ONCE == 0:
                yield
            one.compared["flows"] += 1
            is_known = flow.identity == IDENTITY_ANY or flow.identity in self._engine.identities.labels_by_identity
            if flow.state is FlowState.LIVE and flow.ends > now and not is_known:
                to = f"{text_of(flow.remote)}:{flow.remote_port}"
                what = f"endpoint {flow.endpoint}, port {flow.local_port}, {to}, protocol {flow.protocol}"
                is_now = f"identity {flow.identity}, which nobody has given"
                so = "by a policy change it ends, although it may be allowed"
                one.add(_row("flows", what, "an identity of the agent's", is_now, so), bool)

    async def _compare_memory(self, one: Round) -> None:
        said = await self._contradictions(one)
        if said:
            await asyncio.sleep(SAID_AGAIN_AFTER_S)
            for each in said & await self._contradictions(one):
                one.add(_row(each.table, each.row, each.should_be, each.is_now, each.so), bool)

    async def _contradictions(self, one: Round) -> collections.Counter[Contradiction]:
        """In the order in which they were found."""
        said: collections.Counter[Contradiction] = collections.Counter()

        def slices() -> Iterator[None]:
            for count, found in enumerate(contradictions(self._engine)):
                if found is not None:
                    said[found] += 1
                elif count % STEPS_AT_ONCE == 0:
                    yield

        await self._work_off(one, slices(), REST_PER_WORK_ASKED)
        return said

    async def _look_at_hooks(self, one: Round) -> None:
        endpoints = self._engine.groups.endpoints
        hooks = {number: endpoints[number].added for number in sorted(self._hooks.attached) if number in endpoints}
        states = await self._hooks.states([(added.ifindex, added.orientation) for added in hooks.values()])
        one.compared["hooks"] = 2 * len(hooks)
        for number, state in zip(hooks, states, strict=True):
            if state is not HookState.FIRST and number in endpoints:
                self._note_hook(number, state, one)
        for problem in await asyncio.to_thread(self._datapath.gate_problems):
            one.add(
                _row("gate", self._datapath.settings.device, "takes questions over", problem, "questions are dropped"), bool
            )
        if one.mends:
            await self._hooks.at_rest()


def _raise(watching: asyncio.Task[None]) -> None:
    """It never ends by itself: a mistake of ours must not end it without a word."""
    if not watching.cancelled():
        watching.result()


_HOOK_MEANS: Final = {
    HookState.NOT_FIRST: "what the program before ours lets pass, we never see",
    HookState.SILENT: "nothing shows that anything is dropped",
    HookState.ABSENT: "everything passes",
}


def _row(table: str, row: str, should_be: str, is_now: str, so: str) -> Row:
    return {"table": table, "row": row, "should_be": should_be, "is": is_now, "so": so}
