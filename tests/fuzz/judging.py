"""What must hold for a message, whatever its octets are.

Rule 1: no exception but the declared one: WireError, of `read_question` alone.
Rule 2: no address is learned that the alias graph of the answer section does not allow (`reference.bound_of`); where that graph
is a plain chain, every address on it is learned.
Rule 3: an answer of ours is a whole message, has the client's id and question, is no longer than the client takes, and to what
is no question no longer than what it answers.
Rule 4: what is left of a reply whose addresses were taken out holds none of them and all of the others.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType

from agent.core.events import AskUpstream, Query, Reply, RowsWritten, SendReply, Tick, WriteRows
from agent.core.guard import AddressGuard
from agent.core.settings import Settings
from agent.core.types import PROTOCOL_TCP, PROTOCOL_UDP, packed
from agent.dns import messages as real_messages
from agent.dns import removal as real_removal
from agent.dns import wire as real_wire
from tests.fuzz import comparing, reference
from tests.fuzz.making import Message
from tests.sim.world import UPSTREAM, World, allow, any_question

GUARD = AddressGuard([packed("203.0.113.9")])
TEXT = "not allowed by policy"
# A question for those replies of the corpus whose own query cannot be read.
PLAIN_QUERY = bytes.fromhex("123401000001000000000000") + b"\x03www\x07example\x00\x00\x01\x00\x01"


class Wrong(Exception):
    """A promise that does not hold; the text says which."""


def require(holds: bool, promise: str) -> None:
    if not holds:
        raise Wrong(promise)


class Judge:
    """The modules are arguments so that a broken one can be put in their place.

    counts: what the messages came to, to see that the stream reaches every place.
    """

    def __init__(
        self, wire: ModuleType = real_wire, messages: ModuleType = real_messages, removal: ModuleType = real_removal
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._wire = wire
        self._messages = messages
        self._removal = removal
        self._gate: Gate | None = None
        # The last one that was judged, for the replies that come to it.
        self._query = b""
        self._asked: real_wire.Question | None = None
        self._is_compared = False

    def judge(self, message: Message) -> None:
        """Wrong, or whatever the code under test raised, if something does not hold."""
        self._is_compared = message.is_compared
        if message.reply is None or message.query != self._query:
            self._query, self._asked = message.query, self._question(message.query)
        question = self._asked
        if message.reply is None:
            if message.is_compared:
                self._note_agreement(comparing.compare_query(message.query, question))
        else:
            if question is None:
                question = self._wire.read_question(PLAIN_QUERY)
            answer = self._reply(message.reply, question)
            if message.is_compared:
                self._note_agreement(comparing.compare_reply(message.reply, question, answer))
        if message.is_gated:
            if self._gate is None or self._gate.exchanges >= Gate.EXCHANGES_MAX:
                self._gate = Gate()
            self._gate.exchange(message)
            self.counts["through the engine"] += 1

    def _note_agreement(self, found: str | None) -> None:
        if found is not None:
            self.counts["compared"] += 1
            self.counts[f"compared: {found}"] += 1

    # --- questions -------------------------------------------------------------------------------------------------------

    def _question(self, query: bytes) -> real_wire.Question | None:
        wire, messages, counts = self._wire, self._messages, self.counts
        try:
            question: real_wire.Question = wire.read_question(query)
        except wire.WireError as error:
            counts[f"no question: {error.fault.value}"] += 1
            answer = messages.refusal(query, error)
            is_response = len(query) < 12 or bool(query[2] & 0x80)
            require((answer is None) == is_response, "a response or less than a header is not answered, all else is")
            if answer is not None:
                require(len(answer) <= len(query), "what is no question is answered by more than it cost")
                require(answer[:2] == query[:2] and answer[2] & 0x80 != 0, "a refusal is a response with the id that came")
                require(answer[3] & 0x0F in (1, 4) and answer[4:] == bytes(8), "a refusal is a bare header")
                self._is_read_by_dnspython(answer)
            return None
        counts["question"] += 1
        section = question.section
        require(query[12 : 12 + len(section)] == section, "the question section is as it came")
        require(reference.name_at(query, 12)[1] + 4 == 12 + len(section), "the question section ends behind type and class")
        require(question.wire_name == section[:-4].lower(), "the name is the lower-case form of what came")
        if query[6:12] != bytes(6):
            self._is_whole(query)
        for answer in (
            messages.denied(question, real_wire.Rcode.NXDOMAIN, messages.ExtendedError.BLOCKED, TEXT),
            messages.servfail(question, messages.ExtendedError.NETWORK_ERROR, "no upstream answered in time"),
        ):
            self._own(answer, question)
            require(len(answer) < 512, "an answer of ours fits every client")
            self._is_read_by_dnspython(answer)
        return question

    def _own(self, answer: bytes, question: real_wire.Question) -> None:
        """An answer without records."""
        require(int.from_bytes(answer[:2], "big") == question.id and answer[2] & 0x80 != 0, "an answer with the client's id")
        require(answer[4:10] == b"\x00\x01" + bytes(4), "one question and no record")
        require(answer[12 : 12 + len(question.section)] == question.section, "the question as the client wrote it")
        opt = answer[12 + len(question.section) :]
        require(
            answer[10:12] == (b"\x00\x01" if question.edns else b"\x00\x00") and bool(question.edns) == bool(opt),
            "EDNS goes to who spoke it",
        )
        if opt:
            require(opt[:3] == b"\x00\x00\x29" and int.from_bytes(opt[9:11], "big") == len(opt) - 11, "OPT is whole")

    def _is_read_by_dnspython(self, answer: bytes, made_of: bytes | None = None) -> None:
        """made_of: the upstream's, whose mistakes are not ours."""
        if self._is_compared and (made_of is None or comparing.is_readable(made_of)):
            require(comparing.is_readable(answer), "dnspython cannot read an answer of ours")

    def _is_whole(self, message: bytes) -> list[reference.Record]:
        try:
            return list(reference.records_of(message))
        except reference.Unreadable as error:
            raise Wrong(f"taken for good, or made by us, and not readable: {error}") from None

    # --- replies ---------------------------------------------------------------------------------------------------------

    def _reply(self, reply: bytes, question: real_wire.Question) -> real_wire.Answer:
        wire, counts = self._wire, self.counts
        answer: real_wire.Answer = wire.read_reply(reply, question)
        counts[f"reply: {answer.status.value}"] += 1
        if answer.status is wire.Status.TRUNCATED:
            self._truncated(reply, question)
        if answer.status is not wire.Status.OK:
            require(not answer.addresses, "only a good reply teaches")
            return answer
        records = self._is_whole(reply)
        bound = reference.bound_of(reply, question.section, records)
        for address, ttl in answer.addresses:
            require(address in bound.may, f"an address was learned that no alias leads to: {address.hex()}")
            require(ttl in bound.may[address], "the TTL is one of the address's own records")
            require(not bound.is_exact or ttl == max(bound.may[address]), "the TTL is the longest of its records")
        if answer.addresses:
            counts["reply that teaches"] += 1
        if bound.is_exact:
            require(len(answer.addresses) == len(bound.may), "an address on the chain was not learned")
        altered = self._removed(reply, records, question, answer)
        if altered is not None:
            fitted = self._messages.fit(altered, question, PROTOCOL_UDP)
            taken = self._messages.size_taken(question)
            require(len(fitted) <= taken, "a UDP reply is no longer than the client takes")
            if fitted != altered:
                counts["reply cut to the client's size"] += 1
                self._empty(fitted, question)
            if fitted != reply:
                self._is_read_by_dnspython(fitted, reply)
            require(self._messages.fit(altered, question, PROTOCOL_TCP) == altered, "over TCP a reply goes as it is")
        return answer

    def _truncated(self, reply: bytes, question: real_wire.Question) -> None:
        """Also of octets that nobody looked at behind the question."""
        cut = self._messages.truncated(reply, question)
        require(len(cut) <= self._messages.size_taken(question), "an empty reply fits the client")
        self._empty(cut, question)

    def _empty(self, cut: bytes, question: real_wire.Question) -> None:
        require(cut[2] & 0x02 != 0, "an empty reply says TC")
        self._own(cut, question)

    def _removed(
        self, reply: bytes, records: list[reference.Record], question: real_wire.Question, answer: real_wire.Answer
    ) -> bytes | None:
        """What may leave; None where it is SERVFAIL."""
        kinds = self._removal.guarded_addresses(reply, GUARD.forbids)
        forbidden = _forbidden(reply, records)
        require(set(kinds) == forbidden, "every forbidden address of the reply is seen, whatever section it is in")
        if answer.is_all:
            self.counts["reply that holds nothing else"] += 1
            require(forbidden <= dict(answer.addresses).keys(), "a reply said to hold no other address has a forbidden one")
        if not kinds:
            return reply
        altered: bytes | None = self._removal.without_addresses(reply, question, kinds)
        if altered is None:
            self.counts["reply that cannot be altered"] += 1
            return None
        self.counts["reply altered"] += 1
        require(len(altered) <= 65535, "no message is longer than 65,535 octets")
        require(not _forbidden(altered, self._is_whole(altered)), "a forbidden address was left")
        after = self._wire.read_reply(altered, question)
        require(after.status is self._wire.Status.OK, "what was altered is still a good reply")
        left = {address: ttl for address, ttl in answer.addresses if address not in kinds}
        lost = left.keys() - dict(after.addresses).keys()
        shared = _addresses_beside(reply, records)
        require(lost <= shared, "an address was lost that stood in no record with a forbidden one")
        require(dict(after.addresses).items() <= left.items() or bool(shared), "an altered reply teaches nothing more")
        return altered


