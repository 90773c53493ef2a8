"""The verdict in plain Python, by the numbered list."""

from __future__ import annotations

import pytest

from agent.core.types import Direction, Prefix, packed
from agent.datapath.abi import Reason
from agent.datapath.model import parse
from tests import datapath_cases
from tests.judges import IFINDEX, ModelJudge
from tests.packets import CLIENT, PEER, TCP, frame, tcp
from tests.verdict_cases import ALLOW, BASE, CASES, MOVED, Case, holds, rule, tell


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    """Each case's promise holds for the model."""
    tell(ModelJudge(), case)


@pytest.mark.parametrize("case", datapath_cases.cases(with_packets=True), ids=lambda case: case["id"])
def test_peer_case(case: datapath_cases.Case) -> None:
    """What a peer's tests assert holds here too, or is a deviation with a reason."""
    datapath_cases.play(ModelJudge(), case)


def test_deviations_are_of_cases() -> None:
    """No deviation outlives its case."""
    places = {(case["id"], step) for case in datapath_cases.cases(with_packets=True) for step in range(len(case["steps"]))}
    assert set(datapath_cases.DEVIATIONS) <= places


@pytest.mark.parametrize(
    "case", [case for case in datapath_cases.cases(with_packets=False) if case["group"] == "mask"], ids=lambda case: case["id"]
)
def test_mask(case: datapath_cases.Case) -> None:
    """A prefix keeps its first bits and no other."""
    assert Prefix.masked(packed(case["address"]), case["length"]).address == packed(case["expect"]["prefix"])


@pytest.mark.parametrize("is_policy_first", [True, False])
def test_order_of_rows(is_policy_first: bool) -> None:
    """fp-0096: an address takes up a new identity without a dropped packet only when the identity's rows are there first."""
    judge = ModelJudge()
    judge.apply([*BASE, rule(ALLOW)])
    writes = [rule(ALLOW, MOVED), holds(PEER, MOVED)]
    judge.apply([writes[0 if is_policy_first else 1]])
    between = judge.judge(Direction.EGRESS, frame(CLIENT, PEER, TCP, tcp(40000, 443)))
    assert between is (Reason.PASS_POLICY if is_policy_first else Reason.DROP_POLICY)


def test_explain_changes_nothing() -> None:
    """A packet that is only thought of gets the verdict a real one would, and leaves no flow."""
    judge = ModelJudge()
    judge.apply([*BASE, rule(ALLOW, cookie=9)])
    thought = parse(frame(CLIENT, PEER, TCP, tcp(40000, 443)))
    judgement = judge.model.explain(IFINDEX, Direction.EGRESS, thought, judge.now)
    assert (judgement.reason, judgement.cookie, judgement.passes) == (Reason.PASS_POLICY, 9, True)
    assert not judge.flows()
