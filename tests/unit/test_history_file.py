"""The name history on disk: it comes back after a reboot, harms nothing that is not its own, and stops nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.core.history import KEPT_S, NameHistory, Seen
from agent.core.types import packed
from agent.history_file import SLICE_ENTRIES, HistoryFile

A = packed("198.51.100.7")
V6 = packed("2001:db8::7")
ZERO = 1_700_000_000.0  # the wall clock at boot
DAY = 86_400.0


def noted(*names: str, at: float = 100.0) -> NameHistory:
    """Each seen on one address, a second after the other."""
    history = NameHistory(1_000)
    for second, name in enumerate(names):
        history.note(name, A, 1, (name, "cdn.test."), at + second + 60.0, at + second)
    return history


def save(path: Path, history: NameHistory, zero: float = ZERO) -> None:
    """As at an orderly stop."""

    async def run() -> None:
        file = HistoryFile(path, history, zero=lambda: zero)
        file.start()
        await file.stop()

    asyncio.run(run())


def load(path: Path, now: float, zero: float = ZERO, entries_max: int = 1_000) -> NameHistory:
    history = NameHistory(entries_max)
    HistoryFile(path, history, zero=lambda: zero).load(now)
    return history


def names(history: NameHistory, now: float) -> list[str]:
    return [seen.name for seen in history.on(A, now)]


# --- what comes back -------------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back_after_a_reboot(tmp_path: Path) -> None:
    """The core's clock begins at 0 again, and every time is as long ago as it is."""
    history = noted("a.test.", "b.test.")
    history.note("v6.test.", V6, 2, ("v6.test.",), 200.0, 150.0)
    save(tmp_path / "history", history)
    back = load(tmp_path / "history", 10.0, zero=ZERO + 1_000.0)
    assert [(s.name, s.chain, s.endpoint, s.first_at, s.last_at, s.until) for s in back.on(A, 10.0)] == [
        ("b.test.", ("b.test.", "cdn.test."), None, -899.0, -899.0, -839.0),
        ("a.test.", ("a.test.", "cdn.test."), None, -900.0, -900.0, -840.0),
    ]
    assert [seen.name for seen in back.on(V6, 10.0)] == ["v6.test."]


def test_what_is_seen_again_keeps_its_first_time(tmp_path: Path) -> None:
    """Across the restart; and it is this process's from then on."""
    save(tmp_path / "history", noted("a.test."))
    back = load(tmp_path / "history", 500.0)
    back.note("a.test.", A, 3, ("a.test.",), 660.0, 600.0)
    (seen,) = back.on(A, 600.0)
    assert (seen.first_at, seen.last_at, seen.endpoint) == (100.0, 600.0, 3)


def test_what_is_older_than_a_day_is_dropped(tmp_path: Path) -> None:
    """The machine was off for so long."""
    save(tmp_path / "history", noted("a.test.", "b.test."))
    back = load(tmp_path / "history", 0.5, zero=ZERO + 100.0 + KEPT_S)
    assert names(back, 0.5) == ["b.test."]
    assert len(back) == 1


def test_the_bound_holds_for_what_comes_back(tmp_path: Path) -> None:
    """It was larger in the configuration of before: the ones not seen for longest go."""
    save(tmp_path / "history", noted("a.test.", "b.test.", "c.test."))
    assert names(load(tmp_path / "history", 200.0, entries_max=2), 200.0) == ["c.test.", "b.test."]


def test_a_wall_clock_that_was_wrong(tmp_path: Path) -> None:
    """What seems to be seen in the future was seen by now, and is forgotten a day from now like everything else."""
    save(tmp_path / "history", noted("a.test."), zero=ZERO + 30 * DAY)
    back = load(tmp_path / "history", 50.0)
    assert [seen.last_at for seen in back.on(A, 50.0)] == [50.0]
    assert names(back, 51.0 + KEPT_S) == []


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Octets of the wire, as names spell them, and whatever JSON escapes."""
    odd = ('\\"\\;.test.', "\\000.test.", "é.test.")
    save(tmp_path / "history", noted(*odd))
    assert set(names(load(tmp_path / "history", 200.0), 200.0)) == set(odd)


# --- files that are not as they should be ------------------------------------------------------------------------------------


def test_a_torn_file_loses_its_last_line(tmp_path: Path) -> None:
    """Cut at every byte: some of the entries, never half a one, and never a refusal."""
    path = tmp_path / "history"
    save(path, noted("a.test.", "b.test."))
    whole = path.read_bytes()
    found = set()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found.add(tuple(names(load(path, 200.0), 200.0)))
    assert found == {(), ("a.test.",), ("b.test.", "a.test.")}
    path.write_bytes(whole[:-5])
    save(path, noted("c.test."))
    assert names(load(path, 200.0), 200.0) == ["c.test."]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nameserver 192.0.2.53\n", "not a history of namegate: move it away"),
        ('{"journal": "namegate", "version": 1, "boot": "x", "maps": 1}\n', "not a history of namegate: move it away"),
        ('{"history": "namegate", "version": 2}\n["future"]\n', "newer namegate"),
        ('{"history": "namegate", "version": 1}\n["a.test.", "c633", 1, 2, 3]\n', "history:2: an entry that is none"),
        ('{"history": "namegate", "version": 1}\n["a.test."]\n', "history:2: an entry that is none"),
        ('{"history": "namegate", "version": 1}\n7\n', "history:2: an entry that is none"),
    ],
)
def test_what_is_not_ours_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, sentence: str) -> None:
    """One sentence, nothing read, nothing written, and the history goes on in memory."""
    path = tmp_path / "history"
    path.write_text(text)

    async def run() -> NameHistory:
        history = NameHistory(10)
        file = HistoryFile(path, history, zero=lambda: ZERO)
        file.load(100.0)
        file.start()
        history.note("a.test.", A, 1, ("a.test.",), 160.0, 100.0)
        await file.stop()
        return history

    assert names(asyncio.run(run()), 100.0) == ["a.test."]
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]
    assert [sentence in record.message for record in caplog.records] == [True]


def test_no_file_and_no_directory_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start makes both, for nobody else to read."""
    path = tmp_path / "lib" / "namegate" / "history"
    assert len(load(path, 100.0)) == 0
    save(path, noted("a.test."))
    assert names(load(path, 200.0), 200.0) == ["a.test."]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not caplog.records


