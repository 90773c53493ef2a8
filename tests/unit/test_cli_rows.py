"""rows_as_text: rows to columns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.cli.rows import Column, cell_as_text, rows_as_text

NAME = Column("NAME", "name", is_flexible=True)
ADDRESS = Column("ADDRESS", "address")
COUNT = Column("COUNT", "count")


def test_columns_are_as_wide_as_their_cells() -> None:
    """Numbers to the right, no blanks at the ends of lines."""
    rows = [{"name": "a", "count": 5, "address": "192.0.2.1"}, {"name": "long-name", "count": 1000, "address": ""}]
    assert rows_as_text(rows, [NAME, COUNT, ADDRESS]) == (
        "NAME       COUNT  ADDRESS\n"
        "a              5  192.0.2.1\n"
        "long-name   1000  -\n"
    )  # fmt: skip


def test_flexible_columns_give_way_first() -> None:
    """An address is whole as long as there is room for it."""
    rows = [{"name": "x" * 50, "address": "2001:db8::1"}]
    assert rows_as_text(rows, [NAME, ADDRESS], width=30) == (
        "NAME               ADDRESS\n"
        "xxxxxxxxxxxxxxxx…  2001:db8::1\n"
    )  # fmt: skip


def test_what_is_missing_is_a_dash() -> None:
    """Also a key that another release does not send."""
    assert rows_as_text([{}], [NAME]) == "NAME\n-\n"


def test_cells_are_one_printable_line() -> None:
    """A name from the network must not move the cursor."""
    assert cell_as_text("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert cell_as_text({"app": "build", "n": [1, 2]}) == "app=build,n=1,2"
    values: list[object] = [True, False, None, 0, 0.5, [], {}]
    assert [cell_as_text(value) for value in values] == ["yes", "no", "-", "0", "0.5", "-", "-"]


CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=120), st.lists(st.text(max_size=30), max_size=9)
)


@given(st.lists(st.fixed_dictionaries({"name": CELLS, "address": CELLS, "count": CELLS}), max_size=5))
def test_no_table_is_wider_than_it_may_be(rows: list[dict[str, object]]) -> None:
    """Whatever the cells, and there are as many lines as rows and the heading."""
    lines = rows_as_text(rows, [NAME, ADDRESS, COUNT], width=60).split("\n")
    assert len(lines) == len(rows) + 2
    assert max(map(len, lines)) <= 60
