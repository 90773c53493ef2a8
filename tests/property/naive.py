"""What the kernel should hold, recomputed from nothing by the words of the design: slow, short, no line of the core in it.

Everything clever is compared with this (I1), and the states before and after a change are defined by it (I5, I6).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import ip_address, ip_network

from agent.core.rules import Cidr, Endpoints, Entity, Fqdn, Peer, Policy, Rule
from agent.core.types import Address, Direction, IpcacheKey, LabelSet, Prefix, Verdict

SCOPE_STATIC, SCOPE_SHARED, SCOPE_OWN_FIRST = 0, 1, 2
TCP, UDP = 6, 17


@dataclass(frozen=True)
class Workload:
    number: int
    labels: tuple[tuple[str, str], ...]
    addresses: tuple[Address, ...]
    isolated: bool = False
    own: tuple[Policy, ...] | None = None  # policies that alone judge it


def guards_nothing(address: Address, allowed: tuple[Prefix, ...]) -> bool:
    return False


@dataclass(frozen=True)
class Situation:
    """All that a verdict may depend on. pairs: (scope, name, address) of every lifetime that has not ended.

    guards: is this address kept from names, where these prefixes are let through?
    """

    policies: tuple[Policy, ...]
    endpoints: tuple[Workload, ...]
    pairs: frozenset[tuple[int, str, Address]]
    host: frozenset[Address] = frozenset()
    guards: Callable[[Address, tuple[Prefix, ...]], bool] = guards_nothing

    @cached_property
    def names_by_place(self) -> dict[tuple[int, Address], list[str]]:
        """Which names hold an address in a scope."""
        names: dict[tuple[int, Address], list[str]] = defaultdict(list)
        for scope, name, address in sorted(self.pairs):
            names[scope, address].append(name)
        return names

    def rules(self, endpoint: Workload) -> Iterator[tuple[Policy, Rule]]:
        yield from ((policy, rule) for policy in self.policies_of(endpoint) for rule in policy.rules)

    def policies_of(self, endpoint: Workload) -> list[Policy]:
        if endpoint.own is not None:
            return list(endpoint.own)
        return [policy for policy in self.policies if policy.selects(dict(endpoint.labels))]

    def scope_of(self, endpoint: Workload) -> int:
        """A DNS permission for servers named by network or label makes what is learned the endpoint's own."""
        own = endpoint.isolated or any(
            _is_about_dns(rule, peer) and isinstance(peer, Cidr | Endpoints) and not self._means_upstreams(rule)
            for _, rule in self.rules(endpoint)
            for peer in rule.peers or ()
        )
        return SCOPE_OWN_FIRST + endpoint.number if own else SCOPE_SHARED

    def _means_upstreams(self, rule: Rule) -> bool:
        """`rules.dns` for endpoints of which there is none here."""
        return rule.names is not None and any(
            isinstance(peer, Endpoints) and not any(peer.selector.matches(dict(e.labels)) for e in self.endpoints)
            for peer in rule.peers or ()
        )

    def selects(self, policy: Policy, peer: Peer, scope: int, address: Address) -> bool:
        owners = [endpoint for endpoint in self.endpoints if address in endpoint.addresses]
        if isinstance(peer, Fqdn):
            names = self.names_by_place.get((scope, address), ())
            return any(takes(peer.pattern, policy.except_names, name) for name in names) and not self.guards(
                address, policy.allow_addresses
            )
        if isinstance(peer, Cidr):
            return is_inside(address, peer.prefix) and not any(is_inside(address, hole) for hole in peer.excepts)
        if isinstance(peer, Endpoints):
            return any(peer.selector.matches(dict(owner.labels)) for owner in owners)
        if peer is Entity.WORLD:
            return not owners and address not in self.host
        return peer is Entity.ALL or (peer is Entity.HOST and address in self.host)

    def verdict(
        self, endpoint: Workload, address: Address, protocol: int, port: int, direction: Direction = Direction.EGRESS
    ) -> Verdict | None:
        """Deny, redirect, allow, in this order, of all rules that hold the packet; port 53 is always intercepted."""
        verdicts = []
        scope = self.scope_of(endpoint)
        is_dns = direction is Direction.EGRESS and protocol in (TCP, UDP) and port == 53
        if is_dns and self.closes(endpoint, direction):
            verdicts.append(Verdict.REDIRECT)
        for policy, rule in self.rules(endpoint):
            if rule.direction is not direction:
                continue
            if is_dns:
                verdicts.append(Verdict.REDIRECT)
            if rule.ports is not None and not any(p.protocol == protocol and p.first <= port <= p.last for p in rule.ports):
                continue
            if rule.names is not None and (rule.ports is None or protocol not in (TCP, UDP)):
                continue
            anybody = rule.peers is None or self._means_upstreams(rule)
            if anybody or any(self.selects(policy, peer, scope, address) for peer in rule.peers or ()):
                meant = Verdict.DENY if rule.deny else Verdict.ALLOW
                verdicts.append(Verdict.REDIRECT if rule.names is not None else meant)
        return max(verdicts, default=None)

    def closes(self, endpoint: Workload, direction: Direction = Direction.EGRESS) -> bool:
        selecting = self.policies_of(endpoint)
        egress = direction is Direction.EGRESS
        return any(policy.default_deny_egress if egress else policy.default_deny_ingress for policy in selecting)

    def allows(self, endpoint: Workload, address: Address, protocol: int, port: int) -> bool:
        verdict = self.verdict(endpoint, address, protocol, port)
        return verdict is Verdict.ALLOW or (verdict is None and not self.closes(endpoint))

    def label_sets(self) -> dict[IpcacheKey, LabelSet]:
        """Every ipcache row there should be."""
        peers = {
            (policy, peer)
            for endpoint in self.endpoints
            for policy, rule in self.rules(endpoint)
            for peer in rule.peers or ()
            if peer is not Entity.NONE
        }
        named = {p for _, peer in peers if isinstance(peer, Cidr) for p in (peer.prefix, *peer.excepts)}
        fqdns = {(p.pattern, of.except_names, of.allow_addresses) for of, p in peers if isinstance(p, Fqdn)}
        rows: dict[IpcacheKey, LabelSet] = {}
        for prefix in named:
            if prefix.length < 8 * len(prefix.address):
                rows[IpcacheKey(SCOPE_STATIC, prefix)] = frozenset({f"cidr:{prefix}", "reserved:world"})
        single = {p.address for p in named if p.length == 8 * len(p.address)} | self.host
        for address in single.union(*(endpoint.addresses for endpoint in self.endpoints)):
            rows[IpcacheKey(SCOPE_STATIC, Prefix.of(address))] = self._static_labels(named, address)
        for scope, address in list(self.names_by_place):
            names = self.names_by_place[scope, address]
            labels = frozenset(
                "fqdn:" + ",!".join((pattern, *excepts)) + "".join(f",+{prefix}" for prefix in allowed)
                for pattern, excepts, allowed in fqdns
                if any(takes(pattern, excepts, name) for name in names) and not self.guards(address, allowed)
            )
            if labels:
                rows[IpcacheKey(scope, Prefix.of(address))] = labels | self._static_labels(named, address)
        return rows

    def _static_labels(self, named: set[Prefix], address: Address) -> LabelSet:
        what = {"reserved:host"} if address in self.host else set()
        for endpoint in self.endpoints:
            if address in endpoint.addresses:
                what |= {"reserved:endpoint", *(f"endpoint:{key}={value}" for key, value in endpoint.labels)}
        holding = [prefix for prefix in named if is_inside(address, prefix)]
        closest = {f"cidr:{max(holding, key=lambda prefix: prefix.length)}"} if holding else set()
        return frozenset((what or {"reserved:world"}) | closest)


