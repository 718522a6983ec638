"""``benchmark/device_check.py`` without a device: all of its checks run, with tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "device_check.py"


def test_dry_run(tmp_path):
    """And it imports nothing that the machines which it is for have not."""
    path = tmp_path / "report.json"
    absent = dict.fromkeys(("sglang", "sgl_kernel", "zmq", "msgspec", "scipy", "hypothesis"))
    program = (
        f"import runpy, sys; sys.modules.update({absent}); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, SCRIPT, "--dry-run", "--json", path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["dry_run"]
    assert len(report["checks"]) == 11
    assert all(outcome["ok"] for outcome in report["checks"].values())
