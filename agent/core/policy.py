"""Rules to rows: what one endpoint's policies mean, compiled.

The verdict rows of (set, identity) are a pure function of the compiled rules and the identity's label set. The datapath looks
up two rows, the identity's and the one for any identity, each by longest match, and the stronger verdict holds: deny,
redirect, allow.

A longest match must never hide a denial. The blocks a row can name (every protocol; one protocol; a block of its ports) are
nested or disjoint, so each row is given the strongest verdict of all rules whose block holds it; then the longest row that
matches a packet carries the strongest verdict of all rules that match the packet.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.core.names import EVERY_NAME, NamePattern, PatternIndex
from agent.core.rules import Cidr, Endpoints, Entity, Fqdn, Peer, Policy, Ports, Rule
from agent.core.types import (
    LABEL_HOST,
    LABEL_WORLD,
    PORT_DNS,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    Direction,
    Label,
    LabelSet,
    PolicyValue,
    Prefix,
    Verdict,
)

PORT_LAST: Final = 65_535
# What preparing a policy costs is counted in rows (`sets.ROWS_AT_ONCE`): one is about 10 us.
COST_OF_PATTERN: Final = 3
LABEL_ENDPOINT: Final = "reserved:endpoint"
PROTOCOLS_OF_DNS: Final = (PROTOCOL_UDP, PROTOCOL_TCP)
COOKIE_NONE: Final = 0
# The same questions come again and again; a policy judges each once. About 250 KB where every one is new.
VERDICTS_MAX: Final = 2_048


class Block(NamedTuple):
    """What a row can name beside set and identity; fields as in `PolicyKey`."""

    direction: Direction
    protocol: int
    port: int
    port_bits: int

    def parents(self) -> Iterator[Block]:
        """Every larger block that holds this one, the next larger first."""
        for bits in range(self.port_bits - 1, -1, -1):
            yield Block(self.direction, self.protocol, self.port >> (16 - bits) << (16 - bits), bits)
        if self.protocol:
            yield Block(self.direction, 0, 0, 0)


class DnsRule(NamedTuple):
    """A permission to ask.

    peers: servers it is about; None is every server. names: patterns, () is every name. in_fqdns: the patterns are those of
    `toFQDNs`, where a lone star takes fewer names than in `rules.dns`.
    """

    peers: tuple[Peer, ...] | None
    ports: tuple[Ports, ...]
    names: tuple[str, ...]
    excepts: tuple[str, ...]
    in_fqdns: bool
    cookie: int


class DnsVerdict(NamedTuple):
    """ask_server: the server that was asked is asked itself, else the agent's upstreams. cookie: of the rule that allows;
    pattern: of its patterns the one that takes the name, None where a rule writes it out.
    """

    allowed: bool
    ask_server: bool
    cookie: int
    pattern: str | None


@dataclass(frozen=True)
class CompiledPolicy:
    """All policies of one endpoint. Equal ones make one group."""

    values_by_peer: Mapping[Peer | None, tuple[tuple[Block, PolicyValue], ...]]  # None: any identity
    dns: tuple[DnsRule, ...]
    default_deny_egress: bool
    default_deny_ingress: bool
    audit: bool
    rows_min: int = field(compare=False)  # of a set: each name and network is an identity with rows of its own
    peers: tuple[Peer, ...] = field(compare=False)
    fqdns: tuple[Fqdn, ...] = field(compare=False)
    fqdn_labels: frozenset[Label] = field(compare=False)
    prefixes: frozenset[Prefix] = field(compare=False)
    _questions: _Questions = field(compare=False)
    _cookies: frozenset[int] = field(compare=False)
    _verdicts: dict[tuple[str, LabelSet, int, int], DnsVerdict] = field(compare=False, default_factory=dict)

    def __hash__(self) -> int:
        """Equal policies are found without comparing all of them; few that differ are of the same rules."""
        return hash(self._cookies)

    @property
    def asks_named_servers(self) -> bool:
        """Does it let servers of its own teach? Then what is learned is for its endpoints only (DECISIONS 5)."""
        return any(_names_server(peer) for rule in self.dns for peer in rule.peers or ())

    def may_ask(self, name: str, labels: LabelSet, port: int, protocol: int) -> DnsVerdict:
        """Judge a question for `name` to a server with these labels."""
        question = name, labels, port, protocol
        verdict = self._verdicts.get(question)
        if verdict is None:
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts.clear()
            verdict = self._verdicts[question] = self._judge(*question)
        return verdict

    def _judge(self, name: str, labels: LabelSet, port: int, protocol: int) -> DnsVerdict:
        asked: DnsVerdict | None = None
        for place in self._questions.rules_for(name):
            rule = self.dns[place]
            if not any(p.protocol == protocol and p.first <= port <= p.last for p in rule.ports):
                continue
            peer = _selecting(rule.peers, labels)
            if peer is None or any(NamePattern(text).matches(name) for text in rule.excepts):
                continue
            if not _names_server(peer):
                return DnsVerdict(True, False, rule.cookie, self._questions.pattern_of(place, rule, name))
            asked = asked or DnsVerdict(True, True, rule.cookie, self._questions.pattern_of(place, rule, name))
        return asked or DnsVerdict(False, False, COOKIE_NONE, None)

    def has_names_below(self, name: str) -> bool:
        """Is the name an ancestor of a name that may be asked? Then it exists (NODATA), whatever the truth (RFC 8020)."""
        return self._questions.is_ancestor(name)


class _Questions:
    """Which DNS rules take a name, found without looking at the others."""

    def __init__(self) -> None:
        self._every: list[int] = []
        self._fqdns: PatternIndex[int] = PatternIndex()
        self._names: PatternIndex[int] = PatternIndex()

    def add(self, place: int, rule: DnsRule) -> Iterator[int]:
        """place: of the rule among all. Gives back what each step cost."""
        if not rule.names:
            self._every.append(place)
        for pattern in rule.names:
            (self._fqdns if rule.in_fqdns else self._names).add(pattern, place)
            yield COST_OF_PATTERN

    def rules_for(self, name: str) -> list[int]:
        return sorted((*self._every, *self._fqdns.matching(name), *self._names.matching_question(name)))

    def pattern_of(self, place: int, rule: DnsRule, name: str) -> str | None:
        """By which one this rule takes the name; None where any rule writes it out."""
        if self._fqdns.writes_out(name) or self._names.writes_out(name):
            return None
        if len(rule.names) <= 1:
            return rule.names[0] if rule.names else EVERY_NAME
        return (self._fqdns if rule.in_fqdns else self._names).pattern_of(place, name)

    def is_ancestor(self, name: str) -> bool:
        return bool(self._every) or self._fqdns.is_ancestor(name) or self._names.is_ancestor(name)


def _names_server(peer: Peer) -> bool:
    return isinstance(peer, Cidr | Endpoints)


def _selecting(peers: tuple[Peer, ...] | None, labels: LabelSet) -> Peer | None:
    """The peer that selects the server; of several one that leaves the answer to the agent's upstreams."""
    if peers is None:
        return Entity.ALL
    selecting = [peer for peer in peers if peer_selects(peer, labels)]
    return min(selecting, key=_names_server, default=None)


