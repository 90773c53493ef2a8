"""The name manager: bags of selectors, labels of addresses, lifetimes with flows, and when a reply may leave.

In the cases registering a selector twice is once, because their manager does not count and whoever is above it does; only the
group `rules` speaks of the counted selectors above. Here the manager counts: a second `select` is then no second user.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final

from agent.core.events import RowsWritten, SourceReported
from agent.core.guard import AddressGuard
from agent.core.names import normalise_name
from agent.core.rules import Fqdn
from agent.core.settings import Settings
from agent.core.types import SCOPE_SHARED, SCOPE_STATIC, IpcacheKey, PolicyKey, Prefix, Table, Write, packed, text_of
from tests.cases.passes import WorldOfPasses, settings_of
from tests.cases.runner import DoesNotApply, Fields, Sheet
from tests.cases.translation import fqdn_of
from tests.sim.world import EVERY_ADDRESS, UPSTREAM, World, allow, any_question

FIELDS: Final = [
    "config", "steps", "expect", "expect_count", "selectors", "answers", "static_prefixes", "max_wait_ms", "reply",
    "replies", "known", "write", "writes", "selected", "dirty_before", "startup_complete", "families", "ignored_prefixes",
    "answer",
]  # fmt: skip


def judge(case: Fields, sheet: Sheet) -> None:
    judges: dict[str, Callable[[Fields, Sheet], None]] = {
        "identity": _judge_identities,
        "release": _judge_release,
        "address-filter": _judge_filter,
        "usage": _judge_usage,
    }
    judges.get(case["group"], _judge_steps)(case, sheet)


# --- selectors, names and time -----------------------------------------------------------------------------------------------


def _judge_steps(case: Fields, sheet: Sheet) -> None:
    config = case.get("config", Fields()).only("min_ttl")
    world = WorldOfPasses(settings_of(ttl_floor_s=config.get("min_ttl", 0)))
    world.start(endpoints={1: "198.51.100.254"})
    selected: Counter[Fqdn] = Counter()
    answered_at: dict[tuple[str, bytes], float] = {}
    for number, step in enumerate(case["steps"], 1):
        place, before = f"step {number} {step['op']}", _bags(world)
        names = world.engine.names
        match step["op"]:
            case "select":
                peer = fqdn_of(step.only("op", "selector", "expect", "notify")["selector"])
                if not selected[peer] or case["group"] == "rules":
                    names.register(peer)
                    selected[peer] += 1
            case "unselect":
                peer = fqdn_of(step.only("op", "selector", "expect", "notify")["selector"])
                if selected[peer]:
                    names.unregister(peer)
                    selected[peer] -= 1
            case "dns":
                step.only("op", "t", "client", "name", "ips", "ttl", "expect", "notify")
                name, records = normalise_name(step["name"]), [(packed(text), step["ttl"]) for text in step["ips"]]
                names.learn(name, records, SCOPE_SHARED, world.at(step["t"]))
                answered_at.update({(name, address): step["t"] for address, _ in records})
            case "dns_bulk":
                step.only("op", "t", "client", "name_template", "first_ip", "count", "ttl", "expect", "notify")
                first = int(ip_address(step["first_ip"]))
                for i in range(step["count"]):
                    name, address = normalise_name(step["name_template"].format(i=i)), ip_address(first + i).packed
                    names.learn(name, [(address, step["ttl"])], SCOPE_SHARED, world.at(step["t"]))
            case "gc":
                world.go_to(step.only("op", "t", "expect", "notify")["t"])
            case "conntrack_pass":
                live = step.only("op", "t", "live", "expect", "notify")["live"]
                world.pass_over(step["t"], {packed(text) for texts in live.values() for text in texts})
            case "forget":
                step.only("op", "lookups_before", "names", "expect", "notify")
                wanted = set(map(normalise_name, step["names"])) if "names" in step else None
                for pair in list(world.engine.dns_cache.lifetimes):
                    is_old = answered_at.get((pair.name, pair.address), step["lookups_before"]) < step["lookups_before"]
                    if is_old and (wanted is None or pair.name in wanted):
                        names.forget(pair)
            case "restart":
                world.now = max(world.now, world.at(step.only("op", "t", "expect", "notify")["t"]))
                world.start_again()
                selected.clear()
            case other:
                raise DoesNotApply(f"unknown step {other}")
        _compare_selected(world, step.get("expect", Fields()), sheet, place)
        if "notify" in step:
            _compare_change(before, _bags(world), step["notify"], sheet, place)
    for text, count in case.get("expect_count", {}).items():
        sheet.compare(f"addresses of {text}", len(_bags(world).get(fqdn_of(text), ())), count)


def _bags(world: World) -> dict[Fqdn, set[str]]:
    return {
        peer: {text_of(address) for address in selector.bags.get(SCOPE_SHARED, ())}
        for peer, selector in world.engine.names.selectors.items()
    }


def _compare_selected(world: World, wanted: Fields, sheet: Sheet, place: str) -> None:
    wanted.only("selected", "labels")
    bags = _bags(world)
    for text, addresses in wanted.get("selected", {}).items():
        sheet.compare_members(f"{place} {text} selects", bags.get(fqdn_of(text), set()), addresses)
    if "labels" in wanted:
        ours = {f"{address} has {peer.pattern}" for peer, addresses in bags.items() for address in addresses}
        theirs = {f"{address} has {fqdn_of(text).pattern}" for address, texts in wanted["labels"].items() for text in texts}
        sheet.compare_members(f"{place} label", ours, theirs)


def _compare_change(before: dict[Fqdn, set[str]], after: dict[Fqdn, set[str]], wanted: Any, sheet: Sheet, place: str) -> None:
    told = [] if wanted is None else wanted if isinstance(wanted, list) else [wanted]
    ours = {
        f"{peer.pattern} {word} {address}"
        for peer in after
        for word, addresses in (
            ("added", after[peer] - before.get(peer, set())),
            ("removed", before.get(peer, set()) - after[peer]),
        )
        for address in addresses
    }
    theirs = {
        f"{fqdn_of(one['selector']).pattern} {word} {address}"
        for one in told
        for word in ("added", "removed")
        for address in one.only("selector", "added", "removed")[word]
    }
    sheet.compare_members(f"{place} told", ours, theirs)


# --- identities ------------------------------------------------------------------------------------------------------------


def _judge_identities(case: Fields, sheet: Sheet) -> None:
    world = World()
    world.start()
    prefixes = [Prefix.parse(text) for text in case.get("static_prefixes", ())]
    for prefix in prefixes:
        world.engine.ipcache.upsert(IpcacheKey(SCOPE_STATIC, prefix), "policy", frozenset({f"cidr:{prefix}"}))
    for selector in case["selectors"]:
        world.engine.names.register(fqdn_of(selector))
    for answer in case["answers"]:
        records = [(packed(text), 60) for text in answer.only("name", "ips")["ips"]]
        world.engine.names.learn(normalise_name(answer["name"]), records, SCOPE_SHARED, world.now)
    groups: dict[object, set[Prefix]] = {}
    for key, row in world.engine.reconciler.ipcache.desired.items():
        assert isinstance(key, IpcacheKey)
        if key.scope == SCOPE_SHARED or key.prefix in prefixes:
            groups.setdefault(row.value, set()).add(key.prefix)
    ours = {" ".join(sorted(map(str, group))) for group in groups.values()}
    theirs = {" ".join(sorted(str(Prefix.parse(text)) for text in group)) for group in case["expect"].only("groups")["groups"]}
    sheet.compare_members("share an identity:", ours, theirs)


# --- when a reply may leave ------------------------------------------------------------------------------------------------

_STATIC: Final = "192.0.2.0/24"  # named by each policy, so that a name inside is a new combination with rows in every set


class _Gate:
    """Replies, and the kernel's answers to what they need, at the times of the case: milliseconds since the first came.

    The rules of a case are endpoints of ours, each with a set of its own; a rule's write is the policy row of the new identity
    in that set. A write without a rule is the address's own row. The first endpoint asks.
    """

    def __init__(self, case: Fields) -> None:
        deadline_s = case["max_wait_ms"] / 1_000
        settings = Settings(upstreams=(UPSTREAM,), allow_addresses=EVERY_ADDRESS, gate_deadline_s=deadline_s)
        self.world = World(settings)
        replies = case["replies"] if "replies" in case else [Fields(at_ms=0, **case["reply"])]
        self.replies = [one.only("at_ms", "name", "ips", "client") for one in replies]
        self.rules = [one["rule"] for one in case.get("writes", ())]
        self.rules = list(dict.fromkeys([*self.rules, *case.get("dirty_before", ())]))
        self.writes = {one["rule"]: one.only("rule", "done_at_ms", "fails_at_ms") for one in case.get("writes", ())}
        self.write_of_address = case.get("write", Fields(done_at_ms=0)).only("done_at_ms", "fails_at_ms")
        self.failing_rules = set(case.get("dirty_before", ()))
        names = [one["name"] for one in self.replies] if case.get("selected", True) else ["selected.example."]
        numbers = range(1, max(1, len(self.rules)) + 1)
        for number in numbers:
            self.world.add_endpoint(number, f"198.51.100.{number}")
        targets = (*dict.fromkeys(names), *((_STATIC,) if self.rules else ()))
        self.world.apply(*(allow(*targets, port=443, app=f"e{n}", name=f"r{n}") for n in numbers), any_question())
        if case.get("startup_complete", True):
            self.report_sources()
        for address in case.get("known", ()):
            name = next(one["name"] for one in self.replies if address in one["ips"])
            self.world.auto = False
            self.world.reply(self.world.ask(name), address)
            self.run(round(case["max_wait_ms"]) + 10, is_before=True)
        self.failing_rules.clear()
        self.world.auto = False
        self.began = self.world.now
        self.writes_before = self.world.kernel.writes
        self.askers: dict[str, int] = {}
        self.were_open: dict[int, bool] = {}

    def report_sources(self) -> None:
        for source in sorted(self.world.engine.missing_sources):
            self.world.handle(SourceReported(source))

    @property
    def ms(self) -> float:
        return round((self.world.now - self.began) * 1_000, 3)

    def set_of(self, rule: str) -> int:
        group = self.world.engine.groups.endpoints[self.rules.index(rule) + 1].group
        return group.set if group is not None else 0

    def run(self, ms: int, *, is_before: bool = False) -> None:
        """A millisecond at a time: replies come, then the kernel answers, then whoever was answered looks."""
        end = self.world.now + ms / 1_000
        while True:
            if not is_before:
                for one in self.replies:
                    if one["name"] not in self.askers and self.ms >= one["at_ms"]:
                        asker = self.askers[one["name"]] = self.world.ask(one["name"])
                        self.world.reply(asker, *one["ips"])
            still: list[Write] = []
            while (write := self.world.take_write()) is not None:
                error = 0 if is_before and not self.failing_rules else self.error_of(write, is_before=is_before)
                if error is None:
                    still.append(write)
                else:
                    self.world.handle(RowsWritten(((write, error or self.world.kernel.apply(write)),)))
            self.world.waiting_writes.extend((write,) for write in still)
            if not is_before:
                self.look()
            if self.world.now >= end:
                return
            self.world.advance(0.001)

    def error_of(self, write: Write, *, is_before: bool) -> int | None:
        """What the kernel says to this write now; None: nothing yet."""
        spec, rule = self.write_of_address, None
        if isinstance(write.key, PolicyKey):
            rule = next((rule for rule in self.rules if self.set_of(rule) == write.key.set), None)
            spec = self.writes.get(rule, Fields(done_at_ms=0)) if rule is not None else Fields(done_at_ms=0)
        elif write.table is not Table.IPCACHE:
            return 0
        if is_before:
            return errno.EAGAIN if rule in self.failing_rules else 0
        if "fails_at_ms" in spec:
            return errno.EAGAIN if self.ms >= spec["fails_at_ms"] else None
        return 0 if spec["done_at_ms"] is not None and self.ms >= spec["done_at_ms"] else None

    def look(self) -> None:
        for one in self.replies:
            asker = self.askers.get(one["name"])
            if asker is not None and asker not in self.were_open and self.world.answers_of(asker):
                self.were_open[asker] = all(self.world.passes(text) for text in one["ips"])


def _judge_release(case: Fields, sheet: Sheet) -> None:
    gate, wanted = _Gate(case), case["expect"]
    wanted.only(*_EXPECTED_OF_RELEASE)
    bounds = [value for key, value in wanted.items() if key.endswith("_ms")]
    gate.run(round(max([case["max_wait_ms"], *bounds])) + 100)
    counters, world = gate.world.engine.proxy.counters, gate.world
    released = wanted.get("released")
    times = released if isinstance(released, dict) else {gate.replies[0]["name"]: wanted} if released else {}
    for name, bound in times.items():
        if name not in gate.askers:
            raise DoesNotApply(f"unknown name {name!r} of a reply")
        answers = world.answers_of(gate.askers[name])
        is_released = bool(answers) and answers[0].rcode == "NOERROR"
        sheet.compare(f"{name} released", is_released if is_released or not answers else answers[0].rcode, theirs=True)
        ms = round((answers[0].at - gate.began) * 1_000, 3) if answers else None
        if "at_or_after_ms" in bound:
            sheet.compare(f"{name} not before its time", ms is not None and ms >= bound["at_or_after_ms"], theirs=True)
        if "before_ms" in bound:
            sheet.compare(f"{name} in time", ms is not None and ms < bound["before_ms"], theirs=True)
    asker = gate.askers[gate.replies[0]["name"]]
    if "order" in wanted:
        steps = ["map entry present", "reply visible to client"]
        sheet.compare("order", steps if gate.were_open.get(asker) else steps[::-1], wanted["order"])
    if "map_writes" in wanted:
        sheet.compare("map writes", world.kernel.writes - gate.writes_before, wanted["map_writes"])
    if "counted_as_timeout" in wanted:
        sheet.compare("counted as timeout", bool(counters.get("gate deadlines")), wanted["counted_as_timeout"])
    if "visible_as_error" in wanted:
        is_error = [answer.rcode for answer in world.answers_of(asker)] == ["SERVFAIL"]
        sheet.compare("visible as error", is_error, wanted["visible_as_error"])
    if "dirty_after" in wanted:
        dirty = {key.set for key in world.engine.reconciler.policy.pending if isinstance(key, PolicyKey)}
        ours = [rule for rule in gate.rules if gate.set_of(rule) in dirty]
        sheet.compare("dirty after", ours, wanted["dirty_after"])
    if "retried_on_next_reply" in wanted:
        gate.writes, gate.write_of_address = {}, Fields(done_at_ms=0)
        again = world.ask(gate.replies[0]["name"])
        world.reply(again, *gate.replies[0]["ips"])
        gate.run(round(case["max_wait_ms"]) + 1_000)
        is_retried = [answer.rcode for answer in world.answers_of(again)] == ["NOERROR"]
        sheet.compare("retried on the next reply", is_retried, wanted["retried_on_next_reply"])
    if "after_startup_map_has" in wanted:
        gate.report_sources()
        gate.run(100)
        there = [text for text in gate.replies[0]["ips"] if world.passes(text)]
        sheet.compare("in the map after start", there, wanted["after_startup_map_has"])


_EXPECTED_OF_RELEASE: Final = [
    "released", "at_or_after_ms", "before_ms", "order", "map_writes", "counted_as_timeout", "visible_as_error",
    "dirty_after", "retried_on_next_reply", "after_startup_map_has",
]  # fmt: skip


# --- what is not learned ---------------------------------------------------------------------------------------------------


def _judge_filter(case: Fields, sheet: Sheet) -> None:
    """The guard is the only filter; a family nobody has is not filtered, its rows match no packet."""
    world = World(Settings(upstreams=(UPSTREAM,)))
    world.start()
    peer = Fqdn("a.example.")
    world.engine.names.register(peer)
    world.engine.names.change_guard(AddressGuard(), ())
    records = [(packed(text), 60) for text in case["answer"]]
    world.engine.names.learn("a.example.", records, SCOPE_SHARED, world.now)
    sheet.compare_members("selected", _bags(world)[peer], case["expect"].only("selected")["selected"])


def _judge_usage(case: Fields, sheet: Sheet) -> None:
    """A user is a selector that wants the name; that the resolver forgets it is the end of its lifetime."""
    world = World()
    world.start()
    names = world.engine.names
    name = ""
    for number, step in enumerate(case["steps"], 1):
        step.only("do", "name", "ips", "user", "expect_known")
        name = normalise_name(step["name"]) if "name" in step else name
        match step["do"]:
            case "resolver learns name":
                names.learn(name, [(packed(text), 60) for text in step["ips"]], SCOPE_SHARED, world.now)
            case "resolver forgets name":
                world.advance(61.0)
            case "user takes name":
                names.register(Fqdn(name))
            case "user drops name":
                names.unregister(Fqdn(name))
            case other:
                raise DoesNotApply(f"unknown step {other}")
        if "expect_known" in step:
            is_known = name in world.engine.dns_cache.scopes_by_name
            sheet.compare(f"step {number} {step['do']} known", is_known, step["expect_known"])
