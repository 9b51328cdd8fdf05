"""What pyproject.toml cannot say: a wheel has train.py and constraints.txt inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithLoop(build_py):
    """train.py stays at the top of a checkout; a wheel must not install a module that is called train."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("train.py", "constraints.txt"):
                shutil.copy(name, Path(self.build_lib, "slimelite"))


setup(cmdclass={"build_py": WithLoop})
