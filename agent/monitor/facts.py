"""What a fact says, for every view of it: its verdict, its remote, its names, and whose it is.

A fact is a line of the control command `facts` (agent/facts.py): `question` (one DNS question that is over), `verdict` (a flow
that was judged and allowed), `drop` (a packet that was denied, or under audit would have been), `chatter` (a denied one to a
group of the link: agent/drops.py), `policy`, `endpoint`, `guard`, and `lost` with the number of those that are not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from agent.outcome import question_verdict

Row = Mapping[str, Any]

KINDS: Final = ("question", "verdict", "drop", "chatter", "policy", "endpoint", "guard")
VERDICTS: Final = ("allowed", "denied", "audited", "failed")

_ASK_AGAIN_AFTER_S: Final = 1.0


def verdict_of(fact: Row) -> str | None:
    """What became of it; None where nothing was judged, and of chatter, which is not among the denials people look for."""
    kind = fact["kind"]
    if kind == "verdict":
        return "allowed"
    if kind == "drop":
        return "audited" if fact["audited"] else "denied"
    return question_verdict(fact) if kind == "question" else None


def names_of(fact: Row) -> list[str]:
    """The name asked, or those seen on a packet's remote address."""
    if "name" in fact:
        return [fact["name"]]
    return list(fact.get("names") or ())


def remote_of(packet: Row) -> str:
    remote: str = packet["source"] if packet["direction"] == "ingress" else packet["destination"]
    return remote


def rcode_text(question: Row) -> str:
    """Of a reply that was released."""
    import dns.rcode

    return dns.rcode.to_text(dns.rcode.Rcode.make(question.get("rcode", 0)))


class KnownEndpoints:
    """The agent's endpoints by number and by address; asked for again when a fact is about one that is not known.

    ask: rows of `endpoints`.
    """

    def __init__(self, ask: Callable[[], Iterable[Row]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._by_number: dict[int, Row] = {}
        self._by_address: dict[str, Row] = {}
        self._ask_again_at = 0.0
        self.ask()

    def ask(self) -> None:
        self._ask_again_at = self._clock() + _ASK_AGAIN_AFTER_S
        rows = list(self._ask())
        self._by_number = {row["endpoint"]: row for row in rows}
        self._by_address = {address: row for row in rows for address in row["addresses"]}

    def rows(self) -> list[Row]:
        return list(self._by_number.values())

    def of(self, fact: Row) -> Row | None:
        number = fact.get("endpoint")
        if number is not None and number not in self._by_number and self._clock() >= self._ask_again_at:
            self.ask()
        return self._by_number.get(number) if number is not None else None

    def at(self, address: str) -> Row | None:
        return self._by_address.get(address)

    def label_of(self, fact: Row) -> str:
        """What people know it by: its interface."""
        row = self.of(fact)
        if row is not None:
            return str(row["interface"])
        return str(fact.get("interface") or fact.get("endpoint") or "-")


def is_endpoint(row: Row, wanted: str) -> bool:
    """wanted: a number, an interface, or a label written `key=value`."""
    key, equals, value = wanted.partition("=")
    if equals:
        return bool(row["labels"].get(key) == value)
    return wanted in (str(row["endpoint"]), row["interface"])
