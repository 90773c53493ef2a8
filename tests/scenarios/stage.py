"""Scenarios played: their steps become events of a simulated world, which judges I1 to I7 at every single write.

A story says what a user would see; whatever it does not say is judged all the same. Packets and flows are judged by the
datapath's model on the fake kernel's rows.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import dns.edns
import dns.message
import dns.rcode
import dns.rrset
from dns.exception import DNSException

from agent.core.engine import SOURCES
from agent.core.events import (
    AskerGone,
    EndpointAdded,
    EndpointRemoved,
    Event,
    HostAddresses,
    PoliciesChanged,
    Query,
    Reply,
    SourceReported,
    Tick,
    UpstreamFailed,
)
from agent.core.rules import Policy
from agent.core.settings import Settings, Upstream
from agent.core.types import (
    IDENTITY_LOCAL_FIRST,
    PROTOCOL_ICMP,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    SCOPE_OWN_FIRST,
    SCOPE_SHARED,
    SCOPE_STATIC,
    Address,
    Direction,
    IpcacheKey,
    Key,
    Prefix,
    Table,
    Write,
    packed,
    text_of,
)
from agent.datapath.abi import FlowState, Reason
from agent.datapath.model import Model
from agent.dns.wire import Rcode
from agent.policy.files import read_policy_text
from tests.packets import ACK, SYN, echo, frame, tcp, udp
from tests.scenarios.script import Scenario, ScenarioError, Step, seconds
from tests.sim.simulation import Simulation
from tests.sim.world import Answered, FakeKernel, World, subject

ASKED = "203.0.113.1"
UPSTREAM = Upstream(packed("203.0.113.53"))
# A failed write is tried again after 20 ms.
RETRIED_BY_S = 0.021
PROTOCOLS = {"tcp": PROTOCOL_TCP, "udp": PROTOCOL_UDP, "icmp": PROTOCOL_ICMP}

SETTINGS: dict[str, Callable[[list[str]], dict[str, object]]] = {
    "ttl-floor": lambda words: {"ttl_floor_s": seconds(words[0])},
    "keep-past-lifetime": lambda words: {"keep_past_lifetime_s": seconds(words[0])},
    "identities": lambda words: {"identities_max": int(words[0])},
    "names": lambda words: {"names_max": int(words[0])},
    "addresses-per-name": lambda words: {"addresses_per_name_max": int(words[0])},
    "open-questions-per-endpoint": lambda words: {"open_questions_per_endpoint_max": int(words[0])},
    "held-replies": lambda words: {"held_replies_max": int(words[0])},
    "policy-rows-per-set": lambda words: {"policy_rows_per_set_max": int(words[0])},
    "release-on-failure": lambda words: {"release_on_failure": words[0] == "yes"},
    "follow-cnames": lambda words: {"follow_cnames": words[0] == "yes"},
    "denied": lambda words: {"denied_rcode": Rcode[words[0]]},
    "allow-addresses": lambda words: {"allow_addresses": tuple(map(Prefix.parse, words))},
}


class CountingKernel(FakeKernel):
    """Refuses its n-th write, once."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.refused = refused
        self.owed: set[tuple[Table, Key]] = set()  # refused, and to be performed whenever it is asked for again

    def apply(self, write: Write) -> int:
        if self.writes + 1 == self.refused:
            self.writes += 1
            self.owed.add((write.table, write.key))
            return errno.EAGAIN
        self.owed.discard((write.table, write.key))
        return super().apply(write)


class FlowName(NamedTuple):
    endpoint: int
    address: str
    what: str


@dataclass(slots=True)
class Question:
    """A question of the story. asker: as the engine knows it now; shadow: the same, asked twice by an expander."""

    endpoint: int
    name: str
    qtype: str
    protocol: int
    asker: int
    shadow: int | None = None
    response: Callable[[dns.message.Message], None] | None = None  # what the upstream has said


