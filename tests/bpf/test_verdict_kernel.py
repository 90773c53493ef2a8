"""The verdict in the kernel, by BPF_PROG_TEST_RUN: the cases, and random histories beside the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from agent.core.types import Write
from tests import datapath_cases
from tests.histories import Step, compare, histories
from tests.judges import KernelJudge, ModelJudge
from tests.verdict_cases import CASES, Case, tell

pytestmark = pytest.mark.root

# A test run refuses an IP frame without a whole IP header; the native build takes those.
_RUN_MIN = 54
_PEER_CASES = [case for case in datapath_cases.cases(with_packets=True) if case["id"] != "fp-0066"]


@pytest.fixture(scope="module")
def loaded() -> Iterator[KernelJudge]:
    judge = KernelJudge()
    yield judge
    judge.close()


@pytest.fixture
def kernel(loaded: KernelJudge) -> KernelJudge:
    loaded.reset()
    return loaded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(kernel: KernelJudge, case: Case) -> None:
    """Each case's promise holds for the loaded program."""
    tell(kernel, case)


@pytest.mark.parametrize("case", _PEER_CASES, ids=lambda case: case["id"])
def test_peer_case(kernel: KernelJudge, case: datapath_cases.Case) -> None:
    """What a peer's tests assert holds here too, or is a deviation with a reason."""
    datapath_cases.play(kernel, case)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(history=histories(_RUN_MIN))
def test_same_as_model(loaded: KernelJudge, history: tuple[list[Write], list[Step]]) -> None:
    """Whatever happens in whatever order, the program and the model say the same and remember the same flows."""
    loaded.reset()
    compare(history, (ModelJudge(), loaded))
