"""The gate: questions open and replies held.

    question -> judged -> asked upstream -> reply -> learned -> held until its barrier is empty -> released
                  |                          |                            |
                  `-> denied answer          `-> next upstream, SERVFAIL  `-> SERVFAIL at the deadline

Rule 1 (I3): every question that is taken gets exactly one answer: whoever answers takes the transaction out of the table first.
Rule 2 (I8): only a reply to an open transaction teaches, and only under the name that was asked.
Rule 3: a reply goes byte for byte as it came, or not at all; but for guarded addresses (removal.py) and, where that is set,
TTLs (clamping.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from agent.core.aliases import Aliases
from agent.core.barrier import Barrier
from agent.core.distinct import DistinctNames
from agent.core.dns_cache import Pair
from agent.core.events import (
    AskerGone,
    AskUpstream,
    Effect,
    Fact,
    Forget,
    LastSeen,
    Query,
    ReadLastSeen,
    Reply,
    SendReply,
    UpstreamFailed,
)
from agent.core.groups import Groups
from agent.core.health import Health
from agent.core.history import NOTED_WITHIN_S, NameHistory
from agent.core.identity import NoRoom
from agent.core.ipcache import Ipcache
from agent.core.known_bad import KnownBad
from agent.core.name_manager import Learned, Lesson, NameManager
from agent.core.policy import COOKIE_NONE, CompiledPolicy
from agent.core.reconciler import Reconciler
from agent.core.settings import Settings, Upstream
from agent.core.sparing import Sparing
from agent.core.tables import NO_ROOM
from agent.core.types import PROTOCOL_UDP, SCOPE_SHARED, Address, text_of
from agent.dns import messages
from agent.dns.clamping import clamped
from agent.dns.messages import ExtendedError
from agent.dns.removal import guarded_addresses, without_addresses
from agent.dns.wire import (
    REMEMBERED_OCTETS_MAX,
    TYPE_AXFR,
    TYPE_IXFR,
    Question,
    Rcode,
    Status,
    WireError,
    read_question,
    read_reply,
)

# A stub resolver gives up after 5 s. An answer before 4 s, whatever happened, keeps it from asking the next server in vain;
# what is left to the 4 s is for a busy loop and the way to the client.
QUESTION_S_MAX: Final = 3.8
DEADLINES_SLACK: Final = 4_096
# Names that are asked all the time, of all endpoints: some hundred octets each, and a list for the addresses.
TOLD_MAX: Final = 8_192
_NO_LOOKS: Final[frozenset[tuple[int, Address]]] = frozenset()
_ZONE_TRANSFERS: Final = frozenset((TYPE_AXFR, TYPE_IXFR))
# With two upstreams a silent first one leaves the second time enough; with one the whole budget is its own.
TRY_S_MAX: Final = 1.5


class Transaction:
    """A question from when it is taken until it is answered.

    tries: upstreams not asked yet. due_at: when to look at it again; an older entry in the heap means nothing.
    received, taught: the upstream's octets and their addresses; reply, addresses: without what the address guard took out.
    is_all: `received` holds no other addresses. looks: (scope, address) whose flows have to be looked at before the reply can
    be learned. pairs: what the reply teaches, in each scope, while it is held. is_allowed: by policy, not by audit; judged_by:
    by which one. name: what is judged and taught, the name asked or, for a target of an allowed chain, the one that led there.

    Not a dataclass: nearly every question is answered before most of this is ever set.
    """

    is_allowed = False
    ask_server = False
    pattern: str | None = None
    judged_by: CompiledPolicy | None = None
    name = ""
    tries: list[Upstream]
    upstream: Upstream | None = None
    last_reply: bytes | None = None
    received = b""
    taught: tuple[tuple[Address, int], ...] = ()
    is_all = False
    chain: tuple[str, ...] = ()
    reply: bytes | None = None
    barrier: Barrier | None = None
    addresses: tuple[tuple[Address, int], ...] = ()
    replied_at = 0.0
    looks: AbstractSet[tuple[int, Address]]
    pairs: tuple[Pair, ...] = ()
    due_at = 0.0
    rows_waited_for = 0

    def __init__(self, number: int, query: Query, question: Question, endpoint: int, now: float) -> None:
        self.number = number
        self.query = query
        self.question = question
        self.endpoint = endpoint
        self.asked_at = now
        self.deadline = now + QUESTION_S_MAX
        self.cookie = COOKIE_NONE
        self.looks = _NO_LOOKS


class _Told:
    """What an endpoint was told of a name last. until: then it is noted again (history.py)."""

    __slots__ = ("compiled", "lesson", "until")

    def __init__(self, lesson: Lesson, compiled: CompiledPolicy, until: float) -> None:
        self.lesson = lesson
        self.compiled = compiled
        self.until = until


class Proxy:
    """effects: where what is to be done is put."""

    def __init__(
        self,
        settings: Settings,
        groups: Groups,
        names: NameManager,
        ipcache: Ipcache,
        reconciler: Reconciler,
        effects: list[Effect],
        known_bad: frozenset[KnownBad] = frozenset(),
    ) -> None:
        self.settings = settings
        self.transactions: dict[int, Transaction] = {}
        self.counters: dict[str, int] = defaultdict(int)
        self.health = Health(settings.upstreams)
        self.history = NameHistory(settings.history_max)
        self._aliases = Aliases(settings.history_max)
        self.distinct = DistinctNames(settings.names_per_minute)
        self.is_watched = False  # somebody hears what becomes of each question
        self.watched: set[int] = set()  # or of each of these endpoints
        self.is_logged = False  # each is for the log as well
        self._sparing = Sparing()
        self.is_started = False
        self._groups = groups
        self._names = names
        self._ipcache = ipcache
        self._reconciler = reconciler
        self._effects = effects
        self._known_bad = known_bad
        self._next = 1
        self._numbers_by_asker: dict[Hashable, set[int]] = {}
        self._number_by_barrier: dict[int, int] = {}
        self._open_by_endpoint: dict[int, int] = {}
        self._deadlines: list[tuple[float, int]] = []
        # Pairs that are new by replies which are still held -> those replies. One that is released makes a pair stay.
        self._bringers: dict[Pair, set[int]] = {}
        self._told: dict[tuple[int, str], _Told] = {}
        self._numbers_by_look: dict[tuple[int, Address], set[int]] = {}

    # --- questions ---------------------------------------------------------------------------------------------------

    def take(self, query: Query, now: float) -> None:
        """A question came. Who asked is known by its address, which the datapath has compared with the interface."""
        endpoint = self._groups.endpoint_at(query.client)
        if endpoint is None:
            self._count("questions from nobody")
            self._end(None, None, query, "ignored", now, "no endpoint has this address")
            return
        self._count("questions")
        try:
            question = read_question(query.message)
        except WireError as error:
            self._count(f"questions {error.fault.value}")
            answer = messages.refusal(query.message, error)
            if answer is not None:
                self._effects.append(SendReply(query.asker, answer))
            self._end(None, endpoint, query, "ignored" if answer is None else "refused", now, error.fault.value)
            return
        transaction = Transaction(self._next, query, question, endpoint, now)
        self._next += 1
        if question.qtype in _ZONE_TRANSFERS:
            why = "no zone transfers"
            answer = messages.denied(question, Rcode.REFUSED, ExtendedError.NOT_SUPPORTED, why)
            self._deny(transaction, answer, now, why)
        elif (
            len(self.transactions) >= self.settings.open_questions_max
            or self._open_by_endpoint.get(endpoint, 0) >= self.settings.open_questions_per_endpoint_max
        ):
            self._count("questions over the bound")
            why = "too many open questions"
            self._effects.append(SendReply(query.asker, messages.servfail(question, ExtendedError.OTHER, why)))
            self._end(transaction, endpoint, query, "failed", now, why)
        elif not self.is_started or self._groups.endpoints[endpoint].group is None:
            self._open(transaction)
            transaction.deadline = now + self.settings.gate_deadline_s
            self._due(transaction, transaction.deadline)
        else:
            self._judge(transaction, now)

    def start(self, now: float) -> None:
        """Every source of labels has reported: what was asked meanwhile is judged now."""
        self.is_started = True
        self.judge_waiting(now)

    def judge_waiting(self, now: float) -> None:
        """Questions that came before there was anything to judge them by."""
        for transaction in [t for t in self.transactions.values() if t.upstream is None and t.reply is None]:
            if self.is_started and self._groups.endpoints[transaction.endpoint].group is not None:
                self._close(transaction)
                transaction.deadline = transaction.asked_at + QUESTION_S_MAX
                self._judge(transaction, now)

    def _judge(self, transaction: Transaction, now: float) -> None:
        if not self._may_ask(transaction):
            self._deny(transaction, self._denied_answer(transaction), now)
            return
        pattern = transaction.pattern
        if pattern is not None and not self.distinct.may_ask(transaction.endpoint, pattern, transaction.name, now):
            self._count("questions over names-per-minute")
            why = "too many names in a minute (dns.names-per-minute)"
            self._deny(transaction, self._denied_answer(transaction, why), now, why)
            return
        transaction.tries = self._whom_to_ask(transaction, now)
        self._open(transaction)
        self._ask(transaction, now)

    def _whom_to_ask(self, transaction: Transaction, now: float) -> list[Upstream]:
        if transaction.ask_server or not self.settings.upstreams:
            return [Upstream(transaction.query.server, transaction.query.port)]
        return self.health.order(now)

    def _may_ask(self, transaction: Transaction) -> bool:
        query, endpoint = transaction.query, self._groups.endpoints[transaction.endpoint]
        compiled = self._compiled(transaction)
        labels = self._ipcache.label_set(endpoint.scope, query.server)
        transaction.name = transaction.question.name
        verdict = compiled.may_ask(transaction.name, labels, query.port, query.protocol)
        if not verdict.allowed and self.settings.follow_cnames:
            origin = self._aliases.origin_of(transaction.question.name, transaction.asked_at)
            if origin is not None:
                transaction.name = origin
                verdict = compiled.may_ask(origin, labels, query.port, query.protocol)
        transaction.is_allowed, transaction.ask_server, transaction.cookie, transaction.pattern = verdict
        transaction.judged_by = compiled
        return verdict.allowed or compiled.audit

    def _compiled(self, transaction: Transaction) -> CompiledPolicy:
        compiled = self._groups.endpoints[transaction.endpoint].compiled
        assert compiled is not None, "a question was judged before its endpoint had a policy"
        return compiled

    def _denied_answer(self, transaction: Transaction, why: str = "not allowed by policy") -> bytes:
        question, rcode = transaction.question, self.settings.denied_rcode
        if rcode == Rcode.NXDOMAIN and self._compiled(transaction).has_names_below(question.name):
            rcode = Rcode.NOERROR
        return messages.denied(question, rcode, ExtendedError.BLOCKED, why)

    def _deny(self, transaction: Transaction, answer: bytes, now: float, why: str = "") -> None:
        self._count("questions denied")
        self._effects.append(SendReply(transaction.query.asker, answer))
        self._end(transaction, transaction.endpoint, transaction.query, "denied", now, why)

    # --- upstream ----------------------------------------------------------------------------------------------------

    def _ask(self, transaction: Transaction, now: float) -> None:
        upstream = transaction.tries.pop(0)
        transaction.upstream = upstream
        query = transaction.query
        self._effects.append(
            AskUpstream(
                transaction.number, upstream.address, upstream.port, query.protocol, query.message, transaction.question.section
            )
        )
        self._due(transaction, min(transaction.deadline, now + TRY_S_MAX) if transaction.tries else transaction.deadline)

    def take_reply(self, reply: Reply, now: float) -> None:
        transaction = self.transactions.get(reply.transaction)
        if transaction is None or transaction.reply is not None:
            self._count("replies late")
            return
        question = transaction.question
        answer = read_reply(reply.message, question)
        is_ok = answer.status is Status.OK
        if not is_ok and answer.status is Status.MISMATCH:
            self._count("replies mismatched")
            return
        if self.health.silences and transaction.upstream is not None:
            self.health.answered(transaction.upstream)
        if not is_ok and answer.status is not Status.TRUNCATED:
            self._count(f"replies {answer.status.value}")
            self._try_next(transaction, f"upstream sent a {answer.status.value} reply", now)
            return
        if transaction.tries and answer.rcode in (Rcode.SERVFAIL, Rcode.REFUSED):
            transaction.last_reply = reply.message
            self._try_next(transaction, "", now)
            return
        message = reply.message if is_ok else messages.truncated(reply.message, question)
        transaction.received, transaction.taught, transaction.replied_at = message, answer.addresses, now
        transaction.chain, transaction.is_all = answer.chain, answer.is_all
        self._hold(transaction, now)

    def take_failure(self, failure: UpstreamFailed, now: float) -> None:
        transaction = self.transactions.get(failure.transaction)
        if transaction is not None and transaction.reply is None and transaction.upstream is not None:
            self.health.failed(transaction.upstream, now)
            self._try_next(transaction, failure.why, now)

    def _try_next(self, transaction: Transaction, why: str, now: float) -> None:
        if transaction.tries and now < transaction.deadline:
            self._ask(transaction, now)
            return
        self._effects.append(Forget(transaction.number))
        if transaction.last_reply is not None:
            transaction.received, transaction.replied_at = transaction.last_reply, now
            # Not what a server has said that was asked before, and is not to be asked any more.
            transaction.taught, transaction.is_all = (), False
            self._hold(transaction, now)
        else:
            self._fail(transaction, ExtendedError.NETWORK_ERROR, why or "no upstream answered", now)

    # --- the gate ------------------------------------------------------------------------------------------------------

    def _hold(self, transaction: Transaction, now: float) -> None:
        """Learn what the reply teaches and take its barrier from the rows as they stand (barrier.py)."""
        compiled = self._compiled(transaction)
        if transaction.judged_by is not compiled and not self._may_still_ask(transaction, now):
            return
        scopes = self._teachable(transaction)
        if self._is_repeated(transaction, compiled, scopes, now):
            self._release(transaction, now)
            return
        if not self._guard(transaction, compiled, now):
            return
        # A question let through by audit alone opens nothing; what it would have been is explained by its name.
        if not transaction.addresses or not transaction.is_allowed:
            self._note(transaction, now)
            self._release(transaction, now)
            return
        name, is_wanted = transaction.name, self._is_wanted(transaction, compiled)
        learned: list[tuple[int, Learned]] = []
        try:
            if not self._has_room(transaction, scopes, now):
                return
            for scope in scopes:
                of_scope = self._names.learn(name, transaction.addresses, scope, now, transaction.endpoint)
                learned.append((scope, of_scope))
        except NoRoom as error:
            self._count("replies without room")
            self._bring(transaction, learned)
            self._let_go(transaction, has_room=False)
            if is_wanted:
                self._give_up(transaction, str(error), now)
            else:
                self._release(transaction, now)
            return
        self._note(transaction, now)
        if self.settings.follow_cnames:
            ttl = max(ttl for _, ttl in transaction.addresses)
            lifetime = min(max(float(ttl), self.settings.ttl_floor_s), self.settings.ttl_cap_s)
            self._aliases.note(name, transaction.chain[1:], now + lifetime)
        rows = [row for _, of_scope in learned for row in of_scope.rows] if is_wanted else []
        if KnownBad.NOTHING_CHANGED_NO_WAIT in self._known_bad and not any(of_scope.added for _, of_scope in learned):
            rows = []
        if not rows:
            # The client has these addresses now, whoever else waits for rows of theirs.
            for pair in self._pairs(transaction, scopes) if self._bringers else ():
                self._bringers.pop(pair, None)
            self._remember(transaction, compiled, learned, now)
            self._release(transaction, now)
            return
        self._bring(transaction, learned)
        self._reconciler.settle()
        transaction.barrier = self._reconciler.barriers.take(rows, must_be_present=True)
        transaction.rows_waited_for = len(transaction.barrier.missing)
        if transaction.barrier.is_over or KnownBad.RELEASE_FIRST in self._known_bad:
            self._barrier_over(transaction, now)
            return
        if len(self._number_by_barrier) >= self.settings.held_replies_max:
            self._give_up(transaction, "too many held replies", now)
            return
        self._number_by_barrier[id(transaction.barrier)] = transaction.number
        self._due(transaction, self._gate_ends(transaction))

    def _is_repeated(self, transaction: Transaction, compiled: CompiledPolicy, scopes: tuple[int, ...], now: float) -> bool:
        """Is it the answer of a moment ago, octet for octet, under the same circumstances? Then it is learned by that."""
        told = self._told.get((transaction.endpoint, transaction.name))
        if (
            told is None
            or told.lesson.records is not transaction.taught
            or told.compiled is not compiled
            or not transaction.is_allowed
            or scopes != (told.lesson.scope,)
            or now >= told.until
            or not self._names.repeat(told.lesson, now)
        ):
            return False
        transaction.reply, transaction.addresses = transaction.received, transaction.taught
        return True

    def _remember(
        self, transaction: Transaction, compiled: CompiledPolicy, learned: list[tuple[int, Learned]], now: float
    ) -> None:
        """The reply goes as it came, and nothing was new by it."""
        if transaction.addresses is not transaction.taught or len(learned) > 1:
            return
        scope, of_scope = learned[0]
        if of_scope.added:
            return
        if len(transaction.received) > REMEMBERED_OCTETS_MAX:
            return  # it would not be known again
        if self.settings.follow_cnames or self._known_bad:
            return
        lesson = self._names.lesson(transaction.name, transaction.taught, scope, of_scope)
        if lesson is not None:
            if len(self._told) >= TOLD_MAX:
                self._told.clear()
            self._told[transaction.endpoint, transaction.name] = _Told(lesson, compiled, now + NOTED_WITHIN_S)

    @staticmethod
    def _pairs(transaction: Transaction, scopes: Iterable[int]) -> list[Pair]:
        return [Pair(scope, transaction.name, address) for scope in scopes for address, _ in transaction.addresses]

    def _has_room(self, transaction: Transaction, scopes: Iterable[int], now: float) -> bool:
        """May the name have these addresses too? Raises NoRoom. False: flows have to be looked at first (`take_look`)."""
        name, names = transaction.name, self._names
        looks: set[tuple[int, Address]] = set()
        for scope in scopes:
            if names.may_lack_room(name, len(transaction.addresses), scope):
                addresses = {address for address, _ in transaction.addresses}
                looks.update((scope, address) for address in names.make_room(name, addresses, scope, now))
        looks.update(names.make_place(name, transaction.endpoint, now))
        transaction.looks = looks
        if not looks:
            return True
        for scope, address in sorted(looks):
            self._numbers_by_look.setdefault((scope, address), set()).add(transaction.number)
            self._effects.append(ReadLastSeen(scope, address))
        self._due(transaction, self._gate_ends(transaction))
        return False

    def take_look(self, seen: LastSeen, now: float) -> None:
        """A flow of the address was seen last at this time: replies may wait to know it."""
        look = seen.scope, seen.address
        for number in sorted(self._numbers_by_look.pop(look, ())):
            transaction = self.transactions.get(number)
            if transaction is None or look not in transaction.looks:
                continue
            self._names.look(transaction.name, *look, seen.at, now)
            transaction.looks = transaction.looks - {look}
            if not transaction.looks:
                self._hold(transaction, now)

    def _gate_ends(self, transaction: Transaction) -> float:
        return min(transaction.deadline, transaction.replied_at + self.settings.gate_deadline_s)

    def _may_still_ask(self, transaction: Transaction, now: float) -> bool:
        """The policy changed since the question was judged: another may be the one to answer it now, or nobody (I8).

        What a server has said whom the policy no longer names is not looked at: who is to be asked now is asked.
        """
        has_asked_server = transaction.ask_server
        if not self._may_ask(transaction):
            self._close(transaction)
            self._deny(transaction, self._denied_answer(transaction), now)
            return False
        if transaction.ask_server == has_asked_server:
            return True
        transaction.reply = transaction.last_reply = None
        transaction.barrier = None
        transaction.tries = self._whom_to_ask(transaction, now)
        self._try_next(transaction, "the policy changed while the question was open", now)
        return False

    def _teachable(self, transaction: Transaction) -> tuple[int, ...]:
        """The scopes a reply is learned in. A server that only this endpoint's policy names teaches nobody else, not even while
        the endpoint is about to share what is learned (DECISIONS 5)."""
        scopes = self._groups.scopes_of(transaction.endpoint)
        return tuple(scope for scope in scopes if scope != SCOPE_SHARED) if transaction.ask_server else scopes

    def _guard(self, transaction: Transaction, compiled: CompiledPolicy, now: float) -> bool:
        """Take guarded addresses out of the reply (DECISIONS 13); says whether it can go on. Under audit nothing is altered,
        and only who watches the endpoint is told of it."""
        transaction.reply, transaction.addresses = transaction.received, transaction.taught
        question = transaction.question
        if compiled.audit and transaction.endpoint not in self.watched:
            return True
        selectors, guard = self._names.selectors_of(transaction.name), self._names.guard
        allowed = [prefix for s in selectors if s.peer.allowed and s.label in compiled.fqdn_labels for prefix in s.peer.allowed]
        if transaction.is_all and not guard.forbids_any(transaction.taught, allowed):
            return True
        kinds = guarded_addresses(transaction.received, lambda address: guard.forbids(address, allowed))
        if not kinds:
            return True
        self._count("replies with guarded addresses")
        unsaid = 0 if self.is_logged else self._sparing.may_say(("guard", transaction.endpoint), now)
        if unsaid is not None or transaction.endpoint in self.watched:
            addresses = {text_of(address): str(kind) for address, kind in kinds.items()}
            asked = {"endpoint": transaction.endpoint, "name": question.name, "type": question.qtype}
            fields = {**asked, "addresses": addresses, "audited": compiled.audit, "unsaid": unsaid or 0}
            self._effects.append(Fact("guard", now, fields, is_for_log=unsaid is not None))
        if compiled.audit:
            return True
        altered = without_addresses(transaction.received, question, kinds)
        if altered is None:
            self._fail(transaction, ExtendedError.BLOCKED, "a guarded address in a reply that cannot be altered", now)
            return False
        transaction.reply = altered
        transaction.addresses = tuple(pair for pair in transaction.taught if pair[0] not in kinds)
        return True

    def _note(self, transaction: Transaction, now: float) -> None:
        scope, name = self._groups.endpoints[transaction.endpoint].scope, transaction.name
        for address, _ in transaction.addresses:
            if self.history.is_due(name, address, transaction.endpoint, transaction.chain, now):
                lifetime = self._names.cache.lifetimes.get(Pair(scope, name, address))
                until = lifetime.lives_until if lifetime is not None else now
                self.history.expire(now)
                self.history.note(name, address, transaction.endpoint, transaction.chain, until, now)

    def _is_wanted(self, transaction: Transaction, compiled: CompiledPolicy) -> bool:
        """Does a selector of the asking endpoint want the name? Else there is nothing to wait for."""
        return not compiled.fqdn_labels.isdisjoint(self._names.labels_of(transaction.name))

    def barriers_over(self, barriers: Iterable[Barrier], now: float) -> None:
        """Rows were acknowledged, or cannot be written."""
        for barrier in barriers:
            number = self._number_by_barrier.pop(id(barrier), None)
            if number is not None and number in self.transactions:
                self._barrier_over(self.transactions[number], now)
        if KnownBad.WAIT_PER_BATCH in self._known_bad:
            for number in list(self._number_by_barrier.values()):
                self._release(self.transactions[number], now)

    def _barrier_over(self, transaction: Transaction, now: float) -> None:
        barrier = transaction.barrier
        assert barrier is not None
        if barrier.error is not None:
            self._let_go(transaction, has_room=barrier.errno not in NO_ROOM)
            self._give_up(transaction, barrier.error, now)
        elif self._is_wanted(transaction, self._compiled(transaction)) and not self._holds_all(transaction):
            # The rows are there for other names' sake: this name lost an address meanwhile.
            self._give_up(transaction, "an address of the reply is held no longer", now)
        else:
            self._release(transaction, now)

    def _holds_all(self, transaction: Transaction) -> bool:
        scopes = self._teachable(transaction)
        return self._names.holds(pair for pair in transaction.pairs if pair.scope in scopes)

    def _give_up(self, transaction: Transaction, why: str, now: float) -> None:
        """What the reply needs cannot be, or is not there in time (DECISIONS 9)."""
        if self.settings.release_on_failure:
            self._count("replies released on failure")
            self._release(transaction, now)
        else:
            self._fail(transaction, ExtendedError.NOT_READY, why, now)

    def _bring(self, transaction: Transaction, learned: list[tuple[int, Learned]]) -> None:
        """The reply is held, and what is new by it with it."""
        for _, of_scope in learned:
            for pair in of_scope.added:
                self._bringers[pair] = set()
        pairs = self._pairs(transaction, [scope for scope, _ in learned])
        for pair in pairs:
            if pair in self._bringers:
                self._bringers[pair].add(transaction.number)
        transaction.pairs = tuple(dict.fromkeys((*transaction.pairs, *pairs)) if transaction.pairs else pairs)

    def _let_go(self, transaction: Transaction, *, is_released: bool = False, has_room: bool = True) -> None:
        """The reply is held no longer.

        Where there is no room, what it brought is taken back, so that nothing piles up (DECISIONS 9); not what another reply
        brought too that is still held, or was released: its client has the address.
        """
        for pair in transaction.pairs:
            bringers = self._bringers.get(pair)
            if bringers is None:
                continue
            bringers.discard(transaction.number)
            if is_released or not bringers:
                del self._bringers[pair]
            if not bringers and not is_released and not has_room:
                self._names.take_back((pair,))
        transaction.pairs = ()

    def judge_again(self, endpoints: frozenset[int], now: float) -> None:
        """The policies of these endpoints changed: a held reply is judged again before it goes (DECISIONS 9)."""
        self._told.clear()  # it would keep what they were compiled to
        for transaction in [
            t for t in self.transactions.values() if t.endpoint in endpoints and (t.barrier is not None or t.looks)
        ]:
            self._forget_barrier(transaction)
            transaction.judged_by = None
            self._hold(transaction, now)
        self.judge_waiting(now)

    # --- answers -------------------------------------------------------------------------------------------------------

    def _release(self, transaction: Transaction, now: float) -> None:
        assert transaction.reply is not None
        self._let_go(transaction, is_released=True)
        self._close(transaction)
        reply = transaction.reply
        if self.settings.clamp_ttl:
            # The time it was held is gone from the lifetimes, too.
            reply = clamped(reply, max(int(transaction.replied_at + self.settings.ttl_cap_s - now), 0))
        message = messages.fit(reply, transaction.question, transaction.query.protocol)
        self._effects.append(SendReply(transaction.query.asker, message))
        self._count("replies released")
        if self.is_watched or transaction.endpoint in self.watched:
            self._end(transaction, transaction.endpoint, transaction.query, "released", now)

    def _fail(self, transaction: Transaction, reason: ExtendedError, why: str, now: float) -> None:
        self._close(transaction)
        answer = messages.servfail(transaction.question, reason, why)
        self._effects.append(SendReply(transaction.query.asker, answer))
        self._count("replies failed")
        self._end(transaction, transaction.endpoint, transaction.query, "failed", now, why)

    def expire(self, now: float) -> None:
        """Deadlines that have come."""
        while self._deadlines and self._deadlines[0][0] <= now:
            at, number = heapq.heappop(self._deadlines)
            transaction = self.transactions.get(number)
            if transaction is None or transaction.due_at != at:
                continue
            if transaction.barrier is not None or transaction.looks:
                self._gate_deadline(transaction, now)
            elif transaction.upstream is None:
                self._fail(transaction, ExtendedError.NOT_READY, "still starting", now)
            else:
                self._count("upstream tries without an answer")
                self.health.failed(transaction.upstream, now)
                self._try_next(transaction, "no upstream answered in time", now)

    def _gate_deadline(self, transaction: Transaction, now: float) -> None:
        self._count("gate deadlines")
        self._give_up(transaction, "the addresses are not in the kernel yet", now)

    def asker_gone(self, gone: AskerGone, now: float) -> None:
        for number in list(self._numbers_by_asker.get(gone.asker, ())):
            transaction = self.transactions[number]
            if transaction.reply is None and transaction.upstream is not None:
                self._effects.append(Forget(number))
            self._close(transaction)
            self._count("askers gone")
            self._end(transaction, transaction.endpoint, transaction.query, "gone", now, "the client hung up")

    def endpoint_gone(self, endpoint: int, now: float) -> None:
        for transaction in [t for t in self.transactions.values() if t.endpoint == endpoint]:
            self._effects.append(Forget(transaction.number))
            self._close(transaction)
            self._end(transaction, endpoint, transaction.query, "gone", now, "its endpoint is gone")
        self.distinct.forget(endpoint)
        self._told.clear()
        for kind in ("question", "guard"):
            self._sparing.forget((kind, endpoint))

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    # --- the table of transactions ---------------------------------------------------------------------------------------

    def _open(self, transaction: Transaction) -> None:
        self.transactions[transaction.number] = transaction
        self._open_by_endpoint[transaction.endpoint] = self._open_by_endpoint.get(transaction.endpoint, 0) + 1
        if transaction.query.protocol != PROTOCOL_UDP:  # who asks by datagrams is never gone
            self._numbers_by_asker.setdefault(transaction.query.asker, set()).add(transaction.number)

    def _close(self, transaction: Transaction) -> None:
        del self.transactions[transaction.number]
        if transaction.pairs:
            self._let_go(transaction)
        self._forget_barrier(transaction)
        left = self._open_by_endpoint[transaction.endpoint] - 1
        if left:
            self._open_by_endpoint[transaction.endpoint] = left
        else:
            del self._open_by_endpoint[transaction.endpoint]
        if transaction.query.protocol != PROTOCOL_UDP:
            numbers = self._numbers_by_asker[transaction.query.asker]
            numbers.discard(transaction.number)
            if not numbers:
                del self._numbers_by_asker[transaction.query.asker]

    def _forget_barrier(self, transaction: Transaction) -> None:
        if transaction.barrier is not None:
            self._reconciler.barriers.cancel(transaction.barrier)
            self._number_by_barrier.pop(id(transaction.barrier), None)

    def _due(self, transaction: Transaction, at: float) -> None:
        transaction.due_at = at
        heapq.heappush(self._deadlines, (at, transaction.number))
        if len(self._deadlines) > DEADLINES_SLACK + 4 * len(self.transactions):
            # Nearly all are of questions that were answered long before.
            self._deadlines = [(t.due_at, t.number) for t in self.transactions.values()]
            heapq.heapify(self._deadlines)

    def _count(self, what: str) -> None:
        self.counters[what] += 1

    def _end(
        self,
        transaction: Transaction | None,
        endpoint: int | None,
        query: Query,
        outcome: str,
        now: float,
        why: str = "",
    ) -> None:
        """The one fact about a question that is over. Where nobody watches: one a second of each endpoint, of what is unusual.

        transaction: None where the question could not be read.
        """
        unsaid = 0 if self.is_logged or outcome == "released" else self._sparing.may_say(("question", endpoint), now)
        if unsaid is None and not self.is_watched and endpoint not in self.watched:
            return
        fields: dict[str, object] = {"endpoint": endpoint, "client": text_of(query.client), "server": text_of(query.server)}
        fields["protocol"] = "udp" if query.protocol == PROTOCOL_UDP else "tcp"
        if transaction is not None:
            replied_at, upstream = transaction.replied_at, transaction.upstream
            verdict = None if transaction.judged_by is None else "allowed" if transaction.is_allowed else "audited"
            fields |= {
                "name": transaction.question.name,
                "type": transaction.question.qtype,
                "verdict": "denied" if outcome == "denied" else verdict,
                "cookie": transaction.cookie,
                "upstream": text_of(upstream.address) if upstream is not None else None,
                "upstream_s": round(replied_at - transaction.asked_at, 6) if replied_at else None,
                "gate_s": round(now - replied_at, 6) if replied_at else None,
                "rows": transaction.rows_waited_for,
            }
            if outcome == "released" and transaction.reply is not None:
                fields["rcode"] = transaction.reply[3] & 0x0F
                fields["answers"] = [{"address": text_of(address), "ttl": ttl} for address, ttl in transaction.addresses]
                fields["cnames"] = list(transaction.chain[1:])
        fields |= {"outcome": outcome, "why": why or None, "unsaid": unsaid or None}
        self._effects.append(Fact("question", now, fields, is_for_log=unsaid is not None))