@dataclass(slots=True)
class Stage:
    """One run of a scenario.

    is_doubled: whatever may happen twice does. refused: the kernel refuses this write, once. dies_after: the process is
    replaced after this step.
    """

    scenario: Scenario
    is_doubled: bool = False
    dies_after: int | None = None
    kernel: CountingKernel = field(default_factory=CountingKernel)
    world: World = field(init=False)
    sim: Simulation = field(init=False)
    is_slow: bool = False
    policies: dict[str, tuple[Policy, ...]] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    flows: Model = field(default_factory=Model)
    _next_asker: int = 1
    _judged: int = 0
    _writes: int = 0
    _opened: set[FlowName] = field(default_factory=set)
    _dies_within: int | None = None

    # --- the whole run -------------------------------------------------------------------------------------------------

    def play(self, setup: Iterable[Step], steps: Iterable[Step]) -> None:
        silent: set[str] = set()
        step = None
        try:
            self._prepare(setup, silent)
            for number, step in enumerate(steps):
                dies_within, self._dies_within = self._dies_within, None
                was_slow, self.is_slow = self.is_slow, self.is_slow or dies_within is not None
                self._do(step)
                if dies_within is not None:
                    self.is_slow = was_slow
                    self._write(dies_within)
                    self._restart()
                self._settle()
                if number == self.dies_after:
                    self._restart()
                    self._settle()
            step = None
            self._end()
        except (AssertionError, ValueError, KeyError, DNSException) as problem:
            line, said = (step.line, str(step)) if step is not None else (0, "at the start or the end")
            raise ScenarioError(self.scenario.file, line, f"{said}: {str(problem) or type(problem).__name__}") from problem

    def _prepare(self, setup: Iterable[Step], silent: set[str]) -> None:
        setup = list(setup)
        values: dict[str, object] = {"upstreams": (UPSTREAM,)}
        for step in setup:
            if step.verb == "setting":
                if step.words[0] not in SETTINGS:
                    raise ScenarioError(self.scenario.file, step.line, f"there is no setting {step.words[0]!r}")
                values |= SETTINGS[step.words[0]](list(step.words[1:]))
            elif step.verb == "upstream":
                values["upstreams"] = tuple(Upstream(packed(word)) for word in step.words)
            elif step.verb == "silent":
                silent.add(step.words[0])
        self.world = World(Settings(**values), auto=False, kernel=self.kernel)  # type: ignore[arg-type]
        addresses, ports = _what_is_spoken_of(self.scenario)
        self.sim = Simulation(self.world, addresses, ports)
        for step in setup:
            if step.verb in {"endpoint", "host"}:
                self._do(step)
            elif step.verb == "policy":
                self._read_policy(step)
        self._handle(PoliciesChanged(self._in_order(), "start"))
        for source in sorted(SOURCES - silent):
            self._handle(SourceReported(source))
        self._settle()
        self._writes = self.kernel.writes

    def _end(self) -> None:
        """What was promised holds without faults too (I1), and nothing is left over."""
        doubled = [question for question in self.questions if question.shadow is not None]
        self.kernel.failing.clear()
        self.flows.flows.clear()
        self._remember()
        self.sim.rest()
        for question in doubled:
            assert question.shadow is not None
            ones = [(answer.rcode, sorted(answer.addresses)) for answer in self.world.answers_of(question.asker)]
            others = [(answer.rcode, sorted(answer.addresses)) for answer in self.world.answers_of(question.shadow)]
            assert ones == others, f"{question.name} asked twice is answered {ones} and {others}"

    def _do(self, step: Step) -> None:
        STEPS[step.verb](self, step)

    # --- the kernel ------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self.sim.handle(event)
        self._drain()

    def _drain(self) -> None:
        """A quick kernel does all that is asked for at once."""
        while not self.is_slow and (self.sim.write() or self.sim.unheard):
            self.sim.acknowledge(1)
        self.sim.hear_flows()
        while not self.is_slow and (self.sim.write() or self.sim.unheard):
            self.sim.acknowledge(1)

    def _write(self, count: int) -> None:
        while count and self.sim.write():
            self.sim.acknowledge(1)
            self.sim.hear_flows()
            count -= 1

    def _settle(self) -> None:
        """What an expander had refused is tried again and done."""
        if not self.kernel.owed:
            return
        self._pass(RETRIED_BY_S)
        waiting = [write for writes in self.world.waiting_writes for write in writes]
        owed = [write for write in waiting if (write.table, write.key) in self.kernel.owed]
        if owed:
            self.world.waiting_writes.clear()
            self.world.waiting_writes.extend((write,) for write in (*owed, *(w for w in waiting if w not in owed)))
            self._write(len(owed))
        self._drain()

    def _pass(self, time_s: float) -> None:
        end = self.world.now + time_s
        for _ in range(10_000):
            deadline = self.world.engine.next_deadline()
            if deadline is None or deadline > end:
                break
            self.world.now = max(self.world.now, deadline)
            self._handle(Tick())
        self.world.now = max(self.world.now, end)
        self._handle(Tick())

    def _restart(self) -> None:
        """Another process takes over; clients ask again what nobody answered, and get the same reply again."""
        asked = [question for question in self.questions if question.asker in self.sim.questions]
        for event in self.sim.die(self._in_order()):
            self._handle(event)
        for question in asked:
            question.shadow = None
            self._ask(question)
            if question.response is not None:
                self._deliver(question.asker, question.response)
        self._writes = self.kernel.writes

    # --- people ------------------------------------------------------------------------------------------------------------

    def _endpoint(self, step: Step) -> None:
        number = _number(step.words[0])
        options = step.words[1:]
        addresses = [word for word in options if word[0].isdigit()] or [f"192.0.2.{10 + number}"]
        labels = {"app": step.words[0]} | dict(word.split("=", 1) for word in options if "=" in word)
        event = EndpointAdded(
            number,
            f"veth{number}",
            100 + number,
            labels,
            tuple(map(packed, addresses)),
            audit="audit" in options,
            isolated="isolated" in options,
        )
        self.sim.disturbed.update(event.addresses)
        self._handle(event)

    def _gone(self, step: Step) -> None:
        number = _number(step.words[0])
        self.sim.questions = {asker: q for asker, q in self.sim.questions.items() if q[0] != number}
        self.sim.disturbed.update(self.world.engine.groups.endpoints[number].added.addresses)
        self._twice(EndpointRemoved(number))

    def _host(self, step: Step) -> None:
        addresses = frozenset(map(packed, step.words))
        self.sim.disturbed |= self.world.host ^ addresses
        self._twice(HostAddresses(addresses))

    def _reports(self, step: Step) -> None:
        self._twice(SourceReported(step.words[0]))

    def _twice(self, event: Event) -> None:
        self._handle(event)
        if self.is_doubled:
            self._handle(event)

    def _policy(self, step: Step) -> None:
        self._read_policy(step)
        ticket = f"policy of line {step.line}"
        before = dict(self.policies)
        self._handle(PoliciesChanged(self._in_order(), ticket))
        if self.is_doubled:
            self._handle(PoliciesChanged(self._in_order(), f"{ticket} again"))
        if step.outcome == "refused":
            assert self.world.settled.get(ticket), "the policy was not refused"
            self.policies = before
        elif step.outcome == "waiting":
            assert ticket not in self.world.settled
        elif step.outcome or not self.is_slow:
            self._settle()
            assert self.world.settled[ticket] is None, f"refused: {self.world.settled[ticket]}"

    def _read_policy(self, step: Step) -> None:
        name, *rest = step.words
        if rest == ["gone"]:
            del self.policies[name]
            return
        indent = min((len(text) - len(text.lstrip()) for _, text in step.below), default=0)
        text = "\n" * (step.below[0][0] - 1 if step.below else 0) + "\n".join(text[indent:] for _, text in step.below)
        reading = read_policy_text(self.scenario.file, text.encode())
        if reading.mistakes:
            raise ScenarioError(self.scenario.file, reading.mistakes[0].line, reading.mistakes[0].message)
        policies = reading.policies
        if rest[:1] == ["of"]:
            policies = tuple(
                Policy(
                    name,
                    subject(rest[1]),
                    policy.rules,
                    policy.default_deny_egress,
                    policy.default_deny_ingress,
                    except_names=policy.except_names,
                    allow_addresses=policy.allow_addresses,
                )
                for policy in policies
            )
        self.policies[name] = policies

    def _in_order(self) -> tuple[Policy, ...]:
        return tuple(policy for name in sorted(self.policies) for policy in self.policies[name])

    # --- DNS -----------------------------------------------------------------------------------------------------------------

    def _query(self, step: Step) -> None:
        number, name = _number(step.words[0]), step.words[1].rstrip(".") + "."
        protocol = PROTOCOL_TCP if step.words[3:] == ("tcp",) else PROTOCOL_UDP
        question = Question(number, name, step.words[2], protocol, 0)
        self.questions.append(question)
        self._ask(question)
        if self.is_doubled:
            first = question.asker
            self._ask(question)
            question.asker, question.shadow = first, question.asker
        if step.outcome:
            found = self._state_of(question.asker)
            assert found == step.outcome or found.startswith(step.outcome + " "), f"it is {found}"
            self._judged = len(self.world.answers) if found != "held" and not found.startswith("upstream") else self._judged

    def _ask(self, question: Question) -> None:
        asker, self._next_asker = self._next_asker, self._next_asker + 1
        question.asker = asker
        message = dns.message.make_query(question.name, question.qtype, use_edns=0, id=asker)
        client = self.world.engine.groups.endpoints[question.endpoint].added.addresses[0]
        self.sim.questions[asker] = (question.endpoint, question.name, self.world.now)
        self._handle(Query(asker, client, packed(ASKED), 53, question.protocol, message.to_wire()))

    def _state_of(self, asker: int) -> str:
        answers = self.world.answers_of(asker)
        if answers:
            return _kind_of(answers[0])
        transaction = self.world.transaction_of(asker)
        if transaction in self.world.asked and asker not in self.sim.replied:
            effect = self.world.asked[transaction]
            return f"upstream {text_of(effect.server)}"
        return "held"

    def _waiting_for_reply(self, name: str) -> Question:
        name = name.rstrip(".") + "."
        for question in self.questions:
            if question.name == name and question.asker in self.sim.questions and question.asker not in self.sim.replied:
                return question
        raise AssertionError(f"no question for {name} waits for its reply")

    def _reply(self, step: Step) -> None:
        name, *words = step.words
        if "again" in words:
            question = [question for question in self.questions if question.name == name.rstrip(".") + "."][-1]
            assert question.response is not None
            self._deliver(question.asker, question.response)
            return
        question = self._waiting_for_reply(name)
        options = dict(word.split("=", 1) for word in words if "=" in word)
        addresses = [word for word in words if "=" not in word]
        below = [text.split() for _, text in step.below]

        def respond(response: dns.message.Message) -> None:
            response.set_rcode(dns.rcode.from_text(options.get("rcode", "NOERROR")))
            for address in addresses:
                kind = "AAAA" if ":" in address else "A"
                owner = response.question[0].name
                response.answer.append(dns.rrset.from_text(owner, int(options.get("ttl", "60")), "IN", kind, address))
            for owner_text, ttl, _, kind, *data in below:
                response.answer.append(dns.rrset.from_text(owner_text, int(ttl), "IN", kind, " ".join(data)))

        question.response = respond
        for asker in (question.asker, question.shadow):
            if asker is not None:
                self._deliver(asker, respond)
                if self.is_doubled:
                    self._deliver(asker, respond)

    def _deliver(self, asker: int, respond: Callable[[dns.message.Message], None]) -> None:
        number = self.world.transaction_of(asker)
        if number is None or number not in self.world.asked:
            return
        response = dns.message.make_response(dns.message.from_wire(self.world.asked[number].message))
        respond(response)
        upstream = self.world.asked[number].server
        self.sim.replied[asker] = self.world.now
        self._handle(Reply(number, response.to_wire()))
        if number in self.world.asked and self.world.asked[number].server != upstream:
            del self.sim.replied[asker]  # the next upstream was asked instead

    def _upstream_fails(self, step: Step) -> None:
        question = self._waiting_for_reply(step.words[0])
        for asker in (question.asker, question.shadow):
            number = self.world.transaction_of(asker) if asker is not None else None
            if number is not None:
                self._handle(UpstreamFailed(number, "connection refused"))

    def _asker_gone(self, step: Step) -> None:
        question = next(
            q for q in self.questions if q.name == step.words[0].rstrip(".") + "." and q.asker in self.sim.questions
        )
        for asker in (question.asker, question.shadow):
            if asker is not None:
                self.sim.questions.pop(asker, None)
                self._twice(AskerGone(asker))

    def _expect(self, step: Step) -> None:
        askers = {question.asker for question in self.questions}
        new = [answer for answer in self.world.answers[self._judged :] if answer.asker in askers]
        found: dict[str, int] = {}
        for answer in new:
            kind = _kind_of(answer)
            found[kind] = found.get(kind, 0) + 1
        wanted: dict[str, int] = {}
        addresses: list[str] = []
        words = list(step.words)
        while words:
            word = words.pop(0)
            if word in {"released", "servfail", "denied", "nodata", "refused", "nxdomain"}:
                wanted[word] = int(words.pop(0)) if words and words[0].isdigit() else 1
            elif word == "held":
                held = [asker for asker in askers if asker in self.sim.questions and self._state_of(asker) == "held"]
                count = int(words.pop(0)) if words and words[0].isdigit() else None
                assert held if count is None else len(held) == count, f"{len(held)} are held"
            elif word != "nothing":
                addresses.append(text_of(packed(word)))
        assert found == wanted, f"the answers are {found or 'none'}"
        given = sorted(address for answer in new for address in answer.addresses)
        assert not addresses or given == sorted(addresses), f"the addresses are {given}"
        self._judged = len(self.world.answers)

    # --- packets -------------------------------------------------------------------------------------------------------------

    def _frame(self, endpoint: int, address: str, what: str, *, from_peer: bool = False, flags: int = SYN) -> bytes:
        protocol, _, port = what.partition("/")
        own = self.world.engine.groups.endpoints[endpoint].added.addresses
        local = next((text_of(one) for one in own if (":" in address) == (len(one) == 16)), "2001:db8::ffff")
        source, destination = (address, local) if from_peer else (local, address)
        if protocol == "icmp":
            payload = echo(int(port), 7)
        elif protocol == "udp":
            payload = udp(40_000, int(port))
        else:
            payload = tcp(40_000, int(port), flags)
        return frame(source, destination, PROTOCOLS[protocol], payload)

    def _judge(self, endpoint: int, data: bytes, direction: Direction, *, remembers: bool) -> Reason | str:
        rows = self.kernel.rows
        flows = self.flows.flows if remembers else {}
        model = Model(
            rows[Table.ENDPOINTS],  # type: ignore[arg-type]
            rows[Table.GROUPS],  # type: ignore[arg-type]
            rows[Table.POLICY],  # type: ignore[arg-type]
            rows[Table.IPCACHE],  # type: ignore[arg-type]
            set(rows[Table.OWN_ADDRESSES]),  # type: ignore[arg-type]
            flows,
        )
        judgement = model.judge(100 + endpoint, direction, data, int(self.world.now * 1e9))
        if judgement.reason is Reason.PASS_REDIRECT:
            return "dns"
        return "allow" if judgement.passes else f"drop ({judgement.reason.name})"

    def _packet(self, step: Step) -> None:
        endpoint, address, what = _number(step.words[0]), step.words[1], step.words[2]
        from_peer = step.words[3:] == ("from",)
        direction = Direction.INGRESS if from_peer else Direction.EGRESS
        found = self._judge(endpoint, self._frame(endpoint, address, what, from_peer=from_peer), direction, remembers=False)
        assert str(found).split()[0] == step.outcome, f"it is {found}"

    def _flow(self, step: Step) -> None:
        name = FlowName(_number(step.words[0]), step.words[1], step.words[2])
        flags = ACK if name in self._opened else SYN
        found = self._judge(name.endpoint, self._frame(*name, flags=flags), Direction.EGRESS, remembers=True)
        wanted = {"": "allow", "goes-on": "allow", "ends": "drop"}[step.outcome]
        assert str(found).split()[0] == wanted, f"it is {found}"
        self._opened.add(name)
        if wanted == "allow":
            value = dict(self.sim.endpoint_rows())[name.endpoint]
            self.world.last_seen[value.scope, packed(name.address)] = self.world.now
        self._remember()

    def _close(self, step: Step) -> None:
        name = FlowName(_number(step.words[0]), step.words[1], step.words[2])
        self._opened.remove(name)
        closed = (name.endpoint, packed(name.address))
        self.flows.flows = {key: flow for key, flow in self.flows.flows.items() if (key.endpoint, key.remote) != closed}
        self._remember()

    def _remember(self) -> None:
        live = {flow.identity for flow in self.flows.flows.values() if flow.state is FlowState.LIVE}
        self.world.remembered = {identity for identity in live if identity >= IDENTITY_LOCAL_FIRST}

    # --- the rest ----------------------------------------------------------------------------------------------------------

    def _kernel(self, step: Step) -> None:
        self.is_slow = {"slow": True, "quick": False}[step.words[0]]
        self._drain()

    def _write_step(self, step: Step) -> None:
        self._write(1_000_000 if step.words[0] == "all" else int(step.words[0]))

    def _fail_writes(self, step: Step) -> None:
        table, error, times = step.words
        self.kernel.fail(Table(table), int(times), getattr(errno, error))

    def _full(self, step: Step) -> None:
        table = Table(step.words[0])
        room = int(step.words[1].removeprefix("room=")) if len(step.words) > 1 else 0
        self.kernel.rows_max[table] = len(self.kernel.rows[table]) + room

    def _room(self, _: Step) -> None:
        self.kernel.rows_max.clear()

    def _advance(self, step: Step) -> None:
        self._pass(seconds(step.words[0]))

    def _sleep(self, step: Step) -> None:
        self.sim.jump(seconds(step.words[0]))
        self._drain()

    def _restart_step(self, step: Step) -> None:
        if step.words:
            self._read_policy(Step(step.line, "policy", step.words, "", step.below))
        self._restart()

    def _kill_after_write(self, step: Step) -> None:
        self._dies_within = int(step.words[0])

    def _attached(self, step: Step) -> None:
        found = sorted(f"e{number}" for number in self.world.attached)
        assert found == sorted(step.words), f"attached are {found}"

    def _identities(self, step: Step) -> None:
        count = sum(number >= IDENTITY_LOCAL_FIRST for number in self.world.engine.identities.labels_by_identity)
        assert count == int(step.words[0]), f"there are {count}"

    def _writes_step(self, step: Step) -> None:
        made, self._writes = self.kernel.writes - self._writes, self.kernel.writes
        assert made == int(step.words[0]), f"{made} were made"

    def _counter(self, step: Step) -> None:
        found = self.world.engine.proxy.counters.get(step.words[0].replace("-", " "), 0)
        assert found == int(step.words[1]), f"it is {found}"

    def _table(self, step: Step) -> None:
        wanted = sorted(" ".join(text.split()) for _, text in step.below)
        rows = self._names() if step.words[0] == "names" else self._ipcache(step.words[1] if len(step.words) > 1 else None)
        assert sorted(rows) == wanted, "the rows are\n  " + "\n  ".join(sorted(rows))

    def _names(self) -> list[str]:
        return [f"{pair.name} {text_of(pair.address)}" for pair in self.world.engine.dns_cache.lifetimes]

    def _ipcache(self, scope: str | None) -> list[str]:
        rows = []
        for key, identity in self.kernel.rows[Table.IPCACHE].items():
            assert isinstance(key, IpcacheKey)
            assert isinstance(identity, int)
            of = {SCOPE_STATIC: "static", SCOPE_SHARED: "shared"}.get(key.scope, f"e{key.scope - SCOPE_OWN_FIRST}")
            prefix = text_of(key.prefix.address) if key.prefix.is_address else str(key.prefix)
            labels = " ".join(sorted(self.sim.labels_by_number[identity]))
            if scope in {None, of}:
                rows.append(" ".join(([of] if scope is None else []) + [prefix, labels]))
        return rows


