"""A short run of the fuzzer, and what stands for it where atheris is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.machines import Machines, conversations
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.test_messages import DECODERS, messages

from sglang_ssd.wire.messages import decode_to_draft, decode_to_verifier, encode

SCRIPT = Path(__file__).parent / "fuzz_wire.py"
DECODER_OF = {"draft": decode_to_draft, "verifier": decode_to_verifier}


@pytest.mark.parametrize("side", DECODER_OF)
@settings(max_examples=150)
@given(data=st.data())
def test_any_frames_leave_nothing_behind(side, data):
    """Legal messages with any values, bytes that are none, and parts of a real conversation."""
    said = [frame for hearer, frames in conversations() if hearer == side for frame in frames]
    legal = st.sampled_from(DECODERS[DECODER_OF[side]]).flatmap(messages).map(encode)
    frames = st.one_of(st.sampled_from(said), legal, st.binary(max_size=40))
    machines = Machines()
    for _ in range(2):
        machines.take(side, data.draw(st.lists(frames, max_size=8)))


def test_the_conversations_are_real():
    """Mutations start from messages that are taken."""
    machines = Machines()
    for side, frames in conversations():
        machines.take(side, frames)
    assert machines.taken["malformed"] == 0
    assert machines.draft.stats().hits + machines.draft.stats().backup_forwards > 0


def test_the_fuzzer_finds_nothing_in_five_seconds():
    pytest.importorskip("atheris", reason="not installed (requirements/fuzz.txt)")
    run = subprocess.run([sys.executable, str(SCRIPT), "--seconds", "5"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
