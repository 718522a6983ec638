"""Kernels of sglang-ssd.

Every python start imports this package (see ``cpu_stand_in``), so it imports nothing itself: the public names below
come from their modules when first asked for.
"""

_MODULES = {
    "fork_attention": "dispatch",
    "sample_shared_noise": "dispatch",
    "sample_saguaro": "dispatch",
    "draw_and_agree": "dispatch",
    "largest_top_m": "dispatch",
    "ForkLayout": "cpu.fork_attention",
    "ForkPlan": "cpu.fork_attention",
    "make_plan": "cpu.fork_attention",
    "rms_norm": "cpu.rms_norm",
    "silu_and_mul": "cpu.silu_and_mul",
    "rotary_neox": "cpu.rotary_neox",
    "is_compiled": "cpu.library",
    "DevicePlan": "triton.fork_attention",
    "PlanLimits": "triton.fork_attention",
    "TablePlan": "triton.fork_attention",
    "verify_residual": "triton.target_draw",
}
__all__ = list(_MODULES)


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
