"""20,000 questions a second from one endpoint: nobody else notices, and the agent does not grow.

Each kind of flood is compared with as many datagrams to a port where nobody listens, in windows that take turns: the machine
has as much to do in both, and no absolute time is judged. FLOOD_ROUNDS and FLOOD_WINDOW_S make more of it. FLOOD_PERCENTILE=99
is for a machine with cores to spare: on two, with the flood on one of them, a few answers wait for the scheduler now and then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from statistics import median
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest

from tests.netns.lab import NAME_SERVERS, Lab, built
from tests.netns.lookups import Lookups
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

ROUNDS: Final = int(os.environ.get("FLOOD_ROUNDS", "2"))
WINDOW_S: Final = float(os.environ.get("FLOOD_WINDOW_S", "0.8"))
# Of one window a percentile says little on a busy machine: where that of a few is too great, there are more.
ROUNDS_MAX: Final = 5 * ROUNDS

PERCENTILE: Final = int(os.environ.get("FLOOD_PERCENTILE", "95"))

PER_SECOND: Final = 20_000
LOOKUPS_PER_SECOND: Final = 400
NAMES: Final = 100
DEAD_PORT: Final = 9
SLOWER_MAX: Final = 3
# The drops that are kept to be shown are most of it; a new name is what it is, and limits.names bounds them.
GROWTH_OCTETS_MAX: Final = 24 << 20
GROWTH_OCTETS_OF_A_NAME_MAX: Final = 4 << 10

POLICY: Final = f"*.test:443/tcp\n*.cold.test:443/tcp\n198.51.100.0/24:{DEAD_PORT}/udp\n"


class Flood(NamedTuple):
    """Arguments of questions.c."""

    kind: str
    port: int
    below: str


QUIET: Final = Flood("udp", DEAD_PORT, "denied.invalid")
FLOODS: Final = {
    "denied": Flood("udp", 53, "denied.invalid"),
    "denied, over TCP": Flood("tcp", 53, "denied.invalid"),
    "new names below a pattern": Flood("udp", 53, "cold.test"),
    "junk": Flood("junk", 53, "-"),
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, records={"*.cold.test.": ["A 198.51.100.77"]}, fresh=NAMES) as lab:
        yield lab


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path_factory.mktemp("flood") / "agent", is_talkative=False) as agent:
        with Lookups(lab, NAMES, LOOKUPS_PER_SECOND):
            time.sleep(0.5)  # every name is known then, and what is compared is how long an answer takes
        yield agent


class Questions:
    """From the second client, from before the body until after it; then `sent` says how many."""

    sent: int

    def __init__(self, lab: Lab, flood: Flood) -> None:
        self._lab = lab
        self._command = (built("questions.c"), flood.kind, NAME_SERVERS[0], str(flood.port), str(PER_SECOND), flood.below)

    def __enter__(self) -> Self:
        self._asking = self._lab.start(self._lab.clients[1].namespace, *self._command)
        assert self._asking.stdout is not None
        assert self._asking.stdout.readline() == "ready\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._asking.send_signal(signal.SIGTERM)
        said, _ = self._asking.communicate(timeout=20)
        self.sent = int(said)


def window(lab: Lab, flood: Flood) -> tuple[float, ...]:
    """How long the first client's answers took beside the flood. None is lost, none is wrong."""
    with Questions(lab, flood) as questions, Lookups(lab, NAMES, LOOKUPS_PER_SECOND) as lookups:
        time.sleep(WINDOW_S)
    looked = lookups.looked
    print(f"{flood.kind} {flood.below}: {questions.sent} sent; {looked}")
    assert questions.sent > WINDOW_S * PER_SECOND / 2, "the machine is too busy to flood anything"
    assert (len(looked.took), dict(looked.codes), looked.twice) == (looked.sent, {"0": looked.sent}, 0)
    return looked.took


def slow(windows: list[tuple[float, ...]]) -> float:
    """What so many of a hundred answers took at most: the windows' median, for the machine's own pauses fall into some."""
    return median(sorted(took)[len(took) * PERCENTILE // 100] for took in windows)


@pytest.mark.parametrize("kind", FLOODS)
def test_one_endpoint_floods_and_another_does_not_notice(lab: Lab, agent: RunningAgent, kind: str) -> None:
    """Nothing is lost, slow answers take at most three times what they take in quiet; memory is bounded, and so is the log."""
    quiet: list[tuple[float, ...]] = []
    flooded: list[tuple[float, ...]] = []
    before, octets, lines = agent.status(), agent.resident_octets(), len(agent.log.read_text().splitlines())
    for number in range(ROUNDS_MAX):
        quiet.append(window(lab, QUIET))
        flooded.append(window(lab, FLOODS[kind]))
        if number + 1 >= ROUNDS and slow(flooded) <= SLOWER_MAX * slow(quiet):
            break
    after = agent.status()
    grown, names = agent.resident_octets() - octets, after["names"] - before["names"]
    said = f"p{PERCENTILE} {slow(flooded) * 1e3:.1f} ms, quiet {slow(quiet) * 1e3:.1f} ms"
    print(f"{said}; {grown >> 10} KiB more, {names} names more")
    assert slow(flooded) <= SLOWER_MAX * slow(quiet)
    assert grown <= GROWTH_OCTETS_MAX + GROWTH_OCTETS_OF_A_NAME_MAX * names
    asked = after["questions"] - before["questions"] - sum(map(len, quiet)) - sum(map(len, flooded))
    assert asked > 500 * ROUNDS, "the flood did not get as far as the agent"
    assert len(agent.log.read_text().splitlines()) - lines <= (2 + WINDOW_S) * len(flooded)
