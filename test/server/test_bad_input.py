"""A start that cannot succeed: one clear line, an exit code that is not 0, nothing left running."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server.conftest import launch_command
from server.running import Ended, run_to_end

from sglang_ssd.test_pair import write_pair

ERROR = "sglang_ssd: error: "
#: Flags that are refused before anything is started, and how the line must begin. A flag that is given twice counts
#: the last time.
REFUSED_FLAGS = [
    (["--speculative-num-steps", "0"], "--speculative-num-steps 0: "),
    (["--speculative-num-draft-tokens", "9"], "--speculative-num-draft-tokens 9: "),
    (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE: "),
    (["--ssd-fan-out-budget", "-1"], "--ssd-fan-out-budget -1: "),
    (["--ssd-draft-cores", "4096"], "--ssd-draft-cores 4096: "),
    (["--ssd-target-cores", "first"], "--ssd-target-cores first: "),
    (["--ssd-num-drafts", "2", "--ssd-draft-cores", "0"], "--ssd-draft-cores 0: "),
    (["--ssd-num-drafts", "4096"], "--ssd-num-drafts 4096: "),
    (["--ssd-draft-endpoint", "tcp://10.0.0.1:5577"], "--ssd-draft-endpoint tcp://10.0.0.1:5577: "),
    (["--ssd-draft-endpoint", "/run/draft"], "--ssd-draft-endpoint /run/draft: "),
    (["--model-path", "/no/such/model"], "--model-path /no/such/model: "),
    (["--speculative-draft-model-path", "/no/such/draft"], "--speculative-draft-model-path /no/such/draft: "),
]  # fmt: skip


def the_line(output: str) -> str:
    """Our only line in ``output``, the rest being warnings of others. No traceback."""
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith(ERROR)]
    return line.removeprefix(ERROR)


def test_a_bad_value_is_named(pair, tmp_path):
    other = write_pair(tmp_path / "other", vocab_size=384)
    commands = [launch_command(pair, *flags) for flags, _ in REFUSED_FLAGS]
    commands.append(launch_command(pair, "--speculative-draft-model-path", str(other.draft)))
    commands.append([*commands[0][:3], "--model-path", str(pair.target)])
    ended = run_to_end(
        ["server.many_mains", json.dumps([command[1:] for command in commands])], tmp_path / "server"
    )
    assert (ended.exit_code, ended.left) == (0, []), ended.output
    *outputs, end = ended.output.split("returned 2\n")
    assert (len(outputs), end) == (len(commands), ""), ended.output

    *lines, other_vocabulary, no_draft = map(the_line, outputs)
    for line, (_, beginning) in zip(lines, REFUSED_FLAGS, strict=True):
        assert line.startswith(beginning)
    assert other_vocabulary.startswith(f"--speculative-draft-model-path {other.draft}: ")
    assert "384" in other_vocabulary and "320" in other_vocabulary
    assert "--speculative-draft-model-path" in no_draft


def test_a_taken_port_is_named(pair, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        command = launch_command(pair, "--host", "127.0.0.1", "--port", str(port))
        ended = run_to_end(command, tmp_path / "server")
    assert (ended.exit_code, ended.left) == (2, []), ended.output
    assert the_line(ended.output).startswith(f"--port {port}: ")


@pytest.fixture(scope="module")
def failed_starts(pair, tmp_path_factory) -> dict[str, Ended]:
    """Starts that fail after processes were started, side by side."""
    folder = tmp_path_factory.mktemp("failed")
    broken = Path(shutil.copytree(pair.draft, folder / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    target = ["sglang_ssd.launch_server", "--device", "cpu", "--model-path", str(pair.target)]
    commands = {
        "broken draft": launch_command(pair, "--speculative-draft-model-path", str(broken)),
        "not bit-equal": launch_command(
            pair, "--ssd-mode", "off", "--dtype", "float32", "--no-ssd-pack-weights", "--ssd-bit-equal", "on"
        ),
        "no draft answers": [*target, "--ssd-draft-endpoint", f"ipc://{folder}/nobody", "--ssd-start-timeout-s", "3"],
    }  # fmt: skip
    with ThreadPoolExecutor() as threads:
        runs = {
            name: threads.submit(run_to_end, command, folder / name.replace(" ", "-"))
            for name, command in commands.items()
        }
        return {name: run.result() for name, run in runs.items()}


def test_a_draft_that_dies_while_loading_ends_the_start(failed_starts):
    ended = failed_starts["broken draft"]
    assert (ended.exit_code, ended.left) == (1, []), ended.output
    assert f"{ERROR}the draft process ended while it was loading" in ended.output


def test_a_draft_endpoint_where_nobody_answers_ends_the_start(failed_starts):
    ended = failed_starts["no draft answers"]
    assert (ended.exit_code, ended.left) == (1, []), ended.output
    (line,) = [line for line in ended.output.splitlines() if "cannot start: " in line]
    assert "no draft answered at ipc://" in line and line.endswith("/nobody within 3 s")
    assert "Traceback" not in ended.output


def test_a_model_that_is_not_bit_equal_ends_the_start_where_that_is_asked_for(failed_starts):
    ended = failed_starts["not bit-equal"]
    assert (ended.exit_code, ended.left) == (1, []), ended.output
    (line,) = [line for line in ended.output.splitlines() if "cannot start: " in line]
    assert "--ssd-bit-equal on: " in line and "in float32: 1 rows give other bits than" in line
    assert "Traceback" not in ended.output
