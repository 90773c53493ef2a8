"""Where podman reads OCI hooks. A hook that it does not read polices nothing, and nobody would hear of it.

Rule 1: podman itself is asked. Its configuration is a dozen files with an order of their own (containers.conf(5)), and its
built-in default is not the directory that its manual page names; the default of its own option `--hooks-dir`, as `--help` shows
it, is what all of them come to. Asking takes 50 ms, and touches no container.
Rule 2: of several directories ours is the first outside /usr: what is below is the distribution's. podman takes files of one
name from the last of them.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

HOOK_FILE: Final = "namegate.json"

# Of podman, and of whoever follows its manual page. With an empty `hooks_dir` podman reads both.
DISTRIBUTION: Final = Path("/usr/share/containers/oci/hooks.d")
ADMINISTRATOR: Final = Path("/etc/containers/oci/hooks.d")

_OPTION: Final = re.compile(r"^\s*--hooks-dir\b[^\n]*", re.MULTILINE)
_DEFAULT: Final = re.compile(r"\(default \[([^\]]*)\]\)")
_PATIENCE_S: Final = 10.0


class Unknown(Exception):
    """podman is not there, or does not say; the text says which."""


def directories_read() -> tuple[Path, ...]:
    """Those that podman reads on this host when nobody tells it others; the later count more. Raises Unknown."""
    # The caller's own CONTAINERS_CONF is not what the containers of this host are started with.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CONTAINERS_CONF")}
    try:
        done = subprocess.run(
            ("podman", "--help"), capture_output=True, text=True, check=False, timeout=_PATIENCE_S, env=environment
        )
    except FileNotFoundError:
        raise Unknown("podman is not installed here") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unknown(f"podman cannot be asked where it reads hooks: {error}") from None
    found = said_by(done.stdout)
    if found is None:
        why = done.stderr.strip() or "its help does not name --hooks-dir"
        raise Unknown(f"podman does not say where it reads hooks: {why}")
    return found


def said_by(text: str) -> tuple[Path, ...] | None:
    """The directories that this text of `podman --help` names; None where it has no such option."""
    option = _OPTION.search(text)
    if option is None:
        return None
    default = _DEFAULT.search(option[0])
    return tuple(map(Path, default[1].split(","))) if default and default[1] else (DISTRIBUTION, ADMINISTRATOR)


def to_write(read: tuple[Path, ...]) -> Path:
    return next((each for each in read if not each.is_relative_to("/usr")), read[0])


def installed(directories: Iterable[Path]) -> list[Path]:
    """Our files there."""
    return [file for file in (directory / HOOK_FILE for directory in directories) if file.is_file()]


def known(read: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Where one of our files may be: where podman reads, or is thought to."""
    return tuple(dict.fromkeys((*read, DISTRIBUTION, ADMINISTRATOR)))
