"""The DNS proxy: who may ask what of whom, and what becomes of a question and its reply.

Judged on the engine: a question goes in as the octets of the packet; what is asked upstream, answered and learned comes out.
What identifiers, sockets, streams and source ports do is the shell's and is not seen there: those cases are judged on a running
agent (sockets.py), where root runs it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any, Final

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype

from agent.core.events import AskUpstream, PoliciesChanged, Query, Reply, UpstreamFailed
from agent.core.names import normalise_name, normalise_pattern
from agent.core.rules import Cidr, Policy, Ports, Rule
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, Direction, Prefix, packed, text_of
from agent.dns.wire import Rcode
from tests.cases.runner import DoesNotApply, Fields, Sheet
from tests.cases.sockets import OverSockets
from tests.netns.lab import LabError
from tests.netns.running import AgentFailed
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, Answered, World, subject

FIELDS: Final = (
    "rules", "query", "allowed", "steps", "client", "server", "port", "proto", "query_hex", "upstream", "expect", "options",
    "from_unknown_client", "in_flight", "same_query_twice", "chunks", "original_server", "repeat", "server_ips",
)  # fmt: skip

_PROTOCOLS: Final = {"udp": (PROTOCOL_UDP,), "tcp": (PROTOCOL_TCP,), "any": (PROTOCOL_UDP, PROTOCOL_TCP)}
_CLIENTS: Final = ("c1", "c2", "c3", "c4")
_UNKNOWN_CLIENT: Final = "192.0.2.250"
_REJECTS: Final = {"refused": Rcode.REFUSED, "nameError": Rcode.NXDOMAIN}
NOT_SAVED: Final = "no rules are saved: a restart reads the policies, and questions wait for that (decision 10)"
SHELLS: Final = "what identifiers, sockets and streams do is seen on a running agent, which needs root and BPF"

_running: list[OverSockets] = []


def judge(case: Fields, sheet: Sheet) -> None:
    if case["group"] == "restore":
        raise DoesNotApply(NOT_SAVED)
    if "steps" in case:
        _judge_updates(case, sheet)
    elif "query_hex" in case:
        _judge_exchange(case, sheet)
    else:
        query = case["query"]
        _Proxy(case["rules"]).compare_query(sheet, "allowed", Fields({**query, "allowed": case["allowed"]}))


@contextlib.contextmanager
def over_sockets() -> Iterator[None]:
    """Judge also what needs a running agent; where none can run those cases do not apply."""
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            with contextlib.suppress(LabError, AgentFailed):
                _running.append(stack.enter_context(OverSockets()))
                stack.callback(_running.clear)
        yield


class _Proxy:
    """An agent with the case's clients as endpoints, and policies that say what its rules say."""

    def __init__(self, rules: list[Fields], **settings: Any) -> None:
        self.world = World(Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, **settings))
        self._askers = itertools.count(1)
        endpoints = {number: _address_of(client) for number, client in enumerate(_CLIENTS, 1)}
        self.world.start(*_policies(rules), endpoints=endpoints)

    def ask(self, message: bytes, client: str, server: str, port: int, protocol: str) -> int:
        asker = next(self._askers)
        source, (number,) = packed(client), _PROTOCOLS[protocol]
        self.world.handle(Query(asker, source, packed(_address_of(server)), port, number, message))
        return asker

    def is_forwarded(self, asker: int) -> bool:
        number = self.world.transaction_of(asker)
        return number is not None and number in self.world.asked

    def compare_query(self, sheet: Sheet, place: str, query: Fields) -> None:
        query.only("op", "client", "server", "port", "proto", "name", "qtype", "allowed")
        message = dns.message.make_query(query["name"], query.get("qtype", "A")).to_wire()
        asker = self.ask(message, _address_of(query["client"]), query["server"], query["port"], query["proto"])
        sheet.compare(place, self.is_forwarded(asker), query["allowed"])

    def answer_of(self, asker: int) -> Answered | None:
        answers = self.world.answers_of(asker)
        assert len(answers) <= 1, "two answers to one question"
        return answers[0] if answers else None

    def learned(self) -> set[tuple[str, str]]:
        return {(pair.name, text_of(pair.address)) for pair in self.world.engine.dns_cache.lifetimes}


