"""The DNS cache, and the addresses that are kept past their lifetime.

What the cases call deferred is here an address whose lifetime is over and whose flows have not been looked at yet (passes.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

from agent.core.dns_cache import Pair
from agent.core.identity import NoRoom
from agent.core.names import EVERY_NAME, normalise_name
from agent.core.records import PairRecord
from agent.core.rules import Fqdn
from agent.core.types import SCOPE_SHARED, Address, Prefix, packed, text_of
from tests.cases.passes import WorldOfPasses, settings_of
from tests.cases.runner import DoesNotApply, Fields, Sheet

FIELDS: Final = ("config", "steps")


def judge(case: Fields, sheet: Sheet) -> None:
    play = _Play(case["config"], sheet)
    for number, step in enumerate(case["steps"], 1):
        play.take(Fields({"expect": Fields(), **step}), f"step {number} {step['op']}")


class _Play:
    def __init__(self, config: Fields, sheet: Sheet) -> None:
        config.only("min_ttl", "ips_per_name", "ips_per_name_deferred", "max_deferred", "grace")
        if config.get("grace"):
            raise DoesNotApply("a grace before collection is not built: an end is found when it comes")
        self.sheet = sheet
        settings = settings_of(ttl_floor_s=config.get("min_ttl", 0), addresses_max=config.get("ips_per_name", 0))
        self.world = WorldOfPasses(settings)
        self.world.start(endpoints={1: "198.51.100.254"})
        self.world.engine.names.register(Fqdn(EVERY_NAME))
        self.deferred: set[Pair] = set()
        self.dead: set[Pair] = set()
        self.answered_at: dict[Pair, float] = {}

    @property
    def pairs(self) -> set[Pair]:
        return set(self.world.engine.dns_cache.lifetimes)

    def end_of(self, pair: Pair) -> float:
        return self.world.engine.dns_cache.lifetimes[pair].lives_until - self.world.origin

    def forget(self, pairs: Iterable[Pair]) -> list[str]:
        """By somebody's command: what is forgotten so has not died of itself."""
        pairs = list(pairs)
        for pair in pairs:
            self.world.engine.names.forget(pair)
            self.deferred.discard(pair)
        return [pair.name for pair in pairs]

    def take(self, step: Fields, place: str) -> None:
        compare, members, wanted = self.sheet.compare, self.sheet.compare_members, step["expect"]
        match step["op"]:
            case "update":
                step.only("op", "t", "name", "ips", "ttl", "expect")
                is_changed, is_new = self.update(step)
                for key, theirs in wanted.only("changed", "new_ip").items():
                    compare(f"{place} {key}", is_changed if key == "changed" else is_new, theirs)
            case "lookup":
                step.only("op", "t", "name", "expect")
                name = normalise_name(step["name"])
                of_name = {pair for pair in self.pairs - self.deferred if pair.name == name}
                living = {text_of(pair.address) for pair in of_name if self.end_of(pair) >= step["t"]}
                members(place, living, wanted.only("ips")["ips"])
            case "reverse":
                step.only("op", "t", "ip", "expect")
                on = {pair for pair in self.pairs - self.deferred if pair.address == packed(step["ip"])}
                names = {pair.name for pair in on if self.end_of(pair) >= step["t"]}
                members(place, names, map(normalise_name, wanted.only("names")["names"]))
            case "gc":
                step.only("op", "t", "expect")
                self.world.go_to(step["t"])
                ended = {pair for pair in self.pairs - self.deferred if self.end_of(pair) < step["t"]}
                self.deferred |= ended
                members(f"{place} affected", {pair.name for pair in ended}, self._names(wanted, "affected"))
            case "force_expire":
                step.only("op", "lookups_before", "names", "expect")
                which = set(map(normalise_name, step["names"])) if "names" in step else None
                old = {p for p in self.pairs - self.deferred if self.answered_at[p] < step["lookups_before"]}
                gone = self.forget(pair for pair in old if which is None or pair.name in which)
                members(f"{place} affected", gone, self._names(wanted, "affected"))
            case "count":
                step.only("op", "expect")
                counted = self.pairs - self.deferred
                ours = {"names": len({pair.name for pair in counted}), "name_ip_pairs": len(counted)}
                for key, theirs in wanted.only(*ours).items():
                    compare(f"{place} {key}", ours[key], theirs)
            case "save_and_load" | "d_save_and_load":
                step.only("op", "expect")
                entries = sum(isinstance(record, PairRecord) for record in self.world.engine.records())
                self.world.start_again()
                self.world.engine.names.register(Fqdn(EVERY_NAME))
                if wanted.only("entries").get("entries", entries) != entries:
                    is_each = entries == len(self.pairs)
                    compare(f"{place} entries", "one for each address of a name" if is_each else entries, wanted["entries"])
            case _:
                self.take_of_deferred(step, place)

    def take_of_deferred(self, step: Fields, place: str) -> None:
        wanted = step["expect"]
        match step["op"]:
            case "d_add":
                step.only("op", "t", "ip", "names", "expect")
                existed = self.defer(packed(step["ip"]), step["names"], step["t"])
                if "existed" in wanted.only("existed"):
                    self.sheet.compare(f"{place} existed", existed, wanted["existed"])
            case "d_mark_alive":
                step.only("op", "t", "ip", "expect")
                self.world.mark(packed(step["ip"]), step["t"])
            case "d_conntrack_gc":
                step.only("op", "t", "expect")
                before = set(self.deferred)
                self.world.pass_over(step["t"])
                self.dead |= before - self.pairs
                self.deferred &= self.pairs
            case "d_gc":
                step.only("op", "expect")["expect"].only("alive", "dead")
                self._compare_kept(f"{place} alive", self.deferred, wanted["alive"])
                self._compare_kept(f"{place} dead", self.dead, wanted["dead"])
                self.dead.clear()
            case "d_list":
                step.only("op", "prefix", "expect")
                within = Prefix.parse(step["prefix"]) if "prefix" in step else None
                kept = {p for p in self.deferred if within is None or within.contains(Prefix.of(p.address))}
                self._compare_kept(f"{place} alive", kept, wanted.only("alive")["alive"])
            case "d_force_expire":
                step.only("op", "names", "ip", "pending_before", "expect")
                self.forget(
                    pair
                    for pair in set(self.deferred)
                    if ("names" not in step or pair.name in map(normalise_name, step["names"]))
                    and ("ip" not in step or pair.address == packed(step["ip"]))
                    and ("pending_before" not in step or self.end_of(pair) < step["pending_before"])
                )
            case other:
                raise DoesNotApply(f"unknown step {other}")

    def update(self, step: Fields) -> tuple[bool, bool]:
        name, now = normalise_name(step["name"]), self.world.at(step["t"])
        pairs = {Pair(SCOPE_SHARED, name, packed(text)) for text in step["ips"]}
        lifetimes = self.world.engine.dns_cache.lifetimes
        before = {pair: lifetimes[pair].lives_until for pair in pairs & self.pairs - self.deferred}
        records = [(packed(text), step["ttl"]) for text in step["ips"]]
        names, addresses = self.world.engine.names, [address for address, _ in records]
        with contextlib.suppress(NoRoom):  # the reply is SERVFAIL and teaches nothing
            while unknown := names.make_room(name, addresses, SCOPE_SHARED, now):
                for address in unknown:
                    mark = self.world.marks.get(address)
                    names.look(name, SCOPE_SHARED, address, None if mark is None else self.world.at(mark), now)
            names.learn(name, records, SCOPE_SHARED, now)
        self.deferred -= pairs
        for pair in pairs:
            self.answered_at[pair] = max(step["t"], self.answered_at.get(pair, step["t"]))
        after = {pair: lifetimes[pair].lives_until for pair in pairs & self.pairs}
        return after != before, bool(pairs - before.keys())

    def defer(self, address: Address, names: list[str], t: float) -> bool:
        """The lifetimes of these names on the address end at t."""
        existed = any(pair.address == address for pair in self.deferred)
        self.world.passes_before[address] = self.world.passes_over
        manager = self.world.engine.names
        for name in map(normalise_name, names):
            manager.learn(name, [(address, 0)], SCOPE_SHARED, self.world.at(t) - manager.cache.ttl_floor_s)
            self.deferred.add(Pair(SCOPE_SHARED, name, address))
        return existed

    def _names(self, wanted: Fields, key: str) -> list[str]:
        return [normalise_name(name) for name in wanted.only(key).get(key, [])]

    def _compare_kept(self, place: str, ours: set[Pair], theirs: Fields) -> None:
        self.sheet.compare_members(
            place,
            {f"{text_of(pair.address)} {pair.name}" for pair in ours},
            {f"{text} {normalise_name(name)}" for text, names in theirs.items() for name in names},
        )
