"""The peers' cases about verdicts (`tests/cases/policy.json`), judged on the rows a fake kernel ends up with."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent.core.engine import SOURCES
from agent.core.events import EndpointAdded, HostAddresses, PoliciesChanged, SourceReported, Tick
from agent.core.policy import Block, port_blocks, resolve
from agent.core.rules import Cidr, LabelSelector, Policy, Ports, Rule
from agent.core.types import IDENTITY_ANY, PROTOCOL_NAMES, Direction, PolicyValue, Prefix, Verdict, packed
from agent.policy.files import read_policy_text
from tests.sim.world import World

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "cases/policy.json").read_text())["cases"]
NUMBERS = {name.upper(): number for number, name in PROTOCOL_NAMES.items()} | {"ICMPV6": 58}
OF_DOCUMENTS = (
    "verdict",
    "enforcement",
    "deny-precedence",
    "learned-names",
    "dns-redirect",
    "entities",
    "protocols",
    "prefix-edges",
)
JUDGED = (*OF_DOCUMENTS, "port-range", "map-cover", "map-insert", "prefix-entries")
# Groups that are not judged here, and where they are, or why not.
ELSEWHERE = {
    "accept": "what the reader takes: test_policy_cases.py",
    "default-deny": "what the reader takes: test_policy_cases.py",
    "empty-lists": "what the reader takes: test_policy_cases.py",
    "holes": "a network keeps its holes as written: test_policy_cases.py; the closest label decides, so there is no list",
    "map-changes": "increments of a map whose rows change; rows of a set are written once (sets.py)",
}
NOT_BUILT = {"from-requires", "host-policy"}

INTERCEPTED = "port 53 of an endpoint with egress policy is intercepted, whoever is asked (decision 4)"
PREFIX_OF_HOST = "every address has the label of the closest named network, the host's and endpoints' too (DESIGN, label set)"
GUARDED = "the address guard takes the host's addresses out before anything is learned (decision 13); the rows know no guard"
# Cases where our value is another one: why, and what the rows that differ are with us.
DEVIATIONS = {
    "po-0257": (INTERCEPTED, "redirect"),
    "po-0259": (INTERCEPTED, "redirect"),
    "po-0348": (INTERCEPTED, "redirect"),
    "po-0350": (INTERCEPTED, "redirect"),
    "po-0351": (INTERCEPTED, "redirect"),
    "po-0328": (PREFIX_OF_HOST, "allow"),
    "po-0345": (GUARDED, "allow"),
}
PORT_ZERO = "po-0423"  # port 0 in a document is every port, which the reader says (test_policy_cases.py)


def cases_of(*groups: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [c for c in CASES if c["group"] in groups], ids=lambda case: case["id"])


def test_every_group_is_judged_or_accounted_for() -> None:
    """Nothing is skipped in silence."""
    groups = Counter(case["group"] for case in CASES)
    assert set(groups) == {*JUDGED, *ELSEWHERE}
    assert sum(groups[group] for group in ELSEWHERE) == 188
    assert sum(case.get("requires") in NOT_BUILT for case in CASES if case["group"] in JUDGED) == 5


def verdict_text(world: World, row: dict[str, Any], address: str) -> str:
    direction = Direction[row["dir"].upper()]
    protocol = NUMBERS[row["proto"].upper()]
    port = row["icmp_type"] if "icmp_type" in row else row["port"]
    verdict = world.kernel.verdict_for(101, packed(address), protocol, port, direction)
    compiled = world.engine.groups.endpoints[1].compiled
    assert compiled is not None
    closed = compiled.default_deny_egress if direction is Direction.EGRESS else compiled.default_deny_ingress
    return (verdict or (Verdict.DENY if closed else Verdict.ALLOW)).name.lower()


def differs(row: dict[str, Any]) -> bool:
    """Rows that a deviation may be about: questions, and addresses of the host."""
    is_dns = row["dir"] == "egress" and row.get("port") == 53
    return is_dns or (row["peer"]["kind"] == "host" and row["verdict"] == "deny")


@cases_of(*OF_DOCUMENTS)
def test_the_verdict_of_every_row_of_the_table(case: dict[str, Any]) -> None:
    """Documents in, endpoints and names known, packets judged."""
    readings = [read_policy_text("p.yaml", document.encode()) for document in case["documents"]]
    if case.get("requires") in NOT_BUILT:
        assert any(reading.mistakes for reading in readings)
        return
    world = World()
    labels = sorted({json.dumps(row["peer"]["labels"]) for row in case["table"] if row["peer"]["kind"] == "endpoint"})
    address_by_labels = {text: f"192.0.2.{200 + place}" for place, text in enumerate(labels)}
    world.handle(EndpointAdded(1, "veth1", 101, case["subject"]["labels"], (packed("192.0.2.199"),)))
    for number, (text, address) in enumerate(address_by_labels.items(), 2):
        world.handle(EndpointAdded(number, f"veth{number}", 100 + number, json.loads(text), (packed(address),)))
    hosts = {row["peer"]["ip"] for row in case["table"] if row["peer"]["kind"] == "host"}
    world.handle(HostAddresses(frozenset(map(packed, hosts))))
    policies = tuple(policy for reading in readings for policy in reading.policies)
    assert not any(reading.mistakes for reading in readings)
    world.handle(PoliciesChanged(policies, None))
    for source in sorted(SOURCES):
        world.handle(SourceReported(source))
    for name, texts in case.get("learned", {}).items():
        scope = world.engine.groups.endpoints[1].scope
        world.engine.names.learn(name, [(packed(text), 60) for text in texts], scope, world.now)
    world.handle(Tick())
    for row in case["table"]:
        peer = row["peer"]
        address = address_by_labels[json.dumps(peer["labels"])] if peer["kind"] == "endpoint" else peer["ip"]
        wanted = row["verdict"]
        if case["id"] in DEVIATIONS and differs(row):
            wanted = DEVIATIONS[case["id"]][1]
        assert verdict_text(world, row, address) == wanted, row


@cases_of("port-range")
def test_the_blocks_of_a_range(case: dict[str, Any]) -> None:
    """Aligned, and as few as there can be."""
    if case["end"] < case["start"] or case["id"] == PORT_ZERO:
        pytest.skip("the reader takes no such range")
    blocks = {(first, first + (1 << (16 - bits)) - 1) for first, bits in port_blocks(case["start"], case["end"])}
    assert blocks == {(block["first"], block["last"]) for block in case["expect"]["blocks"]}


def blocks_of(entry: dict[str, Any]) -> list[Block]:
    direction, protocol = Direction[entry["dir"].upper()], entry["proto"]
    if protocol == 0:
        return [Block(direction, 0, 0, 0)]
    return [Block(direction, protocol, port, bits) for port, bits in port_blocks(*entry["ports"])]


@cases_of("map-cover")
def test_which_row_strictly_covers_which(case: dict[str, Any]) -> None:
    """Rows are nested or apart, so covering is being a parent; the row for any identity is a look-up of its own."""
    ((wide,), (narrow,)) = (blocks_of(case[side]) for side in ("wide", "narrow"))
    identities = case["wide"]["identity"], case["narrow"]["identity"]
    covers_identity = identities[0] in (IDENTITY_ANY, identities[1])
    is_parent = wide in narrow.parents() or (wide == narrow and identities[0] != identities[1])
    assert (covers_identity and is_parent) == case["expect"]["strictly_covers"]


@cases_of("map-insert")
def test_an_entry_more(case: dict[str, Any]) -> None:
    """Whatever was there before, the two look-ups find the strongest verdict of all entries."""
    rows: dict[int, dict[Block, PolicyValue]] = {}
    entries = [*case["existing"], case["insert"]]
    for identity in {entry["identity"] for entry in entries}:
        values = [
            (block, PolicyValue(Verdict[entry["action"].upper()], 1))
            for entry in entries
            if entry["identity"] == identity
            for block in blocks_of(entry)
        ]
        rows[identity] = resolve(values)
    for probe in case["expect"]["table"]:
        found = []
        for identity in {probe["identity"], IDENTITY_ANY}:
            packet = Block(Direction[probe["dir"].upper()], probe["proto"], probe["port"], 16)
            place = next((b for b in (packet, *packet.parents()) if b in rows.get(identity, {})), None)
            if place is not None:
                found.append(rows[identity][place].verdict)
        assert (max(found).name.lower() if found else "no match") == probe["verdict"], probe


@cases_of("prefix-entries")
def test_entries_for_networks(case: dict[str, Any]) -> None:
    """In every order of the rules, deny beats allow over containment."""
    rules = []
    for entry in case["entries"]:
        peers = None if entry["prefix"] == "any" else (Cidr(Prefix.parse(entry["prefix"])),)
        first, last = (0, 65_535) if entry["port"] == "any" else (entry["port"], entry["port"])
        ports = None if entry["proto"] == "any" else (Ports(NUMBERS[entry["proto"]], first, last),)
        rules.append(Rule(Direction.EGRESS, peers, ports, entry["action"] == "deny"))
    for order in itertools.permutations(rules):
        world = World()
        world.start(Policy("p", LabelSelector(), order, False, False))
        for row in case["expect"]["table"]:
            verdict = world.kernel.verdict_for(101, packed(row["ip"]), NUMBERS[row["proto"]], row["port"])
            assert (verdict.name.lower() if verdict is not None else "no match") == row["verdict"], row
