"""The journal: records appended before the kernel is written, read again at the next start.

    line 1     {"journal": "namegate", "version": 1, "boot": BOOT ID, "maps": ID OF THE POLICY MAP}
    line 2 …   ["pair", scope, name, address in hex, lives until, kept until], ["gone", …], ["identity", …], …

Rule 1: appended with write(2), one call for each batch of records, and not synced: journal and pinned maps have the same
life, both survive the process and neither survives the machine.
Rule 2: it belongs to one boot and one set of maps. Of another boot, or of maps that are gone, it says nothing and is begun
anew.
Rule 3: a torn last line is dropped; a file that is not ours, or of a newer version, is refused and left as it is.
Rule 4: compacted into a new file that takes the old one's place by rename(2); until then every record goes into both.
"""

from __future__ import annotations

import contextlib
import json
import json.encoder
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.core.records import EndpointRecord, IdentityGone, IdentityRecord, NumbersRecord, PairGone, PairRecord, Record

VERSION: Final = 1
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# About 2 ms of encoding: between two slices of a compaction the loop looks at its sockets.
SLICE_RECORDS: Final = 500


class StateError(Exception):
    """The journal is not ours to read or write; the sentence says what to do."""


class _Header(NamedTuple):
    boot: str
    maps: int


def read_journal(path: Path, maps: int | None) -> tuple[Record, ...] | None:
    """The records of the process before, in their order; None where there are none for these maps and this boot.

    maps: the kernel's id of the policy map that would be taken over, None if there is none. Raises StateError.
    """
    text = read_text(path)
    header = header_of(path, text, "journal", VERSION) if text is not None else None
    if text is None or header is None or maps is None:
        return None
    try:
        is_ours = _Header(str(header["boot"]), int(header["maps"])) == _Header(_boot(), maps)
    except (ValueError, TypeError, KeyError):
        raise _foreign(path, "journal") from None
    return tuple(_records(path, text)) if is_ours else None


def _boot() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()


class Journal:
    """The journal of this process, open for appending; it begins with the records of the process before, if they still count.

    maps: the kernel's id of the policy map. Raises StateError.
    """

    def __init__(self, path: Path, maps: int, records: Iterable[Record] = ()) -> None:
        self.path = path
        self.lines = 0  # written since the last compaction
        self._header = _Header(_boot(), maps)
        self._compacting: Iterator[None] | None = None
        self._fds: list[int] = []
        try:
            self._begin(new_file(path), records)
            self._replace()
        except OSError as error:
            raise StateError(f"{path} cannot be written: {error.strerror}") from None

    def append(self, records: Iterable[Record]) -> None:
        """One write for all of them. OSError when the file system is full: nothing may be written to the kernel then."""
        lines = [_line(record) for record in records]
        octets = "".join(lines).encode()
        for fd in self._fds:
            write_all(fd, octets)
        self.lines += len(lines)

    def compact(self, live: Iterable[Record]) -> None:
        """Begin a new file with what is live; `step` goes on with it."""
        if self._compacting is None:
            self._compacting = self._compact(iter(live))

    @property
    def is_compacting(self) -> bool:
        return self._compacting is not None

    def step(self) -> None:
        """One slice of the compaction under way, if there is one."""
        if self._compacting is not None:
            try:
                next(self._compacting)
            except StopIteration:
                self._compacting = None
            except OSError:
                self._give_compacting_up()
                raise

    def _give_compacting_up(self) -> None:
        self._compacting = None
        while len(self._fds) > 1:
            os.close(self._fds.pop())
        with contextlib.suppress(OSError):
            new_file(self.path).unlink()

    def abandon(self) -> None:
        """It lacks what could not be written: away with it."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        with contextlib.suppress(FileNotFoundError):
            new_file(self.path).unlink()

    # -----------------------------------------------------------------------------------------------------------------

    def _begin(self, path: Path, records: Iterable[Record]) -> None:
        """A new file beside the old one: header, then records."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._fds.append(fd)
        header = {"journal": "namegate", "version": VERSION, "boot": self._header.boot, "maps": self._header.maps}
        write_all(fd, (json.dumps(header) + "\n").encode())
        write_all(fd, "".join(map(_line, records)).encode())

    def _replace(self) -> None:
        """The new file is complete: it is the journal now."""
        new_file(self.path).rename(self.path)
        for fd in self._fds[:-1]:
            os.close(fd)
        del self._fds[:-1]
        self.lines = 0

    def _compact(self, live: Iterator[Record]) -> Iterator[None]:
        self._begin(new_file(self.path), ())
        slice_of_lines: list[str] = []
        for record in live:
            slice_of_lines.append(_line(record))
            if len(slice_of_lines) == SLICE_RECORDS:
                write_all(self._fds[-1], "".join(slice_of_lines).encode())
                slice_of_lines.clear()
                yield
        write_all(self._fds[-1], "".join(slice_of_lines).encode())
        self._replace()


