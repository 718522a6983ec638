"""``Engine``: SGLang's offline engine with SSD, for programs without a server.

with Engine(model_path="target", speculative_draft_model_path="draft") as engine:
    engine.generate("Hello", {"temperature": 0.7, "sampling_seed": 1})
"""

from __future__ import annotations

from typing import Any

from sglang_ssd.bridge.environment import use_cpu_engine
from sglang_ssd.draft_process import start_drafts
from sglang_ssd.launch_server import asked_device, prepare


class Engine:
    """Starts the drafts and SGLang's engine; every option of ``launch_server`` is a keyword, with underscores.

    Raises ValueError in one line on options that contradict each other or a model that cannot be read.
    """

    def __init__(self, **options: Any) -> None:
        device = options.setdefault("device", asked_device([]))
        if device == "cpu":
            use_cpu_engine()
        from sglang_ssd.bridge.process import start_engine
        from sglang_ssd.bridge.server_args import parse_options
        from sglang_ssd.plugin import register_algorithm, run_scheduler

        args = parse_options(options)
        draft_arguments = prepare(args)
        register_algorithm()
        self._drafts = start_drafts(draft_arguments)
        if self._drafts:
            args.ssd_draft_endpoint = [draft.endpoint for draft in self._drafts]
        try:
            self._engine = start_engine(args, run_scheduler)
        except BaseException:
            self._stop_drafts()
            raise

    def __getattr__(self, name: str) -> Any:
        """Everything else is SGLang's engine: ``generate``, ``async_generate``, ``get_server_info``..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._engine, name)

    def shutdown(self) -> None:
        """End all processes."""
        self._engine.shutdown()
        self._stop_drafts()

    def _stop_drafts(self) -> None:
        for draft in self._drafts:
            draft.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