# --- compiling -------------------------------------------------------------------------------------------------------


class Cookies:
    """Numbers for rules, so that a row can name the line that decided. Never given twice."""

    def __init__(self) -> None:
        self.rule_by_cookie: dict[int, Rule] = {}
        self.next_number = 1
        self._cookie_by_rule: dict[Rule, int] = {}

    def of(self, rule: Rule) -> int:
        cookie = self._cookie_by_rule.get(rule)
        if cookie is None:
            cookie = self._cookie_by_rule[rule] = self.next_number
            self.next_number += 1
            self.rule_by_cookie[cookie] = rule
        return cookie


def compile_policies(
    policies: Sequence[Policy], cookies: Cookies, endpoint_labels: Iterable[Mapping[str, str]], *, audit: bool
) -> Generator[int, None, CompiledPolicy]:
    """Compile the policies that select one endpoint, step by step: each is given back with its cost, see `COST_OF_PATTERN`.

    endpoint_labels: of every endpoint of this agent; a DNS rule whose `toEndpoints` selects none of them means the agent's
    upstreams.
    """
    everybody = list(endpoint_labels)
    used: set[int] = set()
    values: dict[Peer | None, dict[Block, PolicyValue]] = {}

    def put(peer: Peer | None, block: Block, value: PolicyValue) -> None:
        of_peer = values.setdefault(peer, {})
        of_peer[block] = stronger(of_peer.get(block), value)

    dns: list[DnsRule] = []
    is_dns_ruled = False
    for policy in policies:
        for rule in policy.rules:
            is_dns_ruled |= speaks_of_dns(rule)
            yield 1
    for policy in policies:
        for written in policy.rules:
            rule, cookie = _of_policy(written, policy), cookies.of(written)
            used.add(cookie)
            for peer in (None,) if rule.peers is None else rule.peers:
                for block, verdict in _blocks(rule, peer):
                    put(None if peer is Entity.ALL else peer, block, PolicyValue(verdict, cookie))
                    yield 1
            for permission in _dns_rules(rule, policy, cookie, everybody):
                dns.append(permission)
                yield 1
        for permission in () if is_dns_ruled else _implied_dns(policy, cookies):
            dns.append(permission)
            yield 1
    closes = any(policy.default_deny_egress for policy in policies)
    if closes or any(rule.direction is Direction.EGRESS for policy in policies for rule in policy.rules):
        for protocol in PROTOCOLS_OF_DNS:
            put(None, Block(Direction.EGRESS, protocol, PORT_DNS, 16), PolicyValue(Verdict.REDIRECT, COOKIE_NONE))
        if not closes:
            dns.append(DnsRule(None, _PORTS_OF_DNS, (), (), False, COOKIE_NONE))
    for permission in dns:
        for ports in permission.ports if permission.peers is None else ():
            for port, bits in port_blocks(ports.first, ports.last):
                block = Block(Direction.EGRESS, ports.protocol, port, bits)
                put(None, block, PolicyValue(Verdict.REDIRECT, permission.cookie))
        yield 1
    questions = _Questions()
    for place, permission in enumerate(dns):
        yield from questions.add(place, permission)
    values_by_peer: dict[Peer | None, tuple[tuple[Block, PolicyValue], ...]] = {}
    rows_sure: set[tuple[Fqdn | Prefix | None, Block]] = set()
    for peer, of_peer in values.items():
        values_by_peer[peer] = tuple(sorted(of_peer.items()))
        if peer is None or isinstance(peer, Fqdn):
            rows_sure.update((peer, block) for block in of_peer)
        elif isinstance(peer, Cidr) and cidr_holds(peer, peer.prefix):
            rows_sure.update((peer.prefix, block) for block in of_peer)
        yield 1
    peers = dict.fromkeys(peer for peer in values if peer is not None)
    peers.update((peer, None) for permission in dns for peer in permission.peers or ())
    label_by_fqdn: dict[Fqdn, Label] = {}
    for peer in peers:
        if isinstance(peer, Fqdn):
            label_by_fqdn[peer] = peer.label
            yield 1
    return CompiledPolicy(
        values_by_peer=values_by_peer,
        dns=tuple(dns),
        default_deny_egress=closes,
        default_deny_ingress=any(policy.default_deny_ingress for policy in policies),
        audit=audit,
        rows_min=len(rows_sure),
        peers=tuple(peers),
        fqdns=tuple(label_by_fqdn),
        fqdn_labels=frozenset(label_by_fqdn.values()),
        prefixes=frozenset(p for peer in peers if isinstance(peer, Cidr) for p in (peer.prefix, *peer.excepts)),
        _questions=questions,
        _cookies=frozenset(used),
    )


