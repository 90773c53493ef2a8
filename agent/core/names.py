"""Names and name patterns: the one spelling of each, and which pattern matches which name.

Rule 1: a name is text in lower case with a final dot; octets other than printable ones are RFC 1035 5.1 escapes, and so is a
dot inside a label. The root is ".".
Rule 2: a pattern is a name in which `*` stands for any run of [-a-z0-9_], also an empty one, inside one label; "**." in front
is one or more whole labels; `EVERY_NAME` alone is every name. One meaning has one spelling: runs of stars that mean the same
are one star. A pattern without a star is one exact name.
Rule 3: no pattern becomes a regular expression that could try twice. Between two stars a pattern has a literal, and taking the
leftmost place for each literal in turn is enough: a match that takes a later place can always be changed into one that takes
the first. So a name is read once, whatever the pattern.

Two contexts differ in `EVERY_NAME` alone. `matches` is for selectors: every name of labels of the usual octets, and the root.
`matches_question` is for DNS rules: every name that can be asked. So a question can be allowed whose answer no selector takes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import idna

EVERY_NAME = "*"
ROOT = "."

# What Cilium takes, so that its policies are taken. A name of more than NAME_CHARACTERS_MAX characters (255 octets on the wire,
# RFC 1035 2.3.4) is never asked; whoever reads a policy may want to say so.
PATTERN_CHARACTERS_MAX = 255
NAME_CHARACTERS_MAX = 253
LABEL_OCTETS_MAX = 63
NAME_OCTETS_MAX = 255

# Possessive: a character is never given back, so both are linear by construction.
_ANY_OCTETS, _ANY_LABEL = "[-a-z0-9_]*", "[-a-z0-9_]+"
_USUAL_LABELS = re.compile(r"(?:[-a-z0-9_]++\.)++")
_PATTERN_LABEL = re.compile(r"[-a-z0-9_*]++")
_SURELY_NO_ADDRESS = re.compile(r"[-A-Za-z0-9_.*]{0,253}[-A-Za-z_*]\.?")
_FOUR_NUMBERS = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
_STARS = re.compile(r"\*++")

# Presentation form of each octet as dnspython writes it (RFC 1035 5.1, RFC 4343 2.1), for str.translate over Latin-1.
_ESCAPES = {
    octet: "\\" + chr(octet) if octet in b'"().;\\@$' else f"\\{octet:03}"
    for octet in range(256)
    if octet in b'"().;\\@$' or not 0x20 < octet < 0x7F
}


class NameSyntaxError(ValueError):
    """The text is no name, or no pattern; the message is a sentence with the remedy."""


# --- spelling --------------------------------------------------------------------------------------------------------


def normalise_name(text: str) -> str:
    """What a person wrote for one name, as Rule 1 spells it; raises `NameSyntaxError`. Escapes are not taken."""
    if text == ROOT:
        return ROOT
    if "*" in text:
        raise NameSyntaxError(f"{text!r} has a star, which only a pattern may have; use matchPattern, or write one exact name")
    return _normalise(text)


def normalise_pattern(text: str) -> str:
    """What a person wrote for a pattern, as Rule 2 spells it; raises `NameSyntaxError`."""
    if text == ROOT:
        return ROOT
    pattern = _normalise(text)
    if _STARS.fullmatch(pattern.removesuffix(".")):
        return EVERY_NAME
    head, dot, rest = pattern.partition(".")
    head = "**" if _is_deep(head) else _STARS.sub("*", head)
    return head + dot + _STARS.sub("*", rest)


def _is_deep(label: str) -> bool:
    return len(label) > 1 and not label.strip("*")


def _normalise(text: str) -> str:
    if not text:
        raise NameSyntaxError("the name is empty; write a name such as api.example.com")
    if not _SURELY_NO_ADDRESS.fullmatch(text):
        _refuse_what_is_no_name(text)
    ascii_text = text.lower().removesuffix(".")
    if not text.isascii():
        ascii_text = _to_a_labels(text).removesuffix(".")
        _refuse_what_is_no_name(ascii_text)  # digits of other alphabets make addresses too
    if len(ascii_text) > PATTERN_CHARACTERS_MAX:
        raise NameSyntaxError(f"the name has {len(ascii_text)} characters; DNS allows {NAME_CHARACTERS_MAX}")
    for label in ascii_text.split("."):
        if not label:
            raise NameSyntaxError(f"{text!r} has an empty label; write one dot between two labels and none in front")
        if not _PATTERN_LABEL.fullmatch(label):
            raise NameSyntaxError(f"{text!r} has a character other than letters, digits, '-', '_', '.' and '*'; take it out")
        if len(label.replace("*", "")) > LABEL_OCTETS_MAX:
            raise NameSyntaxError(f"the label {label!r} has more than {LABEL_OCTETS_MAX} characters, which DNS does not allow")
    return ascii_text + "."


def _refuse_what_is_no_name(text: str) -> None:
    """The usual mistakes, each with its own remedy, before the general "has a character other than"."""
    if len(text) > 4 * PATTERN_CHARACTERS_MAX:
        raise NameSyntaxError(f"the name has {len(text)} characters; DNS allows {NAME_CHARACTERS_MAX}")
    if any(character.isspace() or not (character.isprintable() or character in "\u200c\u200d") for character in text):
        raise NameSyntaxError(f"{text!r} has white space or an invisible character in it; take it out")
    bare = text.strip("[]").removesuffix(".")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        pass
    else:
        plain = str(address).partition("%")[0]
        raise NameSyntaxError(f"{text!r} is an address, not a name; write cidr:{plain}/{address.max_prefixlen} (toCIDR)")
    if _FOUR_NUMBERS.fullmatch(bare):
        raise NameSyntaxError(f"{text!r} looks like an address and is none: each of the four numbers is at most 255")
    if "://" in text:
        raise NameSyntaxError(f"{text!r} is a URL; write the name in it alone")
    if "/" in text:
        raise NameSyntaxError(f"{text!r} has a '/'; a network is written as toCIDR or cidr:, a path has no place here")
    if ":" in text:
        raise NameSyntaxError(f"{text!r} has a ':'; a port is written in toPorts, or behind the name in the shorthand")


def _to_a_labels(text: str) -> str:
    """Unicode text to A-labels: UTS 46 mapping, then IDNA 2008 for each label that needs it (RFC 5891)."""
    try:
        for character in text:
            if not character.isascii() and not idna.uts46_remap(character, std3_rules=False):
                raise NameSyntaxError(f"{text!r} has the invisible character U+{ord(character):04X} in it; take it out")
        mapped = idna.uts46_remap(text, std3_rules=False)
        labels = [label if label.isascii() else _to_a_label(label) for label in mapped.split(".")]
    except UnicodeError as error:  # idna's own errors are of this kind
        raise NameSyntaxError(f"{text!r} is no internationalised name ({error}); write its xn-- form") from error
    if mapped.count("*") != text.count("*"):
        raise NameSyntaxError(f"{text!r} has a star of another alphabet; write '*'")
    return ".".join(labels)


def _to_a_label(label: str) -> str:
    if "*" in label:
        # The letters of an A-label depend on all of the label, so its part before or behind a star has no meaning.
        raise NameSyntaxError(f"the label {label!r} mixes a star with letters outside ASCII; make the star a label of its own")
    return idna.alabel(label).decode("ascii")


def from_wire(wire: bytes) -> str:
    """A name's wire form (lower case, not compressed) as text; raises ValueError if it is none (RFC 1035 3.1)."""
    if not 0 < len(wire) <= NAME_OCTETS_MAX or wire[-1]:
        raise ValueError(f"no name in wire form: {wire!r}")
    labels = []
    at, end = 0, len(wire) - 1
    while at < end:
        stop = at + 1 + wire[at]
        if not at + 1 < stop <= end or stop > at + 1 + LABEL_OCTETS_MAX:
            raise ValueError(f"no name in wire form: {wire!r}")
        labels.append(wire[at + 1 : stop].decode("latin-1").translate(_ESCAPES))
        at = stop
    return ".".join(labels) + "."


