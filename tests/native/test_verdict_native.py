"""The verdict in C, built natively with sanitizers: the cases, and random histories beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from agent.core.types import Write
from tests.cases import datapath
from tests.cases.runner import Fields, Outcome
from tests.families import TABLE
from tests.histories import Step, compare, histories
from tests.judges import ModelJudge, NativeJudge, build_harness
from tests.verdict_cases import Case, tell


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_harness(tmp_path_factory.mktemp("native"))


@pytest.fixture
def native(program: Path) -> Iterator[NativeJudge]:
    judge = NativeJudge(program)
    yield judge
    judge.close()


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case(native: NativeJudge, case: Case) -> None:
    """Each case's promise holds for the C."""
    tell(native, case)


@pytest.mark.parametrize("case", datapath.cases_with_packets(), ids=lambda case: case["id"])
def test_peer_case(native: NativeJudge, case: Fields) -> None:
    """What a peer's tests assert holds here too, or stands on a decision."""
    verdict = datapath.verdict_by(native, case)
    assert verdict.outcome is not Outcome.FAILED, verdict.why


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(history=histories(14))
def test_same_as_model(program: Path, history: tuple[list[Write], list[Step]]) -> None:
    """Whatever happens in whatever order, the C and the model say the same and remember the same flows."""
    native = NativeJudge(program)
    try:
        compare(history, (ModelJudge(), native))
    finally:
        native.close()
