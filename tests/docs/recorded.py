"""The runner of the pages that map another system's names to code.

On docs/torch.md and docs/tensorflow.md, and on gluon.md, paddle.md and caffe2.md in
this folder, which no user looks for, each row of a table in a numbered section holds a
name of the other system and a cell, the code to write instead. `golden/NAME.json` and
`.npz` hold the answers of the other system. A case with the name of a cell is compared
with it; `NAME.txt` has the other tests of cells and of the rows of the table of
differences, a line each:

    cell | arguments by name | its value
    cell | @recorded case | more arguments
    ? difference or cell | expression | its value

A value is an array of the same storage, a list, or a lambda that returns True. It may
use the arguments, `key`, the cell's name, and `given`, the arguments as a dict.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse as sp

import pages
import sparsejax as sj


TESTS = pages.ROOT / "tests"
ON_THE_SITE = ("tensorflow", "torch")
# One call of sparsejax, which the tests of its room try: elsewhere than on the site, it
# needs no line.
CALL = re.compile(r"(sj|store|trainer|block)(\.\w+)*(\([\w, ()=.\"]*\))?")


# Cells that look at values, or whose own values are no arrays.
EAGER = {
    "KVStore.pull(ignore_sparse=False)",
    "Parameter.row_sparse_data",
    "RowSparseNDArray.asnumpy",
    "VarDesc.type",
    "bounds_check_mode=FATAL",
    "grad.coalesce().indices()[0]",
    "tf.dynamic_partition(data, partitions, num_partitions)",
    "torch_scatter.gather_csr(src, indptr)",
}


def narrow(x: np.ndarray) -> np.ndarray:
    """The array as JAX holds it: of 32 bits, unless it has 64."""
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))


class Golden:
    """The answers of another system, in tests/golden/NAME.json and .npz."""

    def __init__(self, name: str):
        answers = TESTS / "golden" / f"{name}.json"
        self.golden = json.loads(answers.read_text())
        self.cases = self.golden["cases"]
        self._arrays = answers.with_suffix(".npz")

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        with np.load(self._arrays) as found:
            return dict(found)

    def get(self, case: Any, field: str) -> dict[str, Any]:
        """The arrays in one field of a case, such as "inputs", by name."""
        case = self.named(case) if isinstance(case, str) else case
        return {k: self.as_ours(entry) for k, entry in case.get(field, {}).items()}

    def as_ours(self, entry: Any) -> Any:
        """The recorded value in sparsejax's or SciPy's type of its storage."""
        if isinstance(entry, str):
            return narrow(self.arrays[entry])
        if "literal" in entry:
            return entry["literal"]
        parts = {part: narrow(self.arrays[key]) for part, key in entry["keys"].items()}
        if "indptr" in parts:
            csr = parts["data"], parts["indices"], parts["indptr"]
            return sp.csr_matrix(csr, tuple(entry["shape"]))
        if "indices" in parts:
            data = parts["data"].reshape(-1, *entry["shape"][1:])
            return sj.SelectedRows(parts["indices"], data, entry["shape"][0])
        value = jnp.asarray(parts["value"])
        if "rows" in parts:
            return sj.SelectedRows(jnp.asarray(parts["rows"]), value, entry["height"])
        return value

    def named(self, name: str) -> Any:
        """The case of that name."""
        (case,) = [case for case in self.cases if case["name"] == name]
        return case

    def inputs(self, name: str) -> dict[str, Any]:
        return self.get(name, "inputs")

    def outputs(self, name: str) -> dict[str, Any]:
        return self.get(name, "outputs")

    def first(self, name: str, field: str = "outputs") -> Any:
        """The first output of a case, or its first array in another field."""
        return next(iter(self.get(name, field).values()))

    def refuses(self, name: str, error: str) -> bool:
        """Whether the other system raised an error that starts so, or has the words."""
        case = self.named(name)
        said = case.get("raises") or "{type}: {message}".format(**case["error"])
        return said.startswith(error) or f" {error}" in said


class Page(Golden):
    """The page docs/NAME.md and the recorded answers tests/golden/NAME.

    Args:
      name: the name of the page.
      golden: the name of the recorded answers, if it differs from the page's.
      hidden: the starts of the numbered sections whose cells are not code.
      tables: the names of inputs whose recorded sparse gradients are sparse here.
      zeros: whether the recorded gradients may have rows of zeros that ours have not.
    """

    def __init__(self, name, golden="", hidden=(), tables=(), zeros=False):
        super().__init__(golden or name)
        self.name = name
        folder = pages.DOCS if name in ON_THE_SITE else TESTS / "docs"
        self.page, self.more = folder / f"{name}.md", TESTS / "docs" / f"{name}_rows.md"
        self.tables_of, self.zeros = tables, zeros
        lines = (TESTS / "docs" / f"{name}.txt").read_text().splitlines()
        lines = [re.split(r" \|(?= |$)", x) for x in lines if x and x[0] != "#"]
        self.lines = [tuple(part.strip() for part in line) for line in lines]
        self.rows = [
            cells
            for section, cells in self.tables()
            if section[:1].isdigit() and not section.startswith(hidden)
        ]
        self.differences = [c[0] for s, c in self.tables() if s.startswith("Where")]
        self.cells = {
            cells[0].strip("`"): cells[1].strip("`")
            for cells in self.rows
            if cells[1] != "—"
        }

    def tables(self):
        """(section, cells) of every row of the tables."""
        section, header = "", True
        more = self.more.read_text() if self.more.exists() else ""  # not on the site
        for line in (self.page.read_text() + more).splitlines():
            if line.startswith("## "):
                section = line[3:]
            if not line.startswith("|"):
                header = True
            elif header:
                header = False
            elif not line.startswith("|---"):
                yield section, [cell.strip() for cell in line.strip("| ").split(" | ")]

    @functools.cached_property
    def blocks(self) -> dict[str, Any]:
        """The names that the code blocks of the page and of its other rows define.

        A test must not run the blocks for the first time inside a trace.
        """
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            names = pages.run_page(self.page)
            return pages.run_page(self.more, **names) if self.more.exists() else names

    def run(self, key: str, /, **names: Any) -> Any:
        """The value of the cell of `key`."""
        return eval(self.cells[key], {**self.blocks, **names})

    def compiled(self, key: str, /, **names: Any) -> Any:
        """As `run`, in one program."""
        f = functools.partial(self.run, key, **names)
        return f() if key in EAGER else jax.jit(f)()

    # ------------------------------------------------------------------ its tests

    def tests(self, names: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Tests of the lines, of the cases by name, and that nothing is left out.

        The lines may use `names`, those of the test module.
        """
        own = "run named inputs outputs first get refuses"
        known = {name: getattr(self, name) for name in own.split()}
        known = globals() | known | names
        text = pathlib.Path(names["__file__"]).read_text()
        lines = "".join(f'{" | ".join(x)} | "{x[0]}"' for x in self.lines)
        in_text = lambda name: f'"{name}"' in text or f'"{name}"' in lines
        cases = [c for c in self.cases if c["name"] in self.cells and "outputs" in c]
        by_hand = lambda name: f'"{name}"' in text or f'"? {name}"' in lines
        by_name = [case for case in cases if not by_hand(case["name"])]

        @pytest.mark.usefixtures("loose_promotion", "eight_devices")
        @pytest.mark.parametrize("line", self.lines, ids=lambda line: line[0])
        def test_line(line, tmp_path):
            self.check_line(line, self.blocks | known | {"folder": tmp_path})

        @pytest.mark.usefixtures("loose_promotion")
        @pytest.mark.parametrize("case", by_name, ids=lambda case: case["name"])
        def test_recorded(case):
            is_training = "weights" in case["outputs"]
            (self.check_training if is_training else self.check_case)(case)

        def test_nothing_is_left_out():
            """Each cell, each difference and each recorded case is in a test."""
            tested = {line[0].removeprefix("? ") for line in self.lines}
            tested |= {case["name"] for case in by_name}
            cells = {x: code for x, code in self.cells.items() if x not in tested}
            if self.name not in ON_THE_SITE:
                calls = [x for x, code in cells.items() if CALL.fullmatch(code)]
                code = "\n".join(cells.pop(x) for x in calls)
                assert all(map(eval, re.findall(r"\bsj\.[\w.]+", code)))
            assert not [x for x in cells if f'"{x}"' not in text]
            assert not [x for x in {*self.differences} - tested if x not in text]
            cases = {case["name"] for case in self.cases} - tested
            assert not [x for x in cases if not in_text(x) and f"| @{x} |" not in lines]

        return test_line, test_recorded, test_nothing_is_left_out

    def check_line(self, line: tuple[str, ...], names: dict[str, Any]) -> None:
        """Compares a line of `NAME.txt`."""
        key, code, *value = line
        if code.startswith("@"):
            inputs, want = self.inputs(code[1:]), self.first(code[1:])
            given = {"inputs": list(inputs.values()), "shape": np.shape(want)}
            given |= self.named(code[1:]).get("params", {}) | inputs
            more = eval(f"dict({value[0] if value else ''})", names)
            got = self.compiled(key, **given | more)
            if np.shape(want) == (1,):  # MXNet 1 has no scalars
                got = jnp.reshape(got, -1)
            return assert_same_kind(got, want)
        if key.startswith("? "):
            got = eval(code, names)
        else:
            given = eval(f"dict({code})", names)
            is_any_object = value[0].startswith("lambda")
            got = (self.run if is_any_object else self.compiled)(key, **given)
            names = names | given | {"key": key, "given": given}
        return assert_like(got, eval(value[0], names))

    def names_of(self, case: Any) -> dict[str, Any]:
        """The names that a cell may use. Ids are NumPy's, and known inside of jit."""
        found = self.get(case, "inputs").items()
        floats = {name: jnp.asarray(x) for name, x in found if x.dtype.kind == "f"}
        given = {**case["args"], **dict(found), **floats}
        if {"indices", "values"} <= {*given}:
            ids = given["indices"]
            grad = sj.SelectedRows(ids[0] if ids.ndim > 1 else ids, given["values"], 9)
            if "sparse_mask" in case["name"]:
                grad = grad.coalesce()
            given |= {"grad": grad, "other": grad.coalesce()}
        return given

    def check_case(self, case: Any) -> None:
        """Compares outputs, gradients, and the rows of sparse gradients."""
        given, outputs = self.names_of(case), self.get(case, "outputs").values()
        cotangents, wants = self.get(case, "cotangents"), self.get(case, "grads")

        def outputs_of(tables):
            outputs = self.run(case["name"], **{**given, **tables})
            return outputs if type(outputs) is tuple else (outputs,)

        def loss(tables):
            outputs = outputs_of(tables)
            loss = sum(jnp.sum(outputs[int(i)] * c) for i, c in cotangents.items())
            return loss, outputs

        in_sparse = {
            name: name in case["sparse"] and name in self.tables_of and x.ndim > 1
            for name, x in wants.items()
        }
        if wants:
            grad = sj.grad(loss, has_aux=True, tables=in_sparse)
            grads, found = jax.jit(grad)({name: given[name] for name in wants})
        else:
            grads, found = {}, self.compiled(case["name"], **given)
            found = found if type(found) is tuple else (found,)
        for got, want in zip(found, outputs, strict=True):
            assert_answers(got, want)
        for name, want in wants.items():
            assert isinstance(grads[name], sj.SelectedRows) == in_sparse[name]
            assert_answers(grads[name], want)
            if in_sparse[name]:
                rows = set(np.asarray(grads[name].rows).tolist()) - {len(want)}
                touched = set(self.get(case, "touched")[name].tolist())
                assert self.zeros or touched <= rows
                assert not want[list(rows ^ touched)].any()

    def check_training(self, case: Any) -> None:
        """Trains on the ids and targets, and compares the weights of each step."""
        tx, (weight, ids, targets) = (
            self.run(case["name"], **case["args"]),
            (self.get(case, "inputs")[name] for name in ("weight", "ids", "targets")),
        )
        # Keras adds eps in another place, which small gradients show.
        atol = 3e-5 if case["name"].startswith("keras.optimizers.Adam") else 2e-6
        grads = [sj.SelectedRows(*grad, len(weight)) for grad in zip(ids, targets)]
        wants = self.get(case, "outputs")["weights"]
        for got, want in zip(train(tx, weight, grads), wants, strict=True):
            np.testing.assert_allclose(got, want, 2e-5, atol)