def _number(name: str) -> int:
    if not name.startswith("e") or not name[1:].isdigit():
        raise ValueError(f"{name!r} is no endpoint; they are e1, e2 …")
    return int(name[1:])


def _kind_of(answer: Answered) -> str:
    codes = {int(option.code) for option in answer.message.options if isinstance(option, dns.edns.EDEOption)}
    if answer.rcode == "NOERROR":
        return "nodata" if 15 in codes and not answer.message.answer else "released"
    if answer.rcode == "NXDOMAIN" and 15 in codes:
        return "denied"
    return answer.rcode.lower()


def _what_is_spoken_of(scenario: Scenario) -> tuple[tuple[Address, ...], tuple[int, ...]]:
    """Addresses and TCP ports that the story names: these are judged at every write."""
    addresses: set[Address] = set()
    ports = {443}
    for step in (*scenario.setup, *scenario.steps):
        words = [*step.words, *(word for _, text in step.below for word in text.split())]
        for word in words:
            if word.startswith("tcp/"):
                ports.add(int(word.removeprefix("tcp/")))
            try:
                addresses.add(packed(word))
            except ValueError:
                continue
    ports.discard(53)
    return tuple(sorted(addresses))[:12], tuple(sorted(ports))


STEPS: dict[str, Callable[[Stage, Step], None]] = {
    "endpoint": Stage._endpoint,
    "policy": Stage._policy,
    "host": Stage._host,
    "reports": Stage._reports,
    "query": Stage._query,
    "reply": Stage._reply,
    "upstream-fails": Stage._upstream_fails,
    "asker-gone": Stage._asker_gone,
    "expect": Stage._expect,
    "packet": Stage._packet,
    "flow": Stage._flow,
    "close": Stage._close,
    "kernel": Stage._kernel,
    "write": Stage._write_step,
    "fail-writes": Stage._fail_writes,
    "full": Stage._full,
    "room": Stage._room,
    "advance": Stage._advance,
    "sleep": Stage._sleep,
    "table": Stage._table,
    "identities": Stage._identities,
    "writes": Stage._writes_step,
    "counter": Stage._counter,
    "attached": Stage._attached,
    "gone": Stage._gone,
    "restart": Stage._restart_step,
    "kill-after-write": Stage._kill_after_write,
}
