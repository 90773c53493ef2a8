"""Under 20,000 packets a second: the agent is killed and policies are replaced, and nobody notices (I5 to I7).

What became of a packet is judged by numbered datagrams (traffic.c) and by clients that cannot be overtaken (first_packet.c).
`scripts/load` runs the same with more kills and more replacements.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from tests.netns.asking import ask
from tests.netns.lab import NAME_SERVERS, Lab, built
from tests.netns.lookups import Lookups
from tests.netns.running import RunningAgent

pytestmark = pytest.mark.root

KILLS: Final = int(os.environ.get("LOAD_KILLS", "5"))
REPLACEMENTS: Final = int(os.environ.get("LOAD_REPLACEMENTS", "25"))
SEED: Final = int(os.environ.get("LOAD_SEED", "1"))

PER_SECOND: Final = 20_000
LOOKUP_NAMES: Final = 200
FIRST_PACKETS: Final = 60  # around each kill
STALL_MS_MAX: Final = 100
CALM_S: Final = 2  # without replacements, to compare with
# A run in which the receiver's own socket lost datagrams proves nothing.
TRIES: Final = 3

HOSTS: Final = (10, 11, 12, 13)
FLOW_NAMES: Final = {f"s{host}.flow.test.": [f"A 198.51.100.{host}", f"AAAA 2001:db8:53::{host}"] for host in HOSTS}
# Addresses of names and of networks; each name's and each network's has a port of its own.
ALLOWED: Final = (
    *(f"198.51.100.{host},9001" for host in HOSTS),
    *("2001:db8:53::10,9001", "2001:db8:53::11,9001"),
    *("198.51.100.130,9002", "198.51.100.131,9002", "2001:db8:53::a130,9002"),
)
# Never asked for; at the other's port; denied within an allowed network.
DENIED: Final = (
    *("198.51.100.90,9001", "2001:db8:53::90,9001"),
    *("198.51.100.10,9002", "2001:db8:53::10,9002", "198.51.100.130,9001"),
    *("198.51.100.200,9002", "2001:db8:53::a1ff,9002"),
)
# The names asked all the time are many identities, because some are selected by themselves as well.
ASKED: Final = "*.test:7/tcp\n" + "".join(f"n{number}.test:{1000 + number}/tcp\n" for number in range(20))
POLICY: Final = f"""\
*.flow.test:9001/udp
198.51.100.128/25:9002/udp
!198.51.100.200/32
[2001:db8:53::a100/120]:9002/udp
!2001:db8:53::a1ff/128
{ASKED}"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(records=FLOW_NAMES, fresh=LOOKUP_NAMES + KILLS * FIRST_PACKETS, ports=(7, 443)) as lab:
        yield lab


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[RunningAgent]:
    with RunningAgent(lab, POLICY, tmp_path / "agent") as agent:
        for name in FLOW_NAMES:
            assert {ask(lab, name, kind).status for kind in ("A", "AAAA")} == {"NOERROR"}
        yield agent


# --- traffic -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Carried:
    """What became of the datagrams. lost: of allowed ones; passed: of denied ones; twice: that came more than once.

    gap_ms: the longest time between two arrivals of allowed ones. delay_ms: the longest time that one was on its way.
    overslept_ms: the longest time the sender lost to others. overflowed: what the receiver's own socket lost.
    """

    allowed: int
    denied: int
    lost: int
    passed: int
    twice: int
    gap_ms: float
    delay_ms: float
    overslept_ms: float
    overflowed: int

    @property
    def stall_ms(self) -> float:
        """The longest time in which nothing came through although the sender was at work."""
        return max(self.delay_ms, self.gap_ms - self.overslept_ms)

    def judge(self) -> None:
        assert min(self.allowed, self.denied) > 1_000
        assert (self.lost, self.passed, self.twice) == (0, 0, 0), self