# --- one pattern -----------------------------------------------------------------------------------------------------


class NamePattern:
    """A normalised pattern, ready to be compared.

    suffix: the literal labels at its end, "" where its last label has a star. first_wild: the literal text before and behind
    the stars of the label left of the suffix. Both are what an index can look up.
    """

    __slots__ = ("_is_deep", "_is_every", "_is_exact", "_usual", "_wild", "first_wild", "suffix", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._is_every = text == EVERY_NAME
        self._is_exact = "*" not in text
        self._is_deep = text.startswith("**.")
        labels = text.removeprefix("**.").removesuffix(".").split(".")
        wild_count = max((place + 1 for place, label in enumerate(labels) if "*" in label), default=0)
        # From right to left, like the comparison.
        self._wild = tuple(label.split("*") for label in reversed(labels[:wild_count]))
        self.suffix = "".join(label + "." for label in labels[wild_count:])
        self.first_wild = (self._wild[0][0], self._wild[0][-1]) if self._wild else ("", "")
        self._usual = None if self._is_exact or self._is_every else self._as_expression()

    def _as_expression(self) -> re.Pattern[str] | None:
        """The same in one call, where it is as linear: a star in a label of a known place, whose end the dot behind it says."""
        if self._is_deep or any(len(pieces) > 2 for pieces in self._wild):
            return None
        labels = [_ANY_OCTETS.join(map(re.escape, pieces)) if any(pieces) else _ANY_LABEL for pieces in reversed(self._wild)]
        return re.compile("".join(label + r"\." for label in labels) + re.escape(self.suffix))

    def matches(self, name: str) -> bool:
        """Does a selector with this pattern select the name? Linear in the name."""
        if self._is_exact:
            return name == self.text
        if self._is_every:
            return name == ROOT or _USUAL_LABELS.fullmatch(name) is not None
        if self._usual is not None:
            return self._usual.fullmatch(name) is not None
        if not name.endswith(self.suffix):
            return False
        # The suffix itself begins a label, so what is left ends with a dot.
        stem = name[: len(name) - len(self.suffix)]
        if not _USUAL_LABELS.fullmatch(stem):
            return False
        labels = stem[:-1].split(".")
        if len(labels) <= len(self._wild) if self._is_deep else len(labels) != len(self._wild):
            return False
        return all(_label_matches(label, pieces) for label, pieces in zip(reversed(labels), self._wild, strict=False))

    def matches_question(self, name: str) -> bool:
        """Does a DNS rule with this pattern allow the question for the name?"""
        return self._is_every or self.matches(name)

    def can_match_below(self, name: str) -> bool:
        """Is there a name below this one that `matches`? Judged label by label from the right."""
        if self._is_every:
            return name == ROOT or _USUAL_LABELS.fullmatch(name) is not None
        if name == ROOT:
            return self.text != ROOT
        if not _USUAL_LABELS.fullmatch(name):
            return False
        labels = name[:-1].split(".")[::-1]
        wanted = [[label] for label in reversed(self.suffix[:-1].split("."))] if self.suffix else []
        wanted += self._wild
        if len(labels) >= len(wanted) and not self._is_deep:
            return False
        return all(_label_matches(label, pieces) for label, pieces in zip(labels, wanted, strict=False))


def _label_matches(label: str, pieces: list[str]) -> bool:
    """pieces: the literals between the stars; without a star there is one. The caller saw that the label has usual octets."""
    head, tail = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return label == head
    if len(label) < len(head) + len(tail) or not label.startswith(head) or not label.endswith(tail):
        return False
    at, end = len(head), len(label) - len(tail)
    for piece in pieces[1:-1]:
        found = label.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def matches_everything(pattern: str) -> bool:
    return pattern == EVERY_NAME


def is_ancestor_of_match(name: str, pattern: str) -> bool:
    """Can a name below `name` match the pattern? Then a resolver must not hear that nothing is below (decision 5, RFC 8020)."""
    return NamePattern(pattern).can_match_below(name)


# --- many patterns ---------------------------------------------------------------------------------------------------

T = TypeVar("T", bound=Hashable)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class PatternIndex(Generic[T]):
    """Values by pattern; finds those whose pattern matches a name without looking at the others.

    An exact name is a dictionary's key. A pattern with a star is kept under its literal suffix and the literal head and tail of
    the label before it. A name has at most 127 suffixes, and under each the lengths of heads and tails in use say which keys to
    look up; what is found there is compared in full. So the cost grows with the patterns that agree with the name in all of
    that, and in nothing else. (Patterns that differ only between two stars of one label share a key; nobody has thousands.)
    """

    def __init__(self) -> None:
        self._every: dict[T, None] = {}
        self._exact: dict[str, dict[T, None]] = {}
        self._wild: dict[tuple[str, str, str], dict[str, tuple[NamePattern, dict[T, None]]]] = {}
        self._lengths_by_suffix: dict[str, dict[tuple[int, int], int]] = {}  # -> (of head, of tail) -> how many patterns
        self._ancestors: dict[str, int] = {}  # names with something literal below them -> how many patterns

    def add(self, pattern: str, value: T) -> None:
        """Adding what is there changes nothing."""
        if pattern == EVERY_NAME:
            self._every[value] = None
        elif "*" not in pattern:
            if pattern not in self._exact:
                self._exact[pattern] = {}
                self._count_ancestors(pattern, 1)
            self._exact[pattern][value] = None
        else:
            compiled = NamePattern(pattern)
            bucket = self._wild.setdefault((compiled.suffix, *compiled.first_wild), {})
            if pattern not in bucket:
                bucket[pattern] = compiled, {}
                self._count_lengths(compiled, 1)
                self._count_ancestors("*." + compiled.suffix, 1)
            bucket[pattern][1][value] = None

    def remove(self, pattern: str, value: T) -> None:
        """Raises KeyError if the pair was not added."""
        if pattern == EVERY_NAME:
            del self._every[value]
        elif "*" not in pattern:
            values = self._exact[pattern]
            del values[value]
            if not values:
                del self._exact[pattern]
                self._count_ancestors(pattern, -1)
        else:
            compiled = NamePattern(pattern)
            key = (compiled.suffix, *compiled.first_wild)
            bucket = self._wild[key]
            values = bucket[pattern][1]
            del values[value]
            if not values:
                del bucket[pattern]
                self._count_lengths(compiled, -1)
                self._count_ancestors("*." + compiled.suffix, -1)
            if not bucket:
                del self._wild[key]

    def matching(self, name: str) -> list[T]:
        """The values whose pattern selects the name, each once; the order depends on the additions and removals alone."""
        found = dict.fromkeys(self._exact.get(name, ()))
        if self._wild:
            for pattern, values in self._candidates(name):
                if pattern.matches(name):
                    found.update(values)
        if self._every and (name == ROOT or _USUAL_LABELS.fullmatch(name)):
            found.update(self._every)
        return list(found)

    def matching_question(self, name: str) -> list[T]:
        """The same for patterns of DNS rules."""
        return list(dict.fromkeys((*self.matching(name), *self._every)))

    def writes_out(self, name: str) -> bool:
        """Is the name one of the patterns?"""
        return name in self._exact

    def pattern_of(self, value: T, name: str) -> str:
        """Of this value's patterns with a star, of which one selects the name, the longest that does."""
        found = [pattern.text for pattern, values in self._candidates(name) if value in values and pattern.matches(name)]
        return max(found, key=lambda text: (len(text), text), default=EVERY_NAME)

    def is_ancestor(self, name: str) -> bool:
        """Can some name below this one match one of the patterns? (`is_ancestor_of_match` for all of them.)"""
        if name in self._ancestors:
            return True
        if self._every and (name == ROOT or _USUAL_LABELS.fullmatch(name)):
            return True
        return any(pattern.can_match_below(name) for pattern, _ in self._candidates(name))

    def _candidates(self, name: str) -> Iterator[tuple[NamePattern, dict[T, None]]]:
        start = 0
        while (dot := name.find(".", start)) >= 0:
            suffix = name[dot + 1 :]
            lengths = self._lengths_by_suffix.get(suffix)
            if lengths is not None:
                label = name[start:dot]
                for head, tail in lengths:
                    if len(label) >= head + tail:
                        yield from self._wild.get((suffix, label[:head], label[len(label) - tail :]), _NOTHING).values()
            start = dot + 1

    def _count_lengths(self, pattern: NamePattern, by: int) -> None:
        head, tail = pattern.first_wild
        counts = self._lengths_by_suffix.setdefault(pattern.suffix, {})
        _count(counts, (len(head), len(tail)), by)
        if not counts:
            del self._lengths_by_suffix[pattern.suffix]

    def _count_ancestors(self, name: str, by: int) -> None:
        """Of a name without escapes; the root has none."""
        while name != ROOT:
            name = name[name.index(".") + 1 :] or ROOT
            _count(self._ancestors, name, by)


K = TypeVar("K", bound=Hashable)


def _count(counts: dict[K, int], key: K, by: int) -> None:
    count = counts.get(key, 0) + by
    if count:
        counts[key] = count
    else:
        del counts[key]
