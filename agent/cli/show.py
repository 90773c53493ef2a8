"""The nouns: each shows one table of the running agent and changes nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import click

from agent.cli.environment import Sentence, Session, with_examples
from agent.cli.rows import Column, Row, cell_as_text, rows_as_text
from agent.control import ControlError

_FORMATS = ("table", "json", "yaml")
output_option = click.option(
    "-o", "--output", type=click.Choice(_FORMATS), default="table", show_default=True, help="json and yaml have every column."
)  # fmt: skip


def _count(key: str) -> Callable[[Row], object]:
    """A list's length: bags and their kind have thousands of elements."""

    def count(row: Row) -> object:
        value = row.get(key)
        return len(value) if isinstance(value, list) else value

    return count


def _expires(row: Row) -> object:
    seconds = row.get("expires_in")
    return f"{seconds:.0f}s" if isinstance(seconds, int | float) else seconds


def _time_of_day(row: Row) -> object:
    """Of an ISO 8601 time; days are in `-o json`."""
    time = row.get("time")
    return time[11:19] if isinstance(time, str) and time[10:11] in ("T", " ") else time


def _interface(row: Row) -> object:
    return row.get("interface") or row.get("endpoint")


def _peer(row: Row) -> object:
    """The far side, with the port that was judged: the peer's on the way out, our own on the way in."""
    port = row.get("port")
    if row.get("direction") == "ingress":
        return f"{row.get('source')} to :{port}" if port else row.get("source")
    peer = str(row.get("destination"))
    if not port:
        return peer
    return f"[{peer}]:{port}" if ":" in peer else f"{peer}:{port}"


# noun: (what it shows, columns of its table, examples)
_NOUNS: dict[str, tuple[str, tuple[Column, ...], tuple[str, ...]]] = {
    "endpoints": (
        "The interfaces whose traffic is policed.",
        (
            Column("ENDPOINT", "endpoint"),
            Column("INTERFACE", "interface"),
            Column("STATE", "state", is_flexible=True),
            Column("SET", "set"),
            Column("DENY", "default_deny"),
            Column("LABELS", "labels", is_flexible=True),
            Column("ADDRESSES", "addresses", is_flexible=True),
        ),
        ("namegate endpoints", "namegate endpoints -o json"),
    ),
    "names": (
        "Which names are open at which addresses, and until when.",
        (
            Column("NAME", "name", is_flexible=True),
            Column("ADDRESS", "address"),
            Column("SCOPE", "scope"),
            Column("EXPIRES", _expires),
            Column("SELECTORS", "selectors", is_flexible=True),
        ),
        ("namegate names", "namegate names | grep example.com"),
    ),
    "patterns": (
        "How many different names each endpoint has asked under each pattern.",
        (
            Column("ENDPOINT", "endpoint"),
            Column("INTERFACE", "interface"),
            Column("PATTERN", "pattern", is_flexible=True),
            Column("NAMES", "names"),
            Column("MINUTE", "in_this_minute"),
            Column("MOST", "most_in_a_minute"),
            Column("REFUSED", "refused"),
        ),
        ("namegate patterns", "namegate patterns -o json"),
    ),
    "selectors": (
        "What policies select, and how much that is now.",
        (
            Column("SELECTOR", "selector", is_flexible=True),
            Column("SCOPE", "scope"),
            Column("ADDRESSES", _count("addresses")),
            Column("IDENTITIES", _count("identities")),
            Column("USERS", _count("users")),
        ),
        ("namegate selectors", "namegate selectors -o yaml"),
    ),
    "identities": (
        "The numbers that stand for label sets in the kernel.",
        (
            Column("IDENTITY", "identity"),
            Column("ROWS", _count("rows")),
            Column("LABELS", "labels", is_flexible=True),
        ),
        ("namegate identities", "namegate identities -o json"),
    ),
    "ipcache": (
        "Prefix to identity, wanted and in the kernel.",
        (
            Column("SCOPE", "scope"),
            Column("PREFIX", "prefix"),
            Column("IDENTITY", "identity"),
            Column("REVISION", "revision"),
            Column("REALIZED", "realized"),
            Column("LABELS", "labels", is_flexible=True),
        ),
        ("namegate ipcache", "namegate ipcache -o json"),
    ),
    "policy-map": (
        "The verdicts of each set, and the rule each comes from.",
        (
            Column("SET", "set"),
            Column("DIRECTION", "direction"),
            Column("IDENTITY", "identity"),
            Column("PROTOCOL", "protocol"),
            Column("PORT", "port"),
            Column("VERDICT", "verdict"),
            Column("RULE", "rule", is_flexible=True),
        ),
        ("namegate policy-map", "namegate policy-map -o yaml"),
    ),
    "drops": (
        "The packets dropped last, and why. Questions that were denied: `monitor`.",
        (
            Column("TIME", _time_of_day),
            Column("ENDPOINT", _interface),
            Column("REASON", "reason", is_flexible=True),
            Column("WAY", "direction"),
            Column("PROTO", "protocol"),
            Column("PEER", _peer),
            Column("WHY", "why", is_flexible=True),
        ),
        ("namegate drops", "namegate drops --last 20", "namegate drops -o json"),
    ),
}


