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
    parse_options,
    ssd_options,
)


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
