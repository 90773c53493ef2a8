"""Attachments that live as long as a connection: what becomes of one endpoint's traffic, told to who holds the connection.

Rule 1: a lease is told of what is denied, audited or failed, each thing at most once in REPEAT_AFTER_S. A reader that stands
still (a job that was stopped) loses lines, which are counted and told.
Rule 2: the summary counts everything, of at most KINDS_MAX different names and destinations each; those beyond are a number.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from agent.core.guard import Kind
from agent.core.types import PROTOCOL_NAMES, question_type_text
from agent.facts import Row, Stream
from agent.outcome import question_verdict

REPEAT_AFTER_S: Final = 10.0
KINDS_MAX: Final = 1_000

_Key = tuple[object, ...]

_LISTED: Final = re.compile(r"(?:[-a-z0-9_]+\.)*+[0-9]*+[-a-z_][-a-z0-9_]*+")
_PORTLESS: Final = frozenset({"icmp", "icmpv6"})
# Where somebody may have a server of his own. What else a name has no business with, as a cloud's metadata service, is told and
# not suggested.
_NEIGHBOURHOOD: Final = frozenset({Kind.PRIVATE, Kind.CGNAT, Kind.ULA, Kind.HOST})


class Lease:
    """endpoint, ifindex: of what is leased. first: the answer to `attach`. end: called once, when the owner's side has ended,
    before the summary is made.
    """

    def __init__(
        self,
        endpoint: int,
        ifindex: int,
        first: Row,
        clock: Callable[[], float],
        end: Callable[[Lease], Awaitable[None]],
    ) -> None:
        self.endpoint = endpoint
        self.ifindex = ifindex
        self.first = first
        self._clock = clock
        self._end = end
        self._stream = Stream()
        self._told_at: dict[_Key, float] = {}
        self._names: dict[_Key, int] = {}  # name, verdict
        self._drops: dict[_Key, Row] = {}
        self._guarded: dict[_Key, Row] = {}
        self._allow: dict[str, None] = {}
        self._allow_addresses: dict[str, None] = {}
        self._unlisted = 0

    def lines(self) -> AsyncIterator[Row]:
        """What is told while the lease lives; ends with its reader."""
        return self._stream.lines()

    async def end(self) -> Row:
        """The last line."""
        await self._end(self)
        names = [{"name": name, "verdict": verdict, "count": count} for (name, verdict), count in self._names.items()]
        # What was seen with its port needs no entry for every port.
        narrowed = {entry.partition(separator)[0] for entry in self._allow for separator in ":/" if separator in entry}
        summary = {
            "names": names,
            "drops": list(self._drops.values()),
            "guarded": list(self._guarded.values()),
            "allow": [entry for entry in self._allow if entry not in narrowed],
            "allow_addresses": list(self._allow_addresses),
            "unlisted": self._unlisted,
        }
        return {"summary": summary}

    # --- what is told --------------------------------------------------------------------------------------------------

    def take_question(self, fields: Mapping[str, Any]) -> None:
        """Of a question's fact; one that could not be read has no name, and one whose client hung up is nobody's trouble."""
        name, verdict = fields.get("name"), question_verdict(fields)
        if name is None or verdict is None or fields["outcome"] == "gone":
            return
        key = name, verdict
        if key not in self._names and len(self._names) >= KINDS_MAX:
            self._unlisted += 1
        else:
            self._names[key] = self._names.get(key, 0) + 1
        if verdict == "allowed":
            return
        allow = None if verdict == "failed" else _listed(str(name))
        why = fields.get("why") if verdict == "failed" else "no policy allows this name"
        kind = question_type_text(fields["type"])
        fact = {"kind": "question", "name": name, "type": kind, "verdict": verdict, "why": why}
        self._tell(key, fact, allow)

    def take_drop(self, drop: Mapping[str, Any]) -> None:
        """Of a row of `drops`; what a peer sent is not the workload's doing."""
        if drop["direction"] != "egress":
            return
        said = {key: drop[key] for key in ("protocol", "destination", "port", "names", "audited")}
        said["why"] = (drop["why"] or drop["reason"]).partition(": ")[0]  # behind that are the names
        key = drop["protocol"], drop["destination"], drop["port"], drop["audited"]
        if key in self._drops:
            self._drops[key]["count"] += 1
        elif len(self._drops) < KINDS_MAX:
            self._drops[key] = {**said, "count": 1}
        else:
            self._unlisted += 1
        self._tell(key, {"kind": "drop", **said}, _entry(drop))

    def take_guarded(self, fields: Mapping[str, Any]) -> None:
        """Of a fact about addresses that a name may not stand for (agent/core/guard.py)."""
        for address, kind in fields["addresses"].items():
            key = "guard", fields["name"], address, fields["audited"]
            said = {"name": fields["name"], "address": address, "sort": kind, "audited": fields["audited"]}
            if key in self._guarded:
                self._guarded[key]["count"] += 1
            elif len(self._guarded) < KINDS_MAX:
                self._guarded[key] = {**said, "count": 1}
            else:
                self._unlisted += 1
            network = f"{address}/{128 if ':' in address else 32}" if kind in _NEIGHBOURHOOD else None
            if network is not None and len(self._allow_addresses) < KINDS_MAX:
                self._allow_addresses[network] = None
            self._tell(key, {"kind": "guard", **said, "allow_addresses": network}, None)

    def _tell(self, key: _Key, fact: Row, allow: str | None) -> None:
        if allow is not None and len(self._allow) < KINDS_MAX:
            self._allow[allow] = None
        at = self._clock()
        if at < self._told_at.get(key, at):
            return
        if len(self._told_at) >= KINDS_MAX:
            self._told_at.clear()
        self._told_at[key] = at + REPEAT_AFTER_S
        self._stream.put({**fact, "allow": allow})


def _listed(name: str) -> str | None:
    """The name as a list has it. None where a list would take it for a pattern, an address or a comment: the workload has
    chosen it, and somebody is about to allow it.
    """
    text = name.removesuffix(".")
    return text if _LISTED.fullmatch(text) else None


def _entry(drop: Mapping[str, Any]) -> str | None:
    """The line of a list that would let this pass; None where none would (a denial, a false source, a broken packet)."""
    protocol, port = drop["protocol"], drop["port"]
    if drop["why"] is None or drop["rule"] != "no rule" or protocol not in PROTOCOL_NAMES.values():
        return None
    names = drop["names"]
    target = _listed(names[0]) if names else drop["destination"]
    if target is None:
        return None
    if protocol in _PORTLESS:
        return f"{target}/icmp"
    if ":" in target:
        target = f"[{target}]"
    return f"{target}:{port}/{protocol}"
