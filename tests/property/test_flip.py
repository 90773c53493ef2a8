"""Policy changes, write by write: every table between two policies says what the old one says or what the new one says.

FLIP_CHANGES=10000 makes a long run of it (scripts/sim --changes 10000). The judge is the datapath's two look-ups on the fake
kernel's rows against `naive`; it knows nothing of sets, groups and the order of writes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent.core.events import HostAddresses, PoliciesChanged, RowsWritten, Tick
from agent.core.known_bad import KnownBad
from agent.core.rules import Policy
from agent.core.types import (
    PROTOCOL_ICMP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    Address,
    Direction,
    EndpointValue,
    GroupValue,
    PolicyKey,
    Table,
    Verdict,
    Write,
    packed,
)
from tests.property.naive import Situation, Workload
from tests.property.test_policy_oracle import ADDRESSES, ENDPOINTS, HOST, NAMES, POLICIES
from tests.sim.world import World

CHANGES = int(os.environ.get("FLIP_CHANGES", "0"))
CHANGES_AT_ONCE = 4  # in one world, so that what an earlier change left is there during the next one

PROTOCOLS_AND_PORTS = (
    (PROTOCOL_TCP, 53),
    (PROTOCOL_TCP, 80),
    (PROTOCOL_TCP, 443),
    (PROTOCOL_TCP, 65_535),
    (PROTOCOL_UDP, 443),
    (PROTOCOL_ICMP, 8),
)

JUDGED = tuple(map(packed, ADDRESSES))

Pairs = frozenset[tuple[int, str, Address]]
Probe = tuple[int, Direction, Address, int, int]  # endpoint, direction, address, protocol, port
Judged = Verdict | bool | None  # without a row: whether the direction is closed
Lesson = tuple[int, str, str]  # after how many writes, name, address

LESSONS = st.tuples(st.integers(0, 25), st.sampled_from(NAMES), st.sampled_from(ADDRESSES))
CHAINS = st.lists(
    st.tuples(st.lists(POLICIES, max_size=2).map(tuple), st.none() | LESSONS),
    min_size=CHANGES_AT_ONCE + 1,
    max_size=CHANGES_AT_ONCE + 1,
)


class Watched:
    """A world whose tables are looked at after every single write."""

    def __init__(self, known_bad: frozenset[KnownBad]) -> None:
        self.world = World(known_bad=known_bad, auto=False)
        self.world.engine.sets.rows_at_once, self.world.engine.names.pairs_at_once = 8, 2  # to see what is between slices
        self.seen: dict[Probe, dict[Judged, str]] = defaultdict(dict)  # verdict -> the write after which it was first seen
        self.taught: Pairs = frozenset()
        self._identities: dict[tuple[int, Address], int] = {}
        self._verdicts: dict[tuple[int, int, Direction, int, int], Verdict | None] = {}
        self._workloads = tuple(
            Workload(number, (("app", f"e{number}"),), (packed(address),)) for number, address in ENDPOINTS.items()
        )

    def start(self, policies: tuple[Policy, ...]) -> None:
        self.world.handle(HostAddresses(frozenset({packed(HOST)})))
        self.world.start(*policies, endpoints=ENDPOINTS)
        self.write_out()

    def write_out(self, lesson: Lesson | None = None) -> None:
        """Each write is performed, looked at, and acknowledged; somewhere between them a name is learned."""
        writes = 0
        while True:
            if lesson is not None and writes == lesson[0]:
                self._teach(lesson)
            write = self.world.take_write()
            if write is None:
                if lesson is not None and writes < lesson[0]:
                    self._teach(lesson)
                    lesson = None
                elif self.world.engine.groups.is_behind or self.world.engine.sets.is_behind:
                    self.world.handle(Tick())
                else:
                    return
                continue
            error = self.world.kernel.apply(write)
            if self._is_felt(write):
                self._look(f"{write.table} {write.key} = {write.value}")
            self.world.handle(RowsWritten(((write, error),)))
            writes += 1

    def _teach(self, lesson: Lesson) -> None:
        _, name, text = lesson
        engine = self.world.engine
        for scope in {scope for number in ENDPOINTS for scope in engine.groups.scopes_of(number)}:
            engine.names.learn(name, [(packed(text), 3_600)], scope, self.world.now)
            self.taught |= {(scope, name, packed(text))}
        self.world.handle(Tick())

    @property
    def pairs(self) -> Pairs:
        return frozenset(self.world.engine.dns_cache.lifetimes)

    def _is_felt(self, write: Write) -> bool:
        """Can it change a verdict? A row of a set that no group points to cannot."""
        if write.table is Table.IPCACHE:
            self._identities.clear()
        elif isinstance(write.key, PolicyKey):
            number = write.key.set
            self._verdicts = {what: verdict for what, verdict in self._verdicts.items() if what[0] != number}
            groups = self.world.kernel.rows[Table.GROUPS].values()
            return any(isinstance(group, GroupValue) and group.set == number for group in groups)
        return True

    def _look(self, write: str) -> None:
        for probe, verdict in self._table():
            self.seen[probe].setdefault(verdict, write)

    def _table(self) -> Iterator[tuple[Probe, Judged]]:
        kernel = self.world.kernel
        for endpoint in kernel.rows[Table.ENDPOINTS].values():
            assert isinstance(endpoint, EndpointValue)
            group = kernel.rows[Table.GROUPS][endpoint.group]
            assert isinstance(group, GroupValue)
            for address in JUDGED:
                place = (endpoint.scope, address)
                if place not in self._identities:
                    self._identities[place] = kernel.identity_of(*place)
                identity = self._identities[place]
                for direction in Direction:
                    closed = group.default_deny_egress if direction is Direction.EGRESS else group.default_deny_ingress
                    for protocol, port in PROTOCOLS_AND_PORTS:
                        what = (group.set, identity, direction, protocol, port)
                        if what not in self._verdicts:
                            self._verdicts[what] = kernel.verdict_of(group.set, identity, protocol, port, direction)
                        verdict = self._verdicts[what]
                        yield (endpoint.endpoint, direction, address, protocol, port), closed if verdict is None else verdict

    def change(self, policies: tuple[Policy, ...], lesson: Lesson | None) -> None:
        """From the policies in force to these; every verdict on the way is of the one or of the other."""
        old, before = self.world.engine.groups.policies, self.pairs
        self.seen.clear()
        self.taught = frozenset()
        self._look("the start")
        self.world.handle(PoliciesChanged(policies, "change"))
        self.write_out(lesson)
        assert self.world.settled.pop("change") is None
        after = self.pairs - (self.taught - before)
        self._judge([(old, before), (old, before | self.taught), (policies, after), (policies, after | self.taught)])
        self.seen.clear()
        for _ in range(3):  # the old sets go: nothing that is judged now may notice
            self.world.advance(1.1)
            self.write_out()
        self._look("the end")
        self._judge([(policies, self.pairs)])

    def _judge(self, states: list[tuple[tuple[Policy, ...], Pairs]]) -> None:
        situations = [
            Situation(policies, self._workloads, pairs, frozenset({packed(HOST)})) for policies, pairs in dict.fromkeys(states)
        ]
        workloads = {workload.number: workload for workload in self._workloads}
        for probe, seen in self.seen.items():
            endpoint, direction, address, protocol, port = probe
            meant: set[Judged] = set()
            for situation in situations:
                says = situation.verdict(workloads[endpoint], address, protocol, port, direction)
                meant.add(situation.closes(workloads[endpoint], direction) if says is None else says)
            for verdict, write in seen.items():
                assert verdict in meant, f"{probe} is {verdict!r} after {write}, which neither policy says: {meant}"


def judge_chain(chain: list[tuple[tuple[Policy, ...], Lesson | None]], known_bad: frozenset[KnownBad] = frozenset()) -> None:
    (first, _), *changes = chain
    watched = Watched(known_bad)
    watched.start(first)
    for policies, lesson in changes:
        watched.change(policies, lesson)


@pytest.mark.timeout(0 if CHANGES else 120)
@settings(max_examples=max(1, CHANGES // CHANGES_AT_ONCE) if CHANGES else 30, suppress_health_check=list(HealthCheck))
@given(CHAINS)
def test_no_table_between_two_policies_says_what_neither_says(chain: list[tuple[tuple[Policy, ...], Lesson | None]]) -> None:
    """Also with holes, nested networks, denials, default allow, addresses of several names, and names learned on the way."""
    judge_chain(chain)


def test_rows_edited_in_place_are_seen() -> None:
    """The same judge, and the change made without the flip: some table says what neither policy says."""

    @settings(
        max_examples=400,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(CHAINS)
    def changes(chain: list[tuple[tuple[Policy, ...], Lesson | None]]) -> None:
        judge_chain(chain, frozenset({KnownBad.EDIT_IN_PLACE}))

    with pytest.raises(AssertionError, match="which neither policy says"):
        changes()
