"""ipcache: prefixes, the labels attached to them, the identities that result, and waiting for them."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import Final

from agent.core.barrier import Barrier
from agent.core.events import RowsWritten
from agent.core.ipcache import Ipcache
from agent.core.metadata import Metadata
from agent.core.tables import RowReference
from agent.core.types import (
    IDENTITY_LOCAL_FIRST,
    LABEL_HOST,
    LABEL_WORLD,
    SCOPE_SHARED,
    SCOPE_STATIC,
    IpcacheKey,
    LabelSet,
    Prefix,
    Table,
    Write,
    packed,
)
from agent.datapath.model import Model
from tests.cases.runner import DoesNotApply, Fields, Sheet
from tests.cases.translation import labels_of
from tests.sim.world import World

FIELDS: Final = [
    "steps", "expect", "input", "config", "prefix", "parent", "child", "dual_stack", "existing", "known", "entries",
    "lookups", "owners",
]  # fmt: skip


def judge(case: Fields, sheet: Sheet) -> None:
    judges: dict[str, Callable[[Fields, Sheet], None]] = {
        "canonical": _judge_spelling,
        "label-of-ip": _judge_spelling,
        "contains": _judge_contains,
        "parent": _judge_parent,
        "labels-of-prefix": _judge_labels_of_prefix,
        "longest-prefix": _judge_longest_prefix,
        "source-order": _judge_source_order,
        "direct": _judge_direct,
        "restore": _judge_restore,
        "revision": _judge_revision,
        "failure": _judge_failure,
    }
    judges.get(case["group"], _judge_labels)(case, sheet)


# --- prefixes --------------------------------------------------------------------------------------------------------------


def _judge_spelling(case: Fields, sheet: Sheet) -> None:
    wanted = case["expect"].only("prefix", "error")
    try:
        ours = str(Prefix.parse(case["input"]))
    except ValueError:
        ours = "an error"
    sheet.compare("prefix", ours, "an error" if wanted.get("error") else str(Prefix.parse(wanted["prefix"])))


def _judge_contains(case: Fields, sheet: Sheet) -> None:
    ours = Prefix.parse(case["parent"]).contains(Prefix.parse(case["child"]))
    sheet.compare("contains", ours, case["expect"].only("contains")["contains"])


def _judge_parent(case: Fields, sheet: Sheet) -> None:
    """What a prefix would inherit if nobody named it."""
    metadata, prefix = Metadata(), Prefix.parse(case["prefix"])
    for text, kind in case["known"].items():
        if kind not in {"cidr", "world"}:
            raise DoesNotApply(f"unknown kind of a prefix {kind!r}")
        if kind == "cidr" and Prefix.parse(text) != prefix:
            metadata.upsert(IpcacheKey(SCOPE_STATIC, Prefix.parse(text)), "policy", frozenset({f"cidr:{Prefix.parse(text)}"}))
    inherited = [label.removeprefix("cidr:") for label in metadata.static_labels(prefix) if label.startswith("cidr:")]
    sheet.compare("parent", inherited[0] if inherited else None, case["expect"].only("parent")["parent"])


def _judge_labels_of_prefix(case: Fields, sheet: Sheet) -> None:
    metadata, prefix = Metadata(), Prefix.parse(case["prefix"])
    key = IpcacheKey(SCOPE_STATIC, prefix)
    metadata.upsert(key, "policy", frozenset({f"cidr:{prefix}"}))
    sheet.compare_members("label", metadata.label_set(key) or (), labels_of(case["expect"].only("labels")["labels"]))


def _judge_longest_prefix(case: Fields, sheet: Sheet) -> None:
    """The datapath's look-up, on the model of it. What no row says is world."""
    model, numbers = Model(), {"world4": 2, "world6": 2, None: 2}

    def compare(place: str, text: str, wanted: str | None) -> None:
        names = {number: name for name, number in numbers.items()} | {2: "world"}
        ours = names[model.identity_of(SCOPE_SHARED, packed(text))]
        sheet.compare(f"{place} {text}", ours, names[numbers[wanted]] if wanted in numbers else wanted)

    def key(text: str) -> IpcacheKey:
        return IpcacheKey(SCOPE_STATIC, Prefix.parse(text))

    for text, name in case.get("entries", {}).items():
        model.ipcache[key(text)] = numbers.setdefault(name, 100 + len(numbers))
    for probe in case.get("lookups", ()):
        compare("look-up", probe.only("ip", "identity")["ip"], probe["identity"])
    for number, step in enumerate(case.get("steps", ()), 1):
        match step["op"]:
            case "add":
                step.only("op", "prefix", "identity", "expect")
                model.ipcache[key(step["prefix"])] = numbers.setdefault(step["identity"], 100 + len(numbers))
            case "del":
                model.ipcache.pop(key(step.only("op", "prefix", "expect")["prefix"]), None)
            case other:
                raise DoesNotApply(f"unknown step {other}")
        for text, wanted in step.get("expect", Fields()).only("lookup").get("lookup", {}).items():
            compare(f"step {number} look-up", text, wanted)


