"""``python -m sglang_ssd.launch_draft``: the draft process, for any number of verifiers."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from sglang_ssd.bridge.environment import detect_device, parse_cores, pin_process, use_cpu_engine
from sglang_ssd.wire.messages import MAX_TOP_M, largest_to_draft
from sglang_ssd_kernel import largest_top_m

logger = logging.getLogger("sglang_ssd.draft")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang_ssd.launch_draft", description=__doc__)
    add = parser.add_argument
    add(
        "--generate-key",
        metavar="DIR",
        help="Write a new pair of CURVE keys into this folder and end. Drafts and servers need one each.",
    )
    add("--model-path", help="The draft model.")
    add(
        "--endpoint",
        help="ZeroMQ endpoint to listen on, such as ipc:///run/draft or tcp://127.0.0.1:5555. One that other hosts can "
        "reach needs the CURVE options.",
    )
    add("--curve-secret-key", metavar="FILE", help="This draft's CURVE key (.key_secret).")
    add(
        "--curve-authorized-keys",
        metavar="DIR",
        help="Folder of the public keys (*.key) of all servers that may connect; read anew at each connection.",
    )
    add("--device", choices=("cpu", "cuda"), help="Default: cuda where torch sees a GPU.")
    add("--dtype", default="auto", help="Data type of weights and activations.")
    add(
        "--attention-backend",
        default="auto",
        help="auto: SGLang's choice; on a CPU prefixes that forks share are read once. triton-fork: the same on a GPU. Or "
        "a name that SGLang's --attention-backend knows.",
    )
    add("--cores", help="CPU only: cores to run on, such as 1 or 2-3.")
    add("--max-sessions", type=int, default=64, help="Requests served at a time, over all verifiers.")
    add("--max-rows", type=int, default=1024, help="Sessions and branches at a time.")
    add("--top-m", type=int, default=64, help="Likeliest tokens that the sampling noise is added to.")
    add("--max-total-tokens", type=int, help="KV slots. Default: from free memory.")
    add("--context-length", type=int, help="Longest sequence in tokens. Default: the model's own.")
    add("--mem-fraction-static", type=float, help="As SGLang's flag; GPU only.")
    add("--trust-remote-code", action="store_true", help="Allow code that comes with the model.")
    add("--log-level", default="info", help="Level of the log.")
    add("--ready-fd", type=int, help=argparse.SUPPRESS)
    add("--stop-with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="[%(asctime)s draft] %(message)s", datefmt="%H:%M:%S"
    )
    # SGLang sets up the root logger as well; ours must keep speaking.
    logging.getLogger("sglang_ssd").setLevel(args.log_level.upper())
    try:
        return _generate_key(args) if args.generate_key else _serve(args)
    except (OSError, ValueError) as error:
        print(f"sglang_ssd.launch_draft: error: {error}", file=sys.stderr)
        return 1


def _generate_key(args: argparse.Namespace) -> int:
    from sglang_ssd.wire.curve import generate_keys

    public, secret = generate_keys(args.generate_key)
    print(f"public key, for the other side: {public}\nsecret key, for this side alone: {secret}")
    return 0


def _keys(args: argparse.Namespace):
    """The keys of this draft, None where its endpoint needs none. Raises ValueError in one line."""
    from sglang_ssd.wire.curve import load_draft_keys, why_refused

    secret_key, authorized = args.curve_secret_key, args.curve_authorized_keys
    if (secret_key is None) != (authorized is None):
        given = f"--curve-secret-key {secret_key}" if secret_key else f"--curve-authorized-keys {authorized}"
        raise ValueError(f"{given}: needs --curve-secret-key and --curve-authorized-keys both")
    if reason := why_refused(args.endpoint, secret_key is not None):
        raise ValueError(f"--endpoint {args.endpoint}: {reason}")
    if secret_key is None:
        return None
    return load_draft_keys("--curve-secret-key", secret_key, "--curve-authorized-keys", authorized)


def _serve(args: argparse.Namespace) -> int:
    if args.stop_with_parent:
        from sglang_ssd.bridge.process import die_with_parent

        die_with_parent()
    for option, value in (("--model-path", args.model_path), ("--endpoint", args.endpoint)):
        if value is None:
            raise ValueError(f"{option} is needed")
    keys = _keys(args)
    if args.max_sessions < 1:
        raise ValueError(f"--max-sessions {args.max_sessions}: must be 1 or more")
    if args.max_rows < args.max_sessions:
        raise ValueError(f"--max-rows {args.max_rows}: must be at least --max-sessions {args.max_sessions}")
    device = args.device or detect_device()
    most = min(MAX_TOP_M, largest_top_m(device) or MAX_TOP_M)
    if not 1 <= args.top_m <= most:
        raise ValueError(f"--top-m {args.top_m}: must be 1 to {most} on {device}")
    if device == "cpu":
        use_cpu_engine()
        pin_process(parse_cores(args.cores, "--cores") if args.cores else sorted(os.sched_getaffinity(0)))
    from sglang_ssd.bridge.draft_runner import DraftModelRunner, DraftRunnerConfig
    from sglang_ssd.bridge.preflight import model_facts
    from sglang_ssd.bridge.server_args import draft_attention_backend, tokenizer_fingerprint
    from sglang_ssd.draft.runner import DraftRunner
    from sglang_ssd.draft.server import DraftIdentity, DraftServer
    from sglang_ssd.wire.channel import DraftChannel

    attention_backend = draft_attention_backend("--attention-backend", args.attention_backend, device)
    facts = model_facts("--model-path", args.model_path, args.dtype, device, args.trust_remote_code)
    model = DraftModelRunner(
        DraftRunnerConfig(
            model_path=args.model_path,
            device=device,
            dtype=facts.dtype,
            attention_backend=attention_backend,
            max_rows=args.max_rows,
            kv_tokens=args.max_total_tokens or _default_kv_tokens(facts, device),
            context_length=args.context_length,
            trust_remote_code=args.trust_remote_code,
            mem_fraction_static=args.mem_fraction_static,
        )
    )
    identity = DraftIdentity(
        os.path.basename(args.model_path.rstrip("/")),
        tokenizer_fingerprint(args.model_path),
        args.max_sessions,
    )
    runner = DraftRunner(model, args.top_m)
    channel = DraftChannel(args.endpoint, keys, largest_to_draft(runner.context_length))
    server = DraftServer(channel, runner, identity)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if args.ready_fd is not None:
        os.write(args.ready_fd, b"ready\n")
        os.close(args.ready_fd)
    logger.info("draft %s listens on %s", identity.model, channel.endpoint)
    try:
        server.run()
    finally:
        channel.close()
        logger.info("draft %s stopped", identity.model)
    return 0


def _default_kv_tokens(facts, device: str) -> int | None:
    """On a CPU a pool of what is free; on a GPU SGLang's own choice."""
    if device != "cpu":
        return None
    from sglang_ssd.bridge.memory import available_host_bytes, plan_pools

    plan = plan_pools(
        available_bytes=available_host_bytes(),
        weight_bytes=facts.weight_bytes,
        target_token_bytes=facts.kv_token_bytes,
        draft_token_bytes=0,
        context_length=facts.context_length,
    )
    return plan.target_tokens


if __name__ == "__main__":
    sys.exit(main())
