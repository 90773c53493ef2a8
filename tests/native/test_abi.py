"""C and Python agree on every byte they share."""

from __future__ import annotations

import enum
import re
import subprocess
from pathlib import Path

import pytest

from agent.core.types import Direction, Orientation, Verdict
from agent.datapath import abi, loader
from agent.datapath.abi import FlowState, Loss, Reason
from agent.datapath.model import Kind, Origin, Part

_TWINS: list[tuple[str, str, type[enum.IntEnum], str]] = [
    ("abi.h", "direction", Direction, "DIRECTION_"),
    ("abi.h", "verdict", Verdict, "VERDICT_"),
    ("abi.h", "orientation", Orientation, "ORIENTATION_"),
    ("abi.h", "flow_state", FlowState, "FLOW_"),
    ("abi.h", "reason", Reason, ""),
    ("abi.h", "loss", Loss, "LOST_"),
    ("parse.h", "kind", Kind, "KIND_"),
    ("parse.h", "part", Part, "PART_"),
    ("parse.h", "origin", Origin, "ORIGIN_"),
]


def _members(file: str, name: str) -> dict[str, int]:
    text = (loader.source_directory() / file).read_text(encoding="ascii")
    found = re.search(rf"^enum {name} {{(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert found, f"{file} has no enum {name}"
    return {member: int(number) for member, number in re.findall(r"^\s*(\w+) = (\d+),", found.group(1), re.MULTILINE)}


@pytest.mark.parametrize(("file", "name", "twin", "start"), _TWINS, ids=lambda value: value if isinstance(value, str) else "")
def test_enumeration(file: str, name: str, twin: type[enum.IntEnum], start: str) -> None:
    """Every number means the same on both sides, and they are dense."""
    members = {member: number for member, number in _members(file, name).items() if not member.endswith("_COUNT")}
    assert sorted(members.values()) == list(range(len(members)))
    expected = {start + member.name: member.value for member in twin}
    assert {member: number for member, number in members.items() if member != "VERDICT_NONE"} == expected


def test_counts() -> None:
    """The number of members stands behind the last one."""
    assert _members("abi.h", "reason")["REASON_COUNT"] == len(Reason)
    assert _members("abi.h", "loss")["LOSS_COUNT"] == len(Loss)
    assert min(reason for reason in Reason if reason.is_drop) is Reason.DROP_NO_ENDPOINT


def test_layout(tmp_path: Path) -> None:
    """Every field of every struct has its place and size, asked of a compiler."""
    lines = []
    for layout in abi.LAYOUTS:
        lines.append(f'printf("{layout.name} %zu\\n", sizeof(struct {layout.name}));')
        for field in layout.fields:
            place = f"offsetof(struct {layout.name}, {field.name})"
            size = f"sizeof(((struct {layout.name} *)0)->{field.name})"
            lines.append(f'printf("{layout.name}.{field.name} %zu %zu\\n", {place}, {size});')
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <linux/types.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        f'#include "abi.h"\nint main(void)\n{{\n{chr(10).join(lines)}\n}}\n',
        encoding="ascii",
    )
    subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", f"-I{loader.source_directory()}", "-o", str(tmp_path / "layout"), str(source)],
        check=True,
        timeout=60,
    )
    said = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True, timeout=10).stdout
    expected = []
    for layout in abi.LAYOUTS:
        expected.append(f"{layout.name} {layout.size}")
        offsets = layout.offsets()
        ends = [*list(offsets.values())[1:], layout.size]
        expected += [f"{layout.name}.{name} {at} {end - at}" for (name, at), end in zip(offsets.items(), ends, strict=True)]
    assert said.splitlines() == expected


def test_no_struct_is_left_out() -> None:
    """A struct added to abi.h needs its twin."""
    text = (loader.source_directory() / "abi.h").read_text(encoding="ascii")
    assert set(re.findall(r"^struct (\w+) {", text, re.MULTILINE)) - {"address"} == {layout.name for layout in abi.LAYOUTS}
