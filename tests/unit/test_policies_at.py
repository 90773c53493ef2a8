"""Which files a path of the configuration or of `apply` stands for: never none by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.documents.remarks import PolicyError
from agent.shell import policies_at


def test_every_path_that_stands_for_no_policy_is_named(tmp_path: Path) -> None:
    """With no policy in force everything is open: a mistyped pattern and an emptied directory must not come to that."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "one.list").write_text("a.test\n")
    paths = [str(tmp_path / name) for name in ("empty", "typo*.yaml", "one.list", "**.yaml", "x" * 300)]
    with pytest.raises(PolicyError) as refused:
        policies_at(paths)
    assert {mistake.file for mistake in refused.value.mistakes} == set(paths) - {paths[2]}


def test_what_is_there_is_read_once(tmp_path: Path) -> None:
    """A directory and a pattern may name the same file."""
    (tmp_path / "one.list").write_text("a.test\n")
    assert len(policies_at([str(tmp_path), str(tmp_path / "*.list")])) == 1


def test_no_path_at_all_is_meant() -> None:
    """`policies: []`."""
    assert policies_at([]) == ()
