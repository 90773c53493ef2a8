"""A row that is not in the kernel as the agent wrote it, in words: which, what it should be, what it is, what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.control.listings import Listings, port_text, scope_text
from agent.core.types import (
    IDENTITY_ANY,
    PROTOCOL_NAMES,
    EndpointValue,
    GroupValue,
    IpcacheKey,
    Key,
    OwnAddressKey,
    PolicyKey,
    PolicyValue,
    Table,
    Value,
    Verdict,
    text_of,
)
from agent.datapath import abi

Row = dict[str, Any]
NO_ROW = "no row"


@dataclass(frozen=True, slots=True)
class Difference:
    """raw: the key's octets in the map of this name. key: None where the core could not have written it. wanted: None for a row
    that is nobody's. found: the value's octets; of a trie what the longest match gives; None: nothing.
    """

    table: Table
    map_name: str
    raw: bytes
    key: Key | None
    wanted: Value | None
    found: bytes | None

    @property
    def found_value(self) -> Value | None:
        """None too where it is nothing the core could have written."""
        if self.found is None:
            return None
        try:
            return next(abi.unpack_rows(self.map_name, self.raw, self.found))[1]
        except (KeyError, ValueError):
            return None

    def told(self, listings: Listings) -> Row:
        found = self.found_value
        is_now = NO_ROW if self.found is None else value_text(found, listings)
        should_be = NO_ROW if self.wanted is None else value_text(self.wanted, listings)
        if (found is None and self.found is not None) or is_now == should_be:
            is_now = f"0x{self.found.hex() if self.found is not None else ''}"
        return {
            "table": str(self.table),
            "row": f"0x{self.raw.hex()}" if self.key is None else key_text(self.key),
            "should_be": should_be,
            "is": is_now,
            "so": _foreign_means(self, listings) if self.wanted is None else _lost_means(self.wanted, found, listings),
        }


def key_text(key: Key) -> str:
    match key:
        case PolicyKey():
            identity = "any identity" if key.identity == IDENTITY_ANY else f"identity {key.identity}"
            protocol = PROTOCOL_NAMES.get(key.protocol, str(key.protocol)) if key.protocol else "any protocol"
            port = f" port {port_text(key)}" if key.protocol else ""
            return f"set {key.set}, {identity}, {key.direction.name.lower()}, {protocol}{port}"
        case IpcacheKey():
            return f"{key.prefix}, scope {scope_text(key.scope)}"
        case OwnAddressKey():
            return f"endpoint {key.endpoint}, {text_of(key.address)}"
        case _:
            return str(key)


def value_text(value: Value | None, listings: Listings) -> str:
    match value:
        case PolicyValue():
            return f"{value.verdict.name.lower()}, by {listings.rule_text(value.cookie)}"
        case GroupValue():
            egress, ingress = ("closed" if c else "open" for c in (value.default_deny_egress, value.default_deny_ingress))
            return f"set {value.set}, egress {egress}, ingress {ingress}{', audited' if value.audit else ''}"
        case EndpointValue():
            options = f"{', dhcp' if value.dhcp else ''}{', silent' if value.silent else ''}"
            where = f"{scope_text(value.scope)}, {value.orientation.name.lower()}"
            return f"endpoint {value.endpoint}, group {value.group}, scope {where}{options}"
        case True:
            return "its own"
        case int():
            return f"identity {value} ({', '.join(listings.labels_of(value)) or 'which nobody has given'})"
        case _:
            return "nothing the agent would write"


def _lost_means(wanted: Value, found: Value | None, listings: Listings) -> str:
    """What comes of a row that is another than this, or is gone."""
    match wanted:
        case PolicyValue():
            verdict = found.verdict if isinstance(found, PolicyValue) else None
            if verdict is wanted.verdict:
                return "the verdict is the same; what is counted and told names another rule"
            if wanted.verdict is Verdict.DENY:
                return "what the rule denies passes, where another rule allows it" if verdict is None else "the denial is gone"
            if wanted.verdict is Verdict.REDIRECT:
                return "questions are not handed to the agent: " + (
                    "they pass it by" if verdict is Verdict.ALLOW else "they are dropped"
                )
            return "what the rule allows is dropped" if verdict is not Verdict.REDIRECT else "it is taken for DNS"
        case GroupValue():
            return _group_means(wanted, found)
        case EndpointValue():
            if not isinstance(found, EndpointValue):
                return "everything the interface sends or is sent is dropped"
            return f"the interface is judged as {value_text(found, listings)}"
        case True:
            return "what the endpoint sends from this address is dropped"
        case _:
            if not isinstance(found, int):
                return "it is judged as the row around it, or as the world: what its names allow is dropped"
            return f"it is judged as {', '.join(listings.labels_of(found)) or 'no address anybody knows'}"


def _group_means(wanted: GroupValue, found: Value | None) -> str:
    if not isinstance(found, GroupValue):
        return "everything of the group's endpoints is dropped"
    said = []
    if found.set != wanted.set:
        said.append(f"the group's endpoints are judged by set {found.set}")
    for direction in ("egress", "ingress"):
        is_closed = getattr(found, f"default_deny_{direction}")
        if is_closed != getattr(wanted, f"default_deny_{direction}"):
            said.append(f"{direction} that no rule names {'is dropped' if is_closed else 'passes'}")
    if found.audit != wanted.audit:
        said.append("everything passes" if found.audit else "what would only be reported is dropped")
    return "; ".join(said) or "the verdicts are the same"


def _foreign_means(difference: Difference, listings: Listings) -> str:
    """What comes of a row that nobody of ours wrote."""
    found = difference.found_value
    match difference.table:
        case Table.POLICY:
            if not isinstance(found, PolicyValue):
                return "what it stands for may be dropped or pass, whatever the policies say"
            passes = {Verdict.ALLOW: "passes", Verdict.DENY: "is dropped", Verdict.REDIRECT: "is taken for DNS"}
            return f"what it stands for {passes[found.verdict]}, and no policy says so"
        case Table.IPCACHE:
            labels = listings.labels_of(found) if isinstance(found, int) else []
            return f"it is judged as {', '.join(labels) or 'no address anybody knows'}, and nobody has brought it"
        case Table.GROUPS:
            return "endpoints whose row names this group would be judged by it"
        case Table.ENDPOINTS:
            return "an interface of this index with our programs on it would be judged as this endpoint"
        case _:
            return "the endpoint may send from an address that is not its own"