class Traffic:
    """From the client to the internet, from before the body until after it; then `carried` says what became of it."""

    carried: Carried

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __enter__(self) -> Self:
        program, ports = built("traffic.c"), sorted({way.partition(",")[2] for way in ALLOWED})
        self._receiver = self._lab.start(self._lab.internet, program, "receive", "3600", *ports)
        _await_ready(self._receiver)
        pace = ("send", "3600", str(PER_SECOND))
        self._sender = self._lab.start(self._lab.client.namespace, program, *pace, *ALLOWED, *DENIED)
        _await_ready(self._sender)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        sender, receiver = _ended(self._sender), _ended(self._receiver)
        sent, streams = sender["sent"], receiver["streams"]
        received = [stream["received"] for stream in streams] + [0] * (len(sent) - len(streams))
        split = len(ALLOWED)
        self.carried = Carried(
            allowed=sum(sent[:split]),
            denied=sum(sent[split:]),
            lost=sum(sent[:split]) - sum(received[:split]),
            passed=sum(received[split:]),
            twice=sum(stream["twice"] for stream in streams),
            gap_ms=receiver["gap_us"] / 1e3,
            delay_ms=max((stream["delay_us"] for stream in streams), default=0) / 1e3,
            overslept_ms=sender["overslept_us"] / 1e3,
            overflowed=receiver["overflowed"],
        )
        print(self.carried)


def _await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def _ended(process: subprocess.Popen[str]) -> Any:
    process.terminate()
    said, _ = process.communicate(timeout=20)
    return json.loads(said)


def undisturbed(run: Callable[[], Carried]) -> Carried:
    """Run it again when the receiver's own socket lost something."""
    for _ in range(TRIES):
        carried = run()
        if not carried.overflowed:
            return carried
    raise AssertionError(f"the receiver was too slow in each of {TRIES} runs")


# --- the agent is killed -------------------------------------------------------------------------------------------------


class Numbers:
    """Which number stood for which label set, in all that was ever listed."""

    def __init__(self) -> None:
        self._labels_by_identity: dict[int, frozenset[str]] = {}
        self._identities_by_labels: dict[frozenset[str], int] = {}

    def compare(self, agent: RunningAgent) -> None:
        for row in agent.ask("identities"):
            labels, identity = frozenset(row["labels"]), row["identity"]
            assert self._labels_by_identity.setdefault(identity, labels) == labels
            assert self._identities_by_labels.setdefault(labels, identity) == identity

    def __len__(self) -> int:
        return len(self._labels_by_identity)


def test_killed_at_random_moments(lab: Lab, agent: RunningAgent) -> None:
    """No allowed datagram is lost, no denied one passes, no identity gets another number; each question is answered within a
    second, and whoever got an address is let through with the first packet."""
    chance = random.Random(SEED)
    outcomes: collections.Counter[str] = collections.Counter()
    numbers = Numbers()
    print(f"\nseed {SEED}, {KILLS} kills")

    def start() -> None:
        """At once or later; one of four is killed on its way up."""
        time.sleep(chance.choice((0, chance.uniform(0, 1.5))))
        if chance.random() < 0.25:
            agent.begin()
            time.sleep(chance.uniform(0, 1))
            agent.end(signal.SIGKILL)
        agent.start()

    def kill() -> Carried:
        with Traffic(lab) as traffic, Lookups(lab, LOOKUP_NAMES) as lookups:
            for number in range(KILLS):
                numbers.compare(agent)
                first = ("--first", str(LOOKUP_NAMES + number * FIRST_PACKETS), "--count", str(FIRST_PACKETS))
                pace = ("--gap-us", "20000", "--timeout-ms", "1000")
                client = lab.start(lab.client.namespace, built("first_packet.c"), "--server", NAME_SERVERS[0], *first, *pace)
                time.sleep(chance.uniform(0, 0.8))
                agent.end(signal.SIGKILL)
                start()
                numbers.compare(agent)
                said, _ = client.communicate(timeout=90)
                outcomes.update(json.loads(said)["summary"])
        print(f"{lookups.looked}; first packets: {dict(outcomes)}; {len(numbers)} identities")
        assert set(lookups.looked.codes) <= {"0", "2"}
        assert len(lookups.looked.took) == lookups.looked.sent > KILLS * 100
        assert lookups.looked.took[-1] < 1
        return traffic.carried

    undisturbed(kill).judge()
    assert len(numbers) > 20
    assert outcomes["first-try"] + outcomes["no-address"] == outcomes["asked"], outcomes
    assert outcomes["first-try"] > KILLS


