"""The peers' cases about policy documents (`tests/cases/policy.json`), as far as reading them goes."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest

from agent.core.rules import Cidr, Endpoints, Entity, Policy, Rule
from agent.core.types import PROTOCOL_NAMES, Direction, Prefix
from agent.policy.files import Reading, read_policy_text

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "cases/policy.json").read_text())["cases"]

NOT_BUILT = "not built, so refused and never ignored (decision 1)"
EMPTY_NAMES = "an empty list of names is refused with a hint, which is safer still than selecting nobody (decision 3)"
PORT_ZERO = 'port "0" is every port in a document, so it begins no range; the blocks themselves are the compiler\'s'

# Cases where our value is another one, and why.
DEVIATIONS = {
    "po-0008": f"HTTP rules are {NOT_BUILT}",
    "po-0224": f"nodeSelector is {NOT_BUILT}",
    "po-0361": EMPTY_NAMES,
    "po-0403": PORT_ZERO,
    "po-0412": PORT_ZERO,
    "po-0410": PORT_ZERO,
    "po-0426": "a range that ends before it begins is refused, as the case's own note prefers",
}


def cases_of(*groups: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [c for c in CASES if c["group"] in groups], ids=lambda case: case["id"])


def reading_of(document: str) -> Reading:
    return read_policy_text("p.yaml", document.encode())


def document_with(**rule: Any) -> str:
    spec = {"endpointSelector": {}, "egress": [rule]}
    return json.dumps({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "p"}, "spec": spec})


def only_rule(reading: Reading) -> Rule:
    assert not reading.mistakes
    ((rule,),) = (policy.rules for policy in reading.policies)
    return rule


@cases_of("accept")
def test_a_document_is_taken_or_refused(case: dict[str, Any]) -> None:
    """And a refusal is a sentence about a line, never an exception."""
    reading = reading_of(case["document"])
    assert (not reading.mistakes) == (case["accept"] != (case["id"] in DEVIATIONS)), reading.mistakes
    assert bool(reading.policies) != bool(reading.mistakes)
    lines = case["document"].count("\n") + 1
    assert all(1 <= mistake.line <= lines and len(mistake.message) > 20 for mistake in reading.mistakes)


NOT_BUILT_FEATURES = {"from-requires", "host-policy", "http-l7", "cluster-entities"}


@cases_of("verdict", "enforcement", "deny-precedence", "learned-names", "dns-redirect", "entities", "protocols", "prefix-edges")
def test_the_documents_of_the_verdict_cases_are_read(case: dict[str, Any]) -> None:
    """What is built is taken, so that the compiler is judged on all of it; what is not is refused."""
    readings = [reading_of(document) for document in case["documents"]]
    mistakes = [mistake for reading in readings for mistake in reading.mistakes]
    assert bool(mistakes) == (case.get("requires") in NOT_BUILT_FEATURES), mistakes


@cases_of("default-deny")
def test_which_directions_a_document_closes(case: dict[str, Any]) -> None:
    """A section that is there closes; `enableDefaultDeny` has the last word."""
    (policy,) = reading_of(case["document"]).policies
    closed = {"ingress": policy.default_deny_ingress, "egress": policy.default_deny_egress}
    assert closed == case["expect"]["default_deny"]


def naive_verdict(policies: tuple[Policy, ...], row: dict[str, Any]) -> str:
    """Only what the empty lists need: no names, no DNS."""
    direction = Direction[row["dir"].upper()]
    rules = [rule for policy in policies for rule in policy.rules if rule.direction is direction and applies(rule, row)]
    if any(rule.deny for rule in rules):
        return "deny"
    closed = any(p.default_deny_egress if direction is Direction.EGRESS else p.default_deny_ingress for p in policies)
    return "allow" if rules or not closed else "deny"


def applies(rule: Rule, row: dict[str, Any]) -> bool:
    peer, protocol = row["peer"], row["proto"].lower()
    if rule.peers is not None and not any(
        one is Entity.ALL
        or (peer["kind"] == "endpoint" and isinstance(one, Endpoints) and one.selector.matches(peer["labels"]))
        or (peer["kind"] == "world" and isinstance(one, Cidr) and one.prefix.contains(Prefix.parse(peer["ip"])))
        for one in rule.peers
    ):
        return False
    ports = rule.ports
    return ports is None or any(PROTOCOL_NAMES[p.protocol] == protocol and p.first <= row["port"] <= p.last for p in ports)


@cases_of("empty-lists")
def test_an_empty_list_selects_nobody(case: dict[str, Any]) -> None:
    """Never everybody: a list that lost its last item must not open what it once narrowed."""
    readings = [reading_of(document) for document in case["documents"]]
    if case["id"] in DEVIATIONS:
        assert all(reading.mistakes for reading in readings)
        return
    policies = tuple(policy for reading in readings for policy in reading.policies)
    assert [naive_verdict(policies, row) for row in case["table"]] == [row["verdict"] for row in case["table"]]


@cases_of("holes")
def test_a_prefix_with_holes_is_kept_as_written(case: dict[str, Any]) -> None:
    """Probed at every border: an address is in the entry exactly if it is in the case's list of prefixes."""
    rule = only_rule(reading_of(document_with(toCIDRSet=[{"cidr": case["cidr"], "except": case["except"]}])))
    (peer,) = rule.peers or ()
    assert isinstance(peer, Cidr)
    expected = [Prefix.parse(text) for text in case["expect"]["prefixes"]]
    whole = ipaddress.ip_network(case["cidr"])
    borders = [ipaddress.ip_network(text) for text in (case["cidr"], *case["except"], *case["expect"]["prefixes"])]
    addresses = {int(address) + by for net in borders for address in (net[0], net[-1]) for by in (-1, 0, 1)}
    for number in addresses:
        if not 0 <= number < 1 << whole.max_prefixlen:
            continue
        probe = Prefix.of(number.to_bytes(whole.max_prefixlen // 8, "big"))
        taken = peer.prefix.contains(probe) and not any(hole.contains(probe) for hole in peer.excepts)
        assert taken == any(prefix.contains(probe) for prefix in expected), probe


@cases_of("port-range")
def test_a_range_of_ports_is_kept_as_written(case: dict[str, Any]) -> None:
    """From the first port of the case's first block to the last of its last one."""
    port = {"port": str(case["start"]), "endPort": case["end"], "protocol": "TCP"}
    reading = reading_of(document_with(toPorts=[{"ports": [port]}]))
    if case["id"] in DEVIATIONS:
        assert reading.mistakes
        return
    (ports,) = only_rule(reading).ports or ()
    blocks = case["expect"]["blocks"]
    assert (ports.first, ports.last) == (min(b["first"] for b in blocks), max(b["last"] for b in blocks))
