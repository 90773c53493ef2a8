"""The same code, compiled: the core and the DNS path as machine code, made from these very files by mypyc (scripts/compile).

Python's own evaluation is most of what a question costs. The files are typed throughout, and from that mypyc makes an extension
module for each that does the same in less than half of the time.

Rule 1: what was compiled from other files than these is not used: the stamp says from which.
Rule 2: only the agent asks for it. Whoever imports a module without asking, as most tests do, gets its source.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Final

PACKAGES: Final = ("core", "dns")
STAMP: Final = "stamp"

_ROOT: Final = Path(__file__).parent


def directory() -> Path:
    """Where it is kept: in the venv, so that it goes with it."""
    return Path(sys.prefix, "namegate-compiled")


def sources() -> list[Path]:
    """The files that are compiled. Packages' own are empty."""
    return sorted(path for package in PACKAGES for path in (_ROOT / package).glob("*.py") if path.name != "__init__.py")


def stamp() -> str:
    """Of the sources and the interpreter they are compiled for."""
    digest = hashlib.sha256(str(sys.implementation.cache_tag).encode())
    for path in sources():
        octets = path.read_bytes()
        digest.update(f"\0{path.relative_to(_ROOT)}\0{len(octets)}\0".encode() + octets)
    return digest.hexdigest()


def is_in_use() -> bool:
    return str(directory()) in sys.path


def use() -> bool:
    """Import compiled modules from now on, if there are any of these sources; says whether it is so."""
    made = directory()
    if any(name.startswith(tuple(f"agent.{package}." for package in PACKAGES)) for name in sys.modules):
        return False  # too late
    try:
        is_current = (made / STAMP).read_text(encoding="ascii") == stamp()
    except OSError:
        return False
    if is_current:
        sys.path.append(str(made))  # for the module that all the others are parts of
        for package in PACKAGES:
            importlib.import_module(f"agent.{package}").__path__.insert(0, str(made / "agent" / package))
    return is_current
