"""Command line and server arguments: SGLang's, plus ``--ssd-*``.

Seams: ``ServerArgs`` is a msgspec struct that may be subclassed; ``add_cli_args`` is static and knows only SGLang's
fields, so ours are added to the parser here. The speculative width must be in the raw arguments, since SGLang chooses
its attention and page defaults before it asks a registered algorithm.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

from sglang_ssd.algorithm.saguaro import SCALES
from sglang_ssd.bridge.environment import OVERLAP_SWITCH, detect_device
from sglang_ssd.bridge.speculative import ALGORITHM_NAME
from sglang_ssd.wire.curve import VerifierKeys, load_verifier_keys, why_refused
from sglang_ssd.wire.messages import MAX_TOP_M
from sglang_ssd_kernel import largest_top_m

MODES = ("async", "sync", "off")
FAN_OUTS = ("measured", "geometric", "uniform")
FALLBACKS = ("neural", "ngram", "auto")
SAMPLINGS = ("shared-noise", "residual")
BIT_EQUALITIES = ("auto", "on", "off")
#: The draft's attention by sglang_ssd.bridge.fork_attention_backend.
TRITON_FORK = "triton-fork"
#: Lookahead K and fan-out budget B where the user names none. On a CPU a draft forward takes .4 of a verify, so two
#: depths fit beside it; published GPU pairs have room for four.
DEFAULT_LOOKAHEAD = {"cpu": 2, "cuda": 4}
DEFAULT_FAN_OUT_BUDGET = {"cpu": 4, "cuda": 16}
#: Largest K and B where the user says ``auto``. The verify step is always as wide as the largest K; on a CPU four tokens
#: take as long as one.
AUTO = "auto"
LARGEST_LOOKAHEAD = {"cpu": 3, "cuda": 7}
LARGEST_FAN_OUT_BUDGET = {"cpu": 16, "cuda": 32}


class SSDServerArgs(ServerArgs, kw_only=True, dict=True):
    """SGLang's server arguments and ours."""

    ssd_mode: str = "async"
    ssd_fan_out_budget: int | None = None
    ssd_adapts_lookahead: bool = False
    ssd_adapts_budget: bool = False
    ssd_fan_out: str = "measured"
    ssd_fallback: str = "neural"
    ssd_draft_endpoint: list[str] | None = None
    ssd_num_drafts: int | None = None
    ssd_curve_secret_key: str | None = None
    ssd_curve_draft_key: list[str] | None = None
    ssd_target_cores: str | None = None
    ssd_draft_cores: list[str] | None = None
    ssd_draft_dtype: str = "auto"
    ssd_sampling: str = "shared-noise"
    ssd_saguaro_c: str = "1.0"
    ssd_draft_temperature: float | None = None
    ssd_draft_top_m: int = 64
    ssd_draft_attention_backend: str = "auto"
    ssd_draft_max_total_tokens: int | None = None
    ssd_draft_max_sessions: int = 64
    ssd_round_timeout_ms: float | None = None
    ssd_start_timeout_s: float = 600.0
    ssd_pack_weights: bool = True
    ssd_bit_equal: str = "auto"


