"""Makes ``sgl_kernel`` importable on a CPU-only host, where SGLang asks for it and no package provides it.

SGLang 0.5.23 in CPU-engine mode (``SGLANG_USE_CPU_ENGINE=1``) imports ``sgl_kernel`` at module level, in every
process, before it loads any plug-in. The published package is built for CUDA and does not import without a
driver. So this distribution ships a ``.pth`` file, which python runs at its start, that appends a finder to
``sys.meta_path``:

- at the end, so that a real ``sgl_kernel`` on ``sys.path`` always wins, even one that then fails to import;
- active only while ``SGLANG_USE_CPU_ENGINE`` is ``1``, read when the import happens, so that a process on a GPU
  never meets the stand-in and gets python's own error where the real package is missing.

A top-level package named ``sgl_kernel`` would be simpler, but pip would let it and the real one overwrite each
other's files. Nothing here imports torch: a python that does not use SGLang pays for two small modules only.
"""

from __future__ import annotations

import os
import sys

CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"


class SglKernelFinder:
    """Meta-path finder that resolves the package ``sgl_kernel`` to the stand-in, and nothing else.

    Its submodules are then found by python's own path finder, in the stand-in's folder.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        """The spec of the stand-in, or None for another name or outside of CPU-engine mode."""
        if name != "sgl_kernel" or os.environ.get(CPU_ENGINE_VARIABLE) != "1":
            return None
        from importlib.util import spec_from_file_location

        folder = os.path.join(os.path.dirname(__file__), "sgl_kernel")
        return spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def install_finder() -> None:
    """Append the finder to ``sys.meta_path``, once."""
    if SglKernelFinder not in sys.meta_path:
        sys.meta_path.append(SglKernelFinder)
