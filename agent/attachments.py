"""What is policed besides the configuration's `endpoints`: said by `namegate attach` or `run`, or found at a container engine.

Rule 1: an attachment is of one interface as the kernel knows it, by its index; it ends with the interface.
Rule 2: all of it is in a file beside the control socket, so that the next process polices the same from its first packet on.
The file has the life of the interfaces: it survives the process and not the machine. One that cannot be read refuses the
start: without it, what was attached would be let go.
Rule 3: policies of its own judge an attachment alone, and close it in both directions whatever they say; only the host may open
connections to it (a developer looks at what a sandboxed server shows).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.config import ConfigError, EndpointSettings, endpoint_of, said_of
from agent.control import ControlError
from agent.core.rules import Entity, LabelSelector, Origin, Policy, Rule
from agent.core.types import Direction
from agent.documents.remarks import Mistake, PolicyError
from agent.policy.files import read_policy_text
from agent.policy.values import read_prefix

COMMAND: Final = "command"
LEASE: Final = "lease"

_VERSION: Final = 1

log = logging.getLogger("namegate")


class PolicyText(NamedTuple):
    """name: what messages call it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """owner: COMMAND, LEASE, or who reported it. texts: None where everybody's policies judge it; policies: the same, read.
    hooked: the labels that the OCI hook gave it; None where it was not attached by that. allow_addresses: what the guard lets
    through for names of its own policies.
    """

    ifindex: int
    settings: EndpointSettings
    owner: str
    texts: tuple[PolicyText, ...] | None = None
    policies: tuple[Policy, ...] | None = None
    hooked: Mapping[str, str] | None = None
    allow_addresses: tuple[str, ...] = ()


class Followed(NamedTuple):
    """A container that was named by `attach --container`; engine: its socket, empty for the first that is there."""

    container: str
    engine: str
    settings: EndpointSettings


class Attachments:
    """by_ifindex: the same object for life; read by who looks for endpoints. sysctls: what was changed for leases, path to the
    value it had.
    """

    def __init__(self, path: Path, device: str) -> None:
        """device: the agent's own. Raises ControlError where the file cannot be read."""
        self._path = path
        self.by_ifindex: dict[int, Attachment] = {}
        self.followed: dict[str, Followed] = {}
        self.sysctls: dict[str, str] = {}
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(str(error)) from None
        try:
            self._take(said, device)
        except (ConfigError, PolicyError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unreadable(f"it is not as an agent of this release writes it: {error}") from None

    def put(self, attachment: Attachment) -> None:
        """Raises ControlError, and then nothing is different."""
        before = self.by_ifindex.get(attachment.ifindex)
        self.by_ifindex[attachment.ifindex] = attachment
        try:
            self.save()
        except ControlError:
            self._replace(attachment.ifindex, before)
            raise

    def remove(self, ifindexes: Iterable[int]) -> None:
        gone = [ifindex for ifindex in ifindexes if self.by_ifindex.pop(ifindex, None) is not None]
        if gone:
            self.save_or_say()

    def restore(self, ifindex: int, before: Attachment | None) -> None:
        """As it was before something could not be put in force."""
        self._replace(ifindex, before)
        self.save_or_say()

    def _replace(self, ifindex: int, by: Attachment | None) -> None:
        if by is None:
            self.by_ifindex.pop(ifindex, None)
        else:
            self.by_ifindex[ifindex] = by

    def report(self, owner: str, found: Mapping[int, EndpointSettings]) -> bool:
        """All that this owner has now; what somebody attached by command or lease stays his. Is anything different?

        What the hook attached is the engine's when it says so. It keeps the hook's labels: the engine's add to them (an image
        has labels, too).
        """
        before = {ifindex: each for ifindex, each in self.by_ifindex.items() if each.owner == owner}
        after = {}
        for ifindex, settings in found.items():
            present = self.by_ifindex.get(ifindex)
            hooked = present.hooked if present is not None else None
            if ifindex in before or present is None or hooked is not None:
                said = dataclasses.replace(settings, labels={**settings.labels, **(hooked or {})})
                after[ifindex] = Attachment(ifindex, said, owner, hooked=hooked)
        if before == after:
            return False
        for ifindex in before.keys() - after.keys():
            del self.by_ifindex[ifindex]
        self.by_ifindex.update(after)
        self.save_or_say()
        return True

    def save_or_say(self) -> None:
        """For what is so already, and nobody waits for."""
        try:
            self.save()
        except ControlError as error:
            log.error("%s: the next start goes by what was attached before", error)

    def save(self) -> None:
        """Raises ControlError where it cannot be written: what is not there would not be policed by the next process."""
        said = {
            "version": _VERSION,
            "attachments": [
                {
                    "ifindex": each.ifindex,
                    "owner": each.owner,
                    "texts": each.texts,
                    "allow_addresses": each.allow_addresses,
                    "endpoint": said_of(each.settings),
                    "hooked": None if each.hooked is None else dict(each.hooked),
                }
                for each in self.by_ifindex.values()
            ],
            "containers": [[each.container, each.engine, said_of(each.settings)] for each in self.followed.values()],
            "sysctls": self.sysctls,
        }
        new = self._path.with_name(self._path.name + ".new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as stream:
                stream.write(json.dumps(said))
            new.replace(self._path)
        except OSError as error:
            raise ControlError(f"{self._path} cannot be written: {error.strerror}") from None

    def _take(self, said: Mapping[str, Any], device: str) -> None:
        if said["version"] != _VERSION:
            raise ValueError(f"version {said['version']}")
        for each in said["attachments"]:
            texts = None if each["texts"] is None else tuple(PolicyText(*text) for text in each["texts"])
            allowed = tuple(map(str, each.get("allow_addresses", ())))
            policies = None if texts is None else own_policies(texts, allowed)
            attachment = Attachment(
                int(each["ifindex"]),
                endpoint_of(each["endpoint"], device),
                str(each["owner"]),
                texts,
                policies,
                each["hooked"],
                allowed,
            )
            self.by_ifindex[attachment.ifindex] = attachment
        for container, engine, endpoint in said["containers"]:
            self.followed[container] = Followed(container, engine, endpoint_of(endpoint, device))
        self.sysctls = {str(path): str(value) for path, value in said["sysctls"].items()}

    def _unreadable(self, why: str) -> ControlError:
        return ControlError(f"{self._path}, which says what was attached, cannot be read ({why}): remove it to start without")


def own_policies(texts: Iterable[PolicyText], allow_addresses: Iterable[str] = ()) -> tuple[Policy, ...]:
    """Raises PolicyError with the mistakes of all texts. Whom they select is of no account: they are for this one endpoint.

    allow_addresses: networks that the address guard lets through for all of their names.
    """
    origin = Origin("its own policies", 1)
    from_host = Rule(Direction.INGRESS, peers=(Entity.HOST,), ports=None, origin=origin)
    closed = Policy("closed", LabelSelector(), (from_host,), default_deny_egress=True, default_deny_ingress=True, origin=origin)
    policies, mistakes = [closed], list[Mistake]()
    for text in texts:
        reading = read_policy_text(text.name, text.text.encode(errors="surrogatepass"))
        mistakes += reading.mistakes
        policies += reading.policies
    prefixes = []
    for number, network in enumerate(allow_addresses, start=1):
        try:
            prefixes.append(read_prefix(network)[0])
        except ValueError as error:
            mistakes.append(Mistake("--allow-addresses", number, "", str(error)))
    if mistakes:
        raise PolicyError(mistakes)
    return tuple(dataclasses.replace(each, allow_addresses=(*each.allow_addresses, *prefixes)) for each in policies)
