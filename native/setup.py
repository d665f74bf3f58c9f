"""Builds the kernels: what pyproject.toml cannot say, where jaxlib's headers are."""

import importlib.util
import pathlib
import tempfile

from setuptools import Extension, setup


# Found, not imported: there is no need for jax, of which jaxlib would ask.
_jaxlib = importlib.util.find_spec("jaxlib")
if _jaxlib is None or _jaxlib.origin is None:
    raise ModuleNotFoundError(
        "sparsejax-native: building it needs jaxlib's headers. Install jaxlib==0.7.2, "
        "or build without --no-build-isolation."
    )

# What a build leaves, the next one would take, whatever has changed.
with tempfile.TemporaryDirectory() as build:
    setup(
        ext_modules=[
            Extension(
                "sparsejax_native._kernels",
                ["kernels.cc"],
                include_dirs=[str(pathlib.Path(_jaxlib.origin).with_name("include"))],
                extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
                py_limited_api=True,
            )
        ],
        options={"build": {"build_base": build}},
    )
