"""Adds to the build what ``pyproject.toml`` cannot say: the .pth file and the CPU kernels, in plain and editable installs."""

from __future__ import annotations

import platform
from glob import glob
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

PTH_FILE = "sglang_ssd_kernel.pth"

#: Compiler flags of each build of the CPU kernels; python/sglang_ssd_kernel/cpu/library.py chooses among them.
ISA_FLAGS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma"]
    ISA_FLAGS["avx512"] = [
        *ISA_FLAGS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    ]  # fmt: skip
# Contraction joins a product and its sum into one instruction. No -ffast-math: it reorders sums.
COMPILE_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fopenmp"]


class build_pth(Command):
    """Build sub-command that puts the .pth file at the top of the wheel, hence into site-packages."""

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        # An editable wheel takes nothing from build_lib; it is assembled where the install would go.
        directory = (
            self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        )
        self.mkpath(directory)
        self.copy_file(PTH_FILE, directory)

    def get_source_files(self) -> list[str]:
        return [PTH_FILE]


class build_kernels(build_ext):
    """Builds every extension in a folder of its own: they share sources, and object files are named after these."""

    def build_extension(self, ext: Extension) -> None:
        shared_folder = self.build_temp
        self.build_temp = str(Path(shared_folder, ext.name))
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared_folder


def cpu_kernels(isa: str) -> Extension:
    """The CPU kernels for one instruction set. A plain library for ctypes: it knows nothing of python or torch."""
    return Extension(
        f"sglang_ssd_kernel.cpu._kernels_{isa}",
        sources=sorted(glob("csrc/cpu/*.cpp")),
        depends=sorted(glob("csrc/cpu/*.h")),
        language="c++",
        extra_compile_args=COMPILE_FLAGS + ISA_FLAGS[isa],
        extra_link_args=["-fopenmp"],
        optional=True,  # no compiler, no kernels: the torch references answer
    )


build.sub_commands.append(("build_pth", None))
setup(
    cmdclass={"build_pth": build_pth, "build_ext": build_kernels},
    ext_modules=[cpu_kernels(isa) for isa in ISA_FLAGS],
)
