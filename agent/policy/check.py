"""`namegate check`: are these policies good? Needs neither root nor a kernel nor an agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from agent.core.policy import speaks_of_dns
from agent.core.rules import Endpoints, Policy
from agent.core.types import Direction
from agent.documents.remarks import Caution, Mistake
from agent.policy.files import read_files
from agent.policy.implied import Implied, implied_dns, unaskable
from agent.policy.room import lack_of_room


class CheckResult(NamedTuple):
    """policies: of the files without mistakes. implied: what they say about DNS without saying it."""

    policies: tuple[Policy, ...]
    mistakes: tuple[Mistake, ...]
    warnings: tuple[Caution, ...]
    implied: tuple[Implied, ...]


def check(paths: Iterable[str | PathLike[str]], endpoints: Iterable[Mapping[str, str]] | None = None) -> CheckResult:
    """Read and judge policy files. endpoints: labels of the endpoints there are, where the caller knows them."""
    reading = read_files(paths)
    known = None if endpoints is None else list(endpoints)
    warnings = (*reading.cautions, *_cautions(reading.policies, known))
    # With one file refused, what the others lack may stand in it.
    implied = () if reading.mistakes else implied_dns(reading.policies)
    return CheckResult(reading.policies, (*reading.mistakes, *lack_of_room(reading.policies)), warnings, implied)


def _cautions(policies: Sequence[Policy], endpoints: Sequence[Mapping[str, str]] | None) -> Iterator[Caution]:
    """What is doubtful about policies together."""
    counts = Counter((policy.namespace, policy.name) for policy in policies)
    for policy in policies:
        if counts.pop((policy.namespace, policy.name), 1) > 1:
            yield _caution(
                policy, "another policy has this name too; both are in force, and a verdict names either as the other"
            )
    for rule, pattern in unaskable(policies):
        message = f"{pattern} is open here, but no rule lets anybody ask for it, so its addresses are never learned"
        yield Caution(rule.origin.file, rule.origin.line, "", message)
    for policy in policies:
        yield from _cautions_about_endpoints(policy, endpoints)


def _cautions_about_endpoints(policy: Policy, endpoints: Sequence[Mapping[str, str]] | None) -> Iterator[Caution]:
    """DECISIONS 4 (a): a DNS rule whose `toEndpoints` select nobody here means the agent's upstreams; port 53 alone does not.

    The second is how policies for a cluster open its DNS service. Here it ends what names imply and opens nothing instead.
    """
    nobody = "where no endpoint here has these labels" if endpoints is None else "no endpoint here has these labels, so"
    for rule in policy.rules:
        selectors = [peer.selector for peer in rule.peers or () if isinstance(peer, Endpoints)]
        selectors = [s for s in selectors if endpoints is None or not any(s.matches(labels) for labels in endpoints)]
        if not selectors or rule.direction is not Direction.EGRESS:
            continue
        if rule.names is not None and not rule.deny:
            message = f"{nobody} the DNS rule means the agent's upstreams, whatever server is asked"
        elif speaks_of_dns(rule):
            message = f"{nobody} no name can be asked by this rule; give it rules: {{dns: […]}} to mean the agent's upstreams"
        elif endpoints is not None:
            message = "no endpoint here has these labels, so the rule selects nobody"
        else:
            continue
        yield Caution(rule.origin.file, rule.origin.line, "", message)


def _caution(policy: Policy, message: str) -> Caution:
    return Caution(policy.origin.file, policy.origin.line, "", f"policy {policy.name}: {message}")