_PORTS_OF_DNS: Final = tuple(Ports(protocol, PORT_DNS, PORT_DNS) for protocol in PROTOCOLS_OF_DNS)


def _of_policy(rule: Rule, policy: Policy) -> Rule:
    """Its selectors take no name the policy excepts, and hold guarded addresses only where the policy allows them."""
    if rule.peers is None or not (policy.except_names or policy.allow_addresses):
        return rule
    own = (policy.except_names, policy.allow_addresses)
    peers = tuple(Fqdn(p.pattern, *own) if isinstance(p, Fqdn) else p for p in rule.peers)
    return Rule(rule.direction, peers, rule.ports, rule.deny, rule.names, rule.origin)


def _is_every_port(rule: Rule) -> bool:
    return rule.ports is None or any(p.first == 0 and p.last == PORT_LAST for p in rule.ports)


def _named_dns_ports(rule: Rule) -> tuple[Ports, ...]:
    """Port 53 as far as the rule's ports name it."""
    return tuple(
        Ports(protocol, PORT_DNS, PORT_DNS)
        for protocol in PROTOCOLS_OF_DNS
        if any(p.protocol == protocol and p.first <= PORT_DNS <= p.last and not _is_every_port(rule) for p in rule.ports or ())
    )


def speaks_of_dns(rule: Rule) -> bool:
    if rule.direction is not Direction.EGRESS or rule.deny:
        return False
    return rule.names is not None or bool(_named_dns_ports(rule))


def _blocks(rule: Rule, peer: Peer | None) -> Iterator[tuple[Block, Verdict]]:
    """The blocks this rule names for this peer."""
    if peer is Entity.NONE:
        return
    if rule.names is not None:
        for ports in rule.ports or ():
            if ports.protocol in PROTOCOLS_OF_DNS:
                for port, bits in port_blocks(ports.first, ports.last):
                    yield Block(rule.direction, ports.protocol, port, bits), Verdict.REDIRECT
        return
    verdict = Verdict.DENY if rule.deny else Verdict.ALLOW
    if rule.ports is None:
        yield Block(rule.direction, 0, 0, 0), verdict
    for ports in rule.ports or ():
        for port, bits in port_blocks(ports.first, ports.last):
            yield Block(rule.direction, ports.protocol, port, bits), verdict
    if rule.direction is Direction.EGRESS and not rule.deny:
        for ports in _plain_dns_ports(rule, peer):
            yield Block(rule.direction, ports.protocol, PORT_DNS, 16), Verdict.REDIRECT


