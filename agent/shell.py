"""The shell: the one thread that hears, asks the engine, and does what it says.

    sockets, kernel, timers, people ──> events ──> Engine.handle ──> effects ──> kernel, sockets, people

Rule 1: effects are performed in the engine's order; replies wait only until the next write or the end of the pass, whichever is
first, so that a batch of questions leaves in one call.
Rule 2: the clock is read here (CLOCK_BOOTTIME, as the datapath does) and handed in.
Rule 3: programs are attached by the engine's effect, after everything they read is written.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime as dt
import gc
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from agent.config import Cname, Config, DeniedAnswer, OnFailure, policy_files
from agent.control import ControlError
from agent.control.listings import Listings, Row, counts
from agent.core.barrier import row_text
from agent.core.engine import SOURCES, Engine
from agent.core.events import (
    AskerGone,
    AskUpstream,
    Attach,
    Detach,
    EndpointRemoved,
    Event,
    Fact,
    FlowsSeen,
    Forget,
    HostAddresses,
    LastSeen,
    PassOverFlows,
    PoliciesChanged,
    ReadLastSeen,
    Restored,
    RowsWritten,
    Save,
    SendReply,
    Settled,
    SourceReported,
    Tick,
    WriteRows,
)
from agent.core.reconciler import BATCH_ROWS_MAX
from agent.core.records import Record
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_NAMES, Address, Direction, Table, Write, text_of
from agent.datapath.abi import Loss
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath
from agent.datapath.errors import DatapathError
from agent.datapath.events import DropEvent
from agent.dns.bounds import Limits
from agent.dns.sockets import Listeners
from agent.dns.upstreams import Upstreams
from agent.dns.wire import Rcode
from agent.documents.remarks import Mistake, PolicyError
from agent.host.endpoints import HostEndpoints
from agent.host.interfaces import Interfaces
from agent.host.watch import NetworkWatch
from agent.injection import Injection, row_of
from agent.policy.files import read_policies
from agent.state import Journal

log = logging.getLogger("namegate")

ENFORCING = "enforcing"
OPEN = "open: no policy closes it"

# Enough to answer "what was dropped just now"; the counters have the rest.
DROPS_KEPT = 10_000

# Compacted when three of four lines say nothing any more: then it costs one line for each that is appended.
JOURNAL_GROWTH = 4
# A host whose routes change all the time is looked at five times a second, not all the time.
LOOK_AGAIN_AFTER_S = 0.2
COLLECT_EVERY_S = 10.0
JOURNAL_SLACK_LINES = 10_000

_START = object()  # ticket of the policies of the start


def now() -> float:
    """Seconds of CLOCK_BOOTTIME: lifetimes go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """All that is known at start. records: of the process before, None where its tables were not taken over."""

    records: tuple[Record, ...] | None
    interfaces: Interfaces
    endpoints: HostEndpoints
    policies: tuple[Policy, ...]


