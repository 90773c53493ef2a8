"""`namegate explain`: why a packet, a name or an address is allowed or denied, and what would turn that round."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.rows import cell_as_text
from agent.cli.show import encoded, output_option
from agent.control import ControlError

_MARGIN = 12
_STDIN = "-"


@click.command(
    short_help="Why is this allowed, or denied?",
    epilog=with_examples(
        "sudo namegate explain --endpoint veth-build 198.51.100.7 tcp/443",
        "sudo namegate explain api.example.com",
        "sudo namegate explain 198.51.100.7",
        "sudo namegate explain --drop 1",
        "namegate explain --policy policies/ 198.51.100.7 tcp/443",
    ),
)
@click.argument("target", required=False, metavar="[ADDRESS|NAME]")
@click.argument("packet", required=False, metavar="[PROTOCOL/PORT]")
@click.option("--endpoint", metavar="E", help="Its number, its interface, or a label k=v of it; else the only one, or each.")
@click.option("--ingress", is_flag=True, help="What the address opens, not what is opened to it.")
@click.option("--drop", metavar="N", help="The N-th last drop; - reads one that `drops -o json` printed.")
@click.option("--policy", "policies", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="As if in force.")
@output_option
@click.pass_context
def explain(
    context: click.Context,
    target: str | None,
    packet: str | None,
    endpoint: str | None,
    ingress: bool,
    drop: str | None,
    policies: tuple[Path, ...],
    output: str,
) -> None:
    """Why is this packet, name, address or drop allowed or denied, by the rows in the kernel?

    With --policy: as if these files (or directories) were in force; for a packet, without an agent too. PROTOCOL/PORT is
    tcp/443, udp/53, icmp/8, or the number of another protocol. Exit codes: 0 allowed; 1 denied, or the kernel has not what
    the agent wants.
    """
    session: Session = context.obj
    if (target is None) is (drop is None):
        raise click.UsageError("Say an address or a name, or --drop.", context)
    arguments: dict[str, object] = {
        "target": target,
        "packet": packet,
        "endpoint": endpoint,
        "ingress": ingress,
        "drop": _drop(drop) if drop is not None else None,
        "policies": [str(path.absolute()) for path in policies] or None,
    }
    answer = _answer(session, arguments, policies)
    if not isinstance(answer, dict):
        raise Sentence("the agent's answer to `explain` is not understood: is it of another release?")
    click.echo("".join(f"{line}\n" for line in _lines(answer)) if output == "table" else encoded(answer, output), nl=False)
    if answer.get("differences") or not answer.get("allowed"):
        context.exit(1)


def _answer(session: Session, arguments: dict[str, object], policies: tuple[Path, ...]) -> object:
    """An agent knows more: names, endpoints, flows. Where there is none, or no right to ask it, policies say something too."""
    can_do_without = bool(policies and arguments["target"] and arguments["packet"])
    if not (can_do_without and not session.environment.is_root()):
        session.require_root("explain", "it asks the agent through a socket for root")
        try:
            return session.ask("explain", patience=60, **arguments)
        except ControlError as error:
            if not (can_do_without and "no agent is running" in error.sentence):
                raise
    return _without_agent(arguments, policies)


def _without_agent(arguments: Mapping[str, object], policies: tuple[Path, ...]) -> Mapping[str, object]:
    from agent.config import POLICY_SUFFIXES, policy_files
    from agent.core.types import Direction
    from agent.documents.remarks import PolicyError
    from agent.policy.files import read_policies
    from agent.why.explain import offline

    found = policy_files([str(path) for path in policies])
    if not found:
        raise Sentence(f"no policy in {' '.join(map(str, policies))}: a policy's name ends in {', '.join(POLICY_SUFFIXES)}")
    labels = dict(pair.partition("=")[::2] for pair in str(arguments["endpoint"] or "").split(",") if "=" in pair)
    direction = Direction.INGRESS if arguments["ingress"] else Direction.EGRESS
    try:
        read = read_policies(found)
    except PolicyError as error:
        raise Sentence(f"these policies cannot be in force:\n{error}") from None
    return offline(str(arguments["target"]), str(arguments["packet"]), direction, labels, read)


def _drop(text: str) -> object:
    """A place, or the drop itself: what was printed last, where it is a list or lines."""
    if text != _STDIN:
        if not text.isdecimal():
            raise Sentence(f"--drop: {text!r} is no number; 1 is the last drop, - reads one from standard input")
        return int(text)
    given = sys.stdin.read().strip()
    for piece in (given, given.rpartition("\n")[2]):
        try:
            drop = json.loads(piece)
        except ValueError:
            continue
        if isinstance(drop, list) and drop:
            drop = drop[-1]
        if isinstance(drop, dict):
            return drop.get("fact", drop)
    raise Sentence("--drop -: there is no drop on standard input; `namegate drops -o json` prints some")


# --- as text ---------------------------------------------------------------------------------------------------------


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    if "then" in answer:
        yield from _drop_lines(answer)
    elif "question" in answer:
        yield from _packet_lines(answer)
    elif "name" in answer:
        yield from _name_lines(answer)
    else:
        yield from _address_lines(answer)


def _said(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A title before the first of its lines."""
    for line in lines:
        yield f"{title.ljust(_MARGIN)}{line}".rstrip()
        title = ""


