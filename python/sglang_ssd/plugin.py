"""Ties the parts to SGLang: the only place that knows verifier and bridge and SGLang's entry points.

``python -m sglang_ssd.launch_server`` passes ``run_scheduler`` to SGLang's launcher. ``sglang serve
--speculative-algorithm SSD`` comes through the entry point ``register`` instead; its draft must run already and is
named by the environment variable ``SGLANG_SSD_DRAFT_ENDPOINT``.
"""

from __future__ import annotations


def register_algorithm() -> None:
    """Make ``--speculative-algorithm SSD`` known in this process."""
    from sglang_ssd.bridge.speculative import register_algorithm as register
    from sglang_ssd.verifier.worker import SSDWorker

    register(SSDWorker)


def scheduler_class() -> type:
    """Register the algorithm and return the scheduler that serves it."""
    from sglang_ssd.verifier.scheduler import SSDScheduler

    register_algorithm()
    return SSDScheduler


def run_scheduler(server_args, *args, **kwargs) -> None:
    """Entry of a scheduler process. It is imported before sglang is, so the process's environment is set here."""
    from sglang_ssd.bridge.environment import cores_of_rank, pin_process, quiet_model_registry
    from sglang_ssd.bridge.process import run_scheduler as run

    is_cpu = server_args.device == "cpu"
    if is_cpu:
        from sglang_ssd.bridge.parallel import speak_gloo_only

        quiet_model_registry()
        speak_gloo_only()
        cores = cores_of_rank(args[1] if len(args) > 1 else kwargs["gpu_id"])
        if cores:
            pin_process(cores)
    _install_for_device(is_cpu)
    run(scheduler_class, server_args, *args, **kwargs)


def _install_for_device(is_cpu: bool) -> None:
    """What the target's model runner needs before it is made."""
    if is_cpu:
        from sglang_ssd.bridge.cpu_attention import install_cpu_attention

        install_cpu_attention()
    else:
        from sglang_ssd.bridge.verify_graph import install_verify_graph

        install_verify_graph()


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: called in every SGLang process.

    Registers the algorithm, so that its name is known to ``sglang serve``, and replaces the scheduler only where that
    algorithm is asked for: a plain SGLang server stays untouched.
    """
    import sys

    if any(argument.rpartition("=")[2].upper() == "SSD" for argument in sys.argv):
        from sglang_ssd.bridge.environment import is_cpu_engine
        from sglang_ssd.bridge.process import replace_scheduler

        _install_for_device(is_cpu_engine())
        replace_scheduler(scheduler_class())
