"""Scenario files: stories in text, read into steps.

    # What happens, in a sentence or two: every file begins with it.
    not-under restarts: held replies die with the process       an expander under which the story cannot hold, and why

    setting ttl-floor 5s            before the start; see SETTINGS
    upstream 203.0.113.53 …         in the order in which they are tried
    endpoint e1 [ADDRESS] [isolated] [audit] [KEY=VALUE …]      label app=e1; 192.0.2.11 if no address is said
    policy NAME [of e1]             the lines below it, indented: shorthand entries, or a CiliumNetworkPolicy
    policy NAME gone
    host ADDRESS …                  the host's own addresses
    silent SOURCE                   it says nothing at start; `reports SOURCE` later

    query e1 a.example A [tcp] [-> upstream|denied|nodata|refused|servfail|held|asked ADDRESS]
    reply a.example 192.0.2.101 … [ttl=60] [rcode=NXDOMAIN] [again]      or answer records below it, indented
    upstream-fails a.example | asker-gone a.example
    expect held|released N|servfail N|denied N|nodata N|nothing [ADDRESS …]     of what was asked since the last expectation
    packet e1 192.0.2.101 tcp/443 [from] -> allow|drop|dns      of no flow yet; `from`: the peer begins
    flow e1 192.0.2.101 tcp/443 [-> goes-on|ends]               first its opening packet, then more of the same flow
    close e1 192.0.2.101 tcp/443
    kernel slow|quick, write N|all                  slow: it performs what `write` says and no more
    fail-writes TABLE ERRNO N, full TABLE [room=N], room
    advance 20ms, sleep 1h                          sleep: the machine, so that all that is due comes at once
    table ipcache [SCOPE], table names              every row, below it, indented
    identities N, writes N, counter NAME N, attached e1 …
    gone e1, restart [NAME], kill-after-write N     NAME: with this policy, indented, instead of the one of before

The first step that is not of the second block starts the agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXPANDERS = ("duplicates", "reversed", "failures", "restarts")
SETUP = frozenset({"setting", "upstream", "endpoint", "policy", "host", "silent"})
# verb -> words at least, words at most, may have lines below it, may have an arrow
VERBS: dict[str, tuple[int, int, bool, bool]] = {
    "setting": (2, 9, False, False),
    "upstream": (1, 9, False, False),
    "endpoint": (1, 9, False, False),
    "policy": (1, 3, True, True),
    "host": (0, 9, False, False),
    "silent": (1, 1, False, False),
    "reports": (1, 1, False, False),
    "query": (3, 4, False, True),
    "reply": (1, 30, True, False),
    "upstream-fails": (1, 1, False, False),
    "asker-gone": (1, 1, False, False),
    "expect": (1, 20, False, False),
    "packet": (3, 4, False, True),
    "flow": (3, 3, False, True),
    "close": (3, 3, False, False),
    "kernel": (1, 1, False, False),
    "write": (1, 1, False, False),
    "fail-writes": (3, 3, False, False),
    "full": (1, 2, False, False),
    "room": (0, 0, False, False),
    "advance": (1, 1, False, False),
    "sleep": (1, 1, False, False),
    "table": (1, 2, True, False),
    "identities": (1, 1, False, False),
    "writes": (1, 1, False, False),
    "counter": (2, 2, False, False),
    "attached": (0, 9, False, False),
    "gone": (1, 1, False, False),
    "restart": (0, 1, True, False),
    "kill-after-write": (1, 1, False, False),
}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}


class ScenarioError(Exception):
    """The file says something that is no scenario, or something that does not hold: FILE:LINE: sentence."""

    def __init__(self, file: str, line: int, sentence: str) -> None:
        super().__init__(f"{file}:{line}: {sentence}")


@dataclass(frozen=True, slots=True)
class Step:
    """One line, with the lines below it. outcome: what stands behind the arrow."""

    line: int
    verb: str
    words: tuple[str, ...]
    outcome: str = ""
    below: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        return " ".join((self.verb, *self.words)) + (f" -> {self.outcome}" if self.outcome else "")


@dataclass(frozen=True, slots=True)
class Scenario:
    """not_under: expander -> why."""

    file: str
    story: str
    setup: tuple[Step, ...]
    steps: tuple[Step, ...]
    not_under: dict[str, str]


def read_scenario(path: Path) -> Scenario:
    return parse(path.name, path.read_text(encoding="utf-8"))


def parse(file: str, text: str) -> Scenario:
    """Raises ScenarioError at the first line that is none of the format's."""
    story: list[str] = []
    not_under: dict[str, str] = {}
    setup: list[Step] = []
    steps: list[Step] = []
    for number, line, below in _lines(file, text):
        if line.startswith("#"):
            if not setup and not steps and not not_under:
                story.append(line.lstrip("# "))
            continue
        if line.startswith("not-under"):
            expander, colon, reason = line.removeprefix("not-under").partition(":")
            if expander.strip() not in EXPANDERS:
                raise ScenarioError(
                    file, number, f"there is no expander {expander.strip()!r}; there are {', '.join(EXPANDERS)}"
                )
            if not colon or not reason.strip():
                raise ScenarioError(file, number, "say why the story cannot hold: not-under EXPANDER: reason")
            not_under[expander.strip()] = reason.strip()
            continue
        step = _step(file, number, line, below)
        if not steps and step.verb in SETUP:
            setup.append(step)
        elif step.verb in {"setting", "upstream", "silent"}:
            raise ScenarioError(file, number, f"{step.verb} stands before the start")
        else:
            steps.append(step)
    if not story:
        raise ScenarioError(file, 1, "a scenario begins with its story: # what happens")
    if not any(step.outcome or step.verb in {"expect", "flow", "table", "attached", "identities"} for step in steps):
        raise ScenarioError(file, text.count("\n"), "nothing is expected")
    return Scenario(file, " ".join(story), tuple(setup), tuple(steps), not_under)


