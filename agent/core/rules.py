"""Rules as people wrote them, after reading and before compiling: what the front ends produce and the core takes.

Everything here is frozen and comparable: two endpoints with equal rules share a set.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.types import Direction, Prefix


class Operator(enum.StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Expression:
    key: str
    operator: Operator
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Predicate over an endpoint's labels; all its expressions must hold (none: every endpoint).

    Label sources (`k8s:`, `any:`) are taken off by the front end. `matchLabels` becomes In with one value.
    """

    expressions: tuple[Expression, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(_holds(expression, labels) for expression in self.expressions)


def _holds(expression: Expression, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression.key)
    if expression.operator is Operator.EXISTS:
        return value is not None
    if expression.operator is Operator.DOES_NOT_EXIST:
        return value is None
    if expression.operator is Operator.IN:
        return value is not None and value in expression.values
    return value is None or value not in expression.values


@dataclass(frozen=True, slots=True)
class Fqdn:
    """A peer by name.

    pattern: normalised by `names.normalise_pattern`: lower case, A-labels, final dot; without a star it is one exact name.
    excepts: patterns whose names it does not select. allowed: prefixes the address guard lets through for it. Both are the
    policy's (`except_names`, `allow_addresses`), filled in by the core: a selector that may hold more is another selector.
    """

    pattern: str
    excepts: tuple[str, ...] = ()
    allowed: tuple[Prefix, ...] = ()

    @property
    def label(self) -> str:
        return "fqdn:" + ",!".join((self.pattern, *self.excepts)) + "".join(f",+{prefix}" for prefix in self.allowed)


@dataclass(frozen=True, slots=True)
class Cidr:
    """A peer by network, without the excepted parts (each inside the prefix)."""

    prefix: Prefix
    excepts: tuple[Prefix, ...] = ()


class Entity(enum.StrEnum):
    ALL = "all"
    WORLD = "world"
    HOST = "host"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Peers that are endpoints of this agent."""

    selector: LabelSelector


Peer = Fqdn | Cidr | Entity | Endpoints


@dataclass(frozen=True, slots=True)
class Ports:
    """A range of ports of one protocol, both ends included; of ICMP and ICMPv6, the type. 0 to 65535 is every port."""

    protocol: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a rule stands: every verdict can name it."""

    file: str
    line: int
    policy: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of one direction.

    peers: None is everybody, () is nobody. ports: None is every protocol and port, () is none.
    names: of `rules.dns`, patterns as in `Fqdn`; None where the rule says nothing about DNS, () is every name.
    """

    direction: Direction
    peers: tuple[Peer, ...] | None
    ports: tuple[Ports, ...] | None
    deny: bool = False
    names: tuple[str, ...] | None = None
    origin: Origin = field(default=Origin("", 0))


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy document (one `spec`).

    subject: which endpoints. default_deny_*: does this policy close the direction for them.
    namespace: of a namespaced policy, only endpoints with this value of the label `namespace`.
    except_names: patterns never asked and never learned under this policy.
    allow_addresses: prefixes the address guard lets through for this policy's names.
    """

    name: str
    subject: LabelSelector
    rules: tuple[Rule, ...]
    default_deny_egress: bool
    default_deny_ingress: bool
    namespace: str | None = None
    except_names: tuple[str, ...] = ()
    allow_addresses: tuple[Prefix, ...] = ()
    origin: Origin = field(default=Origin("", 0))

    def selects(self, labels: Mapping[str, str]) -> bool:
        if self.namespace is not None and labels.get("namespace") != self.namespace:
            return False
        return self.subject.matches(labels)
