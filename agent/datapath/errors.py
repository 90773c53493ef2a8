"""The kernel said no, or the host lacks something."""

from __future__ import annotations

import errno as numbers


class DatapathError(Exception):
    """errno: the kernel's number, or the nearest one that says the same; sentence: what is wrong and what to do about it."""

    def __init__(self, errno: int, sentence: str) -> None:
        super().__init__(sentence)
        self.errno = errno
        self.sentence = sentence


def refused(what: str, problem: OSError) -> DatapathError:
    """The kernel refused `what` (a verb phrase: "make the map flows")."""
    errno = problem.errno or numbers.EIO
    name = numbers.errorcode.get(errno, str(errno))
    if errno in {numbers.EPERM, numbers.EACCES}:
        return DatapathError(errno, f"cannot {what}: {name}; the agent needs root, or CAP_BPF and CAP_NET_ADMIN")
    if errno in {numbers.ENOMEM, numbers.ENOSPC}:
        return DatapathError(errno, f"cannot {what}: {name}; the kernel has no memory for it, choose smaller tables")
    return DatapathError(errno, f"cannot {what}: {name} ({problem.strerror or 'no reason given'})")