def add_ssd_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--ssd-*`` to a parser that holds SGLang's flags, and let its ``--speculative-num-steps`` be ``auto``."""
    parser._option_string_actions["--speculative-num-steps"].type = int_or_auto
    group = parser.add_argument_group("speculative speculative decoding (sglang-ssd)")
    add = group.add_argument
    add(
        "--ssd-mode",
        choices=MODES,
        default="async",
        help="async: SSD, the draft prepares proposals while the target verifies. sync: ordinary speculative decoding "
        "with the same draft process. off: plain decoding.",
    )
    add(
        "--ssd-fan-out-budget",
        type=int_or_auto,
        help="Outcomes prepared per request and round (B). 0 is ordinary speculative decoding. auto: what is fastest by "
        "measured times and hit rates, up to 16 on a CPU and 32 elsewhere. Default: 4 on a CPU, 16 elsewhere.",
    )
    add(
        "--ssd-fan-out",
        choices=FAN_OUTS,
        default="measured",
        help="How the budget is spread over positions. uniform: evenly. geometric: Theorem 12 with measured acceptance. "
        "measured: by the hit rates seen at each position and rank (starts as geometric).",
    )
    add(
        "--ssd-fallback",
        choices=FALLBACKS,
        default="neural",
        help="Who answers a miss. neural: the draft model, while the row waits. ngram: the longest match in the request's "
        "own tokens, at once. auto: by batch size, from measured times and hit rates (Theorem 17).",
    )
    add(
        "--ssd-draft-endpoint",
        action="append",
        help="Endpoint of a draft that runs already (python -m sglang_ssd.launch_draft). May be given several times: "
        "requests are spread over the drafts.",
    )
    add("--ssd-num-drafts", type=int, help="CPU only: draft processes to start. Default: 1.")
    add(
        "--ssd-curve-secret-key",
        help="File with this server's CURVE key (launch_draft --generate-key), for drafts on other hosts.",
    )
    add(
        "--ssd-curve-draft-key",
        action="append",
        help="File with the public CURVE key of the draft; given once for all tcp:// endpoints, or once for each.",
    )
    add(
        "--ssd-target-cores",
        help="CPU only: cores of the target, such as 0-3,6. Default: all that the draft leaves.",
    )
    add(
        "--ssd-draft-cores",
        action="append",
        help="CPU only: cores of the drafts. Given once they are split among them, given once a draft they may overlap. "
        "Default: the last core for each.",
    )
    add("--ssd-draft-dtype", default="auto", help="Data type of the draft's weights and activations.")
    add(
        "--ssd-sampling",
        choices=SAMPLINGS,
        default="shared-noise",
        help="How sampled requests are verified. shared-noise: both sides draw with the same noise; a seed fixes the "
        "output. residual: the paper's acceptance rule. Both are exact.",
    )
    add(
        "--ssd-saguaro-c",
        default="1.0",
        help="Scale C of Saguaro sampling in [0, 1], 1 is off, or auto. Needs --ssd-sampling residual.",
    )
    add(
        "--ssd-draft-temperature",
        type=float,
        help="Temperature of the draft's guesses for sampled requests. Default: the request's own.",
    )
    add(
        "--ssd-draft-top-m",
        type=int,
        default=64,
        help="Likeliest draft tokens that the sampling noise is added to.",
    )
    add(
        "--ssd-draft-attention-backend",
        default=AUTO,
        help=f"Attention backend of the draft. auto: SGLang's choice; on a CPU prefixes that forks share are read once. "
        f"{TRITON_FORK}: the same on a GPU. Or a name that SGLang's --attention-backend knows.",
    )
    add("--ssd-draft-max-total-tokens", type=int, help="KV slots of the draft. Default: from free memory.")
    add("--ssd-draft-max-sessions", type=int, default=64, help="Requests that the draft serves at a time.")
    add(
        "--ssd-round-timeout-ms",
        type=float,
        help="Longest wait for a proposal; then the round goes on without it. Default: from measured times, between 500 "
        "and 10000.",
    )
    add("--ssd-start-timeout-s", type=float, default=600.0, help="Longest wait for the draft at start.")
    add(
        "--ssd-pack-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="CPU only: keep the target's weights in oneDNN's packed layout. Weights cannot be updated afterwards.",
    )
    add(
        "--ssd-bit-equal",
        choices=BIT_EQUALITIES,
        default="auto",
        help="CPU only: check at start that a request's logits do not depend on the rows beside it, so that all modes, "
        "batches and K give the same tokens in any data type. Where they do, auto says so once in the log, on refuses "
        "to start. off: no check.",
    )


def int_or_auto(text: str) -> int | str:
    """Type of an option that is a number or ``auto``."""
    return AUTO if text == AUTO else int(text)


def parse_server_args(argv: list[str]) -> SSDServerArgs:
    """Parse a command line. ``SystemExit`` as argparse does on unknown or malformed flags."""
    parser = argparse.ArgumentParser(prog="sglang_ssd.launch_server")
    ServerArgs.add_cli_args(parser)
    add_ssd_arguments(parser)
    if "--config" in argv:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    args = parser.parse_args(argv)
    return SSDServerArgs.from_cli_args(with_ssd_defaults(args))


def parse_options(options: dict[str, Any]) -> SSDServerArgs:
    """Server arguments from keywords, as ``Engine`` takes them. Raises ValueError in one line on an unknown name."""
    fields = {field.name: field.default for field in msgspec.structs.fields(SSDServerArgs)}
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise ValueError(f"unknown options: {', '.join(unknown)}")
    given = {name: value for name, value in fields.items() if value is not msgspec.NODEFAULT} | options
    return SSDServerArgs.from_cli_args(with_ssd_defaults(argparse.Namespace(**given)))


