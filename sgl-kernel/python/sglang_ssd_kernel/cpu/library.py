"""Finds and loads the compiled CPU kernels, for the widest instruction set that the processor has."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

#: Forces a build of the kernels: an entry of ``ISAS``, or ``none`` for the torch references.
ISA_VARIABLE = "SGLANG_SSD_CPU_ISA"
#: Builds of the kernels, at their level in csrc/cpu/isa.cpp.
ISAS = ("portable", "avx2", "avx512")
#: Codes of the dtypes that the kernels take, as in csrc/cpu/vec.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "ssd_fork_attention": [_POINTER],
    "ssd_rms_norm": [*[_POINTER] * 5, _INT, _INT, _FLOAT, _INT],
    "ssd_silu_and_mul": [*[_POINTER] * 2, *[_INT] * 4],
    "ssd_rotary_neox": [*[_POINTER] * 3, *[_INT] * 7],
    "ssd_draft_sampler": [_POINTER],
    "ssd_target_draw": [_POINTER],
}


@cache
def load(isa: str) -> ctypes.CDLL | None:
    """The build for one instruction set, or None if it was not built."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels_{isa}{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            for name, argument_types in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = argument_types, None
            return library
    return None


@cache
def usable_isas() -> tuple[str, ...]:
    """Instruction sets that are built and that this processor has, the widest first."""
    portable = load("portable")
    if portable is None:
        return ()
    level = portable.ssd_isa_level()
    return tuple(isa for isa in reversed(ISAS[: level + 1]) if load(isa) is not None)


@cache
def is_compiled() -> str | None:
    """The build of the kernels in use: ``"avx512"``, ``"avx2"``, ``"portable"``, or None where references answer.

    Decided once a process. Raises ValueError if the environment asks for a build that does not exist or run here.
    """
    forced = os.environ.get(ISA_VARIABLE)
    if forced == "none":
        return None
    usable = usable_isas()
    if not forced:
        return usable[0] if usable else None
    if forced not in usable:
        raise ValueError(
            f"{ISA_VARIABLE}={forced}: not built, or not on this processor; usable: none, {usable}"
        )
    return forced


def kernel_for(tensor: torch.Tensor, name: str):
    """The compiled function ``name`` if it takes tensors of this device and dtype, else None."""
    if tensor.device.type != "cpu" or tensor.dtype not in DTYPE_CODES:
        return None
    isa = is_compiled()
    return None if isa is None else getattr(load(isa), name)
