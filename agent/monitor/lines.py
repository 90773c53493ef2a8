"""One line for each fact: when, whose, verdict, what. Names come from the network: what a terminal would obey is escaped."""

from __future__ import annotations

from typing import Final

import click

from agent.cli.rows import cell_as_text
from agent.monitor.facts import KnownEndpoints, Row, rcode_text, remote_of, verdict_of

_COLOURS: Final = {"allowed": "green", "denied": "red", "audited": "yellow", "failed": "magenta", "lost": "yellow"}
_INTERFACE_WIDTH: Final = 6
_VERDICT_WIDTH: Final = 7


def line_of(
    fact: Row, endpoints: KnownEndpoints, *, times: int = 1, width: int | None = None, is_coloured: bool = False
) -> str:
    """Without its newline. times: how often it was so. width: a line that is longer is cut; None leaves it whole."""
    time = str(fact.get("time", ""))[11:23]
    verdict = verdict_of(fact) or fact["kind"]
    before = f"{time:12} {endpoints.label_of(fact):{_INTERFACE_WIDTH}} "
    behind = f"{'':{max(0, _VERDICT_WIDTH - len(verdict))}} {what_of(fact)}{f' ({times} x)' if times > 1 else ''}"
    if width is not None and (room := width - len(before) - len(verdict)) < len(behind):
        behind = behind[: max(0, room - 1)] + "…"
    if is_coloured and verdict in _COLOURS:
        verdict = click.style(verdict, fg=_COLOURS[verdict])
    return (before + verdict + behind).rstrip()


def what_of(fact: Row) -> str:
    kind = fact["kind"]
    if kind == "question":
        return _question(fact)
    if kind in ("verdict", "drop", "chatter"):
        return _packet(fact)
    if kind == "policy":
        if fact.get("error"):
            return f"refused: {cell_as_text(fact['error'])}"
        return f"{fact['policies']} policies in force for {fact['endpoints']} endpoints"
    if kind == "guard":
        addresses = ", ".join(f"{address} ({why})" for address, why in fact["addresses"].items())
        return f"taken out of the reply for {name_text(fact['name'])}: {addresses}"
    if kind == "lost":
        return f"{fact['count']:,} events came faster than they could be told"
    return cell_as_text({key: value for key, value in fact.items() if key not in ("kind", "time", "endpoint", "interface")})


def name_text(name: object) -> str:
    return cell_as_text(name).rstrip(".") or "."


def peer_text(packet: Row) -> str:
    """The far side by its name, if it has one, and the port that was judged."""
    names, remote, port = packet["names"], remote_of(packet), packet["port"]
    peer = name_text(names[0]) if names else remote
    is_icmp = str(packet["protocol"]).startswith("icmp")
    if packet["direction"] == "ingress":
        return f"from {peer}" + (f" to :{port}" if port and not is_icmp else "")
    if not port or is_icmp:
        return peer
    return f"[{peer}]:{port}" if ":" in peer else f"{peer}:{port}"


def _question(fact: Row) -> str:
    if "name" not in fact:
        return f"a message that is no question ({cell_as_text(fact.get('why'))})"
    said = [f"{cell_as_text(fact['type']):<4} {name_text(fact['name'])}"]
    verdict, addresses = verdict_of(fact), [answer["address"] for answer in fact.get("answers") or ()]
    if addresses:
        said.append(",".join(addresses))
    elif fact["outcome"] == "released":
        said.append(rcode_text(fact) if fact.get("rcode") else "no address")
    why = fact.get("why") or ("no policy allows this name" if verdict in ("denied", "audited") else None)
    if why is not None:
        said.append(f"({cell_as_text(why)})")
    said += _rule(fact)
    if fact.get("upstream_s") is not None:
        said.append(f"{1000 * (fact['upstream_s'] + (fact.get('gate_s') or 0)):.1f} ms")
    return " ".join(said)


def _packet(fact: Row) -> str:
    said = [f"{cell_as_text(fact['protocol']):<4} {peer_text(fact)}"]
    if fact["names"]:
        said.append(f"({remote_of(fact)})")
    if fact["kind"] == "drop":
        said.append(cell_as_text(fact.get("why") or fact["reason"]))
    return " ".join(said + _rule(fact))


def _rule(fact: Row) -> list[str]:
    """File and line, without the directory: `-o json` has that."""
    rule = str(fact.get("rule") or "no rule")
    return [] if rule == "no rule" else [cell_as_text(rule.rpartition("/")[2])]