def _plain_dns_ports(rule: Rule, peer: Peer | None) -> tuple[Ports, ...]:
    """DECISIONS 4 (b): port 53 as far as a rule without `rules.dns` opens it for this peer."""
    named = _named_dns_ports(rule)
    if named or not _is_every_port(rule) or isinstance(peer, Fqdn):
        return named
    protocols = {p.protocol for p in rule.ports} if rule.ports is not None else set(PROTOCOLS_OF_DNS)
    return tuple(ports for ports in _PORTS_OF_DNS if ports.protocol in protocols)


def _dns_rules(rule: Rule, policy: Policy, cookie: int, everybody: Sequence[Mapping[str, str]]) -> Iterator[DnsRule]:
    if rule.direction is not Direction.EGRESS or rule.deny:
        return
    if rule.names is not None:
        ports = tuple(p for p in rule.ports or () if p.protocol in PROTOCOLS_OF_DNS)
        peers = rule.peers
        if peers is not None and any(
            isinstance(peer, Endpoints) and not any(peer.selector.matches(labels) for labels in everybody) for peer in peers
        ):
            peers = None
        yield DnsRule(peers, ports, rule.names, policy.except_names, False, cookie)
        return
    for peer in (None,) if rule.peers is None else rule.peers:
        ports = _plain_dns_ports(rule, peer)
        if ports and peer is not Entity.NONE:
            yield DnsRule(None if peer is None else (peer,), ports, (), policy.except_names, False, cookie)


def _implied_dns(policy: Policy, cookies: Cookies) -> Iterator[DnsRule]:
    """DECISIONS 4 (c): who may reach a name may ask for it."""
    for rule in policy.rules:
        names = tuple(peer.pattern for peer in rule.peers or () if isinstance(peer, Fqdn))
        if names and rule.direction is Direction.EGRESS and not rule.deny:
            yield DnsRule(None, _PORTS_OF_DNS, names, policy.except_names, True, cookies.of(rule))


def port_blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The fewest aligned blocks (port, bits) that make up first..last."""
    if first == 0 and last == PORT_LAST:
        yield 0, 0
        return
    while first <= last:
        size = first & -first or 1 << 16
        while first + size - 1 > last:
            size >>= 1
        yield first, 17 - size.bit_length()
        first += size


# --- rows ------------------------------------------------------------------------------------------------------------


def peer_selects(peer: Peer, labels: LabelSet) -> bool:
    """Does this peer select an identity with this label set?"""
    if isinstance(peer, Fqdn):
        return peer.label in labels
    if isinstance(peer, Cidr):
        return any(cidr_holds(peer, Prefix.parse(label[len("cidr:") :])) for label in labels if label.startswith("cidr:"))
    if isinstance(peer, Endpoints):
        return LABEL_ENDPOINT in labels and peer.selector.matches(_endpoint_labels(labels))
    if peer is Entity.WORLD:
        return LABEL_WORLD in labels
    if peer is Entity.HOST:
        return LABEL_HOST in labels
    return peer is Entity.ALL


def cidr_holds(peer: Cidr, prefix: Prefix) -> bool:
    """Does the peer select what is labelled by this named prefix?"""
    return peer.prefix.contains(prefix) and not any(hole.contains(prefix) for hole in peer.excepts)


def endpoint_label_set(labels: Mapping[str, str]) -> LabelSet:
    """An endpoint's labels as labels of its addresses."""
    return frozenset({LABEL_ENDPOINT, *(f"endpoint:{key}={value}" for key, value in labels.items())})


def _endpoint_labels(labels: LabelSet) -> dict[str, str]:
    pairs = (label.removeprefix("endpoint:").partition("=") for label in labels if label.startswith("endpoint:"))
    return {key: value for key, _, value in pairs}


def resolve(values: Iterable[tuple[Block, PolicyValue]]) -> dict[Block, PolicyValue]:
    """Rows such that the longest one that matches a packet carries the strongest verdict of all that match it."""
    own: dict[Block, PolicyValue] = {}
    for block, value in values:
        own[block] = stronger(own.get(block), value)
    rows: dict[Block, PolicyValue] = {}
    for block, value in own.items():
        for parent in block.parents():
            larger = own.get(parent)
            if larger is not None and larger.verdict > value.verdict:
                value = larger
        rows[block] = value
    return rows


def stronger(one: PolicyValue | None, other: PolicyValue) -> PolicyValue:
    """The stronger verdict; of equal ones the rule that stands first, but a rule of a file before none."""
    if one is None or (other.verdict, other.cookie != COOKIE_NONE, -other.cookie) > (
        one.verdict,
        one.cookie != COOKIE_NONE,
        -one.cookie,
    ):
        return other
    return one