@pytest.mark.parametrize("parent", ["/proc/namegate", "a-file"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture, parent: str) -> None:
    """One sentence however often it is tried, and nothing else."""
    (tmp_path / "a-file").write_text("")

    async def run() -> None:
        history = NameHistory(10)
        file = HistoryFile(tmp_path / parent / "history", history, every_s=0.01, zero=lambda: ZERO)
        file.load(100.0)
        file.start()
        history.note("a.test.", A, 1, ("a.test.",), 160.0, 100.0)
        await _until(lambda: bool(caplog.records))
        await asyncio.sleep(0.05)
        await file.stop()

    asyncio.run(run())
    assert len(caplog.records) == 1


def test_a_save_that_fails_leaves_the_file_of_before(tmp_path: Path) -> None:
    """Nothing is taken away until the new one is whole."""
    save(tmp_path / "history", noted("a.test."))
    (tmp_path / "history.new").mkdir()
    save(tmp_path / "history", noted("b.test."))
    assert names(load(tmp_path / "history", 200.0), 200.0) == ["a.test."]


# --- when --------------------------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_leaves_what_it_saved_from_time_to_time(tmp_path: Path) -> None:
    """Without a stop; and nothing is written again while nothing is new."""
    path = tmp_path / "history"

    async def run() -> None:
        history = noted("a.test.")
        file = HistoryFile(path, history, every_s=0.01, zero=lambda: ZERO)
        file.start()
        await _until(path.exists)
        assert names(load(path, 200.0), 200.0) == ["a.test."]
        path.unlink()
        await asyncio.sleep(0.05)
        assert not path.exists()
        history.note("b.test.", A, 1, ("b.test.",), 300.0, 200.0)
        await _until(path.exists)
        assert names(load(path, 200.0), 200.0) == ["b.test.", "a.test."]
        await file.stop()

    asyncio.run(run())


class Watched(NameHistory):
    """Says when each slice of it was taken."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__(100_000)
        self._tell = tell

    def entries(self) -> list[Seen]:
        tell = self._tell

        class Entries(list[Seen]):
            def __getitem__(self, place: Any) -> Any:
                tell()
                return super().__getitem__(place)

        return Entries(super().entries())


def test_others_have_their_turn_while_it_is_saved(tmp_path: Path) -> None:
    """Between any two slices of the encoding; what is noted meanwhile is in the next save."""
    turns = 0
    sliced_at: list[int] = []
    history = Watched(lambda: sliced_at.append(turns))
    for number in range(10 * SLICE_ENTRIES):
        history.note(f"n{number}.test.", number.to_bytes(4, "big"), 1, (f"n{number}.test.",), 160.0, 100.0)

    async def run() -> None:
        nonlocal turns
        file = HistoryFile(tmp_path / "history", history, zero=lambda: ZERO)
        file.start()
        ending = asyncio.get_running_loop().create_task(file.stop())
        while not ending.done():
            await asyncio.sleep(0)
            turns += 1
            if len(sliced_at) == 5:
                history.note("late.test.", A, 1, ("late.test.",), 160.0, 100.0)

    asyncio.run(run())
    assert len(sliced_at) == 10 + 11
    assert len(set(sliced_at)) == len(sliced_at)
    assert len((tmp_path / "history").read_text().splitlines()) == 10 * SLICE_ENTRIES + 2
    assert json.loads((tmp_path / "history").read_text().splitlines()[-1])[0] == "late.test."


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never")
