"""The benchmarks' own arithmetic: no server, no model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmark"))

import cpu_kernels
import e2e
import emulated
import exactness
import fan_out_sweep
import measurement
import report
import rounds
import serving
import stretched
import transport
from measurement import Measurement
from serving import Generation

from sglang_ssd.draft.forking_paths import ForkingPaths

PLAIN = Measurement(2.0, 2.5, first_token_ms=100.0, num_tokens=64, seconds=32.0)
#: A verify of 400 ms and a proposal of 200 ms: 600 ms for 2.4 tokens.
SYNC = Measurement(
    3.6, 4.0, 100.0, 64, 17.8, rounds=26, accept_length=2.5, hit_rate=0.0, tokens_miss=2.4, verify_ms=400.0,
    draft_wait_ms=200.0, draft_round_ms=198.0, fork_ms=0.0, backup_ms=198.0, draft_hit_rate=0.0,
)  # fmt: skip
ASYNC = SYNC._replace(
    hit_rate=0.75, tokens_hit=2.5, tokens_miss=2.1, draft_wait_ms=50.0, fork_ms=300.0, backup_ms=0.25 * 198.0,
    draft_hit_rate=0.75, tokens_per_s=4.5, decode_tokens_per_s=5.2,
)  # fmt: skip


# -- report ------------------------------------------------------------------------------------------------------


def test_table_sets_numbers_right_and_names_left() -> None:
    table = report.format_table(["mode", "tokens"], [["plain", 2.71828], ["async", 12345], ["off", None]])
    assert table.splitlines() == [
        "mode   tokens",
        "-----  ------",
        "plain    2.72",
        "async   12345",
        "off         -",
    ]


def test_prompts_are_many_and_no_two_alike() -> None:
    prompts = report.read_prompts()
    assert len(set(prompts)) == len(prompts) >= 24
    # The radix cache must not serve one prompt the start of another.
    assert len({prompt[:20] for prompt in prompts}) == len(prompts)


def test_machine_facts_are_json() -> None:
    facts = report.machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] and facts["cpu"] and facts["versions"]["torch"]


# -- measurement -------------------------------------------------------------------------------------------------


def test_last_verification_counts_what_the_request_still_took() -> None:
    meta = {
        "completion_tokens": 8,
        "ssd_sources": ["neural", "hit", "hit"],
        "ssd_accept_lengths": [2, 4, 4],
    }
    assert measurement.tokens_by_source(meta) == {"hit": [4, 1], "miss": [2]}


def test_summary_takes_only_what_lies_between_the_two_looks() -> None:
    def state(
        rounds: int, hits: int, accept_length: float, verify_ms: float, wait_ms: float, draft: dict
    ) -> dict:
        return {
            "mode": "async", "rounds": rounds, "rows": rounds, "hits": hits, "accept_length": accept_length,
            "verify_ms": verify_ms, "draft_wait_ms": wait_ms, "draft": draft,
        }  # fmt: skip

    before = state(10, 0, 1.0, 100.0, 50.0, {"rounds": 12, "hits": 1, "fork_ms": 0.0, "backup_ms": 100.0})
    after = state(14, 3, 2.0, 200.0, 40.0, {"rounds": 17, "hits": 5, "fork_ms": 500.0, "backup_ms": 250.0})
    meta = {
        "completion_tokens": 19,
        "ssd_sources": ["hit", "hit", "hit", "none"],
        "ssd_accept_lengths": [6, 6, 5, 1],
    }
    found = measurement.summarize([Generation([0] * 19, meta, 4.0, 1.0)], 5.0, before, after)
    assert found.tokens_per_s == 19 / 5.0
    assert found.decode_tokens_per_s == 18 / 3.0
    assert found.first_token_ms == 1000.0
    assert found.rounds == 4
    assert found.accept_length == (28 - 10) / 4
    assert found.hit_rate == 3 / 4
    assert found.tokens_hit == 17 / 3 and found.tokens_miss == 1
    assert found.verify_ms == (2800 - 1000) / 4
    assert found.draft_wait_ms == (560 - 500) / 4
    assert found.fork_ms == 100.0 and found.backup_ms == 30.0 and found.draft_round_ms == 130.0
    assert found.draft_hit_rate == 4 / 5


def test_plain_decoding_has_no_rounds() -> None:
    generation = Generation([0] * 3, {"completion_tokens": 3}, 2.0, 1.0)
    found = measurement.summarize([generation], 2.0, {"mode": "off"}, {"mode": "off"})
    assert found.tokens_per_s == 1.5 and found.decode_tokens_per_s == 2.0
    assert found.rounds is found.hit_rate is found.verify_ms is None


def test_median_of_repeats_is_taken_field_by_field() -> None:
    repeats = [PLAIN, PLAIN._replace(tokens_per_s=9.0, seconds=30.0), PLAIN._replace(tokens_per_s=3.0)]
    assert measurement.median(repeats) == PLAIN._replace(tokens_per_s=3.0)


def test_theorem_7_by_hand() -> None:
    prediction = measurement.theorem_7(ASYNC, SYNC)
    assert prediction.primary_ms == pytest.approx(300.0)  # every wait is explained by the misses
    tokens, ms = 0.75 * 2.5 + 0.25 * 2.1, 0.75 * 400 + 0.25 * (400 + 200)
    assert prediction.ssd_tokens_per_s == pytest.approx(1e3 * tokens / ms)


def test_theorem_7_counts_what_hits_waited_for() -> None:
    """The verify ends 400 ms into a draft round of 500: forks are cut off there, and the winner is finished."""
    cut_off = ASYNC._replace(fork_ms=400.0, backup_ms=0.25 * 198.0 + 0.75 * 100.0)
    prediction = measurement.theorem_7(cut_off, SYNC)
    assert prediction.primary_ms == pytest.approx(500.0)
    tokens, ms = 0.75 * 2.5 + 0.25 * 2.1, 0.75 * 500 + 0.25 * (400 + 200)
    assert prediction.ssd_tokens_per_s == pytest.approx(1e3 * tokens / ms)


def test_without_hits_theorem_7_is_synchronous_speculation() -> None:
    prediction = measurement.theorem_7(SYNC, SYNC)
    ratios = measurement.comparison({"plain": PLAIN, "sync": SYNC, "async": SYNC}, prediction)
    assert ratios["theorem 7 async/sync"] == pytest.approx(1.0)


def test_speed_ups() -> None:
    ratios = measurement.comparison({"plain": PLAIN, "sync": SYNC, "async": ASYNC}, None)
    assert ratios == {
        "async/sync": 4.5 / 3.6,
        "async/plain": 4.5 / 2.0,
        "sync/plain": 3.6 / 2.0,
        "decode async/sync": 5.2 / 4.0,
        "theorem 7 async/sync": None,
    }


# -- e2e ---------------------------------------------------------------------------------------------------------


def test_accountings_share_the_async_server() -> None:
    accountings = e2e.setups_of([0, 1, 2, 3], [0, 1, 2], [3])
    assert tuple(accountings) == e2e.ACCOUNTINGS
    same_target, same_total = accountings.values()
    assert same_target["async"] == same_total["async"] == e2e.Setup("async", (0, 1, 2), (3,))
    assert {setup.target_cores for setup in same_target.values()} == {(0, 1, 2)}
    assert same_total["plain"] == e2e.Setup("plain", (0, 1, 2, 3), ())
    assert same_total["sync"] == e2e.Setup("sync", (0, 1, 2, 3), (0, 1, 2, 3))


def test_server_arguments_follow_the_setup() -> None:
    args = e2e.parse(["--model", "t", "--draft", "d", "--lookahead", "2", "--server-args", "--dtype float32"])
    plain = e2e.server_arguments(e2e.Setup("plain", (0,), ()), args)
    assert plain[plain.index("--ssd-mode") + 1] == "off" and "--ssd-draft-cores" not in plain
    split = e2e.server_arguments(e2e.Setup("async", (0, 1), (2,)), args)
    for option, value in (("--ssd-mode", "async"), ("--ssd-target-cores", "0,1"), ("--ssd-draft-cores", "2"),
                          ("--speculative-draft-model-path", "d"), ("--speculative-num-steps", "2")):  # fmt: skip
        assert split[split.index(option) + 1] == value
    assert split[-2:] == ["--dtype", "float32"] and "--ssd-fan-out-budget" not in split


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-prompts", "0"),
        ("--num-prompts", "39"),
        ("--repeat", "0"),
        ("--draft-cores", "x"),
        ("--model", "/none"),
    ],
)
def test_bad_arguments_are_named(option: str, value: str, capsys: pytest.CaptureFixture) -> None:
    names = {"--model": "t", "--draft": "d", option: value}
    with pytest.raises(SystemExit):
        e2e.parse([part for pair in names.items() for part in pair])
    assert f"{option} {value}" in capsys.readouterr().err


def test_results_and_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = e2e.parse(["--model", "t", "--draft", "d", "--out", str(tmp_path / "new" / "e2e.json")])
    accountings = e2e.setups_of([0, 1], [0], [1])
    of_mode = {"plain": PLAIN, "sync": SYNC, "async": ASYNC}
    measured = {setup: [of_mode[setup.mode]] for modes in accountings.values() for setup in modes.values()}
    e2e.report(args, report.machine_facts(), {"lookahead": 2}, accountings, measured)
    result = json.loads(args.out.read_text(encoding="utf-8"))
    ssd = result["same_target_cores"]["async"]
    assert ssd["tokens_per_s"] == 4.5 and ssd["cores"] == {"target": [0], "draft": [1]}
    assert {"accept_length", "hit_rate", "verify_ms", "draft_wait_ms"} <= set(ssd)
    assert str(tmp_path) not in args.out.read_text(encoding="utf-8")
    assert args.out.with_suffix(".png").stat().st_size > 0
    assert "Theorem 7" in capsys.readouterr().out


# -- kernels -----------------------------------------------------------------------------------------------------


def test_kernels_are_compared_with_each_alternative(tmp_path: Path) -> None:
    sizes = {"--branches": 3, "--prefix": 20, "--depth": 2, "--rows": 2, "--vocab-size": 300, "--turns": 2}
    out = tmp_path / "kernels.json"
    arguments = [str(part) for pair in sizes.items() for part in pair]
    assert cpu_kernels.main([*arguments, "--dtype", "float32", "--out", str(out)]) == 0
    ratios = json.loads(out.read_text(encoding="utf-8"))["ratios"]
    assert {ratio["operation"] for ratio in ratios if ratio["times_as_fast"] is None} == {"its layout"}
    assert sum(ratio["operation"] == "fork attention" for ratio in ratios) == 3
    assert all(ratio["ours_ms"] > 0 for ratio in ratios)


def test_a_kernel_that_answers_wrongly_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_kernels, "fork_attention", lambda q, *_: torch.zeros_like(q))
    with pytest.raises(SystemExit, match="fork attention: off by"):
        cpu_kernels.main(["--prefix", "20", "--vocab-size", "300", "--out", str(tmp_path / "kernels.json")])


# -- exactness ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_first_difference(a: list[int], b: list[int]) -> None:
    position = exactness.first_difference(a, b)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position] and a[position : position + 1] != b[position : position + 1]


class OnePrompt:
    """Stands for the plain server: after [7, 1] its choices are 2, then 3, 0.01 nats apart."""

    def generate(self, input_ids: list[int], max_new_tokens: int, **fields) -> Generation:
        assert (input_ids, max_new_tokens, fields["top_logprobs_num"]) == ([7, 1], 1, 2)
        return Generation([2], {"output_top_logprobs": [[[-1.0, 2, None], [-1.01, 3, None]]]}, 0.0, 0.0)


@pytest.mark.parametrize(("other", "is_noise"), [([1, 3, 4], True), ([1, 4, 4], False), ([1], False)])
def test_divergence_is_noise_only_between_the_first_two(other: list[int], is_noise: bool) -> None:
    found = exactness.diverge(OnePrompt(), "async", 0, [7], [1, 2, 3], other)
    assert found.position == 1 and found.margin == pytest.approx(0.01)
    assert found.is_noise(0.05) == is_noise
    assert not found.is_noise(0.005)


@pytest.mark.parametrize(("noise", "exit_code"), [(0.05, 0), (0.005, 1)])
def test_exit_code_of_exactness(tmp_path: Path, noise: float, exit_code: int) -> None:
    args = exactness.parse(["--pair", "test", "--noise", str(noise), "--out", str(tmp_path / "out.json")])
    outputs = {"async 1 at once": [[1, 3]], "sync 1 at once": [[1, 2]]}
    divergence = exactness.Divergence("async 1 at once", 0, 1, 2, 3, 0.01, True)
    assert exactness.report(args, report.machine_facts(), [[1, 2]], outputs, [divergence]) == exit_code
    result = json.loads(args.out.read_text(encoding="utf-8"))
    assert result["num_equal_in_all_runs"] == 0
    assert result["num_beyond_noise"] == exit_code


def test_noise_follows_the_dtype() -> None:
    assert exactness.parse(["--pair", "test"]).noise == 1e-3
    assert exactness.parse(["--model", "t"]).noise == 0.125
    assert exactness.parse(["--model", "t", "--dtype", "float32"]).noise == 1e-3


# -- transport ---------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert transport.percentiles([float(i) for i in range(101)]) == (50.0, 99.0)


def test_stub_model_keeps_rows_and_slots() -> None:
    model = transport.StubModel(max_rows=4)
    before, paths = model.capacity(), ForkingPaths(model)
    main = paths.open([1, 2, 3])
    assert paths.reserve(main, 3)
    main.num_cached = 3
    branch = paths.fork(main, 0, 5)
    assert paths.reserve(branch, 1)
    branch.num_cached += 1
    assert model.capacity().free_slots == before.free_slots - 4
    paths.adopt(main, branch)
    paths.close(main, [1, 2, 3, 5])
    assert model.capacity() == before
    assert paths.open([1, 2, 3, 5, 6]).num_cached == 4


# -- serving -----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serving.free_port(port) > port


def test_what_outlives_sigint_is_named_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STOP_TIMEOUT_S", 0.3)
    log = tmp_path / "log"
    log.write_text("the last line\n", encoding="utf-8")
    stubborn = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(serving.ServerFailed, match=rf"{process.pid} python(.|\n)*the last line"):
        serving._stop(process, serving.Server("http://127.0.0.1:1", log))
    assert process.returncode == -signal.SIGKILL


def test_a_start_that_fails_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(100)), encoding="utf-8")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(serving.ServerFailed, match=r"exit code 3(.|\n)*line 99") as failure:
        serving._wait_until_ready(serving.Server("http://127.0.0.1:1", log), process, "test")
    assert "line 79" not in str(failure.value)


# -- emulated ----------------------------------------------------------------------------------------------------


def emulated_measurement(**changes) -> Measurement:
    fields = dict(
        tokens_per_s=200.0, decode_tokens_per_s=250.0, first_token_ms=20.0, num_tokens=100, seconds=0.5,
        rounds=40, accept_length=2.5, hit_rate=0.9, tokens_hit=2.6, tokens_miss=1.6, verify_ms=12.0,
        draft_wait_ms=0.5,
    )  # fmt: skip
    return Measurement(**(fields | changes))


def test_an_emulated_round_is_told_against_the_longer_side() -> None:
    row = emulated.row_of(
        emulated.Configuration("async", "3", "12"), 1, emulated_measurement(), depth_ms=2.0, verify_ms=9.0
    )
    # 2.5 tokens at 250 a second take 10 ms; 9 of these are the verify, .6 the backups of a tenth of the rounds.
    assert row.round_ms == pytest.approx(10.0)
    assert row.added_ms == pytest.approx(0.4)
    assert 0.9 < row.of_theorem_7 < 1.0


def test_what_has_no_theorem_is_not_told_one() -> None:
    plain = emulated.row_of(
        emulated.Configuration("off"), 1, emulated_measurement(rounds=None), depth_ms=2.0, verify_ms=9.0
    )
    assert plain.round_ms is plain.added_ms is plain.of_theorem_7 is None
    for configuration in (
        emulated.Configuration("async", "auto", "auto"),
        emulated.Configuration("sync", "3"),
    ):
        assert emulated.row_of(configuration, 1, emulated_measurement(), 2.0, 9.0).added_ms is None


def test_stretched_methods_sleep_for_the_rest_where_it_applies(monkeypatch) -> None:
    class Model:
        def forward(self, size: int) -> int:
            return size

    slept: list[float] = []
    monkeypatch.setattr(stretched.time, "sleep", slept.append)
    stretched.stretch(Model, "forward", 60_000.0, lambda size: size > 1)
    assert Model().forward(1) == 1 and not slept
    assert Model().forward(2) == 2
    (seconds,) = slept
    assert 0.0 < seconds <= 60.0


def test_what_was_launched_is_read_when_its_time_is_over(monkeypatch) -> None:
    class Model:
        def forward(self, size: int) -> int:
            return size

    reader, slept = types.SimpleNamespace(read=lambda size: -size), []
    monkeypatch.setattr(stretched.time, "sleep", slept.append)
    stretched.stretch_until_read(Model, "forward", reader, "read", 60_000.0, lambda size: size > 1)
    assert reader.read(Model().forward(1)) == -1 and slept == [0.0]
    assert Model().forward(2) == 2 and len(slept) == 1, "a launch returns at once"
    assert reader.read(2) == -2
    assert 0.0 < slept[1] <= 60.0


# -- rounds and fan-out ------------------------------------------------------------------------------------------------


def told_round(start_s: float, ticket: int, answers: list[tuple[int, float]]) -> list[rounds.Step]:
    """A round of 8 rows that begins at ``start_s``: 10 ms of verify, 2 of bookkeeping. ``answers``: rows and the
    milliseconds after the outcome left."""

    def step(name: str, start_ms: float, end_ms: float, ticket=None, rows=None) -> rounds.Step:
        return rounds.Step(name, ticket, rows, start_s + start_ms / 1e3, start_s + end_ms / 1e3)

    return [
        step("SSDWorker._collect", -0.5, 0.0),
        step("SSDWorker.run_verify", 0.1, 10.1),
        step("SSDWorker._decide", 10.1, 10.6),
        step("VerifierChannel.send", 10.7, 10.8, ticket, 8),
        step("SSDWorker._send_outcomes", 10.6, 11.0),
        step("DraftChannel.receive", 10.0, 11.1, ticket, 8),
        *(step("DraftChannel.send", 10.8 + ms - 0.1, 10.8 + ms, ticket, n) for n, ms in answers),
        *(step("VerifierChannel.receive", 13.0, 13.2, ticket, n) for n, _ in answers),
    ]


def test_a_round_is_broken_down_into_its_steps() -> None:
    steps = [
        *told_round(0.0, 1, [(8, 0.6)]),
        *told_round(0.0135, 2, [(7, 0.6), (1, 8.0)]),
        *told_round(0.035, 3, []),
    ]
    [told] = rounds.breakdowns(steps)
    expected = {
        "round_ms": 13.5, "prepare_ms": 0.1, "verify_ms": 10.0, "decide_ms": 0.5, "send_ms": 0.4, "host_ms": 2.0,
        "queue_ms": 0.3, "lookup_ms": 0.3, "receive_ms": 1.8, "wait_ms": 0.5,
    }  # fmt: skip
    assert told._asdict() == pytest.approx(expected)
    assert rounds.added([told, told, told], 10.0)["added_ms"] == pytest.approx(3.5)
    assert rounds.answers(steps, 8, num_first=8) == pytest.approx((1, 0.6, 0.6))
    assert rounds.answers(steps, 8, num_first=7) == pytest.approx((1, 0.6, 8.0))


def test_a_replay_hits_what_the_lists_hold() -> None:
    first_rank = [fan_out_sweep.Outcome(2, k, 0) for k in (0, 1, 2)] * 40
    hits = fan_out_sweep.replay([fan_out_sweep.Outcome(0, 0, 0), *first_rank], "uniform", 3)
    assert hits.hits == measurement.Share(120, 120) and hits.first_hits == measurement.Share(1, 1)
    # One guess a position never has the second candidate; what is measured learns where outcomes are.
    second_rank = [fan_out_sweep.Outcome(2, 0, 1)] * 200
    assert fan_out_sweep.replay(second_rank, "uniform", 3).hits.part == 0
    assert fan_out_sweep.replay(second_rank, "measured", 3).hits.rate > 0.7
    assert fan_out_sweep.replay(second_rank, "measured", 0).hits.part == 0


def test_misses_beyond_f_candidates_give_the_exponent() -> None:
    ranks = [f for f in range(1, 300) for _ in range(round(10_000 * ((1 + f) ** -1.5 - (2 + f) ** -1.5)))]
    ranks += [0] * round(10_000 * (1 - 2**-1.5))
    Random(0).shuffle(ranks)  # The estimator forgets.
    outcomes = [fan_out_sweep.Outcome(2, 2, rank) for rank in ranks]
    assert fan_out_sweep.miss_shares(outcomes, 2)[0].rate == pytest.approx(2**-1.5, abs=0.02)
    assert fan_out_sweep.power_law_r(outcomes, 16) == pytest.approx(1.5, abs=0.2)
