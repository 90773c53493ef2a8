"""A world for the engine: a kernel made of dictionaries, an upstream that says what it is told to, clients that look.

The fake kernel performs writes when the test lets it, and can refuse them. The judge of packets here is independent of the
core's own tables: it reads the fake kernel's rows alone, as the datapath would.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

from agent.core.engine import SOURCES, Engine
from agent.core.events import (
    AskUpstream,
    Attach,
    Detach,
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
    RowsWritten,
    Save,
    SendReply,
    Settled,
    SourceReported,
    Tick,
    WriteRows,
)
from agent.core.known_bad import KnownBad
from agent.core.records import Record
from agent.core.rules import Cidr, Entity, Expression, Fqdn, LabelSelector, Operator, Origin, Policy, Ports, Rule
from agent.core.settings import Settings, Upstream
from agent.core.types import (
    IDENTITY_ANY,
    IDENTITY_WORLD,
    PORT_DNS,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    SCOPE_STATIC,
    Address,
    Direction,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Value,
    Verdict,
    Write,
    packed,
)

UPSTREAM = Upstream(packed("203.0.113.53"))
# Most stories are not about the address guard, and theirs have private addresses too.
EVERY_ADDRESS = (Prefix.parse("0.0.0.0/0"), Prefix.parse("::/0"))


class FakeKernel:
    """Tables as dictionaries. fail(...) makes writes fail; rows_max bounds a table."""

    def __init__(self) -> None:
        self.rows: dict[Table, dict[Key, Value]] = {table: {} for table in Table}
        self.rows_max: dict[Table, int] = {}
        self.failing: list[tuple[Table, int, int]] = []  # table, how many more, errno
        self.writes = 0

    def fail(self, table: Table, times: int, error: int = errno.EAGAIN) -> None:
        self.failing.append((table, times, error))

    def apply(self, write: Write) -> int:
        self.writes += 1
        for place, (table, times, error) in enumerate(self.failing):
            if table is write.table:
                if times > 1:
                    self.failing[place] = (table, times - 1, error)
                else:
                    del self.failing[place]
                return error
        rows = self.rows[write.table]
        if write.value is None:
            rows.pop(write.key, None)
            return 0
        if write.key not in rows and len(rows) >= self.rows_max.get(write.table, 1 << 30):
            return errno.ENOSPC
        rows[write.key] = write.value
        return 0

    # --- the judge -----------------------------------------------------------------------------------------------------

    def identity_of(self, scope: int, address: Address) -> int:
        """The datapath's look-up: the endpoint's scope, then the static one, then world; longest prefix in each."""
        for in_scope in (scope, SCOPE_STATIC):
            for length in range(len(address) * 8, -1, -1):
                found = self.rows[Table.IPCACHE].get(IpcacheKey(in_scope, Prefix.masked(address, length)))
                if isinstance(found, int):
                    return found
        return IDENTITY_WORLD

    def verdict_of(
        self, policy_set: int, identity: int, protocol: int, port: int, direction: Direction = Direction.EGRESS
    ) -> Verdict | None:
        """Deny of either row, then redirect, then allow; None where no row says anything."""
        verdicts = []
        for of in (identity, IDENTITY_ANY):
            for bits in range(16, -1, -1):
                key = PolicyKey(policy_set, of, direction, protocol, port >> (16 - bits) << (16 - bits), bits)
                row = self.rows[Table.POLICY].get(key)
                if isinstance(row, PolicyValue):
                    verdicts.append(row.verdict)
                    break
            else:
                row = self.rows[Table.POLICY].get(PolicyKey(policy_set, of, direction, 0, 0, 0))
                if isinstance(row, PolicyValue):
                    verdicts.append(row.verdict)
        return max(verdicts, default=None)

    def verdict_for(
        self, ifindex: int, address: Address, protocol: int, port: int, direction: Direction = Direction.EGRESS
    ) -> Verdict | None:
        """What the rows say about a packet of this endpoint; None where the default of the direction holds."""
        endpoint = self.rows[Table.ENDPOINTS][ifindex]
        assert isinstance(endpoint, EndpointValue)
        group = self.rows[Table.GROUPS][endpoint.group]
        assert isinstance(group, GroupValue)
        return self.verdict_of(group.set, self.identity_of(endpoint.scope, address), protocol, port, direction)

    def allows(self, ifindex: int, address: Address, protocol: int, port: int) -> bool:
        """Would the datapath let the first packet of a new flow of this endpoint pass?"""
        endpoint = self.rows[Table.ENDPOINTS].get(ifindex)
        group = self.rows[Table.GROUPS].get(endpoint.group) if isinstance(endpoint, EndpointValue) else None
        if not isinstance(group, GroupValue):
            return False
        verdict = self.verdict_for(ifindex, address, protocol, port)
        return verdict is Verdict.ALLOW or (verdict is None and not group.default_deny_egress)


@dataclass(slots=True)
class Answered:
    """What a client got."""

    asker: object
    message: dns.message.Message
    at: float

    @property
    def rcode(self) -> str:
        return dns.rcode.to_text(self.message.rcode())

    @property
    def addresses(self) -> list[str]:
        return [record.to_text() for rrset in self.message.answer for record in rrset if rrset.rdtype in (1, 28)]

    @property
    def addresses_of_question(self) -> list[str]:
        """Those on the chain of aliases that begins at the question."""
        owners = {self.message.question[0].name}
        for _ in self.message.answer:
            owners |= {rrset[0].target for rrset in self.message.answer if rrset.rdtype == 5 and rrset.name in owners}
        addresses = (rrset for rrset in self.message.answer if rrset.rdtype in (1, 28) and rrset.name in owners)
        return [record.to_text() for rrset in addresses for record in rrset]


@dataclass(slots=True)
class World:
    """An engine and all that is around it.

    auto: writes are performed, and flows looked at, as soon as they are asked for; else when the test says so.
    """

    settings: Settings = field(default_factory=lambda: Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS))
    known_bad: frozenset[KnownBad] = frozenset()
    auto: bool = True
    now: float = 1_000.0
    kernel: FakeKernel = field(default_factory=FakeKernel)
    waiting_writes: deque[tuple[Write, ...]] = field(default_factory=deque)
    waiting_looks: deque[Event] = field(default_factory=deque)  # what the flow table said, not heard yet
    asked: dict[int, AskUpstream] = field(default_factory=dict)
    answers: list[Answered] = field(default_factory=list)
    settled: dict[object, str | None] = field(default_factory=dict)
    attached: dict[int, int] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    last_seen: dict[tuple[int, Address], float] = field(default_factory=dict)
    remembered: set[int] = field(default_factory=set)
    journal: list[Record] = field(default_factory=list)
    host: frozenset[Address] = frozenset()
    engine: Engine = field(init=False)
    _askers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.engine = Engine(self.settings, self.now, self.known_bad)
        self.engine.proxy.is_watched = True

    # --- what happens ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        if isinstance(event, HostAddresses):
            self.host = event.addresses
        self.engine.handle(event, self.now)
        self.perform()

    def perform(self) -> None:
        """Do what the engine asks for, in its order, until it asks for nothing more."""
        while effects := self.engine.effects():
            for effect in effects:
                match effect:
                    case WriteRows():
                        self.waiting_writes.append(effect.writes)
                        if self.auto:
                            self.write_all()
                    case SendReply():
                        self.answers.append(Answered(effect.asker, dns.message.from_wire(effect.message), self.now))
                    case AskUpstream():
                        self.asked[effect.transaction] = effect
                    case ReadLastSeen():
                        seen = self.last_seen.get((effect.scope, effect.address))
                        self._looked(LastSeen(effect.scope, effect.address, seen))
                    case PassOverFlows():
                        self._looked(FlowsSeen(effect.pass_number, frozenset(self.remembered)))
                    case Settled():
                        self.settled[effect.ticket] = effect.error
                    case Attach():
                        self.attached[effect.endpoint] = effect.ifindex
                    case Detach():
                        self.attached.pop(effect.endpoint, None)
                    case Fact():
                        self.facts.append(effect)
                    case Save():
                        self.journal += effect.records
                    case _:
                        self.asked.pop(effect.transaction, None)

    def _looked(self, event: Event) -> None:
        if self.auto:
            self.engine.handle(event, self.now)
        else:
            self.waiting_looks.append(event)

    def take_write(self) -> Write | None:
        """The oldest write that waits; whoever takes it performs it and reports it."""
        if not self.waiting_writes:
            return None
        first, *rest = self.waiting_writes.popleft()
        if rest:
            self.waiting_writes.appendleft(tuple(rest))
        return first

    def write_one(self) -> None:
        """The kernel performs the oldest write that waits, and says so."""
        write = self.take_write()
        if write is not None:
            self.handle(RowsWritten(((write, self.kernel.apply(write)),)))

    def write_all(self) -> None:
        while self.waiting_writes:
            writes = self.waiting_writes.popleft()
            results = tuple((write, self.kernel.apply(write)) for write in writes)
            self.engine.handle(RowsWritten(results), self.now)

    def quiesce(self) -> None:
        """Everything that can be written is written."""
        while self.waiting_writes:
            self.write_all()
            self.perform()

    def advance(self, seconds: float) -> None:
        """Time goes by; whatever is due on the way happens at its time."""
        end = self.now + seconds
        for _ in range(10_000):
            deadline = self.engine.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            self.handle(Tick())
        self.now = end
        self.handle(Tick())

    # --- people ------------------------------------------------------------------------------------------------------------

    def start(self, *policies: Policy, endpoints: Mapping[int, str] | None = None) -> None:
        """Endpoints by number and address (endpoint 1 at 192.0.2.11 if not said), policies, then every source has spoken."""
        for number, address in (endpoints or {1: "192.0.2.11"}).items():
            self.add_endpoint(number, address)
        self.handle(PoliciesChanged(policies, "start"))
        for source in sorted(SOURCES):
            self.handle(SourceReported(source))
        if self.auto:
            self.advance(0.0)  # where it takes several slices

    def restart(self, *policies: Policy, kept: int | None = None) -> None:
        """The process dies where it stands and another one starts from the journal and the kernel's rows.

        policies: as `start`, or those of before if none are given. kept: records of the journal that were written.
        """
        for event in self.die(policies or None, kept):
            self.handle(event)

    def die(self, policies: tuple[Policy, ...] | None = None, kept: int | None = None) -> list[Event]:
        """The process is gone and a new one stands there; gives back the events it begins with."""
        endpoints = [endpoint.added for endpoint in self.engine.groups.endpoints.values()]
        before = self.engine.groups.policies
        self.waiting_writes.clear()
        self.waiting_looks.clear()
        self.asked.clear()
        if kept is not None:
            del self.journal[kept:]
        self.engine = Engine(self.settings, self.now, self.known_bad)
        self.engine.proxy.is_watched = True
        rows = {table: dict(rows) for table, rows in self.kernel.rows.items()}
        return [
            Restored(tuple(self.journal), rows),
            HostAddresses(self.host),
            *endpoints,
            PoliciesChanged(before if policies is None else policies, "start"),
            *[SourceReported(source) for source in sorted(SOURCES)],
        ]

    def add_endpoint(
        self,
        number: int,
        address: str,
        *,
        audit: bool = False,
        isolated: bool = False,
        own: tuple[Policy, ...] | None = None,
    ) -> None:
        labels, addresses = {"app": f"e{number}"}, (packed(address),)
        self.handle(
            EndpointAdded(
                number, f"veth{number}", 100 + number, labels, addresses, audit=audit, isolated=isolated, policies=own
            )
        )

    def remove_endpoint(self, number: int) -> None:
        self.handle(EndpointRemoved(number))

    def apply(self, *policies: Policy, ticket: object = None) -> None:
        self.handle(PoliciesChanged(policies, ticket))

    def ask(
        self,
        name: str,
        qtype: str = "A",
        *,
        endpoint: int = 1,
        edns: bool = True,
        server: str = "203.0.113.1",
        protocol: int = PROTOCOL_UDP,
    ) -> int:
        """A question of the endpoint; gives back the asker, by which its answer is found."""
        asker = next(self._askers)
        message = dns.message.make_query(name, qtype, use_edns=0 if edns else -1, id=asker & 0xFFFF)
        client = self.engine.groups.endpoints[endpoint].added.addresses[0]
        self.handle(Query(asker, client, packed(server), 53, protocol, message.to_wire()))
        return asker

    def transaction_of(self, asker: int) -> int | None:
        for number, transaction in self.engine.proxy.transactions.items():
            if transaction.query.asker == asker:
                return number
        return None

    def reply(self, asker: int, *addresses: str, ttl: int = 60, rcode: str = "NOERROR") -> None:
        """The upstream answers the question of this asker."""
        number = self.transaction_of(asker)
        if number is None or number not in self.asked:
            return
        query = dns.message.from_wire(self.asked[number].message)
        response = dns.message.make_response(query)
        response.set_rcode(dns.rcode.from_text(rcode))
        question = query.question[0]
        for address in addresses:  # a set of its own for each: dnspython writes the records of one set in random order
            kind = "AAAA" if ":" in address else "A"
            response.answer.append(dns.rrset.from_text(question.name, ttl, "IN", kind, address))
        self.handle(Reply(number, response.to_wire()))

    def resolve(self, name: str, *addresses: str, endpoint: int = 1, ttl: int = 60) -> Answered:
        """Ask and be answered."""
        asker = self.ask(name, endpoint=endpoint)
        self.reply(asker, *addresses, ttl=ttl)
        return self.answer_of(asker)

    def answers_of(self, asker: int) -> list[Answered]:
        return [answer for answer in self.answers if answer.asker == asker]

    def answer_of(self, asker: int) -> Answered:
        (answer,) = self.answers_of(asker)
        return answer

    def passes(self, address: str, port: int = 443, *, endpoint: int = 1, protocol: int = PROTOCOL_TCP) -> bool:
        ifindex = self.engine.groups.endpoints[endpoint].added.ifindex
        return self.kernel.allows(ifindex, packed(address), protocol, port)


def allow(*targets: str, port: int | None = 443, deny: Iterable[str] = (), app: str | None = None, name: str = "p") -> Policy:
    """A policy like the shorthand: names, patterns and networks, TCP and one port; `deny` are networks."""
    rules = []
    for line, target in enumerate(targets, 1):
        peer = Cidr(Prefix.parse(target)) if target[0].isdigit() and "/" in target else Fqdn(target)
        ports = None if port is None else (Ports(PROTOCOL_TCP, port, port),)
        rules.append(Rule(Direction.EGRESS, (peer,), ports, origin=Origin(name, line)))
    for line, target in enumerate(deny, 100):
        rules.append(Rule(Direction.EGRESS, (Cidr(Prefix.parse(target)),), None, deny=True, origin=Origin(name, line)))
    if not rules:
        rules.append(Rule(Direction.EGRESS, (Entity.NONE,), None, origin=Origin(name, 1)))
    return Policy(name, subject(app), tuple(rules), default_deny_egress=True, default_deny_ingress=False)


def subject(app: str | None) -> LabelSelector:
    if app is None:
        return LabelSelector()
    return LabelSelector((Expression("app", Operator.IN, frozenset({app})),))


def any_question() -> Policy:
    """Every name may be asked, of any server; it opens nothing."""
    ports = (Ports(PROTOCOL_UDP, PORT_DNS, PORT_DNS), Ports(PROTOCOL_TCP, PORT_DNS, PORT_DNS))
    rule = Rule(Direction.EGRESS, None, ports, names=(), origin=Origin("questions", 1))
    return Policy("questions", LabelSelector(), (rule,), default_deny_egress=True, default_deny_ingress=False)
