"""`namegate`: nouns show, verbs change.

Only click is imported here and in the modules of the commands; what a command needs it imports when it is called, so that
`--help` and shell completion are quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from agent.cli import attach, change, explain, judge, monitor, run, selftest, show, suggest, top, verify
from agent.cli.environment import DEFAULT_CONTROL, Environment, Refusal, Sentence, Session, with_examples
from agent.control import ControlError

_ENDED_BY_INTERRUPT = 130  # 128 + SIGINT, as shells say it
_ENDED_BY_PIPE = 141  # 128 + SIGPIPE


class Commands(click.Group):
    """Errors of every command pass here once, and become one sentence each."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except ControlError as error:
            raise (Refusal if error.exit_code == 1 else Sentence)(error.sentence) from None
        except KeyboardInterrupt:
            context.exit(_ENDED_BY_INTERRUPT)
        except BrokenPipeError:
            # The reader has seen enough. Python flushes once more at its end: let that go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            context.exit(_ENDED_BY_PIPE)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            # Nobody above could make a sentence of it.
            if isinstance(context.obj, Session) and context.obj.debug:
                raise
            kind = type(error).__name__
            raise Sentence(f"namegate met an error it does not know ({kind}: {error}): --debug shows where") from None

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order of adding, which is the order of use."""
        return list(self.commands)


def _show_version(context: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    """Of the installed distribution; a checkout that was never installed has none."""
    if not is_wanted:
        return
    from importlib import metadata

    try:
        click.echo(f"namegate {metadata.version('namegate')}")
    except metadata.PackageNotFoundError:
        raise Sentence("namegate is not installed here, so it has no version: scripts/setup installs it") from None
    context.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=with_examples(
        "sudo namegate run --allow-file pypi.list -- pip install flask",
        "namegate check policies/",
        "sudo namegate agent -c /etc/namegate.yaml",
        "sudo namegate status",
        "sudo namegate names -o json",
    ),
)
@click.option(
    "--control",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONTROL,
    show_default=True,
    envvar="NAMEGATE_CONTROL",
    show_envvar=True,
    metavar="PATH",
    help="The agent's control socket.",
)
@click.option("--debug", is_flag=True, help="Show a traceback where a sentence says too little.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version.")
@click.pass_context
def main(context: click.Context, control: Path, debug: bool) -> None:
    """Say by DNS name what a workload may talk to.

    Nouns show (status, endpoints, names …), verbs change (agent, apply, attach, detach, cleanup). Exit codes: 0 good; 1 the
    answer is no; 2 used wrongly, or something is missing.
    """
    environment = context.obj if isinstance(context.obj, Environment) else Environment()
    context.obj = Session(environment, control, debug)


for _command in (
    run.run,
    change.agent,
    judge.check,
    judge.doctor,
    selftest.selftest,
    change.apply,
    show.status,
    *show.nouns(),
    explain.explain,
    monitor.monitor,
    top.top,
    suggest.record,
    suggest.suggest,
    verify.verify,
    attach.attach,
    attach.detach,
    change.holder,
    change.cleanup,
):
    main.add_command(_command)
