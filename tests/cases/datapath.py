"""Packets: what becomes of each frame, and how long a flow lives.

Judged on the model, which needs nothing; `scripts/cases` puts them to the native C too where there is a compiler, and to the
program in the kernel where root runs it. All of them have to say what the case says, or what its class of decisions.toml does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from agent.core.types import (
    IDENTITY_ANY,
    IDENTITY_WORLD,
    GroupValue,
    PolicyKey,
    PolicyValue,
    Prefix,
    Table,
    Write,
    packed,
)
from agent.datapath.abi import Reason
from agent.datapath.errors import DatapathError
from agent.datapath.model import NS, life_of
from tests.cases.runner import DIRECTORY, DoesNotApply, Fields, Sheet, Verdict, read_cases, read_decisions, verdict_of
from tests.judges import Judge, KernelJudge, ModelJudge, NativeJudge, build_harness, can_run
from tests.packets import CLIENT, PEER, TCP, frame, tcp
from tests.verdict_cases import ALLOW, BASE, DENY, EGRESS, GROUP, INGRESS, MOVED, PEERS, REDIRECT, holds, rule

FIELDS: Final = ("enforced", "policy", "steps", "timers", "options", "address", "length", "expect")

_PEER6: Final = PEERS + 1
_IDENTITIES: Final = Fields(any=IDENTITY_ANY, peer=PEERS, peer6=_PEER6, world4=IDENTITY_WORLD, world6=IDENTITY_WORLD)
_PROTOCOLS: Final = Fields({"any": 0, "TCP": 6, "UDP": 17, "SCTP": 132, "ICMP": 1, "ICMPv6": 58})
_VERDICTS: Final = Fields(allow=ALLOW, deny=DENY, redirect=REDIRECT)
_DIRECTIONS: Final = Fields(egress=EGRESS, ingress=INGRESS)
_REASONS: Final = Fields({
    "policy": {Reason.DROP_POLICY, Reason.DROP_UNRELATED},
    "policy deny": {Reason.DROP_DENY},
    "fragment without its first": {Reason.DROP_FRAGMENT},
    "invalid header": {Reason.DROP_MALFORMED},
    "unknown L3": {Reason.DROP_ETHERTYPE},
    "unsupported L2": {Reason.DROP_ETHERTYPE},
    "too many extension headers": {Reason.DROP_EXTENSIONS},
    "no next header": {Reason.DROP_EXTENSIONS},
})  # fmt: skip
_FLOW_STATES: Final = Fields({
    "new": {Reason.PASS_POLICY},
    "established": {Reason.PASS_FLOW},
    "reply": {Reason.PASS_FLOW},
    "related": {Reason.PASS_RELATED},
})  # fmt: skip

_makers: Final[dict[str, Callable[[], Judge]]] = {"": ModelJudge}


def judge(case: Fields, sheet: Sheet) -> None:
    match case["group"]:
        case "mask":
            sheet.compare(
                "prefix", Prefix.masked(packed(case["address"]), case["length"]).address, packed(case["expect"]["prefix"])
            )
        case "learned-address":
            _judge_orders(case, sheet)
        case _:
            for name, make in _makers.items():
                play(make(), case, sheet, name)


@contextlib.contextmanager
def every_judge() -> Iterator[None]:
    """While it lasts, cases are put to every judge that this host and this user have."""
    with contextlib.ExitStack() as stack:
        if shutil.which("gcc"):
            program = build_harness(Path(stack.enter_context(tempfile.TemporaryDirectory())))

            def native() -> Judge:
                made = NativeJudge(program)
                stack.callback(made.close)
                return made

            _makers["native"] = native
            stack.callback(_makers.pop, "native")
        if os.geteuid() == 0:
            with contextlib.suppress(DatapathError):
                kernel = KernelJudge()
                stack.callback(kernel.close)

                def again() -> Judge:
                    kernel.reset()
                    return kernel

                _makers["kernel"] = again
                stack.callback(_makers.pop, "kernel")
        yield


def play(judge: Judge, case: Fields, sheet: Sheet, name: str = "") -> None:
    """One case with packets. name: of the judge, said with each difference."""
    by = f" ({name})" if name else ""
    number, now = 1, 0.0
    enforced = [_DIRECTIONS[direction] for direction in case["enforced"]]
    group = GroupValue(number, EGRESS in enforced, INGRESS in enforced, audit=False)
    judge.apply(
        [*BASE, holds("2001:db8:0:b::7", _PEER6), *_policy_writes(case["policy"], number), Write(Table.GROUPS, GROUP, group)]
    )
    started = judge.now if isinstance(judge, ModelJudge) else 0
    for index, step in enumerate(case["steps"]):
        if step["t"] > now:
            judge.advance(step["t"] - now)
            now = step["t"]
        if "op" in step:
            if step.only("op", "t", "entries")["op"] != "policy":
                raise DoesNotApply(f"unknown step {step['op']!r}")
            number += 1
            group = group._replace(set=number)
            judge.apply([*_policy_writes(step["entries"], number), Write(Table.GROUPS, GROUP, group)])
            continue
        step.only("t", "dir", "packet", "frame_hex", "expect")
        expect = step["expect"].only("verdict", "reason", "ct", "lifetime")
        whole = bytes.fromhex(step["frame_hex"])
        if isinstance(judge, KernelJudge) and not can_run(whole):
            return
        got = judge.judge(_DIRECTIONS[step["dir"]], whole)
        wanted = _in_words(expect)
        sheet.compare(f"step {index}{by}", wanted if _is_as_wanted(expect, got) else got.text, wanted)
        if isinstance(judge, ModelJudge) and "lifetime" in expect:
            ((key, flow),) = judge.model.flows.items()
            life = life_of(key.protocol, flow.state, is_settled=flow.settled, is_closed=flow.is_closed)
            sheet.compare(f"step {index} lifetime", (flow.last + life - started) / NS, expect["lifetime"])


def cases_with_packets() -> list[Fields]:
    return [case for case in read_cases(DIRECTORY / "datapath.json") if "policy" in case]


def verdict_by(judge: Judge, case: Fields) -> Verdict:
    """What one judge makes of a case with packets."""
    sheet = Sheet()
    play(judge, case, sheet)
    return verdict_of("datapath", case, sheet, read_decisions())


def _policy_writes(entries: list[Fields], number: int) -> Iterator[Write]:
    for entry in entries:
        entry.only("dir", "identity", "proto", "port", "action")
        protocol = _PROTOCOLS[entry["proto"]]
        for port, bits in _blocks(entry["port"]) if protocol else [(0, 0)]:
            key = PolicyKey(number, _IDENTITIES[entry["identity"]], _DIRECTIONS[entry["dir"]], protocol, port, bits)
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


def _in_words(expect: Fields) -> str:
    return " ".join(str(expect[key]) for key in ("verdict", "reason", "ct") if key in expect)


def _is_as_wanted(expect: Fields, got: Reason) -> bool:
    match expect["verdict"]:
        case "to-proxy":
            return got is Reason.PASS_REDIRECT
        case "drop":
            return got.is_drop and ("reason" not in expect or got in _REASONS[expect["reason"]])
        case "pass":
            is_passing = not got.is_drop and got is not Reason.PASS_REDIRECT
            return is_passing and ("ct" not in expect or got in _FLOW_STATES[expect["ct"]])
        case other:
            raise DoesNotApply(f"unknown verdict {other!r}")


def _judge_orders(case: Fields, sheet: Sheet) -> None:
    """An address takes up a new identity: between the two writes its packets pass, or do not."""
    writes = Fields({"allow 2": rule(ALLOW, MOVED), "A -> 2": holds(PEER, MOVED)})
    for index, step in enumerate(case["steps"]):
        if "do" in step:
            continue
        model = ModelJudge()
        model.apply([*BASE, rule(ALLOW)])
        has_dropped = False
        for name in step.only("order", "drops_possible")["order"]:
            model.apply([writes[name]])
            has_dropped |= model.judge(EGRESS, frame(CLIENT, PEER, TCP, tcp(40000, 443))).is_drop
        sheet.compare(f"step {index} drops", has_dropped, step["drops_possible"])
