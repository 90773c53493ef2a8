"""`top`: a screen of what endpoints do now."""

from __future__ import annotations

import sys

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.monitor import asked_endpoints
from agent.monitor.facts import KnownEndpoints


@click.command(
    short_help="Watch endpoints, names and drops on a full screen.",
    epilog=with_examples("sudo namegate top"),
)
@click.pass_obj
def top(session: Session) -> None:
    """Watch endpoints, names and drops on a full screen, drawn once a second.

    Keys: q ends, s changes the order, e takes the next endpoint, a all of them, space stands still.
    """
    session.require_root("top", "it asks the agent through a socket for root")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Sentence("top fills a terminal, and this is none: `namegate monitor` writes lines")
    try:
        from agent.monitor.screen import Top
    except ModuleNotFoundError as error:
        raise Sentence(f"top needs the library {error.name}: scripts/setup installs it") from None
    endpoints = KnownEndpoints(lambda: asked_endpoints(session))
    with session.listen(("question", "verdict", "drop")) as feed:
        screen = Top(feed, endpoints)
        screen.run()
    if screen.ended is not None:
        raise Sentence(screen.ended)
