"""The peers' cases about DNS cache, name manager, selector cache and ipcache, as far as they apply to this design.

Labels are compared by what they say: `reserved:world-ipv4` and `-ipv6` are `reserved:world`, `k8s:` labels an endpoint's.
"""

from __future__ import annotations

import json
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.core.dns_cache import DnsCache, Pair
from agent.core.metadata import Metadata
from agent.core.names import normalise_name, normalise_pattern
from agent.core.policy import LABEL_ENDPOINT
from agent.core.rules import Cidr, Endpoints, Entity, Expression, Fqdn, LabelSelector, Operator, Peer
from agent.core.selector_cache import SelectorCache
from agent.core.types import LABEL_WORLD, SCOPE_SHARED, SCOPE_STATIC, IpcacheKey, LabelSet, Prefix, Table, packed, text_of
from tests.sim.world import FakeKernel, World

DIRECTORY = Path(__file__).parents[1] / "cases"
CASES: dict[str, list[dict[str, Any]]] = {
    file: json.loads((DIRECTORY / f"{file}.json").read_text())["cases"]
    for file in ("dnscache", "namemanager", "selectorcache", "ipcache")
}

FLOWS = "expired addresses are kept by flows seen, looked up one by one (decision 15), not by passes: test_gate.py"
NO_COMMAND = "forgetting and saving by command is not built"
# Groups that are not judged, and why.
NOT_JUDGED = {
    "dnscache": {
        "force-expire": NO_COMMAND,
        "persist": NO_COMMAND,
        "per-name-limit": "over the bound the address goes at once (decision 14): test_core_mechanics.py",
        "deferred": FLOWS,
        "deferred-limit": FLOWS,
        "deferred-force": FLOWS,
        "deferred-list": FLOWS,
        "end-to-end": FLOWS,
        "order": FLOWS,
    },
    "namemanager": {
        "gc": FLOWS,
        "shared": FLOWS,
        "expiry": FLOWS,
        "forget": NO_COMMAND,
        "restart": "the journal is not built",
        "release": "the gate's scenes: test_gate.py",
        "address-filter": "the address guard judges records before they are learned",
        "usage": "a name is known by its lifetime; users are the selectors'",
    },
    "selectorcache": {
        "fqdn-bag": "numbers under the bag design; a name's selector selects by its label here",
        "name-graph": "names are credited to the question (decision 12)",
        "most-specific-prefix": "an identity has at most one cidr label here",
    },
    "ipcache": {
        "labels-of-prefix": "one world for both families; judged by `inherit` and `cidr`",
        "source-order": "sources do not overwrite each other: labels are merged by resource",
        "direct": "numbers are not set directly",
        "override": "numbers are not set directly",
        "restore": "the journal is not built",
        "failure": "an allocation fails only at its bound, for the owner: test_gate.py",
        "revision": "waiting is by row, not by one revision: test_waiting.py",
        "reserved": "reserved:health, ingress and the like have no meaning on one host",
        "host": "host and prefix labels are merged (DESIGN, label set): test_policy_oracle.py",
        "parent": "the closest prefix is judged by `inherit`",
    },
}
JUDGED = {
    "dnscache": {"ttl", "unknown", "latest-wins", "addresses", "reverse", "count", "gc"},
    "namemanager": {"labels", "sets", "register", "case", "delta", "identity", "field-report", "rules"},
    "selectorcache": {"sharing", "cidr", "notify", "empty", "fqdn-label", "entity", "expression", "identities"},
    "ipcache": {"canonical", "contains", "label-of-ip", "longest-prefix", "inherit", "fqdn", "cidr"},
}


JUDGED_COUNTS = {"dnscache": 24, "namemanager": 19, "selectorcache": 26, "ipcache": 48}

# Cases of the groups judged where our value is another one, and why.
DEVIATIONS = {
    "nm-0044": "one world for both families, so one identity for both addresses of a name",
    "sc-0043": "label sources mean the same (decision 1)",
    "sc-0046": "an identity never gets other labels (I4)",
    "ic-0040": "a network wider than the mapped range is none of IPv4 (a choice of the case's)",
    "ic-0062": "a leading zero in the length is taken (a choice of the case's)",
    "ic-0126": "a v4-mapped address is the IPv4 address (decision 13)",
}


