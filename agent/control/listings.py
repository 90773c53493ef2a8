"""What the nouns show: the engine's state as lists of flat dictionaries. Reads, never changes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from agent.core.barrier import row_text
from agent.core.engine import Engine
from agent.core.groups import Endpoint
from agent.core.history import Seen
from agent.core.rules import Cidr, Entity, Fqdn, Peer
from agent.core.types import (
    IDENTITY_ANY,
    PROTOCOL_NAMES,
    SCOPE_OWN_FIRST,
    SCOPE_SHARED,
    SCOPE_STATIC,
    Address,
    IpcacheKey,
    PolicyKey,
    PolicyValue,
    Prefix,
    text_of,
)

Row = dict[str, object]


class Listings:
    """now: seconds of CLOCK_BOOTTIME, for what expires."""

    def __init__(self, engine: Engine, now: float) -> None:
        self._engine = engine
        self._now = now

    def endpoints(self) -> list[Row]:
        return [self._endpoint(number, endpoint) for number, endpoint in self._engine.groups.endpoints.items()]

    def _endpoint(self, number: int, endpoint: Endpoint) -> Row:
        compiled = endpoint.compiled
        closed = (
            []
            if compiled is None
            else [
                direction
                for direction, is_closed in (
                    ("egress", compiled.default_deny_egress),
                    ("ingress", compiled.default_deny_ingress),
                )
                if is_closed
            ]
        )
        return {
            "endpoint": number,
            "interface": endpoint.added.interface,
            "state": "attached" if endpoint.is_attached else "starting",
            "group": endpoint.group.number if endpoint.group is not None else None,
            "set": endpoint.group.set if endpoint.group is not None else None,
            "scope": scope_text(endpoint.scope),
            "labels": dict(endpoint.added.labels),
            "addresses": [text_of(address) for address in endpoint.added.addresses],
            "default_deny": closed,
            "audit": endpoint.added.audit,
        }

    def names(self) -> list[Row]:
        return [
            {
                "name": pair.name,
                "address": text_of(pair.address),
                "scope": scope_text(pair.scope),
                "expires_in": round(lifetime.kept_until - self._now, 1),
                "selectors": [selector.label for selector in self._engine.names.selectors_of(pair.name)],
            }
            for pair, lifetime in self._engine.dns_cache.lifetimes.items()
        ]

    def patterns(self) -> list[Row]:
        """The one with most names first."""
        endpoints = self._engine.groups.endpoints
        asked = [one for one in self._engine.proxy.distinct.asked(self._now) if one.endpoint in endpoints]
        return [
            {
                "endpoint": one.endpoint,
                "interface": endpoints[one.endpoint].added.interface,
                "pattern": one.pattern,
                "names": one.names,
                "in_this_minute": one.in_this_minute,
                "most_in_a_minute": one.most_in_a_minute,
                "refused": one.refused,
            }
            for one in sorted(asked, key=lambda one: (-one.names, one.endpoint, one.pattern))
        ]

    def selectors(self) -> list[Row]:
        cache = self._engine.selector_cache
        rows: list[Row] = []
        for peer, users in cache.users_by_selector.items():
            identities = sorted(cache.identities_by_selector[peer])
            selector = self._engine.names.selectors.get(peer) if isinstance(peer, Fqdn) else None
            for scope, bag in selector.bags.items() if selector is not None and selector.bags else ((None, ()),):
                rows.append(
                    {
                        "selector": peer_text(peer),
                        "scope": scope_text(scope) if scope is not None else None,
                        "addresses": [str(Prefix.of(address)) for address in bag],
                        "identities": identities,
                        "users": sorted(users),
                    }
                )
        return rows

    def identities(self) -> list[Row]:
        return [
            {"identity": identity, "labels": sorted(labels), "rows": self._engine.reconciler.ipcache.rows_of(identity)}
            for identity, labels in self._engine.identities.labels_by_identity.items()
        ]

    def ipcache(self) -> list[Row]:
        table = self._engine.reconciler.ipcache
        rows: list[Row] = []
        for key, row in table.desired.items():
            assert isinstance(key, IpcacheKey)
            assert isinstance(row.value, int)
            rows.append(
                {
                    "scope": scope_text(key.scope),
                    "prefix": str(key.prefix),
                    "identity": row.value,
                    "revision": row.revision,
                    "realized": key not in table.pending and key not in table.in_flight,
                    "labels": sorted(self._engine.identities.labels_by_identity[row.value]),
                }
            )
        return rows

    def policy_map(self) -> list[Row]:
        rows: list[Row] = []
        for key, row in self._engine.reconciler.policy.desired.items():
            assert isinstance(key, PolicyKey)
            assert isinstance(row.value, PolicyValue)
            rows.append(
                {
                    "set": key.set,
                    "direction": key.direction.name.lower(),
                    "identity": "any" if key.identity == IDENTITY_ANY else key.identity,
                    "protocol": "any" if key.protocol == 0 else PROTOCOL_NAMES.get(key.protocol, str(key.protocol)),
                    "port": port_text(key),
                    "verdict": row.value.verdict.name.lower(),
                    "rule": self.rule_text(row.value.cookie),
                }
            )
        return rows

    def interface_of(self, number: int | None) -> str | None:
        """None where there is no such endpoint, or no more."""
        endpoint = self._engine.groups.endpoints.get(number) if number is not None else None
        return endpoint.added.interface if endpoint is not None else None

    def rule_text(self, cookie: int) -> str:
        """File and line of a rule; of a row that no rule of a file made, why it is there."""
        rule = self._engine.cookies.rule_by_cookie.get(cookie)
        return str(rule.origin) if rule is not None else "every question is seen by the agent" if cookie == 0 else "no rule"

    def labels_of(self, identity: int) -> list[str]:
        """Empty for a number that nobody has given."""
        return sorted(self._engine.identities.labels_by_identity.get(identity, ()))

    def rows_failed(self) -> list[Row]:
        return [
            {
                "table": str(table.name),
                "row": row_text(key),
                "error": os.strerror(failure.errno),
                "since": round(self._now - failure.since, 1),
                "attempts": failure.attempts,
            }
            for table in self._engine.reconciler.tables.values()
            for key, failure in table.failures.items()
        ]

    def why_dropped(self, reason: str, remote: Address, endpoint: int | None, *, is_egress: bool) -> str | None:
        """What a packet to an address without a rule lacked: a name, a rule for it, time, or a rule for this port; None for
        other reasons."""
        if reason != "policy" or not is_egress:
            return None
        names = self.names_on(remote, endpoint)
        if not names:
            return "not resolved through the proxy"
        ruled = [name for name in names if self._has_rule(name, endpoint)]
        if not ruled:
            return f"no rule for this name: {', '.join(names)}"
        known = [name for name in ruled if self._is_known(name, remote, endpoint)]
        return f"no rule for this port: {', '.join(known)}" if known else f"expired: {ruled[0]}"

    def _has_rule(self, name: str, number: int | None) -> bool:
        endpoint = self._engine.groups.endpoints.get(number) if number is not None else None
        compiled = endpoint.compiled if endpoint is not None else None
        return compiled is None or not compiled.fqdn_labels.isdisjoint(self._engine.names.labels_of(name))

    def _is_known(self, name: str, address: Address, number: int | None) -> bool:
        """Has it this address now, as far as the endpoint is concerned?"""
        isolated = self._isolated(number)
        pairs = self._engine.dns_cache.pairs_of(name)
        return any(pair.address == address and (isolated is None or pair.scope == isolated.scope) for pair in pairs)

    def _isolated(self, number: int | None) -> Endpoint | None:
        endpoint = self._engine.groups.endpoints.get(number) if number is not None else None
        return endpoint if endpoint is not None and endpoint.added.isolated else None

    def names_on(self, address: Address, endpoint: int | None) -> list[str]:
        return [one.name for one in self.seen_on(address, endpoint)]

    def seen_on(self, address: Address, endpoint: int | None) -> list[Seen]:
        """Names seen on this address in the last day, the last one first; their lifetime may have ended.

        endpoint: for whom; one that learns for itself is told of names that it was answered with itself.
        """
        seen = self._engine.proxy.history.on(address, self._now)
        if endpoint is None or self._isolated(endpoint) is None:
            return seen
        return [one for one in seen if one.is_known_to(endpoint) or self._is_known(one.name, address, endpoint)]


def counts(engine: Engine) -> Mapping[str, object]:
    """How much of everything there is, for `status`."""
    tables = engine.reconciler.tables.values()
    return {
        "endpoints": len(engine.groups.endpoints),
        "policies": len(engine.groups.policies),
        "names": len(engine.dns_cache.scopes_by_name),
        "identities": len(engine.identities),
        "rows": sum(len(table.realized) for table in tables),
        "rows_pending": sum(len(table.pending) for table in tables),
        "open_questions": len(engine.proxy.transactions),
        "held": sum(transaction.barrier is not None for transaction in engine.proxy.transactions.values()),
        "questions": engine.proxy.counters.get("questions", 0),
        "denied": engine.proxy.counters.get("questions denied", 0),
        "failed": engine.proxy.counters.get("replies failed", 0),
        "upstreams_silent": [str(upstream) for upstream in engine.proxy.health.resting()],
    }


def scope_text(scope: int) -> str:
    if scope in (SCOPE_STATIC, SCOPE_SHARED):
        return "static" if scope == SCOPE_STATIC else "shared"
    return f"endpoint {scope - SCOPE_OWN_FIRST}"


def port_text(key: PolicyKey) -> str:
    if key.port_bits == 0:
        return "any"
    last = key.port | (0xFFFF >> key.port_bits)
    return str(key.port) if last == key.port else f"{key.port}-{last}"


def peer_text(peer: Peer) -> str:
    """A selector as people read it."""
    if isinstance(peer, Fqdn):
        return peer.label
    if isinstance(peer, Cidr):
        return ",!".join(f"cidr:{prefix}" for prefix in (peer.prefix, *peer.excepts))
    if isinstance(peer, Entity):
        return f"entity:{peer}"
    conditions = (f"{e.key} {e.operator} {','.join(sorted(e.values))}".strip() for e in peer.selector.expressions)
    return f"endpoints:{'; '.join(conditions) or 'all'}"
