"""The shortest change of the policies that turns a verdict round.

Nothing is guessed: a change is told after it was tried (agent/why/supposed.py), and the packet, judged anew, had the other
verdict. What is added is read as a policy file is read.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace

from agent.core.events import EndpointAdded
from agent.core.policy import DnsVerdict
from agent.core.rules import Policy, Rule
from agent.core.types import (
    LABEL_WORLD,
    PORT_DNS,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_NAMES,
    PROTOCOL_UDP,
    PROTOCOLS_WITH_PORTS,
    Address,
    Direction,
    Prefix,
    text_of,
)
from agent.datapath.abi import Reason
from agent.policy.files import read_policy_text
from agent.why.asked import Asked
from agent.why.rows import Grounds, judge
from agent.why.supposed import Situation, suppose

# Of denials that lie over one another; then it is for a person to read the policies.
_LINES_MAX = 8
_ICMP = (PROTOCOL_ICMP, PROTOCOL_ICMPV6)
# What a policy can change; every other reason lies in the packet or in the endpoint.
OF_POLICIES = frozenset((Reason.PASS_POLICY, Reason.PASS_REDIRECT, Reason.DROP_POLICY, Reason.DROP_DENY))


@dataclass(frozen=True, slots=True)
class Change:
    """take_out: lines of policy files. entry: a line for a list that judges the endpoint already; None where no list says it.
    policy: the same as a policy of its own, which closes nothing else. or_take_out: a line that would do as well. name: what
    has to be asked again before it opens the address.
    """

    take_out: tuple[str, ...] = ()
    entry: str | None = None
    policy: str | None = None
    or_take_out: str | None = None
    name: str | None = None

    def row(self) -> dict[str, object]:
        return {
            "take_out": list(self.take_out),
            "entry": self.entry,
            "policy": self.policy,
            "or_take_out": self.or_take_out,
            "after_asking": self.name,
        }


@dataclass(slots=True)
class _Try:
    """Policies on the way to the other verdict."""

    policies: tuple[Policy, ...]
    lines: list[str] = field(default_factory=list)


def change(situation: Situation, asked: Asked, names: Iterable[str]) -> Generator[None, None, Change | None]:
    """None where no change of policies does it. names: seen on the address, the one to be named first."""
    grounds = yield from suppose(situation)
    judgement = judge(grounds.rows, situation.added, asked, situation.now).judgement
    if judgement.reason not in OF_POLICIES:
        return None
    if not judgement.reason.is_drop:
        return (yield from _closing(situation, asked, grounds, judgement.cookie))
    attempt = _Try(situation.policies)
    while judgement.reason is Reason.DROP_DENY and len(attempt.lines) < _LINES_MAX:
        if not _take_out(attempt, grounds, judgement.cookie):
            return None
        grounds = yield from suppose(replace(situation, policies=attempt.policies))
        judgement = judge(grounds.rows, situation.added, asked, situation.now).judgement
    if not judgement.reason.is_drop:
        return Change(tuple(attempt.lines))
    if judgement.reason is not Reason.DROP_POLICY:
        return None
    for name in (*(names if asked.direction is Direction.EGRESS else ()), None):
        policy = _document(situation.added, asked, name, is_denial=False)
        opened = replace(situation, policies=(*attempt.policies, *_read(policy)))
        for question in (None, name) if name is not None else (None,):
            answered = replace(opened, asked=(question, asked.remote) if question is not None else None)
            grounds = yield from suppose(answered)
            if not judge(grounds.rows, situation.added, asked, situation.now).judgement.reason.is_drop:
                return Change(tuple(attempt.lines), entry_of(asked, name), policy, name=question)
    return None


def name_change(situation: Situation, name: str, packet: Asked | None) -> Generator[None, None, Change | None]:
    """That a name may be asked, or may not. packet: to what its addresses are to be opened; None: to everything."""
    opened = packet or Asked(Direction.EGRESS, _SOMEWHERE, 0, 0)
    grounds = yield from suppose(situation)
    verdict = question_verdict(grounds, situation.added, name)
    if verdict.allowed:
        return (yield from _unasked(situation, name, grounds, verdict))
    by_name = _document(situation.added, opened, name, is_denial=False)
    question = _QUESTION.format(json.dumps(name.removesuffix(".")))
    for policy, entry in ((by_name, entry_of(opened, name)), (by_name + question, None)):
        grounds = yield from suppose(replace(situation, policies=(*situation.policies, *_read(policy))))
        if question_verdict(grounds, situation.added, name).allowed:
            return Change(entry=entry, policy=policy)
    return None


def _unasked(situation: Situation, name: str, grounds: Grounds, verdict: DnsVerdict) -> Generator[None, None, Change | None]:
    attempt = _Try(situation.policies)
    while len(attempt.lines) < _LINES_MAX and _take_out(attempt, grounds, verdict.cookie):
        grounds = yield from suppose(replace(situation, policies=attempt.policies))
        verdict = question_verdict(grounds, situation.added, name)
        if not verdict.allowed:
            return Change(tuple(attempt.lines))
    return None


# Where a rule speaks of DNS, a name that may be reached may not be asked for that alone (DECISIONS 4).
_QUESTION = """\
    - toPorts:
        - ports: [{{port: "53", protocol: ANY}}]
          rules: {{dns: [{{matchName: {0}}}]}}
