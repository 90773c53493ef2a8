"""What a reply and an end cost does not grow with what is known: the short form of `scripts/bench core`.

The sizes are smaller and the bounds wider than there, so that a busy machine passes; a look at everything would still be ten
times over them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.core.name_manager import PAIRS_AT_ONCE
from tests.bench.core import Core, combinations, ends, new_names, policy, some_policy
from tests.bench.harness import Contestant, Race, judge

RATIO_MAX = 2.5
ROUNDS = 5
Work = Callable[[Core], tuple[Callable[[int], None], Callable[[int], None]]]


@pytest.fixture(scope="module")
def few() -> Core:
    core = Core([some_policy(10)])
    core.know(100)
    return core


@pytest.fixture(scope="module", params=["selectors", "addresses", "endpoints"])
def many(request: pytest.FixtureRequest) -> Core:
    match request.param:
        case "selectors":
            core = Core([some_policy(2_000)])
        case "addresses":
            core = Core([some_policy(10)])
            core.know(30_000)
        case _:
            core = Core([some_policy(10)], ["a"] * 1_000)
    return core


@pytest.mark.parametrize("work", [new_names, ends])
def test_cost_does_not_grow_with_what_is_known(few: Core, many: Core, work: Work) -> None:
    """A new name, and the end of one, at some hundred times as many selectors, addresses or endpoints."""
    race = Race("x", "few", [Contestant("few", *work(few)), Contestant("many", *work(many))], RATIO_MAX)
    result = judge(race, ROUNDS)
    assert not result.is_over, result


def test_nobody_else_waits_for_a_combination_new_to_many_sets() -> None:
    """Its rows are computed a slice at a time; all at once they would take longer than the bound allows."""
    longest, asking = combinations(400, 5)
    assert longest.value < asking.value / 2


def test_nobody_waits_for_a_selector_that_many_names_match() -> None:
    """Neither when it comes nor when it goes."""
    core = Core([policy("*.wide.test.")])
    core.know(2_000)
    names = core.engine.dns_cache.scopes_by_name
    for pattern, slices_min, selectors in (("*.x.wide.test.", 0, 1), ("h*.wide.test.", 2_000 // PAIRS_AT_ONCE // 2, 2)):
        for policies, wanted in (((policy("*.wide.test.", pattern),), selectors), ((policy("*.wide.test."),), 1)):
            pauses = core.apply(policies)
            assert slices_min <= len(pauses) <= 10 + 4 * slices_min
            assert {len(core.engine.names.selectors_of(name)) for name in names} == {wanted}
