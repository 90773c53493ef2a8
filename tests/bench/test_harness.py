"""The harness measures what it says, and every bench still opens and agrees with its reference."""

from __future__ import annotations

import pytest

from tests.bench import BENCHES
from tests.bench.harness import ROUND_NS, Bench, Contestant, Figure, Race, as_text, interval_of_median, judge, measure


class Track:
    """Contestants whose work moves the clock, by three times as much once `disturbed_from` runs have been."""

    def __init__(self, disturbed_from: int) -> None:
        self.now_ns = 0
        self.order: list[str] = []
        self.disturbed_from = disturbed_from

    def clock(self) -> int:
        return self.now_ns

    def contestant(self, name: str, cost_ns: int) -> Contestant:
        def run(count: int) -> None:
            self.now_ns += count * cost_ns * (3 if len(self.order) >= self.disturbed_from else 1)
            self.order.append(name)

        return Contestant(name, run)


def test_a_race_gives_medians_ranges_and_ratios_of_the_same_round() -> None:
    """A disturbance in the last rounds shows in the range of times and not in the ratio; the order moves."""
    # 9 and 10 runs of growing length find out how much fits into a round; then 10 of 15 rounds are calm.
    track = Track(disturbed_from=19 + 20)
    race = Race("x", "slow", [track.contestant("slow", 100), track.contestant("fast", 25)], clock=track.clock)
    result = measure(race, 15)
    slow, fast = result.standings
    assert (slow.name, slow.is_reference, slow.ratio.median) == ("slow", True, 1)
    assert (fast.ns.smallest, fast.ns.largest) == (25, 75)
    assert (fast.ratio.smallest, fast.ratio.median, fast.ratio.largest) == (0.25, 0.25, 0.25)
    rounds = track.order[-30:]
    assert rounds[:4] == ["slow", "fast", "fast", "slow"]
    assert track.now_ns > 30 * ROUND_NS * 0.9
    assert all(len(line) <= 80 for line in as_text(result).splitlines())


def test_a_bound_is_passed_by_the_median_of_every_try() -> None:
    """What is four times as dear is over a bound of three and not of five; a disturbance is forgiven by the next try."""

    def is_over(ratio_max: float, disturbed_runs: int) -> bool:
        track = Track(disturbed_from=1 << 30)

        def disturbed(count: int) -> None:
            track.now_ns += count * (900 if len(track.order) < disturbed_runs else 400)
            track.order.append("dear")

        prepared: list[int] = []
        dear = Contestant("dear", disturbed, prepared.append)
        result = judge(Race("x", "cheap", [track.contestant("cheap", 100), dear], ratio_max, track.clock), 5)
        assert len(prepared) >= 5
        return result.is_over

    assert is_over(3, 0)
    assert not is_over(5, 0)
    assert not is_over(5, 30), "the first try has 10 runs and some 20 that count how much fits"


def test_where_a_median_is() -> None:
    """Of fifteen rounds between the fourth and the twelfth (the binomial's tables); of five nobody can say."""
    assert interval_of_median([float(value) for value in range(15, 0, -1)]) == (4, 12)
    assert interval_of_median([1.0] * 5) is None


@pytest.mark.parametrize(
    "bench",
    [pytest.param(b, id=b.name, marks=[pytest.mark.root] if b.needs_root else []) for b in BENCHES if not b.is_long],
)
def test_every_bench_opens_and_its_contestants_run(bench: Bench) -> None:
    """A bench asserts that both sides do the same before it gives them; here each runs a few times."""
    with bench.races() as races:
        found = list(races)
        assert found
        for race in found:
            if isinstance(race, Figure):
                continue
            assert race.reference in {contestant.name for contestant in race.contestants}
            for contestant in race.contestants:
                contestant.run(3)