# --- labels and identities ------------------------------------------------------------------------------------------------


def _attached(labels: LabelSet, prefix: Prefix) -> LabelSet:
    """What a resource of ours attaches: that an address is of the world follows, and a prefix with nothing else is itself."""
    return labels - {LABEL_WORLD} or labels or frozenset({f"cidr:{prefix}"})


def _judge_labels(case: Fields, sheet: Sheet) -> None:
    case.get("config", Fields()).only("dual_stack")
    world = World()
    world.start(endpoints={1: "198.51.100.254"})
    ipcache = world.engine.ipcache

    def row(text: str) -> IpcacheKey | None:
        keys = [IpcacheKey(scope, Prefix.parse(text)) for scope in (SCOPE_SHARED, SCOPE_STATIC)]
        return next((key for key in keys if ipcache.metadata.label_set(key) is not None), None)

    def identity(text: str) -> object:
        key = row(text)
        return world.engine.reconciler.ipcache.desired[key].value if key is not None else None

    for number, step in enumerate(case["steps"], 1):
        labels, prefix = labels_of(step.get("labels", [])), Prefix.parse(step["prefix"])
        is_learned = any(label.startswith("fqdn:") for label in labels) or step["resource"].startswith("dns")
        key = IpcacheKey(SCOPE_SHARED if is_learned else SCOPE_STATIC, prefix)
        match step["op"]:
            case "upsert":
                step.only("op", "prefix", "resource", "source", "labels", "expect")
                ipcache.upsert(key, step["resource"], _attached(labels, prefix))
            case "remove":
                step.only("op", "prefix", "resource", "expect")
                ipcache.remove(key, step["resource"])
            case other:
                raise DoesNotApply(f"unknown step {other}")
        if not is_learned:
            deque(ipcache.resolve_inside([prefix], beyond_bound=False), 0)
        wanted = step.get("expect", Fields()).only("prefixes", "same_identity", "different_identity")
        place = f"step {number}"
        for text, theirs in wanted.get("prefixes", {}).items():
            found = row(text)
            ours = (ipcache.metadata.label_set(found) if found is not None else None) or frozenset()
            wanted_labels = labels_of(theirs.only("labels", "scope")["labels"]) if theirs else ()
            sheet.compare_members(f"{place} {text} has", ours, wanted_labels)
            if theirs and "scope" in theirs:
                is_reserved = LABEL_HOST in ours or ours == {LABEL_WORLD}
                sheet.compare(f"{place} {text} scope", "reserved" if is_reserved else "local", theirs["scope"])
        for word, is_same in (("same_identity", True), ("different_identity", False)):
            for group in wanted.get(word, ()):
                numbers = {identity(text) for text in group}
                sheet.compare(f"{place} one identity: {' '.join(group)}", len(numbers) == 1, is_same)


def _judge_source_order(case: Fields, sheet: Sheet) -> None:
    """Owners of one prefix do not overwrite each other: their labels are merged, and each takes back its own."""
    wanted = case["expect"].only("may_be_overwritten_by", "order")
    key = IpcacheKey(SCOPE_STATIC, Prefix.parse("192.0.2.1/32"))
    if "order" in wanted:
        one, other = Metadata(), Metadata()
        owners = list(case["owners"])
        for metadata, order in ((one, owners), (other, owners[::-1])):
            for owner in order:
                metadata.upsert(key, owner, frozenset({f"endpoint:owner={owner}"}))
        is_free = one.label_set(key) == other.label_set(key)
        sheet.compare("order", "none: every order gives the same" if is_free else "an order", wanted["order"])
        return
    for source, theirs in wanted["may_be_overwritten_by"].items():
        metadata = Metadata()
        metadata.upsert(key, case["existing"], frozenset({"endpoint:by=existing"}))
        metadata.upsert(key, source, frozenset({"endpoint:by=new"}))
        labels = (metadata.label_set(key) or frozenset()) - {LABEL_WORLD}
        ours: object = len(labels) == 1
        sheet.compare(f"overwritten by {source}", "both stay" if len(labels) == 2 else ours, theirs)


