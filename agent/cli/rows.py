"""Tables as text: the one place where rows become columns, for the command line and for messages of tests.

A table is as wide as its cells and at most `width`. What is too much is taken from the columns marked flexible (lists, long
names), then from the widest; an ellipsis shows where. The same data, uncut, is what `-o json` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Row = Mapping[str, object]

WIDTH = 80
_FLEXIBLE_WIDTH_MIN = 8
_WIDTH_MIN = 4
_GAP = "  "


class Column(NamedTuple):
    """heading; cell: the key of the value, or what makes the value from the row."""

    heading: str
    cell: str | Callable[[Row], object]
    is_flexible: bool = False

    def value(self, row: Row) -> object:
        return row.get(self.cell) if isinstance(self.cell, str) else self.cell(row)


def rows_as_text(rows: Sequence[Row], columns: Sequence[Column], width: int = WIDTH) -> str:
    """Heading and rows, one line each, with a final newline."""
    values = [[column.value(row) for column in columns] for row in rows]
    lines = [[column.heading for column in columns], *([cell_as_text(value) for value in row] for row in values)]
    widths = _fitted([max(len(line[index]) for line in lines) for index in range(len(columns))], columns, width)
    is_number = [bool(values) and all(_is_number(row[index]) for row in values) for index in range(len(columns))]
    return "".join(
        _GAP.join(
            cut.rjust(size) if right else cut.ljust(size)
            for cut, size, right in zip(map(_cut, line, widths), widths, is_number, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def cell_as_text(value: object) -> str:
    """A JSON value on one line. What a terminal would obey is escaped: names come from the network."""
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ",".join(f"{_printable(str(key))}={cell_as_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(cell_as_text(item) for item in value)
    return _printable(str(value))


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _fitted(natural: list[int], columns: Sequence[Column], width: int) -> list[int]:
    widths = list(natural)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    for candidates, least in (
        ([index for index, column in enumerate(columns) if column.is_flexible], _FLEXIBLE_WIDTH_MIN),
        (list(range(len(columns))), _WIDTH_MIN),
    ):
        while excess > 0 and candidates:
            widest = max(candidates, key=widths.__getitem__)
            if widths[widest] <= least:
                break
            widths[widest] -= 1
            excess -= 1
    return widths