def is_judged(file: str, case: dict[str, Any]) -> bool:
    """Cases of a cluster are about sources that one host has not."""
    return case["group"] in JUDGED[file] and case["id"] not in DEVIATIONS and case.get("profile") != "cluster"


def cases_of(file: str) -> pytest.MarkDecorator:
    cases = [case for case in CASES[file] if is_judged(file, case)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


@pytest.mark.parametrize("file", CASES)
def test_every_group_is_judged_or_accounted_for(file: str) -> None:
    """Nothing is skipped in silence."""
    assert {case["group"] for case in CASES[file]} == JUDGED[file] | NOT_JUDGED[file].keys()
    assert not JUDGED[file] & NOT_JUDGED[file].keys()


def test_how_many_are_judged() -> None:
    """A case that comes to the files is judged or counted."""
    judged = Counter(file for file, cases in CASES.items() for case in cases if is_judged(file, case))
    assert judged == JUDGED_COUNTS


# --- DNS cache -----------------------------------------------------------------------------------------------------------


@cases_of("dnscache")
def test_dns_cache(case: dict[str, Any]) -> None:
    """Lifetimes only grow, end inclusively, and are found by name and by address."""
    cache = DnsCache(case["config"].get("min_ttl", 0), 1e9)
    for step in case["steps"]:
        wanted = step.get("expect", {})
        match step["op"]:
            case "update":
                name = normalise_name(step["name"])
                pairs = [Pair(SCOPE_SHARED, name, packed(text)) for text in step["ips"]]
                is_new = [cache.update(pair, step["ttl"], step["t"]) for pair in pairs]
                assert any(is_new) == wanted.get("new_ip", any(is_new)), step
            case "lookup":
                held = cache.addresses(SCOPE_SHARED, normalise_name(step["name"]))
                ends = {a: cache.lifetimes[Pair(SCOPE_SHARED, normalise_name(step["name"]), a)].kept_until for a in held}
                texts = {text_of(address) for address, end in ends.items() if end >= step["t"]}
                assert texts == set(wanted["ips"]), step
            case "reverse":
                address = packed(step["ip"])
                on = cache.pairs_by_address.of(address)
                living = {pair.name for pair in on if cache.lifetimes[pair].kept_until >= step["t"]}
                assert living == {normalise_name(name) for name in wanted["names"]}, step
            case "gc":
                due = cache.due(step["t"])
                assert {pair.name for pair in due} == {normalise_name(name) for name in wanted.get("affected", [])}, step
                assert all(cache.remove(pair) for pair in due)
            case "count":
                assert len(cache.scopes_by_name) == wanted["names"], step
                assert len(cache) == wanted["name_ip_pairs"], step
            case other:
                assert other in {"force_expire", "save_and_load", "d_gc"}, "a step nobody knows"


# --- name manager ----------------------------------------------------------------------------------------------------------


def fqdn_of(selector: dict[str, str] | str) -> Fqdn:
    text = selector if isinstance(selector, str) else selector.get("matchName") or selector["matchPattern"]
    return Fqdn(normalise_pattern(text))


def bags_of(world: World) -> dict[Fqdn, set[str]]:
    return {
        peer: {text_of(address) for address in selector.bags.get(SCOPE_SHARED, ())}
        for peer, selector in world.engine.names.selectors.items()
    }


@cases_of("namemanager")
def test_name_manager(case: dict[str, Any]) -> None:
    """Bags of selectors, labels of addresses, and what a step changes."""
    world = World()
    world.start()
    names = world.engine.names
    if case["group"] == "identity":
        judge_identities(world, case)
        return
    for step in case["steps"]:
        before = bags_of(world)
        match step["op"]:
            case "select":
                names.register(fqdn_of(step["selector"]))
            case "unselect":
                # The peer's manager does not count its selectors' users; its selector cache does, so the last one ends it.
                peer = fqdn_of(step["selector"])
                while peer in names.selectors:
                    names.unregister(peer)
            case "dns":
                records = [(packed(text), step["ttl"]) for text in step["ips"]]
                names.learn(normalise_name(step["name"]), records, SCOPE_SHARED, world.now + step["t"])
            case "dns_bulk":
                first = int(ip_address(step["first_ip"]))
                for i in range(step["count"]):
                    name, address = step["name_template"].format(i=i), ip_address(first + i).packed
                    names.learn(name, [(address, step["ttl"])], SCOPE_SHARED, world.now)
            case "gc" | "conntrack_pass":
                return  # see FLOWS; the steps before are judged
        judge_selected(world, step.get("expect", {}))
        if "notify" in step:
            judge_change(before, bags_of(world), step["notify"])
    for text, count in case.get("expect_count", {}).items():
        assert len(bags_of(world)[fqdn_of(text)]) == count


def judge_selected(world: World, wanted: dict[str, Any]) -> None:
    bags = bags_of(world)
    for text, addresses in wanted.get("selected", {}).items():
        assert bags[fqdn_of(text)] == set(addresses)
    if "labels" in wanted:
        selectors_by_address: dict[str, set[Fqdn]] = {}
        for peer, addresses in bags.items():
            for address in addresses:
                selectors_by_address.setdefault(address, set()).add(peer)
        assert selectors_by_address == {
            address: {fqdn_of(text) for text in texts} for address, texts in wanted["labels"].items()
        }


def judge_change(before: dict[Fqdn, set[str]], after: dict[Fqdn, set[str]], wanted: Any) -> None:
    told = [] if wanted is None else wanted if isinstance(wanted, list) else [wanted]
    changes = {
        peer: (after[peer] - before.get(peer, set()), before.get(peer, set()) - after[peer])
        for peer in after
        if after[peer] != before.get(peer, set())
    }
    assert changes == {fqdn_of(one["selector"]): (set(one["added"]), set(one["removed"])) for one in told}


def judge_identities(world: World, case: dict[str, Any]) -> None:
    prefixes = [Prefix.parse(text) for text in case.get("static_prefixes", ())]
    for prefix in prefixes:
        world.engine.ipcache.upsert(IpcacheKey(SCOPE_STATIC, prefix), "policy", frozenset({f"cidr:{prefix}"}))
    for selector in case["selectors"]:
        world.engine.names.register(fqdn_of(selector))
    for answer in case["answers"]:
        records = [(packed(text), 60) for text in answer["ips"]]
        world.engine.names.learn(normalise_name(answer["name"]), records, SCOPE_SHARED, world.now)
    rows = world.engine.reconciler.ipcache.desired
    groups: dict[object, set[str]] = {}
    for key, row in rows.items():
        assert isinstance(key, IpcacheKey)
        if key.scope == SCOPE_SHARED or key.prefix in prefixes:
            groups.setdefault(row.value, set()).add(str(key.prefix).removesuffix("/32").removesuffix("/128"))
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, case["expect"]["groups"]))