def with_ssd_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what SSD needs and the user left open. Raises ValueError in one line on a contradiction."""
    algorithm = (args.speculative_algorithm or ALGORITHM_NAME).upper()
    if algorithm != ALGORITHM_NAME:
        raise ValueError(
            f"--speculative-algorithm {args.speculative_algorithm}: this launcher serves {ALGORITHM_NAME}; "
            "use sglang.launch_server for SGLang's own algorithms"
        )
    if args.device is None:
        args.device = detect_device()
    if args.device == "cpu":
        # SGLang's CPU default is an AMX backend that few hosts have; this name is served by bridge.cpu_attention.
        args.attention_backend = args.attention_backend or "torch_native"
        # An idle scheduler that polls would burn a core that somebody else computes on.
        args.sleep_on_idle = True
        # As SGLang does for its own algorithms: without a second device the overlapped loop only adds a late round, and
        # plain decoding then counts penalties one token late. Tests run it here all the same.
        is_wanted = os.environ.get(OVERLAP_SWITCH) == "1" and args.ssd_mode != "off"
        args.disable_overlap_schedule = not is_wanted
    elif args.ssd_bit_equal == "on":
        raise ValueError(f"--ssd-bit-equal on: holds on a CPU only, not with --device {args.device}")
    args.ssd_adapts_lookahead = args.ssd_adapts_budget = False
    if args.ssd_mode == "off":
        args.ssd_fan_out_budget = None
        args.speculative_algorithm = args.speculative_draft_model_path = None
        args.speculative_num_steps = args.speculative_eagle_topk = args.speculative_num_draft_tokens = None
        return args
    _check_drafts(args)
    if args.speculative_draft_model_path is None and args.ssd_draft_endpoint is None:
        raise ValueError(
            f"--ssd-mode {args.ssd_mode} needs --speculative-draft-model-path or --ssd-draft-endpoint"
        )
    kind = "cpu" if args.device == "cpu" else "cuda"
    lookahead = args.speculative_num_steps
    # Synchronous decoding is the fixed baseline.
    args.ssd_adapts_lookahead = lookahead == AUTO and args.ssd_mode == "async"
    args.ssd_adapts_budget = args.ssd_fan_out_budget == AUTO and args.ssd_mode == "async"
    if lookahead is None or lookahead == AUTO:
        lookahead = (LARGEST_LOOKAHEAD if args.ssd_adapts_lookahead else DEFAULT_LOOKAHEAD)[kind]
    if args.ssd_fan_out_budget is None or args.ssd_fan_out_budget == AUTO:
        args.ssd_fan_out_budget = (
            LARGEST_FAN_OUT_BUDGET if args.ssd_adapts_budget else DEFAULT_FAN_OUT_BUDGET
        )[kind]
    if lookahead < 1:
        raise ValueError(f"--speculative-num-steps {lookahead}: the lookahead must be at least 1")
    if args.speculative_num_draft_tokens not in (None, lookahead + 1):
        raise ValueError(
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens}: must be --speculative-num-steps + 1 "
            f"= {lookahead + 1}"
        )
    if args.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            f"--speculative-eagle-topk {args.speculative_eagle_topk}: SSD verifies chains, it must be 1"
        )
    if args.ssd_fan_out_budget < 0:
        raise ValueError(f"--ssd-fan-out-budget {args.ssd_fan_out_budget}: must be 0 or more")
    if args.ssd_sampling == "shared-noise" and saguaro_scales(args.ssd_saguaro_c) != (1.0,):
        raise ValueError(
            f"--ssd-saguaro-c {args.ssd_saguaro_c}: needs --ssd-sampling residual; with shared noise the bonus token is "
            "predictable without it"
        )
    if args.ssd_draft_temperature is not None and args.ssd_draft_temperature <= 0:
        raise ValueError(f"--ssd-draft-temperature {args.ssd_draft_temperature}: must be above 0")
    most = min(MAX_TOP_M, largest_top_m(args.device) or MAX_TOP_M)
    if not 1 <= args.ssd_draft_top_m <= most:
        raise ValueError(f"--ssd-draft-top-m {args.ssd_draft_top_m}: must be 1 to {most} on {args.device}")
    if args.ssd_draft_max_sessions < 1:
        raise ValueError(f"--ssd-draft-max-sessions {args.ssd_draft_max_sessions}: must be 1 or more")
    if args.ssd_round_timeout_ms is not None and not args.ssd_round_timeout_ms > 0:
        raise ValueError(f"--ssd-round-timeout-ms {args.ssd_round_timeout_ms}: must be above 0")
    if args.pp_size > 1:
        raise ValueError(f"--pp-size {args.pp_size}: SSD does not run with pipeline parallelism")
    if args.attn_dp_size > 1 or args.enable_dp_attention:
        size = max(args.attn_dp_size, args.dp_size)
        raise ValueError(f"--attn-dp-size {size}: SSD does not run with data-parallel attention")
    args.speculative_algorithm = ALGORITHM_NAME
    args.speculative_num_steps = lookahead
    args.speculative_eagle_topk = 1
    args.speculative_num_draft_tokens = lookahead + 1
    return args


def draft_attention_backend(option: str, name: str, device: str) -> str | None:
    """``name`` for SGLang, None where it shall choose. Raises ValueError in one line on a name that cannot be had."""
    if name == AUTO:
        return None
    if name == TRITON_FORK and device == "cpu":
        raise ValueError(f"{option} {name}: runs on GPUs; on a CPU auto reads shared prefixes once as well")
    if name not in (TRITON_FORK, *ATTENTION_BACKEND_CHOICES):
        raise ValueError(
            f"{option} {name}: must be {AUTO}, {TRITON_FORK} or one of SGLang's {', '.join(ATTENTION_BACKEND_CHOICES)}"
        )
    return name


def _check_drafts(args: argparse.Namespace) -> None:
    """Which drafts there are and how they are reached. Raises ValueError in one line."""
    for name in ("ssd_draft_endpoint", "ssd_curve_draft_key", "ssd_draft_cores"):
        if isinstance(getattr(args, name), str):  # A keyword of ``Engine`` that names one.
            setattr(args, name, [getattr(args, name)])
    if args.ssd_num_drafts is not None:
        if args.ssd_num_drafts < 1:
            raise ValueError(f"--ssd-num-drafts {args.ssd_num_drafts}: must be 1 or more")
        if args.ssd_draft_endpoint is not None:
            raise ValueError(
                f"--ssd-num-drafts {args.ssd_num_drafts}: no draft is started beside those that "
                "--ssd-draft-endpoint names"
            )
        if args.ssd_num_drafts > 1 and args.device != "cpu":
            raise ValueError(
                f"--ssd-num-drafts {args.ssd_num_drafts}: on {args.device} start each draft with "
                "python -m sglang_ssd.launch_draft and a CUDA_VISIBLE_DEVICES of its own, and name it by "
                "--ssd-draft-endpoint"
            )
    draft_attention_backend("--ssd-draft-attention-backend", args.ssd_draft_attention_backend, args.device)
    draft_addresses(args.ssd_draft_endpoint or (), args.ssd_curve_secret_key, args.ssd_curve_draft_key or ())


class DraftAddress(NamedTuple):
    """Where a draft listens, and the keys to speak with it; None where it needs none."""

    endpoint: str
    keys: VerifierKeys | None


def draft_addresses(
    endpoints: Sequence[str], secret_key: str | None, draft_keys: Sequence[str]
) -> list[DraftAddress]:
    """The drafts that these options name. Keys are for ``tcp://``. Raises ValueError in one line on an endpoint that may
    not be used so, or keys that cannot be read or that nothing needs."""
    repeated = [endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1]
    if repeated:
        raise ValueError(f"--ssd-draft-endpoint {repeated[0]}: given twice")
    if (secret_key is None) != (not draft_keys):
        given = (
            f"--ssd-curve-secret-key {secret_key}" if secret_key else f"--ssd-curve-draft-key {draft_keys[0]}"
        )
        raise ValueError(f"{given}: needs --ssd-curve-secret-key and --ssd-curve-draft-key both")
    remote = [endpoint for endpoint in endpoints if endpoint.startswith("tcp://")]
    if secret_key is not None and not remote:
        raise ValueError(f"--ssd-curve-secret-key {secret_key}: no --ssd-draft-endpoint is a tcp:// endpoint")
    if len(draft_keys) not in (0, 1, len(remote)):
        raise ValueError(
            f"--ssd-curve-draft-key {draft_keys[-1]}: {len(draft_keys)} keys for {len(remote)} tcp:// endpoints; give "
            "one, or one for each"
        )
    keys = [
        load_verifier_keys("--ssd-curve-secret-key", secret_key, "--ssd-curve-draft-key", draft_key)
        for draft_key in draft_keys
    ]
    keys_of = dict(zip(remote, keys * len(remote) if len(keys) == 1 else keys, strict=False))
    for endpoint in endpoints:
        if reason := why_refused(endpoint, endpoint in keys_of):
            raise ValueError(f"--ssd-draft-endpoint {endpoint}: {reason}")
    return [DraftAddress(endpoint, keys_of.get(endpoint)) for endpoint in endpoints]


def saguaro_scales(text: str) -> tuple[float, ...]:
    """The values of C that ``--ssd-saguaro-c`` allows. Raises ValueError in one line."""
    if text == "auto":
        return SCALES
    try:
        scale = float(text)
    except ValueError:
        scale = -1.0
    if not 0.0 <= scale <= 1.0:
        raise ValueError(f"--ssd-saguaro-c {text}: must be a number in [0, 1] or auto")
    return (scale,)


class SSDOptions(NamedTuple):
    """Our options of a running server."""

    mode: str
    fan_out_budget: int
    fan_out: str
    fallback: str
    adapts_lookahead: bool
    adapts_budget: bool
    draft_endpoints: tuple[str, ...]
    curve_secret_key: str | None
    curve_draft_keys: tuple[str, ...]
    sampling: str
    saguaro_scales: tuple[float, ...]
    draft_temperature: float | None
    round_timeout_ms: float | None
    start_timeout_s: float
    pack_weights: bool
    bit_equal: str

    def drafts(self) -> list[DraftAddress]:
        """Raises ValueError in one line."""
        return draft_addresses(self.draft_endpoints, self.curve_secret_key, self.curve_draft_keys)


def ssd_options(args: ServerArgs) -> SSDOptions:
    """Options from our own arguments, or for a server that SGLang's own launcher started (``sglang serve``) the
    defaults with the drafts named by ``SGLANG_SSD_DRAFT_ENDPOINT``, separated by commas."""
    if isinstance(args, SSDServerArgs):
        return SSDOptions(
            args.ssd_mode,
            0 if args.ssd_mode == "sync" else args.ssd_fan_out_budget,
            args.ssd_fan_out,
            args.ssd_fallback,
            args.ssd_adapts_lookahead,
            args.ssd_adapts_budget,
            tuple(args.ssd_draft_endpoint or ()),
            args.ssd_curve_secret_key,
            tuple(args.ssd_curve_draft_key or ()),
            args.ssd_sampling,
            saguaro_scales(args.ssd_saguaro_c),
            args.ssd_draft_temperature,
            args.ssd_round_timeout_ms,
            args.ssd_start_timeout_s,
            args.ssd_pack_weights,
            args.ssd_bit_equal,
        )
    own = {field.name: field.default for field in msgspec.structs.fields(SSDServerArgs)}
    return SSDOptions(
        "async",
        DEFAULT_FAN_OUT_BUDGET["cpu" if args.device == "cpu" else "cuda"],
        own["ssd_fan_out"],
        own["ssd_fallback"],
        False,
        False,
        tuple(filter(None, os.environ.get("SGLANG_SSD_DRAFT_ENDPOINT", "").split(","))),
        None,
        (),
        "shared-noise",
        (1.0,),
        None,
        own["ssd_round_timeout_ms"],
        own["ssd_start_timeout_s"],
        False,
        "off",
    )


class TargetFacts(NamedTuple):
    """What the handshake says about the target."""

    model_name: str
    vocab_size: int
    tokenizer_fingerprint: str
    context_length: int


def target_facts(scheduler) -> TargetFacts:
    """Read the facts off a scheduler whose model is loaded."""
    args = scheduler.server_args
    return TargetFacts(
        model_name=os.path.basename(args.model_path.rstrip("/")),
        vocab_size=scheduler.model_config.vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint(args.tokenizer_path or args.model_path),
        context_length=scheduler.model_config.context_len,
    )


def tokenizer_fingerprint(path: str) -> str:
    """A hash over the token list of a tokenizer: equal for two tokenizers iff the same id means the same token.

    Empty where no tokenizer can be loaded (token ids in and out); such a side is not compared.
    """
    from transformers import AutoTokenizer

    try:
        vocabulary = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    except Exception:  # noqa: BLE001  (transformers raises what it likes on a folder without tokenizer)
        return ""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        digest.update(f"{token_id}:{token}\n".encode())
    return digest.hexdigest()[:16]