def _drop_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    drop, then = answer["drop"], answer["then"]
    what = f"{drop['protocol']} {drop['source']} to {drop['destination']}" + (f", {drop['port']}" if drop.get("port") else "")
    yield from _said("dropped", [f"{drop.get('time', '')} {what}".strip()])
    yield from _said("then", [f"{then['reason']} ({then['number']}): {then['sentence']}", f"rule: {then['rule']}"])
    yield from _said("", [str(then["why"])] if then.get("why") else [])
    yield ""
    if answer["now"] is None:
        yield "no rule decides over such a packet: there is nothing to judge anew"
    else:
        yield "the same packet now:"
        yield from _packet_lines(answer["now"])


def _packet_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    question = answer["question"]
    way = "to" if question["direction"] == "egress" else "from"
    yield from _said("packet", [f"{question['what']} {way} {question['remote']}, {question['interface']} {question['local']}"])
    audited = "; it passes because of the audit" if answer["audited"] else ""
    reason = f"{answer['reason']}, {answer['number']}"
    yield from _said("verdict", [f"{answer['verdict']} ({reason}): {answer['sentence']}{audited}"])
    if answer.get("is_offline"):
        yield from _said("", ["no agent was asked: names that were resolved and labels of endpoints are not known"])
    yield from _said("rules", [_rule_text(rule) for rule in answer["rules"]] or ["no rule"] * (answer["rule"] is not None))
    yield from _said("names", (_seen_text(seen) for seen in answer["names"]))
    if answer["identity"] is not None and answer["labels"]:
        yield from _said("identity", [f"{answer['identity']} ({answer['scope']}): {cell_as_text(answer['labels'])}"])
    yield from _said("selectors", (_selector_text(selector) for selector in answer["selectors"]))
    yield from _said("rows", (_row_text(row) for row in answer["rows"]))
    yield from _said("DIFFERENCE", answer["differences"])
    yield from _said("flows", (_flow_text(flow) for flow in answer["flows"]))
    names = (f"were it an address of {cell_as_text(one['selector'])} ({one['rule']})" for one in answer["would_open"][:5])
    yield from _said("would pass", names)
    yield from _said("turn round", _change_lines(answer["change"]))


def _rule_text(rule: Mapping[str, Any]) -> str:
    policy = f" ({rule['policy']})" if rule["policy"] else ""
    return f"{rule['verdict'].ljust(8)} {rule['rule']}{policy} for {cell_as_text(rule['selector'])}{_decides(rule)}"


def _seen_text(seen: Mapping[str, Any]) -> str:
    left = "its lifetime is over" if seen["expires_in"] is None else f"{seen['expires_in']:.0f}s left"
    who = seen["interface"] or "a process before"
    chain = f", by {' > '.join(map(cell_as_text, seen['chain']))}" if len(seen["chain"]) > 1 else ""
    address = f" {seen['address']}" if "address" in seen else ""
    return f"{cell_as_text(seen['name'])}{address} answered to {who}, last {seen['last'][11:19]}{chain}: {left}"


def _selector_text(selector: Mapping[str, Any]) -> str:
    text = cell_as_text(selector["selector"])
    if "bag" not in selector:
        return text
    names = f", this one by {cell_as_text(selector['names'])}" if selector.get("names") else ""
    return f"{text} holds {selector['bag']}{names}"


