"""From C to programs in the kernel.

BCC brings LLVM, which never gives back its 140 MiB, and takes seconds. So it runs in a child that compiles once and writes down
the bytecode with the names of the maps it refers to; the agent makes the maps and loads the programs through bpf(2), in a tenth
of a second, without bcc. This is the only file that imports bcc, and only the child gets there:

    bytecode()  sources + defines + BCC + kernel → key → file in the cache, or the child:  python -m agent.datapath.loader
    load()      bytecode → maps, programs

The file's name is the digest of everything that decides its content. It is taken only from a directory nobody else can write.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import agent
from agent.datapath import abi, syscall
from agent.datapath.errors import DatapathError, refused

PROGRAMS: Final = ("from_endpoint", "to_endpoint", "gate")
CACHE_DEFAULT: Final = Path("/var/cache/namegate")

_FORMAT: Final = 2  # of the cached file
_CFLAGS: Final = ("-O2", "-Wall", "-Werror")
_COMPILE_S_MAX: Final = 120.0  # two to four seconds on an idle machine

# Two-slot instruction that loads a map; see the kernel's Documentation/bpf/standardization/instruction-set.rst.
_LOAD_IMMEDIATE: Final = 0x18
_SOURCE_MAP_FD: Final = 1

_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class MapShape(NamedTuple):
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class Code(NamedTuple):
    """instructions: with 0 in place of file descriptors; maps: (index of the instruction, name of the map it loads); digest:
    the kernel's, of BCC's own load of it, in which descriptors do not count."""

    instructions: bytes
    maps: tuple[tuple[int, str], ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Bytecode:
    """layout: digest of the maps' declarations; equal ones mean that a row of one is a row of the other."""

    shapes_by_map: Mapping[str, MapShape]
    code_by_program: Mapping[str, Code]
    layout: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """File descriptors, which are the caller's to close."""

    fds_by_map: Mapping[str, int]
    fds_by_program: Mapping[str, int]

    def close(self) -> None:
        for fd in (*self.fds_by_map.values(), *self.fds_by_program.values()):
            os.close(fd)


def cache_directory() -> Path:
    """Where headers and bytecode are kept; NAMEGATE_CACHE names another place."""
    return Path(os.environ.get("NAMEGATE_CACHE") or CACHE_DEFAULT)


def source_directory() -> Path:
    """Of the C files: beside the package in a wheel, beside it at the top of a checkout."""
    package = Path(agent.__file__).parent
    for directory in (package / "_bpf", package.parent / "bpf"):
        if (directory / "datapath.c").is_file():
            return directory
    raise DatapathError(errno.ENOENT, f"the program's sources are missing from {package / '_bpf'}: install namegate again")


def bytecode(defines: Mapping[str, int], cache: Path | None = None) -> Bytecode:
    """The compiled program, from the cache or from BCC; raises DatapathError."""
    cache = cache or cache_directory()
    directory = source_directory()
    file = _file(cache, directory, defines)
    text = _read_trusted(file)
    if text is None:
        text = _compile(directory, defines, cache)
        _write(file, text)
    return _from_json(text, layout(directory))


def is_cached(defines: Mapping[str, int], cache: Path | None = None) -> bool:
    """Then a start needs neither BCC nor headers."""
    return _read_trusted(_file(cache or cache_directory(), source_directory(), defines)) is not None


def layout(directory: Path) -> str:
    """Digest of all that decides what a row is. What the kernel cannot compare is in it: names, places, numbers of members.

    Not in it: comments. So whoever gives a field another meaning gives it another name.
    """
    text = " ".join((directory / name).read_text(encoding="ascii") for name in ("abi.h", "maps.h"))
    return hashlib.sha256(" ".join(_COMMENT.sub(" ", text).split()).encode()).hexdigest()[:12]