_last_option = click.option("--last", type=click.IntRange(min=1), metavar="N", help="The last N; else all that are kept.")


def nouns() -> list[click.Command]:
    return [_noun(name, *described) for name, described in _NOUNS.items()]


def _noun(name: str, sentence: str, columns: tuple[Column, ...], examples: tuple[str, ...]) -> click.Command:
    @output_option
    @click.pass_obj
    def show(session: Session, output: str, last: int | None = None) -> None:
        session.require_root(name, "it asks the agent through a socket for root")
        rows = session.ask(name)
        if not isinstance(rows, list):
            raise Sentence(f"the agent's answer to `{name}` is not understood: is it of another release?")
        click.echo(_as_text(rows[-last:] if last is not None else rows, columns, output), nl=False)

    if name == "drops":
        show = _last_option(show)
    return click.command(name, help=sentence, epilog=with_examples(*examples))(show)


@click.command(
    short_help="Does the kernel enforce what the policies say?",
    epilog=with_examples("namegate status", "namegate status -o json", "namegate status >/dev/null || echo not enforcing"),
)
@output_option
@click.pass_context
def status(context: click.Context, output: str) -> None:
    """Is everything that the policies say in the kernel? Exit code 1: no, and the reasons say why.

    An endpoint that no policy selects, or that is audited, is listed under `not enforced`, and is no reason.
    """
    session: Session = context.obj
    session.require_root("status", "it asks the agent through a socket for root")
    try:
        answer = session.ask("status")
    except ControlError as error:
        raise Sentence(error.sentence + _still_enforced()) from None
    if not isinstance(answer, dict):
        raise Sentence("the agent's answer to `status` is not understood: is it of another release?")
    click.echo(_status_as_text(answer) if output == "table" else encoded(answer, output), nl=False)
    if answer.get("state") != "enforcing":
        context.exit(1)


def _still_enforced() -> str:
    """The agent may be gone, but its programs stay."""
    from agent.config import DatapathSettings
    from agent.datapath.attach import attached

    settings = DatapathSettings()
    interfaces = sorted({hook.interface for hook in attached(settings.pin_directory)} - {"", settings.device})
    return f"; the kernel goes on enforcing on {', '.join(interfaces)}" if interfaces else ""


def _status_as_text(answer: Mapping[str, object]) -> str:
    """One line for each fact; each reason has its own; a list of rows is counted, and its table follows."""
    lines: list[str] = []
    tables: list[str] = []
    margin = max((len(key) for key in answer), default=0) + 2
    for key, value in answer.items():
        title = key.replace("_", " ").ljust(margin)
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            rows = cast(list[Row], value)
            columns = [Column(name.upper().replace("_", " "), name, is_flexible=True) for name in rows[0]]
            lines.append(f"{title}{len(rows)}\n")
            tables.append(f"\n{key.replace('_', ' ')}:\n{rows_as_text(rows, columns, _width())}")
        elif isinstance(value, list) and value:
            lines += [f"{title if index == 0 else ' ' * margin}{cell_as_text(item)}\n" for index, item in enumerate(value)]
        else:
            lines.append(f"{title}{'none' if isinstance(value, list) else cell_as_text(value)}\n")
    return "".join(lines + tables)


def _as_text(rows: Sequence[Row], columns: Sequence[Column], output: str) -> str:
    return rows_as_text(rows, columns, _width()) if output == "table" else encoded(rows, output)


def encoded(data: object, output: str) -> str:
    if output == "json":
        return json.dumps(data, indent=2) + "\n"
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True)


def _width() -> int:
    """The terminal's, uncut in a pipe; $COLUMNS says otherwise."""
    return shutil.get_terminal_size((sys.maxsize, 24)).columns
