"""Measures contestants side by side, so that a figure can be believed on a machine that does other things as well.

Rule 1: contestants of a race take turns, round by round, in an order that moves: what disturbs one disturbs its rivals too.
Rule 2: a figure stands beside that of a floor or a peer from the same round; only their ratio may be compared between machines.
Rule 3: the median is given with the smallest and the largest round. A range that is wide says that the run is worth little.
Rule 4: time is CPU time, this process's unless the race has a clock of its own, the kernel's work for it included: waiting for
a busy core is nobody's cost.
Rule 5: a race first lets its contestants show that they do the same work (the bench's own assertion), then measures.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median

# Long enough that reading the clock is nothing beside it, short enough that many rounds fit between two disturbances.
ROUND_NS = 20_000_000
# A median of fewer rounds is no ground to call a bound passed.
ROUNDS_JUDGED_MIN = 9
TRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class Contestant:
    """name: as in the table. run: does the work that many times. prepare: what has to be there for so many; not measured."""

    name: str
    run: Callable[[int], None]
    prepare: Callable[[int], object] = lambda count: None


@dataclass(frozen=True, slots=True)
class Race:
    """reference: the contestant (floor or peer) that the others are divided by. ratio_max: what that may be at most.

    clock: what the work costs, in nanoseconds so far; the work may be another process's, or the kernel's. round_ns: how much of
    it makes a round.
    """

    title: str
    reference: str
    contestants: Sequence[Contestant]
    ratio_max: float | None = None
    clock: Callable[[], int] = time.process_time_ns
    round_ns: int = ROUND_NS


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured by itself, not raced. value_max: what it may be at most."""

    title: str
    value: float
    unit: str
    value_max: float | None = None

    @property
    def is_over(self) -> bool:
        return self.value_max is not None and self.value > self.value_max


@dataclass(frozen=True, slots=True)
class Bench:
    """races: opens what the bench needs, gives its races and figures, closes it again. is_long: minutes, not seconds."""

    name: str
    question: str
    races: Callable[[], AbstractContextManager[Iterable[Race | Figure]]]
    needs_root: bool = False
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    @property
    def text(self) -> str:
        return f"({self.smallest:.3f} to {self.largest:.3f})"


@dataclass(frozen=True, slots=True)
class Standing:
    """One contestant's line: nanoseconds of one piece of work, and how many times the reference's that is, round by round.

    interval: where the ratio's median is, at 95 %; None from too few rounds to say.
    """

    name: str
    ns: Spread
    ratio: Spread
    is_reference: bool
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    title: str
    rounds: int
    standings: tuple[Standing, ...]
    ratio_max: float | None = None

    @property
    def is_over(self) -> bool:
        """By a median that is over the bound and can be told from no difference at all."""
        return self.ratio_max is not None and any(
            standing.ratio.median > self.ratio_max and (standing.interval is None or standing.interval[0] > 1)
            for standing in self.standings
        )


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the median is, at 95 % or a little more, whatever the distribution: by the binomial of how many lie below it."""
    ordered, below, outside = sorted(values), 0, 0.0
    while 2 * (outside := outside + comb(len(ordered), below) / 2 ** len(ordered)) <= 0.05:
        below += 1
    return (ordered[below - 1], ordered[-below]) if below else None


def measure(race: Race, rounds: int) -> Result:
    """Run the race."""
    clock = race.clock
    counts = {contestant.name: _count_for_a_round(contestant, race) for contestant in race.contestants}
    ns_by_name: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(rounds):
        start = turn % len(race.contestants)
        for contestant in [*race.contestants[start:], *race.contestants[:start]]:
            count = counts[contestant.name]
            contestant.prepare(count)
            with _no_collector():
                began = clock()
                contestant.run(count)
                ended = clock()
            ns_by_name[contestant.name].append((ended - began) / count)
    reference = ns_by_name[race.reference]
    ratios = {name: [mine / theirs for mine, theirs in zip(ns, reference, strict=True)] for name, ns in ns_by_name.items()}
    standings = tuple(
        Standing(name, Spread.of(ns), Spread.of(ratios[name]), name == race.reference, interval_of_median(ratios[name]))
        for name, ns in ns_by_name.items()
    )
    return Result(race.title, rounds, standings, race.ratio_max)


def judge(race: Race, rounds: int) -> Result:
    """Run the race, and again if a bound is passed: a busy machine must not condemn, and what grows does so every time."""
    for _ in range(TRIES_MAX - 1):
        result = measure(race, rounds)
        if not result.is_over:
            return result
    return measure(race, rounds)


def _count_for_a_round(contestant: Contestant, race: Race) -> int:
    """How often the work fits into a round; this is also the warm-up."""
    clock, count = race.clock, 1
    while True:
        contestant.prepare(count)
        began = clock()
        contestant.run(count)
        spent = clock() - began
        if spent >= race.round_ns // 4:
            return max(1, count * race.round_ns // spent)
        count *= 4


@contextmanager
def _no_collector() -> Iterator[None]:
    """A pass of the collector would fall on whoever happens to run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def machine() -> dict[str, object]:
    """Where the figures were taken: a figure without its machine says nothing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def as_text(result: Result) -> str:
    """A table of 80 columns: nanoseconds and ratio, each as median (smallest to largest)."""
    bound = f", bound {result.ratio_max:g}" if result.ratio_max is not None else ""
    lines = [f"{result.title}  ({result.rounds} rounds{bound})", f"  {'':<20}{'ns':>9} {'(range)':<24}{'ratio':>7} (range)"]
    for s in result.standings:
        spread = f"({s.ns.smallest:,.0f} to {s.ns.largest:,.0f})"
        ratio = "reference" if s.is_reference else f"{s.ratio.median:7.3f} {s.ratio.text}"
        lines.append(f"  {s.name:<20}{s.ns.median:>9,.0f} {spread:<24}{ratio:>9}")
        if s.interval is not None and not s.is_reference and result.ratio_max is not None:
            lines.append(f"  {'':<20}its median is between {s.interval[0]:.3f} and {s.interval[1]:.3f} at 95 %")
    return "\n".join(lines)


def figure_text(figure: Figure) -> str:
    bound = f"  (bound {figure.value_max:,g})" if figure.value_max is not None else ""
    return f"{figure.title}: {figure.value:,.1f} {figure.unit}{bound}"