def _is_about_dns(rule: Rule, peer: Peer) -> bool:
    """A rule with `rules.dns`, or one that opens port 53 (an all-ports rule too, but for a name)."""
    if rule.direction is not Direction.EGRESS or rule.deny:
        return False
    if rule.names is not None:
        return True
    if rule.ports is None:
        return not isinstance(peer, Fqdn)
    every_port = any(p.first == 0 and p.last == 65_535 for p in rule.ports)
    return not (every_port and isinstance(peer, Fqdn)) and any(
        p.protocol in (TCP, UDP) and p.first <= 53 <= p.last for p in rule.ports
    )


@lru_cache(maxsize=10_000)
def is_inside(address: Address, prefix: Prefix) -> bool:
    network = ip_network((prefix.address, prefix.length))
    return network.version == ip_address(address).version and ip_address(address) in network


def takes(pattern: str, excepts: tuple[str, ...], name: str) -> bool:
    return matches(pattern, name) and not any(matches(hole, name) for hole in excepts)


@lru_cache(maxsize=100_000)
def matches(pattern: str, name: str) -> bool:
    """Cilium's grammar as a regular expression: fine for names a test chose."""
    label = "[-a-z0-9_]"
    if pattern == "*":
        return name == "." or re.fullmatch(rf"({label}+\.)+", name) is not None
    deep, rest = pattern.startswith("**."), pattern.removeprefix("**.")
    body = f"{label}*".join(re.escape(piece) for piece in rest.split("*"))
    return re.fullmatch((rf"({label}+\.)+" if deep else "") + body, name) is not None
