"""`namegate run`: what is asked for, read from the command line. Its own failures are 125, as with env(1) and timeout(1)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from agent.cli.environment import DEFAULT_CONTROL, Sentence, Session, with_examples
from agent.control import REQUEST_BYTES_MAX
from agent.runner import EXIT_OURS, CannotRun

_file = click.Path(path_type=Path)


class NotRun(Sentence):
    exit_code = EXIT_OURS

    def __init__(self, sentence: str) -> None:
        super().__init__(f"namegate: {sentence}")


class Misuse(click.UsageError):
    exit_code = EXIT_OURS


class Command(click.Command):
    """Every failure that is not COMMAND's has the one exit code that tells it from COMMAND's."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **named)
        except click.UsageError as error:
            raise Misuse(error.format_message(), error.ctx) from None

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CannotRun as problem:
            raise NotRun(str(problem)) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # noqa: BLE001 - it must not end with an exit code that could be COMMAND's
            if context.obj.debug:
                import traceback

                traceback.print_exc()
            kind = type(error).__name__
            raise NotRun(f"it met an error it does not know ({kind}: {error}): `namegate --debug run` shows where") from None


@click.command(
    cls=Command,
    short_help="Run a command with only these names reachable.",
    context_settings={"allow_interspersed_args": False},
    epilog=with_examples(
        "sudo namegate run --allow github.com -- git clone https://github.com/git/git",
        "sudo namegate run --allow-file pypi.list -- pip install flask",
        "sudo namegate run --allow-file ci/names.txt --summary -- make test",
        "sudo namegate run --audit --summary -- ./build.sh",
    ),
)
@click.option(
    "--allow",
    "entries",
    multiple=True,
    metavar="ENTRY",
    help="A name, a pattern, an address or a network, with or without :PORT.",
)
@click.option("--allow-file", "lists", multiple=True, type=_file, metavar="FILE", help="A list of such entries, one on a line.")
@click.option("--policy", "policies", multiple=True, type=_file, metavar="FILE", help="A policy (CiliumNetworkPolicy YAML).")
@click.option(
    "--allow-addresses", multiple=True, metavar="NETWORK", help="Names may stand for these addresses although they are private."
)
@click.option("--audit", is_flag=True, help="Deny nothing, and say what would be denied.")
@click.option("--summary", is_flag=True, help="At the end, say what was asked and what became of it.")
@click.option("--user", metavar="NAME", help="As whom COMMAND runs (default: who called sudo).")
@click.option("--control", type=_file, metavar="PATH", help="The socket of the agent to use; also before `run`.")
@click.option("--keep-socket", "kept", multiple=True, type=_file, metavar="PATH", help="Leave this socket reachable.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.pass_context
def run(
    context: click.Context,
    entries: tuple[str, ...],
    lists: tuple[Path, ...],
    policies: tuple[Path, ...],
    allow_addresses: tuple[str, ...],
    audit: bool,
    summary: bool,
    user: str | None,
    control: Path | None,
    kept: tuple[Path, ...],
    command: tuple[str, ...],
) -> None:
    """Run a command in a network of its own, in which only these names can be reached.

    Nothing has to run beforehand. COMMAND is the calling user's again, with his groups, environment and working directory;
    terminal, job control and exit code are COMMAND's own. 125: namegate itself failed; 126: COMMAND cannot be executed; 127:
    it is not found. Without any entry nothing can be reached.
    """
    session: Session = context.obj
    if not session.environment.is_root():
        raise NotRun("run needs root, for it makes a network: `sudo namegate run …` (COMMAND itself runs as you)")
    texts = [{"name": "--allow", "text": "".join(f"{entry}\n" for entry in entries)}] if entries else []
    texts += [{"name": str(path), "text": text} for path in lists if (text := _text(path, may_be_empty=True))]
    texts += [{"name": str(path), "text": _text(path)} for path in policies]
    for path in kept:
        if not os.path.lexists(path):
            raise NotRun(f"--keep-socket: {path} is not there")
    parent = context.parent
    is_named = parent is not None and parent.get_parameter_source("control") is not ParameterSource.DEFAULT
    from agent.runner.run import Order
    from agent.runner.run import run as start

    if control is None and is_named:
        control = session.control
    order = Order(command, texts, audit, summary, user, control, DEFAULT_CONTROL, kept, allow_addresses)
    context.exit(start(order))


def _text(path: Path, *, may_be_empty: bool = False) -> str:
    """may_be_empty: a file without any entry is said and empty then; it allows nothing, as a run without entries does."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(REQUEST_BYTES_MAX)
            if stream.read(1):
                raise NotRun(f"{path} is longer than {REQUEST_BYTES_MAX} bytes")
        if may_be_empty and all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
            click.echo(f"namegate: warning: {path} has no entry, and allows nothing", err=True)
            return ""
        return text
    except OSError as error:
        raise NotRun(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NotRun(f"{path} is not UTF-8 text") from None
