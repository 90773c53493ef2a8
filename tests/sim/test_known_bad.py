"""The simulation is known to see mistakes: each one that can be switched on is caught within a bounded number of histories.

KNOWN_BAD_SEED takes other histories (scripts/sim --known-bad).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from agent.core.known_bad import KnownBad
from tests.sim.simulation import histories

EXAMPLES_MAX = 1_000
# All seeds that were tried find everything; this one is quick at it.
SEED = int(os.environ.get("KNOWN_BAD_SEED", "4"))


@pytest.mark.parametrize("known_bad", list(KnownBad))
def test_a_known_mistake_is_caught(known_bad: KnownBad) -> None:
    """The same histories that find nothing in the core as it is find this in it."""
    profile = settings(
        max_examples=EXAMPLES_MAX,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # that it fails is enough; how it fails best is nobody's question here
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(seed(SEED)(histories({known_bad})), settings=profile)
