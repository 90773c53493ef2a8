"""The runner of the peers' cases, and every case it can judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import dnsproxy
from tests.cases.__main__ import main
from tests.cases.runner import (
    DIRECTORY,
    FILES,
    LEFT_OPEN,
    DecisionClass,
    Fields,
    Outcome,
    Tally,
    judge_case,
    read_cases,
    read_decisions,
    run_file,
)

DECISIONS = read_decisions()


def fields(value: Any) -> Any:
    """Objects as the runner reads them."""
    return json.loads(json.dumps(value), object_hook=Fields)


def first_case(file: str, group: str) -> Fields:
    return next(case for case in read_cases(DIRECTORY / f"{file}.json") if case["group"] == group)


@pytest.fixture(scope="module")
def tallies() -> Iterator[dict[str, Tally]]:
    with dnsproxy.over_sockets():
        yield {file: run_file(DIRECTORY / f"{file}.json", DECISIONS) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_every_case_passes_or_stands_on_a_decision(file: str, tallies: dict[str, Tally]) -> None:
    """Nothing fails, and what does not apply is about a feature or a profile that is not built, or needs root."""
    tally = tallies[file]
    assert not tally.count(Outcome.FAILED), "\n".join(tally.lines())
    assert sum(tally.count(outcome) for outcome in Outcome) == tally.cases
    not_applying = [
        case
        for case, verdict in tally.verdicts
        if verdict.outcome is Outcome.DOES_NOT_APPLY and verdict.why not in {dnsproxy.SHELLS, dnsproxy.NOT_SAVED}
    ]
    assert all("requires" in case or case.get("profile") in {"cluster", "endpoints"} for case in not_applying)


@pytest.mark.parametrize("file", FILES)
def test_no_class_is_an_excuse(file: str, tallies: dict[str, Tally]) -> None:
    """At most 5 % of a file stand on one class."""
    assert not tallies[file].classes_too_wide()


def test_every_class_is_needed(tallies: dict[str, Tally]) -> None:
    """A class of which no case here speaks would be a guess."""
    used = " ".join(why for tally in tallies.values() for why in tally.reasons(Outcome.DECISION))
    unseen = [case for case, verdict in tallies["dnsproxy"].verdicts if verdict.why == dnsproxy.SHELLS]
    assert [
        each.name
        for each in DECISIONS
        if each.name not in used and not any(each.speaks_of("dnsproxy", case) for case in unseen)
    ] == []


def test_a_case_that_says_something_else_fails() -> None:
    """Every judge can say no: the first case of each file that passes is turned around."""
    turns: tuple[tuple[str, str, Callable[[Fields], None]], ...] = (
        ("matchpattern", "anchored", lambda case: case.update(matches=not case["matches"])),
        ("dnscache", "ttl", lambda case: case["steps"][-1]["expect"].update(ips=["192.0.2.99"])),
        ("namemanager", "sets", lambda case: case["steps"][-1]["expect"]["selected"].update({"cilium.io": []})),
        ("ipcache", "contains", lambda case: case["expect"].update(contains=not case["expect"]["contains"])),
        ("selectorcache", "empty", lambda case: case["steps"][0]["expect"]["selects"][0].update(identities=[7])),
        ("policy", "accept", lambda case: case.update(accept=not case["accept"])),
        ("datapath", "conntrack", lambda case: case["steps"][0]["expect"].update(verdict="to-proxy")),
        ("wire", "basic", lambda case: case["expect"].update(must_learn=["192.0.2.99"])),
    )
    for file, group, turn in turns:
        case = first_case(file, group)
        assert judge_case(file, case, DECISIONS).outcome is Outcome.PASSED
        turn(case)
        assert judge_case(file, case, DECISIONS).outcome is Outcome.FAILED, file


@pytest.mark.root
@pytest.mark.usefixtures("tallies")
@pytest.mark.parametrize(
    ("title", "change"),
    [
        ("client identifier 4660 is restored", {"id": "0x4321"}),
        ("client identifier 1 is restored", {"rcode": "NXDOMAIN"}),
        ("upstream reply with a foreign identifier is not delivered", {"delivered": True}),
        ("TCP message arrives in small pieces, length prefix split", {"rcode": "SERVFAIL"}),
        ("TCP connection opened and closed without a message: no effect, no crash", {"alive_after": False}),
        ("original server of a redirected query cannot be found", {"answers": ["cilium.io. 60 IN A 1.1.1.1"]}),
    ],
)
def test_a_case_over_sockets_that_says_something_else_fails(title: str, change: dict[str, Any]) -> None:
    """The running agent is judged, too."""
    case = next(case for case in read_cases(DIRECTORY / "dnsproxy.json") if case.get("title") == title)
    case["expect"] = Fields(case["expect"], **change)
    assert judge_case("dnsproxy", case, DECISIONS).outcome is Outcome.FAILED


def test_our_value_must_hold() -> None:
    """A class covers what it promises and nothing else: another answer of ours is a failure though the predicate holds."""
    case = next(case for case in read_cases(DIRECTORY / "matchpattern.json") if case.get("pattern") == "bücher.example")
    idn = next(each for each in DECISIONS if "internationalised" in each.name)
    assert judge_case("matchpattern", case, [idn]).outcome is Outcome.DECISION
    for ours in ({"accepted": "false"}, {"elsewhere": "true"}):
        other = DecisionClass(idn.name, idn.decision, idn.file, idn.when, ours)
        assert judge_case("matchpattern", case, [other]).outcome is Outcome.FAILED


def test_a_class_speaks_of_cases_by_what_they_say() -> None:
    """Another number, another spelling: the same class."""
    case = first_case("matchpattern", "idn") | {"op": "validate", "context": "toFQDNs", "field": "matchName", "valid": False}
    case = fields({"id": "mp-9999", **{k: v for k, v in case.items() if k not in {"id", "level", "name", "matches"}}})
    case["pattern"] = "straße.example"
    assert "internationalised" in judge_case("matchpattern", case, DECISIONS).why


def test_what_the_case_leaves_open_never_fails() -> None:
    """`policy_choice`: counted as a decision; of a profile that is not built: does not apply."""
    case = first_case("ipcache", "contains")
    case["expect"]["contains"] = not case["expect"]["contains"]
    case["policy_choice"] = True
    verdict = judge_case("ipcache", case, [])
    assert (verdict.outcome, verdict.why) == (Outcome.DECISION, LEFT_OPEN)
    del case["policy_choice"]
    assert judge_case("ipcache", case, []).outcome is Outcome.FAILED
    assert judge_case("ipcache", Fields(case, profile="cluster"), []).outcome is Outcome.DOES_NOT_APPLY


@pytest.mark.parametrize(
    ("file", "group", "change"),
    [
        ("dnscache", "ttl", {"steps": [{"op": "defragment"}]}),
        ("dnscache", "ttl", {"config": {"max_age": 3}}),
        ("dnscache", "ttl", {"steps": [{"op": "lookup", "t": 1, "expect": {"ips": []}}]}),
        ("namemanager", "sets", {"steps": [{"op": "merge"}]}),
        ("namemanager", "sets", {"steps": [{"op": "select", "selector": {"matchRegex": "a"}}]}),
        ("selectorcache", "entity", {"steps": [{"op": "add", "user": "u", "selector": {"entity": "ingress"}}]}),
        ("ipcache", "cidr", {"steps": [{"op": "swap", "prefix": "192.0.2.0/24", "resource": "p"}]}),
        ("matchpattern", "anchored", {"op": "rewrite"}),
        ("matchpattern", "anchored", {"requires": "regular-expressions"}),
        ("policy", "prefix-entries", {"entries": [{"prefix": "any", "proto": "GRE", "port": 1, "action": "allow"}]}),
        ("policy", "verdict", {"weather": "fine"}),
        ("datapath", "conntrack", {"steps": [{"op": "reboot", "t": 1}]}),
        ("datapath", "conntrack", {"enforced": ["sideways"]}),
    ],
)
def test_an_unknown_form_does_not_apply(file: str, group: str, change: dict[str, Any]) -> None:
    """A step, a field or a value of another edition is named and skipped, never half understood and never a crash."""
    verdict = judge_case(file, Fields(first_case(file, group), **fields(change)), DECISIONS)
    assert verdict.outcome is Outcome.DOES_NOT_APPLY
    assert "un" in verdict.why or "not built" in verdict.why


def test_a_document_that_needs_what_is_not_built_has_to_be_refused() -> None:
    """Taken, it would have been ignored in part: that is a failure."""
    case = next(case for case in read_cases(DIRECTORY / "policy.json") if case.get("requires") == "http-l7")
    assert judge_case("policy", case, DECISIONS).outcome is Outcome.DOES_NOT_APPLY
    taken = next(
        each
        for each in read_cases(DIRECTORY / "policy.json")
        if each["group"] == "accept" and each["accept"] and "requires" not in each
    )
    case["document"] = taken["document"]
    assert judge_case("policy", case, DECISIONS).outcome is Outcome.FAILED


def write_cases(path: Path, *cases: Fields) -> None:
    path.write_text(json.dumps({"format": {}, "count": len(cases), "cases": cases}))


def test_the_command_counts_and_says_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each file, the failed cases named; exit code 1 if any failed, 2 where there is nothing to run."""
    case = first_case("matchpattern", "anchored")
    write_cases(tmp_path / "matchpattern.json", case)
    write_cases(tmp_path / "somebody.json", case)
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "matchpattern: 1 cases: 1 passed, 0 failed, 0 do not apply, 0 stand on a decision" in output
    assert "1 do not apply: no judge for a file of this name" in output
    case["matches"] = not case["matches"]
    write_cases(tmp_path / "matchpattern.json", case)
    assert main([str(tmp_path)]) == 1
    assert f"FAILED {case['id']}" in capsys.readouterr().out
    (tmp_path / "matchpattern.json").write_text("[1]")
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
