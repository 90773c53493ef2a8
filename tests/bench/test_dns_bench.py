"""The DNS bench runs from end to end, and its checker sees what is lost and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import dns
from tests.bench.dns import ECHO, FLOOR, NAMEGATE, WORKLOADS, Asked, Cores, Line, Scene, Table, targets


def line(cpu_s: float, *, lost: int = 0, wrong: int = 0) -> Line:
    """Of three rounds of 1,000 questions."""
    asked = Asked(1_000, 0, 0, 1.0, 100.0, 200.0)
    found = Line()
    for _ in range(3):
        found.add(round(cpu_s * 1e7), 0, asked, asked)
    found.lost, found.wrong = lost, wrong
    return found


@pytest.mark.parametrize(
    ("table", "missed"),
    [
        ({NAMEGATE: line(2.5), FLOOR: line(1.0), ECHO: line(0.5)}, ""),
        ({NAMEGATE: line(2.6), FLOOR: line(1.0)}, "warm1: 2.60 times the floor"),
        ({NAMEGATE: line(1.3), dns.DNSMASQ: line(6.0)}, "warm1: 0.217 of dnsmasq"),
        ({FLOOR: line(1.3), ECHO: line(0.5)}, "the floor is 1.30 times"),
        ({NAMEGATE: line(1.0, lost=1)}, "1 lost or wrong in 6,000"),
        ({NAMEGATE: line(1.0, wrong=2)}, "2 lost or wrong in 6,000"),
    ],
)
def test_a_target_that_is_missed_is_said(table: Table, missed: str) -> None:
    """Each bound by itself, and nothing else beside it."""
    found = [target.text for target in targets({"warm1": table}) if not target.is_met]
    assert [text[: len(missed)] for text in found] == ([missed] if missed else [])


@pytest.mark.root
def test_every_contestant_answers_every_question_rightly(tmp_path: Path) -> None:
    """The whole bench, small; the two workloads left out differ in the names alone."""
    file = tmp_path / "dns.json"
    chosen = ["warm4", "cold", "rotating"]
    options = [f"--workload={name}" for name in chosen]
    dns.main([*options, "--questions", "100", "--rounds", "1", "--json", str(file)])
    workloads = json.loads(file.read_text())["workloads"]
    assert list(workloads) == chosen
    for table in workloads.values():
        assert tuple(table) == dns.CONTESTANTS
        for name, found in table.items():
            assert (found["asked"], found["lost"], found["wrong"]) == (300, 0, 0), name
            assert found["cpu_s"][0] > 0, name


@pytest.mark.root
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_checker_sees_each_lost_and_each_wrong_reply(scene: Scene, workload: dns.Workload) -> None:
    """The upstream swallows each hundredth question, and gives each seventieth an address that is not the name's.

    Of any 700 in a row that is 7 and 10, one of which is the same question.
    """
    asked = scene.ask(scene.proxies[FLOOR], workload, 700, silence_ms=300)
    assert (asked.asked, asked.lost, asked.wrong) == (700, 7, 9)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Scene(Cores.chosen(), lose=100, wrong=70) as scene:
        scene.open(FLOOR)
        yield scene
