"""DNS that nobody wrote down: what a policy's names imply (DECISIONS 4 c), and what they would need but do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent.core.names import EVERY_NAME, NamePattern
from agent.core.policy import speaks_of_dns
from agent.core.rules import Fqdn, Policy, Rule
from agent.core.types import Direction


class Implied(NamedTuple):
    """names: the patterns that the endpoints of this policy may ask for, although no rule says so."""

    policy: Policy
    names: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.names)
        taken_out = f" without {', '.join(self.policy.except_names)}" if self.policy.except_names else ""
        return (
            f"{self.policy.origin}: policy {self.policy.name}: DNS for exactly these names is implied, of any server, "
            f"UDP and TCP port 53: {names}{taken_out}"
        )


def implied_dns(policies: Sequence[Policy]) -> tuple[Implied, ...]:
    """Each policy with names whose endpoints have no rule about DNS, as far as the policies alone can tell.

    Another policy counts where it surely selects all of the same endpoints. One that selects some of them counts at run time.
    """
    found = []
    speaking = [policy for policy in policies if any(speaks_of_dns(rule) for rule in policy.rules)]
    for policy in policies:
        names = tuple(dict.fromkeys(pattern for rule in _by_name(policy) for pattern in _patterns(rule)))
        if names and not any(_selects_all_of(other, policy) for other in speaking):
            found.append(Implied(policy, names))
    return tuple(found)


def unaskable(policies: Sequence[Policy]) -> list[tuple[Rule, str]]:
    """Names that some rule opens and no rule lets anybody ask for, so that they are never learned: rule and pattern.

    Only what is sure: one name that the pattern takes is tried against the names of every policy.
    """
    rules = [rule for policy in policies for rule in policy.rules if rule.direction is Direction.EGRESS and not rule.deny]
    implied = {id(entry.policy) for entry in implied_dns(policies)}
    if any(_lets_ask_everything(rule) for rule in rules):
        return []
    askable = [NamePattern(name) for rule in rules for name in rule.names or ()]
    return [
        (rule, pattern)
        for policy in policies
        if id(policy) not in implied
        for rule in _by_name(policy)
        for pattern in _patterns(rule)
        if not any(allowed.matches_question(_sample(pattern)) for allowed in askable)
    ]


def _by_name(policy: Policy) -> list[Rule]:
    return [rule for rule in policy.rules if rule.direction is Direction.EGRESS and not rule.deny and _patterns(rule)]


def _patterns(rule: Rule) -> list[str]:
    return [peer.pattern for peer in rule.peers or () if isinstance(peer, Fqdn)]


def _selects_all_of(other: Policy, policy: Policy) -> bool:
    """Does `other` select every endpoint that `policy` selects, whatever endpoints there are?"""
    if other.namespace is not None and other.namespace != policy.namespace:
        return False
    return set(other.subject.expressions) <= set(policy.subject.expressions)


def _lets_ask_everything(rule: Rule) -> bool:
    if rule.names is not None:
        return not rule.names or EVERY_NAME in rule.names
    return speaks_of_dns(rule) or (rule.ports is None and not _patterns(rule))


def _sample(pattern: str) -> str:
    """A name that the pattern takes and hardly another one does."""
    if pattern == EVERY_NAME:
        return "sample.invalid."
    return pattern.replace("**.", "sample.sample.").replace("*", "sample")
