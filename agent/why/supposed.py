"""What would be, were these policies in force: an engine of its own, and a kernel of dictionaries that says yes to every write.

It is told of one endpoint, whose packet is asked about, of those whose labels the policies may select, and of the names that
are known for one address: all that the verdict of that packet can depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, replace

from agent.control import ControlError
from agent.core.dns_cache import Pair
from agent.core.engine import SOURCES, Engine
from agent.core.events import (
    EndpointAdded,
    Event,
    HostAddresses,
    PoliciesChanged,
    RowsWritten,
    Settled,
    SourceReported,
    Tick,
    WriteRows,
)
from agent.core.identity import NoRoom
from agent.core.names import NamePattern
from agent.core.policy import PROTOCOLS_OF_DNS, speaks_of_dns
from agent.core.rules import Cidr, Endpoints, Fqdn, Peer, Policy, Rule
from agent.core.settings import Settings
from agent.core.types import PORT_DNS, SCOPE_SHARED, Address, Direction, Key, Prefix, Table, Value
from agent.why.asked import Asked
from agent.why.rows import Grounds, KeptRows

_LEARNED_FOR_S = 60
_RULES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Situation:
    """policies: those that judge the endpoint. others: endpoints besides, see `others_that_matter`. pairs: what is known of
    names. asked: a name that is asked once the policies are in force, and the address it is answered with. about: the packet,
    or else the name, that is asked about; None: everything.
    """

    settings: Settings
    added: EndpointAdded
    others: tuple[EndpointAdded, ...]
    host: frozenset[Address]
    policies: tuple[Policy, ...]
    pairs: frozenset[Pair]
    now: float
    about: Asked | str | None = None
    asked: tuple[str, Address] | None = None


class _World:
    def __init__(self, situation: Situation) -> None:
        self.engine = Engine(situation.settings, situation.now)
        self.rows: dict[Table, dict[Key, Value]] = {table: {} for table in Table}
        self.settled: dict[object, str | None] = {}
        self._now = situation.now

    def handle(self, event: Event) -> None:
        self.engine.handle(event, self._now)
        while effects := self.engine.effects():
            for effect in effects:
                if isinstance(effect, Settled):
                    self.settled[effect.ticket] = effect.error
                elif isinstance(effect, WriteRows):
                    for write in effect.writes:
                        if write.value is None:
                            self.rows[write.table].pop(write.key, None)
                        else:
                            self.rows[write.table][write.key] = write.value
                    self.engine.handle(RowsWritten(tuple((write, 0) for write in effect.writes)), self._now)

    def find(self, table: Table, key: Key) -> Value | None:
        return self.rows[table].get(key)


def suppose(situation: Situation) -> Generator[None, None, Grounds]:
    """A slice of a millisecond or so at a time. Raises ControlError where the policies cannot be in force."""
    world = _World(situation)
    engine, added = world.engine, situation.added
    world.handle(HostAddresses(situation.host))
    policies = yield from _narrowed(situation)
    world.handle(replace(added, policies=policies))
    for other in situation.others:
        world.handle(replace(other, policies=()))
        yield
    world.handle(PoliciesChanged((), "supposed"))
    for source in sorted(SOURCES):
        world.handle(SourceReported(source))
    while "supposed" not in world.settled:
        yield
        world.handle(Tick())
    error = world.settled["supposed"]
    if error is not None:
        raise ControlError(f"these policies cannot be in force: {error}", 1)
    scope = engine.groups.endpoints[added.endpoint].scope
    # What was learned for everybody is there in a scope of the endpoint's own too, the other way round it is not.
    known = [(name, address) for of, name, address in sorted(situation.pairs) if of in (scope, SCOPE_SHARED)]
    for name, address in (*known, *([situation.asked] if situation.asked is not None else [])):
        try:
            engine.names.learn(name, [(address, _LEARNED_FOR_S)], scope, situation.now)
        except NoRoom as problem:
            raise ControlError(f"under these policies there is no room for {name}: {problem}", 1) from None
        world.handle(Tick())
        yield
    while engine.sets.is_behind:
        world.handle(Tick())
        yield
    return Grounds(engine, KeptRows(world.find))


def _narrowed(situation: Situation) -> Generator[None, None, tuple[Policy, ...]]:
    """Without the names and networks that say nothing of what is asked about: ten thousand rules take seconds to compile.

    Whole are the rules that speak of DNS, and all where the packet is a question, for each name is a rule about port 53.
    A network that is open at every port is a server too, by which the endpoint learns in a scope of its own: one is kept.
    """
    about = situation.about
    if about is None or (not isinstance(about, str) and about.is_question):
        return situation.policies
    names = {pair.name for pair in situation.pairs} | ({about} if isinstance(about, str) else set())
    names |= {situation.asked[0]} if situation.asked is not None else set()
    remote = None if isinstance(about, str) else Prefix.of(about.remote)
    narrowed: list[Policy] = []
    has_server = False
    for policy in situation.policies:
        rules: list[Rule] = []
        for place, rule in enumerate(policy.rules):
            if rule.peers and not speaks_of_dns(rule):
                peers = tuple(peer for peer in rule.peers if _may_select(peer, names, remote))
                servers = tuple(peer for peer in rule.peers if isinstance(peer, Cidr)) if _opens_dns(rule) else ()
                if servers and not has_server:
                    peers, has_server = tuple(dict.fromkeys((*peers, servers[0]))), True
                # Port 53 is intercepted where there is any rule of egress; one that is for nobody will do.
                if not peers and any(each.direction is rule.direction for each in rules):
                    continue
                rule = replace(rule, peers=peers)
            rules.append(rule)
            if place % _RULES_AT_ONCE == _RULES_AT_ONCE - 1:
                yield
        narrowed.append(replace(policy, rules=tuple(rules)))
        yield
    return tuple(narrowed)


def _opens_dns(rule: Rule) -> bool:
    """At every port, and so at 53; what names the port speaks of DNS (`speaks_of_dns`)."""
    if rule.direction is not Direction.EGRESS or rule.deny:
        return False
    return rule.ports is None or any(
        each.protocol in PROTOCOLS_OF_DNS and each.first <= PORT_DNS <= each.last for each in rule.ports
    )


def _may_select(peer: Peer, names: Collection[str], remote: Prefix | None) -> bool:
    if isinstance(peer, Fqdn):
        is_pattern = "*" in peer.pattern
        return any(NamePattern(peer.pattern).matches(name) for name in names) if is_pattern else peer.pattern in names
    return not isinstance(peer, Cidr) or (remote is not None and peer.prefix.contains(remote))


def others_that_matter(
    endpoints: Iterable[EndpointAdded], added: EndpointAdded, policies: Iterable[Policy], remote: Address | None
) -> tuple[EndpointAdded, ...]:
    """All, where a rule selects by their labels; else whose address is asked about."""
    peers = (peer for policy in policies for rule in policy.rules for peer in rule.peers or ())
    is_everybody = any(isinstance(peer, Endpoints) for peer in peers)
    others = (other for other in endpoints if other.endpoint != added.endpoint)
    return tuple(other for other in others if is_everybody or remote in other.addresses)