class Shell:
    """start_refused: told why the policies of the start cannot be in force."""

    def __init__(self, config: Config, datapath: Datapath, journal: Journal, start_refused: Callable[[str], None]) -> None:
        self._config = config
        self._datapath = datapath
        self._journal: Journal | None = journal
        self._start_refused = start_refused
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(_settings(config), now(), config.testing.known_bad)
        limits = Limits(
            connections_max=config.limits.tcp_connections,
            connections_per_client_max=config.limits.tcp_connections_per_endpoint,
        )
        self._listeners = Listeners(config.datapath.mark, limits=limits)
        self._upstreams = Upstreams(self._loop, config.datapath.mark, self._take)
        self._replies: list[tuple[Hashable, bytes]] = []
        self._attached: set[int] = set()  # endpoints
        self._compact_at = 0  # lines of the journal
        self._timer: asyncio.TimerHandle | None = None
        self._tickets: dict[Hashable, asyncio.Future[str | None]] = {}
        self._drops: collections.deque[Row] = collections.deque(maxlen=DROPS_KEPT)
        self._host_endpoints = HostEndpoints(())
        self._host_addresses: frozenset[Address] = frozenset()
        self._missing: dict[str, str] = {}  # interface -> why it is not there
        self._watch: NetworkWatch | None = None
        self._looking: asyncio.Task[None] | None = None
        self._must_look_again = False
        self._injection = Injection()
        self._trace: IO[str] | None = config.testing.trace.open("w") if config.testing.trace is not None else None
        self._started_at = dt.datetime.now(dt.UTC)

    def start(self, start: Start) -> None:
        """Begin to hear, then say all that is known at start. The last event attaches the programs."""
        self._datapath.set_dns_sockets(self._listeners.sockets())
        self._listeners.start(self._loop, self._take, self._gone)
        self._loop.add_reader(self._datapath.events_fd, self._read_events)
        if start.records is not None:
            self._take([Restored(start.records, self._datapath.rows())])
        self._host_endpoints = start.endpoints
        self._compare(start.interfaces)
        self._take([PoliciesChanged(start.policies, _START)])
        self._take([SourceReported(source) for source in sorted(SOURCES)])
        self._watch = NetworkWatch(self._loop, self._look_around)
        # A full pass of the collector over a million addresses would stop the one thread for half a second. The core makes no
        # reference cycles; what the libraries make is young when it dies, and what lives is looked at once.
        gc.disable()
        self._collect()

    def close(self) -> None:
        """The kernel goes on enforcing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.close()
            gc.enable()
        if self._looking is not None:
            self._looking.cancel()
        self._loop.remove_reader(self._datapath.events_fd)
        self._upstreams.close()
        self._listeners.close()
        if self._trace is not None:
            self._trace.close()

    def _collect(self) -> None:
        gc.collect(1)
        gc.freeze()
        self._loop.call_later(COLLECT_EVERY_S, self._collect)

    # --- events in, effects out ------------------------------------------------------------------------------------------

    def _gone(self, gone: AskerGone) -> None:
        self._take([gone])

    def _take(self, events: Sequence[Event]) -> None:
        """One pass: all that was heard in one wake-up."""
        at = now()
        for event in events:
            self._engine.handle(event, at)
            self._perform(at)
        self._flush()
        self._arm(at)

    def _perform(self, at: float) -> None:
        while effects := self._engine.effects():
            for effect in effects:
                match effect:
                    case SendReply():
                        self._replies.append((effect.asker, effect.message))
                    case Save():
                        self._save(effect.records)
                    case WriteRows():
                        self._flush()
                        self._write(effect.writes)
                    case AskUpstream():
                        self._upstreams.ask(effect)
                    case Forget():
                        self._upstreams.forget(effect.transaction)
                    case ReadLastSeen():
                        seen = self._datapath.last_seen(effect.scope, effect.address)
                        self._engine.handle(LastSeen(effect.scope, effect.address, seen), at)
                    case PassOverFlows():
                        self._engine.handle(FlowsSeen(effect.pass_number, self._datapath.flow_identities()), at)
                    case Attach():
                        self._attach(effect)
                    case Detach():
                        self._attached.discard(effect.endpoint)
                        self._datapath.detach(effect)
                    case Settled():
                        self._settle(effect)
                    case Fact():
                        self._report(effect)

    def _flush(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._listeners.send(replies)

    def _write(self, writes: tuple[Write, ...]) -> None:
        if self._injection.delay_s:
            self._loop.call_later(self._injection.delay_s, self._write_late, writes)
        elif len(writes) < BATCH_ROWS_MAX:
            self._engine.handle(RowsWritten(self._written(writes)), now())
        else:
            # There is more where this came from: sockets are looked at in between.
            self._loop.call_soon(self._take, [RowsWritten(self._written(writes))])

    def _write_late(self, writes: tuple[Write, ...]) -> None:
        self._take([RowsWritten(self._written(writes))])

    def _save(self, records: tuple[Record, ...]) -> None:
        if self._journal is None:
            return
        try:
            self._journal.append(records)
        except OSError as error:
            # Rows without records could not be explained at the next start: it learns anew, as if there had been no journal.
            log.error("the journal %s cannot be written (%s): the next start learns names anew", self._journal.path, error)
            self._journal.abandon()
            self._journal = None
            return
        known = len(self._engine.dns_cache) + len(self._engine.identities)
        due = max(self._compact_at, JOURNAL_SLACK_LINES + JOURNAL_GROWTH * known)
        if self._journal.lines > due and not self._journal.is_compacting:
            self._compact_at = 0
            self._journal.compact(self._engine.records())
            self._loop.call_soon(self._compact)

    def _compact(self) -> None:
        if self._journal is not None and self._journal.is_compacting:
            try:
                self._journal.step()
            except OSError as error:
                # The old file is whole and goes on growing; the next try is due when it has grown by as much again.
                log.error("the journal %s cannot be compacted: %s", self._journal.path, error.strerror)
                self._compact_at = 2 * self._journal.lines
                return
            self._loop.call_soon(self._compact)

    def _written(self, writes: tuple[Write, ...]) -> tuple[tuple[Write, int], ...]:
        """Each write with the kernel's errno, 0 for done."""
        errors = {place: error for place, write in enumerate(writes) if (error := self._injection.error_for(write))}
        made = iter(self._datapath.apply([write for place, write in enumerate(writes) if place not in errors]))
        results = tuple((write, errors[place] if place in errors else next(made)) for place, write in enumerate(writes))
        if self._trace is not None:
            at = time.time_ns()
            for write, error in results:
                put = write.value is not None
                line = {"at_ns": at, "table": write.table, "key": row_of(write), "put": put, "errno": error}
                self._trace.write(json.dumps(line) + "\n")
        return results

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._engine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - at), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._take([Tick()])

    def _attach(self, effect: Attach) -> None:
        try:
            self._datapath.attach(effect)
        except DatapathError as error:
            log.error("endpoint %d: %s is NOT enforced: %s", effect.endpoint, effect.interface, error)
            return
        log.info("endpoint %d: %s is enforced", effect.endpoint, effect.interface)
        self._attached.add(effect.endpoint)
        if self._attached >= self._engine.groups.endpoints.keys():
            for interface in self._datapath.detach_others():
                log.info("%s is no endpoint any more: detached", interface)

    def _settle(self, effect: Settled) -> None:
        ticket = self._tickets.pop(effect.ticket, None)
        if ticket is not None and not ticket.done():
            ticket.set_result(effect.error)
        if effect.error is None:
            for interface in self._open():
                log.warning("no policy closes %s: what it sends is not enforced", interface)
        else:
            log.error("policies refused: %s", effect.error)
            if effect.ticket is _START:
                self._start_refused(effect.error)

    def _report(self, fact: Fact) -> None:
        is_usual = fact.kind == "question" and fact.fields.get("outcome") == "released"
        level = logging.DEBUG if is_usual else logging.INFO
        if log.isEnabledFor(level):  # or every released reply would pay for a line that nobody reads
            log.log(level, "%s", _sentence(fact))

    # --- interfaces that come and go -------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """The network changed: look what is there, without holding up DNS. One look at a time."""
        if self._looking is not None:
            self._must_look_again = True
            return
        self._looking = self._loop.create_task(self._look())

    async def _look(self) -> None:
        try:
            while True:
                self._must_look_again = False
                try:
                    self._compare(await asyncio.to_thread(Interfaces))
                except OSError as error:
                    log.warning("the network cannot be looked at (%s): trying again", error)
                    self._must_look_again = True
                if not self._must_look_again:
                    break
                await asyncio.sleep(LOOK_AGAIN_AFTER_S)
        finally:
            self._looking = None

    def _compare(self, interfaces: Interfaces) -> None:
        """Tell the engine what came and what went."""
        present = self._host_endpoints.look(interfaces)
        for interface, reason in present.missing.items():
            if interface not in self._missing:
                log.warning("%s is not enforced: %s", interface, reason)
        self._missing = present.missing
        events: list[Event] = []
        if interfaces.host_addresses() != self._host_addresses:
            self._host_addresses = interfaces.host_addresses()
            events.append(HostAddresses(self._host_addresses))
        known = self._engine.groups.endpoints
        events += [EndpointRemoved(number) for number in known if number not in present.by_number]
        events += [added for number, added in present.by_number.items() if number not in known]
        self._take(events)

    # --- drops -----------------------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        listings = Listings(self._engine, now())
        for event in self._datapath.read_events():
            self._drops.append(_drop(event, listings))

    # --- people ----------------------------------------------------------------------------------------------------------

    async def answer(self, command: str, arguments: Mapping[str, object]) -> object:
        """One request of the control socket."""
        listings = Listings(self._engine, now())
        shows: dict[str, Callable[[], object]] = {
            "endpoints": self._endpoint_rows,
            "names": listings.names,
            "selectors": listings.selectors,
            "identities": listings.identities,
            "ipcache": listings.ipcache,
            "policy-map": listings.policy_map,
            "drops": lambda: list(self._drops),
        }
        if command == "status":
            return await self._status()
        if command in shows:
            return shows[command]()
        if command == "apply":
            return await self._apply(arguments)
        if command == "inject" and self._config.testing.enabled:
            return self._inject(arguments)
        raise ControlError(f"the agent knows no command `{command}`")

    def _endpoint_rows(self) -> list[Row]:
        rows = Listings(self._engine, now()).endpoints()
        for row in rows:
            added = self._engine.groups.endpoints[int(str(row["endpoint"]))].added
            row["state"] = _HOOK_STATES[self._datapath.hook_state(added.ifindex, added.orientation)]
            if row["state"] == ENFORCING and not row["default_deny"]:
                row["state"] = OPEN
        return rows

    async def _status(self) -> Row:
        """Read from the kernel where the kernel can say it."""
        listings = Listings(self._engine, now())
        reasons = [f"source `{source}` has not reported" for source in sorted(self._engine.missing_sources)]
        endpoints = self._endpoint_rows()
        reasons += list(self._missing.values())
        reasons += [f"{row['interface']}: {row['state']}" for row in endpoints if row["state"] not in {ENFORCING, OPEN}]
        reasons += await asyncio.to_thread(self._datapath.gate_problems)
        reasons += self._foreign_rows()
        reasons += self._what_is_nearly_full()
        if self._journal is None:
            reasons.append("the journal could not be written: the next start learns names anew")
        failed = listings.rows_failed()
        reasons += [f"{row['table']} row {row['row']}: {row['error']}" for row in failed[:20]]
        starting = not self._engine.proxy.is_started
        return {
            "state": "starting" if starting else "degraded" if reasons else "enforcing",
            "reasons": reasons,
            "open": [row["interface"] for row in endpoints if row["state"] == OPEN],
            "started_at": self._started_at.isoformat(timespec="seconds"),
            **counts(self._engine),
            "dropped": sum(counter.packets for counter in self._datapath.counters() if counter.reason.is_drop),
            "events_lost": self._datapath.losses()[Loss.EVENT],
            "counters": self._counters(),
            "rows_failed": failed,
        }

    def _counters(self) -> dict[str, int]:
        """What was given up, ignored or came late, by reason; what never happened is left out (I9)."""
        edges = {**self._listeners.counters.as_dict(), **self._upstreams.counters.as_dict()}
        counted = {key.replace("_", " "): count for key, count in edges.items()} | self._engine.proxy.counters
        return {key: count for key, count in sorted(counted.items()) if count}

    def _foreign_rows(self) -> list[str]:
        """The few rows that decide over whole endpoints, compared with the kernel's: somebody may have edited them."""
        return [
            f"{table} row {row_text(key)} in the kernel is not as the agent wrote it"
            for table in (Table.GROUPS, Table.ENDPOINTS)
            for kernel in [dict(self._datapath.dump(table))]
            for key, row in self._engine.reconciler.tables[table].realized.items()
            if kernel.get(key) != row.value
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

    async def _apply(self, arguments: Mapping[str, object]) -> Row:
        files = arguments.get("files")
        paths = [str(file) for file in files] if isinstance(files, list) else self._config.policies
        timeout = _seconds(arguments.get("timeout"))
        try:
            policies = policies_at(paths)
        except PolicyError as error:
            raise ControlError(f"refused, the policies in force stay:\n{error}", 1) from None
        changed = policies != self._engine.groups.policies
        ticket = object()
        settled: asyncio.Future[str | None] = self._loop.create_future()
        self._tickets[ticket] = settled
        self._take([PoliciesChanged(policies, ticket)])
        if arguments.get("wait") or settled.done():
            try:
                error_text = await asyncio.wait_for(settled, timeout)
            except TimeoutError:
                sentence = f"the policies are not in force after {timeout:g} s: `namegate status` says why"
                raise ControlError(sentence, 1) from None
            finally:
                self._tickets.pop(ticket, None)
            if error_text is not None:
                raise ControlError(f"refused, the policies in force stay: {error_text}", 1)
        return {"policies": len(policies), "changed": changed, "open": self._open()}

    def _open(self) -> list[str]:
        """Interfaces that no policy closes in any direction."""
        return [str(row["interface"]) for row in Listings(self._engine, now()).endpoints() if not row["default_deny"]]

    def _inject(self, arguments: Mapping[str, object]) -> Row:
        self._injection.take(arguments)
        if self._trace is not None:
            self._trace.flush()
        return {"delay": self._injection.delay_s}


_HOOK_STATES = {
    HookState.FIRST: ENFORCING,
    HookState.NOT_FIRST: "another program comes before ours and may hide it",
    HookState.ABSENT: "our program is not there: nothing is enforced",
}


def policies_at(paths: Iterable[str]) -> tuple[Policy, ...]:
    """The policies of these paths; PolicyError also where a path stands for no file.

    With no policy in force everything is open: that is never to come of a mistyped pattern or an emptied directory.
    """
    files: dict[Path, None] = {}
    mistakes = []
    for path in paths:
        try:
            found = policy_files([path])
        except (OSError, ValueError, NotImplementedError) as error:
            mistakes.append(Mistake(path, 1, "", f"is no path or pattern of files: {error}"))
        else:
            files.update(dict.fromkeys(found))
            if not found:
                mistakes.append(Mistake(path, 1, "", "there is no policy here; `policies: []` says that none is meant"))
    if mistakes:
        raise PolicyError(mistakes)
    return tuple(read_policies(tuple(files)))


def _seconds(given: object) -> float:
    try:
        seconds = float(str(given or 30))
    except ValueError:
        seconds = -1
    if not 0 < seconds < 1e9:
        raise ControlError("`timeout` is a number of seconds")
    return seconds


def _sentence(fact: Fact) -> str:
    return f"{fact.kind} " + " ".join(f"{key}={value}" for key, value in fact.fields.items() if value is not None)


def _drop(event: DropEvent, listings: Listings) -> Row:
    is_egress = event.direction is Direction.EGRESS
    remote = event.destination if is_egress else event.source
    return {
        "time": dt.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "endpoint": event.endpoint,
        "reason": event.reason.text,
        "audited": event.audited,
        "direction": event.direction.name.lower(),
        "protocol": PROTOCOL_NAMES.get(event.protocol, str(event.protocol)),
        "source": text_of(event.source),
        "destination": text_of(event.destination),
        "port": event.policy_port,
        "identity": event.identity,
        "rule": listings.rule_text(event.cookie) if event.cookie else "no rule",
        "names": listings.names_on(remote),
        "why": listings.why_dropped(event.reason.text, remote, is_egress=is_egress),
    }


def _settings(config: Config) -> Settings:
    dns, limits = config.dns, config.limits
    return Settings(
        upstreams=dns.upstreams,
        denied_rcode=Rcode.REFUSED if dns.denied_answer is DeniedAnswer.REFUSED else Rcode.NXDOMAIN,
        gate_deadline_s=config.gate.deadline,
        release_on_failure=config.gate.on_failure is OnFailure.RELEASE,
        allow_addresses=dns.allow_addresses,
        follow_cnames=dns.cname is Cname.FOLLOW,
        ttl_floor_s=dns.ttl_floor,
        ttl_cap_s=dns.ttl_cap,
        keep_while_flow_seen_s=dns.keep_while_flow_seen,
        keep_past_lifetime_s=dns.keep_past_lifetime,
        open_questions_max=limits.open_questions,
        open_questions_per_endpoint_max=limits.open_questions_per_endpoint,
        held_replies_max=limits.held_replies,
        names_max=limits.names,
        addresses_per_name_max=limits.addresses_per_name,
        history_max=limits.history,
        identities_max=limits.identities,
        policy_rows_max=config.datapath.policy_rows,
        policy_rows_per_set_max=limits.policy_rows_per_set,
    )
