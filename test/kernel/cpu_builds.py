"""Every build of the CPU kernels that this processor runs, and the torch references: once each for a module's tests."""

from __future__ import annotations

import pytest

from sglang_ssd_kernel import is_compiled
from sglang_ssd_kernel.cpu.library import ISA_VARIABLE, usable_isas


@pytest.fixture(params=[*usable_isas(), "none"], autouse=True, scope="module")
def build(request):
    """The name of the build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, request.param)
        is_compiled.cache_clear()
        yield request.param
    is_compiled.cache_clear()
