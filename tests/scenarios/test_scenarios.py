"""Every story, as it stands and under each expander: what may happen otherwise must not change what the user sees.

Refused writes and deaths are tried at a few places of each story; SCENARIOS=all tries every one (scripts/sim --scenarios).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.scenarios.script import EXPANDERS, Scenario, Step, read_scenario
from tests.scenarios.stage import CountingKernel, Stage

PATHS = sorted(Path(__file__).parent.glob("*.txt"))
PLACES_MAX = None if os.environ.get("SCENARIOS") == "all" else 6
# Neighbours of one kind that do not depend on each other.
INDEPENDENT = frozenset({"endpoint", "policy", "setting", "query", "packet", "reply", "fail-writes"})

each_story = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def places(count: int) -> Iterable[int]:
    """All of them, or a few spread evenly."""
    if PLACES_MAX is None or count <= PLACES_MAX:
        return range(count)
    return [place * (count - 1) // (PLACES_MAX - 1) for place in range(PLACES_MAX)]


def backwards(steps: Iterable[Step]) -> Iterator[Step]:
    """Each run of independent neighbours the other way round."""
    for _, run in itertools.groupby(steps, lambda step: step.verb if step.verb in INDEPENDENT else step.line):
        neighbours = list(run)
        is_told_apart = len({step.words[:1] for step in neighbours}) == len(neighbours) or neighbours[0].verb != "reply"
        yield from reversed(neighbours) if is_told_apart else neighbours


def read_for(path: Path, expander: str) -> Scenario:
    scenario = read_scenario(path)
    if expander in scenario.not_under:
        pytest.skip(scenario.not_under[expander])
    return scenario


def test_there_are_stories() -> None:
    """The directory was found, and no story is excused from everything."""
    assert len(PATHS) >= 40
    assert not [path.name for path in PATHS if len(read_scenario(path).not_under) == len(EXPANDERS)]


@each_story
def test_as_told(path: Path) -> None:
    scenario = read_scenario(path)
    Stage(scenario).play(scenario.setup, scenario.steps)


@each_story
def test_whatever_may_happen_twice_happens_twice(path: Path) -> None:
    """Clients repeat questions, the network repeats replies, sources and people repeat themselves."""
    scenario = read_for(path, "duplicates")
    Stage(scenario, is_doubled=True).play(scenario.setup, scenario.steps)


@each_story
def test_independent_events_the_other_way_round(path: Path) -> None:
    scenario = read_for(path, "reversed")
    Stage(scenario).play(backwards(scenario.setup), backwards(scenario.steps))


@each_story
def test_any_single_write_may_be_refused_once(path: Path) -> None:
    """The story goes on when it is tried again, nothing leaves early, and the end is the same."""
    scenario = read_for(path, "failures")
    untouched = Stage(scenario)
    untouched.play(scenario.setup, scenario.steps)
    for place in places(untouched.kernel.writes):
        Stage(scenario, kernel=CountingKernel(place + 1)).play(scenario.setup, scenario.steps)


@each_story
def test_the_agent_may_be_replaced_after_any_step(path: Path) -> None:
    """Clients ask again what nobody answered; nobody else sees a difference."""
    scenario = read_for(path, "restarts")
    for place in places(len(scenario.steps)):
        Stage(scenario, dies_after=place).play(scenario.setup, scenario.steps)
