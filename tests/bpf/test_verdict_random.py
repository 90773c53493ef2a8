"""Packets and policies made at random, the program in the kernel beside the model; `scripts/sim --packets` makes more."""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from agent.core.types import Write
from agent.datapath.abi import Reason
from tests.histories import Step, compare, histories
from tests.judges import KernelJudge, ModelJudge

pytestmark = pytest.mark.root

_PACKETS: Final = int(os.environ.get("PACKETS", "3000"))
_PACKETS_OF_A_HISTORY: Final = 40
_RUN_MIN: Final = 54


@pytest.mark.timeout(60 + _PACKETS // 50)
def test_kernel_and_model() -> None:
    """They say the same of every packet and remember the same flows; and what is compared is no heap of refusals."""
    kernel = KernelJudge()
    counted: Counter[Reason] = Counter()

    @settings(
        max_examples=-(-_PACKETS // _PACKETS_OF_A_HISTORY),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a shorter history that fails is for test_same_as_model to find
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(history=histories(_RUN_MIN, _PACKETS_OF_A_HISTORY))
    def one_history(history: tuple[list[Write], list[Step]]) -> None:
        kernel.reset()
        counted.update(compare(history, (ModelJudge(), kernel)))

    try:
        one_history()
    finally:
        kernel.close()
    allowed = sum(number for reason, number in counted.items() if not reason.is_drop)
    print(f"{counted.total()} packets, {allowed} allowed: {', '.join(f'{r.text} {n}' for r, n in counted.most_common())}")
    assert counted.total() >= _PACKETS
    assert allowed * 3 >= counted.total(), "hardly anything passes: nothing was compared"