def _judge_direct(case: Fields, sheet: Sheet) -> None:
    """Numbers follow from labels and nobody sets them: here a number is a label, a source is a resource."""
    metadata = Metadata()
    texts = {step["ip"] for step in case["steps"]}

    def numbers(text: str) -> list[int]:
        labels = metadata.label_set(IpcacheKey(SCOPE_STATIC, Prefix.parse(text))) or frozenset()
        return sorted(int(label.removeprefix("endpoint:number=")) for label in labels - {LABEL_WORLD})

    for number, step in enumerate(case["steps"], 1):
        place, key = f"step {number}", IpcacheKey(SCOPE_STATIC, Prefix.parse(step["ip"]))
        match step["op"]:
            case "set":
                step.only("op", "ip", "number", "source", "expect")
                metadata.upsert(key, step["source"], frozenset({f"endpoint:number={step['number']}"}))
            case "delete":
                metadata.remove(key, step.only("op", "ip", "source", "expect").get("source", "nobody"))
            case other:
                raise DoesNotApply(f"unknown step {other}")
        wanted = step.get("expect", Fields()).only("ok", "number_of", "addresses_of", "effective")
        if "ok" in wanted:
            sheet.compare(f"{place} taken", ours=True, theirs=wanted["ok"])
        for text, theirs in (wanted.get("number_of", Fields()) | wanted.get("effective", Fields())).items():
            sheet.compare_members(f"{place} {text} is", numbers(text), [] if theirs is None else [theirs])
        for text, addresses in wanted.get("addresses_of", {}).items():
            ours = {one for one in texts if int(text) in numbers(one)}
            sheet.compare_members(f"{place} {text} is of", ours, addresses)


def _judge_restore(case: Fields, sheet: Sheet) -> None:
    """A number of the journal is its label set's for ever: no other gets it; who comes later gets a new one."""
    world = World()
    ipcache, identities = world.engine.ipcache, world.engine.identities
    attached: dict[str, tuple[IpcacheKey, str, LabelSet]] = {}
    for number, step in enumerate(case["steps"], 1):
        match step["op"]:
            case "upsert":
                step.only("op", "prefix", "resource", "source", "labels", "requested_number", "expect")
                prefix = Prefix.parse(step["prefix"])
                labels = _attached(labels_of(step["labels"]), prefix)
                attached[step["prefix"]] = IpcacheKey(SCOPE_STATIC, prefix), step["resource"], labels
                requested = _number_of(step["requested_number"]) if "requested_number" in step else None
                if requested is not None and requested not in identities.labels_by_identity:
                    identities.restore(requested, labels | {LABEL_WORLD})
            case "withhold":
                for text in step.only("op", "numbers", "expect")["numbers"]:
                    sheet.compare(f"step {number} {text} is kept", _number_of(text) < identities.next_number, theirs=True)
            case "apply":
                for text in step.only("op", "prefixes", "expect")["prefixes"]:
                    ipcache.upsert(*attached[text])
            case other:
                raise DoesNotApply(f"unknown step {other}")
        for text, theirs in step.get("expect", Fields()).only("numbers").get("numbers", {}).items():
            row = world.engine.reconciler.ipcache.desired[IpcacheKey(SCOPE_STATIC, Prefix.parse(text))]
            assert isinstance(row.value, int)
            ours = f"L0+{row.value - IDENTITY_LOCAL_FIRST}".removesuffix("+0")
            sheet.compare(f"step {number} number of {text}", ours, theirs)


def _number_of(text: str) -> int:
    base, _, more = text.partition("+")
    if base != "L0":
        raise DoesNotApply(f"unknown number {text!r}")
    return IDENTITY_LOCAL_FIRST + int(more or 0)


# --- waiting ---------------------------------------------------------------------------------------------------------------


