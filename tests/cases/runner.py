"""What a case is, what it can come to, and how the cases of a directory are counted.

A judge puts a case to the code and notes where the two differ. The outcome is one of four:

    passed           they agree everywhere
    decision         they differ, and each difference is covered by a class of decisions.toml: its predicate holds for the case,
                     and what we say there is what the class promises; or the case itself leaves the choice open
    does not apply   the case is about something that is not built, or has a form this runner does not know
    failed           anything else, an exception of ours too

A class speaks about what a case says, never about its number: the same classes hold for other editions of the files. It must
not become an excuse: at most 5 % of a file may stand on one class, cases that leave the choice open apart.
"""

from __future__ import annotations

import enum
import importlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

DIRECTORY: Final = Path(__file__).parent
FILES: Final = ("matchpattern", "dnscache", "namemanager", "ipcache", "selectorcache", "policy", "datapath", "dnsproxy", "wire")
CLASS_SHARE_MAX: Final = 0.05
FEATURES: Final = frozenset({"multi-label-wildcard", "star-dot-is-match-all", "length-limit", "named-ports", "sctp"})
PROFILES: Final = ("any", "fqdn-label identities", "fqdn-label identities, dual stack", "bag of cidr/32 labels")
_ENVELOPE: Final = frozenset((
    "id", "group", "kind", "source", "title", "note", "reason", "reasoning", "policy_choice", "peers_disagree",
    "versions", "requires", "profile",
))  # fmt: skip


class DoesNotApply(Exception):
    """The case is about something we do not have, or says something this runner does not know; the sentence says which."""


class Fields(dict[str, Any]):
    """An object of a case file. What is missing or unknown is said, and is no crash: files of other editions may differ."""

    def __missing__(self, key: str) -> Any:
        raise DoesNotApply(f"unknown form: no field {key!r}")

    def only(self, *keys: str) -> Fields:
        """Nothing but these fields; a judge that overlooked one would pass a case without having understood it."""
        for key in self:
            if key not in keys:
                raise DoesNotApply(f"unknown field {key!r}")
        return self

    def one_of(self, *keys: str) -> tuple[str, Any]:
        """Exactly one field, and it is one of these."""
        if len(self.only(*keys)) != 1:
            raise DoesNotApply(f"unknown form: not one of {', '.join(keys)}")
        return next(iter(self.items()))


class Difference(NamedTuple):
    """place: where in the case, in the judge's words."""

    place: str
    theirs: object
    ours: object

    def __str__(self) -> str:
        return f"{self.place}: the case says {text_of_value(self.theirs)}, we say {text_of_value(self.ours)}"


