"""Would the policies fit? What the core would refuse at load (DECISIONS 21), said before by what is sure from the files alone.

Every network and name of a rule is an identity at least, and in the set of an endpoint that the policy selects it has a row for
each block of ports. Both are less than what is needed in the end: the names' addresses add to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.core.policy import port_blocks
from agent.core.rules import Cidr, Fqdn, Peer, Policy
from agent.core.settings import Settings
from agent.core.types import Direction, Prefix
from agent.documents.remarks import Mistake


def lack_of_room(policies: Sequence[Policy], settings: Settings | None = None) -> Iterator[Mistake]:
    """One sentence for each policy with which a bound is passed. settings: those of the agent; the defaults if not known."""
    settings = settings or Settings()
    named: set[Fqdn | Prefix] = set()
    for policy in policies:
        fitted = len(named) <= settings.identities_max
        named.update(_named_by(policy))
        if fitted and len(named) > settings.identities_max:
            message = (
                f"the networks and names up to this policy are {len(named)}, each an identity, and there is room for "
                f"{settings.identities_max} (limits.identities); name wider networks, or raise the limit"
            )
            yield _mistake(policy, message)
        rows_count = _rows_of(policy)
        if rows_count > settings.policy_rows_per_set_max:
            message = (
                f"this policy needs {rows_count} rows, and one set holds {settings.policy_rows_per_set_max} "
                "(limits.policy-rows-per-set); name wider networks or ranges of ports, or raise the limit"
            )
            yield _mistake(policy, message)


def _named_by(policy: Policy) -> Iterator[Fqdn | Prefix]:
    for rule in policy.rules:
        for peer in rule.peers or ():
            if isinstance(peer, Fqdn):
                yield peer
            elif isinstance(peer, Cidr):
                yield from (peer.prefix, *peer.excepts)


def _rows_of(policy: Policy) -> int:
    """Rows that differ, whatever the order of the rules."""
    rows: set[tuple[Direction, Peer | None, int, int, int]] = set()
    for rule in policy.rules:
        blocks = [(0, 0, 0)] if rule.ports is None else []
        for ports in rule.ports or ():
            blocks += [(ports.protocol, port, bits) for port, bits in port_blocks(ports.first, ports.last)]
        rows.update((rule.direction, peer, *block) for peer in rule.peers or (None,) for block in blocks)
    return len(rows)


def _mistake(policy: Policy, message: str) -> Mistake:
    return Mistake(policy.origin.file, policy.origin.line, "", message)
