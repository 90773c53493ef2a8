"""The verbs that judge and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli.change import configuration
from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.show import encoded, output_option

if TYPE_CHECKING:
    from agent.core.rules import Policy


@click.command(
    short_help="Are these policies good?",
    epilog=with_examples(
        "namegate check policies/*.yaml",
        "namegate check policies/ && sudo namegate apply",
        "namegate check --against week.rec policies/",
    ),
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--against", "records", multiple=True, type=click.Path(path_type=Path), metavar="RECORD",
    help="Print what of a record would change. Several may be given.",
)  # fmt: skip
@click.pass_context
def check(context: click.Context, files: tuple[Path, ...], records: tuple[Path, ...]) -> None:
    """Are these policies good? Needs neither root nor an agent. Exit code 1: no, and every mistake has its line.

    FILE is a policy, or a directory of them. What the policies imply without saying it is printed too: which names may be
    asked of DNS. With --against, exit code 1 says as well that something that passed would be denied.
    """
    from agent.config import POLICY_SUFFIXES, policy_files
    from agent.policy.check import check as judged

    found = policy_files([str(file) for file in files])
    if not found:
        raise Sentence(f"no policy in {' '.join(map(str, files))}: a policy's name ends in {', '.join(POLICY_SUFFIXES)}")
    result = judged(found)
    for mistake in result.mistakes:
        click.echo(str(mistake))
    for warning in result.warnings:
        click.echo(f"warning: {warning}")
    for implied in result.implied:
        click.echo(f"implied: {implied}")
    if result.mistakes:
        context.exit(1)
    count = len(result.policies)
    click.echo(f"{count} {'policy' if count == 1 else 'policies'}, no mistake")
    if records and not _hold_against(records, result.policies):
        context.exit(1)


def _hold_against(records: Sequence[Path], policies: Sequence[Policy]) -> bool:
    """Would everything pass that did?"""
    from agent.suggest.record import RecordError
    from agent.suggest.replay import replay
    from agent.suggest.traffic import read_traffic

    try:
        replayed = replay(read_traffic(records), policies)
    except RecordError as error:
        raise Sentence(str(error)) from None
    for change in replayed.changes:
        click.echo(str(change))
    denied = len(replayed.breaks)
    click.echo(f"{denied} now denied, {len(replayed.changes) - denied} now allowed, {replayed.unchanged} as recorded")
    return not denied


@click.command(
    short_help="What of this host stands in the way?",
    epilog=with_examples("sudo namegate doctor", "sudo namegate doctor -c /etc/namegate.yaml -o json"),
)
@click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), metavar="FILE", help="The configuration; else its defaults."
)
@output_option
@click.pass_context
def doctor(context: click.Context, path: Path | None, output: str) -> None:
    """What of this host stands in the way of the agent, and what to do about it? Changes nothing; an agent may run.

    Each condition is good, worked around or bad. Exit code 1: one is bad.
    """
    session: Session = context.obj
    session.require_root("doctor", "it looks at firewall, BPF and network as the agent would")
    from agent.config import Config, ControlSettings

    config = Config(control=ControlSettings(session.control)) if path is None else configuration(path)
    conditions = session.environment.examine(config)
    if output == "table":
        margin = max(len(condition.name) for condition in conditions) + 2
        for condition in conditions:
            click.echo(f"{condition.state.value:15}{condition.name.ljust(margin)}{condition.found}")
            if condition.remedy:
                click.echo(f"{'':15}{'':{margin}}remedy: {condition.remedy}")
    else:
        click.echo(encoded([dataclasses.asdict(condition) for condition in conditions], output), nl=False)
    if any(condition.state.value == "bad" for condition in conditions):
        context.exit(1)