def _lines(file: str, text: str) -> Iterator[tuple[int, str, tuple[tuple[int, str], ...]]]:
    """Each line that begins at the margin, with the indented ones below it."""
    number, head, below = 0, "", list[tuple[int, str]]()
    for at, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if line[0] in " \t":
            if not head:
                raise ScenarioError(file, at, "an indented line belongs to the line above it, and there is none")
            below.append((at, line))
            continue
        if head:
            yield number, head, tuple(below)
        number, head, below = at, line, []
    if head:
        yield number, head, tuple(below)


def _step(file: str, number: int, line: str, below: tuple[tuple[int, str], ...]) -> Step:
    said, arrow, outcome = line.partition(" #")[0].partition("->")
    verb, *words = said.split()
    if verb not in VERBS:
        raise ScenarioError(file, number, f"{verb!r} is no step; the steps are {', '.join(VERBS)}")
    least, most, has_below, has_outcome = VERBS[verb]
    if not least <= len(words) <= most:
        raise ScenarioError(file, number, f"{verb} takes {least} to {most} words and has {len(words)}")
    if below and not has_below:
        raise ScenarioError(file, below[0][0], f"nothing belongs below {verb}")
    if arrow and not has_outcome:
        raise ScenarioError(file, number, f"{verb} has no outcome, so no arrow")
    if arrow and not outcome.strip():
        raise ScenarioError(file, number, "the arrow points to nothing")
    if verb == "packet" and not arrow:
        raise ScenarioError(file, number, "say what becomes of the packet: -> allow, drop or dns")
    return Step(number, verb, tuple(words), outcome.strip(), below)


def seconds(text: str) -> float:
    """`20ms`, `5s`, `2m`, `1h`; raises ValueError."""
    for unit, factor in SECONDS.items():
        if text.endswith(unit) and text.removesuffix(unit).replace(".", "", 1).isdigit():
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"{text!r} is no time; write 20ms, 5s, 2m or 1h")
