"""The verbs that judge and change nothing."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli.environment import Sentence, with_examples


@click.command(
    short_help="Are these policies good?",
    epilog=with_examples("namegate check policies/*.yaml", "namegate check policies/ && sudo namegate apply"),
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.pass_context
def check(context: click.Context, files: tuple[Path, ...]) -> None:
    """Are these policies good? Needs neither root nor an agent. Exit code 1: no, and every mistake has its line.

    FILE is a policy, or a directory of them. What the policies imply without saying it is printed too: which names may be
    asked of DNS.
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
