"""A record judged by other policies: what would change, were they in force.

Judged is as in `explain --policy` (agent/why): an engine with these policies, taught what the record says was answered, and the
model of the kernel's program. An address is taught to whom the record says that it was answered, where these policies let the
name be asked. The address guard is the record's: what it took out was not answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agent.core.dns_cache import Pair
from agent.core.events import EndpointAdded
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_NAMES, SCOPE_SHARED, Address, Direction, Prefix, packed
from agent.suggest.traffic import Party, Seen, Traffic, Was
from agent.why.asked import Asked
from agent.why.explain import at_once, question_row
from agent.why.packet import rule_text
from agent.why.rows import Grounds, judge
from agent.why.supposed import Situation, suppose

_SETTINGS = Settings(allow_addresses=(Prefix(bytes(4), 0), Prefix(bytes(16), 0)))
_NUMBERS = {name: number for number, name in PROTOCOL_NAMES.items()}


class Change(NamedTuple):
    """what: a name that is asked, or a flow. is_allowed: by the policies. rule: that says so, or `no rule`."""

    party: str
    what: str
    seen: Seen
    is_allowed: bool
    rule: str

    @property
    def passed(self) -> bool:
        """Then, at least once. What audit let pass did."""
        return bool(self.seen.times[Was.ALLOWED] or self.seen.times[Was.AUDITED])

    def __str__(self) -> str:
        was = ", ".join(f"{times} x {was}" for was, times in sorted(self.seen.times.items()))
        rule = "" if self.rule == "no rule" else f" by {self.rule}"
        return f"now {'allowed' if self.is_allowed else 'denied'}{rule}: {self.what} of {self.party} (was {was})"


class Replay(NamedTuple):
    """unchanged: how many different questions and flows are judged as they were."""

    changes: list[Change]
    unchanged: int

    @property
    def breaks(self) -> list[Change]:
        """What passed, and would be denied."""
        return [change for change in self.changes if not change.is_allowed]


def replay(traffic: Traffic, policies: Sequence[Policy]) -> Replay:
    """Raises ControlError where the policies cannot be in force."""
    parties = [_Judged(number, party, policies) for number, party in enumerate(traffic.parties, 1)]
    everybody = [each.added for each in parties]
    for each in parties:
        each.judge_questions(everybody)
    shared = {pair for each in parties if not each.party.is_isolated for pair in each.taught}
    for each in parties:
        each.judge_flows(everybody, each.taught if each.party.is_isolated else shared)
    changes = [change for each in parties for change in each.changes]
    return Replay(changes, sum(each.unchanged for each in parties))


class _Judged:
    """taught: what it learns under the policies."""

    def __init__(self, number: int, party: Party, policies: Sequence[Policy]) -> None:
        self.party = party
        self.policies = tuple(policy for policy in policies if policy.selects(party.labels))
        addresses = tuple(packed(address) for address in sorted(party.addresses))
        self.added = EndpointAdded(number, str(party), number, party.labels, addresses, isolated=party.is_isolated)
        self.taught: set[tuple[str, Address]] = set()
        self.changes: list[Change] = []
        self.unchanged = 0

    def judge_questions(self, everybody: Iterable[EndpointAdded]) -> None:
        grounds = self._suppose(everybody, ())
        rows = {
            name: question_row(grounds, self.added, name)
            for name in dict.fromkeys((*self.party.questions, *(name for name, _ in sorted(self.party.pairs))))
        }
        for name, seen in self.party.questions.items():
            row = rows[name]
            self._note(f"question for {name}", seen, bool(row["may_ask"]), str(row["rule"]))
        self.taught = {(name, packed(address)) for name, address in self.party.pairs if rows[name]["may_ask"]}

    def judge_flows(self, everybody: Iterable[EndpointAdded], taught: Iterable[tuple[str, Address]]) -> None:
        grounds = self._suppose(everybody, taught)
        for key, seen in self.party.flows.items():
            asked = Asked(Direction[key.direction.upper()], packed(key.remote), _protocol(key.protocol), key.port)
            judgement = judge(grounds.rows, self.added, asked, 0.0).judgement
            names = f" ({', '.join(key.names)})" if key.names else ""
            self._note(f"{asked}{names}", seen, judgement.passes, rule_text(grounds.engine, judgement.cookie))

    def _suppose(self, everybody: Iterable[EndpointAdded], taught: Iterable[tuple[str, Address]]) -> Grounds:
        others = tuple(other for other in everybody if other is not self.added)
        pairs = frozenset(Pair(SCOPE_SHARED, name, address) for name, address in taught)
        situation = Situation(_SETTINGS, self.added, others, frozenset(), self.policies, pairs, 0.0)
        return at_once(suppose(situation))

    def _note(self, what: str, seen: Seen, is_allowed: bool, rule: str) -> None:
        change = Change(str(self.party), what, seen, is_allowed, rule)
        if change.passed != is_allowed:
            self.changes.append(change)
        else:
            self.unchanged += 1


def _protocol(text: str) -> int:
    return _NUMBERS[text] if text in _NUMBERS else int(text)
