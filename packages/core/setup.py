"""The extension `_host`. Without a C++ compiler the wheel is pure Python, and says so when it is used."""

import pathlib
import runpy
import shutil

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = pathlib.Path("src/expertmesh/core/_native")


class Build(build_ext):
    def build_extension(self, ext):
        native = runpy.run_path(str(FOLDER / "build.py"))
        native["build"](pathlib.Path(self.get_ext_fullpath(ext.name)))


host = Extension("expertmesh.core._native._host", [str(FOLDER / "launch.cc")])
setup(ext_modules=[host] if shutil.which("g++") else [], cmdclass={"build_ext": Build})
