"""What the host's firewall does with intercepted DNS, and which bits of the packet mark its rules use. Reads, changes nothing.

What the gate hands to the agent's sockets is local delivery by the interception device, and so passes the chains of the hooks
prerouting and input. A chain that drops there cannot be overruled by another chain, so the remedy is a rule in that chain, and
only its owner can make it last.

Rule 1: a question is a new datagram or connection to port 53 by the device; of every other property nothing is known. A match
on one is taken for no match: an acceptance that may not be does not help, a drop that may not be does not harm.
Of what an interface behind this host sends to others the same is asked for the hooks prerouting and forward, there and back.
Rule 2: nft's JSON (libnftables-json(5)) says what nft can express; rules that iptables made in nftables are opaque there, and
are read by iptables-save together with those of the legacy tables.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

_PATIENCE_S: Final = 20.0
_HOOKS: Final = ("prerouting", "input")
_FORWARD_HOOKS: Final = ("prerouting", "forward")
_ALL_BITS: Final = 0xFFFF_FFFF
_PORT: Final = 53
_PROTOCOLS: Final = {"udp": 17, "tcp": 6}

# A verdict of a rule; None: the rule goes on.
_Verdict = str | None
_ENDS: Final = {"accept": "accept", "drop": "drop", "reject": "drop", "queue": "accept"}


class Unreadable(Exception):
    """The sentence says which firewall cannot be read, and why."""


class Question(NamedTuple):
    """A packet, as far as it is known. device, out: by which interface it comes and goes; empty where that is not known.
    protocol: udp or tcp. port: None where it may be any.
    """

    device: str
    protocol: str
    out: str = ""
    port: int | None = _PORT
    state: str = "new"
    hooks: tuple[str, ...] = _HOOKS

    @property
    def is_back(self) -> bool:
        return self.state == "established"


class Rule(NamedTuple):
    """matches: does the question match; None: not known. verdict: accept, drop, return, jump, goto or none."""

    matches: bool | None
    verdict: _Verdict
    target: str = ""


@dataclass
class Chain:
    """title: as people and their tools call it. hook: empty unless it is a base chain of the filter kind. remedy: the command
    that makes it accept what the device brings."""

    title: str
    hook: str = ""
    policy: str = "accept"
    remedy: str = ""
    rules: list[Rule] = field(default_factory=list)


class Obstacle(NamedTuple):
    """A chain that drops the agent's questions."""

    chain: str
    protocols: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class Firewall:
    """nft: what `nft -j list ruleset` says. tables: what iptables-save says, by the command that said it."""

    nft: Sequence[Mapping[str, Any]] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True  # every tool that is needed to read it is installed

    @classmethod
    def read(cls) -> Firewall:
        """Of the network namespace of the caller; raises Unreadable."""
        nft: Sequence[Mapping[str, Any]] = ()
        if shutil.which("nft") is not None:
            nft = json.loads(_said("nft", "-j", "list", "ruleset"))["nftables"]
        commands = []
        for version in ("ip", "ip6"):
            if any(_is_opaque(each["rule"]) for each in nft if "rule" in each):
                commands.append(f"{version}tables-nft-save")
            # Asking the legacy tables would load their modules.
            names = Path(f"/proc/net/{version}_tables_names")
            if names.exists() and names.read_text(encoding="ascii").strip():
                commands.append(f"{version}tables-legacy-save")
        tables = {command: _said(command) for command in commands if shutil.which(command) is not None}
        return cls(nft, tables, is_whole=len(tables) == len(commands) and shutil.which("nft") is not None)

    def obstacles(self, device: str) -> list[Obstacle]:
        """The chains that drop a question which comes by this device."""
        return self._obstacles([Question(device, protocol) for protocol in _PROTOCOLS])

    def obstacles_behind(self, device: str, uplink: str) -> list[Obstacle]:
        """The chains that drop what comes by this device and is sent on, or its replies. uplink: empty where it may be any."""
        there = [Question(device, protocol, uplink, None, hooks=_FORWARD_HOOKS) for protocol in _PROTOCOLS]
        back = [Question(uplink, protocol, device, None, "established", _FORWARD_HOOKS) for protocol in _PROTOCOLS]
        return self._obstacles([*there, *back])

    def _obstacles(self, questions: Sequence[Question]) -> list[Obstacle]:
        found: dict[tuple[str, str], list[str]] = {}
        for question in questions:
            for chains in self._chains(question):
                for chain in chains.values():
                    if chain.hook in question.hooks and (_walk(chain, chains) or chain.policy) == "drop":
                        found.setdefault((chain.title, chain.remedy), []).append(question.protocol)
        return [Obstacle(title, tuple(protocols), remedy) for (title, remedy), protocols in found.items()]

    def _chains(self, question: Question) -> Iterator[dict[str, Chain]]:
        """The chains of each table, by their names inside it."""
        is_read_as_text = any("-nft-" in command for command in self.tables)
        opaque = {_table_of(each["rule"]) for each in self.nft if "rule" in each and _is_opaque(each["rule"])}
        tables: dict[tuple[str, str], dict[str, Chain]] = {}
        for each in self.nft:
            if chain := each.get("chain"):
                tables.setdefault(_table_of(chain), {})[chain["name"]] = _nft_chain(chain, question)
            elif rule := each.get("rule"):
                tables[_table_of(rule)][rule["chain"]].rules.append(_nft_rule(rule, question))
        yield from (chains for table, chains in tables.items() if not (is_read_as_text and table in opaque))
        for command, text in self.tables.items():
            yield from _iptables_chains(command, text, question)

    def marks(self) -> dict[str, int]:
        """The bits of the packet mark that rules set or look at, by where they do."""
        found: dict[str, int] = {}
        for each in self.nft:
            rule = each.get("rule")
            if rule is not None and (bits := _mark_bits(rule)):
                title = f"nftables {' '.join(_table_of(rule))} {rule['chain']}"
                found[title] = found.get(title, 0) | bits
        for command, text in self.tables.items():
            for line in text.splitlines():
                if bits := _mark_bits_of_line(line):
                    title = f"{command.partition('-')[0]} {line.split()[1]}"
                    found[title] = found.get(title, 0) | bits
        return found


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Unreadable(f"`{' '.join(command)}` does not answer: {problem}") from None
    if done.returncode:
        raise Unreadable(f"`{' '.join(command)}` fails: {done.stderr.strip().splitlines()[-1:] or 'it does not say why'}")
    return done.stdout


