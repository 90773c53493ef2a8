"""A scene for bug cases: policy files as people write them, upstream answers as messages, packets put to the datapath's model.

The policies go through the real reader, questions and answers through the real engine, packets are judged by the model of the
program on the very rows the engine wrote. Endpoint N is at 192.0.2.1N; times are seconds since the scene began.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rrset

from agent.core.events import Query, Reply
from agent.core.rules import Policy
from agent.core.settings import Settings
from agent.core.types import (
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    SCOPE_SHARED,
    Direction,
    IpcacheKey,
    OwnAddressKey,
    Prefix,
    Table,
    packed,
    text_of,
)
from agent.datapath.abi import Reason
from agent.datapath.model import NS, Judgement, Model
from agent.policy.files import read_policy_text
from tests import packets
from tests.sim.world import UPSTREAM, Answered, World, subject

ANY_SERVER = "203.0.113.1"


def policies_of(text: str, app: str | None = None) -> tuple[Policy, ...]:
    """Read as a file; app: only for the endpoint with this label."""
    reading = read_policy_text("p", text.encode())
    assert not reading.mistakes, reading.mistakes
    return reading.policies if app is None else tuple(replace(policy, subject=subject(app)) for policy in reading.policies)


class Scene:
    """policies: text of policy files, of every endpoint or, as a mapping, of one endpoint each."""

    def __init__(self, policies: str | dict[int, str], settings: Settings | None = None) -> None:
        self.world = World(settings or Settings(upstreams=(UPSTREAM,)))
        self.began = self.world.now
        numbers = [1] if isinstance(policies, str) else list(policies)
        self.world.start(*self._read(policies), endpoints={number: f"192.0.2.{10 + number}" for number in numbers})
        rows = self.world.kernel.rows
        self.model = Model(
            endpoints=rows[Table.ENDPOINTS],  # type: ignore[arg-type]
            groups=rows[Table.GROUPS],  # type: ignore[arg-type]
            policy=rows[Table.POLICY],  # type: ignore[arg-type]
            ipcache=rows[Table.IPCACHE],  # type: ignore[arg-type]
        )
        self._ports = itertools.count(20_000)

    @staticmethod
    def _read(policies: str | dict[int, str]) -> tuple[Policy, ...]:
        if isinstance(policies, str):
            return policies_of(policies)
        return tuple(policy for number, text in policies.items() for policy in policies_of(text, f"e{number}"))

    def apply(self, policies: str) -> None:
        self.world.apply(*policies_of(policies))

    def at(self, t: float) -> None:
        """Go to this time; whatever is due on the way happens."""
        self.world.advance(self.began + t - self.world.now)

    # --- questions and answers -------------------------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        qtype: str = "A",
        *,
        endpoint: int = 1,
        edns: int | None = 1232,
        server: str = ANY_SERVER,
        protocol: int = PROTOCOL_UDP,
        number: int | None = None,
    ) -> int:
        """edns: the UDP size that the client says it takes; None: it speaks no EDNS."""
        asker = next(self.world._askers)
        query = dns.message.make_query(name, qtype, use_edns=-1 if edns is None else 0, payload=edns)
        query.id = asker & 0xFFFF if number is None else number
        self.send(query.to_wire(), asker, endpoint=endpoint, server=server, protocol=protocol)
        return asker

    def send(
        self, message: bytes, asker: int, *, endpoint: int = 1, server: str = ANY_SERVER, protocol: int = PROTOCOL_UDP
    ) -> None:
        """Any octets to port 53."""
        client = packed(f"192.0.2.{10 + endpoint}")
        self.world.handle(Query(asker, client, packed(server), 53, protocol, message))

    def is_asked(self, asker: int) -> bool:
        """Did the question reach an upstream?"""
        number = self.world.transaction_of(asker)
        return number is not None and number in self.world.asked

    def reply(
        self,
        asker: int,
        *answers: str,
        authority: Iterable[str] = (),
        additional: Iterable[str] = (),
        rcode: str = "NOERROR",
        octets: bytes | None = None,
    ) -> Answered:
        """The upstream answers; a record is `owner ttl type data`, each a set of its own. octets: the message itself."""
        number = self.world.transaction_of(asker)
        assert number is not None, "the question never reached the upstream"
        response = dns.message.make_response(self.query_of(asker))
        response.set_rcode(dns.rcode.from_text(rcode))
        for section, records in (
            (response.answer, answers),
            (response.authority, authority),
            (response.additional, additional),
        ):
            for record in records:
                owner, ttl, kind, data = record.split(None, 3)
                section.append(dns.rrset.from_text(owner.rstrip(".") + ".", int(ttl), "IN", kind, data))
        message = octets if octets is not None else response.to_wire(max_size=65_535)
        self.world.handle(Reply(number, message))
        return self.answer_of(asker)

    def query_of(self, asker: int) -> dns.message.Message:
        number = self.world.transaction_of(asker)
        assert number is not None
        return dns.message.from_wire(self.world.asked[number].message)

    def answer_of(self, asker: int) -> Answered:
        return self.world.answer_of(asker)

    def resolve(self, name: str, *answers: str, qtype: str = "A", endpoint: int = 1) -> Answered:
        """Ask and be answered; an answer without spaces is an address of the name, with a TTL of a minute."""
        records = [record if " " in record else f"{name} 60 {'AAAA' if ':' in record else 'A'} {record}" for record in answers]
        return self.reply(self.ask(name, qtype, endpoint=endpoint), *records)

    # --- packets -----------------------------------------------------------------------------------------------------------

    def packet(
        self,
        address: str,
        port: int,
        *,
        endpoint: int = 1,
        source_port: int | None = None,
        flags: int = packets.SYN,
        protocol: int = PROTOCOL_TCP,
    ) -> Judgement:
        """The endpoint sends it, from a new port if none is said; an address it passes to is seen."""
        source = "2001:db8:0:a::1" if ":" in address else f"192.0.2.{10 + endpoint}"
        self.model.own_addresses = {
            *(key for key in self.world.kernel.rows[Table.OWN_ADDRESSES] if isinstance(key, OwnAddressKey)),
            OwnAddressKey(endpoint, packed("2001:db8:0:a::1")),
        }
        local = next(self._ports) if source_port is None else source_port
        payload = packets.tcp(local, port, flags) if protocol == PROTOCOL_TCP else packets.udp(local, port)
        frame = packets.frame(source, address, protocol, payload)
        judgement = self.model.judge(100 + endpoint, Direction.EGRESS, frame, round(self.world.now * NS))
        if judgement.passes:
            scope = self.world.engine.groups.endpoints[endpoint].scope
            self.world.last_seen[scope, packed(address)] = self.world.now
        return judgement

    def passes(self, address: str, port: int = 443, *, endpoint: int = 1) -> bool:
        """Would the first packet of a new flow pass? A drop has the reason that no rule allows it, or that one denies it."""
        judgement = self.packet(address, port, endpoint=endpoint)
        assert judgement.passes or judgement.reason in {Reason.DROP_POLICY, Reason.DROP_DENY}, judgement
        return judgement.passes

    # --- what is known -------------------------------------------------------------------------------------------------------

    @property
    def learned(self) -> dict[str, set[str]]:
        """Name -> its addresses."""
        found: dict[str, set[str]] = {}
        for pair in self.world.engine.dns_cache.lifetimes:
            found.setdefault(pair.name, set()).add(text_of(pair.address))
        return found

    def is_in_kernel(self, address: str) -> bool:
        return IpcacheKey(SCOPE_SHARED, Prefix.of(packed(address))) in self.world.kernel.rows[Table.IPCACHE]


def extended_error_of(answer: Answered) -> int | None:
    return next((int(option.code) for option in answer.message.options if isinstance(option, dns.edns.EDEOption)), None)


def is_denied(scene: Scene, asker: int, rcode: str = "NXDOMAIN") -> bool:
    """The denied answer: nothing forwarded, no records, no SOA, and "Blocked" where the client can read it."""
    answer = scene.answer_of(asker)
    message = answer.message
    is_bare = not (message.answer or message.authority or message.additional)
    is_said = message.edns < 0 or extended_error_of(answer) == 15
    return answer.rcode == rcode and is_bare and is_said and not scene.is_asked(asker)
