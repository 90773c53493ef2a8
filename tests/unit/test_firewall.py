"""A firewall's rules, as its own tools print them: do they let intercepted DNS in, and which mark bits do they use?"""

from __future__ import annotations

from typing import Any

import pytest

from agent.host.firewall import Firewall

_IN = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "ng-gate"}}
_ESTABLISHED = {"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established", "related"]}}
_ACCEPT: dict[str, Any] = {"accept": None}
_DROP: dict[str, Any] = {"drop": None}
# `jump { … }`, for which nft has no JSON
_NAMELESS: Any = "jump {\n\t\tdrop\n\t}"


def _port(number: Any, protocol: str = "tcp") -> dict[str, Any]:
    return {"match": {"op": "==", "left": {"payload": {"protocol": protocol, "field": "dport"}}, "right": number}}


def _firewall(*rules: list[dict[str, Any]], policy: str = "drop", hook: str = "input", **chains: Any) -> Firewall:
    """One table with one base chain; chains: others of it, by name."""
    table = {"family": "inet", "table": "filter"}
    nft: list[dict[str, Any]] = [{"chain": {**table, "name": "base", "type": "filter", "hook": hook, "policy": policy}}]
    nft += [{"chain": {**table, "name": name}} for name in chains]
    nft += [{"rule": {**table, "chain": "base", "expr": rule}} for rule in rules]
    nft += [{"rule": {**table, "chain": name, "expr": rule}} for name, rules_of in chains.items() for rule in rules_of]
    return Firewall(nft)


