"""`monitor`: the agent's facts as they come."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.monitor.facts import KINDS, VERDICTS, KnownEndpoints

# After a flood somebody wants to know how much was not shown.
_LOOK_AGAIN_S: Final = 1.0

endpoint_option = click.option("--endpoint", metavar="WHICH", help="A number, an interface, or a label KEY=VALUE.")


@click.command(
    short_help="Show live what is asked, allowed and denied.",
    epilog=with_examples(
        "sudo namegate monitor",
        "sudo namegate monitor --endpoint app=build --verdict denied",
        "sudo namegate monitor --name '*.example.com' -o json",
        "sudo namegate monitor -o hubble > flows.jsonl",
    ),
)
@endpoint_option
@click.option("--verdict", "verdicts", multiple=True, type=click.Choice(VERDICTS), help="May be given several times.")
@click.option("--name", "pattern", metavar="PATTERN", help="A name or pattern as in a policy.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port that was judged; 53 are questions.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="May be given several times.")
@click.option(
    "-o", "--output", type=click.Choice(("text", "json", "hubble")), default="text", show_default=True,
    help="json: the facts as they are; hubble: lines of Hubble's exporter. One line each.",
)  # fmt: skip
@click.pass_obj
def monitor(
    session: Session,
    endpoint: str | None,
    verdicts: tuple[str, ...],
    pattern: str | None,
    port: int | None,
    kinds: tuple[str, ...],
    output: str,
) -> None:
    """Show live what is asked, allowed and denied, one line an event, until Ctrl-C.

    `verdict` is a flow that is allowed, `drop` a packet that is denied. What comes faster than it can be shown is counted.
    """
    session.require_root("monitor", "it asks the agent through a socket for root")
    from agent.core.names import NamePattern, NameSyntaxError, normalise_pattern
    from agent.monitor.filters import Filter

    try:
        name = None if pattern is None else NamePattern(normalise_pattern(pattern))
    except NameSyntaxError as error:
        raise Sentence(f"--name: {error}") from None
    chosen = Filter(endpoint, frozenset(verdicts), name, port, frozenset(kinds))
    wanted = chosen.kinds_wanted()
    if not wanted:
        raise Sentence("nothing can be shown: no kind of event has all that was asked for")
    endpoints = KnownEndpoints(lambda: asked_endpoints(session))
    lines_of = _writer(output, endpoints)
    with session.listen(wanted, chosen.endpoint_number()) as feed:
        while True:
            facts = [line["fact"] for line in feed.read(_LOOK_AGAIN_S) if "fact" in line]
            lines = list(lines_of([fact for fact in facts if chosen.takes(fact, endpoints)]))
            if lines:
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()


def asked_endpoints(session: Session) -> list[dict[str, Any]]:
    rows = session.ask("endpoints")
    if not isinstance(rows, list):
        raise Sentence("the agent's answer to `endpoints` is not understood: is it of another release?")
    return cast(list[dict[str, Any]], rows)


def _writer(output: str, endpoints: KnownEndpoints) -> Callable[[list[dict[str, Any]]], Iterable[str]]:
    """Facts that came together to lines."""
    import json

    if output == "json":
        return lambda facts: map(json.dumps, facts)
    if output == "hubble":
        import socket

        from agent.monitor.hubble import Exporter

        exporter = Exporter(endpoints, socket.gethostname())
        return lambda facts: (json.dumps(event) for fact in facts for event in exporter.events(fact))
    from agent.monitor.lines import line_of

    if not sys.stdout.isatty():
        return lambda facts: (line_of(fact, endpoints) for fact in facts)
    from agent.monitor.pace import Pace

    is_coloured = not os.environ.get("NO_COLOR")

    def line(fact: Mapping[str, Any], times: int) -> str:
        # A terminal may become wider while it is looked at.
        width = shutil.get_terminal_size().columns
        return line_of(fact, endpoints, times=times, width=width, is_coloured=is_coloured)

    return Pace(line).lines