def _address_of(who: str) -> str:
    """c1 is 192.0.2.1, s1 is 203.0.113.101; an address may have a remark in brackets behind it."""
    if who[0].isdigit():
        return who.split(maxsplit=1)[0]
    return f"192.0.2.{who[1:]}" if who.startswith("c") else f"203.0.113.{100 + int(who[1:])}"


def _policies(rules: list[Fields]) -> list[Policy]:
    """One for each client, and one for every client that has none: closed, like an endpoint whose policies name nothing."""
    by_client: dict[str, list[Rule]] = {client: [] for client in _CLIENTS}
    for rule in rules:
        rule.only("client", "server", "port", "proto", "names")
        peers = None if rule["server"] == "any" else (Cidr(Prefix.parse(_address_of(rule["server"]) + "/32")),)
        ports = tuple(Ports(number, rule["port"], rule["port"]) for number in _PROTOCOLS[rule["proto"]])
        names = tuple(normalise_pattern(name) for name in rule["names"] or ())
        by_client[rule["client"]].append(Rule(Direction.EGRESS, peers, ports, names=names))
    closed = Rule(Direction.EGRESS, (), None)
    return [
        Policy(
            client,
            subject(f"e{client[1:]}"),
            tuple(found or [closed]),
            default_deny_egress=True,
            default_deny_ingress=False,
        )
        for client, found in by_client.items()
    ]


def _judge_updates(case: Fields, sheet: Sheet) -> None:
    rules: dict[tuple[str, int, str], list[Fields]] = {}
    proxy = _Proxy([])
    for number, step in enumerate(case["steps"], 1):
        if step["op"] == "set":
            step.only("op", "client", "port", "proto", "rules")
            rules[step["client"], step["port"], step["proto"]] = step["rules"] or []
            proxy.world.handle(PoliciesChanged(tuple(_policies([rule for each in rules.values() for rule in each])), number))
            proxy.world.advance(0)
            assert proxy.world.settled[number] is None
        elif step["op"] == "query":
            proxy.compare_query(sheet, f"step {number} allowed", step)
        else:
            raise DoesNotApply(f"unknown step {step['op']!r}")


def _judge_exchange(case: Fields, sheet: Sheet) -> None:
    upstream, wanted, options = case["upstream"], case["expect"], case.get("options", Fields())
    upstream.only("must_not_be_asked", "reply_hex", "replies_hex", "id_field", "connection_refused", "from_")
    is_of_shell = {"chunks", "repeat", "original_server"} & case.keys() or "upstream_id" in wanted or "from_" in upstream
    if is_of_shell or "use another" in upstream.get("id_field", "") or (case["proto"] == "tcp" and not case["query_hex"]):
        if not _running:
            raise DoesNotApply(SHELLS)
        _running[0].judge(case, sheet)
        return
    settings: dict[str, Any] = {}
    if "reject_with" in options.only("reject_with", "max_in_flight"):
        settings["denied_rcode"] = _REJECTS[options["reject_with"]]
    if "max_in_flight" in options:
        settings["open_questions_max"] = options["max_in_flight"]
    # These cases are about messages: their rule speaks of one protocol and the question may come by the other.
    rules = [Fields({**rule, "proto": "any"}) for rule in case["rules"]]
    proxy, where = _Proxy(rules, **settings), (case["server"], case["port"], case["proto"])
    client = _UNKNOWN_CLIENT if case.get("from_unknown_client") else _address_of(case["client"])
    for number in range(case.get("in_flight", 0)):
        other = dns.message.make_query("cilium.io.", "A", id=number)
        assert proxy.is_forwarded(proxy.ask(other.to_wire(), _address_of(case["client"]), *where))
    message = bytes.fromhex(case["query_hex"])
    askers = [proxy.ask(message, client, *where) for _ in range(2 if case.get("same_query_twice") else 1)]
    forwarded = [proxy.world.asked[n] for asker in askers if (n := proxy.world.transaction_of(asker)) in proxy.world.asked]
    for question in forwarded:
        if upstream.get("connection_refused"):
            proxy.world.handle(UpstreamFailed(question.transaction, "connection refused"))
        replies = upstream.get("replies_hex") or ([upstream["reply_hex"]] if "reply_hex" in upstream else [])
        for reply in replies:
            proxy.world.handle(Reply(question.transaction, bytes.fromhex(reply)))
    _compare(case, sheet, proxy, askers, forwarded)