class Sheet:
    """Where a judge notes what differs."""

    def __init__(self) -> None:
        self.differences: list[Difference] = []

    def compare(self, place: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self.differences.append(Difference(place, theirs, ours))

    def compare_members(self, place: str, ours: Iterable[object], theirs: Iterable[object]) -> None:
        """Two collections as sets: one difference for each member that only one of them has."""
        have, want = set(ours), set(theirs)
        for member in sorted(have ^ want, key=str):
            self.differences.append(Difference(f"{place} {member}", member in want, member in have))


class Judge(Protocol):
    """A module of this package."""

    FIELDS: Collection[str]

    def judge(self, case: Fields, sheet: Sheet) -> None: ...


def text_of_value(value: object) -> str:
    """As predicates and promises of classes see a value: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def values_at(value: object, path: str) -> Iterator[object]:
    """Values of a case at a dotted path; a star is every element of a list."""
    here, _, rest = path.partition(".")
    if here == "*":
        found = list(value) if isinstance(value, list) else []
    else:
        found = [value[here]] if isinstance(value, dict) and here in value else []
    for one in found:
        yield from values_at(one, rest) if rest else [one]


@dataclass(frozen=True, slots=True)
class DecisionClass:
    """A decision of ours and the cases that it answers differently.

    when: path of a field -> regular expression found in its text (`values_at`); all must hold. ours: regular expression of a
    place -> regular expression of what we say there, both of the whole text.
    """

    name: str
    decision: str
    file: str
    when: dict[str, str]
    ours: dict[str, str]

    def speaks_of(self, file: str, case: Fields) -> bool:
        return file == self.file and all(
            any(re.search(pattern, text_of_value(value)) for value in values_at(case, path))
            for path, pattern in self.when.items()
        )

    def holds_for(self, difference: Difference) -> bool:
        said = text_of_value(difference.ours)
        places = [value for place, value in self.ours.items() if re.fullmatch(place, difference.place)]
        return any(re.fullmatch(value, said) for value in places)


def read_decisions(path: Path = DIRECTORY / "decisions.toml") -> list[DecisionClass]:
    return [DecisionClass(**each) for each in tomllib.loads(path.read_text())["class"]]


class Outcome(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    DOES_NOT_APPLY = "do not apply"
    DECISION = "stand on a decision"


class Verdict(NamedTuple):
    """why: the class, the reason, or the differences."""

    outcome: Outcome
    why: str = ""


LEFT_OPEN: Final = "the case leaves the choice open"


def judge_case(file: str, case: Fields, decisions: list[DecisionClass]) -> Verdict:
    """One case; never raises."""
    judge = cast(Judge, importlib.import_module(f"tests.cases.{file}"))
    sheet = Sheet()
    try:
        profile = case.get("profile", "any")
        if profile not in PROFILES:
            raise DoesNotApply(f"profile {profile!r} is not built")
        if case.get("requires", "length-limit") not in FEATURES and file != "policy":
            raise DoesNotApply(f"requires {case['requires']}, which is not built")
        case.only(*_ENVELOPE, *judge.FIELDS)
        judge.judge(case, sheet)
    except DoesNotApply as reason:
        return Verdict(Outcome.DOES_NOT_APPLY, str(reason))
    except Exception as error:  # noqa: BLE001  whatever the code under test raises is its verdict, and the other cases go on
        if case.get("policy_choice"):
            return Verdict(Outcome.DOES_NOT_APPLY, f"a choice we cannot judge: {type(error).__name__}: {error}")
        return Verdict(Outcome.FAILED, f"{type(error).__name__}: {error}")
    return verdict_of(file, case, sheet, decisions)


def verdict_of(file: str, case: Fields, sheet: Sheet, decisions: list[DecisionClass]) -> Verdict:
    if not sheet.differences:
        return Verdict(Outcome.PASSED)
    speaking = [one for one in decisions if one.speaks_of(file, case)]
    covering = [next((one for one in speaking if one.holds_for(each)), None) for each in sheet.differences]
    named = list(dict.fromkeys(f"{one.name} ({one.decision})" for one in covering if one is not None))
    if None not in covering:
        return Verdict(Outcome.DECISION, "; ".join(named))
    if case.get("policy_choice"):
        return Verdict(Outcome.DECISION, LEFT_OPEN)
    open_ones = [str(each) for each, one in zip(sheet.differences, covering, strict=True) if one is None]
    return Verdict(Outcome.FAILED, "; ".join(open_ones))


@dataclass(slots=True)
class Tally:
    """What came of one file."""

    file: str
    cases: int = 0
    verdicts: list[tuple[Fields, Verdict]] = field(default_factory=list)

    def count(self, outcome: Outcome) -> int:
        return sum(verdict.outcome is outcome for _, verdict in self.verdicts)

    def reasons(self, outcome: Outcome) -> Counter[str]:
        return Counter(verdict.why for _, verdict in self.verdicts if verdict.outcome is outcome)

    def classes_too_wide(self) -> list[str]:
        """Classes on which more of the file stands than may."""
        counted = Counter(
            name
            for case, verdict in self.verdicts
            if verdict.outcome is Outcome.DECISION and not case.get("policy_choice")
            for name in verdict.why.split("; ")
        )
        return [name for name, number in counted.items() if number > self.cases * CLASS_SHARE_MAX]

    def lines(self) -> Iterator[str]:
        counts = ", ".join(f"{self.count(outcome)} {outcome}" for outcome in Outcome)
        yield f"{self.file}: {self.cases} cases: {counts}"
        for case, verdict in self.verdicts:
            if verdict.outcome is Outcome.FAILED:
                yield f"  FAILED {case.get('id')} ({case.get('group')}) {case.get('title', '')}: {verdict.why}"
        for outcome in (Outcome.DOES_NOT_APPLY, Outcome.DECISION):
            for why, number in sorted(self.reasons(outcome).items()):
                yield f"  {number} {outcome}: {why}"
        for name in self.classes_too_wide():
            yield f"  note: more than {CLASS_SHARE_MAX:.0%} of this file stands on one class: {name}"


def read_cases(path: Path) -> list[Fields]:
    """The cases of one file; raises ValueError if it is none."""
    try:
        return list(json.loads(path.read_text(), object_hook=Fields)["cases"])
    except (ValueError, TypeError, DoesNotApply) as error:
        raise ValueError(f"{path} is no case file: {error}") from error


def run_file(path: Path, decisions: list[DecisionClass]) -> Tally:
    file, cases = path.stem, read_cases(path)
    tally = Tally(file, len(cases))
    reason = None if file in FILES else "no judge for a file of this name"
    for case in cases:
        if reason is not None:
            tally.verdicts.append((case, Verdict(Outcome.DOES_NOT_APPLY, reason)))
        else:
            tally.verdicts.append((case, judge_case(file, case, decisions)))
    return tally
