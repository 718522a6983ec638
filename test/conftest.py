"""Shared by all tests: paths, hypothesis without wall-time limits (the machine is shared), and idle checks that raise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from sglang_ssd.bridge.environment import use_cpu_engine

# Of every server that a test starts as well.
os.environ["SGLANG_SSD_STRICT_IDLE_CHECK"] = "1"
# Before a test imports SGLang, in whatever order the files come.
use_cpu_engine()
sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
