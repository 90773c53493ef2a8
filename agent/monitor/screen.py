"""A full screen of what endpoints do now: rates by endpoint, names as they are asked, drops as they happen.

Drawn once a second of what was counted, whatever came: a flood costs what counting costs. Tables are those of the command line,
as wide as the screen and as many rows as there is room for; keys choose their order and whose they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.widgets import Footer, Static

from agent.cli.rows import Column, Row, rows_as_text
from agent.control import ControlError
from agent.control.client import Feed
from agent.monitor.facts import KnownEndpoints, verdict_of
from agent.monitor.lines import name_text, peer_text
from agent.monitor.tally import Count, Rates, Tally, rows_of

ORDERS: Final = ("latest first", "most first", "by name")
_DRAW_EVERY_S: Final = 1.0
_COLOURS: Final = {"denied": "red", "audited": "yellow", "failed": "magenta"}

_ENDPOINTS: Final = (
    Column("ENDPOINT", "endpoint"),
    Column("INTERFACE", "interface"),
    Column("ASKED/S", "asked"),
    Column("REFUSED/S", "refused"),
    Column("FLOWS/S", "flows"),
    Column("DROPS/S", "drops"),
    Column("DROPS", "drops_total"),
    Column("LABELS", "labels", is_flexible=True),
)
_NAMES: Final = (
    Column("NAME", "name", is_flexible=True),
    Column("INTERFACE", "interface"),
    Column("ASKED", "asked"),
    Column("VERDICT", "verdict"),
    Column("ADDRESS", "address"),
)
_DROPS: Final = (
    Column("DROPPED", "peer", is_flexible=True),
    Column("INTERFACE", "interface"),
    Column("PROTO", "protocol"),
    Column("TIMES", "times"),
    Column("WHY", "why", is_flexible=True),
)


class Top(App[None]):
    """Returns with `ended` set when the agent has ended: its sentence."""

    TITLE = "namegate"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #totals { height: 1; }
    #endpoints { height: auto; max-height: 30%; }
    #names { height: 2fr; }
    #drops { height: 1fr; min-height: 5; }
    """
    BINDINGS: ClassVar = [
        ("q", "quit", "quit"),
        ("s", "sort", "sort"),
        ("e", "endpoint", "endpoint"),
        ("a", "everybody", "all endpoints"),
        ("space", "pause", "pause"),
        ("ctrl+c", "quit", "quit"),
    ]

    def __init__(self, feed: Feed, endpoints: KnownEndpoints, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._feed = feed
        self._endpoints = endpoints
        self._clock = clock
        self._tally = Tally()
        self._order = 0
        self._only: int | None = None
        self._is_paused = False
        self.ended: str | None = None

    def compose(self) -> ComposeResult:
        for name in ("totals", "endpoints", "names", "drops"):
            yield Static(id=name)
        yield Footer()

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_reader(self._feed.fileno(), self._hear)
        self._hear()  # what came with the answer
        self.set_interval(_DRAW_EVERY_S, self._draw)
        self.call_after_refresh(self._draw)

    def on_unmount(self) -> None:
        asyncio.get_running_loop().remove_reader(self._feed.fileno())

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_sort(self) -> None:
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def action_endpoint(self) -> None:
        """The next one."""
        numbers: list[int | None] = [None, *sorted(row["endpoint"] for row in self._endpoints.rows())]
        place = numbers.index(self._only) if self._only in numbers else 0
        self._only = numbers[(place + 1) % len(numbers)]
        self._draw()

    def action_everybody(self) -> None:
        self._only = None
        self._draw()

    def action_pause(self) -> None:
        """The picture stands still, counting goes on."""
        self._is_paused = not self._is_paused
        if not self._is_paused:
            self._draw()

    def _hear(self) -> None:
        now = self._clock()
        try:
            for line in self._feed.read(0):
                if "fact" in line:
                    self._tally.take(line["fact"], self._endpoints, now)
        except ControlError as error:
            self.ended = error.sentence
            asyncio.get_running_loop().remove_reader(self._feed.fileno())
            self.exit()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._is_paused:
            return
        now = self._clock()
        known = {row["endpoint"]: row for row in self._endpoints.rows()}
        self._tally.keep(known)
        self._show("totals", self._totals(now, known))
        shown = [row for number, row in sorted(known.items()) if self._only in (None, number)]
        self._show_table("endpoints", _ENDPOINTS, self._sorted_endpoints([self._endpoint_row(row, now) for row in shown]))
        self._show_table("names", _NAMES, self._name_rows())
        self._show_table("drops", _DROPS, self._drop_rows())

    def _totals(self, now: float, known: dict[int, Row]) -> Text:
        rates = self._tally.everybody if self._only is None else self._tally.by_endpoint.get(self._only, Rates())
        whose = "all" if self._only is None else str(known.get(self._only, {}).get("interface", self._only))
        text = Text(style="bold", no_wrap=True)
        for count, what in zip(Count, ("asked", "refused", "flows", "drops"), strict=True):
            text.append(f"{what} {rates.per_second(count, now):,.0f}/s  ")
        if self._tally.lost:
            text.append(f"lost {self._tally.lost:,}  ", style="yellow")
        return text.append(f"{whose}, {ORDERS[self._order]}")

    def _endpoint_row(self, row: Row, now: float) -> Row:
        rates = self._tally.by_endpoint.get(int(str(row["endpoint"])), Rates())
        per_second = [round(rates.per_second(count, now), 1) for count in Count]
        return {
            "endpoint": row["endpoint"],
            "interface": row["interface"],
            "asked": per_second[Count.QUESTIONS],
            "refused": per_second[Count.REFUSED],
            "flows": per_second[Count.FLOWS],
            "drops": per_second[Count.DROPS],
            "drops_total": rates.totals[Count.DROPS],
            "labels": row["labels"],
            "total": sum(per_second),
        }

    def _sorted_endpoints(self, rows: list[Row]) -> list[Row]:
        if ORDERS[self._order] == "by name":
            return sorted(rows, key=lambda row: str(row["interface"]))
        return sorted(rows, key=lambda row: -float(str(row["total"])))

    def _name_rows(self) -> list[Row]:
        rows: list[Row] = [
            {
                "name": name_text(each.name),
                "interface": each.endpoint,
                "asked": each.asked,
                "verdict": each.verdict,
                "address": each.answer,
            }
            for each in rows_of(self._tally.names, self._only)
        ]
        return self._ordered(rows, "asked", "name")

    def _drop_rows(self) -> list[Row]:
        rows: list[Row] = [
            {
                "peer": peer_text(each.last),
                "interface": each.endpoint,
                "protocol": each.last["protocol"],
                "times": each.times,
                "why": each.last.get("why") or each.last["reason"],
                "verdict": verdict_of(each.last),
            }
            for each in rows_of(self._tally.drops, self._only)
        ]
        return self._ordered(rows, "times", "peer")

    def _ordered(self, rows: list[Row], count: str, name: str) -> list[Row]:
        order = ORDERS[self._order]
        if order == "most first":
            rows.sort(key=lambda row: -int(str(row[count])))
        elif order == "by name":
            rows.sort(key=lambda row: str(row[name]))
        return rows

    def _show_table(self, name: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """As many as there is room for: the rest is what `monitor` and `drops` are for."""
        room = max(0, self.query_one(f"#{name}").size.height - 1) or 1
        if name == "endpoints":
            room = max(1, self.size.height * 3 // 10 - 1)
        lines = rows_as_text(rows[:room], columns, self.size.width).splitlines()
        text = Text(lines[0].ljust(self.size.width), style="reverse", no_wrap=True)
        for line, row in zip(lines[1:], rows, strict=False):
            text.append("\n")
            text.append(line, style=f"not reverse {_COLOURS.get(str(row.get('verdict')), '')}".strip())
        self._show(name, text)

    def _show(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)