class _Queue:
    """Rows asked for, handed out, acknowledged; whoever asked waits for his own rows by a barrier."""

    def __init__(self) -> None:
        self.world = World(auto=False)
        self.asked = 0
        self.taken: list[Write] = []

    @property
    def ipcache(self) -> Ipcache:
        return self.world.engine.ipcache

    def queue(self, texts: list[str]) -> Barrier:
        references: list[RowReference] = []
        for text in texts:
            self.asked += 1  # a new value each time, so that there is something to write
            key = IpcacheKey(SCOPE_STATIC, Prefix.parse(text))
            references.append(self.ipcache.upsert(key, "queue", frozenset({f"endpoint:asked={self.asked}"})))
        return self.world.engine.reconciler.barriers.take(references)

    def take(self) -> None:
        self.taken += self.world.engine.reconciler.batch(self.world.now)

    def acknowledge(self, failing: set[Prefix] | None = None) -> None:
        writes, self.taken = self.taken, []
        results = []
        for write in writes:
            is_failing = isinstance(write.key, IpcacheKey) and write.key.prefix in (failing or ())
            results.append((write, errno.ENOSPC if is_failing else self.world.kernel.apply(write)))
        self.world.engine.handle(RowsWritten(tuple(results)), self.world.now)
        self.world.perform()
        while self.world.waiting_writes:  # what became possible by these writes belongs to what was taken
            batch = self.world.waiting_writes.popleft()
            self.taken += batch


def _judge_revision(case: Fields, sheet: Sheet) -> None:
    """There is no one revision of everything: who asked waits for his own rows, each at the value it was asked for with."""
    queue = _Queue()
    waiting: list[tuple[Barrier, set[Prefix], bool]] = []  # whose rows, and whether they were handed out since
    for number, step in enumerate(case["steps"], 1):
        place, wanted = f"step {number}", step.get("expect", Fields())
        wanted.only("wait_for", "taken_revision", "applied", "waiter_done", "error")
        match step["op"]:
            case "queue":
                texts = step.only("op", "prefixes", "expect")["prefixes"]
                waiting.append((queue.queue(texts), set(map(Prefix.parse, texts)), False))
            case "take":
                step.only("op", "expect")
                queue.take()
                waiting = [(barrier, own, True) for barrier, own, _ in waiting]
            case "mark_applied":
                step.only("op", "revision", "expect")
                queue.acknowledge()
            case "wait":
                step.only("op", "revision", "timeout_ms", "background", "expect")
            case other:
                raise DoesNotApply(f"unknown step {other}")
        open_ones = [(barrier, own) for barrier, own, _ in waiting if not barrier.is_over]
        is_own = all(
            isinstance(key, IpcacheKey) and key.prefix in own for barrier, own in open_ones for _, key in barrier.missing
        )
        rows = "own rows" if is_own else "more than its rows"
        for key in ("wait_for", "taken_revision", "applied"):
            if key in wanted:
                sheet.compare(f"{place} {key}", rows, wanted[key])
        if "waiter_done" in wanted:
            is_done = all(barrier.is_over for barrier, _, is_taken in waiting if is_taken)
            sheet.compare(f"{place} waiter done", is_done, wanted["waiter_done"])
        if "error" in wanted:
            sheet.compare(f"{place} wait ends in an error", bool(open_ones), wanted["error"])


def _judge_failure(case: Fields, sheet: Sheet) -> None:
    """What cannot be written stops itself alone; the rest of the batch goes on."""
    queue, failing = _Queue(), set[Prefix]()
    barriers: dict[Prefix, Barrier] = {}
    for number, step in enumerate(case["steps"], 1):
        match step["op"]:
            case "queue":
                for text in step.only("op", "prefixes", "expect")["prefixes"]:
                    barriers[Prefix.parse(text)] = queue.queue([text])
            case "allocation_fails_for":
                failing = {Prefix.parse(text) for text in step.only("op", "prefixes", "expect")["prefixes"]}
            case "apply":
                step.only("op", "expect")
                for _ in range(3):  # a batch, its retry after the back-off, and what that made possible
                    queue.take()
                    queue.acknowledge(failing)
                    queue.world.now += 2.0
            case other:
                raise DoesNotApply(f"unknown step {other}")
        wanted = step.get("expect", Fields()).only("error", "remaining")
        table = queue.world.engine.reconciler.tables[Table.IPCACHE]
        left = [prefix for prefix in barriers if IpcacheKey(SCOPE_STATIC, prefix) not in table.realized]
        if "error" in wanted:
            sheet.compare(f"step {number} error", bool(left), wanted["error"])
        if "remaining" in wanted:
            alone = "only what failed" if failing.issuperset(left) else len(left)
            sheet.compare(
                f"step {number} remaining", len(left) if len(left) == wanted["remaining"] else alone, wanted["remaining"]
            )
