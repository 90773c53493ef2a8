"""Policy documents, and the verdicts of the rows they become."""

from __future__ import annotations

import ipaddress
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from agent.core.engine import SOURCES
from agent.core.events import EndpointAdded, HostAddresses, PoliciesChanged, SourceReported, Tick
from agent.core.names import normalise_name
from agent.core.policy import Block, port_blocks, resolve
from agent.core.rules import Cidr, LabelSelector, Policy, Ports, Rule
from agent.core.types import IDENTITY_ANY, PROTOCOL_NAMES, Direction, PolicyValue, Prefix, Verdict, packed
from agent.policy.files import Reading, read_policy_text
from tests.cases.runner import FEATURES, DoesNotApply, Fields, Sheet
from tests.sim.world import World

FIELDS: Final = [
    "document", "accept", "documents", "subject", "table", "learned", "enforcement", "expect", "cidr", "except", "start",
    "end", "wide", "narrow", "existing", "insert", "entries", "any_order", "setup", "steps",
]  # fmt: skip
_NUMBERS: Final = {name.upper(): number for number, name in PROTOCOL_NAMES.items()} | {"ICMPV6": 58}
# More than this many orders of the rules are not tried one by one.
_ORDERS_MAX: Final = 120


def judge(case: Fields, sheet: Sheet) -> None:
    documents = [case["document"]] if "document" in case else case.get("documents", [])
    if case.get("requires", "named-ports") not in FEATURES:
        # What is not built has to be refused, never ignored (decision 1).
        is_refused = bool(documents) and any(_reading(document).mistakes for document in documents)
        sheet.compare("refused", is_refused, theirs=True)
        if is_refused:
            raise DoesNotApply(f"requires {case['requires']}, which is not built; the document is refused, as it must be")
        return
    judges: dict[str, Callable[[Fields, Sheet], None]] = {
        "accept": _judge_acceptance,
        "default-deny": _judge_default_deny,
        "holes": _judge_holes,
        "port-range": _judge_port_range,
        "map-cover": _judge_cover,
        "map-insert": _judge_insert,
        "prefix-entries": _judge_prefix_entries,
        "map-changes": _judge_changes,
    }
    judges.get(case["group"], _judge_verdicts)(case, sheet)


def _reading(document: str) -> Reading:
    return read_policy_text("p.yaml", document.encode())


def _document_with(**rule: Any) -> str:
    spec = {"endpointSelector": {}, "egress": [rule]}
    return json.dumps({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "p"}, "spec": spec})


# --- reading ---------------------------------------------------------------------------------------------------------------


def _judge_acceptance(case: Fields, sheet: Sheet) -> None:
    """And a refusal is a sentence about a line, never an exception, and never half a file."""
    reading = _reading(case["document"])
    sheet.compare("accepted", not reading.mistakes, case["accept"])
    lines = case["document"].count("\n") + 1
    is_explained = all(1 <= mistake.line <= lines and len(mistake.message) > 20 for mistake in reading.mistakes)
    sheet.compare("explained", is_explained and bool(reading.policies) != bool(reading.mistakes), theirs=True)


def _judge_default_deny(case: Fields, sheet: Sheet) -> None:
    policies = _reading(case["document"]).policies
    closed = {
        "ingress": any(policy.default_deny_ingress for policy in policies),
        "egress": any(policy.default_deny_egress for policy in policies),
    }
    for direction, theirs in case["expect"].only("default_deny")["default_deny"].only(*closed).items():
        sheet.compare(f"{direction} closed", closed[direction], theirs)


