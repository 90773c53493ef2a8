"""What records say, summed up: for endpoints with the same labels, which names were asked and which flows there were.

Only what a policy decides is counted: a spoofed source or a broken packet stays denied under every policy. A flow belongs to
each name that its endpoint had asked and that was answered with the address not long ago: which one was meant, nobody can see,
and tomorrow they may have different addresses. Where none was asked within the record, it belongs to the name that the agent
knew for it.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent.monitor.facts import KnownEndpoints, Row, is_endpoint, remote_of
from agent.suggest.record import read_record

# Clients keep an answer of a short life a little longer, and open connections meanwhile.
_LIFETIME_MIN: Final = dt.timedelta(minutes=1)


class Was(enum.StrEnum):
    """What the policy in force said."""

    ALLOWED = "allowed"
    AUDITED = "audited"  # it passed, and would have been denied without audit
    DENIED = "denied"


class FlowKey(NamedTuple):
    """protocol: by name, or its number as text. port: of ICMP the type. names: which the address had."""

    direction: str
    protocol: str
    remote: str
    port: int
    names: tuple[str, ...]


@dataclass(slots=True)
class Seen:
    """times: by what was said. by: interfaces. rules: which denied it, where rules did."""

    times: Counter[Was] = field(default_factory=Counter)
    by: set[str] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)

    def note(self, was: Was, interface: str, rule: str | None = None) -> None:
        self.times[was] += 1
        self.by.add(interface)
        if rule is not None:
            self.rules.add(rule)

    def add(self, other: Seen) -> None:
        self.times += other.times
        self.by |= other.by
        self.rules |= other.rules


@dataclass(slots=True)
class Party:
    """Endpoints with the same labels. pairs: each name with each address it was answered with, or known to have."""

    labels: dict[str, str]
    addresses: set[str] = field(default_factory=set)
    is_isolated: bool = False
    questions: dict[str, Seen] = field(default_factory=dict)
    flows: dict[FlowKey, Seen] = field(default_factory=dict)
    pairs: set[tuple[str, str]] = field(default_factory=set)

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in sorted(self.labels.items())) or "no labels"

    @property
    def interfaces(self) -> list[str]:
        return sorted({name for seen in (*self.questions.values(), *self.flows.values()) for name in seen.by})


class Traffic:
    """Of all records. only: as `monitor --endpoint`. missing: facts that are not there. gaps: times without an agent."""

    def __init__(self, only: str | None = None) -> None:
        self._only = only
        self._parties: dict[frozenset[tuple[str, str]], Party] = {}
        self.missing = 0
        self.gaps = 0
        self.first = self.last = ""

    @property
    def parties(self) -> list[Party]:
        return [party for _, party in sorted(self._parties.items(), key=lambda each: sorted(each[0]))]

    def read(self, path: Path) -> None:
        """Raises RecordError."""
        rows: list[Row] = []
        endpoints = KnownEndpoints(lambda: rows)
        answered = _Answered()
        for fact in read_record(path):
            self.last = fact.get("time", self.last)
            self.first = self.first or self.last
            match fact.get("kind"):
                case "endpoints":
                    rows = fact["endpoints"]
                    endpoints.ask()
                case "lost":
                    self.missing += fact["count"]
                case "gap":
                    self.gaps += 1
                    answered = _Answered()  # the next agent numbers endpoints anew
                case "question" | "verdict" | "drop":
                    row = endpoints.of(fact)
                    if row is not None and (self._only is None or is_endpoint(row, self._only)):
                        take = self._take_question if fact["kind"] == "question" else self._take_packet
                        take(fact, row, answered)

    def _take_question(self, fact: Row, row: Row, answered: _Answered) -> None:
        was, party = fact.get("verdict"), self._party(row)
        if was is None or (was == Was.DENIED and fact.get("why")):
            return  # no policy was asked about it
        party.questions.setdefault(fact["name"], Seen()).note(Was(was), row["interface"])
        for answer in fact.get("answers") or ():
            party.pairs.add((fact["name"], answer["address"]))
            answered.note(row["endpoint"], answer, fact)

    def _take_packet(self, fact: Row, row: Row, answered: _Answered) -> None:
        if fact["kind"] == "drop" and fact["reason"] not in ("policy", "deny"):
            return
        was = Was.ALLOWED if fact["kind"] == "verdict" else Was.AUDITED if fact["audited"] else Was.DENIED
        party, remote = self._party(row), remote_of(fact)
        names: tuple[str, ...] = ()
        if fact["direction"] == "egress":
            names = answered.names(row["endpoint"], remote, fact) or tuple(fact["names"][:1])
            party.pairs.update((each, remote) for each in fact["names"])
        key = FlowKey(fact["direction"], fact["protocol"], remote, fact["port"], names)
        rule = fact["rule"] if fact["kind"] == "drop" and fact["reason"] == "deny" else None
        party.flows.setdefault(key, Seen()).note(was, row["interface"], rule)

    def _party(self, row: Row) -> Party:
        key = frozenset(row["labels"].items())
        party = self._parties.setdefault(key, Party(dict(row["labels"])))
        party.addresses.update(row["addresses"])
        party.is_isolated |= str(row["scope"]).startswith("endpoint")
        return party


class _Answered:
    """Which names each endpoint has had answered with an address, and until when they count."""

    def __init__(self) -> None:
        self._until: dict[tuple[int, str], dict[str, dt.datetime]] = {}

    def note(self, endpoint: int, answer: Row, question: Row) -> None:
        until = dt.datetime.fromisoformat(question["time"]) + max(_LIFETIME_MIN, dt.timedelta(seconds=answer["ttl"]))
        self._until.setdefault((endpoint, answer["address"]), {})[question["name"]] = until

    def names(self, endpoint: int, address: str, packet: Row) -> tuple[str, ...]:
        """Those that count; where none does any longer, the one that did last."""
        until_by_name = self._until.get((endpoint, address), {})
        at = dt.datetime.fromisoformat(packet["time"])
        alive = sorted(name for name, until in until_by_name.items() if until >= at)
        return tuple(alive or sorted(until_by_name, key=until_by_name.__getitem__)[-1:])


def read_traffic(paths: Iterable[Path], only: str | None = None) -> Traffic:
    """Raises RecordError."""
    traffic = Traffic(only)
    for path in paths:
        traffic.read(path)
    return traffic