@pytest.fixture(autouse=True, scope="module")
def page_ran(request):
    """For modules with a `PAGE`: its blocks must not run first inside of a trace."""
    request.module.PAGE.blocks


# ------------------------------------------------------------------ comparing


def dense(x: Any) -> np.ndarray:
    """The dense array of `x`; NumPy adds up the rows of a SelectedRows."""
    if sp.issparse(x):
        return x.toarray()
    if not isinstance(x, sj.SelectedRows):
        return np.asarray(x)
    rows, values = np.asarray(x.rows), np.asarray(x.values)
    filled = (rows >= 0) & (rows < x.height)
    out = np.zeros((x.height, *values.shape[1:]), values.dtype)
    np.add.at(out, rows[filled], values[filled])
    return out


def filled_rows(x: sj.SelectedRows) -> list[int]:
    """The rows that are there, in their order."""
    return [row for row in np.asarray(x.rows).tolist() if 0 <= row < x.height]


def assert_answers(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    got, want = dense(got), dense(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def assert_same_kind(got: Any, want: Any, **tolerances: float) -> None:
    """As `assert_answers`, and both are of the same storage."""
    for kind in (sj.SelectedRows, sp.csr_matrix):
        assert isinstance(got, kind) == isinstance(want, kind), (got, want)
    assert_answers(got, want, **tolerances)


def assert_like(got: Any, want: Any) -> None:
    """As `assert_same_kind`; of lists, dicts and tuples each value; see above."""
    if getattr(want, "__name__", "") == "<lambda>":
        assert want(got), got
    elif callable(want):
        assert got is want
    elif isinstance(want, dict | tuple):
        pairs = want.items() if isinstance(want, dict) else enumerate(want)
        assert len(got) == len(want)
        for key, value in pairs:
            assert_like(got[key], value)
    elif isinstance(got, sj.SegmentTensor):
        assert got.to_lists() == want
    elif isinstance(want, str | bool | None | type) or isinstance(got, list):
        assert got == want
    else:
        assert_same_kind(got, want)


def same(got: Any, want: Any, **tolerances: float) -> bool:
    """Return True; fails if the values differ, or their storage."""
    assert_same_kind(got, want, **tolerances)
    return True


def raises(f: Callable[[], Any], error: Any, match: str | None = None) -> bool:
    """Return True; fails if a call does not raise."""
    with pytest.raises(error, match=match):
        f()
    return True


# ------------------------------------------------------------------ training

TABLE = np.arange(1.0, 19.0, dtype=np.float32).reshape(9, 2) / 10
GRAD = np.array([[0.5, -2.0], [1.0, 1.0], [0.25, 0.0]], np.float32)
MERGED = {7: GRAD[0] + GRAD[2], 2: GRAD[1]}
ROWS = np.array([7, 0])


def a_grad() -> sj.SelectedRows:
    return sj.SelectedRows(jnp.array([7, 2, 7]), jnp.asarray(GRAD), 9)


def table_grad(f: Callable[[Any], Any], table: Any) -> sj.SelectedRows:
    """The sparse gradient of the sum of `f(table)`."""
    return jax.jit(sj.grad(lambda t: jnp.sum(f(t)), tables=True))(table)


def train(tx: Any, weights: Any, gradients: Any, state: Any = None) -> Any:
    """The weights after each step, all rows up to date."""
    is_exact = hasattr(tx, "catch_up")

    @jax.jit
    def step(weights, state, grad):
        state = tx.init(weights) if state is None else state
        if is_exact:
            rows = grad.rows if isinstance(grad, sj.SelectedRows) else ...
            weights, state = tx.catch_up(weights, state, rows)
        updates, state = tx.update(grad, state, weights)
        weights = optax.apply_updates(weights, updates)
        whole = tx.flush(weights, state)[0] if is_exact else weights
        return weights, state, whole

    if state is None and len(gradients) > 1:
        state = jax.jit(tx.init)(weights)
    steps = []
    for grad in gradients:
        weights, state, whole = step(weights, state, grad)
        steps.append(np.asarray(whole))
    return np.stack(steps)


def after(tx: Any, steps: int = 1, table: Any = TABLE, grad: Any = None) -> Any:
    """The table after steps with one gradient."""
    return train(tx, table, [a_grad() if grad is None else grad] * steps)[-1]


def stepped(rule: Callable[[Any, Any], Any], steps: int = 1) -> np.ndarray:
    """TABLE with its rows 7 and 2 stepped: `rule(w, g)` is the new row."""
    want = TABLE.copy()
    for row, g in MERGED.items():
        for _ in range(steps):
            want[row] = rule(want[row], g)
    return want


def step_is(tx: Any, rule: Callable[[Any, Any], Any], steps: int = 1) -> bool:
    """Whether steps of `tx` are `rule(w, g)` on the rows that have a gradient."""
    rtol = 1e-5 if steps == 1 else 1e-4  # of Adam's corrections
    return same(after(tx, steps), stepped(rule, steps), rtol=rtol)


def skips_infinity(tx: Any) -> bool:
    """Whether a step whose gradient is infinite is skipped, and the scale is halved."""
    table = jnp.asarray(TABLE)
    state = tx.init(table)
    _, later = jax.jit(tx.update)(a_grad() * jnp.inf, state, table)
    return later.skipped == 1 and later.scale == state.scale / 2


# ------------------------------------------------------------------ stores, devices


def a_store(tx: Any = optax.sgd(1.0), name: str = "items") -> sj.store.KVStore:
    store = sj.store.KVStore()
    store.init(name, TABLE, tx)
    return store


def reads_its_rows(cache: Any, store: sj.store.KVStore) -> bool:
    """Whether steps read right rows through a cache of 3 slots."""
    tx = sj.optim.lazy(optax.sgd(0.0))
    read = lambda table, ids: (sj.lookup(table, ids).sum(), sj.lookup(table, ids))
    table, step = cache.table, store.train_step(read, tx, True)
    state = tx.init(table)
    for ids in ([7, 2], [7, 0], [1, 7]):
        table, state, (_, rows) = step(table, state, jnp.array(ids))
        assert_answers(rows, TABLE[np.array(ids)])
    return (cache.stats().hits, cache.stats().evictions) == (2, 1)


def inserted(index: sj.HashIndex, *batches: list[int]) -> sj.HashIndex:
    """The index after batches of keys, one at each step."""
    for step, keys in enumerate(batches):
        index, _, _ = index.insert(keys, step)
    return index


def mesh(*shape: int) -> jax.sharding.Mesh:
    """A mesh of the first devices, with axes "x", or "host" and "x"."""
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = jax.devices()[: np.prod(shape)]
    return jax.make_mesh(shape, ("host", "x")[-len(shape) :], auto, devices=devices)


def over_devices(f: Callable[..., Any], *args: Any) -> Any:
    """`f` of the parts of the arguments on two devices; its results are the same."""
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(f, mesh=mesh(2), in_specs=spec("x"), out_specs=spec())
    return jax.jit(f)(*args)


def sgd_step(table: Any, state: Any, ids: Any) -> tuple[Any, Any]:
    grad = sj.grad(lambda t: jnp.sum(sj.lookup(t, ids)), tables=True)(table)
    updates, state = sj.optim.lazy(optax.sgd(1.0)).update(grad, state, table)
    return optax.apply_updates(table, updates), state


def steps_alike(step: Callable[..., Any]) -> bool:
    """Whether `sgd_step` over devices is the step of one device."""
    table, ids = jnp.array(TABLE), jnp.array([7, 2, 7, 0])
    state = sj.optim.lazy(optax.sgd(1.0)).init(table)
    want, _ = jax.jit(sgd_step)(table, state, ids)
    return same(step(table, state, ids)[0], want)
