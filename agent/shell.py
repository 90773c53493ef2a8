"""The shell: the one thread that hears, asks the engine, and does what it says.

    sockets, kernel, timers, people ──> events ──> Engine.handle ──> effects ──> kernel, sockets, people

Rule 1: effects are performed in the engine's order; replies, and questions to upstreams, wait only until the next write or the
end of the pass, whichever is first, so that a batch of them leaves in one call.
Rule 2: the clock is read here (CLOCK_BOOTTIME, as the datapath does) and handed in.
Rule 3: programs are attached by the engine's effect, after everything they read is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from agent.attaching import Attaching
from agent.attachments import Attachments
from agent.config import Cname, Config, DeniedAnswer, OnFailure, policy_files
from agent.control import ControlError
from agent.control.listings import Listings, Row
from agent.control.runs import own_network_namespace
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
    Reply,
    Restored,
    RowsWritten,
    Save,
    SendReply,
    Settled,
    SourceReported,
    Tick,
    UpstreamFailed,
    WriteRows,
)
from agent.core.reconciler import BATCH_ROWS_MAX
from agent.core.records import Record
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import Address, Direction, Orientation, Write, question_type_text
from agent.datapath.abi import Reason
from agent.datapath.attach import HookState
from agent.datapath.datapath import Datapath
from agent.datapath.events import PacketEvent
from agent.dns.bounds import Limits
from agent.dns.fairness import Desk
from agent.dns.sockets import Listeners
from agent.dns.upstreams import Upstreams
from agent.dns.wire import Rcode
from agent.documents.remarks import Mistake, PolicyError
from agent.drops import Drops, is_chatter
from agent.facts import PACKETS, Facts, Listener
from agent.history_file import HistoryFile
from agent.holder.client import HolderLink
from agent.hooks import Hooks
from agent.host import forwarding
from agent.host.endpoints import HostEndpoints
from agent.host.interfaces import Interfaces
from agent.host.watch import NetworkWatch
from agent.injection import Injection, row_of
from agent.policy.files import read_policies
from agent.state import Journal
from agent.status import Said, Status
from agent.verify import Verify
from agent.why.explain import Explain

log = logging.getLogger("namegate")

# Compacted when three of four lines say nothing any more: then it costs one line for each that is appended.
JOURNAL_GROWTH = 4
# A host whose routes change all the time is looked at a fifth of the time, and five times a second at least.
LOOK_AGAIN_AFTER_S = 0.2
LOOK_PAUSE_LOOKS = 4
COLLECT_EVERY_S = 10.0
# At an orderly stop, for the questions that are open: most upstreams answer in less.
DRAIN_S_MAX = 0.5
JOURNAL_SLACK_LINES = 10_000

# A packet said something of its sender that the program does not believe.
_CLAIMS: Final = frozenset({Reason.DROP_SOURCE, Reason.DROP_NEIGHBOUR_CLAIM})

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
    """start_refused: told why the policies of the start cannot be in force. idle: called when there has been no lease for a
    while, None for an agent that lives without. holder: closed with the shell, None for none.
    """

    def __init__(
        self,
        config: Config,
        datapath: Datapath,
        journal: Journal,
        attachments: Attachments,
        start_refused: Callable[[str], None],
        idle: Callable[[], None] | None,
        holder: HolderLink | None,
    ) -> None:
        self._config = config
        self._datapath = datapath
        self._journal: Journal | None = journal
        self._start_refused = start_refused
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(_settings(config), now(), config.testing.known_bad)
        self._engine.proxy.is_logged = self._engine.proxy.is_watched = log.isEnabledFor(logging.DEBUG)
        self.facts = Facts(self._listeners_changed)
        limits = Limits(
            connections_max=config.limits.tcp_connections,
            connections_per_client_max=config.limits.tcp_connections_per_endpoint,
            questions_per_second=config.datapath.questions_per_second,
            question_burst=config.datapath.question_burst,
        )
        self._holder = holder
        self._listeners = Listeners(config.datapath.mark, limits=limits, kept=holder.take() if holder is not None else ())
        self._drained: asyncio.Future[None] | None = None
        # A reply costs more than its question: in the order of their coming, those of a flood would be in everybody's way.
        self._desk = Desk(self._loop, self._take, self._asker_of, self._fail, config.limits.open_questions)
        self._upstreams = Upstreams(self._loop, config.datapath.mark, self._desk.take, mixes_case=config.dns.randomize_case)
        self._replies: list[SendReply] = []
        self._questions: list[AskUpstream] = []
        self.hooks = Hooks(self._loop, datapath, self._engine.groups.endpoints)
        self._compact_at = 0  # lines of the journal
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tickets: dict[Hashable, asyncio.Future[str | None]] = {}
        self.drops = Drops(self._loop, datapath, self._listings, self._take_packet, self.facts.lose)
        self.host_endpoints = HostEndpoints(())
        self._host_addresses: frozenset[Address] = frozenset()
        self._wrong: dict[str, str] = {}  # interface -> why it is not policed as meant
        self._watch: NetworkWatch | None = None
        self._looking: asyncio.Task[None] | None = None
        self._lookers: list[asyncio.Future[None]] = []  # who waits for a look that has not begun
        self._attaching = Attaching(self, attachments, config.containers, config.datapath.device, now, idle)
        self._must_look_again = False
        self._vanished: set[int] = set()  # interfaces, whether they are back or not
        self._is_hearing = False
        self._injection = Injection()
        history_file = config.dns.history_file
        self._history = HistoryFile(history_file, self._engine.proxy.history) if history_file is not None else None
        self._trace: IO[str] | None = config.testing.trace.open("w") if config.testing.trace is not None else None
        self._verify = Verify(
            self._engine, datapath, self.hooks, self.facts, self._take, self._listings, config.datapath.verify_every
        )
        self._explain = Explain(self._engine, datapath.tables, lambda: self._host_addresses, self.drops.read, policies_at, now)
        self._status = Status(
            config,
            self._engine,
            datapath,
            self.hooks,
            self._listings,
            lambda: self.host_endpoints,
            self._said,
            self._verify.differences,
        )

    def start(self, start: Start) -> None:
        """Say all that is known at start, then begin to hear. The last event attaches the programs."""
        if self._history is not None:
            self._history.load(now())
            self._history.start()
        self._datapath.set_dns_sockets(self._listeners.sockets())
        self.drops.start()
        if start.records is not None:
            self._take([Restored(start.records, self._datapath.rows())])
        self.host_endpoints = start.endpoints
        self._compare(start.interfaces, self._attaching.attached())
        self._take([PoliciesChanged(start.policies, _START)])
        self._take([SourceReported(source) for source in sorted(SOURCES - {"containers"})])
        if self._holder is None or not self._holder.is_there:
            self._hear()
        self._watch = NetworkWatch(self._loop, self.look_around)
        self._attaching.start(lambda: self._take([SourceReported("containers")]))
        self._verify.start(self._loop)
        self.look_around()  # what was seen before the programs were built may be long ago
        # A full pass of the collector over a million addresses would stop the one thread for half a second. The core makes no
        # reference cycles; what the libraries make is young when it dies, and what lives is looked at once.
        gc.disable()
        self._collect()

    def _hear(self) -> None:
        """Take questions from now on. Where a holder has them, not before they can be answered at once: by its patience and our
        start together a question would wait for more than a second."""
        if self._is_hearing:
            return
        self._is_hearing = True
        if self._holder is not None:
            self._holder.serve(self._listeners.descriptors())
        self._listeners.start(self._loop, self._take, self._gone, self._client_of)

    def _enforcing(self) -> None:
        """The policies of the start are in force."""
        self._hear()
        if self._holder is not None:
            self._holder.require()
        self.warn_of_forwarding(self._engine.groups.endpoints)

    def warn_of_forwarding(self, numbers: Iterable[int]) -> None:
        """Where what is behind these endpoints goes no further than this host."""
        added = [self._engine.groups.endpoints[number].added for number in numbers]
        behind = {each.interface: each.ifindex for each in added if each.orientation is Orientation.BEHIND}
        has_ipv6 = any(len(address) == 16 for each in added for address in each.addresses)
        if behind:
            self._loop.run_in_executor(None, _warn_of_forwarding, behind, has_ipv6)

    async def drain(self) -> None:
        """Take no more questions, and answer those that are open: what comes now waits for the next agent, or its holder."""
        self._listeners.stop()
        if self._holder is not None:
            self._holder.close()
        self._drained = self._loop.create_future()
        self._take([])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained, DRAIN_S_MAX)
        if self._history is not None:
            await self._history.stop()

    async def close(self) -> None:
        """The kernel goes on enforcing."""
        await self._attaching.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.close()
            gc.enable()
        if self._looking is not None:
            self._looking.cancel()
        self._verify.close()
        self.hooks.close()
        self.drops.close()
        self._upstreams.close()
        self._desk.close()
        if self._holder is not None:
            self._holder.close()
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

    def _client_of(self, address: Address) -> Hashable:
        """One endpoint is one client by all of its addresses."""
        endpoint = self._engine.groups.endpoint_at(address)
        return address if endpoint is None else endpoint

    def _asker_of(self, event: Reply | UpstreamFailed) -> Hashable:
        """Whose question it was."""
        transaction = self._engine.proxy.transactions.get(event.transaction)
        return None if transaction is None else transaction.endpoint

    def _fail(self, event: Reply | UpstreamFailed) -> None:
        """There is no room for it; there are not so many open questions."""
        self._loop.call_soon(self._take, [UpstreamFailed(event.transaction, "too many replies at a time")])

    def _take(self, events: Sequence[Event]) -> None:
        """One pass: all that was heard in one wake-up."""
        at = now()
        self._engine.handle_all(events, at)
        self._perform(at)
        self._flush()
        self._arm(at)
        is_busy = self._engine.proxy.transactions or self._listeners.waiting
        if self._drained is not None and not is_busy and not self._drained.done():
            self._drained.set_result(None)

    def _perform(self, at: float) -> None:
        while effects := self._engine.effects():
            for effect in effects:
                # Nearly all effects are of these two kinds.
                if type(effect) is SendReply:
                    self._replies.append(effect)
                    continue
                if type(effect) is AskUpstream:
                    self._questions.append(effect)
                    continue
                match effect:
                    case Save():
                        self._save(effect.records)
                    case WriteRows():
                        self._flush()
                        self._write(effect.writes)
                    case Forget():
                        self._forget(effect.transaction)
                    case ReadLastSeen():
                        seen = self._datapath.last_seen(effect.scope, effect.address)
                        self._engine.handle(LastSeen(effect.scope, effect.address, seen), at)
                    case PassOverFlows():
                        self._engine.handle(FlowsSeen(effect.pass_number, self._datapath.flow_identities()), at)
                    case Attach() | Detach():
                        self.hooks.change(effect)
                    case Settled():
                        self._settle(effect)
                    case Fact():
                        self._report(effect)

    def _flush(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._listeners.send(replies)
        if self._questions:
            questions, self._questions = self._questions, []
            self._upstreams.ask_all(questions)

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

    def _forget(self, transaction: int) -> None:
        self._questions = [question for question in self._questions if question.transaction != transaction]
        self._upstreams.forget(transaction)

    def _arm(self, at: float) -> None:
        """A timer for the next deadline. One that is set too early is let be: nearly every question ends before its own."""
        deadline = self._engine.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - at), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._take([Tick()])

    def _settle(self, effect: Settled) -> None:
        ticket = self._tickets.pop(effect.ticket, None)
        if ticket is not None and not ticket.done():
            ticket.set_result(effect.error)
        if effect.error is None:
            for interface in self.unclosed():
                log.warning("no policy closes %s: what it sends is not enforced", interface)
            if effect.ticket is _START:
                self._loop.call_soon(self._enforcing)  # it takes questions in, which is nothing to do within an effect
        else:
            log.error("policies refused: %s", effect.error)
            if effect.ticket is _START:
                self._start_refused(effect.error)

    def _report(self, fact: Fact) -> None:
        endpoint = fact.fields.get("endpoint")
        if fact.kind == "question" and isinstance(endpoint, int) and endpoint in self._attaching.leases:
            self._attaching.leases[endpoint].take_question(fact.fields)
        if fact.kind == "guard":
            self._explain.hear_of_guard(fact.fields, fact.at)
            if isinstance(endpoint, int) and endpoint in self._attaching.leases:
                self._attaching.leases[endpoint].take_guarded(fact.fields)
        is_usual = fact.kind == "question" and fact.fields.get("outcome") == "released"
        level = logging.DEBUG if is_usual else logging.INFO
        is_for_log = fact.is_for_log and log.isEnabledFor(level)
        if is_for_log or self.facts.are_wanted(fact.kind):
            shown = _shown(fact, self._listings())
            self.facts.tell(fact.kind, shown)
            if is_for_log:
                words = ((key, str(value)) for key, value in shown.items())
                said = " ".join(f"{key}={value!r}" if " " in value else f"{key}={value}" for key, value in words)
                log.log(level, "%s %s", fact.kind, said)

    async def _listen(self, arguments: Mapping[str, object]) -> Listener:
        kinds, endpoint = arguments.get("kinds") or [], arguments.get("endpoint")
        if not isinstance(kinds, list) or not isinstance(endpoint, int | None):
            raise ControlError("`kinds` is a list of words, `endpoint` a number")
        return self.facts.listen(frozenset(map(str, kinds)), endpoint)

    def _listeners_changed(self) -> None:
        self._engine.proxy.is_watched = self._engine.proxy.is_logged or self.facts.are_wanted("question")
        openings = self.facts.are_wanted("verdict")
        self.drops.hear(is_heard=any(map(self.facts.are_wanted, PACKETS)), openings=openings)

    # --- interfaces that come and go -------------------------------------------------------------------------------------

    def look_around(self) -> None:
        """The network changed: look what is there, without holding up DNS. One look at a time."""
        if self._looking is not None:
            self._must_look_again = True
            return
        self._looking = self._loop.create_task(self._look())

    def problem_of(self, interface: str) -> str | None:
        """Why it is not policed as meant, as of the last look."""
        return self._wrong.get(interface)

    def watch(self, endpoint: int, *, is_watched: bool) -> None:
        """Every one of its questions is a fact from now on, or only what is unusual."""
        (self._engine.proxy.watched.add if is_watched else self._engine.proxy.watched.discard)(endpoint)

    async def look_now(self) -> None:
        """Returns when the engine has been told of all that is so by now."""
        looked = self._loop.create_future()
        self._lookers.append(looked)
        self.look_around()
        await looked

    async def _look(self) -> None:
        try:
            while True:
                self._must_look_again = False
                lookers, self._lookers = self._lookers, []
                began, attached = self._loop.time(), self._attaching.attached()
                self._vanished |= self._watch.take_gone() if self._watch is not None else set()
                try:
                    interfaces = await asyncio.to_thread(Interfaces)
                except OSError as error:
                    log.warning("the network cannot be looked at (%s): trying again", error)
                    self._must_look_again = True
                    self._lookers += lookers
                    pause_s = LOOK_AGAIN_AFTER_S
                else:
                    vanished, self._vanished = self._vanished, set()
                    self._compare(interfaces, attached, vanished)
                    self._attaching.follow_routes()
                    for looker in lookers:
                        looker.set_result(None)
                    pause_s = min(LOOK_PAUSE_LOOKS * (self._loop.time() - began), LOOK_AGAIN_AFTER_S)
                if not self._must_look_again:
                    break
                await asyncio.sleep(pause_s)
        finally:
            self._looking = None

    def _compare(self, interfaces: Interfaces, attached: set[int], vanished: Collection[int] = ()) -> None:
        """Tell the engine what came, what went and what is different. attached: when this was looked at; what was attached
        since may be an interface that was not there yet.

        An address that goes from one endpoint to another is taken from the one before the other gets it.
        """
        there = {link.ifindex for link in interfaces.links.values()} - set(vanished)
        self._attaching.end_all(attached - there)
        present = self.host_endpoints.look(interfaces, vanished)
        for interface, reason in present.wrong.items():
            if self._wrong.get(interface) != reason:
                log.warning("%s", reason)
        self._wrong = present.wrong
        events: list[Event] = []
        if interfaces.host_addresses() != self._host_addresses:
            self._host_addresses = interfaces.host_addresses()
            events.append(HostAddresses(self._host_addresses))
        known = {number: endpoint.added for number, endpoint in self._engine.groups.endpoints.items()}
        for number in known:
            if number not in present.by_number:
                events.append(EndpointRemoved(number))
                self._listeners.forget(number)
                self._desk.queue.forget(number)
        changed = {number: added for number, added in present.by_number.items() if known.get(number) != added}
        for number, before in known.items():
            if number in changed:
                kept = tuple(address for address in before.addresses if address in changed[number].addresses)
                events.append(dataclasses.replace(before, addresses=kept))
        events += changed.values()
        self._take(events)

    def _listings(self) -> Listings:
        return Listings(self._engine, now())

    def _take_packet(self, event: PacketEvent, drop: Row) -> None:
        if not event.reason.is_drop:
            self.facts.tell("verdict", drop)
            return
        if is_chatter(event):
            self.facts.tell("chatter", drop)
            return
        self.facts.tell("drop", drop)
        if event.endpoint in self._attaching.leases:
            self._attaching.leases[event.endpoint].take_drop(drop)
        # It may be the endpoint's own address, not known yet.
        is_claim = event.reason in _CLAIMS and event.direction is Direction.EGRESS
        if is_claim and event.endpoint is not None and self.host_endpoints.claim(event.endpoint, event.source):
            self.look_around()

    # --- people ----------------------------------------------------------------------------------------------------------

    async def answer(self, command: str, arguments: Mapping[str, object]) -> object:
        """One request of the control socket."""
        shows: dict[str, Callable[[Listings], object]] = {
            "names": Listings.names,
            "selectors": Listings.selectors,
            "identities": Listings.identities,
            "ipcache": Listings.ipcache,
            "policy-map": Listings.policy_map,
            "patterns": Listings.patterns,
            "drops": lambda _: self.drops.read(),
            "hello": lambda _: {"network_namespace": own_network_namespace()},
        }
        if command in shows:
            return shows[command](self._listings())
        does: dict[str, Callable[[Mapping[str, object]], Awaitable[object]]] = {
            "status": lambda _: self._status.whole(),
            "endpoints": lambda _: self._status.endpoints(),
            "apply": self._apply,
            "attach": self._attaching.attach,
            "not-started": self._attaching.hear_of_container,
            "facts": self._listen,
            "verify": self._verify.answer,
            "detach": self._detach,
            "explain": self._explain.answer,
        }
        if command in does:
            return await does[command](arguments)
        if command == "inject" and self._config.testing.enabled:
            return self._inject(arguments)
        raise ControlError(f"the agent knows no command `{command}`")

    def _said(self) -> Said:
        problems = [problem for problems in self._attaching.problems.values() for problem in problems]
        if self._journal is None:
            problems.append("the journal could not be written: the next start learns names anew")
        if self._holder is not None and self._holder.problem:
            problems.append(self._holder.problem)
        is_starting = self._holder is not None and self._holder.is_starting
        counters = {**self._listeners.counters.as_dict(), **self._upstreams.counters.as_dict(), **self._verify.counters}
        counters["link_chatter"] = self.drops.chatter
        warnings = [warning for warnings in self._attaching.warnings.values() for warning in warnings]
        return Said(self._wrong, problems, warnings, is_starting, counters)

    async def _apply(self, arguments: Mapping[str, object]) -> Row:
        files = arguments.get("files")
        paths = [str(file) for file in files] if isinstance(files, list) else self._config.policies
        timeout = _seconds(arguments.get("timeout"))
        try:
            policies = policies_at(paths)
        except PolicyError as error:
            raise ControlError(f"refused, the policies in force stay:\n{error}", 1) from None
        changed = policies != self._engine.groups.policies
        problem = await self.judged(policies, timeout if arguments.get("wait") else 0)
        if problem is not None:
            raise ControlError(f"refused, the policies in force stay: {problem}", 1)
        return {"policies": len(policies), "changed": changed, "open": self.unclosed()}

    async def judged(self, policies: tuple[Policy, ...] | None, patience_s: float) -> str | None:
        """Every endpoint there is now is judged by these policies (None: by those there are), or why it is not.

        patience_s: 0 does not wait for what takes longer than this moment.
        """
        ticket = object()
        settled: asyncio.Future[str | None] = self._loop.create_future()
        self._tickets[ticket] = settled
        self._take([PoliciesChanged(policies, ticket)])
        try:
            if patience_s or settled.done():
                return await asyncio.wait_for(settled, patience_s)
        except TimeoutError:
            sentence = f"the policies are not in force after {patience_s:g} s: `namegate status` says why"
            raise ControlError(sentence, 1) from None
        finally:
            self._tickets.pop(ticket, None)
        return None

    async def _detach(self, arguments: Mapping[str, object]) -> Row:
        """Of one interface the kernel is asked whether it is let go."""
        if arguments.get("container"):
            return await self._attaching.unfollow(str(arguments["container"]))
        interface = str(arguments.get("interface"))
        added = next((e.added for e in self._engine.groups.endpoints.values() if e.added.interface == interface), None)
        if added is None:
            raise ControlError(f"{interface} is no endpoint: `namegate endpoints` shows those that are", 1)
        await self._attaching.detach(added.ifindex)
        await self.hooks.at_rest()
        (state,) = await self.hooks.states([(added.ifindex, added.orientation)])
        if state is not HookState.ABSENT:
            raise ControlError(f"{interface} cannot be let go: the log says why, and `namegate endpoints` what it is", 1)
        return {"interface": interface}

    def unclosed(self) -> list[str]:
        """Interfaces that no policy closes in any direction."""
        return [str(row["interface"]) for row in self._listings().endpoints() if not row["default_deny"]]

    def _inject(self, arguments: Mapping[str, object]) -> Row:
        self._injection.take(arguments)
        if self._trace is not None:
            self._trace.flush()
        return {"delay": self._injection.delay_s}


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


def _shown(fact: Fact, listings: Listings) -> Row:
    said = {key: value for key, value in fact.fields.items() if value is not None}
    if isinstance(number := said.get("type"), int):
        said["type"] = question_type_text(number)
    if "cookie" in said:
        cookie = int(str(said.pop("cookie")))
        said["rule"] = listings.rule_text(cookie) if cookie else "no rule"
    return said


def _warn_of_forwarding(behind: Mapping[str, int], has_ipv6: bool) -> None:
    with contextlib.suppress(OSError):
        off = forwarding.off(forwarding.routed(behind), has_ipv6=has_ipv6)
        if off is not None:
            log.warning("%s; to turn it on: %s", off.found, off.remedy)


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
        clamp_ttl=dns.clamp_ttl,
        keep_while_flow_seen_s=dns.keep_while_flow_seen,
        keep_past_lifetime_s=dns.keep_past_lifetime,
        open_questions_max=limits.open_questions,
        open_questions_per_endpoint_max=limits.open_questions_per_endpoint,
        held_replies_max=limits.held_replies,
        names_max=limits.names,
        names_per_minute=dns.names_per_minute,
        addresses_per_name_max=limits.addresses_per_name,
        history_max=limits.history,
        identities_max=limits.identities,
        policy_rows_max=config.datapath.policy_rows,
        policy_rows_per_set_max=limits.policy_rows_per_set,
    )
