"""`namegate verify`: is everything in the kernel as the agent wrote it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.show import encoded, output_option

# A million rows take a few seconds, and an agent that has much to do takes its time.
_PATIENCE_S = 300.0


@click.command(
    short_help="Is the kernel's memory what the agent wrote?",
    epilog=with_examples("sudo namegate verify", "sudo namegate verify --repair", "sudo namegate verify -o json"),
)
@click.option("--repair", is_flag=True, help="Make it as it should be.")
@output_option
@click.pass_context
def verify(context: click.Context, repair: bool, output: str) -> None:
    """Compare names, bags, label sets, identities and wanted rows with each other, and with every row in the kernel.

    The programs on the interfaces are looked at too. Each difference is told with what it lets pass or drops. Exit code 1:
    there was one, also when it was repaired. The agent does the same for the kernel's rows and programs by itself, all the
    time (datapath.verify-every).
    """
    session: Session = context.obj
    session.require_root("verify", "it asks the agent through a socket for root")
    answer = session.ask("verify", patience=_PATIENCE_S, repair=repair)
    if not isinstance(answer, dict):
        raise Sentence("the agent's answer to `verify` is not understood: is it of another release?")
    click.echo(_as_text(answer) if output == "table" else encoded(answer, output), nl=False)
    if answer["found"]:
        context.exit(1)


def _as_text(answer: Mapping[str, Any]) -> str:
    compared = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in answer["compared"].items())
    lines = [f"compared in {answer['took_s']} s: {compared}"]
    for row in answer["differences"]:
        lines += [
            f"{row['table']}: {row['row']}",
            f"  should be  {row['should_be']}",
            f"  is         {row['is']}",
            f"  so         {row['so']}",
        ]
        if answer["repair"]:
            lines.append(f"  now        {'as it should be' if row['mended'] else 'NOT repaired'}")
    left_out = answer["found"] - len(answer["differences"])
    if left_out:
        lines.append(f"… and {left_out:,} more")
    word = "difference" if answer["found"] == 1 else "differences"
    lines.append(f"{answer['found']:,} {word}" if answer["found"] else "no difference")
    return "\n".join(lines) + "\n"
