"""The Triton kernels in Triton's interpreter: ``interpreted_*.py``, each in a process that starts with the interpreter on.

Triton reads the switch when kernels are defined, and this process may have imported it already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_in_interpreter(path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_imports_no_triton_for_a_cpu():
    program = "import sys; from sglang_ssd_kernel import fork_attention; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