def _row_text(row: Mapping[str, Any]) -> str:
    if row["table"] == "ipcache":
        return f"ipcache {row['prefix']} ({row['scope']}) is {row['identity']}{_decides(row)}"
    what = f"set {row['set']}, identity {row['identity']}, {row['direction']} {row['protocol']} {row['port']}"
    return f"policy {what}: {row['verdict']}, {row['rule']}{_decides(row)}"


def _decides(row: Mapping[str, Any]) -> str:
    return "  <- decides" if row.get("decides") else ""


def _flow_text(flow: Mapping[str, Any]) -> str:
    remembered = f"identity {flow['identity']}, set {flow['set']}, {flow['rule']}"
    passes = "passes" if flow["next_passes"] else "is dropped"
    ends = f"{flow['local']} {flow['remote']} {flow['state']}, idle {flow['idle']:.0f}s"
    return f"{ends}; {remembered}; the next packet {passes} ({flow['next_packet']}, {flow['number']})"


def _change_lines(change: Mapping[str, Any] | None) -> Iterator[str]:
    if change is None:
        yield "no change of a policy does that"
        return
    for line in change["take_out"]:
        yield f"take out {line}"
    if change["entry"] is not None:
        yield f"add to a list: {change['entry']}"
    if change["or_take_out"] is not None:
        yield f"or take out {change['or_take_out']}"
    if change["after_asking"] is not None:
        yield f"then {change['after_asking']} has to be asked again"
    if change["policy"] is not None:
        yield "as a policy of its own:" if change["entry"] is None else "or, as a policy of its own:"
        yield from (f"  {line}" for line in change["policy"].splitlines())


def _name_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    yield from _said("name", [answer["name"]])
    for row in answer["endpoints"]:
        verdict = "may be asked" if row["may_ask"] else "may not be asked"
        pattern = f", by {cell_as_text(row['pattern'])}" if row["pattern"] else ""
        yield from _said(row["interface"], [f"{verdict}: {row['sentence']} ({row['rule']}{pattern})"])
        for packet in row["packets"]:
            question = packet["question"]
            said = f"{question['what']} to {question['remote']}: {packet['verdict']} ({packet['reason']}, {packet['number']})"
            yield from _said("", [f"{said}, {packet['rule'] or 'no rule'}"])
        if answer["packet"] and not row["packets"]:
            yield from _said("", [f"no address of it is known here: {answer['packet']} can be judged when it was asked"])
        yield from _said("turn round", _change_lines(row["change"]))
    yield from _said("taken out", _taken_out_lines(answer["taken_out"]))
    yield from _said("addresses", (_held_text(one) for one in answer["addresses"]))
    yield from _said("selectors", (_selector_text(selector) for selector in answer["selectors"]))
    yield from _said("seen", (_seen_text(seen) for seen in answer["seen"]))
    yield from _said("DIFFERENCE", answer["differences"])


def _taken_out_lines(taken_out: Mapping[str, Any] | None) -> Iterator[str]:
    if taken_out is not None:
        addresses = ", ".join(f"{address} ({kind})" for address, kind in taken_out["addresses"].items())
        audited = ", or would have been without audit" if taken_out["audited"] else ""
        yield f"{addresses}, by the address guard, {taken_out['ago']:.0f}s ago{audited}"
        yield "`dns.allow-addresses`, or a policy's annotation `namegate/allow-addresses`, lets such addresses stand"


def _held_text(one: Mapping[str, Any]) -> str:
    return f"{one['address']} ({one['scope']}), {one['expires_in']:.0f}s left: {cell_as_text(one['labels'])}"


def _address_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    yield from _said("address", [answer["address"]])
    yield from _said("names", (_seen_text(seen) for seen in answer["names"]))
    for row in answer["endpoints"]:
        labels = f": {cell_as_text(row['labels'])}" if row["labels"] else ""
        yield from _said(row["interface"], [f"identity {row['identity']} ({row['scope']}){labels}"])
        yield from _said("", (_selector_text(selector) for selector in row["selectors"]))
        yield from _said("", (_row_text({"table": "ipcache", **one}) for one in row["rows"]))
        yield from _said("", (_row_text(one) for one in row["policy"]))
        yield from _said("", [f"what no row speaks of is {row['default']}"])
    yield from _said("DIFFERENCE", answer["differences"])
