"""What a run says on standard error: lines that begin with `namegate: `.

A terminal belongs to COMMAND while it runs (it may fill the screen), so there everything is said at the end. Into a pipe or a
file, as in CI, each thing is said when it happens. Names come from the network and are written so that no terminal obeys them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from agent.cli.rows import cell_as_text

Row = Mapping[str, Any]

# A screen's worth: whoever comes back to his prompt wants to see the end of what COMMAND said as well.
_AT_THE_END_MAX = 15
# COMMAND invents as many names as it likes.
_KEPT_MAX = 1_000

_VERDICTS = {"denied": "denied", "audited": "would be denied", "failed": "not answered"}


class Report:
    """wants_summary: all that was asked and what became of it, at the end; without it, only what was denied, and on a terminal
    only then."""

    def __init__(self, *, wants_summary: bool) -> None:
        self._wants_summary = wants_summary
        self._is_live = not os.isatty(2)
        self._later: list[str] = []
        self._denied: dict[str, None] = {}  # each once, however often it was told
        self._untold = 0
        self._is_started = False

    def start(self) -> None:
        """COMMAND runs from now on."""
        self._is_started = True

    def say(self, *lines: str) -> None:
        if self._is_started and not self._is_live:
            self._later += lines
        elif self._is_started:
            self._tell(*lines)
        else:
            _write(lines)

    def take(self, fact: Row) -> None:
        if self._is_live:
            self._tell(line_of(fact))
        elif fact["kind"] != "lost" and len(self._denied) < _KEPT_MAX:
            self._denied[line_of({**fact, "allow": None, "allow_addresses": None})] = None

    def _tell(self, *lines: str) -> None:
        """While COMMAND runs, whose signals and end must not wait for the reader of a pipe: where there is room."""
        if self._untold:
            lines = (line_of({"kind": "lost", "count": self._untold}), *lines)
        told = _octets(lines)[: select.PIPE_BUF - 1].rstrip(b"\n") + b"\n"
        watched = select.poll()
        watched.register(2, select.POLLOUT)
        if watched.poll(0):
            _write_octets(told)
            self._untold = 0
        else:
            self._untold += 1

    def finish(self, summary: Row | None) -> None:
        """After the end of COMMAND, with the terminal ours again."""
        if self._untold:
            self._later.append(line_of({"kind": "lost", "count": self._untold}))
        if summary is not None and self._wants_summary:
            _write([*self._later, *summary_lines(summary)])
            return
        lines = [*self._later, *list(self._denied)[:_AT_THE_END_MAX]]
        if len(self._denied) > _AT_THE_END_MAX:
            least = "at least " if len(self._denied) == _KEPT_MAX else ""
            lines.append(f"and {least}{len(self._denied) - _AT_THE_END_MAX} more: --summary says them all")
        elif self._denied and summary is not None and (options := options_of(summary["allow"], summary["allow_addresses"])):
            lines.append(f"to allow it: {' '.join(options)}")
        _write(lines)


def line_of(fact: Row) -> str:
    if fact["kind"] == "lost":
        return f"{fact['count']} more could not be told"
    if fact["kind"] == "question":
        verdict = _word(fact["verdict"])
        what = f"{_name(fact['name'])} ({cell_as_text(fact['type'])})"
    elif fact["kind"] == "guard":
        verdict, what = _VERDICTS[_verdict_of(fact)], _guarded(fact)
    else:
        verdict, what = _VERDICTS[_verdict_of(fact)], _destination(fact)
    why = f": {cell_as_text(fact['why'])}" if fact.get("why") else ""
    options = options_of(*([fact[key]] if fact.get(key) else () for key in ("allow", "allow_addresses")))
    remedy = f"; to allow it: {' '.join(options)}" if options else ""
    return f"{verdict}: {what}{why}{remedy}"


def summary_lines(summary: Row) -> list[str]:
    """Names first, as they were asked; then what was taken out of answers; then what was dropped; then what would allow it."""
    names = [(each, each["verdict"], _name(each["name"])) for each in summary["names"]]
    guarded = [(each, _verdict_of(each), _guarded(each)) for each in summary["guarded"]]
    drops = [(each, _verdict_of(each), _destination(each)) for each in summary["drops"]]
    width = max((len(_word(verdict)) for _, verdict, _ in (*names, *guarded, *drops)), default=0)
    lines = []
    for title, rows in (("names asked:", names), ("addresses that no name may stand for:", guarded), ("packets:", drops)):
        if rows:
            lines.append(title)
            lines += (f"  {row['count']:>5} x  {_word(verdict):<{width}}  {what}" for row, verdict, what in rows)
    if not names:
        lines.insert(0, "no name was asked")
    if summary["unlisted"]:
        lines.append(f"and {summary['unlisted']} that are not listed")
    if options := options_of(summary["allow"], summary["allow_addresses"]):
        was = "would be" if any(verdict == "audited" for _, verdict, _ in (*names, *guarded, *drops)) else "was"
        lines += [f"to allow what {was} denied:", *(f"  {option}" for option in options)]
    return lines


def options_of(entries: Iterable[str], networks: Iterable[str]) -> list[str]:
    """As they are typed."""
    given = [("--allow", entry) for entry in entries] + [("--allow-addresses", network) for network in networks]
    return [f"{option} {shlex.quote(cell_as_text(value))}" for option, value in given]


def _word(verdict: str) -> str:
    return _VERDICTS.get(verdict, verdict)


def _verdict_of(drop: Row) -> str:
    return "audited" if drop["audited"] else "denied"


def _name(name: object) -> str:
    return cell_as_text(name).rstrip(".") or "."


def _guarded(row: Row) -> str:
    sort = str(row["sort"])
    which = "an address of the host" if sort == "host" else f"a {sort} address" if sort != "unspecified" else "no address"
    return f"{_name(row['name'])} is {cell_as_text(row['address'])}, {which}"


def _destination(row: Row) -> str:
    port = f" port {row['port']}/{row['protocol']}" if row["port"] else f" ({row['protocol']})"
    names = f" ({', '.join(map(_name, row['names']))})" if row["names"] else ""
    return f"{cell_as_text(row['destination'])}{cell_as_text(port)}{names}"


def _octets(lines: Iterable[str]) -> bytes:
    return "".join(f"namegate: {line}\n" for line in lines).encode(errors="replace")


def _write(lines: Iterable[str]) -> None:
    _write_octets(_octets(lines))


def _write_octets(octets: bytes) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed, a pipe without a reader: COMMAND's end is what counts
        while octets:
            octets = octets[os.write(2, octets) :]
