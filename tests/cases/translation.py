"""From the words of the case files to ours.

`reserved:world-ipv4` and `-ipv6` are `reserved:world`: one world for both families. Label sources of endpoints mean the same
(decision 1), so all of them are an endpoint's.
"""

from __future__ import annotations

from typing import Any

from agent.core.names import normalise_pattern
from agent.core.rules import Cidr, Endpoints, Entity, Expression, Fqdn, LabelSelector, Operator, Peer
from agent.core.types import Label, LabelSet, Prefix
from tests.cases.runner import DoesNotApply, Fields


def fqdn_of(selector: Fields | str) -> Fqdn:
    """`{matchName: …}`, `{matchPattern: …}`, or the text of either."""
    if isinstance(selector, str):
        return Fqdn(normalise_pattern(selector))
    return Fqdn(normalise_pattern(selector.one_of("matchName", "matchPattern")[1]))


def label_of(text: str) -> Label:
    source, colon, rest = text.partition(":")
    if not colon:
        raise DoesNotApply(f"unknown label {text!r}")
    if source == "reserved":
        return "reserved:" + rest.removesuffix("-ipv4").removesuffix("-ipv6")
    if source == "fqdn":
        return fqdn_of(rest).label
    return f"cidr:{Prefix.parse(rest)}" if source == "cidr" else f"endpoint:{rest}"


def labels_of(texts: list[str]) -> LabelSet:
    return frozenset(label_of(text) for text in texts)


def peer_of(selector: Fields) -> Peer:
    """A selector of the selector cache's cases."""
    kind, what = selector.one_of("cidr", "fqdn", "entity", "labels", "expr")
    match kind:
        case "cidr":
            return Cidr(Prefix.parse(what))
        case "fqdn":
            return fqdn_of(what)
        case "entity":
            if what not in set(Entity):
                raise DoesNotApply(f"unknown entity {what!r}")
            return Entity(what)
        case "labels":
            return _endpoints([(key, "In", [value]) for key, value in what.items()])
        case "expr":
            each = [one.only("key", "operator", "values") for one in what]
            return _endpoints([(one["key"], one["operator"], one.get("values", [])) for one in each])
    raise AssertionError(kind)


def _endpoints(expressions: list[tuple[str, str, list[Any]]]) -> Endpoints:
    unknown = [operator for _, operator, _ in expressions if operator not in set(Operator)]
    if unknown:
        raise DoesNotApply(f"unknown operator {unknown[0]!r}")
    return Endpoints(
        LabelSelector(
            tuple(
                Expression(key.partition(":")[2] or key, Operator(operator), frozenset(values))
                for key, operator, values in expressions
            )
        )
    )
