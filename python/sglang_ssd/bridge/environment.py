"""What must hold in a process before sglang is imported: the CPU engine switch, cores and threads.

On a CPU the two "devices" of the design are disjoint sets of cores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

#: Shown by SGLang on hosts without CUDA; decides its CPU engine at import (seam: srt/utils/common.py, is_cpu).
_CPU_ENGINE_SWITCH = "SGLANG_USE_CPU_ENGINE"
#: Cores of each TP rank, "0|1" (seam: srt/utils/numa_utils.py, init_threads_binding).
_CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
#: Set to 1 in tests and in the emulator: the overlapped loop of a GPU, on a CPU.
OVERLAP_SWITCH = "SGLANG_SSD_CPU_OVERLAP"


class Cores(NamedTuple):
    """Core ids of the target and of each draft. They overlap only where the user asked for it or the machine has one
    core."""

    target: list[int]
    drafts: list[list[int]]


def detect_device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def use_cpu_engine() -> None:
    """Make SGLang serve on the CPU. Call before the first import of sglang."""
    os.environ[_CPU_ENGINE_SWITCH] = "1"
    # A thread that waits for work must not burn the core of its neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    # torch's allocator then asks for huge pages: streaming weights misses the TLB less (an eighth of a linear's time).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    quiet_model_registry()


def is_cpu_engine() -> bool:
    """Whether SGLang serves on the CPU in this process."""
    return os.environ.get(_CPU_ENGINE_SWITCH) == "1"


def quiet_model_registry() -> None:
    """Not a warning for every model family whose kernels this host lacks; a model that is asked for and cannot be loaded
    still ends the start with its own error."""
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)


def parse_cores(text: str, option: str) -> list[int]:
    """Core ids from a list such as ``0-3,6``. Raises ValueError in one line that names the option."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            cores.extend(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ValueError(f"{option} {text}: not a list of cores such as 0-3,6") from None
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing or not cores:
        raise ValueError(f"{option} {text}: cores {missing or 'none'} are not available to this process")
    return sorted(set(cores))


def split_cores(target_cores: str | None, draft_cores: Sequence[str] | None, num_drafts: int = 1) -> Cores:
    """Who runs where on a CPU. By default the last cores go to the drafts, one each, and all others to the target.

    Naming one side leaves the rest to the other; naming both is taken as it is, so that they may share cores. One list
    for several drafts is split among them, and a list for each is taken as it is. Raises ValueError in one line where
    the cores do not suffice.
    """
    available = sorted(os.sched_getaffinity(0))
    target = parse_cores(target_cores, "--ssd-target-cores") if target_cores else None
    if not num_drafts:
        return Cores(target or available, [])
    if draft_cores:
        drafts = _cores_of_drafts(draft_cores, num_drafts)
    else:
        rest = [core for core in available if core not in (target or [])] or available
        if num_drafts > 1 and len(rest) < num_drafts + (target is None):
            raise ValueError(
                f"--ssd-num-drafts {num_drafts}: {len(rest)} cores are too few for target and drafts; --ssd-draft-cores, "
                "once for each draft, lets them share cores"
            )
        drafts = [[core] for core in rest[-num_drafts:]]
    if target is None:
        taken = {core for cores in drafts for core in cores}
        target = [core for core in available if core not in taken] or available
    return Cores(target, drafts)


def _cores_of_drafts(lists: Sequence[str], num_drafts: int) -> list[list[int]]:
    cores = [parse_cores(text, "--ssd-draft-cores") for text in lists]
    if len(cores) == num_drafts:
        return cores
    if len(cores) > 1:
        raise ValueError(
            f"--ssd-draft-cores {lists[-1]}: {len(cores)} lists for {num_drafts} drafts; give one, or one for each"
        )
    if len(cores[0]) < num_drafts:
        raise ValueError(
            f"--ssd-draft-cores {lists[0]}: {len(cores[0])} cores for {num_drafts} drafts; given once for each draft, the "
            "lists may overlap"
        )
    return rank_cores(cores[0], num_drafts)


def rank_cores(cores: list[int], num_ranks: int) -> list[list[int]]:
    """Cores of each rank: contiguous shares, one core at least (shared when there are fewer cores than ranks)."""
    share = max(1, len(cores) // num_ranks)
    return [[cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(num_ranks)]


def bind_target_ranks(cores: list[int], num_ranks: int) -> None:
    """Tell SGLang the cores of each rank; its schedulers read this when they start."""
    os.environ[_CPU_BINDING] = "|".join(",".join(map(str, share)) for share in rank_cores(cores, num_ranks))


def cores_of_rank(rank: int) -> list[int] | None:
    """The cores that ``bind_target_ranks`` gave this rank (SGLang's ``gpu_id``: TP ranks, one DP rank after another),
    None where nothing was bound."""
    binding = os.environ.get(_CPU_BINDING)
    if not binding or binding == "all":
        return None
    return parse_cores(binding.split("|")[rank], _CPU_BINDING)


def pin_process(cores: list[int]) -> None:
    """Pin this process and its torch threads to ``cores``."""
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
