"""Changes the package at random and checks that a test fails.

    pip install mutmut pytest-cov
    make test-all ARGS="--cov=sparsejax --cov-context=test --junitxml=build/tests.xml"
    python -m tests.tools.mutants sparsejax/transform --count 100

The kinds of change are mutmut's: numbers, comparisons, operators, `not`, `True`,
arguments left out or None, assignments of None. Changes of texts are left out:
`tests/error_messages.md` has the texts of errors. mutmut itself forks after it has run
the tests; the threads of XLA do not survive a fork.

A change is tried in a copy of the checkout, with the tests that run its line, the quick
ones first, and of those as many as take `--seconds` by their times in
`build/tests.xml`. Changes that no test finds are printed.
"""

import argparse
import collections
import difflib
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from xml.etree import ElementTree


if __name__ == "__main__":  # before JAX is imported
    here = pathlib.Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent)]
    import conftest  # noqa: F401

import coverage
import libcst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string


ROOT = pathlib.Path(__file__).parent.parent.parent


class Changes(libcst.CSTVisitor):
    """All changes of a file: `found` lists `(line, node, changed node)`."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self):
        super().__init__()
        self.found = []

    def on_visit(self, node):
        # Types and messages of errors are left out. Decorators are left out, because
        # most files cannot be imported without them.
        if isinstance(node, libcst.Annotation | libcst.Raise | libcst.Decorator):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and operator is not operator_string:
                line = self.get_metadata(PositionProvider, node, None)
                for changed in operator(node):
                    self.found.append((line and line.start.line, node, changed))
        return True


def changes_of(file):
    """`(line, changed text)` of each change."""
    wrapper = MetadataWrapper(libcst.parse_module(file.read_text()))
    visitor = Changes()
    wrapper.visit(visitor)
    for line, node, changed in visitor.found:
        if line is not None:
            yield line, lambda n=node, c=changed: wrapper.module.deep_replace(n, c).code


def seconds_of_tests(report):
    """How long each test took, by `(file, name)` as pytest names them."""
    seconds = collections.Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file, case.get("name")] += float(case.get("time", 0))
    return seconds


def tests_of(line, contexts, seconds, most):
    """The names of the tests that run `line`, of `most` seconds in all."""
    names = {name.partition("|")[0] for name in contexts.get(line, ())} - {""}
    if not names:  # a line that runs at import
        names = {c.partition("|")[0] for found in contexts.values() for c in found}
    timed = []
    for name in names:
        file, _, test = name.partition("::")
        if file.startswith("tests/") and (file, test) in seconds:
            timed.append((seconds[file, test], name))
    chosen, total = [], 0.0
    for duration, name in sorted(timed):
        total += duration
        if chosen and total > most:
            break
        chosen.append(name)
    return chosen


class FirstFailure:
    """A plugin of pytest that sends the name of the test that failed."""

    def __init__(self, pipe):
        self.pipe = pipe

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.pipe.send(report.nodeid)


def run_tests(folder, names, pipe):
    """Exits with pytest's code. Stops at the first test that fails."""
    os.chdir(folder)
    tests = str(ROOT / "tests")
    sys.path[:] = [str(folder), *(p for p in sys.path if not p.startswith(tests))]
    del sys.modules["conftest"]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # pytest warns of the modules imported here.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-W", ignored, "-p", "no:cacheprovider", "-p", "no:cov"]
    os._exit(pytest.main([*options, *names], [FirstFailure(pipe)]))


def passes(folder, names, most):
    """Return True if all tests pass in three times their time, and the failed one."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()
    process = context.Process(target=run_tests, args=(folder, names, its))
    process.start()
    process.join(60 + 3 * most)
    if process.is_alive():
        process.kill()
        process.join()
    codes = pytest.ExitCode
    if process.exitcode in (codes.USAGE_ERROR, codes.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest could not run {names}")
    return process.exitcode == codes.OK, mine.recv() if mine.poll() else None


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("room", nargs="+", help="files or folders of the package")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each")
    parser.add_argument("--coverage", type=pathlib.Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=pathlib.Path, default=ROOT / "build/tests.xml")
    options = parser.parse_args()
    paths = [ROOT / room for room in options.room]
    files = {
        f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))
    }
    data = coverage.CoverageData(str(options.coverage))
    data.read()
    seconds = seconds_of_tests(options.times)
    changes = [
        (f, line, change) for f in sorted(files) for line, change in changes_of(f)
    ]
    count = min(options.count, len(changes))
    chosen = random.Random(options.seed).sample(changes, count)
    sys.dont_write_bytecode = True  # compiled files differ by whole seconds
    start, survivors, untested = time.monotonic(), 0, 0
    sound, broken = set(), set()  # tests that pass, and that fail, without a change
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "checkout")
        left_out = shutil.ignore_patterns(".*", "__pycache__", "build")
        shutil.copytree(ROOT, copy, ignore=left_out)
        for done, (file, line, change) in enumerate(chosen, 1):
            where, before, after = file.relative_to(ROOT), file.read_text(), change()
            contexts = data.contexts_by_lineno(str(file))
            names = tests_of(line, contexts, seconds, options.seconds)
            found = False
            while names and not found:
                names = [name for name in names if name not in broken]
                (copy / where).write_text(after)
                passed, failed = passes(copy, names, options.seconds)
                (copy / where).write_text(before)
                if passed:
                    break
                # A test may fail for another reason: then it shows nothing.
                found = failed is None or failed in sound
                if not found:
                    (sound if passes(copy, [failed], 60)[0] else broken).add(failed)
            if not found:
                survivors += 1
                untested += not names
                old, new = before.splitlines(), after.splitlines()
                lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[3:]
                print(f"{where}:{line}, {len(names)} tests pass", *lines, sep="\n")
            took = time.monotonic() - start
            print(f"{survivors} of {done} not found, {took:.0f} s", flush=True)
    print(
        f"{' '.join(options.room)}, seed {options.seed}: {count} of {len(changes)} "
        f"changes, {survivors} not found, {untested} run by no test; {len(broken)} "
        "tests fail in any case"
    )


if __name__ == "__main__":
    main()
