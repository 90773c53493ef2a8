"""A policy for what was seen, as a list or as a CiliumNetworkPolicy, with who used each entry and how often.

Rule 1: names are exact, unless patterns were asked for; a pattern never takes names that strangers can register.
Rule 2: an address stands for itself only where no name was seen for it.
Rule 3: what was only asked may be asked and no more. In a list, where every name opens something, that is ICMP. If it was
denied nobody knows what for: it is a comment.
Rule 4: what a rule denies is not suggested: somebody meant it. It is told in a comment.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.core.names import normalise_name
from agent.core.types import PROTOCOL_NAMES
from agent.policy.cnp_rules import PORTS_MAX
from agent.policy.values import doubtful_breadth
from agent.suggest.traffic import FlowKey, Party, Seen, Traffic, Was

# Two names under one parent are as quickly read as a pattern, and say more.
SIBLINGS_MIN: Final = 3
_WHO_MAX: Final = 3
_ICMP: Final = {"icmp": "IPv4", "icmpv6": "IPv6"}

Opening = tuple[str, int]  # protocol by name, and port; of ICMP the type


@dataclass(slots=True)
class Entry:
    """target: a name without its final dot, a pattern, or an address. openings: none for what was only asked. names: how many
    it stands for. is_sharing: another name was seen on its address."""

    target: str
    is_name: bool
    asked: Seen = field(default_factory=Seen)
    openings: dict[Opening, Seen] = field(default_factory=dict)
    names: int = 1
    is_sharing: bool = False

    def note(self, opening: Opening, seen: Seen) -> None:
        self.openings.setdefault(opening, Seen()).add(seen)

    def join(self, other: Entry) -> None:
        self.is_sharing |= other.is_sharing
        self.asked.add(other.asked)
        for opening, seen in other.openings.items():
            self.note(opening, seen)

    def comment(self, openings: Iterable[Opening]) -> str:
        """Who used these, how often, and what became of it."""
        used = Seen()
        for opening in openings:
            used.add(self.openings[opening])
        said = [f"{self.names} names"] if self.names > 1 else []
        if not self.is_name:
            said.append("no name was seen for it")
        if self.openings:
            said.append(_times(used, "flow"))
        if self.asked.times:
            said.append(f"asked {_count(self.asked)} x" if self.openings else f"only asked, {_count(self.asked)} x")
        if self.is_sharing:
            said.append("on an address of other names too")
        who = sorted(used.by | self.asked.by)
        said.append(", ".join(who[:_WHO_MAX]) + (f" and {len(who) - _WHO_MAX} more" if len(who) > _WHO_MAX else ""))
        times = used.times or self.asked.times
        if not times[Was.ALLOWED]:
            said.append("audited: would have been denied" if times[Was.AUDITED] else "was denied")
        return "; ".join(said)


@dataclass(slots=True)
class Proposal:
    """Of one party. besides: sentences about what is not in the entries."""

    party: Party
    entries: list[Entry]
    besides: list[str]


def propose(party: Party, *, only_allowed: bool = False, patterns: bool = False) -> Proposal:
    entries: dict[str, Entry] = {}
    besides: list[str] = []
    by_rule, incoming = Seen(), Seen()
    for name, seen in party.questions.items():
        if only_allowed and not seen.times[Was.ALLOWED]:
            continue
        target = _as_listed(name)
        if target is None:
            besides.append(f"{json.dumps(name)} was asked {_count(seen)} x, and no policy can say this name")
        else:
            entries.setdefault(target, Entry(target, is_name=True)).asked.add(seen)
    for key, seen in party.flows.items():
        if key.direction != "egress":
            incoming.add(seen)
        elif seen.rules and not seen.times[Was.ALLOWED]:
            by_rule.add(seen)
        elif key.protocol not in PROTOCOL_NAMES.values():
            besides.append(f"{_times(seen, 'flow')} of IP protocol {key.protocol} to {key.remote}: no entry opens that alone")
        elif not only_allowed or seen.times[Was.ALLOWED]:
            for entry in _entries_of(entries, key):
                entry.note((key.protocol, key.port), seen)
    if by_rule.times:
        besides.append(f"{_times(by_rule, 'flow')} denied by {', '.join(sorted(by_rule.rules))}: left so")
    if incoming.times:
        besides.append(f"{_times(incoming, 'flow')} came in: this is about what goes out")
    found = []
    for entry in entries.values():
        if entry.openings or entry.asked.times[Was.ALLOWED] or entry.asked.times[Was.AUDITED]:
            found.append(entry)
        else:
            besides.append(f"{entry.target}: {entry.comment(())}; what for was not seen")
    return Proposal(party, sorted(_generalised(found) if patterns else found, key=_order), besides)


def _entries_of(entries: dict[str, Entry], key: FlowKey) -> list[Entry]:
    targets = [target for name in key.names if (target := _as_listed(name)) is not None]
    found = [entries.setdefault(target, Entry(target, is_name=True)) for target in targets]
    for entry in found:
        entry.is_sharing |= len(found) > 1
    return found or [entries.setdefault(key.remote, Entry(key.remote, is_name=False))]


def _as_listed(name: str) -> str | None:
    """None where a policy would read something else: the workload has chosen it."""
    try:
        return name.removesuffix(".") if normalise_name(name) == name and name != "." else None
    except ValueError:
        return None


def _generalised(entries: Iterable[Entry]) -> list[Entry]:
    siblings: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        parent = entry.target.partition(".")[2] if entry.is_name else ""
        siblings[parent].append(entry)
    found = []
    for parent, each in siblings.items():
        pattern = f"*.{parent}"
        if not parent or len(each) < SIBLINGS_MIN or doubtful_breadth(f"{pattern}."):
            found += each
            continue
        joined = Entry(pattern, is_name=True, names=len(each))
        for entry in each:
            joined.join(entry)
        found.append(joined)
    return found


def _order(entry: Entry) -> tuple[object, ...]:
    """Names by their parents, so that what belongs together stands together; addresses last."""
    return not entry.is_name, entry.target.split(".")[::-1] if entry.is_name else [entry.target]


def _count(seen: Seen) -> int:
    return sum(seen.times.values())


def _times(seen: Seen, what: str) -> str:
    count = _count(seen)
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# --- a list ----------------------------------------------------------------------------------------------------------


def as_list(proposals: Sequence[Proposal], heading: Sequence[str]) -> str:
    """One list for all: a list selects every endpoint."""
    entries: dict[str, Entry] = {}
    for proposal in proposals:
        for entry in proposal.entries:
            if entry.target in entries:
                entries[entry.target].join(entry)
            else:
                entries[entry.target] = entry
    lines = [line for entry in sorted(entries.values(), key=_order) for line in _listed(entry)]
    width = max((len(text) for text, _ in lines), default=0)
    besides = [sentence for proposal in proposals for sentence in proposal.besides]
    return _text([*_comments([*heading, *besides]), *(f"{text:{width}}  # {comment}" for text, comment in lines)])


def _listed(entry: Entry) -> Iterator[tuple[str, str]]:
    """Lines, each with its comment."""
    icmp = [opening for opening in entry.openings if opening[0] in _ICMP]
    if icmp or not entry.openings:
        yield f"{entry.target}/icmp", entry.comment(icmp)
    target = f"[{entry.target}]" if ":" in entry.target else entry.target
    for protocol, port in sorted(entry.openings):
        if protocol not in _ICMP:
            yield f"{target}:{port}/{protocol}", entry.comment([(protocol, port)])


# --- CiliumNetworkPolicies -------------------------------------------------------------------------------------------


def as_policies(proposals: Sequence[Proposal], heading: Sequence[str]) -> str:
    """One document for each party."""
    documents = [_document(proposal) for proposal in proposals]
    return _text([*_comments(heading), *"\n---\n".join("\n".join(lines) for lines in documents).split("\n")])


def _document(proposal: Proposal) -> list[str]:
    party = proposal.party
    stem = re.sub(r"[^a-z0-9]+", "-", str(party).lower()).strip("-")
    lines = [
        "apiVersion: cilium.io/v2",
        "kind: CiliumNetworkPolicy",
        "metadata:",
        f"  name: {f'suggested-{stem}'[:63].rstrip('-')}",
        "spec:",
    ]
    lines += _comments([f"used by {', '.join(party.interfaces)}", *proposal.besides], "  ")
    if party.labels:
        lines += ["  endpointSelector:", "    matchLabels:"]
        lines += [f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(party.labels.items())]
    else:
        lines += ["  # They have no labels, so this selects every endpoint.", "  endpointSelector: {}"]
    rules = [*_dns_rule(proposal.entries), *_rules(proposal.entries)]
    return lines + (["  egress:", *rules] if rules else ["  egress: []"])


def _dns_rule(entries: Iterable[Entry]) -> list[str]:
    names = [entry for entry in entries if entry.is_name]
    if not names:
        return []
    lines = ["    - toPorts:", '        - ports: [{port: "53", protocol: ANY}]', "          rules:", "            dns:"]
    only_asked = "  # only asked: nothing more is opened"
    return lines + [f"              - {_match(entry)}{'' if entry.openings else only_asked}" for entry in names]


def _rules(entries: Iterable[Entry]) -> Iterator[str]:
    """Entries with the same ports share a rule; names, addresses, ports and ICMP have rules of their own."""
    groups: dict[tuple[bool, bool, frozenset[Opening]], list[Entry]] = defaultdict(list)
    for entry in entries:
        for is_icmp in (False, True):
            openings = frozenset(each for each in entry.openings if (each[0] in _ICMP) == is_icmp)
            if openings:
                groups[entry.is_name, is_icmp, openings].append(entry)
    for (is_name, is_icmp, openings), each in groups.items():
        for start in range(0, len(openings), PORTS_MAX):
            yield "    - toFQDNs:" if is_name else "    - toCIDR:"
            for entry in each:
                network = json.dumps(f"{entry.target}/{128 if ':' in entry.target else 32}")
                yield f"        - {_match(entry) if is_name else network}  # {entry.comment(openings)}"
            part = sorted(openings)[start : start + PORTS_MAX]
            yield "      icmps:" if is_icmp else "      toPorts:"
            yield "        - fields:" if is_icmp else "        - ports:"
            for protocol, port in part:
                if is_icmp:
                    yield f"            - {{type: {port}, family: {_ICMP[protocol]}}}"
                else:
                    yield f'            - {{port: "{port}", protocol: {protocol.upper()}}}'


def _match(entry: Entry) -> str:
    return f"{'matchPattern' if '*' in entry.target else 'matchName'}: {json.dumps(entry.target)}"


# --- text ------------------------------------------------------------------------------------------------------------


def heading_of(traffic: Traffic, records: Sequence[str]) -> list[str]:
    """What a reader of the policy wants to know of where it comes from."""
    said = [f"Suggested by namegate from {', '.join(records)}: what was seen from {traffic.first} to {traffic.last}."]
    if traffic.missing or traffic.gaps:
        said.append(
            f"Events that the record lacks: {traffic.missing:,}; gaps in it: {traffic.gaps}. More may be needed than this."
        )
    return said


def _comments(sentences: Iterable[str], margin: str = "") -> list[str]:
    return [f"{margin}# {sentence}" for sentence in sentences]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