"""
_SOMEWHERE = bytes(4)


def question_verdict(grounds: Grounds, added: EndpointAdded, name: str) -> DnsVerdict:
    """Of a question to a server that no rule names."""
    compiled = grounds.engine.groups.endpoints[added.endpoint].compiled
    assert compiled is not None
    return compiled.may_ask(name, frozenset({LABEL_WORLD}), PORT_DNS, PROTOCOL_UDP)


def _closing(situation: Situation, asked: Asked, grounds: Grounds, cookie: int) -> Generator[None, None, Change | None]:
    alone = _Try(situation.policies)
    line = None
    if _take_out(alone, grounds, cookie):
        without = yield from suppose(replace(situation, policies=alone.policies))
        if judge(without.rows, situation.added, asked, situation.now).judgement.reason.is_drop:
            line = alone.lines[0]
    policy = _document(situation.added, asked, None, is_denial=True)
    denied = yield from suppose(replace(situation, policies=(*situation.policies, *_read(policy))))
    if not judge(denied.rows, situation.added, asked, situation.now).judgement.reason.is_drop:
        return Change((line,)) if line is not None else None
    closes = any(each.default_deny_egress for each in situation.policies)
    entry = entry_of(asked, None, is_denial=True) if closes else None
    return Change(entry=entry, policy=policy, or_take_out=line)


def _take_out(attempt: _Try, grounds: Grounds, cookie: int) -> bool:
    """The line of this rule, which may be several rules; False where there is none."""
    rule = grounds.engine.cookies.rule_by_cookie.get(cookie)
    if rule is None:
        return False
    attempt.lines.append(str(rule.origin))
    attempt.policies = without(attempt.policies, rule)
    return True


def without(policies: tuple[Policy, ...], rule: Rule) -> tuple[Policy, ...]:
    """Without what stands at this rule's line."""
    return tuple(
        replace(policy, rules=tuple(each for each in policy.rules if each.origin != rule.origin)) for policy in policies
    )


def _read(policy: str) -> tuple[Policy, ...]:
    reading = read_policy_text("the change", policy.encode())
    assert not reading.mistakes, reading.mistakes
    return reading.policies


def entry_of(asked: Asked, name: str | None, *, is_denial: bool = False) -> str | None:
    """A line of a list for this packet, by name or by address."""
    if asked.direction is Direction.INGRESS:
        return None
    target = text_of(asked.remote) if name is None else name.removesuffix(".") or "."
    sign = "!" if is_denial else ""
    if asked.protocol in _ICMP:
        return f"{sign}{target}/icmp"
    if asked.protocol not in PROTOCOLS_WITH_PORTS:
        return f"{sign}{target}"
    protocol = PROTOCOL_NAMES[asked.protocol]
    if not asked.port:
        return f"{sign}{target}/{protocol}"
    return f"{sign}[{target}]:{asked.port}/{protocol}" if ":" in target else f"{sign}{target}:{asked.port}/{protocol}"


def _document(added: EndpointAdded, asked: Asked, name: str | None, *, is_denial: bool) -> str:
    """A policy of this endpoint alone, that is, of those with all of its labels."""
    is_out = asked.direction is Direction.EGRESS
    section = ("egress" if is_out else "ingress") + ("Deny" if is_denial else "")
    labels = f"matchLabels: {json.dumps(dict(added.labels))}" if added.labels else ""
    lines = [
        "apiVersion: cilium.io/v2",
        "kind: CiliumNetworkPolicy",
        "metadata: {name: explained}",
        "spec:",
        f"  endpointSelector: {{{labels}}}",
        "  enableDefaultDeny: {egress: false, ingress: false}",
        f"  {section}:",
        f"    - {_peer(asked.remote, name, 'to' if is_out else 'from')}",
    ]
    if asked.protocol in _ICMP:
        family = "IPv4" if asked.protocol == PROTOCOL_ICMP else "IPv6"
        lines.append(f"      icmps: [{{fields: [{{family: {family}, type: {asked.port}}}]}}]")
    elif asked.protocol in PROTOCOLS_WITH_PORTS:
        protocol = PROTOCOL_NAMES[asked.protocol].upper()
        lines.append(f'      toPorts: [{{ports: [{{port: "{asked.port}", protocol: {protocol}}}]}}]')
    return "\n".join(lines) + "\n"


def _peer(remote: Address, name: str | None, side: str) -> str:
    if name is not None:
        return f"toFQDNs: [{{matchName: {json.dumps(name.removesuffix('.') or '.')}}}]"
    return f'{side}CIDR: ["{Prefix.of(remote)}"]'
