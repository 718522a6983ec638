"""What the command line becomes before SGLang sees it."""

from __future__ import annotations

import pytest

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()
pytest.importorskip("sglang.srt.server_args")

from sglang_ssd.bridge.server_args import (  # noqa: E402
    DEFAULT_FAN_OUT_BUDGET,
    DEFAULT_LOOKAHEAD,
    LARGEST_FAN_OUT_BUDGET,
    LARGEST_LOOKAHEAD,
    draft_addresses,
    draft_attention_backend,
    parse_options,
    ssd_options,
)
from sglang_ssd.wire.curve import KEY_NAME, generate_keys  # noqa: E402
from sglang_ssd.wire.messages import MAX_TOP_M  # noqa: E402


def parsed(**options):
    return parse_options(
        {"model_path": "target", "speculative_draft_model_path": "draft", "device": "cpu"} | options
    )


def test_defaults_are_fixed_sizes():
    args = parsed()
    assert (args.speculative_num_steps, args.ssd_fan_out_budget) == (
        DEFAULT_LOOKAHEAD["cpu"],
        DEFAULT_FAN_OUT_BUDGET["cpu"],
    )
    options = ssd_options(args)
    assert not options.adapts_lookahead and not options.adapts_budget


def test_auto_sets_the_limits_and_the_width_of_the_verify():
    args = parsed(speculative_num_steps="auto", ssd_fan_out_budget="auto")
    assert args.speculative_num_steps == LARGEST_LOOKAHEAD["cpu"]
    assert args.speculative_num_draft_tokens == LARGEST_LOOKAHEAD["cpu"] + 1
    assert args.ssd_fan_out_budget == LARGEST_FAN_OUT_BUDGET["cpu"]
    options = ssd_options(args)
    assert options.adapts_lookahead and options.adapts_budget


def test_either_may_be_auto_alone():
    options = ssd_options(parsed(speculative_num_steps=3, ssd_fan_out_budget="auto"))
    assert not options.adapts_lookahead and options.adapts_budget
    options = ssd_options(parsed(speculative_num_steps="auto", ssd_fan_out_budget=5))
    assert options.adapts_lookahead and not options.adapts_budget and options.fan_out_budget == 5


def test_synchronous_decoding_is_a_fixed_baseline():
    args = parsed(speculative_num_steps="auto", ssd_fan_out_budget="auto", ssd_mode="sync")
    assert args.speculative_num_steps == DEFAULT_LOOKAHEAD["cpu"]
    assert ssd_options(args).fan_out_budget == 0 and not ssd_options(args).adapts_lookahead


def test_off_has_nothing_to_speculate_with():
    args = parsed(speculative_num_steps="auto", ssd_fan_out_budget="auto", ssd_mode="off")
    assert args.speculative_algorithm is args.speculative_num_steps is args.ssd_fan_out_budget is None


def test_the_command_line_takes_auto():
    from sglang_ssd.bridge.server_args import parse_server_args

    models = ["--model-path", "t", "--speculative-draft-model-path", "d", "--device", "cpu"]
    args = parse_server_args([*models, "--speculative-num-steps", "auto", "--ssd-fan-out-budget", "auto"])
    assert ssd_options(args).adapts_lookahead and ssd_options(args).adapts_budget
    with pytest.raises(SystemExit):
        parse_server_args([*models, "--speculative-num-steps", "many"])


def test_bit_equality_is_checked_by_default_and_can_be_demanded_on_a_cpu_only():
    assert ssd_options(parsed()).bit_equal == "auto"
    assert ssd_options(parsed(ssd_bit_equal="on")).bit_equal == "on"
    with pytest.raises(ValueError, match="^--ssd-bit-equal on: .* --device cuda"):
        parsed(ssd_bit_equal="on", device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pp_size=2), "--pp-size 2: "),
        (dict(attn_dp_size=2, tp_size=2), "--attn-dp-size 2: "),
        (dict(dp_size=2, tp_size=2, enable_dp_attention=True), "--attn-dp-size 2: "),
    ],
    ids=str,
)
def test_what_cannot_run_in_parallel_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        parsed(**options)


# -- drafts ----------------------------------------------------------------------------------------------------------


def remote(**options):
    return parse_options({"model_path": "target", "device": "cpu"} | options)


def test_endpoints_are_one_or_several():
    assert ssd_options(remote(ssd_draft_endpoint="ipc:///run/a")).draft_endpoints == ("ipc:///run/a",)
    ends = ["ipc:///run/a", "tcp://127.0.0.1:5577"]
    options = ssd_options(remote(ssd_draft_endpoint=ends))
    assert options.draft_endpoints == tuple(ends)
    assert options.drafts() == [(end, None) for end in ends]


