"""Compiles laxity/_fast.c where there is a compiler and Python.h; without them the SDK is Python and does the same."""

import sys
import sysconfig

from setuptools import Extension, setup

# The stable ABI, and the lock that the GIL is: CPython's own, so one build serves 3.11 and all later ones.
HAS_BOTH = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
FAST = Extension("laxity._fast", ["src/laxity/_fast.c"], py_limited_api=True, optional=True)

setup(
    ext_modules=[FAST] if HAS_BOTH else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_BOTH else {},
)
