"""Every seam of SGLang is what the bridge was written against, and the check can see that one is not."""

from __future__ import annotations

import pytest

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()
pytest.importorskip("sglang.srt.managers.scheduler")

from sglang_ssd.bridge.self_check import (  # noqa: E402
    FORK_ATTENTION_SEAMS,
    SEAMS,
    SGLANG_VERSION,
    Seam,
    drifted_seams,
)


@pytest.mark.parametrize("seams", [SEAMS, FORK_ATTENTION_SEAMS], ids=["all", "fork attention"])
def test_no_seam_has_drifted(seams):
    assert drifted_seams(seams) == []


def test_the_pinned_release_is_installed():
    from importlib.metadata import version

    assert version("sglang") == SGLANG_VERSION


@pytest.mark.parametrize(
    "seam",
    [
        Seam("sglang.srt.managers.scheduler:Scheduler.no_such_method"),
        Seam("sglang.srt.no_such_module:x"),
        Seam(SEAMS[1].target, ("self", "another_name")),
        Seam(SEAMS[1].target, ("recv_req", "self")),
    ],
)
def test_drift_is_seen_and_named(seam):
    (line,) = drifted_seams((seam,))
    assert seam.target in line


def test_samples_of_one_seed_differ_and_the_first_keeps_it():
    from sglang_ssd.bridge.tokenizer_manager import sample_seed

    seeds = [sample_seed(7, i) for i in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
