"""The core against random histories; what is judged stands in `simulation`.

SIM_EXAMPLES=20000 makes a long run of it (scripts/sim); then the histories are new ones each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.simulation import histories

EXAMPLES = int(os.environ.get("SIM_EXAMPLES", "0"))


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_invariants_hold_in_every_history() -> None:
    """I1 to I6 hold after every step, and nothing is left over at rest."""
    profile = settings(
        max_examples=EXAMPLES or 120,
        stateful_step_count=60 if EXAMPLES else 50,
        derandomize=not EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(histories(), settings=profile)
