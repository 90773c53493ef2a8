"""Facts as the agent tells them, for tests that look at what is made of them; and rows of `endpoints` that they are about."""

from __future__ import annotations

import datetime as dt
from typing import Any

BEGAN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)

Row = dict[str, Any]


def at(seconds: float) -> str:
    return (BEGAN + dt.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def endpoint(number: int = 1, labels: dict[str, str] | None = None, **fields: Any) -> Row:
    row = {"endpoint": number, "interface": f"ep{number}", "scope": "shared", "addresses": [f"192.0.2.{number}"]}
    return {**row, "labels": {"app": f"e{number}"} if labels is None else labels, **fields}


def question(name: str = "a.test.", *addresses: str, seconds: float = 0, **fields: Any) -> Row:
    """Allowed and answered, unless the fields say otherwise."""
    fact = {
        "kind": "question", "time": at(seconds), "endpoint": 1, "client": "192.0.2.1", "server": "198.51.100.53",
        "protocol": "udp", "name": name, "type": "A", "verdict": "allowed", "upstream": "198.51.100.53", "upstream_s": 0.001,
        "gate_s": 0.0005, "rows": len(addresses), "rcode": 0, "cnames": [], "outcome": "released", "rule": "/etc/p.txt:3",
        "answers": [{"address": address, "ttl": 60} for address in addresses],
    }  # fmt: skip
    return {**fact, **fields}


def denied(name: str = "b.test.", **fields: Any) -> Row:
    """A question that no policy allows."""
    fact = {
        "kind": "question", "time": at(0), "endpoint": 1, "client": "192.0.2.1", "server": "198.51.100.53", "protocol": "udp",
        "name": name, "type": "A", "verdict": "denied", "rows": 0, "outcome": "denied", "rule": "no rule",
    }  # fmt: skip
    return {**fact, **fields}


def flow(remote: str = "198.51.100.7", port: int = 443, *names: str, seconds: float = 0, **fields: Any) -> Row:
    """A flow that a rule allows, out of the endpoint."""
    fact = {
        "kind": "verdict", "time": at(seconds), "endpoint": 1, "reason": "pass-policy", "audited": False, "direction": "egress",
        "protocol": "tcp", "source": "192.0.2.1", "destination": remote, "source_port": 40000, "port": port,
        "identity": 16777217, "rule": "/etc/p.txt:3", "names": list(names), "why": None,
    }  # fmt: skip
    return {**fact, **fields}


def drop(remote: str = "198.51.100.9", port: int = 443, *names: str, **fields: Any) -> Row:
    """A packet to what no rule opens."""
    fact = {"kind": "drop", "reason": "policy", "identity": 2, "rule": "no rule", "why": "not resolved through the proxy"}
    return {**flow(remote, port, *names), **fact, **fields}
