"""The compiled modules: the same code, and never that of other files."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent import compiled

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, *arguments: str, path: Path = ROOT, timeout: float = 110) -> str:
    """What a fresh interpreter prints, in which nothing of the agent is imported yet."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def current() -> None:
    if not (compiled.directory() / compiled.STAMP).is_file():
        pytest.skip("nothing is compiled: scripts/compile")
    if (compiled.directory() / compiled.STAMP).read_text() != compiled.stamp():
        pytest.skip("the sources have changed since: scripts/compile")


WHAT_IS_USED = """
    import json, sys
    from agent import compiled
    used = compiled.use()
    from agent.core import engine
    from agent.dns import wire
    print(json.dumps([used, compiled.is_in_use(), engine.__file__, wire.__file__]))
"""


@pytest.mark.usefixtures("current")
def test_the_compiled_modules_are_those_that_run() -> None:
    """Every one of them, and from where they were put."""
    used, in_use, *files = json.loads(python(WHAT_IS_USED))
    assert (used, in_use) == (True, True)
    for file in files:
        assert Path(file).is_relative_to(compiled.directory())
        assert file.endswith(".so")
    made = {path.name.partition(".")[0] for path in compiled.directory().glob("agent/*/*.so")}
    assert made == {path.stem for path in compiled.sources()}


def test_what_was_compiled_from_other_files_is_not_used(tmp_path: Path) -> None:
    """One octet more in one file: then the source runs."""
    shutil.copytree(ROOT / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "agent" / "core" / "engine.py").open("a") as source:
        source.write("\n")
    used, in_use, *files = json.loads(python(WHAT_IS_USED, path=tmp_path))
    assert (used, in_use) == (False, False)
    assert files == [str(tmp_path / "agent" / "core" / "engine.py"), str(tmp_path / "agent" / "dns" / "wire.py")]


def test_no_generator_expression_is_put_by() -> None:
    """mypyc works one out at once, where it stands: what is to go on later, a slice at a time, is a function with `yield`."""
    for path in compiled.sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("append"):
                kept = [argument for argument in node.args if isinstance(argument, ast.GeneratorExp)]
                assert not kept, f"{path.name}:{node.lineno}"


def test_who_has_imported_a_module_keeps_the_source() -> None:
    """Two of one class would be worse than a slow one."""
    assert python("import agent.core.types; from agent import compiled; print(compiled.use())").strip() == "False"


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    "tests",
    ["tests/sim/test_gate.py", "tests/sim/test_simulation.py", "tests/unit/test_wire.py", "tests/unit/test_upstreams.py"],
)
@pytest.mark.timeout(120)
def test_the_promises_hold_for_the_compiled_modules(tests: str) -> None:
    """The simulation, the walker's and the upstreams' tests, with what runs in production."""
    code = """
        import sys
        from agent import compiled
        assert compiled.use()
        import pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-x", "-m", "not root", *sys.argv[1:]]))
    """
    python(code, tests)
