"""The packet cases of tests/cases/datapath.json, put to a judge.

They carry what a peer does. Where DECISIONS say otherwise the decision holds, and DEVIATIONS says so, step by step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from agent.core.types import (
    IDENTITY_ANY,
    IDENTITY_WORLD,
    Direction,
    GroupValue,
    PolicyKey,
    PolicyValue,
    Table,
    Verdict,
    Write,
)
from agent.datapath.abi import Reason
from agent.datapath.model import NS, life_of
from tests.judges import Judge, ModelJudge
from tests.verdict_cases import BASE, GROUP, holds

Case = dict[str, Any]

_FILE: Final = Path(__file__).parent / "cases" / "datapath.json"
_PEER, _PEER6 = 1 << 24, (1 << 24) + 1
_IDENTITIES: Final = {"any": IDENTITY_ANY, "peer": _PEER, "peer6": _PEER6, "world4": IDENTITY_WORLD, "world6": IDENTITY_WORLD}
_PROTOCOLS: Final = {"any": 0, "TCP": 6, "UDP": 17, "SCTP": 132, "ICMP": 1, "ICMPv6": 58}
_VERDICTS: Final = {"allow": Verdict.ALLOW, "deny": Verdict.DENY, "redirect": Verdict.REDIRECT}

_REASONS: Final = {
    "policy": {Reason.DROP_POLICY, Reason.DROP_UNRELATED},
    "policy deny": {Reason.DROP_DENY},
    "fragment without its first": {Reason.DROP_FRAGMENT},
    "invalid header": {Reason.DROP_MALFORMED},
    "unknown L3": {Reason.DROP_ETHERTYPE},
    "unsupported L2": {Reason.DROP_ETHERTYPE},
    "too many extension headers": {Reason.DROP_EXTENSIONS},
    "no next header": {Reason.DROP_EXTENSIONS},
}
_FLOW_STATES: Final = {
    "new": {Reason.PASS_POLICY},
    "established": {Reason.PASS_FLOW},
    "reply": {Reason.PASS_FLOW},
    "related": {Reason.PASS_RELATED},
}

_STRONGER = "of the identity's row and anybody's the stronger verdict holds, not the closer row: types.Verdict, verdict.h 9"
_NETWORK_RULE = "another IP protocol passes where a rule allows the network (decision 18)"
DEVIATIONS: Final = {
    ("fp-0010", 0): (Reason.PASS_REDIRECT, _STRONGER),
    ("fp-0011", 0): (Reason.PASS_REDIRECT, _STRONGER),
    ("fp-0012", 0): (Reason.PASS_REDIRECT, _STRONGER),
    ("fp-0013", 0): (Reason.PASS_REDIRECT, _STRONGER),
    ("fp-0054", 1): (Reason.PASS_RELATED, "errors of routers on the way pass (decision 16)"),
    ("fp-0055", 0): (Reason.DROP_UNRELATED, "only about an allowed flow (decision 16); there is no option to let all pass"),
    ("fp-0064", 0): (Reason.PASS_POLICY, "IPv6 fragments are judged; this one is a whole packet (decision 18)"),
    ("fp-0073", 0): (Reason.PASS_POLICY, _NETWORK_RULE),
    ("fp-0074", 0): (Reason.PASS_POLICY, _NETWORK_RULE),
    ("fp-0089", 0): (Reason.PASS_POLICY, "eight extension headers are walked (decision 18)"),
    ("fp-0093", 2): (
        Reason.PASS_POLICY,
        "a redirected packet leaves no flow (DESIGN, DNS hand-over), so the next one opens it",
    ),
}


def cases(*, with_packets: bool) -> list[Case]:
    every: list[Case] = json.loads(_FILE.read_text(encoding="utf-8"))["cases"]
    return [case for case in every if ("policy" in case) is with_packets]


def _policy_writes(entries: list[Case], number: int) -> Iterator[Write]:
    for entry in entries:
        protocol = _PROTOCOLS[entry["proto"]]
        direction = Direction[entry["dir"].upper()]
        for port, bits in _blocks(entry["port"]) if protocol else [(0, 0)]:
            key = PolicyKey(number, _IDENTITIES[entry["identity"]], direction, protocol, port, bits)
            yield Write(Table.POLICY, key, PolicyValue(_VERDICTS[entry["action"]], 0))


def _blocks(port: Any) -> list[tuple[int, int]]:
    """Ports to aligned blocks: (first port, bits that count)."""
    if port == "any":
        return [(0, 0)]
    first, last = port if isinstance(port, list) else (port, port)
    found = []
    while first <= last:
        bits = 16
        while bits and not first & (1 << (16 - bits)) and first + (1 << (17 - bits)) - 1 <= last:
            bits -= 1
        found.append((first, bits))
        first += 1 << (16 - bits)
    return found


def play(judge: Judge, case: Case) -> None:
    number, now = 1, 0.0
    group = GroupValue(number, "egress" in case["enforced"], "ingress" in case["enforced"], audit=False)
    judge.apply(
        [*BASE, holds("2001:db8:0:b::7", _PEER6), *_policy_writes(case["policy"], number), Write(Table.GROUPS, GROUP, group)]
    )
    started = judge.now if isinstance(judge, ModelJudge) else 0
    for index, step in enumerate(case["steps"]):
        if step["t"] > now:
            judge.advance(step["t"] - now)
            now = step["t"]
        if step.get("op") == "policy":
            number += 1
            group = group._replace(set=number)
            judge.apply([*_policy_writes(step["entries"], number), Write(Table.GROUPS, GROUP, group)])
            continue
        got = judge.judge(Direction[step["dir"].upper()], bytes.fromhex(step["frame_hex"]))
        where = f"{case['id']} step {index}: {got.name}"
        if (case["id"], index) in DEVIATIONS:
            assert got is DEVIATIONS[case["id"], index][0], where
            continue
        _compare(step["expect"], got, where)
        if isinstance(judge, ModelJudge) and "lifetime" in step["expect"]:
            ((key, flow),) = judge.model.flows.items()
            life = life_of(key.protocol, flow.state, is_settled=flow.settled, is_closed=flow.is_closed)
            assert flow.last + life - started == step["expect"]["lifetime"] * NS, where


def _compare(expect: Case, got: Reason, where: str) -> None:
    match expect["verdict"]:
        case "to-proxy":
            assert got is Reason.PASS_REDIRECT, where
        case "drop":
            assert got.is_drop, where
            assert "reason" not in expect or got in _REASONS[expect["reason"]], where
        case "pass":
            assert not got.is_drop, where
            assert got is not Reason.PASS_REDIRECT, where
            assert "ct" not in expect or got in _FLOW_STATES[expect["ct"]], where
