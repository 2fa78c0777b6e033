"""Tags the wheel: it holds a shared library, and no code that is compiled against Python."""

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel


class LibraryDistribution(setuptools.Distribution):
    """For one platform."""

    def has_ext_modules(self):
        return True


class LibraryWheel(bdist_wheel):
    """For every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setuptools.setup(distclass=LibraryDistribution, cmdclass={"bdist_wheel": LibraryWheel})