def test_the_command_line_repeats_options():
    from sglang_ssd.bridge.server_args import parse_server_args

    models = ["--model-path", "t", "--device", "cpu"]
    ends = ["--ssd-draft-endpoint", "ipc:///run/a", "--ssd-draft-endpoint", "ipc:///run/b"]
    assert ssd_options(parse_server_args([*models, *ends])).draft_endpoints == (
        "ipc:///run/a",
        "ipc:///run/b",
    )


def test_a_server_of_sglangs_own_launcher_names_its_drafts_in_the_environment(monkeypatch):
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", device="cpu")
    monkeypatch.delenv("SGLANG_SSD_DRAFT_ENDPOINT", raising=False)
    assert ssd_options(args).draft_endpoints == ()
    monkeypatch.setenv("SGLANG_SSD_DRAFT_ENDPOINT", "ipc:///run/a,ipc:///run/b")
    assert ssd_options(args).draft_endpoints == ("ipc:///run/a", "ipc:///run/b")
    assert ssd_options(args).round_timeout_ms is None


def test_keys_belong_to_tcp_endpoints(tmp_path):
    for name in ("server", "one", "two"):
        generate_keys(str(tmp_path / name))
    public = [str(tmp_path / name / f"{KEY_NAME}.key") for name in ("one", "two")]
    secret = str(tmp_path / "server" / f"{KEY_NAME}.key_secret")
    ends = ["ipc:///run/a", "tcp://10.0.0.1:5577", "tcp://127.0.0.1:5577"]
    (_, local), (_, far), (_, near) = draft_addresses(ends, secret, public)
    assert local is None and far.draft_public != near.draft_public and far.secret == near.secret
    (_, local), (_, far), (_, near) = draft_addresses(ends, secret, public[:1])
    assert local is None and far == near

    def refusal(ends, secret, draft_keys) -> str:
        with pytest.raises(ValueError) as caught:
            remote(ssd_draft_endpoint=ends, ssd_curve_secret_key=secret, ssd_curve_draft_key=draft_keys)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(ends, None, None).startswith("--ssd-draft-endpoint tcp://10.0.0.1:5577: ")
    assert refusal(ends, secret, None).startswith(f"--ssd-curve-secret-key {secret}: ")
    assert refusal(ends, None, public).startswith(f"--ssd-curve-draft-key {public[0]}: ")
    assert refusal(ends[:1], secret, public[:1]).startswith(f"--ssd-curve-secret-key {secret}: ")
    assert refusal(ends, secret, [*public, public[0]]).startswith(
        f"--ssd-curve-draft-key {public[0]}: 3 keys for 2"
    )
    assert refusal([*ends, ends[0]], secret, public).startswith(
        f"--ssd-draft-endpoint {ends[0]}: given twice"
    )
    assert refusal(ends, public[0], public).startswith(f"--ssd-curve-secret-key {public[0]}: holds no secret")
    assert refusal(ends, secret, ["/no/such", public[0]]).startswith("--ssd-curve-draft-key /no/such: ")
    assert refusal(["ws://127.0.0.1:1"], None, None).startswith("--ssd-draft-endpoint ws://127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        (dict(ssd_num_drafts=0), "--ssd-num-drafts 0: "),
        (dict(ssd_num_drafts=2, ssd_draft_endpoint="ipc:///run/a"), "--ssd-num-drafts 2: "),
        (dict(ssd_num_drafts=2, device="cuda"), "--ssd-num-drafts 2: on cuda "),
        (dict(ssd_draft_top_m=MAX_TOP_M + 1), f"--ssd-draft-top-m {MAX_TOP_M + 1}: "),
        (dict(ssd_round_timeout_ms=0.0), "--ssd-round-timeout-ms 0.0: "),
        (dict(ssd_round_timeout_ms=float("nan")), "--ssd-round-timeout-ms nan: "),
    ],
)
def test_what_cannot_work_is_named(options, beginning):
    with pytest.raises(ValueError) as caught:
        parsed(**options)
    assert str(caught.value).startswith(beginning) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("auto", "cpu", None),
        ("auto", "cuda", None),
        ("triton-fork", "cuda", "triton-fork"),
        ("flashinfer", "cuda", "flashinfer"),
        ("torch_native", "cpu", "torch_native"),
    ],
)
def test_attention_of_the_draft(name, device, chosen):
    assert draft_attention_backend("--attention-backend", name, device) == chosen


@pytest.mark.parametrize(
    ("name", "message"),
    [("triton-fork", "triton-fork: runs on GPUs; on a CPU auto"), ("fa9", "fa9: must be auto, triton-fork or one of")],
)  # fmt: skip
def test_attention_that_the_draft_cannot_have(name, message):
    with pytest.raises(ValueError, match=f"^--ssd-draft-attention-backend {message}"):
        parsed(ssd_draft_attention_backend=name)
