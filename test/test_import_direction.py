"""Imports go one way: algorithm, wire <- bridge <- draft, verifier <- plugin <- launchers.

Only bridge imports sglang. Read from the syntax tree: imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "sglang_ssd"
PACKAGE_DIR = Path(__file__).parent.parent / "python" / PACKAGE

# What each part may import of ours, beside itself; modules that are not named here are launchers.
LAUNCHERS = "launchers"
MAY_IMPORT: dict[str, set[str]] = {
    "algorithm": set(),
    "wire": set(),
    "bridge": {"algorithm", "wire"},
    "draft": {"algorithm", "wire", "bridge"},
    "verifier": {"algorithm", "wire", "bridge"},
    "plugin": {"algorithm", "wire", "bridge", "draft", "verifier"},
    LAUNCHERS: {"algorithm", "wire", "bridge", "draft", "verifier", "plugin"},
    "demo_models": set(),
    "test_pair": set(),
    "__init__": set(),
}
# Only these parts may import the outside package named.
ONLY_IN: dict[str, set[str]] = {"sglang": {"bridge"}, "sgl_kernel": {"bridge"}}
# These parts may not import the outside packages named.
NEVER_IN: dict[str, set[str]] = {
    "algorithm": {"zmq", "msgspec", "sglang_ssd_kernel"},
    "wire": {"torch", "transformers", "sglang_ssd_kernel"},
}


def part_of(module: str) -> str:
    """The part of the house that a module of ours belongs to: ``sglang_ssd.draft.server`` is in ``draft``."""
    name = module.split(".")[1] if "." in module else "__init__"
    if name.startswith("__"):  # `from sglang_ssd import __version__`
        return "__init__"
    return name if name in MAY_IMPORT else LAUNCHERS


def imported_modules(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each module that ``source`` imports, anywhere, also by a literal name."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                start = ".".join(parents[: len(parents) - level + 1]) if level else ""
                base = ".".join(filter(None, (start, base)))
                # `from package import part` imports the module package.part
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def violations(package_dir: Path) -> list[str]:
    """One line for each import that goes the wrong way in the package at ``package_dir``."""
    found = []
    for path in sorted(package_dir.rglob("*.py")):
        relative = path.relative_to(package_dir.parent).with_suffix("")
        is_package = relative.name == "__init__"
        module = ".".join(relative.parts[:-1] if is_package else relative.parts)
        part = part_of(module)
        for line, imported in imported_modules(
            path.read_text(encoding="utf-8"), module, is_package=is_package
        ):
            root = imported.split(".")[0]
            if root == PACKAGE:
                other = part_of(imported)
                wrong = other not in {"__init__", part} and other not in MAY_IMPORT[part]
            else:
                wrong = part not in ONLY_IN.get(root, {part}) or root in NEVER_IN.get(part, set())
            if wrong:
                found.append(
                    f"{path.relative_to(package_dir.parent)}:{line}: {part} may not import {imported}"
                )
    return found


def test_imports_go_one_way() -> None:
    assert violations(PACKAGE_DIR) == []


def test_every_part_is_there() -> None:
    """An empty or misnamed folder would pass the test above."""
    for part in set(MAY_IMPORT) - {LAUNCHERS}:
        assert (PACKAGE_DIR / f"{part}.py").is_file() or any((PACKAGE_DIR / part).glob("*.py")), part


def _loaded_by(part: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after importing every module of ``part``."""
    modules = [
        f"{PACKAGE}.{part}.{path.stem}"
        for path in (PACKAGE_DIR / part).glob("*.py")
        if path.stem != "__init__"
    ]
    assert modules
    code = f"import {', '.join(modules)}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_algorithm_runs_without_sglang_and_wire_without_torch() -> None:
    assert not {"sglang", "sgl_kernel", "zmq"} & _loaded_by("algorithm")
    assert not {"sglang", "sgl_kernel", "torch"} & _loaded_by("wire")


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("algorithm/theory.py", "from sglang_ssd.algorithm.outcome import Outcome", False),
        ("algorithm/theory.py", "import torch.nn.functional", False),
        ("algorithm/theory.py", "import sglang_ssd.wire.messages", True),
        ("algorithm/theory.py", "import zmq", True),
        ("algorithm/theory.py", "def f():\n    from sglang.srt import utils", True),
        ("algorithm/theory.py", "from ..bridge import memory", True),
        ("algorithm/__init__.py", "from . import theory", False),
        ("algorithm/__init__.py", "from .. import wire", True),
        ("wire/channel.py", "import zmq, msgspec", False),
        ("wire/channel.py", "def f():\n    import torch", True),
        ("bridge/worker.py", "from sglang.srt import utils", False),
        ("bridge/worker.py", "from sglang_ssd.draft.server import DraftServer", True),
        ("draft/server.py", "from sglang_ssd.bridge import memory", False),
        ("draft/server.py", "from sglang_ssd import verifier", True),
        ("draft/server.py", "import importlib\nimportlib.import_module('sglang.srt')", True),
        ("verifier/worker.py", "if TYPE_CHECKING:\n    from sglang_ssd.draft.session import Session", True),
        ("verifier/worker.py", "from sglang_ssd.plugin import register", True),
        ("verifier/worker.py", "import sglang", True),
        ("plugin.py", "import sglang_ssd.verifier.worker, sglang_ssd.draft.server", False),
        ("verifier/worker.py", "from sglang_ssd import __version__", False),
        ("plugin.py", "from sglang_ssd import launch_server", True),
        ("plugin.py", "from sglang import Engine", True),
        ("launch_server.py", "from sglang_ssd.plugin import register", False),
        ("launch_server.py", "import sglang", True),
        ("demo_models.py", "import sglang_ssd.bridge", True),
        ("__init__.py", "from sglang_ssd.launch_server import main", True),
    ],
)
def test_the_check_can_fail(tmp_path: Path, module: str, line: str, is_wrong: bool) -> None:
    path = tmp_path / PACKAGE / module
    path.parent.mkdir(parents=True)
    path.write_text(f"from __future__ import annotations\n{line}\n", encoding="utf-8")
    found = violations(tmp_path / PACKAGE)
    assert bool(found) == is_wrong, found
    if is_wrong:
        assert found[0].startswith(f"{PACKAGE}/{module}:")