_SET = {"set": [22, {"range": [50, 60]}]}
_NAMED_SET = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": "@friends"}}
_OTHER_IN = {"match": {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": ["lo", "ng-gate"]}}
_REVERSE_PATH = {"match": {"op": "==", "left": {"fib": {"result": "oif", "flags": ["saddr", "iif"]}}, "right": False}}


@pytest.mark.parametrize(
    ("firewall", "protocols"),
    [
        pytest.param(_firewall(policy="accept"), [], id="open"),
        pytest.param(_firewall(), ["udp", "tcp"], id="closed by its policy"),
        pytest.param(_firewall([_DROP], policy="accept"), ["udp", "tcp"], id="closed by its last rule"),
        pytest.param(_firewall([{"counter": {}}, {"reject": None}], policy="accept"), ["udp", "tcp"], id="refused"),
        pytest.param(_firewall([_ESTABLISHED, _ACCEPT]), ["udp", "tcp"], id="a question is new"),
        pytest.param(_firewall([_IN, _ACCEPT]), [], id="the remedy"),
        pytest.param(_firewall([_IN, {"counter": {}}, _DROP], policy="accept"), ["udp", "tcp"], id="the device is shut"),
        pytest.param(_firewall([_OTHER_IN, _DROP], policy="accept"), [], id="others are shut"),
        pytest.param(_firewall([_port(53), _ACCEPT]), ["udp"], id="one protocol"),
        pytest.param(_firewall([_port(_SET, "th"), _ACCEPT]), [], id="a set of ports"),
        pytest.param(_firewall([_port(22), _ACCEPT]), ["udp", "tcp"], id="another port"),
        pytest.param(_firewall([_NAMED_SET, _ACCEPT]), ["udp", "tcp"], id="an acceptance that may not be"),
        pytest.param(_firewall([_NAMED_SET, _DROP], policy="accept"), [], id="a drop that may not be"),
        pytest.param(_firewall([{"jump": {"target": "more"}}], more=[[_IN, _ACCEPT]]), [], id="in another chain"),
        pytest.param(
            _firewall([{"jump": {"target": "more"}}], [_ACCEPT], more=[[{"return": None}], [_DROP]]), [], id="and back"
        ),
        pytest.param(_firewall([{"goto": {"target": "more"}}], [_ACCEPT], more=[]), ["udp", "tcp"], id="and not back"),
        pytest.param(_firewall([{"jump": {"target": "base"}}]), ["udp", "tcp"], id="round and round"),
        pytest.param(_firewall([_port(53, "udp"), _NAMELESS], policy="accept"), [], id="a chain without a name"),
        pytest.param(_firewall(policy="drop", hook="forward"), [], id="forwarding is not ours"),
        pytest.param(
            _firewall([_REVERSE_PATH, _DROP], policy="accept", hook="prerouting"), ["udp", "tcp"], id="reverse path"
        ),
    ],
)  # fmt: skip
def test_nft(firewall: Firewall, protocols: list[str]) -> None:
    """A chain is in the way if a new question to port 53 that comes by the device surely ends in a drop."""
    found = firewall.obstacles("ng-gate")
    assert [protocol for obstacle in found for protocol in obstacle.protocols] == protocols
    assert all(obstacle.remedy == 'nft insert rule inet filter base iifname "ng-gate" accept' for obstacle in found)


_SAVED = """*filter
:INPUT {policy} [0:0]
:FORWARD DROP [0:0]
:more - [0:0]
{rules}
COMMIT
"""


@pytest.mark.parametrize(
    ("policy", "rules", "protocols"),
    [
        ("DROP", "", ["udp", "tcp"]),
        ("ACCEPT", "", []),
        ("DROP", "-A INPUT -i ng-gate -j ACCEPT", []),
        ("DROP", "-A INPUT -i ng+ -j ACCEPT", []),
        ("DROP", "-A INPUT ! -i eth0 -j ACCEPT", []),
        ("DROP", "-A INPUT -i lo -j ACCEPT", ["udp", "tcp"]),
        ("DROP", "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ["udp", "tcp"]),
        ("ACCEPT", "-A INPUT -j REJECT --reject-with icmp-host-prohibited", ["udp", "tcp"]),
        ("DROP", "-A INPUT -p udp -m udp --dport 53 -j ACCEPT", ["tcp"]),
        ("DROP", "-A INPUT -p udp -m multiport --dports 22,50:60 -m comment --comment \"to us\" -j ACCEPT", ["tcp"]),
        ("DROP", "-A INPUT -s 10.0.0.0/8 -j ACCEPT", ["udp", "tcp"]),
        ("ACCEPT", "-A INPUT -m limit --limit 1/sec -j DROP", []),
        ("ACCEPT", "-A INPUT -j LOG --log-prefix x\n-A INPUT -g more\n-A more -j DROP", ["udp", "tcp"]),
    ],
)  # fmt: skip
def test_iptables(policy: str, rules: str, protocols: list[str]) -> None:
    """The same of what iptables-save prints, for who has the older tool."""
    firewall = Firewall(tables={"iptables-legacy-save": _SAVED.format(policy=policy, rules=rules)})
    found = firewall.obstacles("ng-gate")
    assert [protocol for obstacle in found for protocol in obstacle.protocols] == protocols
    assert all(obstacle.remedy == "iptables-legacy -t filter -I INPUT -i ng-gate -j ACCEPT" for obstacle in found)


def test_reverse_path_of_iptables() -> None:
    """Packets come in by another device than the one that leads back to their sender; rpfilter drops such."""
    text = "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m rpfilter --validmark --invert -j DROP\nCOMMIT\n"
    assert not Firewall(tables={"iptables-legacy-save": text}).obstacles("ng-gate")  # of --validmark nothing is known
    certain = text.replace(" --validmark", "")
    (obstacle,) = Firewall(tables={"iptables-legacy-save": certain}).obstacles("ng-gate")
    assert obstacle.chain == "iptables-legacy raw PREROUTING"


def test_opaque_rules() -> None:
    """Rules that iptables made in nftables are read as text, where the tool is there; its table is not looked at twice."""
    rule = {"rule": {"family": "inet", "table": "filter", "chain": "base", "expr": [{"xt": None}, _ACCEPT]}}
    closed = _firewall()
    firewall = Firewall([*closed.nft, rule], {"iptables-nft-save": _SAVED.format(policy="ACCEPT", rules="")})
    assert not firewall.obstacles("ng-gate")
    assert len(Firewall([*closed.nft, rule]).obstacles("ng-gate")) == 1


_MARK = {"meta": {"key": "mark"}}


@pytest.mark.parametrize(
    ("expression", "bits"),
    [
        ({"match": {"op": "==", "left": {"&": [_MARK, 0xFF]}, "right": 0x01}}, 0xFF),
        ({"match": {"op": "==", "left": _MARK, "right": 0xCA6C}}, 0xCA6C),
        ({"mangle": {"key": _MARK, "value": 0x4000}}, 0x4000),
        ({"mangle": {"key": _MARK, "value": {"|": [_MARK, 0x4000]}}}, 0x4000),
        ({"mangle": {"key": _MARK, "value": {"|": [{"&": [_MARK, 0xFFFF_F0FF]}, 0x200]}}}, 0xF00),
        ({"vmap": {"key": {"&": [_MARK, 0xF00]}, "data": {"set": [[0x100, _DROP]]}}}, 0xF00),
        ({"vmap": {"key": _MARK, "data": {"set": [[0x200, _DROP]]}}}, 0x200),
        (_NAMELESS, 0),
        ({"match": {"op": "==", "left": {"ct": {"key": "mark"}}, "right": 0x08}}, 0),
        ({"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": 6}}, 0),
    ],
)
def test_marks_of_nft(expression: Any, bits: int) -> None:
    """The bits a rule sets or compares; of a whole mark those that it has; a mask that keeps the rest is of the rest."""
    marks = _firewall([expression], policy="accept").marks()
    assert marks == ({"nftables inet filter base": bits} if bits else {})


@pytest.mark.parametrize(
    ("rule", "bits"),
    [
        ("-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000", 0x4000),
        ("-A ts-forward -i tailscale0 -j MARK --set-xmark 0x40000/0xff0000", 0xFF0000),
        ("-A INPUT -m mark --mark 0x8000/0x8000 -j DROP", 0x8000),
        ("-A INPUT -m mark --mark 51820 -j ACCEPT", 51820),
        ("-A INPUT -p tcp --dport 22 -j ACCEPT", 0),
    ],
)
def test_marks_of_iptables(rule: str, bits: int) -> None:
    """The same of what iptables-save prints."""
    marks = Firewall(tables={"iptables-nft-save": f"*mangle\n{rule}\nCOMMIT\n"}).marks()
    assert sum(marks.values()) == bits


_TO_UPLINK = {"match": {"op": "==", "left": {"meta": {"key": "oifname"}}, "right": "eth0"}}
_FROM_RUN = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "ngrun*"}}
_DOCKER = """*filter
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
{}-A DOCKER-USER -j RETURN
COMMIT
"""
_UFW = """*filter
:FORWARD DROP [0:0]
:ufw-before-forward - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
{}COMMIT
"""


