"""The core's settings: defaults are those of the documentation, each is a key of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agent.core.types import PORT_DNS, Address, Prefix, text_of
from agent.dns.wire import Rcode


class Upstream(NamedTuple):
    """A resolver of the operator."""

    address: Address
    port: int = PORT_DNS

    def __str__(self) -> str:
        address = text_of(self.address)
        if self.port == PORT_DNS:
            return address
        return f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Settings:
    """upstreams: in the order in which they are tried; none: the server that was asked is asked itself.

    allow_addresses: what the address guard lets through for every name. *_s: seconds. denied_rcode: NXDOMAIN, or REFUSED.
    clamp_ttl: no TTL of an answer is over ttl_cap_s. names_per_minute: different ones that one endpoint may ask under one
    pattern, 0 for any number. The bounds are those of DESIGN: reaching one is counted and seen.
    """

    upstreams: tuple[Upstream, ...] = ()
    denied_rcode: Rcode = Rcode.NXDOMAIN
    gate_deadline_s: float = 1.0
    release_on_failure: bool = False
    allow_addresses: tuple[Prefix, ...] = ()
    follow_cnames: bool = False
    ttl_floor_s: float = 60.0
    ttl_cap_s: float = 86_400.0
    clamp_ttl: bool = False
    keep_while_flow_seen_s: float = 60.0
    keep_past_lifetime_s: float = 3_600.0
    start_patience_s: float = 5.0
    open_questions_max: int = 8_192
    open_questions_per_endpoint_max: int = 512
    held_replies_max: int = 4_096
    names_max: int = 1_000_000
    names_per_minute: int = 0
    history_max: int = 100_000
    addresses_per_name_max: int = 1_000
    identities_max: int = 16_384
    policy_rows_max: int = 262_144
    policy_rows_per_set_max: int = 16_384