def _forbidden(message: bytes, records: list[reference.Record]) -> set[bytes]:
    found = set()
    for record in records:
        for address in reference.addresses_in(record.rtype, message[record.data : record.end], is_strict=False):
            if GUARD.forbids(address) is not None:
                found.add(address)
    return found


def _addresses_beside(message: bytes, records: list[reference.Record]) -> set[bytes]:
    """Hints that go with a service record that has a forbidden one."""
    beside: set[bytes] = set()
    for record in records:
        found = reference.addresses_in(record.rtype, message[record.data : record.end], is_strict=False)
        if len(found) > 1 and any(GUARD.forbids(address) for address in found):
            beside.update(found)
    return beside


class Gate:
    """A whole engine: one endpoint that may ask everything, selectors for some of it, and a kernel that always says yes."""

    CLIENT = packed("192.0.2.11")
    SERVER = packed("203.0.113.1")
    # Names and addresses pile up as they should; a fresh engine now and then keeps every exchange cheap.
    EXCHANGES_MAX = 500

    def __init__(self) -> None:
        self.world = World(Settings(upstreams=(UPSTREAM,)))
        self.world.start(any_question(), allow("www.example.", "*.test.", "**.example."))
        self.exchanges = 0

    def exchange(self, message: Message) -> None:
        """Exactly one answer to a question, none to what is none; nothing is known afterwards that the bound does not allow."""
        self.exchanges += 1
        engine = self.world.engine
        known = set(engine.dns_cache.lifetimes)
        self.world.now += 10.0
        answers: list[bytes] = []
        protocol = PROTOCOL_TCP if self.exchanges % 5 == 0 else PROTOCOL_UDP
        query = Query(self.exchanges, self.CLIENT, self.SERVER, 53, protocol, message.query)
        asked = self._handle(query, answers)
        reply = message.reply
        if asked is not None:
            if reply is not None:
                self._handle(Reply(asked.transaction, reply), answers)
            # What is no answer to the question is waited past.
            self.world.now += 5.0
            self._handle(Tick(), answers)
        has_header = len(message.query) >= 12 and not message.query[2] & 0x80
        require(len(answers) == int(has_header), f"one answer to each question, none to a response, not {len(answers)}")
        require(not engine.proxy.transactions, "a question stays open for ever")
        new = set(engine.dns_cache.lifetimes) - known
        if new:
            require(asked is not None and reply is not None, "something was learned without a reply")
            assert asked is not None
            assert reply is not None
            may = reference.bound_of(reply, asked.question).may
            require({pair.address for pair in new} <= may.keys(), "the cache holds an address that no alias leads to")
            require(not any(GUARD.forbids(pair.address) for pair in new), "the cache holds a guarded address")

    def _handle(self, event: Query | Reply | Tick, answers: list[bytes]) -> AskUpstream | None:
        engine, now = self.world.engine, self.world.now
        engine.handle(event, now)
        asked = None
        while effects := engine.effects():
            for effect in effects:
                if isinstance(effect, WriteRows):
                    results = tuple((write, self.world.kernel.apply(write)) for write in effect.writes)
                    engine.handle(RowsWritten(results), now)
                elif isinstance(effect, SendReply):
                    answers.append(effect.message)
                elif isinstance(effect, AskUpstream):
                    asked = effect
        return asked
