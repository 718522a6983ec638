"""Adds to the build what ``pyproject.toml`` cannot say: the .pth file, in plain and editable installs alike."""

from __future__ import annotations

from setuptools import Command, setup
from setuptools.command.build import build

PTH_FILE = "sglang_ssd_kernel.pth"


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


build.sub_commands.append(("build_pth", None))
setup(cmdclass={"build_pth": build_pth})