def load(code: Bytecode, taken_over: Mapping[str, int] | None = None) -> Loaded:
    """Makes the maps and loads the programs; raises DatapathError, and then leaves nothing open.

    taken_over: maps that there are already, and fit. Their descriptors belong to Loaded, and are closed on failure too.
    """
    with contextlib.ExitStack() as opened:

        def keep(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        maps = {name: keep(fd) for name, fd in (taken_over or {}).items()}
        programs = {}
        for name, shape in code.shapes_by_map.items():
            if name in maps:
                continue
            key, value = abi.MAPS.get(name, (None, None))
            if key and value and (shape.key_size, shape.value_size) != (key.size, value.size):
                raise AssertionError(
                    f"map {name}: maps.h says {shape.key_size}, {shape.value_size}, abi.py {key.size}, {value.size}"
                )
            try:
                maps[name] = keep(syscall.map_create(*shape, name))
            except OSError as problem:
                raise refused(f"make the map {name} of {shape.max_entries} rows", problem) from None
        for name, (instructions, references, digest) in code.code_by_program.items():
            patched = bytearray(instructions)
            for index, map_name in references:
                struct.pack_into("=i", patched, index * 8 + 4, maps[map_name])
            try:
                programs[name] = keep(syscall.program_load(bytes(patched), name))
            except OSError as problem:
                raise refused(f"load the program {name}", problem) from None
            if syscall.program_info(programs[name]).digest != digest:
                raise DatapathError(
                    errno.EBADMSG, f"the cached program {name} is not what BCC compiled: remove the bytecode from the cache"
                )
        opened.pop_all()
    return Loaded(maps, programs)


# --- the cache -------------------------------------------------------------------------------------------------------


def _file(cache: Path, directory: Path, defines: Mapping[str, int]) -> Path:
    return cache / "bytecode" / f"{_key(directory, defines)}.json"


def _key(directory: Path, defines: Mapping[str, int]) -> str:
    digest = hashlib.sha256()
    for part in (_FORMAT, _CFLAGS, sorted(defines.items()), _bcc_version(), platform.machine(), platform.release()):
        digest.update(repr(part).encode() + b"\0")
    for file in sorted(directory.glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _bcc_version() -> str:
    """Read, not imported: bcc maps LLVM into the process. Without bcc there may still be bytecode that was shipped."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or not spec.submodule_search_locations:
        return ""
    with contextlib.suppress(OSError):
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
        if found := re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text):
            return found.group(1)
    return ""


def _read_trusted(file: Path) -> str | None:
    """Code for the kernel is not taken from a place where somebody else could have put it."""
    try:
        for path in (file.parent, file):
            status = path.stat()
            if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
                return None
        return file.read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _write(file: Path, text: str) -> None:
    """Atomically. A cache that cannot be written costs the next start a few seconds, no more."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=file.parent, delete=False) as new:
            new.write(text)
        Path(new.name).replace(file)


def _from_json(text: str, layout: str) -> Bytecode:
    document: dict[str, Any] = json.loads(text)
    return Bytecode(
        {name: MapShape(*shape) for name, shape in document["maps"].items()},
        {
            name: Code(base64.b64decode(code["instructions"]), tuple((index, of) for index, of in code["maps"]), code["digest"])
            for name, code in document["programs"].items()
        },
        layout,
    )


# --- the child -------------------------------------------------------------------------------------------------------


def kernel_headers(cache: Path) -> Path | None:
    """Where BCC is to look for kernel headers; None: where it looks by itself. Raises DatapathError when there are none."""
    release = platform.release()
    own = os.environ.get("BCC_KERNEL_SOURCE")
    if Path("/lib/modules", release, "build", "include").exists() or own:
        return Path(own) if own else None
    if (cache / "headers" / "include").is_dir():
        return cache / "headers"
    if Path("/sys/kernel/kheaders.tar.xz").exists():
        return None
    raise DatapathError(
        errno.ENOENT,
        f"there are no kernel headers: install linux-headers-{release}, or run scripts/setup, which finds near ones",
    )


def has_bcc() -> bool:
    return importlib.util.find_spec("bcc") is not None


def _compile(directory: Path, defines: Mapping[str, int], cache: Path) -> str:
    if os.geteuid() != 0:
        raise DatapathError(errno.EPERM, "compiling the kernel's program needs root: run it with sudo")
    if not has_bcc():
        raise DatapathError(
            errno.ENOENT, "python has no bcc: install python3-bpfcc, and make the venv with --system-site-packages"
        )
    environment = dict(os.environ, PYTHONPATH=str(Path(agent.__file__).parent.parent))
    headers = kernel_headers(cache)
    if headers is not None:
        environment["BCC_KERNEL_SOURCE"] = str(headers)
    order = json.dumps({"directory": str(directory), "defines": dict(defines)})
    try:
        child = subprocess.run(
            [sys.executable, "-m", "agent.datapath.loader"],
            input=order,
            capture_output=True,
            text=True,
            timeout=_COMPILE_S_MAX,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DatapathError(
            errno.ETIMEDOUT, f"BCC did not compile the program in {_COMPILE_S_MAX:.0f} s: try again when the machine has time"
        ) from None
    if child.returncode:
        said = [line for line in child.stderr.splitlines() if "error" in line.lower()] or child.stderr.splitlines()[-1:]
        raise DatapathError(errno.EINVAL, f"BCC cannot compile the program: {'; '.join(said[:3]) or 'it gave no reason'}")
    return child.stdout


def _compile_here(directory: Path, defines: Mapping[str, int]) -> str:
    """In the child: BCC makes the maps to learn their shapes; they go with the process."""
    from bcc import BPF, libbcc

    program = BPF(
        src_file=str(directory / "datapath.c").encode(),
        cflags=[*_CFLAGS, f"-I{directory}", *(f"-D{name}={value}" for name, value in sorted(defines.items()))],
    )
    library, module = libbcc.lib, program.module
    import ctypes

    library.bpf_table_name.restype = ctypes.c_char_p  # bcc leaves it at int, which cuts the pointer
    library.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong]
    shapes, names_by_fd = {}, {}
    for index in range(library.bpf_num_tables(module)):
        name, fd = library.bpf_table_name(module, index).decode(), library.bpf_table_fd_id(module, index)
        info = syscall.map_info(fd)
        shapes[name] = [info.type, info.key_size, info.value_size, info.max_entries, info.flags]
        names_by_fd[fd] = name
    programs = {}
    for name in PROGRAMS:
        code, references = _relocatable(bytearray(program.dump_func(name.encode())), names_by_fd)
        digest = syscall.program_info(program.load_func(name.encode(), BPF.SCHED_CLS).fd).digest
        programs[name] = {
            "instructions": base64.b64encode(code).decode("ascii"),
            "maps": references,
            "digest": digest,
        }
    return json.dumps({"maps": shapes, "programs": programs})


def _relocatable(code: bytearray, names_by_fd: Mapping[int, str]) -> tuple[bytes, list[tuple[int, str]]]:
    """Takes the child's file descriptors out of the code and notes whose they were."""
    references = []
    offset = 0
    while offset < len(code):
        operation, registers = code[offset], code[offset + 1]
        if operation == _LOAD_IMMEDIATE:
            if registers >> 4 == _SOURCE_MAP_FD:
                (fd,) = struct.unpack_from("=i", code, offset + 4)
                references.append((offset // 8, names_by_fd[fd]))
                struct.pack_into("=i", code, offset + 4, 0)
            offset += 8
        offset += 8
    return bytes(code), references


if __name__ == "__main__":
    _order = json.load(sys.stdin)
    sys.stdout.write(_compile_here(Path(_order["directory"]), _order["defines"]))
