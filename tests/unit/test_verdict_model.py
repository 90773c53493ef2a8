"""The verdict in plain Python, by the numbered list."""

from __future__ import annotations

import pytest

from agent.core.types import Direction
from agent.datapath.abi import Reason
from agent.datapath.model import parse
from tests.families import TABLE
from tests.judges import IFINDEX, ModelJudge
from tests.packets import CLIENT, PEER, TCP, frame, tcp
from tests.verdict_cases import ALLOW, BASE, Case, rule, tell


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    """Each case's promise holds for the model."""
    tell(ModelJudge(), case)


def test_explain_changes_nothing() -> None:
    """A packet that is only thought of gets the verdict a real one would, and leaves no flow."""
    judge = ModelJudge()
    judge.apply([*BASE, rule(ALLOW, cookie=9)])
    thought = parse(frame(CLIENT, PEER, TCP, tcp(40000, 443)))
    judgement = judge.model.explain(IFINDEX, Direction.EGRESS, thought, judge.now)
    assert (judgement.reason, judgement.cookie, judgement.passes) == (Reason.PASS_POLICY, 9, True)
    assert not judge.flows()