def _behind(firewall: Firewall) -> list[str]:
    return [obstacle.remedy for obstacle in firewall.obstacles_behind("ngrun0", "eth0")]


@pytest.mark.parametrize(
    ("firewall", "remedies"),
    [
        pytest.param(_firewall(hook="forward", policy="accept"), [], id="open"),
        pytest.param(_firewall(hook="input"), [], id="another hook"),
        pytest.param(
            _firewall(hook="forward"),
            [
                'nft insert rule inet filter base iifname "ngrun0" accept',
                'nft insert rule inet filter base oifname "ngrun0" ct state established,related accept',
            ],
            id="closed by its policy",
        ),
        pytest.param(
            _firewall([_ESTABLISHED, _ACCEPT], hook="forward"),
            ['nft insert rule inet filter base iifname "ngrun0" accept'],
            id="replies pass",
        ),
        pytest.param(_firewall([_ESTABLISHED, _ACCEPT], [_FROM_RUN, _ACCEPT], hook="forward"), [], id="the remedy"),
        pytest.param(_firewall([_ESTABLISHED, _ACCEPT], [_TO_UPLINK, _ACCEPT], hook="forward"), [], id="whatever leaves"),
        pytest.param(_firewall([_port(443), _DROP], hook="forward", policy="accept"), [], id="a port that it may not be"),
        pytest.param(_firewall([_REVERSE_PATH, _DROP], hook="prerouting", policy="accept"), [], id="reverse path"),
        pytest.param(
            Firewall(tables={"iptables-nft-save": _DOCKER.format("")}),
            [
                "iptables-nft -t filter -I DOCKER-USER -i ngrun0 -j ACCEPT",
                "iptables-nft -t filter -I DOCKER-USER -o ngrun0 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            ],
            id="Docker",
        ),
        pytest.param(
            Firewall(
                tables={
                    "iptables-nft-save": _DOCKER.format(
                        "-A DOCKER-USER -o ngrun+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
                        "-A DOCKER-USER -i ngrun+ -j ACCEPT\n"
                    )
                }
            ),
            [],
            id="Docker, remedied",
        ),
        pytest.param(Firewall(tables={"iptables-nft-save": _UFW.format("")}), ["ufw route allow in on ngrun0"], id="ufw"),
        pytest.param(
            Firewall(tables={"iptables-nft-save": _UFW.format("-A ufw-user-forward -i ngrun+ -j ACCEPT\n")}),
            [],
            id="ufw, remedied",
        ),
    ],
)
def test_what_a_run_sends_on(firewall: Firewall, remedies: list[str]) -> None:
    """Forwarded there and back: what certainly ends in a drop, and the command with which its owner lets it pass."""
    assert _behind(firewall) == remedies
