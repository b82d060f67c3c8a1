"""Every folder of the four with an `__init__.py` is a package, `kconvert.` before its path."""

from setuptools import find_packages, setup

ROOTS = ("layouts", "convert", "validate", "runtime")
setup(packages=[f"kconvert.{p}" for p in find_packages() if p.partition(".")[0] in ROOTS])
