"""The verbs that change something: the agent itself, its policies, and what it leaves in the kernel."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from agent.cli.environment import Sentence, Session, with_examples

if TYPE_CHECKING:
    from agent.config import Config

_file = click.Path(path_type=Path)


@click.command(
    short_help="Run the agent in the foreground.",
    epilog=with_examples("sudo namegate agent -c /etc/namegate.yaml", "sudo namegate agent -c lab.yaml --debug"),
)
@click.option("-c", "--config", "path", type=_file, metavar="FILE", help="The configuration.")
@click.option("--debug", is_flag=True, help="Log every step, and show tracebacks.")
@click.option("--for-runs", "is_for_runs", is_flag=True, hidden=True)  # `run` starts it
@click.pass_context
def agent(context: click.Context, path: Path | None, debug: bool, is_for_runs: bool) -> None:
    """Run the agent in the foreground until SIGTERM or Ctrl-C. Stopped, it leaves the kernel enforcing."""
    session: Session = context.obj
    session.debug = session.debug or debug
    session.require_root("agent", "it loads BPF programs and makes a network device")
    from agent import compiled

    compiled.use()
    if context.parent is not None and context.parent.get_parameter_source("control") is not ParameterSource.DEFAULT:
        raise Sentence("--control says which agent to ask; where this one listens is `control.socket` in its configuration")
    import logging

    log_file = None
    if is_for_runs:
        config = _for_runs()
        log_file = config.control.socket.with_name("agent.log")
    elif path is None:
        raise click.UsageError("Missing option '-c' / '--config'.", context)
    else:
        config = configuration(path)
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    level = logging.DEBUG if session.debug else logging.INFO
    # An agent for runs that is about to end takes its directory away: the file is made when the lock is ours.
    handler = logging.FileHandler(log_file, delay=True) if log_file is not None else logging.StreamHandler()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler], force=True)
    for library in ("pyroute2", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # Until the agent's loop takes the signals over, both end the start in the same orderly way.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        context.exit(session.environment.run(config, is_for_runs))
    except KeyboardInterrupt:
        context.exit(0)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _for_runs() -> Config:
    from agent.config import ConfigError, for_runs
    from agent.control.runs import own_network_namespace, runs_directory

    namespace = own_network_namespace()
    directory = runs_directory(namespace)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return for_runs(directory, namespace)
    except OSError as error:
        raise Sentence(f"{directory} cannot be made: {error.strerror}") from None
    except ConfigError as error:
        raise Sentence(str(error)) from None


def configuration(path: Path) -> Config:
    from agent.config import ConfigError, load

    try:
        return load(path)
    except ConfigError as error:
        raise Sentence(str(error)) from None


@click.command(
    short_help="Put policies in force.",
    epilog=with_examples(
        "sudo namegate apply", "sudo namegate apply --wait --timeout 10s", "sudo namegate apply policies/*.yaml --wait"
    ),
)
@click.argument("files", nargs=-1, type=_file, metavar="[FILE]...")
@click.option("--wait", is_flag=True, help="Return when every endpoint is judged by the new policies.")
@click.option("--timeout", default="30s", show_default=True, metavar="DURATION", help="How long --wait waits.")
@click.pass_obj
def apply(session: Session, files: tuple[Path, ...], wait: bool, timeout: str) -> None:
    """Put policies in force: these files (or directories), or else those of the configuration, read again.

    They are taken whole or not at all: exit code 1 says that they were refused, and the policies in force stay.
    """
    session.require_root("apply", "it asks the agent through a socket for root")
    from agent.config import seconds_of

    seconds = seconds_of(timeout)
    if seconds is None:
        raise Sentence(f"--timeout: `{timeout}` is not a duration: write 500ms, 10s or 2m")
    answer = session.ask(
        "apply",
        patience=seconds + 10,  # the agent's own sentence is the better one
        files=[str(file.absolute()) for file in files] or None,
        wait=wait,
        timeout=seconds,
    )
    if not isinstance(answer, dict):
        raise Sentence("the agent's answer to `apply` is not understood: is it of another release?")
    for interface in answer.get("open") or ():
        click.echo(f"warning: no policy closes {interface}: what it sends is not enforced", err=True)
    policies = answer.get("policies")
    noun = "policy" if policies == 1 else "policies"
    if not answer.get("changed"):
        click.echo(f"{policies} {noun}, nothing changed")
    else:
        click.echo(f"{policies} {noun} {'in force' if wait else 'taken; `--wait` says when they are in force'}")


@click.command(
    hidden=True,  # the agent starts it; for who gives it a unit of its own
    epilog=with_examples("sudo namegate holder", "sudo namegate --control /run/lab/control.sock holder"),
)
@click.option("--detach", is_flag=True, help="Come back as soon as it listens; a child goes on.")
@click.pass_context
def holder(context: click.Context, detach: bool) -> None:
    """Keep the DNS sockets while there is no agent, and answer SERVFAIL if none comes soon.

    --control says for which agent. It gets them from the agent, and ends with SIGTERM or with `namegate cleanup`.
    """
    session: Session = context.obj
    session.require_root("holder", "it has the agent's sockets")
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    context.exit(session.environment.hold(session.control, detach))


@click.command(
    short_help="Remove what a stopped agent left in the kernel.",
    epilog=with_examples("sudo namegate cleanup", "sudo namegate cleanup -c /etc/namegate.yaml"),
)
@click.option("-c", "--config", "path", type=_file, metavar="FILE", help="The agent's configuration; else its defaults.")
@click.pass_obj
def cleanup(session: Session, path: Path | None) -> None:
    """Take everything out of the kernel that a stopped agent left: programs, tables, device and rules. What was attached by
    command is forgotten.

    From then on nothing is enforced. A running agent is not disturbed: stop it first.
    """
    session.require_root("cleanup", "it removes BPF programs and a network device")
    from agent.config import Config
    from agent.control.lock import AgentLock

    config = Config() if path is None else configuration(path)
    lock = AgentLock(config.control.socket)
    lock.acquire()
    try:
        interfaces = session.environment.clean(config)
        config.control.socket.unlink(missing_ok=True)
    finally:
        lock.release()
    for interface in interfaces:
        click.echo(f"{interface} is no longer policed")
    if not interfaces:
        click.echo("no interface was policed")