# --- selector cache ----------------------------------------------------------------------------------------------------------


def labels_of(texts: list[str]) -> LabelSet:
    labels = set()
    for text in texts:
        source, _, rest = text.partition(":")
        if source == "reserved":
            labels.add("reserved:" + rest.removesuffix("-ipv4").removesuffix("-ipv6"))
        elif source == "fqdn":
            labels.add(Fqdn(normalise_pattern(rest)).label)
        else:
            labels.add(f"endpoint:{rest}" if source == "k8s" else text)
    return frozenset(labels)


def labels_of_endpoint(texts: list[str]) -> LabelSet:
    """The same; what is not the world, the host, a network or a name is an endpoint."""
    labels = labels_of(texts)
    is_endpoint = not any(label.startswith(("reserved:", "cidr:", "fqdn:")) for label in labels)
    return labels | {LABEL_ENDPOINT} if is_endpoint else labels


def selector_of(selector: dict[str, Any]) -> Peer:
    if "cidr" in selector:
        return Cidr(Prefix.parse(selector["cidr"]))
    if "fqdn" in selector:
        return Fqdn(normalise_pattern(selector["fqdn"]))
    if "entity" in selector:
        return Entity(selector["entity"])
    if "expr" in selector:
        of = [(one["key"], Operator(one["operator"]), frozenset(one.get("values", ()))) for one in selector["expr"]]
    else:
        of = [(key, Operator.IN, frozenset({value})) for key, value in selector["labels"].items()]
    return Endpoints(LabelSelector(tuple(Expression(key.removeprefix("k8s:"), how, values) for key, how, values in of)))


