"""Networks, ports and names as both forms of a policy write them: text to values of the core, or a sentence.

Each function raises ValueError with a sentence that has the remedy; what is taken but doubtful comes back as a second result, a
sentence or None.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import cache

from publicsuffixlist import PublicSuffixList

from agent.core.names import EVERY_NAME, NAME_CHARACTERS_MAX, ROOT, NamePattern, normalise_name, normalise_pattern
from agent.core.types import PROTOCOL_NAMES, PROTOCOLS_WITH_PORTS, Prefix

PORT_MAX = 65_535

_PREFIX = re.compile(r"([0-9a-fA-F:.]+)(?:/(0|[1-9][0-9]{0,2}))?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}")
# RFC 6335 5.1
_SERVICE = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")


def read_prefix(text: str, *, needs_length: bool = False) -> tuple[Prefix, str | None]:
    """CIDR or address; doubtful are bits behind the prefix's length."""
    parts = _PREFIX.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is no network; write an address and a length, such as 192.0.2.0/24 or 2001:db8::/32")
    if ":" in text and "." in text:
        raise ValueError(f"{text!r} mixes the two ways to write an address; write an IPv4 network as IPv4")
    try:
        prefix = Prefix.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no network ({error}); write one such as 192.0.2.0/24 or 2001:db8::/32") from error
    if parts[2] is None:
        if needs_length:
            raise ValueError(f"{text!r} has no length; write {prefix}")
        return prefix, None
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return prefix, f"{text} has bits behind its length; it is taken as {prefix}"
    return prefix, None


def read_port(text: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > PORT_MAX:
        raise ValueError(f"{text!r} is no port; write 1 to {PORT_MAX}, without leading zeros")
    return int(text)


def read_service(text: str) -> dict[int, int]:
    """Port by protocol of a service of /etc/services, in any case; a protocol that is not listed has the port of another."""
    name = text.lower()
    if not _SERVICE.fullmatch(name):
        raise ValueError(f"{text!r} is no port; write a number 0 to {PORT_MAX} in quotes, or the name of a service")
    found = {protocol: _service_port(name, PROTOCOL_NAMES[protocol]) for protocol in PROTOCOLS_WITH_PORTS}
    known = [port for port in found.values() if port is not None]
    if not known:
        raise ValueError(f"/etc/services has no service {name!r}; write the port's number in quotes")
    return {protocol: known[0] if port is None else port for protocol, port in found.items()}


def _service_port(name: str, protocol: str) -> int | None:
    try:
        return socket.getservbyname(name, protocol)
    except OSError:
        return None


def read_name(text: str) -> tuple[str, str | None]:
    """An exact name; doubtful is one too long to be asked."""
    name = _not_the_root(normalise_name(text))
    return name, _doubtful_length(name)


def read_pattern(text: str) -> tuple[str, str | None]:
    """A pattern; doubtful is one that strangers can register names for."""
    pattern = _not_the_root(normalise_pattern(text))
    return pattern, _doubtful_length(pattern) or doubtful_breadth(pattern)


def read_excepted(text: str) -> tuple[str, None]:
    """A pattern of names that are taken out: the more it takes, the less is open, so nothing about it is doubtful."""
    return normalise_pattern(text), None


def _not_the_root(name: str) -> str:
    if name == ROOT:
        raise ValueError("'.' is the root, which has no addresses; write a name such as api.example.com")
    return name


def _doubtful_length(name: str) -> str | None:
    if len(name.replace("*", "")) <= NAME_CHARACTERS_MAX + 1:
        return None
    return f"no name has more than {NAME_CHARACTERS_MAX} characters, so this one is never asked"


def doubtful_breadth(pattern: str) -> str | None:
    """A sentence about a pattern that takes names of owners who have nothing to do with each other."""
    if pattern == EVERY_NAME:
        return "this takes every name there is, also those of an attacker"
    if "*" not in pattern:
        return None
    suffix = NamePattern(pattern).suffix
    if not suffix:
        return f"{pattern} takes names under every top-level domain, also those of an attacker"
    if _public_suffixes().is_public(suffix.removesuffix(".")):
        return f"{pattern} takes names that anybody can register: {suffix} is a public suffix"
    return None


@cache
def _public_suffixes() -> PublicSuffixList:
    return PublicSuffixList()
