"""The environment of every test, and which tests `make test` selects.

The environment is set before JAX is imported: 8 devices made of the CPU, so that
sharding is tested everywhere. `JAX_PLATFORMS=cuda,cpu make test` runs on a GPU
(CONTRIBUTING.md); there the fixtures `cpu_backend` and `eight_devices` skip what a
single GPU cannot show. Compiled programs are kept in `.jax_cache` from one run to the
next, and are shared by the processes of one run.

`--quick` is the selection of `make test`: no docstrings; no test marked `slow`; and the
first 2 cases of a parametrized test, the second of which shows a value that the first
did not.

Each test runs with strict dtype and rank promotion: the library may not widen a type
or broadcast a rank by accident. Tests that run other people's models use the fixture
`loose_promotion`.
"""

import collections
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys


_ROOT = pathlib.Path(__file__).parent.parent
# A variable that the caller has set stays.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    # A device waits at a collective in a thread of XLA's pool, and may do so at two.
    "NPROC": "32",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".jax_cache"),
    # Small programs too: most are small, and loading takes a third of compiling.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # It takes JAX 4 ms to filter its own frames from each error that a test expects.
    "JAX_TRACEBACK_FILTERING": "off",
    # `explain` finds its lines in jaxprs, not in lowered programs.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}
# To optimize programs this small, or compile them in threads, costs more than it saves.
_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_cpu_parallel_codegen_split_count": 1,
    "--xla_backend_optimization_level": 0,
    "--xla_llvm_disable_expensive_passes": 1,
}
# The newer emitters of fused loops compile half as fast; other releases have no others.
if importlib.metadata.version("jaxlib").startswith(("0.7.", "0.8.", "0.9.", "0.10.")):
    _XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = 0

for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
_given = os.environ.get("XLA_FLAGS", "")
_added = [f"{name}={x}" for name, x in _XLA_FLAGS.items() if name not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()

import chex  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402


_MAX_BYTES = 5 << 29
_MAX_PROGRAMS = 200_000
_QUICK_CASES = 2
_SHARED_DATA = _ROOT.parent / "shared" / "data"

# An example may compile, so there is no time limit, and 40 of them are enough.
hypothesis.settings.register_profile(
    "sparsejax", deadline=None, derandomize=True, max_examples=40
)
hypothesis.settings.load_profile("sparsejax")

# JAX's modules are never collected; frozen, they do not slow collections while tracing.
gc.freeze()
gc.set_threshold(20_000, 20, 20)


# ------------------------------------------------------------------ collection

# Programs that are run by hand and modules that the tests import have no tests.
collect_ignore_glob = ["tools/*"]


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="no docstrings or slow tests, and the first 2 cases of others",
    )


def pytest_configure(config):
    if importlib.util.find_spec("keras") is None:  # its adapter has an example
        ignored = config.option.ignore or []
        config.option.ignore = [*ignored, str(_ROOT / "sparsejax/nn/keras.py")]
    cache = _ROOT / ".jax_cache"
    if not hasattr(config, "workerinput") and cache.is_dir():
        if len(os.listdir(cache)) > _MAX_PROGRAMS:  # most belong to older code
            for file in cache.iterdir():
                file.unlink(missing_ok=True)
    # Processes share the cache: a program that is only half written is compiled.
    ignored = ["Error (reading|writing) persistent compilation cache"]
    if jax.__version_info__ < (0, 8):  # its checkify says it of itself
        ignored.append("Explicitly requested dtype int64 requested in ones")
    for message in ignored:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")


def pytest_collection_modifyitems(config, items):
    """Doctests are collected from the package only, not from the tests' helpers."""
    kept = []
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            if _ROOT / "tests" in item.path.parents:
                continue
            item.add_marker(pytest.mark.slow)
            source = "".join(example.source for example in item.dtest.examples)
            if "pyarrow" in source and importlib.util.find_spec("pyarrow") is None:
                item.add_marker(pytest.mark.skip("needs pyarrow"))
        kept.append(item)
    if config.getoption("quick"):
        kept = _representatives(kept)
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    # Files with slow tests first, so that no process is left alone with one at the end.
    slow = {item.path for item in kept if item.get_closest_marker("slow")}
    kept.sort(key=lambda item: item.path not in slow)
    items[:] = kept


def _representatives(items):
    """The tests of `--quick`, see above."""
    seen, kept, runs = set(), [], collections.Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        # Stacked `parametrize` marks: each part of the id is the value of a parameter.
        parts = item.callspec._idlist if hasattr(item, "callspec") else []
        values = {(test, place, part) for place, part in enumerate(parts)}
        if runs[test] < _QUICK_CASES and not (values and values <= seen):
            kept.append(item)
            runs[test] += 1
        seen |= values
    return kept


def pytest_ignore_collect(collection_path, config):
    """Files whose tests are all left out are not imported, which takes seconds."""
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    is_slow = re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE)
    of_the_window = config.getoption("markexpr") == "window"
    left_out = of_the_window and "mark.window" not in text
    left_out |= config.getoption("quick") and is_slow is not None
    return True if left_out else None


# ------------------------------------------------------------------ fixtures


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    if "loose_promotion" in request.fixturenames:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def loose_promotion():
    """Runs the test without strict promotion, which other people's models need."""


@pytest.fixture
def eight_devices():
    """Skips the test on a machine with fewer devices, such as one GPU."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")


@pytest.fixture
def cpu_backend():
    """Skips the test elsewhere: it is of the program for a CPU, or of the last bit."""
    if jax.default_backend() != "cpu":
        pytest.skip("of a CPU's programs and bits")


@pytest.fixture(autouse=True)
def _traces_of_this_test():
    """chex counts traces by source, and a test's parameters share theirs."""
    chex.clear_trace_counter()


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    """Drops compiled programs before JAX, which keeps 8,192, forgets some of them."""
    yield
    if resident_bytes() > _MAX_BYTES:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        # glibc keeps freed memory; then every later file is over the bound.
        if sys.platform == "linux":
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    gc.freeze()  # otherwise each collection walks all that is cached


def resident_bytes():
    """Memory of this process; 0 where that is not known."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # another system
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def x64():
    """Runs the test with 64-bit types."""
    from sparsejax import _compat  # not before the environment is set

    with _compat.enable_x64(True):
        yield


@pytest.fixture
def shared_data():
    """The folder of real data sets, which some machines have beside the repository."""
    if not _SHARED_DATA.is_dir():
        pytest.skip("the optional data sets (../shared/data) are not here")
    return _SHARED_DATA


@pytest.fixture
def freed_pages(monkeypatch):
    """Calls of `keep_freed_pages` do nothing: the setting is one of the process."""
    from sparsejax import cpu  # not before the environment is set

    calls = []
    monkeypatch.setattr(cpu, "keep_freed_pages", lambda: calls.append(1))
    return calls
