"""The journal: what is read is what was appended, and nothing that is not ours is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.records import (
    EndpointRecord,
    IdentityGone,
    IdentityRecord,
    NumbersRecord,
    PairGone,
    PairRecord,
    Record,
)
from agent.state import SLICE_RECORDS, Journal, StateError, read_journal

MAPS = 77

numbers = st.integers(0, 1 << 40)
names = st.text(min_size=1, max_size=20)
addresses = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
times = st.floats(0, 1e9)
records = st.one_of(
    st.builds(PairRecord, numbers, names, addresses, times, times),
    st.builds(PairGone, numbers, names, addresses),
    st.builds(IdentityRecord, numbers, st.lists(names, max_size=4).map(tuple)),
    st.builds(IdentityGone, numbers),
    st.builds(EndpointRecord, numbers, names, numbers),
    st.builds(NumbersRecord, numbers, numbers, numbers, numbers),
)


def pair(number: int) -> PairRecord:
    return PairRecord(1, f"n{number}.test.", number.to_bytes(4, "big"), 60.0, 60.5)


def written(path: Path, *batches: list[Record], maps: int = MAPS) -> Journal:
    journal = Journal(path, maps)
    for batch in batches:
        journal.append(batch)
    return journal


@given(batches=st.lists(st.lists(records, max_size=5), max_size=5))
def test_what_was_appended_is_read(batches: list[list[Record]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every kind of record, whatever the names are."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    written(path, *batches).close()
    assert read_journal(path, MAPS) == tuple(record for batch in batches for record in batch)


def test_a_process_that_is_killed_leaves_what_it_appended(tmp_path: Path) -> None:
    """Nothing is held back in the process: the file has it before `append` returns."""
    journal = written(tmp_path / "journal", [pair(1)])
    assert read_journal(tmp_path / "journal", MAPS) == (pair(1),)
    journal.close()


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    """The file cut at every byte: a prefix of the records, never an error, never half a record."""
    path = tmp_path / "journal"
    all_records: list[Record] = [pair(1), PairGone(1, "n1.test.", b"\0\0\0\1"), IdentityRecord(1 << 24, ("fqdn:a.test.",))]
    written(path, all_records).close()
    whole = path.read_bytes()
    found: tuple[Record, ...] | None = None
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = read_journal(path, MAPS)
        assert found is None or list(found) == all_records[: len(found)]
    assert found == tuple(all_records)


def test_a_journal_of_other_maps_or_another_boot_says_nothing(tmp_path: Path) -> None:
    """Its numbers mean nothing in other maps, and maps do not survive the machine."""
    path = tmp_path / "journal"
    written(path, [pair(1)]).close()
    assert read_journal(path, MAPS + 1) is None
    assert read_journal(path, None) is None
    lines = path.read_text().splitlines(keepends=True)
    header = json.loads(lines[0]) | {"boot": "of another day"}
    path.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    assert read_journal(path, MAPS) is None


@pytest.mark.parametrize(
    "text",
    [
        "nameserver 192.0.2.53\n",
        "no newline at all",
        "[]\n",
        '{"journal": "something else", "version": 1, "boot": "x", "maps": 1}\n',
        '{"journal": "namegate"}\n',
        "\x7fELF\n",
    ],
)
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    """A sentence that names the file and what to do."""
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(StateError, match="not a journal of namegate: move it away"):
        read_journal(path, MAPS)
    assert path.read_text() == text


def test_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Its records may mean what we do not know."""
    path = tmp_path / "journal"
    text = '{"journal": "namegate", "version": 2, "boot": "x", "maps": 1}\n["future"]\n'
    path.write_text(text)
    with pytest.raises(StateError, match="newer namegate"):
        read_journal(path, MAPS)
    assert path.read_text() == text


def test_a_broken_record_in_the_middle_is_named(tmp_path: Path) -> None:
    """Not torn but wrong: file and line, and what to do."""
    path = tmp_path / "journal"
    written(path, [pair(1), pair(2)]).close()
    lines = path.read_text().splitlines(keepends=True)
    for broken in ("{\n", '["pair", 1]\n', '["unheard of", 1]\n', '["pair", 1, "n", "0102", 1, 1]\n', "7\n"):
        path.write_text(lines[0] + broken + lines[2])
        with pytest.raises(StateError, match=r"journal:2: "):
            read_journal(path, MAPS)


def test_compaction_loses_nothing_that_is_appended_meanwhile(tmp_path: Path) -> None:
    """In slices: until the new file has taken the old one's place a reader finds the old one, with everything in it."""
    path = tmp_path / "journal"
    journal = written(path, [pair(number) for number in range(10)])
    live = [pair(number) for number in range(SLICE_RECORDS * 2 + 1)]
    journal.compact(live)
    slices = 0
    while journal.is_compacting:
        late = PairGone(1, f"late{slices}", b"\0\0\0\0")
        journal.append([late])
        found = read_journal(path, MAPS)
        assert found is not None
        assert found[-1] == late
        journal.step()
        slices += 1
    assert slices >= 3
    found = read_journal(path, MAPS)
    assert found is not None
    assert set(live) <= set(found)
    assert {f"late{number}" for number in range(1, slices)} <= {record.name for record in found if isinstance(record, PairGone)}
    assert journal.lines == 0
    journal.append([pair(1)])
    journal.close()
    assert (read_journal(path, MAPS) or ())[-1] == pair(1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_start_keeps_the_records_of_the_process_before(tmp_path: Path) -> None:
    """The new journal begins with them; a second start finds the same."""
    path = tmp_path / "journal"
    written(path, [pair(1)]).close()
    for _ in range(2):
        journal = Journal(path, MAPS, read_journal(path, MAPS) or ())
        journal.close()
    assert read_journal(path, MAPS) == (pair(1),)


def test_a_journal_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """The directory is missing."""
    with pytest.raises(StateError, match="cannot be written: No such file"):
        Journal(tmp_path / "missing" / "journal", MAPS)


def test_the_journal_is_for_root_alone(tmp_path: Path) -> None:
    """Names that were asked are nobody else's business."""
    journal = Journal(tmp_path / "journal", MAPS)
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    journal.close()


def test_a_compaction_that_finds_no_room_leaves_the_old_file_in_use(tmp_path: Path) -> None:
    """The error is told once; appending goes on, and the next compaction may succeed."""
    path = tmp_path / "journal"
    journal = written(path, [pair(1)])
    (tmp_path / "journal.new").mkdir()
    journal.compact([pair(1)])
    with pytest.raises(OSError, match="Is a directory"):
        journal.step()
    journal.append([pair(2)])
    (tmp_path / "journal.new").rmdir()
    journal.compact([pair(3)])
    while journal.is_compacting:
        journal.step()
    journal.append([pair(4)])
    journal.close()
    assert read_journal(path, MAPS) == (pair(3), pair(4))