def new_file(path: Path) -> Path:
    """Where the next file is written until it takes this one's place."""
    return path.with_name(path.name + ".new")


def read_text(path: Path) -> str | None:
    """None where there is no such file. Raises StateError."""
    try:
        octets = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
    return octets.decode("utf-8", errors="replace")


def header_of(path: Path, text: str, kind: str, version: int) -> dict[str, Any] | None:
    """The first line of a file of this kind, of this version or an older one.

    None for a header that was torn, which is one line of ours cut short; StateError for what we did not write.
    """
    line, newline, _ = text.partition("\n")
    if not newline:
        start = f'{{"{kind}": "namegate"'
        if start.startswith(line[: len(start)]):
            return None
        raise _foreign(path, kind)
    try:
        header: dict[str, Any] = json.loads(line)
        if header[kind] != "namegate":
            raise ValueError
        if header["version"] > version:
            raise StateError(f"{path} was written by a newer namegate: run that one, or move the file away")
    except (ValueError, TypeError, KeyError):
        raise _foreign(path, kind) from None
    return header


def _foreign(path: Path, kind: str) -> StateError:
    return StateError(f"{path} is not a {kind} of namegate: move it away")


def _records(path: Path, text: str) -> Iterator[Record]:
    """Every record of the file, but for a last line that was cut short."""
    lines = text.split("\n")
    for number, line in enumerate(lines[1:-1], 2):
        try:
            yield _record(json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError):
            sentence = f"{path}:{number}: a record that is none: move the file away, and names are learned anew"
            raise StateError(sentence) from None


_quoted: Final[Callable[[str], str]] = json.encoder.encode_basestring_ascii


def _line(record: Record) -> str:
    kind: list[Any]
    match record:
        case PairRecord(scope, name, address, lives_until, kept_until):
            # By hand what json.dumps says: nearly every line is of this kind, and there is one for each answer that is new.
            return f'["pair", {scope}, {_quoted(name)}, "{address.hex()}", {lives_until!r}, {kept_until!r}]\n'
        case PairGone():
            kind = ["gone", record.scope, record.name, record.address.hex()]
        case IdentityRecord():
            kind = ["identity", record.identity, *record.labels]
        case IdentityGone():
            kind = ["released", record.identity]
        case NumbersRecord():
            kind = ["numbers", *record]
        case EndpointRecord():
            kind = ["endpoint", record.endpoint, record.interface, record.ifindex]
    return json.dumps(kind, ensure_ascii=True) + "\n"


def _record(line: list[Any]) -> Record:
    kind, *values = line
    if kind == "pair":
        scope, name, address, lives_until, kept_until = values
        return PairRecord(int(scope), str(name), address_of(address), float(lives_until), float(kept_until))
    if kind == "gone":
        scope, name, address = values
        return PairGone(int(scope), str(name), address_of(address))
    if kind == "identity":
        return IdentityRecord(int(values[0]), tuple(map(str, values[1:])))
    if kind == "released":
        (identity,) = values
        return IdentityGone(int(identity))
    if kind == "numbers":
        identity, policy_set, group, cookie = map(int, values)
        return NumbersRecord(identity, policy_set, group, cookie)
    if kind == "endpoint":
        endpoint, interface, ifindex = values
        return EndpointRecord(int(endpoint), str(interface), int(ifindex))
    raise ValueError(kind)


def address_of(text: str) -> bytes:
    """Raises ValueError."""
    address = bytes.fromhex(text)
    if len(address) not in (4, 16):
        raise ValueError(text)
    return address


def write_all(fd: int, octets: bytes) -> None:
    """A short write is a file system that is getting full: the rest is tried, and then says why."""
    while octets:
        octets = octets[os.write(fd, octets) :]
