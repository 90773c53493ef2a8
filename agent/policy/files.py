"""Policy files to policies: which form a file has, and all its mistakes at once.

A file is YAML if its first line that is no comment begins a mapping or a list of YAML; a line of the shorthand never does. A
file is taken whole or not at all, and `read_policies` takes all of its files or none.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from agent.core.rules import Policy
from agent.documents import yaml_tree
from agent.documents.fields import Field
from agent.documents.remarks import Caution, Mistake, PolicyError, Remarks
from agent.policy.cnp import read_document
from agent.policy.shorthand import read_list

__all__ = ["FILE_OCTETS_MAX", "PolicyError", "Reading", "read_files", "read_policies", "read_policy_text"]

# Ten thousand names are less than 1 MiB of YAML.
FILE_OCTETS_MAX = 8 << 20

# `key:`, `- item`, `---`, `%YAML`, or JSON, whose documents are YAML.
_YAML_BEGINS = re.compile(r"""["']?[A-Za-z]+["']?\s*:(?:\s|$)|-\s|-$|---|%|\{""")


class Reading(NamedTuple):
    """What was read. With mistakes, the policies are those of the files that have none."""

    policies: tuple[Policy, ...]
    mistakes: tuple[Mistake, ...]
    cautions: tuple[Caution, ...]


def read_policies(paths: Iterable[str | PathLike[str]]) -> tuple[Policy, ...]:
    """The policies of all files; raises `PolicyError` with every mistake of every file."""
    reading = read_files(paths)
    if reading.mistakes:
        raise PolicyError(reading.mistakes)
    return reading.policies


def read_files(paths: Iterable[str | PathLike[str]]) -> Reading:
    readings = [_read_file(os.fspath(path)) for path in paths]
    return Reading(
        tuple(policy for reading in readings for policy in reading.policies),
        tuple(mistake for reading in readings for mistake in reading.mistakes),
        tuple(caution for reading in readings for caution in reading.cautions),
    )


def _read_file(path: str) -> Reading:
    try:
        data = _octets(path)
    except OSError as error:
        return _refused(path, f"cannot be read: {error.strerror or error}")
    except ValueError as error:
        return _refused(path, str(error))
    return read_policy_text(path, data)


def _octets(path: str) -> bytes:
    """Of a plain file of bounded size: a device, a pipe or a gigabyte in the place of a policy must not stop the agent."""
    # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("this is no plain file; name the files themselves")
        data = file.read(FILE_OCTETS_MAX + 1)
    if len(data) > FILE_OCTETS_MAX:
        raise ValueError(f"the file has more than {FILE_OCTETS_MAX >> 20} MiB; split it")
    return data


def _refused(file: str, message: str, line: int = 1) -> Reading:
    return Reading((), (Mistake(file, line, "", message),), ())


def read_policy_text(file: str, data: bytes) -> Reading:
    """The policies of one file's content. file: its name, for people only."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        return _refused(file, "this is no UTF-8 text; save the file as UTF-8", data.count(b"\n", 0, error.start) + 1)
    line = yaml_tree.line_of_unprintable(text)
    if line is not None:
        return _refused(file, "there is a control character in this line, which no policy has; take it out", line)
    begin = next((content for row in text.split("\n") if (content := row.strip()) and not content.startswith("#")), None)
    if begin is None:
        return _refused(file, "there is no policy in the file; write one, or a line such as api.example.com:443")
    remarks = Remarks(file)
    is_yaml = _YAML_BEGINS.match(begin) is not None
    policies = _read_yaml(text, remarks) if is_yaml else [read_list(text, remarks, Path(file).name)]
    # In the order of the lines, which is how a person mends a file.
    remarks.mistakes.sort(key=lambda mistake: mistake.line)
    remarks.cautions.sort(key=lambda caution: caution.line)
    return Reading(() if remarks.mistakes else tuple(policies), tuple(remarks.mistakes), tuple(remarks.cautions))


def _read_yaml(text: str, remarks: Remarks) -> list[Policy]:
    try:
        documents = yaml_tree.read_documents(text)
    except yaml_tree.YamlError as error:
        remarks.mistake(error.line, "", error.message)
        return []
    policies: list[Policy] = []
    for document in documents:
        if isinstance(document, yaml_tree.Sequence):
            remarks.mistake(
                document.line, "", "a policy is a mapping, not a list; a list of names has no '- ' in front of them"
            )
        else:
            policies += read_document(Field(document, document.line, "", remarks))
    if not documents or (not policies and not remarks.mistakes):
        remarks.mistake(1, "", "there is no policy in the file; write one, or a line such as api.example.com:443")
    return policies
