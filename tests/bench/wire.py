"""Reading DNS messages: the walker of agent.dns.wire beside dnspython's message objects, on the same octets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset

from agent.core.types import packed
from agent.dns.wire import read_question, read_reply
from tests.bench.harness import Bench, Contestant, Race

_NAME = "h12345.cdn.example.com."
_ADDRESSES = [f"198.51.100.{i}" for i in range(1, 21)]


def _repeated(work: Callable[[], object]) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            work()

    return run


def _reply(query: bytes, *records: tuple[str, str, Sequence[str]]) -> bytes:
    """A reply to the query, with these (owner, type, data)."""
    message = dns.message.make_response(dns.message.from_wire(query))
    message.flags |= dns.flags.RA
    message.answer = [dns.rrset.from_text_list(owner, 60, "IN", kind, data) for owner, kind, data in records]
    return message.to_wire()


def _addresses(wire: bytes) -> set[bytes]:
    answer = dns.message.from_wire(wire).answer
    return {packed(record.address) for records in answer if records.rdtype == dns.rdatatype.A for record in records}


@contextmanager
def _races() -> Iterator[Sequence[Race]]:
    query = dns.message.make_query(_NAME, "A", use_edns=True).to_wire()
    question = read_question(query)
    replies = {
        "a reply, one A": _reply(query, (_NAME, "A", _ADDRESSES[:1])),
        "a reply, two CNAME and two A": _reply(
            query,
            (_NAME, "CNAME", ["a.cdn.example.net."]),
            ("a.cdn.example.net.", "CNAME", ["b.cdn.example.org."]),
            ("b.cdn.example.org.", "A", _ADDRESSES[:2]),
        ),
        "a reply, twenty A": _reply(query, (_NAME, "A", _ADDRESSES)),
    }
    races = [
        Race(
            "a question",
            "dnspython",
            [
                Contestant("namegate", _repeated(partial(read_question, query))),
                Contestant("dnspython", _repeated(partial(dns.message.from_wire, query))),
            ],
        )
    ]
    for title, wire in replies.items():
        assert {address for address, _ in read_reply(wire, question).addresses} == _addresses(wire)
        races.append(
            Race(
                title,
                "dnspython",
                [
                    Contestant("namegate", _repeated(partial(read_reply, wire, question))),
                    Contestant("dnspython", _repeated(partial(dns.message.from_wire, wire))),
                ],
            )
        )
    yield races


WIRE = Bench("wire", "what reading a DNS message costs, beside dnspython", _races)
