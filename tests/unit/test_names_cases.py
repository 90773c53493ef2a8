"""The peers' cases about names and patterns (`tests/cases/matchpattern.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dns.name
import pytest

from agent.core.names import EVERY_NAME, NamePattern, PatternIndex, from_wire, normalise_name, normalise_pattern
from agent.policy.files import read_policy_text

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "cases/matchpattern.json").read_text())["cases"]

ONE_SPELLING = "one meaning has one spelling here, so that it is one selector and one identity (decision 3)"
IDN = "internationalised names are taken and become A-labels (decision 3)"
ADDRESS = "an address in the place of a name is refused and a CIDR suggested (decision 3)"

# Cases where our value is another one, and why.
DEVIATIONS = {
    "mp-0241": "a label is never empty, so a star alone takes at least one character",
    "mp-0458": ADDRESS,
    "mp-0538": IDN,
    "mp-0539": IDN,
    "mp-0545": IDN,
    "mp-0546": IDN,
    "mp-0589": IDN,
    "mp-0590": IDN,
    "mp-0604": ONE_SPELLING,
    "mp-0607": ONE_SPELLING,
    "mp-0608": ONE_SPELLING,
}


def spelled(field: str, text: str) -> str:
    """As a policy would have it, whether the case gives the text raw or as written."""
    return normalise_name(text) if field == "matchName" else normalise_pattern(text)


def name_of(case: dict[str, Any]) -> str:
    name = str(case["name"])
    return dns.name.from_text(name).canonicalize().to_text() if case["level"] == "api" else name


def document_of(case: dict[str, Any]) -> str:
    entry = {key: case[key] for key in ("matchName", "matchPattern") if key in case} or {case["field"]: case["pattern"]}
    rule: dict[str, Any] = {"toFQDNs": [entry]}
    if case["context"] == "rules.dns":
        rule = {"toPorts": [{"ports": [{"port": "53", "protocol": "ANY"}], "rules": {"dns": [entry]}}]}
    return json.dumps(
        {
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNetworkPolicy",
            "metadata": {"name": "p"},
            "spec": {"endpointSelector": {}, "egress": [rule]},
        }
    )


def ours(case: dict[str, Any]) -> tuple[object, object]:
    """What we say, and what the case says."""
    match case["op"]:
        case "match":
            pattern = NamePattern(spelled(case["field"], case["pattern"]))
            name = name_of(case)
            said = pattern.matches_question(name) if case.get("context") == "rules.dns" else pattern.matches(name)
            return said, case["matches"]
        case "match_any":
            index: PatternIndex[int] = PatternIndex()
            for place, rule in enumerate(case["rules"]):
                ((field, text),) = rule.items()
                index.add(spelled(field, text), place)
            return not case["rules"] or bool(index.matching_question(case["name"])), case["matches"]
        case "validate" | "validate_pair":
            return not read_policy_text("p.yaml", document_of(case).encode()).mistakes, case["valid"]
        case "canonical" if case["field"] == "name":
            wire = dns.name.from_text(case["pattern"]).canonicalize().to_wire()
            assert wire is not None
            return from_wire(wire), case["canonical"]
        case "canonical":
            return spelled(case["field"], case["pattern"]), case["canonical"]
        case "same_selector":
            return spelled(case["field"], case["a"]) == spelled(case["field"], case["b"]), case["same"]
        case "same_rule_set":
            a, b = ({spelled(*item) for rule in case[side] for item in rule.items()} for side in "ab")
            return (a == b), case["same"]
    raise AssertionError(f"no such op: {case['op']}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    """Every case holds, or stands in DEVIATIONS and really differs."""
    said, expected = ours(case)
    if case["id"] in DEVIATIONS:
        assert said != expected, f"{case['id']} is no deviation any more"
    else:
        assert said == expected


def test_spellings_of_every_name() -> None:
    """What the deviating canonical cases mean instead."""
    assert {normalise_pattern(text) for text in ("*", "*.", "**", "***", "**.")} == {EVERY_NAME}
