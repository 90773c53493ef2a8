"""The core against random histories; what is judged stands in `simulation`.

SIM_STEPS=200000 makes a long run of it, with the histories of SIM_SEED (scripts/sim); else they are the same ones each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.simulation import histories

STEPS = int(os.environ.get("SIM_STEPS", "0"))
SEED = int(os.environ.get("SIM_SEED", "0"))
STEPS_OF_ONE = 50


@pytest.mark.timeout(0 if STEPS else 120)
def test_invariants_hold_in_every_history() -> None:
    """I1 to I7 hold after every step, and nothing is left over at rest."""
    profile = settings(
        max_examples=max(1, STEPS // STEPS_OF_ONE) if STEPS else 60,
        stateful_step_count=STEPS_OF_ONE,
        derandomize=not STEPS,
        database=None,  # a seed says it all
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine = histories()
    run_state_machine_as_test(seed(SEED)(machine) if STEPS else machine, settings=profile)
