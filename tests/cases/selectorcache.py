"""The selector cache: who is selected, and who is told.

A selector by name selects here by its label. The cases of the bag design are put to the bag itself: which of the addresses that
have an identity it holds (their numbers stand for the addresses).
"""

from __future__ import annotations

import dns.message
import dns.rrset

from agent.core.metadata import Metadata
from agent.core.names import normalise_name
from agent.core.policy import LABEL_ENDPOINT
from agent.core.rules import Fqdn, Peer
from agent.core.selector_cache import SelectorCache
from agent.core.selectors import FqdnSelector
from agent.core.types import SCOPE_SHARED, SCOPE_STATIC, Address, IpcacheKey, LabelSet, Prefix, packed, text_of
from agent.dns.wire import read_question, read_reply
from tests.cases.runner import DoesNotApply, Fields, Sheet, text_of_value
from tests.cases.translation import fqdn_of, labels_of, peer_of

FIELDS = ("steps", "identity_scope", "labels", "records", "expect")
_BAG = "bag of cidr/32 labels"


def judge(case: Fields, sheet: Sheet) -> None:
    if "records" in case:
        _judge_aliases(case, sheet)
    elif "identity_scope" in case:
        _judge_closest_prefix(case, sheet)
    else:
        play = _BagPlay(sheet) if case.get("profile") == _BAG else _Play(sheet)
        for number, step in enumerate(case["steps"], 1):
            play.take(step, f"step {number}")