def _compare(case: Fields, sheet: Sheet, proxy: _Proxy, askers: list[int], forwarded: list[AskUpstream]) -> None:
    compare, wanted = sheet.compare, case["expect"]
    answers = [answer for asker in askers if (answer := proxy.answer_of(asker)) is not None]
    answer = answers[0] if answers else None
    if case["upstream"].get("must_not_be_asked") and "forwarded" not in wanted.get("either", ()):
        compare("forwarded", bool(forwarded), theirs=False)
    for key, theirs in wanted.items():
        match key:
            case "rcode":
                compare(key, answer and answer.rcode, theirs)
            case "rcode_in":
                said = answer.rcode if answer else "no reply"
                compare(key, said, said if said in theirs else theirs)
            case "either":
                said = f"rcode {answer.rcode}" if answer else "forwarded" if forwarded else "no reply"
                compare(key, said, said if said in theirs else theirs)
            case "answers":
                compare(key, _records(answer), theirs)
            case "answer_count":
                compare(key, len(_records(answer)), theirs)
            case "id":
                compare(key, answer and answer.message.id, int(theirs, 16))
            case "question_echoed":
                asked = dns.message.from_wire(bytes.fromhex(case["query_hex"])).question
                compare(key, answer is not None and answer.message.question == asked, theirs)
            case "tc":
                compare(key, answer is not None and bool(answer.message.flags & dns.flags.TC), theirs)
            case "max_udp_octets":
                compare(key, answer is not None and len(answer.message.to_wire()) <= theirs, theirs=True)
            case "delivered":
                compare(key, answer is not None and answer.rcode == "NOERROR", theirs)
            case "delivered_count" | "replies":
                compare(key, len(answers), theirs)
            case "upstream_queries":
                compare(key, len(forwarded), theirs)
            case "upstream_proto":
                compare(key, [question.protocol for question in forwarded], list(_PROTOCOLS[theirs]))
            case "upstream_sees_name":
                compare(key, [_seen(question).question[0].name.to_text() for question in forwarded], [theirs])
            case "upstream_sees":
                texts = [option.to_text() for question in forwarded for option in _seen(question).options]
                compare(key, any(theirs.only("option_8")["option_8"] in text for text in texts), theirs=True)
            case "learned":
                _compare_learned(sheet, proxy, theirs)
            case "learned_at_most":
                may = {(normalise_name(name), text) for name, texts in theirs.items() for text in texts}
                sheet.compare_members("learned", proxy.learned(), proxy.learned() & may)
            case "learned_count":
                names = [name for name, _ in proxy.learned()]
                compare(key, {name: names.count(name) for name in names}, theirs)
            case "alive_after":
                still = dns.message.make_query("cilium.io.", "A").to_wire()
                asker = proxy.ask(still, _address_of(case["client"]), case["server"], case["port"], case["proto"])
                compare(key, proxy.is_forwarded(asker), theirs)
            case _:
                raise DoesNotApply(f"unknown field {key!r} of what is expected")


def _compare_learned(sheet: Sheet, proxy: _Proxy, theirs: Fields) -> None:
    wanted = {(normalise_name(name), text_of(packed(text))) for name, texts in theirs.items() for text in texts}
    sheet.compare_members("learned", proxy.learned(), wanted)


def _seen(question: AskUpstream) -> dns.message.Message:
    return dns.message.from_wire(question.message)


def _records(answer: Answered | None) -> list[list[object]]:
    """Owner, TTL, type and data of each, as the cases write them."""
    sets = answer.message.answer if answer is not None else []
    return [[str(s.name), s.ttl, dns.rdatatype.to_text(s.rdtype), record.to_text()] for s in sets for record in s]