def _walk(chain: Chain, chains: Mapping[str, Chain], depth: int = 0) -> _Verdict:
    """accept or drop; None: nothing ends here. The kernel allows 16 jumps (NFT_JUMP_STACK_SIZE)."""
    for rule in chain.rules:
        if not rule.matches or rule.verdict is None:
            continue
        if rule.verdict in _ENDS:
            return _ENDS[rule.verdict]
        if rule.verdict == "return":
            return None
        target = chains.get(rule.target)
        verdict = _walk(target, chains, depth + 1) if target is not None and depth < 16 else None
        if verdict is not None or rule.verdict == "goto":
            return verdict
    return None


# --- nft -------------------------------------------------------------------------------------------------------------


def _table_of(each: Mapping[str, Any]) -> tuple[str, str]:
    return each["family"], each["table"]


def _is_opaque(rule: Mapping[str, Any]) -> bool:
    return any(kind == "xt" for kind, _ in _statements(rule))


# What nft has no JSON for, as a jump into a chain without a name, it writes as in its own language.
_TEXT: Final = "text"


def _statements(rule: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for expression in rule["expr"]:
        yield from expression.items() if isinstance(expression, dict) else [(_TEXT, expression)]


def _nft_chain(chain: Mapping[str, Any], question: Question) -> Chain:
    title = f"{chain['family']} {chain['table']} {chain['name']}"
    is_filter = chain.get("type") == "filter" and chain["family"] in {"ip", "ip6", "inet"}
    return Chain(
        f"nftables {title}",
        chain["hook"] if is_filter else "",
        chain.get("policy", "accept"),
        f'nft insert rule {title} oifname "{question.out}" ct state established,related accept'
        if question.is_back
        else f'nft insert rule {title} iifname "{question.device}" accept',
    )


def _nft_rule(rule: Mapping[str, Any], question: Question) -> Rule:
    matches: bool | None = True
    for kind, body in _statements(rule):
        if kind in _ENDS or kind == "return":
            return Rule(matches, kind)
        if kind in {"jump", "goto"}:
            return Rule(matches, kind, body["target"])
        if kind in {"match", "xt", "vmap", "limit", "ct count", _TEXT}:
            matches = _both(matches, _nft_match(body, question) if kind == "match" else None)
    return Rule(matches, None)


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _nft_match(match: Mapping[str, Any], question: Question) -> bool | None:
    left, right = match["left"], match["right"]
    if not isinstance(left, dict):
        return None
    ((kind, body),) = left.items()
    key = body.get("key") or body.get("field") if isinstance(body, dict) else None
    is_true: bool | None = None
    if kind == "meta" and key in {"iifname", "iif"}:
        is_true = _is_among(right, lambda value: _is_name(str(value), question.device)) if question.device else None
    elif kind == "meta" and key in {"oifname", "oif"}:
        is_true = _is_among(right, lambda value: _is_name(str(value), question.out)) if question.out else None
    elif kind == "meta" and key == "l4proto":
        is_true = _is_among(right, lambda value: value in {question.protocol, _PROTOCOLS[question.protocol]})
    elif kind == "payload" and key == "dport":
        if body.get("protocol") not in {question.protocol, "th"}:
            return False
        is_true = _is_among(right, lambda value: value in {_PORT, "domain"}) if question.port is not None else None
    elif kind == "payload" and body.get("protocol") in {"tcp", "udp", "sctp", "icmp", "icmpv6"} - {question.protocol}:
        return False
    elif kind == "ct" and key == "state":
        is_true = _is_among(right, lambda value: value == question.state)
    elif kind == "fib" and "iif" in body.get("flags", ()) and body.get("result") == "oif" and right is False:
        # The way back to who asks leads through his own interface, not the interception device.
        is_true = question.hooks is _HOOKS
    return is_true if is_true is None or match["op"] in {"==", "in"} else not is_true


def _is_name(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else pattern == name


def _is_among(right: Any, is_it: Any) -> bool | None:
    """right: a value, {"set": values}, {"range": [first, last]}, a list of flags; None for a named set."""
    if isinstance(right, dict):
        if "set" in right:
            found = [_is_among(value, is_it) for value in right["set"]]
            return True if True in found else None if None in found else False
        if "range" in right and all(isinstance(end, int) for end in right["range"]):
            first, last = right["range"]
            return bool(first <= _PORT <= last)  # of what is looked at here only ports come in ranges
        return None
    if isinstance(right, str) and right.startswith("@"):
        return None
    if isinstance(right, list):
        return any(is_it(value) for value in right)
    return bool(is_it(right))


def _mark_bits(rule: Mapping[str, Any]) -> int:
    bits = 0
    for kind, body in _statements(rule):
        sides = {"match": ("left", "right"), "mangle": ("key", "value"), "vmap": ("key", "data")}.get(kind)
        if sides is not None and _MARK in json.dumps([body[side] for side in sides]):
            numbers = [number for side in sides for number in _numbers(body[side], is_set=kind == "mangle")]
            bits |= _union(numbers)
    return bits


_MARK: Final = json.dumps({"meta": {"key": "mark"}})


def _union(numbers: Sequence[int]) -> int:
    """All 32 bits together are a comparison with the whole mark, which says of no bit that it is in use."""
    bits = 0
    for number in numbers:
        if 0 <= number < _ALL_BITS:
            bits |= number
    return bits


def _numbers(expression: Any, *, is_set: bool, is_mask: bool = False) -> Iterator[int]:
    """Where a mark is set, the mask of `mark & mask | value` is of the bits that stay."""
    if isinstance(expression, bool):
        return
    if isinstance(expression, int):
        yield ~expression & _ALL_BITS if is_mask and is_set else expression
    elif isinstance(expression, dict):
        for key, value in expression.items():
            yield from _numbers(value, is_set=is_set, is_mask=key == "&")
    elif isinstance(expression, list):
        for value in expression:
            yield from _numbers(value, is_set=is_set, is_mask=is_mask)


# --- iptables --------------------------------------------------------------------------------------------------------


def _iptables_chains(command: str, text: str, question: Question) -> Iterator[dict[str, Chain]]:
    """Text of iptables-save(8): `*table`, `:CHAIN POLICY [counters]`, `-A CHAIN matches -j TARGET`."""
    program = command.removesuffix("-save")
    table, chains = "", dict[str, Chain]()
    for line in text.splitlines():
        if line.startswith("*"):
            table, chains = line[1:].strip(), {}
        elif line.startswith(":"):
            name, policy = line[1:].split()[:2]
            hook = _HOOKS_OF_IPTABLES.get(name, "") if table != "nat" else ""
            which = (
                f"-o {question.out} -m conntrack --ctstate ESTABLISHED,RELATED" if question.is_back else f"-i {question.device}"
            )
            remedy = f"{program} -t {table} -I {name} {which} -j ACCEPT"
            chains[name] = Chain(f"{program} {table} {name}", hook, policy.lower(), remedy)
        elif line.startswith("-A "):
            _, name, *words = shlex.split(line)
            chains[name].rules.append(_iptables_rule(words, question))
        elif line.strip() == "COMMIT":
            forward = chains.get("FORWARD")
            if forward is not None and _DOCKERS in chains:  # Docker puts its own chains before what others insert
                forward.remedy = forward.remedy.replace("-I FORWARD", f"-I {_DOCKERS}")
            elif forward is not None and _UFWS in chains:  # ufw lets replies pass by itself
                forward.remedy = f"ufw route allow in on {question.device}"
            yield chains


_HOOKS_OF_IPTABLES: Final = {"PREROUTING": "prerouting", "INPUT": "input", "FORWARD": "forward"}
_DOCKERS: Final = "DOCKER-USER"
_UFWS: Final = "ufw-user-forward"

_TARGETS: Final = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "reject", "RETURN": "return", "NFQUEUE": "queue"}


def _iptables_rule(words: Sequence[str], question: Question) -> Rule:
    matches: bool | None = True
    verdict: _Verdict = None
    target = ""
    position, is_not = 0, False
    while position < len(words):
        word = words[position]
        value = words[position + 1] if position + 1 < len(words) else ""
        position += 2
        is_true: bool | None = None
        if word == "!":
            is_not = True
            position -= 1
            continue
        if word in {"-j", "-g"}:
            target = value
            verdict = _TARGETS.get(
                value, "goto" if word == "-g" else "jump"
            )  # LOG, MARK and their kind are no chain, and go on
            break  # what follows are the target's own words
        if word in {"-m", "--match"}:
            is_true = True if value in {"tcp", "udp", "conntrack", "state", "comment", "multiport", "rpfilter"} else None
        elif word == "--comment":
            is_true = True
        elif word == "-i":
            is_true = _is_name(value.replace("+", "*"), question.device) if question.device else None
        elif word == "-o":
            is_true = _is_name(value.replace("+", "*"), question.out) if question.out else None
        elif word == "-p":
            is_true = value in {question.protocol, "all"}
        elif word in {"--dport", "--dports"}:
            is_true = any(_has_port(part) for part in value.split(",")) if question.port is not None else None
        elif word in {"--ctstate", "--state"}:
            is_true = question.state.upper() in value.split(",")
        elif word == "--invert":  # rpfilter's: a packet that does not come by the way back to its sender, as no question does
            is_true = question.hooks is _HOOKS
            position -= 1
        matches = _both(matches, is_true if is_true is None or not is_not else not is_true)
        is_not = False
    return Rule(matches, verdict, target)


def _has_port(ports: str) -> bool:
    first, _, last = ports.partition(":")
    return first.isdecimal() and int(first) <= _PORT <= int(last or first)


_MARK_WORDS: Final = re.compile(r"--(?:set-x?mark|mark|or-mark|nfmask) (0x[0-9a-f]+|\d+)(?:/(0x[0-9a-f]+|\d+))?")


def _mark_bits_of_line(line: str) -> int:
    if not line.startswith("-A ") or not re.search(r"-m (conn)?mark\b|-j (CONN)?MARK\b", line):
        return 0
    numbers = [int(number, 0) for found in _MARK_WORDS.findall(line) for number in found if number]
    return _union(numbers)