@cases_of("selectorcache")
def test_selector_cache(case: dict[str, Any]) -> None:
    """Who is selected after each step, however identities and users come and go."""
    cache = SelectorCache()
    users: dict[str, int] = {}
    known: set[int] = set()
    for step in case["steps"]:
        match step["op"]:
            case "identities":
                for text in step.get("add", {}):
                    known.add(int(text))
                    cache.add_identity(int(text), labels_of_endpoint(step["add"][text]))
                for number in known & set(step.get("remove", ())):
                    known.discard(number)
                    cache.remove_identity(number)
            case "add":
                cache.add_user(selector_of(step["selector"]), users.setdefault(step["user"], len(users) + 1))
            case "drop":
                user, selector = users[step["user"]], selector_of(step["selector"])
                if user in cache.users_by_selector.get(selector, ()):  # a set lets go once; the peer's users may twice
                    cache.remove_user(selector, user)
            case other:
                assert other == "fqdn_ips", "a step nobody knows"
        wanted = step.get("expect", {})
        for one in wanted.get("selects", ()):
            assert sorted(cache.identities_by_selector[selector_of(one["selector"])]) == one["identities"], one
        if "cached" in wanted:
            assert len(cache.users_by_selector) == wanted["cached"]


# --- ipcache -----------------------------------------------------------------------------------------------------------------


@cases_of("ipcache")
def test_ipcache(case: dict[str, Any]) -> None:
    """Prefixes have one spelling; an address has the labels of its names and of the closest named prefix."""
    if case["group"] in {"canonical", "label-of-ip"}:
        wanted = case["expect"].get("prefix")
        if wanted is None:
            with pytest.raises(ValueError):
                Prefix.parse(case["input"])
        else:
            assert Prefix.parse(case["input"]) == Prefix.parse(wanted)
    elif case["group"] == "contains":
        assert Prefix.parse(case["parent"]).contains(Prefix.parse(case["child"])) == case["expect"]["contains"]
    elif case["group"] == "longest-prefix":
        judge_longest_prefix(case)
    else:
        judge_labels(case)


def judge_longest_prefix(case: dict[str, Any]) -> None:
    kernel, numbers = FakeKernel(), {"world4": 2, "world6": 2}
    rows = kernel.rows[Table.IPCACHE]
    for text, name in case.get("entries", {}).items():
        rows[IpcacheKey(SCOPE_STATIC, Prefix.parse(text))] = numbers.setdefault(name, 100 + len(numbers))
    for probe in case.get("lookups", ()):
        wanted = numbers[probe["identity"]] if probe["identity"] is not None else 2
        assert kernel.identity_of(SCOPE_SHARED, packed(probe["ip"])) == wanted, probe


def judge_labels(case: dict[str, Any]) -> None:
    metadata = Metadata()
    for step in case["steps"]:
        labels = labels_of(step.get("labels", []))
        prefix = Prefix.parse(step["prefix"])
        is_learned = any(label.startswith("fqdn:") for label in labels) or step["resource"].startswith("dns")
        key = IpcacheKey(SCOPE_SHARED if is_learned else SCOPE_STATIC, prefix)
        if step["op"] == "upsert":
            given = labels - {LABEL_WORLD} or frozenset({f"cidr:{prefix}"})
            metadata.upsert(key, step["resource"], given)
        else:
            metadata.remove(key, step["resource"])
        for text, wanted in step.get("expect", {}).get("prefixes", {}).items():
            rows = [IpcacheKey(scope, Prefix.parse(text)) for scope in (SCOPE_SHARED, SCOPE_STATIC)]
            seen = next((s for row in rows if (s := metadata.label_set(row)) is not None), None)
            assert seen == (None if wanted is None else labels_of(wanted["labels"])), (step, text)
