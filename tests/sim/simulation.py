"""Random histories, and what must hold after each step of them.

The kernel performs one write at a time, late, or refuses it; its answers come later still; questions, replies, ends of
lifetimes, policies and endpoints come in between in any order. `Simulation` judges by the kernel's rows alone and by `naive`:

I1  at rest, the kernel holds what a recomputation says
I2  an ipcache row in the kernel names an identity whose policy rows are there, in every set an endpoint is judged by
I3  each question gets one answer, in time; a released address passes at that moment
I4  a number never gets other labels; while a flow remembers an identity its rows stay
I5  at every single write, what both the state before and the one after allow is allowed
I6  at every single write, what neither allows is not
I7  all of this goes on where the process dies and another one starts: at any step, with the journal cut anywhere that nothing
    outside depends on yet, with the same policies or others
I8  what is known of a name was said by a reply to a question for it
I9  full tables and reached bounds are among the histories; the queues' own bounds are unit tests
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agent.core.engine import Engine
from agent.core.events import AskerGone, Event, HostAddresses, PoliciesChanged, RowsWritten, Tick, UpstreamFailed
from agent.core.guard import AddressGuard
from agent.core.known_bad import KnownBad
from agent.core.proxy import QUESTION_S_MAX
from agent.core.records import IdentityRecord
from agent.core.rules import Cidr, Endpoints, Entity, Fqdn, LabelSelector, Origin, Peer, Policy, Ports, Rule
from agent.core.settings import Settings
from agent.core.types import (
    PROTOCOL_TCP,
    Address,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    LabelSet,
    PolicyKey,
    Prefix,
    Table,
    Verdict,
    Write,
    packed,
)
from tests.property.naive import Situation, Workload, takes
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, Answered, World, allow, subject

NAMES = ("a.example.", "b.example.", "x.a.example.", "c.test.")
PATTERNS = (*NAMES, "*.example.", "**.example.", "*")
ADDRESSES = tuple(map(packed, ("10.0.1.1", "10.0.1.2", "10.0.2.1", "198.51.100.7", "192.0.2.12", "2001:db8::7")))
CIDRS = (
    ("10.0.0.0/8",),
    ("10.0.0.0/8", "10.0.1.0/24"),
    ("10.0.1.0/24",),
    ("10.0.1.0/24", "10.0.1.2/32"),
    ("10.0.1.2/32",),
    ("0.0.0.0/0", "10.0.0.0/8", "192.0.2.12/32"),
    ("2001:db8::/32",),
)
PORTS_JUDGED = (80, 443)
PORTS = (None, (443, 443), (80, 444), (80, 80))
ENDPOINTS = {1: "192.0.2.11", 2: "192.0.2.12", 3: "192.0.2.13", 4: "192.0.2.12"}  # 4 comes where 2 was
ISOLATED = frozenset({3})

V4 = st.sampled_from([address for address in ADDRESSES if len(address) == 4])

Triple = tuple[int, Address, int]  # endpoint, address, port
Pairs = frozenset[tuple[int, str, Address]]

# --- what people may ask for ---------------------------------------------------------------------------------------------


def _cidr(texts: tuple[str, ...]) -> Cidr:
    return Cidr(Prefix.parse(texts[0]), tuple(map(Prefix.parse, texts[1:])))


CIDR_PEERS = st.sampled_from(CIDRS).map(_cidr)
PEERS: st.SearchStrategy[Peer] = st.one_of(
    st.sampled_from(PATTERNS).map(Fqdn),
    st.sampled_from(PATTERNS).map(Fqdn),
    CIDR_PEERS,
    st.sampled_from((Entity.WORLD, Entity.HOST, Entity.ALL, Endpoints(subject("e2")), Endpoints(LabelSelector()))),
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    deny = draw(st.integers(0, 4)) == 4
    peers = draw(st.lists(CIDR_PEERS if deny else PEERS, min_size=1, max_size=2, unique=True))
    ports = draw(st.sampled_from(PORTS))
    spoken = None if ports is None else (Ports(PROTOCOL_TCP, *ports),)
    return Rule(Direction.EGRESS, tuple(peers), spoken, deny, origin=Origin("p", draw(st.integers(1, 3))))


POLICIES = st.builds(
    Policy,
    st.just("p"),
    st.sampled_from((None, None, "e1", "e2")).map(subject),
    st.lists(rules(), min_size=1, max_size=3).map(tuple),
    default_deny_egress=st.sampled_from((True, True, True, False)),
    default_deny_ingress=st.just(False),
    except_names=st.sampled_from(((), (), ("b.example.",))),
)

# --- the judge -----------------------------------------------------------------------------------------------------------


class Simulation:
    """A world whose every step is judged, by what its rows say about these addresses and TCP ports."""

    def __init__(self, world: World, addresses: tuple[Address, ...] = ADDRESSES, ports: tuple[int, ...] = PORTS_JUDGED) -> None:
        assert not world.auto, "who performs writes at once cannot be looked at between two of them"
        self.world = world
        self.addresses = addresses
        self.ports = ports
        self.unheard: deque[tuple[Write, int]] = deque()  # performed or refused, and not acknowledged yet
        self.questions: dict[int, tuple[int, str, float]] = {}  # asker -> endpoint, name, when; until answered or given up
        self.replied: dict[int, float] = {}
        self.labels_by_number: dict[int, LabelSet] = {}
        self.confirmed: Pairs = frozenset()  # in the cache, and their rows were realized since
        self.lingering: Pairs = frozenset()  # no longer in the cache, their rows not acknowledged yet
        self.disturbed: set[Address] = set()  # became or ceased to be an endpoint's or the host's
        self.taught: set[tuple[str, Address]] | None = None  # what replies said; None where nobody keeps the account
        self.inherited: dict[int, list[tuple[Policy, ...]]] = {}  # endpoint -> what the process before judged it by
        self.may_be_cut_from = 0  # records of the journal that the kernel or a client may know of
        self.is_sound = True  # false from a judgement that failed
        self._pairs: Pairs = frozenset()
        self._judged = 0
        self._heard = len(world.facts)
        self._said = self._gone = 0  # facts about questions, and of these the ones whose answer nobody waits for
        self._identities: dict[tuple[int, Address], int] = {}
        self._verdicts: dict[tuple[int, int, int], Verdict | None] = {}
        self._allowed_by_naive: dict[object, frozenset[Triple]] = {}

    @property
    def engine(self) -> Engine:
        return self.world.engine

    # --- steps ---------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        self.is_sound = False
        self.world.handle(event)
        self.judge()

    def write(self, error: int = 0) -> bool:
        """The kernel performs, or refuses, its next write; says whether there was one."""
        write = self.world.take_write()
        if write is None:
            return False
        result = error or self.world.kernel.apply(write)
        self.may_be_cut_from = len(self.world.journal)
        self.unheard.append((write, result))
        if result == 0:
            self.is_sound = False
            if write.table is Table.IPCACHE:
                self._identities.clear()
            elif write.table is Table.POLICY:
                self._verdicts.clear()
            self.judge_order()
            self.judge_packets(f"{write.table} {write.key} = {write.value}")
            self.is_sound = True
        return True

    def acknowledge(self, count: int) -> None:
        heard = tuple(self.unheard.popleft() for _ in range(min(count, len(self.unheard))))
        if heard:
            self.handle(RowsWritten(heard))

    def hear_flows(self) -> None:
        while self.world.waiting_looks:
            self.handle(self.world.waiting_looks.popleft())

    def advance(self, seconds: float) -> None:
        self.is_sound = False
        self.world.advance(seconds)
        self.judge()

    def jump(self, seconds: float) -> None:
        """The machine slept: everything that was due meanwhile is due now."""
        self.world.now += seconds
        self.handle(Tick())

    def restart(self, policies: tuple[Policy, ...] | None = None, cut: int = 0) -> None:
        """The process dies where it stands, and another one takes over (I7).

        cut: so many of the last records were not written yet, as far as nothing outside can know of them.
        """
        for event in self.die(policies, cut):
            self.handle(event)

    def die(self, policies: tuple[Policy, ...] | None = None, cut: int = 0) -> list[Event]:
        """The first half of `restart`; gives back the events the new process begins with."""
        self.is_sound = False
        self.inherited = {number: self.candidates(number) for number in self.engine.groups.endpoints}
        self.lingering |= self._pairs
        kept = max(len(self.world.journal) - cut, self.may_be_cut_from)
        events = self.world.die(policies, kept)
        self.unheard.clear()
        self.questions.clear()
        self.replied.clear()
        known = {record.identity for record in self.world.journal if isinstance(record, IdentityRecord)}
        self.labels_by_number = {number: labels for number, labels in self.labels_by_number.items() if number in known}
        return events

    @property
    def is_inheriting(self) -> bool:
        """Are rows of the process before still judged by, or on their way out?"""
        return self.engine.groups.is_inheriting

    def rest(self) -> None:
        """Every fault ends, all is done that can be, and who brought policies that do not fit is sent away, as by the shell."""
        self.world.kernel.rows_max.clear()
        self._come_to_rest()
        groups = self.engine.groups
        refused = [number for number, e in groups.endpoints.items() if e.group is None and e.added.policies is not None]
        if refused:
            self._judge_refusal()
            for number in refused:
                self.remove_endpoint(number)
            self._come_to_rest()
        self.judge_rest()

    def _come_to_rest(self) -> None:
        # What was refused is tried again each second, until a pass over the flows has given room; another one is due after it.
        for seconds in (0.0, 1.1, QUESTION_S_MAX, *[1.1] * 8, 5.1, 5.1, 5.1, 0.0):
            self.advance(seconds)
            while self.write() or self.unheard or self.world.waiting_looks:
                self.acknowledge(1)
                self.hear_flows()

    def remove_endpoint(self, number: int) -> None:
        self.questions = {asker: question for asker, question in self.questions.items() if question[0] != number}
        self.disturbed |= set(self.engine.groups.endpoints[number].added.addresses)
        self.world.remove_endpoint(number)
        self.judge()

    # --- what is known of the world ---------------------------------------------------------------------------------------

    @property
    def workloads(self) -> dict[int, Workload]:
        return {
            number: Workload(
                number, tuple(sorted(e.added.labels.items())), e.added.addresses, e.added.isolated, e.added.policies
            )
            for number, e in self.engine.groups.endpoints.items()
        }

    def candidates(self, endpoint: int) -> list[tuple[Policy, ...]]:
        """By which policies may this endpoint be judged now? The first are those in force."""
        groups = self.engine.groups
        is_judged = groups.endpoints[endpoint].group is not None
        in_force = [groups.policies] if is_judged else self.inherited.get(endpoint, [])
        return in_force + ([groups._plan.policies] if groups._plan is not None else [])

    def situation(self, policies: tuple[Policy, ...], pairs: Pairs) -> Situation:
        guard = AddressGuard(self.world.host, self.world.settings.allow_addresses)
        return Situation(
            policies,
            tuple(self.workloads.values()),
            pairs,
            self.world.host,
            lambda address, allowed: guard.forbids(address, allowed) is not None,
        )

    def naive(self, policies: tuple[Policy, ...], pairs: Pairs) -> frozenset[Triple]:
        workloads = self.workloads
        key = (policies, pairs, tuple(workloads), self.world.host)
        allowed = self._allowed_by_naive.get(key)
        if allowed is None:
            situation = self.situation(policies, pairs)
            allowed = self._allowed_by_naive[key] = frozenset(
                (number, address, port)
                for number, workload in workloads.items()
                for address in self.addresses
                for port in self.ports
                if situation.allows(workload, address, PROTOCOL_TCP, port)
            )
        return allowed

    def kernel_allows(self, value: EndpointValue, address: Address, port: int) -> bool:
        kernel = self.world.kernel
        group = kernel.rows[Table.GROUPS].get(value.group)
        assert isinstance(group, GroupValue), f"endpoint {value.endpoint} is in group {value.group}, which the kernel has not"
        place = (value.scope, address)
        if place not in self._identities:
            self._identities[place] = kernel.identity_of(*place)
        what = (group.set, self._identities[place], port)
        if what not in self._verdicts:
            self._verdicts[what] = kernel.verdict_of(group.set, what[1], PROTOCOL_TCP, port)
        verdict = self._verdicts[what]
        return verdict is Verdict.ALLOW or (verdict is None and not group.default_deny_egress)

    def endpoint_rows(self) -> Iterable[tuple[int, EndpointValue]]:
        """Rows of endpoints that are there; the row of one that went may linger."""
        for ifindex, value in self.world.kernel.rows[Table.ENDPOINTS].items():
            assert isinstance(value, EndpointValue)
            endpoint = self.engine.groups.endpoints.get(value.endpoint)
            if endpoint is not None and endpoint.added.ifindex == ifindex:
                yield value.endpoint, value

    # --- judgements --------------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """After every event."""
        self.is_sound = False
        self._follow_pairs()
        for identity, labels in self.engine.identities.labels_by_identity.items():
            assert self.labels_by_number.setdefault(identity, labels) == labels, f"I4: {identity} stands for other labels now"
        self.judge_answers()
        self.judge_order()
        most = self.world.settings.addresses_per_name_max
        for scope, name in {(pair.scope, pair.name) for pair in self.engine.dns_cache.lifetimes}:
            assert len(self.engine.dns_cache.addresses(scope, name)) <= most, f"I9: {name} has more than {most} addresses"
        assert len(self.engine.dns_cache.scopes_by_name) <= self.world.settings.names_max, "I9: too many names"
        self.is_sound = True

    def _follow_pairs(self) -> None:
        pairs: Pairs = frozenset(self.engine.dns_cache.lifetimes)
        if self.taught is not None:
            unsaid = {(name, address) for _, name, address in pairs - self._pairs} - self.taught
            assert not unsaid, f"I8: no reply said {unsaid}"
        pending = self.engine.reconciler.ipcache.pending
        waiting = {(key.scope, key.prefix.address) for key in pending if isinstance(key, IpcacheKey)}
        unsettled = frozenset(pair for pair in pairs | self._pairs | self.lingering if (pair[0], pair[2]) in waiting)
        gone = (self.lingering | self._pairs) - pairs
        if self.is_inheriting:
            # Rows of the process before say more than this one knows, and nothing of this one's is in force yet.
            self.lingering, self.confirmed = gone, self.confirmed & pairs
        else:
            self.lingering, self.confirmed = gone & unsettled, (self.confirmed & pairs) | (pairs - unsettled)
            self.disturbed &= {address for _, address in waiting}
        self._pairs = pairs

    def judge_answers(self) -> None:
        """I3."""
        for answer in self.world.answers[self._judged :]:
            assert isinstance(answer.asker, int)
            assert answer.asker in self.questions, f"I3: a second answer for question {answer.asker}"
            endpoint, name, _ = self.questions.pop(answer.asker)
            if answer.rcode == "NOERROR":
                self._judge_released(answer, endpoint, name)
            else:
                assert not answer.addresses, "I3: a failure answer with addresses"
            self.may_be_cut_from = len(self.world.journal)
        self._judged = len(self.world.answers)
        ended = [fact for fact in self.world.facts[self._heard :] if fact.kind == "question"]
        self._heard, self._said = len(self.world.facts), self._said + len(ended)
        self._gone += sum(fact.fields["outcome"] == "gone" for fact in ended)
        assert self._said - self._gone == self._judged, "a question is over and nothing, or more than one thing, is said of it"
        for asker, (_, _, asked_at) in self.questions.items():
            late = min(asked_at + QUESTION_S_MAX, self.replied.get(asker, self.world.now) + 1.0)
            assert self.world.now <= late, f"I3: question {asker} of {asked_at} has no answer at {self.world.now}"

    def _judge_released(self, answer: Answered, endpoint: int, name: str) -> None:
        value = next((value for number, value in self.endpoint_rows() if number == endpoint), None)
        if value is None or self.world.settings.release_on_failure:
            return
        for address in map(packed, answer.addresses_of_question):
            promised: frozenset[Triple] | None = None
            for policies in self.candidates(endpoint):
                scope = self.situation(policies, frozenset()).scope_of(self.workloads[endpoint])
                allowed = self.naive(policies, self.confirmed | {(scope, name, address)})
                promised = allowed if promised is None else promised & allowed
            for port in self.ports:
                if (endpoint, address, port) in (promised or ()) and address not in self.disturbed:
                    assert self.kernel_allows(value, address, port), f"I3: {name} {address!r}:{port} left and does not pass"

    def judge_order(self) -> None:
        """I2, and the half of I4 about flows."""
        kernel = self.world.kernel.rows
        groups = {value.group for _, value in self.endpoint_rows()}
        sets = {v.set for number, v in kernel[Table.GROUPS].items() if number in groups and isinstance(v, GroupValue)}
        named = {identity for identity in kernel[Table.IPCACHE].values() if isinstance(identity, int)}
        for identity in named | self.world.remembered:
            assert identity in self.labels_by_number, f"I4: the kernel names identity {identity}, which never was"
            assert identity not in self.engine.reconciler.policy.incomplete, f"I2: {identity} is named too early"
            for number in sets:
                policy_set = self.engine.sets.by_number.get(number)
                for key in policy_set.rows_by_identity.get(identity, ()) if policy_set is not None else ():
                    assert key in kernel[Table.POLICY], f"I2: {identity} is named or remembered without its row {key}"
        for identity in self.world.remembered:
            assert identity in self.engine.identities.labels_by_identity, f"I4: {identity} is gone, a flow remembers it"

    def judge_packets(self, write: str) -> None:
        """I5 and I6, after each single write."""
        most = self._pairs | self.lingering
        for endpoint, value in self.endpoint_rows():
            candidates = self.candidates(endpoint)
            allowed_by = [self.naive(policies, most) for policies in candidates]
            assured_by = [self.naive(policies, self.confirmed) for policies in candidates]
            for address in self.addresses:
                if address in self.disturbed:
                    continue
                for port in self.ports:
                    triple = (endpoint, address, port)
                    if self.kernel_allows(value, address, port):
                        assert any(triple in allowed for allowed in allowed_by), f"I6: {triple} is open after {write}"
                    else:
                        assert not all(triple in assured for assured in assured_by), f"I5: {triple} is shut after {write}"

    def _judge_refusal(self) -> None:
        """Only endpoints with policies of their own wait in vain, and only where there is no room for these."""
        engine = self.engine
        assert engine.groups._try_again_at is not None, "I1: an endpoint waits for nothing"
        situation = self.situation(engine.groups.policies, self._pairs)
        rules = [rule for workload in self.workloads.values() for _, rule in situation.rules(workload)]
        names = {peer for rule in rules for peer in rule.peers or () if isinstance(peer, Fqdn)}  # each has one in reserve
        identities = {*engine.identities.labels_by_identity.values(), *situation.label_sets().values(), *names}
        assert len(identities) > self.world.settings.identities_max, "I9: there is room, and an endpoint is refused"

    def judge_rest(self) -> None:
        """I1, and that nothing is left over."""
        engine, kernel = self.engine, self.world.kernel
        workloads = self.workloads
        situation = self.situation(engine.groups.policies, self._pairs)
        numbers = {key: number for key, number in kernel.rows[Table.IPCACHE].items() if isinstance(number, int)}
        realized = {key: self.labels_by_number[number] for key, number in numbers.items()}
        assert realized == situation.label_sets(), "I1: ipcache"
        judged = dict(self.endpoint_rows())
        assert judged.keys() == workloads.keys(), "I1: endpoints"
        assert len(kernel.rows[Table.ENDPOINTS]) == len(workloads), "I1: endpoints that are gone"
        for endpoint, value in judged.items():
            assert value.scope == situation.scope_of(workloads[endpoint]), "I1: scope"
            for address in self.addresses:
                for port in self.ports:
                    wanted = situation.allows(workloads[endpoint], address, PROTOCOL_TCP, port)
                    assert self.kernel_allows(value, address, port) == wanted, f"I1: {endpoint} {address!r}:{port}"
        groups = kernel.rows[Table.GROUPS]
        assert {value.group for value in judged.values()} == groups.keys(), "I1: groups"
        sets = {value.set for value in groups.values() if isinstance(value, GroupValue)}
        known = engine.identities.labels_by_identity.keys()
        for key in kernel.rows[Table.POLICY]:
            assert isinstance(key, PolicyKey)
            assert key.set in sets, f"I1: a row of a set that is gone, {key}"
            assert key.identity == 0 or key.identity in known, f"I1: a row of an identity that is gone, {key}"
        self._judge_nothing_left()

    def _judge_nothing_left(self) -> None:
        engine = self.engine
        proxy, barriers = engine.proxy, engine.reconciler.barriers
        assert not self.questions, "I3: questions without an answer"
        of_questions = (proxy.transactions, proxy._numbers_by_asker, proxy._number_by_barrier, proxy._open_by_endpoint)
        assert not any((*of_questions, proxy._bringers)), "a question is over and left something"
        assert not barriers._waiting, "somebody waits for a row that is settled"
        assert not barriers.over
        assert not engine._ending, "a lifetime's end is never looked at"
        assert not engine.sets.is_behind
        assert not engine.groups.is_behind
        assert not engine.reconciler.policy.incomplete
        assert engine.groups._plan is None
        assert engine.groups._requested is None
        assert not engine.groups._retiring
        for table in engine.reconciler.tables.values():
            assert not table.pending, f"{table.name}: still to do"
            assert not table.in_flight
            assert not table.failures
            assert not table._fresh
            assert {key: row.value for key, row in table.realized.items()} == self.world.kernel.rows[table.name]
            assert {key: row.value for key, row in table.desired.items()} == self.world.kernel.rows[table.name]
        assert not engine.reconciler.policy._missing_by_identity
        named = set(self.world.kernel.rows[Table.IPCACHE].values())
        for identity, labels in engine.identities.labels_by_identity.items():
            is_used = identity in named or identity in self.world.remembered or identity < 1 << 24
            is_ready = any(selector.identity == identity for selector in engine.names.selectors.values())
            assert is_used or is_ready, f"identity {identity} of {sorted(labels)} is kept for nobody"
        wanted = {peer for group in engine.groups.groups.values() for peer in group.compiled.peers if isinstance(peer, Fqdn)}
        assert engine.names.selectors.keys() == wanted
        for selector in engine.names.selectors.values():
            for scope, bag in selector.bags.items():
                for address in bag:
                    held = {n for s, n, a in self._pairs if s == scope and a == address}
                    assert set(bag.of(address)) == {n for n in held if takes(selector.peer.pattern, selector.peer.excepts, n)}
        names = {name for _, name, _ in self._pairs}
        assert engine.names._known_by_name.keys() == names
        assert engine.names._places.accounts.total == len(names)


# --- random histories ------------------------------------------------------------------------------------------------------

BURSTS = st.lists(st.tuples(st.sampled_from((1, 1, 2, 3)), st.sampled_from(NAMES[:3]), V4, V4), min_size=1, max_size=3)


class Histories(RuleBasedStateMachine):
    """What can happen, in any order. `known_bad` is set by the tests that want to see it fail."""

    known_bad: frozenset[KnownBad] = frozenset()

    @initialize(
        policies=st.lists(st.just(allow("*.example.")) | POLICIES, max_size=2),
        identities_max=st.sampled_from((12, 16_384)),
        addresses_max=st.sampled_from((2, 1_000)),
        names_max=st.sampled_from((2, 1_000)),
        in_slices=st.booleans(),
    )
    def start(
        self, policies: list[Policy], identities_max: int, addresses_max: int, in_slices: bool, names_max: int = 1_000
    ) -> None:
        self.in_slices = in_slices
        self.world = World(
            Settings(
                upstreams=(UPSTREAM,),
                allow_addresses=EVERY_ADDRESS,
                ttl_floor_s=5.0,
                keep_while_flow_seen_s=10.0,
                keep_past_lifetime_s=30.0,
                identities_max=identities_max,
                addresses_per_name_max=addresses_max,
                names_max=names_max,
            ),
            known_bad=self.known_bad,
            auto=False,
        )
        self.sim = Simulation(self.world)
        self.sim.taught = set()
        self._work_in_slices()
        self.endpoints_used = {1, 2}
        self.last_reply: tuple[int, str, set[Address]] | None = None
        self.world.start(*policies, endpoints={number: ENDPOINTS[number] for number in (1, 2)})
        self.sim.judge()
        self.kernel_catches_up()

    def _work_in_slices(self) -> None:
        if self.in_slices:
            self.sim.engine.sets.rows_at_once = self.sim.engine.names.pairs_at_once = 1

    # --- DNS

    @rule(endpoint=st.sampled_from(sorted(ENDPOINTS)), name=st.sampled_from(NAMES), v6=st.booleans())
    def ask(self, endpoint: int, name: str, v6: bool) -> None:
        if endpoint in self.world.engine.groups.endpoints:
            asker = self.world.ask(name, "AAAA" if v6 else "A", endpoint=endpoint, protocol=PROTOCOL_TCP)
            self.sim.questions[asker] = (endpoint, name, self.world.now)
            self.sim.judge()

    @rule(bursts=BURSTS)
    def resolve(self, bursts: list[tuple[int, str, Address, Address]]) -> None:
        """Questions answered at once, so that several replies are held at a time, also for one address."""
        for endpoint, name, *addresses in bursts:
            self.ask(endpoint, name, v6=False)
            asker = max(self.sim.questions, default=None)
            if asker is not None and asker not in self.sim.replied:
                self._reply(asker, set(addresses), ttl=8)

    @rule(bursts=BURSTS, writes=st.integers(1, 3))
    def resolve_step_by_step(self, bursts: list[tuple[int, str, Address, Address]], writes: int) -> None:
        """The same, and some of the rows they wait for are there."""
        self.kernel_catches_up()
        self.resolve(bursts)
        for _ in range(writes):
            self.sim.write()
            self.sim.acknowledge(1)

    @rule()
    def ask_again(self) -> None:
        """What the last reply said, asked and answered again."""
        if self.last_reply is not None:
            endpoint, name, addresses = self.last_reply
            self.ask(endpoint, name, v6=False)
            asker = max(self.sim.questions, default=None)
            if asker is not None and asker not in self.sim.replied:
                self._reply(asker, addresses, ttl=8)

    def _open(self, pick: int) -> int | None:
        """One of the questions that wait for the upstream, or a late one."""
        asked = [asker for asker in self.sim.questions if asker not in self.sim.replied]
        return asked[pick % len(asked)] if asked else None

    @rule(pick=st.integers(0, 5), addresses=st.sets(st.sampled_from(ADDRESSES), max_size=2), ttl=st.sampled_from((0, 8, 90)))
    def reply(self, pick: int, addresses: set[Address], ttl: int) -> None:
        asker = self._open(pick)
        if asker is not None:
            self._reply(asker, addresses, ttl)

    def _reply(self, asker: int, addresses: set[Address], ttl: int) -> None:
        number = self.world.transaction_of(asker)
        if number is None or number not in self.world.asked:
            return
        v6 = self.world.engine.proxy.transactions[number].question.qtype == 28
        texts = [Prefix.of(address) for address in sorted(addresses) if (len(address) == 16) is v6]
        self.sim.replied[asker] = self.world.now
        assert self.sim.taught is not None
        self.sim.taught |= {(self.sim.questions[asker][1], prefix.address) for prefix in texts}
        self.last_reply = (*self.sim.questions[asker][:2], addresses)
        again = self.world.asked[number]
        self.world.reply(asker, *(str(prefix).partition("/")[0] for prefix in texts), ttl=ttl)
        self.sim.judge()
        self.world.asked[number] = again  # the network may bring a reply twice

    @rule(pick=st.integers(0, 5))
    def upstream_fails(self, pick: int) -> None:
        asker = self._open(pick)
        number = self.world.transaction_of(asker) if asker is not None else None
        if number is not None:
            self.sim.handle(UpstreamFailed(number, "connection refused"))

    @rule(pick=st.integers(0, 5))
    def asker_goes(self, pick: int) -> None:
        if self.sim.questions:
            asker = sorted(self.sim.questions)[pick % len(self.sim.questions)]
            del self.sim.questions[asker]
            self.sim.handle(AskerGone(asker))

    # --- the kernel

    @rule(count=st.integers(1, 12))
    def writes(self, count: int) -> None:
        for _ in range(count):
            self.sim.write()

    @rule(error=st.sampled_from((errno.EAGAIN, errno.ENOSPC, errno.EPERM)), after=st.integers(0, 3))
    def write_fails(self, error: int, after: int) -> None:
        for _ in range(after):
            self.sim.write()
        self.sim.write(error)

    @rule(count=st.integers(1, 20))
    def acknowledgements(self, count: int) -> None:
        self.sim.acknowledge(count)

    @rule()
    def kernel_catches_up(self) -> None:
        while self.sim.write() or self.sim.unheard:
            self.sim.acknowledge(3)

    @rule(table=st.sampled_from((Table.IPCACHE, Table.POLICY)), room=st.integers(0, 2))
    def table_fills(self, table: Table, room: int) -> None:
        self.world.kernel.rows_max[table] = len(self.world.kernel.rows[table]) + room

    @rule()
    def tables_have_room(self) -> None:
        self.world.kernel.rows_max.clear()

    # --- flows and time

    @rule(pick=st.integers(0, 9))
    def flow_begins(self, pick: int) -> None:
        """A flow remembers the identity it was allowed to, as the kernel names it now."""
        rows = sorted(self.world.kernel.rows[Table.IPCACHE].items(), key=str)
        if rows:
            key, identity = rows[pick % len(rows)]
            assert isinstance(key, IpcacheKey)
            assert isinstance(identity, int)
            self.world.remembered.add(identity)
            self.world.last_seen[key.scope, key.prefix.address] = self.world.now

    @rule()
    def flows_end(self) -> None:
        self.world.remembered.clear()

    @rule()
    def flows_heard(self) -> None:
        self.sim.hear_flows()

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.1, 5.2, 12.0)))
    def time_goes_by(self, seconds: float) -> None:
        self.sim.advance(seconds)

    @rule(count=st.integers(1, 8))
    def some_slices(self, count: int) -> None:
        """Of what takes several: what comes next comes between two of them."""
        for _ in range(count):
            self.sim.handle(Tick())

    @rule(seconds=st.sampled_from((0.5, 7.0, 100.0)))
    def machine_sleeps(self, seconds: float) -> None:
        self.sim.jump(seconds)

    # --- people

    @rule(policies=st.lists(POLICIES, max_size=3))
    def policies_change(self, policies: list[Policy]) -> None:
        self.sim.handle(PoliciesChanged(tuple(policies), "t"))

    @rule(number=st.sampled_from((3, 4)), own=st.none() | st.none() | st.lists(POLICIES, max_size=2).map(tuple))
    def endpoint_comes(self, number: int, own: tuple[Policy, ...] | None = None) -> None:
        taken = self.world.engine.groups.endpoint_by_address
        if number not in self.endpoints_used and packed(ENDPOINTS[number]) not in taken:
            self.endpoints_used.add(number)
            self.sim.disturbed.add(packed(ENDPOINTS[number]))
            self.world.add_endpoint(number, ENDPOINTS[number], isolated=number in ISOLATED, own=own)
            self.sim.judge()

    @rule(number=st.sampled_from((2, 3)))
    def endpoint_goes(self, number: int) -> None:
        if number in self.world.engine.groups.endpoints:
            self.sim.remove_endpoint(number)

    @rule(addresses=st.sets(st.sampled_from(ADDRESSES[:3]), max_size=1))
    def host_addresses_change(self, addresses: set[Address]) -> None:
        self.sim.disturbed |= self.world.host ^ addresses
        self.sim.handle(HostAddresses(frozenset(addresses)))

    @rule(policies=st.none() | st.none() | st.lists(POLICIES, max_size=2).map(tuple), cut=st.integers(0, 6))
    def process_dies(self, policies: tuple[Policy, ...] | None, cut: int) -> None:
        self.sim.restart(policies, cut)
        self._work_in_slices()

    # --- the end

    @precondition(lambda self: not self.sim.world.remembered)
    @rule()
    def rest(self) -> None:
        self.sim.rest()

    def teardown(self) -> None:
        if hasattr(self, "sim") and self.sim.is_sound:
            self.sim.rest()


def histories(known_bad: Iterable[KnownBad] = ()) -> type[Histories]:
    return type("Histories", (Histories,), {"known_bad": frozenset(known_bad)})
