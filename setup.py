"""Compiles the placer's kernels where there is a compiler and Python.h; without them numpy does the same."""

import sys
import sysconfig

from setuptools import Extension, setup

# The stable ABI of CPython: one build serves 3.11 and all later ones. No product and sum become one instruction, which
# would round once where numpy rounds twice.
KERNELS = Extension(
    "services.placer.core._kernels",
    ["services/placer/core/_kernels.c"],
    depends=["services/placer/core/_rankings.h"],
    extra_compile_args=["-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)
HAS_IT = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[KERNELS] if HAS_IT else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_IT else {},
)
