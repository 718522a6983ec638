"""``python -m sglang_ssd.launch_server``: SGLang's server with SSD as its default algorithm.

Every flag of SGLang works; ``--help`` shows ours in a group of their own. Bad input ends with one line and exit code 2
before anything is started; a start that fails later ends with one line and exit code 1, and leaves nothing running.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from sglang_ssd.bridge.environment import bind_target_ranks, detect_device, split_cores, use_cpu_engine
from sglang_ssd.draft_process import DraftProcess, start_drafts

if TYPE_CHECKING:
    from sglang_ssd.bridge.server_args import SSDServerArgs

logger = logging.getLogger("sglang_ssd")


def main(argv: list[str] | None = None) -> int:
    """Parse, check, start, serve, and clean up. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if asked_device(argv) == "cpu":
        use_cpu_engine()
    from sglang_ssd.bridge.preflight import reserve_port
    from sglang_ssd.bridge.server_args import parse_server_args

    try:
        args = parse_server_args(argv)
        # SGLang sets up its own log only later; what is chosen before must be seen too.
        logging.basicConfig(level=args.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%F %T")
        port = reserve_port(args)
        prepared = prepare(args)
    except ValueError as error:
        print(f"sglang_ssd: error: {error}", file=sys.stderr)
        return 2
    with port:
        return serve(args, prepared)


def prepare(args: SSDServerArgs) -> list[list[str]]:
    """Check what can be known to fail and fill in cores and memory. Returns the arguments of each draft process to be
    started. Raises ValueError in one line."""
    from sglang_ssd.bridge.preflight import check_same_vocabulary, model_facts

    target = model_facts("--model-path", args.model_path, args.dtype, args.device, args.trust_remote_code)
    args.dtype = target.dtype
    starts_drafts = args.ssd_mode != "off" and args.ssd_draft_endpoint is None
    num_drafts = (args.ssd_num_drafts or 1) if starts_drafts else 0
    draft = None
    if starts_drafts:
        draft = model_facts(
            "--speculative-draft-model-path",
            args.speculative_draft_model_path,
            args.ssd_draft_dtype,
            args.device,
            args.trust_remote_code,
        )
        check_same_vocabulary(target, draft)
    draft_cores: list[list[int]] = [[]] * num_drafts
    if args.device == "cpu":
        cores = split_cores(args.ssd_target_cores, args.ssd_draft_cores, num_drafts)
        bind_target_ranks(cores.target, args.dp_size * args.tp_size)
        draft_cores = cores.drafts
        logger.info("cores: target %s, drafts %s", cores.target, cores.drafts or "none")
        _size_pools(args, target, draft, num_drafts)
    return [_draft_arguments(args, cores) for cores in draft_cores]


def _size_pools(args: SSDServerArgs, target, draft, num_drafts: int) -> None:
    """Choose the KV pools of all processes where the user did not."""
    from sglang_ssd.bridge.memory import available_host_bytes, plan_pools

    if args.max_total_tokens is not None and (draft is None or args.ssd_draft_max_total_tokens is not None):
        return
    plan = plan_pools(
        available_bytes=available_host_bytes(),
        weight_bytes=args.dp_size * target.weight_bytes + (num_drafts * draft.weight_bytes if draft else 0),
        target_token_bytes=target.kv_token_bytes,
        draft_token_bytes=draft.kv_token_bytes if draft else 0,
        context_length=args.context_length or target.context_length,
        num_drafts=num_drafts,
        num_replicas=args.dp_size,
    )
    logger.info("%s", plan.describe())
    if args.max_total_tokens is None:
        args.max_total_tokens = plan.target_tokens
    if draft is not None and args.ssd_draft_max_total_tokens is None:
        args.ssd_draft_max_total_tokens = plan.draft_tokens


def _draft_arguments(args: SSDServerArgs, cores: list[int]) -> list[str]:
    # Room for every session to use its whole budget, within reason: beyond it branches are denied and counted.
    max_rows = args.ssd_draft_max_sessions + min(4096, args.ssd_draft_max_sessions * args.ssd_fan_out_budget)
    options = {
        "--model-path": args.speculative_draft_model_path,
        "--device": args.device,
        "--dtype": args.ssd_draft_dtype,
        "--attention-backend": args.ssd_draft_attention_backend,
        "--cores": ",".join(map(str, cores)) or None,
        "--max-sessions": args.ssd_draft_max_sessions,
        "--max-rows": max_rows,
        "--top-m": args.ssd_draft_top_m,
        "--max-total-tokens": args.ssd_draft_max_total_tokens,
        "--log-level": args.log_level,
    }
    arguments = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    return [*arguments, "--trust-remote-code"] if args.trust_remote_code else arguments


#: The drafts that this process started, and whether all is being stopped. Signal handlers need them, and SGLang pickles
#: the one we give it.
_drafts: list[DraftProcess] = []
_is_stopping = False


def serve(args: SSDServerArgs, draft_arguments: list[list[str]]) -> int:
    """Start the drafts and the server, and serve until a signal. Returns the exit code."""
    from sglang_ssd.bridge.process import serve_http
    from sglang_ssd.plugin import register_algorithm, run_scheduler

    register_algorithm()
    if draft_arguments:
        _drafts.extend(start_drafts(draft_arguments))
        args.ssd_draft_endpoint = [draft.endpoint for draft in _drafts]
        for draft in _drafts:
            draft.watch(_fail)
    # SGLang's processes report a failure with SIGQUIT; its own handler would leave our draft and socket behind.
    args.custom_sigquit_handler = _on_sigquit
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve_http(args, run_scheduler)
    except KeyboardInterrupt:
        pass
    finally:
        _clean_up()
    return 0


def _clean_up() -> None:
    global _is_stopping
    _is_stopping = True
    from sglang_ssd.bridge.process import kill_children

    for draft in _drafts:
        draft.stop()
    kill_children()


def _fail(reason: str) -> None:
    print(f"sglang_ssd: error: {reason}", file=sys.stderr, flush=True)
    _clean_up()
    os._exit(1)


def _on_sigquit(signal_number: int, frame) -> None:
    # SGLang's watchdog also reports the processes that we end ourselves.
    if not _is_stopping:
        _fail("a server process failed; see its lines above")


def asked_device(argv: list[str]) -> str:
    """The device that the command line names, else what there is: must be known before sglang is imported."""
    for i, argument in enumerate(argv):
        if argument == "--device" and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith("--device="):
            return argument.partition("=")[2]
    return detect_device()


if __name__ == "__main__":
    sys.exit(main())
