"""``benchmark/device_check.py`` without a device: all of its checks run, with tiny shapes in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "device_check.py"


def test_dry_run(tmp_path):
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--json", path],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["dry_run"]
    assert len(report["checks"]) == 9
    assert all(outcome["ok"] for outcome in report["checks"].values())
