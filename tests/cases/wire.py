"""DNS messages: what is learned from a reply, under which name, and whether it may be delivered."""

from __future__ import annotations

from typing import Final

import dns.message
import dns.rdatatype

from agent.core.types import packed, text_of
from agent.dns.wire import Status, WireError, name_of, read_name, read_question, read_reply
from tests.cases.runner import DoesNotApply, Fields, Sheet

FIELDS: Final = [
    "expect", "query_hex", "reply_hex", "octets_hex", "offset", "dnspython_says", "learned_name", "not_under",
]  # fmt: skip
_DELIVERED: Final = {Status.OK, Status.TRUNCATED}


def judge(case: Fields, sheet: Sheet) -> None:
    if "octets_hex" in case:
        _judge_name(case, sheet)
    else:
        _judge_reply(case, sheet)


def _judge_name(case: Fields, sheet: Sheet) -> None:
    """A name alone decodes to the text, or is refused."""
    wanted = case["expect"].only("name", "error")
    try:
        ours = name_of(read_name(bytes.fromhex(case["octets_hex"]), case["offset"], {})[0])
    except (WireError, IndexError):
        ours = "an error"
    sheet.compare("name", ours, "an error" if wanted.get("error") else wanted["name"])


def _judge_reply(case: Fields, sheet: Sheet) -> None:
    """must_learn ⊆ learned ⊆ may_learn, under the name asked; what is to be dropped is not delivered, what may pass is."""
    wanted = case["expect"].only("verdict", "qname", "qtype", "must_learn", "may_learn", "min_ttl", "ttl_per_address")
    question = read_question(bytes.fromhex(case["query_hex"]))
    answer = read_reply(bytes.fromhex(case["reply_hex"]), question)
    ttls = {text_of(address): ttl for address, ttl in answer.addresses}
    may, must = ({text_of(packed(text)) for text in wanted[key]} for key in ("may_learn", "must_learn"))
    sheet.compare_members("learned", ttls, ttls.keys() & may | must)
    sheet.compare("name", question.name, case.get("learned_name", wanted["qname"]))
    for text, ttl in wanted.get("ttl_per_address", {}).items():
        sheet.compare(f"TTL of {text}", ttls.get(text_of(packed(text))), ttl)
    if "min_ttl" in wanted:
        smallest: object = min(ttls.values(), default=None)
        if smallest != wanted["min_ttl"] and smallest == _smallest_of_addresses(case["reply_hex"]):
            smallest = "the address record's own"
        sheet.compare("smallest TTL", smallest, wanted["min_ttl"])
    match wanted["verdict"]:
        case "drop or SERVFAIL":
            sheet.compare("delivered", answer.status is Status.OK, theirs=False)
        case "learn":
            sheet.compare("delivered", answer.status is Status.OK, theirs=True)
        case "pass without learning":
            # What answers another question is left for the right reply to come, which the client does not see.
            may_be_dropped = any(word in case.get("note", "") for word in ("dropping", "refusing"))
            is_delivered = answer.status in _DELIVERED or answer.status is Status.MISMATCH
            sheet.compare("delivered", is_delivered or may_be_dropped, theirs=True)
        case other:
            raise DoesNotApply(f"unknown verdict {other!r}")


def _smallest_of_addresses(reply_hex: str) -> int | None:
    """Of the address records alone, as dnspython reads them."""
    answer = dns.message.from_wire(bytes.fromhex(reply_hex)).answer
    return min((rrset.ttl for rrset in answer if rrset.rdtype in {dns.rdatatype.A, dns.rdatatype.AAAA}), default=None)
