"""The engine: every event goes in here, every effect comes out. Pure: no clock, socket, thread or randomness.

policies ──> policy ──> sets ──────────────┐                     ┌──> policy rows ─┐
endpoints ─> groups ───────────────────────┤                     ├──> group rows   │
               │ registers                 │                     ├──> endpoint rows│
               v                           v                     │                 v
reply ─────> name manager ─> metadata ─> ipcache ─> identities ──┴──> ipcache rows ──> reconciler ──> kernel
               ^    │ bags                        selector cache                            │
               │    v                                                                       v acknowledged
query ─────> proxy <──────────────────────────────────────────────────────────────────── barriers

handle(event, now)   everything that can happen
effects()            everything to be done, in order
next_deadline()      when to be called again at the latest (with `Tick`)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from agent.core.dns_cache import DnsCache, Pair
from agent.core.events import (
    AskerGone,
    Attach,
    Detach,
    Effect,
    EndpointAdded,
    EndpointRemoved,
    Event,
    Fact,
    FlowsSeen,
    HostAddresses,
    LastSeen,
    PassOverFlows,
    PoliciesChanged,
    Query,
    ReadLastSeen,
    Reply,
    Restored,
    RowsLost,
    RowsWritten,
    Save,
    Settled,
    SourceReported,
    Tick,
    UpstreamFailed,
    WriteRows,
)
from agent.core.groups import Groups, Outcome
from agent.core.guard import AddressGuard
from agent.core.identity import IdentityAllocator
from agent.core.inherited import InheritedSets
from agent.core.ipcache import Ipcache
from agent.core.known_bad import KnownBad
from agent.core.name_manager import NameManager
from agent.core.policy import Cookies
from agent.core.proxy import Proxy
from agent.core.reconciler import Reconciler
from agent.core.records import (
    EndpointRecord,
    IdentityGone,
    IdentityRecord,
    NumbersRecord,
    PairGone,
    PairRecord,
    Record,
)
from agent.core.selector_cache import SelectorCache
from agent.core.sets import ROWS_AT_ONCE, PolicySets
from agent.core.settings import Settings
from agent.core.types import IDENTITY_LOCAL_FIRST, Address, LabelSet, Table

# Sources of labels that have to speak before anything is judged (DECISIONS 10).
SOURCES = frozenset({"state", "policies", "host", "endpoints", "containers"})
# A pass reads the whole flow table; identities that wait for it cost a few rows, not correctness.
FLOW_PASS_EVERY_S = 5.0
# What is due at one time may be a great deal; a `Tick` does about 2 ms of it, and is due again at once for the rest.
ENDS_AT_ONCE = 32
RETIRED_AT_ONCE = 64
_AT_ONCE = 0.0


class _Pass(NamedTuple):
    number: int
    candidates: dict[int, int]


class Engine:
    def __init__(self, settings: Settings, now: float, known_bad: frozenset[KnownBad] = frozenset()) -> None:
        self.settings = settings
        self._effects: list[Effect] = []
        # The kernel's tables, wanted and realized, and who waits for them.
        self.reconciler = Reconciler(known_bad)
        # Selectors find identities; sets turn (rules, identity) into policy rows.
        self.selector_cache = SelectorCache()
        self.cookies = Cookies()
        self.sets = PolicySets(
            self.reconciler.policy,
            self.selector_cache,
            rows_max=settings.policy_rows_per_set_max,
            table_rows_max=settings.policy_rows_max,
        )
        # Label sets get numbers, prefixes get label sets; a new number gets its policy rows before a row names it.
        self.identities = IdentityAllocator(settings.identities_max, self.reconciler.ipcache.names, known_bad)
        self._records: list[Record] = []  # for the journal, of the event under way
        self.ipcache = Ipcache(self.reconciler.ipcache, self.identities, self._add_identity)
        for identity, labels in self.identities.labels_by_identity.items():
            self.sets.add_identity(identity, labels)
        # Names and FQDN selectors put labels on prefixes.
        self.dns_cache = DnsCache(settings.ttl_floor_s, settings.ttl_cap_s)
        self.names = NameManager(
            self.dns_cache,
            self.ipcache,
            self.identities,
            names_max=settings.names_max,
            addresses_max=settings.addresses_per_name_max,
            live_s=settings.keep_while_flow_seen_s,
        )
        # Endpoints are in groups, groups point to sets; policies change by the flip.
        self.inherited = InheritedSets(self.reconciler.policy, self.identities.labels_by_identity)
        self.groups = Groups(self.reconciler, self.sets, self.names, self.ipcache, self.inherited, self.cookies, known_bad)
        # Questions are judged by groups, replies teach names and wait for rows.
        self.proxy = Proxy(settings, self.groups, self.names, self.ipcache, self.reconciler, self._effects, known_bad)
        self.names.change_guard(AddressGuard((), settings.allow_addresses), ())
        self._saved_numbers = self._numbers()
        self.missing_sources = set(SOURCES)
        self._host_addresses: frozenset[Address] = frozenset()
        self._start_by = now + settings.start_patience_s
        self._ending: dict[tuple[int, Address], list[Pair]] = {}  # lifetimes that wait for a look at the flows
        self._pass: _Pass | None = None
        self._retired: Iterator[int] | None = None  # what the last pass found, still to be taken away
        self._passes = 0
        self._next_pass_at: float | None = None

    # --- in ------------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> None:
        """`handle_all` of one."""
        self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> None:
        """Take in what happened, in order; what has to be done about it is in `effects` then. now: seconds of CLOCK_BOOTTIME.

        Questions and replies that were heard together are answered together: all that they change is one group of writes, and
        one of records. Every other event is over before the next is looked at.
        """
        first, is_settled = len(self._effects), False
        for event in events:
            if isinstance(event, Query):
                self.proxy.take(event, now)
                is_settled = False
            elif isinstance(event, Reply):
                self.proxy.take_reply(event, now)
                is_settled = False
            else:
                self._take(event, now)
                self._settle(now)
                is_settled = True
        if not is_settled:
            self._settle(now)
        saved = self._saved_numbers
        if (self.sets.next_number, self.groups.next_group, self.cookies.next_number) != (saved.set, saved.group, saved.cookie):
            self._saved_numbers = self._numbers()  # identities have records of their own
            self._records.append(self._saved_numbers)
        self._records += self.names.records
        self.names.records.clear()
        if self._records:
            self._effects.insert(first, Save(tuple(self._records)))
            self._records.clear()

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, RowsWritten):
            self.reconciler.written(event.results, now)
        elif isinstance(event, UpstreamFailed):
            self.proxy.take_failure(event, now)
        elif isinstance(event, AskerGone):
            self.proxy.asker_gone(event, now)
        elif isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, LastSeen):
            self._last_seen(event, now)
        elif isinstance(event, FlowsSeen):
            self._flows_seen(event, now)
        elif isinstance(event, PoliciesChanged):
            self.groups.change_policies(event.policies, event.ticket)
        elif isinstance(event, EndpointAdded):
            self._endpoint_added(event, now)
        elif isinstance(event, EndpointRemoved):
            self._endpoint_removed(event, now)
        elif isinstance(event, HostAddresses):
            self.ipcache.host_addresses(self._host_addresses, event.addresses)
            guard = AddressGuard(event.addresses, self.settings.allow_addresses)
            self.names.change_guard(guard, self._host_addresses ^ event.addresses)
            self._host_addresses = event.addresses
        elif isinstance(event, RowsLost):
            for table, key in event.rows:
                self.reconciler.tables[table].lost(key)
        elif isinstance(event, Restored):
            self._restore(event)
        else:
            assert isinstance(event, SourceReported), f"an event nobody knows: {event!r}"
            self._source_reported(event.source, now)

    def effects(self) -> list[Effect]:
        """What is to be done, in this order; each effect is given out once."""
        effects, self._effects[:] = self._effects[:], []
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due at the latest; None: when something else happens."""
        lifetime_ends = self.dns_cache.next_deadline()
        deadlines = (
            self.reconciler.next_deadline(),
            self.proxy.next_deadline(),
            # A lifetime's end is inclusive: something is due just after it.
            lifetime_ends + 1e-3 if lifetime_ends is not None else None,
            self.groups.next_deadline(),
            self._next_pass_at,
            None if self.proxy.is_started else self._start_by,
            _AT_ONCE if self.sets.is_behind or self.groups.is_behind or self._retired is not None else None,
        )
        return min((at for at in deadlines if at is not None), default=None)

    def records(self) -> Iterator[Record]:
        """Everything the journal has to say now: what a compacted one begins with."""
        yield self._numbers()
        for identity, labels in list(self.identities.labels_by_identity.items()):
            if identity >= IDENTITY_LOCAL_FIRST:
                yield IdentityRecord(identity, tuple(sorted(labels)))
        for number, endpoint in list(self.groups.endpoints.items()):
            yield EndpointRecord(number, endpoint.added.interface, endpoint.added.ifindex)
        for pair in list(self.dns_cache.lifetimes):
            lifetime = self.dns_cache.lifetimes.get(pair)
            if lifetime is not None:
                yield PairRecord(*pair, lifetime.lives_until, lifetime.kept_until)

    def _numbers(self) -> NumbersRecord:
        return NumbersRecord(
            self.identities.next_number, self.sets.next_number, self.groups.next_group, self.cookies.next_number
        )

    def _restore(self, event: Restored) -> None:
        """Take up where the process before was stopped, whatever it was doing (I7).

        Its identities keep their numbers, its names their lifetimes; its rows judge until the first policies of ours are in
        force. With the same policies every row is wanted again as it stands, and nothing is written.
        """
        assert not self.groups.endpoints, "what was left behind has to come before everything else"
        pairs: dict[Pair, PairRecord] = {}
        labels_by_identity: dict[int, LabelSet] = {}
        for record in event.records:
            match record:
                case PairRecord():
                    pairs[Pair(record.scope, record.name, record.address)] = record
                case PairGone():
                    pairs.pop(Pair(*record), None)
                case IdentityRecord():
                    labels_by_identity[record.identity] = frozenset(record.labels)
                    self.identities.next_number = max(self.identities.next_number, record.identity + 1)
                case IdentityGone():
                    labels_by_identity.pop(record.identity, None)
                case NumbersRecord():
                    self.identities.next_number = max(self.identities.next_number, record.identity)
                    self.sets.next_number = max(self.sets.next_number, record.set)
                    self.groups.next_group = max(self.groups.next_group, record.group)
                    self.cookies.next_number = max(self.cookies.next_number, record.cookie)
                case EndpointRecord():
                    pass  # the shell gives endpoints their numbers
        for identity, labels in labels_by_identity.items():
            self.identities.restore(identity, labels)
            self.sets.add_identity(identity, labels)
        self.names.restore(pairs.values())
        self.ipcache.row_follows = self.inherited.follow
        self.inherited.adopt(event.rows.get(Table.POLICY, {}), event.rows.get(Table.IPCACHE, {}))
        self.ipcache.adopt(event.rows.get(Table.IPCACHE, {}))
        for table, rows in event.rows.items():
            if table not in (Table.POLICY, Table.IPCACHE):
                self.reconciler.tables[table].adopt(rows)
        self.groups.has_inherited = True

    def _add_identity(self, identity: int, labels: LabelSet) -> None:
        self.sets.add_identity(identity, labels)
        self._records.append(IdentityRecord(identity, tuple(sorted(labels))))

    def _settle(self, now: float) -> None:
        """After every event: go on as far as the kernel's answers allow, then ask it for more."""
        self.reconciler.settle()
        while True:
            over, self.reconciler.barriers.over[:] = self.reconciler.barriers.over[:], []
            if over:
                self.proxy.barriers_over(over, now)
            if self.proxy.is_started:
                self._take_outcome(self.groups.step(now), now)
            self.reconciler.settle()
            if not self.reconciler.barriers.over and not (self.proxy.is_started and self.groups.can_step):
                break
        writes = self.reconciler.batch(now)
        if writes:
            self._effects.append(WriteRows(writes))
        self._watch_identities(now)

    def _take_outcome(self, outcome: Outcome, now: float) -> None:
        for endpoint in outcome.to_attach:
            added = endpoint.added
            self._effects.append(Attach(added.endpoint, added.interface, added.ifindex, added.orientation))
        if outcome.judged_anew:
            self.proxy.judge_again(outcome.judged_anew, now)
        for ticket, error in outcome.settled:
            self._settled(ticket, error)
            fields = {"policies": len(self.groups.policies), "endpoints": len(self.groups.endpoints), "error": error}
            self._effects.append(Fact("policy", now, fields))

    def _settled(self, ticket: Hashable, error: str | None) -> None:
        if ticket is not None:
            self._effects.append(Settled(ticket, error))

    # --- time ------------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if not self.proxy.is_started and now >= self._start_by:
            # A source that is silent is shown as missing (`missing_sources`), and start goes on without it.
            self.proxy.start(now)
        self.proxy.expire(now)
        for pair in self.dns_cache.due(now, ENDS_AT_ONCE):
            self._end_of_life(pair, now)
        self.sets.go_on()
        self.groups.go_on()
        self._retire()
        if self._next_pass_at is not None and now >= self._next_pass_at and self._pass is None:
            self._begin_pass(now)

    def _end_of_life(self, pair: Pair, now: float) -> None:
        """TTL ran out: the address goes, unless a flow uses it (DECISIONS 15)."""
        # Before the first policies nobody wants the name yet, but what the process before wanted is in force.
        if self.names.selectors_of(pair.name) or self.ipcache.row_follows is not None:
            self._ending.setdefault((pair.scope, pair.address), []).append(pair)
            self._effects.append(ReadLastSeen(pair.scope, pair.address))
        else:
            self.names.forget(pair)

    def _last_seen(self, event: LastSeen, now: float) -> None:
        for pair in self._ending.pop((event.scope, event.address), ()):
            lifetime = self.dns_cache.lifetimes.get(pair)
            if lifetime is None:
                continue
            kept_until = lifetime.lives_until
            if event.at is not None:
                last = lifetime.lives_until + self.settings.keep_past_lifetime_s
                kept_until = max(kept_until, min(event.at + self.settings.keep_while_flow_seen_s, last))
            if kept_until >= now:  # an end is inclusive
                self.names.keep(pair, kept_until)
            else:
                self.names.forget(pair)
        self.proxy.take_look(event, now)

    # --- identities that nobody needs --------------------------------------------------------------------------------------

    def _watch_identities(self, now: float) -> None:
        if self._next_pass_at is None and self._pass is None and self._retired is None and self.identities.has_unused:
            self._next_pass_at = now + FLOW_PASS_EVERY_S

    def _begin_pass(self, now: float) -> None:
        self._next_pass_at = None
        candidates = self.identities.unused()
        if not candidates:
            return
        self._passes += 1
        self._pass = _Pass(self._passes, candidates)
        self._effects.append(PassOverFlows(self._passes))

    def _flows_seen(self, event: FlowsSeen, now: float) -> None:
        if self._pass is None or event.pass_number != self._pass.number:
            return
        candidates, self._pass = self._pass.candidates, None
        self._retired = self.identities.retire(candidates, event.identities)
        self._retire()

    def _retire(self) -> None:
        """One slice of the identities that go; each is looked at again when its turn comes."""
        retired, rows = self._retired, 0
        for _ in range(RETIRED_AT_ONCE):
            identity = next(retired, None) if retired is not None else None
            if identity is None:
                self._retired = None
                return
            rows += self.sets.remove_identity(identity)
            self._records.append(IdentityGone(identity))
            if rows >= ROWS_AT_ONCE:
                return

    # --- sources of labels -------------------------------------------------------------------------------------------------

    def _source_reported(self, source: str, now: float) -> None:
        self.missing_sources.discard(source)
        if not self.missing_sources and not self.proxy.is_started:
            self.proxy.start(now)

    def _endpoint_added(self, event: EndpointAdded, now: float) -> None:
        error = self.groups.add_endpoint(event)
        if error is not None:
            self._effects.append(
                Fact("endpoint", now, {"endpoint": event.endpoint, "interface": event.interface, "error": error})
            )
        else:
            self._records.append(EndpointRecord(event.endpoint, event.interface, event.ifindex))

    def _endpoint_removed(self, event: EndpointRemoved, now: float) -> None:
        self.proxy.endpoint_gone(event.endpoint, now)
        removed = self.groups.remove_endpoint(event.endpoint)
        if removed is not None:
            self._effects.append(Detach(event.endpoint, removed.added.interface, removed.added.ifindex))