# --- policies are replaced -----------------------------------------------------------------------------------------------


def another_policy(chance: random.Random) -> str:
    """One with the same verdict on all that this load sends and asks, for other reasons, and different in all else."""
    names = chance.choice(
        (
            "*.flow.test:9001/udp\n",
            "s1*.flow.test:9001/udp\n*.flow.test:9001/udp\n",
            "".join(f"s{host}.flow.test:{chance.choice(('9000-9001', '9001'))}/udp\n" for host in HOSTS),
        )
    )
    networks = chance.choice(
        (
            "198.51.100.128/25:9002/udp\n!198.51.100.200/32\n",
            "198.51.100.128/26:9002/udp\n",
            "198.51.100.0/24:9003/udp\n198.51.100.128/25:9002-9003/udp\n!198.51.100.192/26:9002/udp\n",
            "198.51.100.130/32:9002/udp\n198.51.100.131/32:9002\n!198.51.100.200/29\n",
        )
    )
    networks6 = chance.choice(
        (
            "[2001:db8:53::a100/120]:9002/udp\n!2001:db8:53::a1ff/128\n",
            "[2001:db8:53::a130/128]:9002/udp\n",
            "[2001:db8:53::/64]:9003\n[2001:db8:53::a100/121]:9002/udp\n",
        )
    )
    others = [f"x{number}.other.test:{chance.randrange(1, 9000)}\n" for number in range(20)]
    others += [f"203.0.113.{number}/32:{chance.randrange(1, 9000)}/tcp\n" for number in range(100, 120)]
    others += [f"!x{number}.denied.test\n" for number in range(5)]
    lines = [names, networks, networks6, *chance.sample(others, chance.randrange(len(others)))]
    chance.shuffle(lines)
    return "".join(lines) + ASKED


def test_policies_are_replaced(lab: Lab, agent: RunningAgent) -> None:
    """What every policy allows is not lost and not held up, what none allows does not pass, and questions are answered."""
    chance = random.Random(SEED)
    print(f"\nseed {SEED}, {REPLACEMENTS} replacements")

    def calm() -> Carried:
        with Traffic(lab) as traffic, Lookups(lab, LOOKUP_NAMES):
            time.sleep(CALM_S)
        return traffic.carried

    def replace() -> Carried:
        begun, changed = time.monotonic(), 0
        with Traffic(lab) as traffic, Lookups(lab, LOOKUP_NAMES) as lookups:
            for _ in range(REPLACEMENTS):
                changed += bool(agent.apply(another_policy(chance))["changed"])
            seconds = time.monotonic() - begun
        print(f"{changed} changes in {seconds:.1f} s; {lookups.looked}")
        assert changed > 0.9 * REPLACEMENTS
        assert set(lookups.looked.codes) == {"0"}
        assert len(lookups.looked.took) == lookups.looked.sent
        return traffic.carried

    before = undisturbed(calm)
    during = undisturbed(replace)
    print(f"stall before {before.stall_ms:.1f} ms, during {during.stall_ms:.1f} ms")
    before.judge()
    during.judge()
    # The machine may be so busy that the traffic stalls without us.
    assert during.stall_ms < max(STALL_MS_MAX, 2 * before.stall_ms)