class _Play:
    """told: user -> numbers that came, numbers that went, in this step."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.cache = SelectorCache()
        self.users: dict[str, int] = {}
        self.labels: dict[int, LabelSet] = {}
        self.told: dict[str, tuple[set[int], set[int]]] = {}

    def take(self, step: Fields, place: str) -> None:
        self.told = {}
        wanted = step.get("expect", Fields()).only("selects", "notify", "new", "cached")
        is_new = False
        match step["op"]:
            case "identities":
                step.only("op", "add", "remove", "expect")
                for text, labels in step.get("add", {}).items():
                    self.add_identity(int(text), labels_of(labels))
                for number in step.get("remove", ()):
                    self.remove_identity(number)
            case "add":
                step.only("op", "user", "selector", "expect")
                is_new = self.add_user(step["selector"], step["user"])
            case "drop":
                step.only("op", "user", "selector", "expect")
                self.drop_user(step["selector"], step["user"])
            case "fqdn_ips":
                step.only("op", "selector", "ips", "expect")
                self.put_addresses(step["selector"], {packed(text) for text in step["ips"]})
            case other:
                raise DoesNotApply(f"unknown step {other}")
        for one in wanted.get("selects", ()):
            ours = self.selected(one.only("selector", "identities")["selector"])
            self.sheet.compare_members(f"{place} {text_of_value(one['selector'])} selects", ours, one["identities"])
        if "notify" in wanted:
            theirs = {
                f"{user} {word} {number}"
                for user, change in wanted["notify"].items()
                for word in change.only("added", "removed")
                for number in change[word]
            }
            came = {f"{user} added {number}" for user, (added, _) in self.told.items() for number in added}
            went = {f"{user} removed {number}" for user, (_, removed) in self.told.items() for number in removed}
            self.sheet.compare_members(f"{place} told", came | went, theirs)
        if "new" in wanted:
            self.sheet.compare(f"{place} new", is_new, wanted["new"])
        if "cached" in wanted:
            self.sheet.compare(f"{place} cached", len(self.cache.users_by_selector), wanted["cached"])

    def _tell(self, selectors: list[Peer], number: int, *, is_added: bool) -> None:
        for selector in selectors:
            for user, of in self.users.items():
                if of in self.cache.users_by_selector[selector]:
                    self.told.setdefault(user, (set(), set()))[0 if is_added else 1].add(number)

    def add_identity(self, number: int, labels: LabelSet) -> None:
        if number in self.labels:
            return  # I4: a number never stands for another label set
        self.labels[number] = labels
        is_endpoint = not any(label.startswith(("reserved:", "cidr:", "fqdn:")) for label in labels)
        self._tell(self.cache.add_identity(number, labels | {LABEL_ENDPOINT} if is_endpoint else labels), number, is_added=True)

    def remove_identity(self, number: int) -> None:
        if self.labels.pop(number, None) is not None:
            self._tell(self.cache.remove_identity(number), number, is_added=False)

    def add_user(self, selector: Fields, user: str) -> bool:
        peer = peer_of(selector)
        is_new = peer not in self.cache.users_by_selector
        self.cache.add_user(peer, self.users.setdefault(user, len(self.users) + 1))
        return is_new

    def drop_user(self, selector: Fields, user: str) -> None:
        """A set of ours lets go once; users of the cases may do it twice."""
        peer = peer_of(selector)
        if self.users.get(user) in self.cache.users_by_selector.get(peer, ()):
            self.cache.remove_user(peer, self.users[user])

    def put_addresses(self, selector: Fields, addresses: set[Address]) -> None:
        raise DoesNotApply("unknown step fqdn_ips outside the bag design")

    def selected(self, selector: Fields) -> set[int]:
        return self.cache.identities_by_selector.get(peer_of(selector), set())


class _BagPlay(_Play):
    """Only selectors by name; a number is the address of its /32 label."""

    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet)
        self.bags: dict[Fqdn, FqdnSelector] = {}
        self.users_of: dict[Fqdn, set[str]] = {}

    def bag_of(self, selector: Fields) -> FqdnSelector:
        peer = fqdn_of(selector.only("fqdn")["fqdn"])
        return self.bags.setdefault(peer, FqdnSelector(peer))

    def selected(self, selector: Fields) -> set[int]:
        held = {f"cidr:{Prefix.of(address)}" for address in self.bag_of(selector).bags.get(SCOPE_SHARED, ())}
        return {number for number, labels in self.labels.items() if labels & held}

    def _change(self, act: object) -> None:
        assert callable(act)
        before = {peer: self.selected(Fields(fqdn=peer.pattern)) for peer in self.bags}
        act()
        for peer, had in before.items():
            has = self.selected(Fields(fqdn=peer.pattern))
            for user in self.users_of.get(peer, ()):
                if has != had:
                    self.told[user] = (has - had, had - has)

    def add_identity(self, number: int, labels: LabelSet) -> None:
        self._change(lambda: self.labels.__setitem__(number, labels))

    def remove_identity(self, number: int) -> None:
        self._change(lambda: self.labels.pop(number, None))

    def add_user(self, selector: Fields, user: str) -> bool:
        users = self.users_of.setdefault(self.bag_of(selector).peer, set())
        is_new = not users
        users.add(user)
        return is_new

    def drop_user(self, selector: Fields, user: str) -> None:
        self.users_of.get(self.bag_of(selector).peer, set()).discard(user)

    def put_addresses(self, selector: Fields, addresses: set[Address]) -> None:
        bag = self.bag_of(selector)
        held = set(bag.bags.get(SCOPE_SHARED, ()))

        def put() -> None:
            bag.add_labels(SCOPE_SHARED, addresses - held, "a.example.")
            bag.remove_labels(SCOPE_SHARED, held - addresses, "a.example.")

        self._change(put)


def _judge_closest_prefix(case: Fields, sheet: Sheet) -> None:
    """The one `cidr:` label of an address that all these prefixes hold; the world itself has none."""
    prefixes = [Prefix.parse(text.removeprefix("cidr:")) for text in case["labels"]]
    metadata, closest = Metadata(), None
    match case["identity_scope"]:
        case "local" if prefixes:
            for prefix in prefixes:
                metadata.upsert(IpcacheKey(SCOPE_STATIC, prefix), "policy", frozenset({f"cidr:{prefix}"}))
            address = Prefix.of(max(prefixes, key=lambda prefix: prefix.length).address)
            labels = [label for label in metadata.static_labels(address) if label.startswith("cidr:")]
            closest = labels[0].removeprefix("cidr:") if labels else None
        case "local" | "world" | "reserved":
            pass
        case other:
            raise DoesNotApply(f"unknown identity scope {other!r}")
    wanted = case["expect"].only("prefix")["prefix"]
    sheet.compare("closest prefix", closest, wanted if wanted is None else str(Prefix.parse(wanted)))


def _judge_aliases(case: Fields, sheet: Sheet) -> None:
    """Names that no alias points to are asked, and the answer has all records: what is learned under which name?"""
    records = [record.only("name", "type", "value") for record in case["records"]]
    targets = {record["value"] for record in records if record["type"] == "CNAME"}
    ours: set[str] = set()
    for name in dict.fromkeys(record["name"] for record in records if record["name"] not in targets):
        query = dns.message.make_query(name, "A")
        response = dns.message.make_response(query)
        for record in records:
            response.answer.append(dns.rrset.from_text(record["name"], 60, "IN", record["type"], record["value"]))
        answer = read_reply(response.to_wire(), read_question(query.to_wire()))
        ours |= {f"{normalise_name(name)} {text_of(address)}" for address, _ in answer.addresses}
    wanted = case["expect"].only("addresses")["addresses"]
    theirs = {f"{normalise_name(name)} {text}" for name, texts in wanted.items() for text in texts}
    sheet.compare_members("learned", ours, theirs)
