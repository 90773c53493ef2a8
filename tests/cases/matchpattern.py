"""Names and patterns."""

from __future__ import annotations

import json
from typing import Any, Final

import dns.name

from agent.core.names import NamePattern, PatternIndex, from_wire, normalise_name, normalise_pattern
from agent.policy.files import read_policy_text
from tests.cases.runner import DoesNotApply, Fields, Sheet

FIELDS: Final = [
    "op", "level", "context", "field", "pattern", "name", "matches", "rules", "valid", "matchName", "matchPattern",
    "canonical", "a", "b", "same",
]  # fmt: skip


def judge(case: Fields, sheet: Sheet) -> None:
    match case["op"]:
        case "match":
            pattern, name = NamePattern(_spelled(case["field"], case["pattern"])), _name_of(case)
            is_question = _context(case) == "rules.dns"
            said = pattern.matches_question(name) if is_question else pattern.matches(name)
            sheet.compare("matches", said, case["matches"])
        case "match_any":
            index: PatternIndex[int] = PatternIndex()
            for place, rule in enumerate(case["rules"]):
                index.add(_spelled(*rule.one_of("matchName", "matchPattern")), place)
            said = not case["rules"] or bool(index.matching_question(_name_of(case)))
            sheet.compare("matches", said, case["matches"])
        case "validate" | "validate_pair":
            reading = read_policy_text("p.yaml", _document_of(case).encode())
            sheet.compare("accepted", not reading.mistakes, case["valid"])
        case "canonical" if case["field"] == "name":
            wire = dns.name.from_text(case["pattern"]).canonicalize().to_wire()
            assert wire is not None
            sheet.compare("canonical", from_wire(wire), case["canonical"])
        case "canonical":
            sheet.compare("canonical", _spelled(case["field"], case["pattern"]), case["canonical"])
        case "same_selector":
            a, b = (_spelled(case["field"], case[side]) for side in "ab")
            sheet.compare("same", a == b, case["same"])
        case "same_rule_set":
            sides = [{_spelled(*rule.one_of("matchName", "matchPattern")) for rule in case[side]} for side in "ab"]
            sheet.compare("same", sides[0] == sides[1], case["same"])
        case other:
            raise DoesNotApply(f"unknown step {other}")


def _spelled(field: str, text: str) -> str:
    """As a policy would have it, whether the case gives the text raw or as written."""
    match field:
        case "matchName":
            return normalise_name(text)
        case "matchPattern":
            return normalise_pattern(text)
    raise DoesNotApply(f"unknown field of a name {field!r}")


def _context(case: Fields) -> str:
    context = case.get("context", "toFQDNs")
    if context not in {"toFQDNs", "rules.dns"}:
        raise DoesNotApply(f"unknown context {context!r}")
    return str(context)


def _name_of(case: Fields) -> str:
    """As the wire walker gives it to the core; a raw one is there already."""
    name = str(case["name"])
    return name if case.get("level") == "raw" else dns.name.from_text(name).canonicalize().to_text()


def _document_of(case: Fields) -> str:
    entry = {key: case[key] for key in ("matchName", "matchPattern") if key in case} or {case["field"]: case["pattern"]}
    rule: dict[str, Any] = {"toFQDNs": [entry]}
    if _context(case) == "rules.dns":
        rule = {"toPorts": [{"ports": [{"port": "53", "protocol": "ANY"}], "rules": {"dns": [entry]}}]}
    spec = {"endpointSelector": {}, "egress": [rule]}
    return json.dumps({"apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "p"}, "spec": spec})
