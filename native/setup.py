"""Builds the kernels: what pyproject.toml cannot say, where jaxlib's headers are."""

import importlib.util
import os

from setuptools import Extension, setup


# Found, not imported: there is no need for jax, of which jaxlib would ask.
_jaxlib = importlib.util.find_spec("jaxlib").submodule_search_locations[0]

setup(
    ext_modules=[
        Extension(
            "sparsejax_native._kernels",
            ["kernels.cc"],
            include_dirs=[os.path.join(_jaxlib, "include")],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
            py_limited_api=True,
        )
    ]
)
