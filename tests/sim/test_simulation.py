"""The core against random histories; what is judged stands in `simulation`.

SIM_STEPS=200000 makes a long run of it, with the histories of SIM_SEED (scripts/sim); else they are the same ones each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from agent.core.rules import Cidr, Fqdn, LabelSelector, Origin, Policy, Rule
from agent.core.types import Direction, Prefix, Table, packed
from tests.sim.simulation import histories
from tests.sim.world import allow

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


def test_a_restart_with_a_policy_that_does_not_fit_shuts_nothing() -> None:
    """The labels it had named go in slices; what they meant was never known to the sets of before, which go on judging (I5)."""
    history = histories()()
    address = packed("10.0.1.1")
    peers = Fqdn("a.example."), Cidr(Prefix.parse("10.0.0.0/8"))
    rule = Rule(Direction.EGRESS, peers, None, origin=Origin("p", 1))
    wider = Policy("p", LabelSelector(), (rule,), default_deny_egress=True, default_deny_ingress=False)
    history.start(policies=[allow("*.example.")], identities_max=12, addresses_max=2, in_slices=True)
    history.time_goes_by(seconds=0.01)
    history.resolve_step_by_step(bursts=[(1, "a.example.", address, address)], writes=1)
    history.process_dies(policies=(wider,), cut=0)
    history.table_fills(table=Table.IPCACHE, room=0)
    history.resolve_step_by_step(bursts=[(1, "a.example.", address, address)], writes=1)
    history.teardown()


def test_who_brings_policies_that_do_not_fit_changes_nothing() -> None:
    """An endpoint waits unjudged while there is no room for its own policies; when it goes, nothing is left of them."""
    history = histories()()
    history.start(policies=[], identities_max=12, addresses_max=1_000, in_slices=False)
    history.endpoint_comes(number=3, own=(allow(*(f"10.0.{number}.0/24" for number in range(12))),))
    history.teardown()
    assert history.world.attached.keys() == {1, 2}


def test_who_is_answered_twice_at_one_moment_goes_once() -> None:
    """Two addresses have to go for two that come: never one of them twice, and the other stays beyond the bound (I9)."""
    history = histories()()
    old, new = (packed("10.0.1.1"), packed("10.0.2.1")), (packed("198.51.100.7"), packed("192.0.2.12"))
    history.start(policies=[allow("*.example.")], identities_max=16_384, addresses_max=2, in_slices=False)
    for addresses in (old, new, old):
        history.resolve(bursts=[(1, "b.example.", *addresses)])
    history.teardown()
