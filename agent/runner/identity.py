"""Who COMMAND is: the user who called for root, not root; his groups, his environment as it was before.

sudo(8) says SUDO_UID and SUDO_GID, doas(1) DOAS_USER, pkexec(1) PKEXEC_UID. The caller is root, so that what they say needs no
doubt: somebody who may be root may be anybody.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent.runner import CannotRun

_OF_THE_WAY_HERE = re.compile(r"SUDO_.*|DOAS_USER|PKEXEC_UID|NAMEGATE_.*")


@dataclass(frozen=True, slots=True)
class Identity:
    """name: empty where the user has no entry in the user database. is_changed: another one than the runner's own."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str
    is_changed: bool

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Without what says how we were called; with what sudo and its like have changed put back."""
        kept = {name: value for name, value in inherited.items() if not _OF_THE_WAY_HERE.fullmatch(name)}
        if self.is_changed and self.name:
            kept |= {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}
            if "MAIL" in kept:
                kept["MAIL"] = f"/var/mail/{self.name}"
        return kept


def identity(user: str | None, environment: Mapping[str, str]) -> Identity:
    """user: by name or number, before everything else. Raises CannotRun."""
    if user is not None:
        return _of(_entry(user))
    if (uid := environment.get("SUDO_UID", "")).isdecimal():
        gid = environment.get("SUDO_GID", "")
        return _of_uid(int(uid), int(gid) if gid.isdecimal() else None)
    if name := environment.get("DOAS_USER"):
        return _of(_entry(name))
    if (uid := environment.get("PKEXEC_UID", "")).isdecimal():
        return _of_uid(int(uid), None)
    return Identity("", os.getuid(), os.getgid(), tuple(os.getgroups()), "", "", is_changed=False)


def _entry(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except KeyError:
        raise CannotRun(f"there is no user `{user}`: `getent passwd` lists them") from None


def _of_uid(uid: int, gid: int | None) -> Identity:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        group = uid if gid is None else gid
        return Identity("", uid, group, (group,), "", "", is_changed=True)
    return _of(entry, gid)


def _of(entry: pwd.struct_passwd, gid: int | None = None) -> Identity:
    """gid: sudo's, where it is another one than the user's first (newgrp(1))."""
    group = entry.pw_gid if gid is None else gid
    groups = tuple(os.getgrouplist(entry.pw_name, group))
    return Identity(entry.pw_name, entry.pw_uid, group, groups, entry.pw_dir, entry.pw_shell or "/bin/sh", is_changed=True)
