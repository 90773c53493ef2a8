"""`namegate selftest`: does the gate hold on this host and kernel?"""

from __future__ import annotations

import signal
import time
from types import FrameType

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.show import encoded, output_option

_NAMES = 500


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command(
    short_help="Prove the gate on this host and kernel.",
    epilog=with_examples("sudo namegate selftest", "sudo namegate selftest --names 5000 -o json"),
)
@click.option("--names", type=click.IntRange(1, 100_000), default=_NAMES, show_default=True, help="How many are asked.")
@click.option("--known-bad", multiple=True, hidden=True, help="A mistake the agent is to make: for the test suites.")
@output_option
@click.pass_context
def selftest(context: click.Context, names: int, known_bad: tuple[str, ...], output: str) -> None:
    """Prove the gate on this host and kernel, in a network of namespaces made for it. Takes less than 30 seconds.

    A real agent is started in it. Captures on both sides of it say what got through: no first packet to a name may be lost,
    nothing that no name brought may get out. The host's own network, and an agent that runs in it, are not touched. Exit code
    1: a check failed; 2: this environment lacks something.
    """
    session: Session = context.obj
    session.require_root("selftest", "it makes network namespaces and loads BPF programs")
    from agent.selftest.checks import Check, run, what_is_missing
    from agent.selftest.network import Lacking

    lacking = what_is_missing()
    if lacking is not None:
        raise Sentence(lacking)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    began = time.monotonic()
    checks: list[Check] = []
    try:
        for check in run(names, known_bad):
            checks.append(check)
            if output == "table":
                click.echo(f"{'good' if check.is_good else 'BAD':6}{check.check:42}{check.said}")
                if check.bad is not None:
                    click.echo(f"{'':6}{check.bad}")
    except Lacking as lack:
        raise Sentence(str(lack)) from None
    bad = sum(not check.is_good for check in checks)
    took_s = round(time.monotonic() - began, 1)
    if output == "table":
        click.echo(f"{f'NOT proved: BAD are {bad} of {len(checks)} checks' if bad else 'the gate holds'}, after {took_s} s")
    else:
        answer = {"good": not bad, "took_s": took_s, "checks": [check._asdict() for check in checks]}
        click.echo(encoded(answer, output), nl=False)
    if bad:
        context.exit(1)
