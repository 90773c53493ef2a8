"""Bytecode from the cache or from BCC: what decides, and what is said when something lacks. No kernel needed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from agent.datapath import loader
from agent.datapath.errors import DatapathError

_DOCUMENT = json.dumps(
    {
        "maps": {"flows": [9, 44, 40, 16, 0]},
        "programs": {"gate": {"instructions": "AAAA", "maps": [[0, "flows"]], "digest": "0a"}},
    }
)


def _cached(cache: Path, defines: dict[str, int]) -> Path:
    file = cache / "bytecode" / f"{loader._key(loader.source_directory(), defines)}.json"
    file.parent.mkdir(mode=0o755)
    file.parent.chmod(0o755)
    file.write_text(_DOCUMENT, encoding="ascii")
    file.chmod(0o644)
    return file


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Compiling is refused, and noted."""
    started: list[object] = []

    def refuse(*arguments: object) -> str:
        started.append(arguments)
        raise DatapathError(1, "compiled")

    monkeypatch.setattr(loader, "_compile", refuse)
    return started


def test_cached(tmp_path: Path, no_child: list[object]) -> None:
    """What was compiled before is taken as it is, without a child."""
    _cached(tmp_path, {"FLOWS_MAX": 16})
    code = loader.bytecode({"FLOWS_MAX": 16}, tmp_path)
    assert code.shapes_by_map["flows"] == (9, 44, 40, 16, 0)
    assert code.code_by_program["gate"] == (b"\0\0\0", ((0, "flows"),), "0a")
    assert not no_child


def test_other_constant(tmp_path: Path, no_child: list[object]) -> None:
    """Another constant is another program."""
    _cached(tmp_path, {"FLOWS_MAX": 16})
    with pytest.raises(DatapathError, match="compiled"):
        loader.bytecode({"FLOWS_MAX": 17}, tmp_path)
    assert len(no_child) == 1


@pytest.mark.parametrize("is_directory", [False, True])
def test_anybody_may_write(tmp_path: Path, no_child: list[object], is_directory: bool) -> None:
    """Code that anybody could have put there is not loaded into the kernel, but compiled anew."""
    file = _cached(tmp_path, {})
    (file.parent if is_directory else file).chmod(0o777)
    with pytest.raises(DatapathError, match="compiled"):
        loader.bytecode({}, tmp_path)
    assert len(no_child) == 1


def test_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernel headers the sentence names their package; with a merged tree in the cache that one is used."""
    monkeypatch.setattr(platform, "release", lambda: "0.0-none")
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    if Path("/sys/kernel/kheaders.tar.xz").exists():
        pytest.skip("this kernel carries its headers")
    with pytest.raises(DatapathError, match=r"install linux-headers-0\.0-none"):
        loader.kernel_headers(tmp_path)
    (tmp_path / "headers" / "include").mkdir(parents=True)
    assert loader.kernel_headers(tmp_path) == tmp_path / "headers"
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/elsewhere")
    assert loader.kernel_headers(tmp_path) == Path("/elsewhere")


def test_compiler_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler says first reaches the person, in one sentence."""
    said = "datapath.c:1:2: error: unknown type name 'x'\n1 error generated.\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(loader, "kernel_headers", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(DatapathError, match="unknown type name 'x'"):
        loader._compile(loader.source_directory(), {}, tmp_path)


def test_no_bcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bcc the sentence names the package, and what a venv needs to see it."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DatapathError, match="install python3-bpfcc"):
        loader._compile(loader.source_directory(), {}, tmp_path)


def test_map_references() -> None:
    """The child's descriptors leave the code; which map each meant stays, counted in instructions."""
    load_map = bytes([0x18, 0x11, 0, 0, 9, 0, 0, 0]) + bytes(8)
    load_number = bytes([0x18, 0x01, 0, 0, 9, 0, 0, 0]) + bytes(8)
    end = bytes([0x95]) + bytes(7)
    code, references = loader._relocatable(bytearray(load_number + load_map + end), {9: "flows"})
    assert references == [(2, "flows")]
    assert code == load_number + load_map[:4] + bytes(12) + end


def test_layout(tmp_path: Path) -> None:
    """What a comment says makes no other layout; another order of fields of one size does."""
    for name in ("abi.h", "maps.h"):
        (tmp_path / name).write_bytes((loader.source_directory() / name).read_bytes())
    layout = loader.layout(tmp_path)
    assert layout == loader.layout(loader.source_directory())
    text = (tmp_path / "abi.h").read_text(encoding="ascii")
    (tmp_path / "abi.h").write_text(text.replace("/* Seen from", "/* As seen from\n *"), encoding="ascii")
    assert (tmp_path / "abi.h").read_text(encoding="ascii") != text
    assert loader.layout(tmp_path) == layout
    (tmp_path / "abi.h").write_text(
        text.replace("__u32 group;\n\t__u32 scope;", "__u32 scope;\n\t__u32 group;"), encoding="ascii"
    )
    assert loader.layout(tmp_path) != layout