def _judge_holes(case: Fields, sheet: Sheet) -> None:
    """A network keeps its holes as written; probed at every border of the list of prefixes that the case has instead."""
    reading = _reading(_document_with(toCIDRSet=[{"cidr": case["cidr"], "except": list(case["except"])}]))
    if reading.mistakes:
        sheet.compare("accepted", ours=False, theirs=True)
        return
    ((rule,),) = (policy.rules for policy in reading.policies)
    (peer,) = rule.peers or ()
    assert isinstance(peer, Cidr)
    expected = [Prefix.parse(text) for text in case["expect"].only("prefixes")["prefixes"]]
    whole = ipaddress.ip_network(case["cidr"], strict=False)
    texts = (case["cidr"], *case["except"], *case["expect"]["prefixes"])
    borders = [ipaddress.ip_network(text, strict=False) for text in texts]
    for number in sorted({int(address) + by for net in borders for address in (net[0], net[-1]) for by in (-1, 0, 1)}):
        if 0 <= number < 1 << whole.max_prefixlen:
            probe = Prefix.of(number.to_bytes(whole.max_prefixlen // 8, "big"))
            is_taken = peer.prefix.contains(probe) and not any(hole.contains(probe) for hole in peer.excepts)
            sheet.compare(f"{probe} is in it", is_taken, any(prefix.contains(probe) for prefix in expected))


def _judge_port_range(case: Fields, sheet: Sheet) -> None:
    """End 0 is no range: the port alone as a document has it, where port 0 is every port."""
    start, end = case["start"], case["end"]
    if end < start or end == 0:
        port = {"port": str(start), "protocol": "TCP"} | ({"endPort": end} if end else {})
        reading = _reading(_document_with(toPorts=[{"ports": [port]}]))
        if reading.mistakes:
            sheet.compare("range", "refused", "taken")
            return
        ((rule,),) = (policy.rules for policy in reading.policies)
        ((_, start, end),) = ((ports.protocol, ports.first, ports.last) for ports in rule.ports or ())
    blocks = {f"{first}-{first + (1 << (16 - bits)) - 1}" for first, bits in port_blocks(start, end)}
    wanted = [block.only("first", "last", "mask") for block in case["expect"].only("blocks")["blocks"]]
    theirs = {f"{block['first']}-{block['last']}" for block in wanted}
    sheet.compare_members("block", blocks, theirs)


# --- documents to verdicts ---------------------------------------------------------------------------------------------------


def _judge_verdicts(case: Fields, sheet: Sheet) -> None:
    """Documents in, endpoints and names known, packets judged by the rows the kernel has then."""
    readings = [_reading(document) for document in case["documents"]]
    if any(reading.mistakes for reading in readings):
        sheet.compare("documents", "refused", "taken")
        return
    if case["subject"].only("labels", "kind").get("kind", "endpoint") != "endpoint":
        raise DoesNotApply(f"unknown subject {case['subject']['kind']!r}")
    if case.get("enforcement", "default") != "default":
        raise DoesNotApply(f"no setting enforces {case['enforcement']}: a direction is closed by the policies that select it")
    world = World()
    rows = [row.only("dir", "peer", "proto", "port", "icmp_type", "verdict") for row in case["table"]]
    kinds = {row["peer"].only("kind", "ip", "labels")["kind"] for row in rows} - {"world", "endpoint", "host"}
    if kinds:
        raise DoesNotApply(f"unknown peer {kinds.pop()!r}")
    labels = sorted({json.dumps(row["peer"]["labels"]) for row in rows if row["peer"]["kind"] == "endpoint"})
    address_by_labels = {text: f"192.0.2.{200 + place}" for place, text in enumerate(labels)}
    world.handle(EndpointAdded(1, "veth1", 101, case["subject"]["labels"], (packed("192.0.2.199"),)))
    for number, (text, address) in enumerate(address_by_labels.items(), 2):
        world.handle(EndpointAdded(number, f"veth{number}", 100 + number, json.loads(text), (packed(address),)))
    hosts = {row["peer"]["ip"] for row in rows if row["peer"]["kind"] == "host"}
    world.handle(HostAddresses(frozenset(map(packed, hosts))))
    world.handle(PoliciesChanged(tuple(policy for reading in readings for policy in reading.policies), "policy"))
    for source in sorted(SOURCES):
        world.handle(SourceReported(source))
    assert world.settled.get("policy", "never") is None, world.settled
    for name, texts in case.get("learned", {}).items():
        scope = world.engine.groups.endpoints[1].scope
        world.engine.names.learn(normalise_name(name), [(packed(text), 60) for text in texts], scope, world.now)
    world.handle(Tick())
    for row in rows:
        peer = row["peer"]
        address = address_by_labels[json.dumps(peer["labels"])] if peer["kind"] == "endpoint" else peer["ip"]
        port = row["icmp_type"] if "icmp_type" in row else row["port"]
        place = f"{row['dir']} {peer['kind']} {row['proto'].upper()}/{port}"
        sheet.compare(place, _verdict(world, row, address, port), row["verdict"])


def _verdict(world: World, row: Fields, address: str, port: int) -> str:
    direction = _direction(row["dir"])
    verdict = world.kernel.verdict_for(101, packed(address), _protocol(row["proto"]), port, direction)
    compiled = world.engine.groups.endpoints[1].compiled
    assert compiled is not None
    closed = compiled.default_deny_egress if direction is Direction.EGRESS else compiled.default_deny_ingress
    return (verdict or (Verdict.DENY if closed else Verdict.ALLOW)).name.lower()


def _direction(text: str) -> Direction:
    if text.upper() not in Direction.__members__:
        raise DoesNotApply(f"unknown direction {text!r}")
    return Direction[text.upper()]


def _protocol(text: str) -> int:
    if text.upper() not in _NUMBERS:
        raise DoesNotApply(f"unknown protocol {text!r}")
    return _NUMBERS[text.upper()]


def _verdict_named(text: str) -> Verdict:
    if text.upper() not in Verdict.__members__:
        raise DoesNotApply(f"unknown action {text!r}")
    return Verdict[text.upper()]


# --- rows ------------------------------------------------------------------------------------------------------------------


def _blocks_of(direction: str, protocol: int, first: int, last: int) -> list[Block]:
    if protocol == 0:
        return [Block(_direction(direction), 0, 0, 0)]
    return [Block(_direction(direction), protocol, port, bits) for port, bits in port_blocks(first, last)]


def _judge_cover(case: Fields, sheet: Sheet) -> None:
    """Rows are nested or apart, so covering is being a parent; the row for any identity is a look-up of its own."""
    sides = [case[side].only("identity", "ports", "proto", "dir") for side in ("wide", "narrow")]
    wide, narrow = (_blocks_of(side["dir"], side["proto"], *side["ports"]) for side in sides)
    identities = [side["identity"] for side in sides]
    covers_identity = identities[0] in {IDENTITY_ANY, identities[1]}
    is_inside = all(any(block in wide or parent in wide for parent in (block, *block.parents())) for block in narrow)
    is_strict = wide != narrow or identities[0] != identities[1]
    theirs = case["expect"].only("strictly_covers")["strictly_covers"]
    sheet.compare("strictly covers", covers_identity and is_inside and is_strict, theirs)


Entry = tuple[int, Block, Verdict]  # identity, what of it, verdict


def _rows(entries: Iterable[Entry]) -> dict[int, dict[Block, PolicyValue]]:
    by_identity: dict[int, list[tuple[Block, PolicyValue]]] = {}
    for identity, block, verdict in entries:
        by_identity.setdefault(identity, []).append((block, PolicyValue(verdict, 1)))
    return {identity: resolve(values) for identity, values in by_identity.items()}


def _found(rows: dict[int, dict[Block, PolicyValue]], identity: int, packet: Block) -> str:
    """The two look-ups of the datapath: the identity's closest row and that of any identity, the stronger of them."""
    found = []
    for each in {identity, IDENTITY_ANY}:
        place = next((block for block in (packet, *packet.parents()) if block in rows.get(each, {})), None)
        if place is not None:
            found.append(rows[each][place].verdict)
    return max(found).name.lower() if found else "no match"


def _judge_insert(case: Fields, sheet: Sheet) -> None:
    """Whatever was there before, the look-ups find the strongest verdict of all entries."""
    entries = []
    for entry in (*case["existing"], case["insert"]):
        entry.only("identity", "ports", "proto", "dir", "action")
        blocks = _blocks_of(entry["dir"], entry["proto"], *entry["ports"])
        entries += [(entry["identity"], block, _verdict_named(entry["action"])) for block in blocks]
    _compare_table(_rows(entries), case["expect"].only("table")["table"], sheet, "")


def _compare_table(rows: dict[int, dict[Block, PolicyValue]], table: list[Fields], sheet: Sheet, place: str) -> None:
    for probe in table:
        probe.only("identity", "proto", "port", "dir", "verdict")
        packet = Block(_direction(probe["dir"]), probe["proto"], probe["port"], 16)
        text = f"{place}{probe['identity']} {probe['dir']} {probe['proto']}/{probe['port']}"
        sheet.compare(text, _found(rows, probe["identity"], packet), probe["verdict"])


def _judge_changes(case: Fields, sheet: Sheet) -> None:
    """Judged by verdicts: rows of a set are written once, so there is no increment (sets.py).

    A row that the case writes has to be there then, and one that it deletes has not.
    """
    entries: dict[tuple[str, int, Block, Verdict], None] = {}
    for one in case["setup"]:
        one.only("identity", "port", "proto", "dir", "action")
        for block in _blocks_at(one):
            entries["", one["identity"], block, _verdict_named(one["action"])] = None
    for number, step in enumerate(case["steps"], 1):
        for change in step.only("changes", "expect")["changes"]:
            change.only("selector", "add", "remove", "port", "proto", "dir", "action")
            for block in _blocks_at(change):
                action = _verdict_named(change["action"])
                for identity in change["add"]:
                    entries[change["selector"], identity, block, action] = None
                for identity in change["remove"]:
                    entries.pop((change["selector"], identity, block, action), None)
        rows = _rows((identity, block, action) for _, identity, block, action in entries)
        wanted = step["expect"].only("map_writes", "map_deletes", "table")
        for key, is_there in (("map_writes", True), ("map_deletes", False)):
            for row in wanted.get(key, ()):
                row.only("identity", "port", "proto", "dir", "action")
                there = [block for block in _blocks_at(row) if block in rows.get(row["identity"], {})]
                text = f"step {number} row {row['identity']} {row['dir']} {row['proto']}/{row['port']}"
                sheet.compare(text, bool(there), is_there)
        _compare_table(rows, wanted.get("table", []), sheet, f"step {number} ")


def _blocks_at(one: Fields) -> list[Block]:
    first, last = (0, 65_535) if one["port"] == "any" else (one["port"], one["port"])
    return _blocks_of(one["dir"], 0 if one["proto"] == "any" else _protocol(one["proto"]), first, last)


def _judge_prefix_entries(case: Fields, sheet: Sheet) -> None:
    """In every order of the rules, deny beats allow over containment."""
    rules = []
    for entry in case["entries"]:
        entry.only("prefix", "proto", "port", "action")
        if entry["action"] not in {"allow", "deny"}:
            raise DoesNotApply(f"unknown action {entry['action']!r}")
        peers = None if entry["prefix"] == "any" else (Cidr(Prefix.parse(entry["prefix"])),)
        first, last = (0, 65_535) if entry["port"] == "any" else (entry["port"], entry["port"])
        ports = None if entry["proto"] == "any" else (Ports(_protocol(entry["proto"]), first, last),)
        rules.append(Rule(Direction.EGRESS, peers, ports, entry["action"] == "deny"))
    orders = itertools.permutations(rules) if case.get("any_order") else [tuple(rules)]
    for order in itertools.islice(orders, _ORDERS_MAX):
        world = World()
        world.start(Policy("p", LabelSelector(), order, False, False))
        for row in case["expect"].only("table")["table"]:
            row.only("ip", "proto", "port", "verdict")
            verdict = world.kernel.verdict_for(101, packed(row["ip"]), _protocol(row["proto"]), row["port"])
            ours = verdict.name.lower() if verdict is not None else "no match"
            sheet.compare(f"{row['ip']} {row['proto']}/{row['port']}", ours, row["verdict"])
