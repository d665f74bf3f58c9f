"""The harness of the five pages that map another system's names to code.

On docs/torch.md and docs/tensorflow.md, and on gluon.md, paddle.md and caffe2.md in
this folder, which no user looks for, each row of a table in a numbered section holds a
name of the other system and the code to write instead. `golden/NAME.json` and `.npz`
hold the answers of the other system. `NAME.txt` has examples of the cells that it gave
no answer for, and of the rows of the table of differences, a line each:

    cell | arguments by name | its value
    cell | @recorded case |
    ? difference | expression | its value

A value is an array of the same storage, a list, or a function that returns True.
"""

import functools
import json
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
        return {k: self.as_ours(entry) for k, entry in case.get(field, {}).items()}

    def as_ours(self, entry: Any) -> Any:
        """The recorded value in sparsejax's or SciPy's type of its storage."""
        narrow = lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
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


class Recorded(Golden):
    """The page docs/NAME.md and the recorded answers tests/golden/NAME.

    Args:
      name: the name of the page.
      golden: the name of the recorded answers, if it differs from the page's.
      hidden: the starts of the numbered sections whose cells are not code.
    """

    def __init__(self, name: str, golden: str = "", hidden: tuple[str, ...] = ()):
        super().__init__(golden or name)
        folder = pages.DOCS if name in ON_THE_SITE else TESTS / "docs"
        self.page = folder / f"{name}.md"
        self.more = TESTS / "docs" / f"{name}_rows.md"  # not on the site
        examples = TESTS / "docs" / f"{name}.txt"
        text = examples.read_text() if examples.exists() else ""
        lines = [
            re.split(r" \|(?= |$)", x) for x in text.splitlines() if x and x[0] != "#"
        ]
        self.examples = [tuple(part.strip() for part in line) for line in lines]
        self.checked: dict[str, Any] = {
            line[0].removeprefix("? "): None for line in self.examples
        }
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
        """(section, cells) of every row of the page's tables."""
        section, header = "", True
        more = self.more.read_text() if self.more.exists() else ""
        text = self.page.read_text() + more
        for line in text.splitlines():
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

    def check_example(self, line: tuple[str, ...], names: dict[str, Any]) -> None:
        """Compares a line of `NAME.txt`, in which `names` are known."""
        key, code, *value = line
        names = {**self.blocks, **names}
        if code.startswith("@"):
            case = self.named(code[1:])
            inputs, outputs = self.get(case, "inputs"), self.get(case, "outputs")
            want = next(iter(outputs.values()))
            given = {"inputs": list(inputs.values()), "shape": np.shape(want)}
            got = self.run(key, **given | case.get("params", {}) | inputs)
            if np.shape(want) == (1,):  # MXNet 1 has no scalars
                got = jnp.reshape(got, -1)
            return assert_same_kind(got, want)
        if key.startswith("? "):
            got = eval(code, names)
        else:
            given = eval(f"dict({code})", names)
            got, names = self.run(key, **given), {**names, **given}
        return assert_like(got, eval(value[0], names))

    @property
    def by_hand(self) -> list[Any]:
        """The registered checks."""
        return list(dict.fromkeys(filter(None, self.checked.values())))

    def checks(self, *keys: str) -> Callable[[Any], Any]:
        """Registers a check of cells or of rows of the table of differences."""

        def register(check):
            self.checked.update((key, check) for key in keys)
            return check

        return register


@pytest.fixture(autouse=True, scope="module")
def page_ran(request):
    """For modules with a `PAGE`: its blocks must not run first inside of a trace."""
    request.module.PAGE.blocks


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


def raises(f: Callable[[], Any], error: Any, match: str | None = None) -> bool:
    """Return True; fails if a call does not raise."""
    with pytest.raises(error, match=match):
        f()
    return True


# ------------------------------------------------------------------ torch, tensorflow


class ByCell(Recorded):
    """Answers whose names are those of the page's cells.

    Args:
      name: the name of the page.
      grad_section: the number of the section on sparse gradients, as `grad`.
      other: the names of the cases that have a check by hand.
      wrong: the name of the case whose recorded gradient is not the derivative.
    """

    def __init__(self, name: str, grad_section: str, other=(), wrong: str = ""):
        super().__init__(name, hidden=("10 ",))
        self.wrong = wrong
        self.of_grads = {
            cells[0].strip("`")
            for section, cells in self.tables()
            if section.startswith(f"{grad_section} ")
        }
        known = [case for case in self.cases if case["name"] in self.cells]
        known = [
            case for case in known if "outputs" in case and case["name"] not in other
        ]
        ids = {f"{k}-{case['name']}": case for k, case in enumerate(known)}
        self.training = {k: c for k, c in ids.items() if "weights" in c["outputs"]}
        self.values = {k: c for k, c in ids.items() if k not in self.training}

    def check_example(self, line: tuple[str, ...], names: dict[str, Any]) -> None:
        own = {k: getattr(self, k) for k in ("run", "get", "named", "first", "refuses")}
        super().check_example(line, {**own, **names})

    def refuses(self, name: str, error: str) -> bool:
        return self.named(name)["raises"].startswith(error)

    def first(self, name: str, field: str = "outputs") -> Any:
        """The first output of a case, or its first array in another field."""
        return next(iter(self.get(self.named(name), field).values()))

    def names_of(self, case: Any) -> dict[str, Any]:
        """The names that a cell may use. Ids are NumPy's, and known inside of jit."""
        found = self.get(case, "inputs").items()
        floats = {name: jnp.asarray(x) for name, x in found if x.dtype.kind == "f"}
        given = {**case["args"], **dict(found), **floats}
        if case["name"] in self.of_grads and "indices" in given:
            ids = given["indices"]
            grad = sj.SelectedRows(ids[0] if ids.ndim > 1 else ids, given["values"], 9)
            if "sparse_mask" in case["name"]:
                grad = grad.coalesce()
            given |= {"grad": grad, "other": grad.coalesce()}
        return given

    def check_values(
        self, case: Any, is_table: Callable[..., bool], slack: str
    ) -> None:
        """Compares outputs and gradients.

        Args:
          case: a recorded case.
          is_table: of the name and the array of a gradient that is sparse there:
            whether ours is.
          slack: "ours" if ours may have slots of zeros, "both" if either may.
        """
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
            n: n in case["sparse"] and is_table(n, x) for n, x in wants.items()
        }
        if wants:
            grad = sj.grad(loss, has_aux=True, tables=in_sparse)
            grads, found = jax.jit(grad)({name: given[name] for name in wants})
        else:
            grads, found = {}, outputs_of({})
        for got, want in zip(found, outputs, strict=True):
            assert_answers(got, want)
        for name, want in wants.items():
            assert isinstance(grads[name], sj.SelectedRows) == in_sparse[name]
            if case["name"] != self.wrong:
                assert_answers(grads[name], want)
            if in_sparse[name]:
                rows = set(np.asarray(grads[name].rows).tolist()) - {len(want)}
                touched = set(self.get(case, "touched")[name].tolist())
                assert slack == "both" or touched <= rows
                assert not want[list(rows ^ touched)].any()

    def check_training(self, case: Any, rtol: float, atol: float) -> None:
        """Trains on the ids and targets, and compares the weights of each step."""
        tx, given = self.run(case["name"], **case["args"]), self.get(case, "inputs")
        weights = self.get(case, "outputs")["weights"]
        is_exact = hasattr(tx, "catch_up")

        def step(carry, batch):
            w, state = carry
            ids, target = batch
            if is_exact:
                w, state = tx.catch_up(w, state, ids)
            loss = lambda w: jnp.sum(sj.lookup(w, ids) * target)
            updates, state = tx.update(sj.grad(loss, tables=True)(w), state, w)
            w = optax.apply_updates(w, updates)
            return (w, state), w

        @jax.jit
        def train(w, *batches):
            (w, state), steps = jax.lax.scan(step, (w, tx.init(w)), batches)
            return steps, tx.flush(w, state)[0] if is_exact else w

        steps, last = train(
            *(jnp.asarray(given[k]) for k in ("weight", "ids", "targets"))
        )
        for got, ids, want in zip(steps, given["ids"], weights, strict=True):
            read = ids if is_exact else slice(None)  # the others wait for their flush
            np.testing.assert_allclose(got[read], want[read], rtol, atol)
        np.testing.assert_allclose(last, weights[-1], rtol, atol)

    def check_all_are_checked(self) -> None:
        recorded = {c["name"] for c in [*self.values.values(), *self.training.values()]}
        assert set(self.checked) | recorded == {*self.cells, *self.differences}
        assert not recorded & set(self.checked)


# ------------------------------------------------------------------ checks by hand


def one_step(tx, table, grad, steps=1):
    @jax.jit
    def train(table, grad):
        def step(carry, _):
            table, state = carry
            updates, state = tx.update(grad, state, table)
            return (optax.apply_updates(table, updates), state), None

        start = table, tx.init(table)
        return jax.lax.scan(step, start, length=steps)[0][0]

    return train(jax.tree.map(jnp.asarray, table), grad)


def check_loss_scale(tx):
    """A step whose gradient is infinite is skipped, and the scale is halved."""
    table = jnp.asarray(TABLE)
    state = tx.init(table)
    _, after = jax.jit(tx.update)(a_grad() * jnp.inf, state, table)
    assert after.skipped == 1 and after.scale == state.scale / 2


TABLE = np.arange(1.0, 19.0, dtype=np.float32).reshape(9, 2) / 10
GRAD = np.array([[0.5, -2.0], [1.0, 1.0], [0.25, 0.0]], np.float32)


def a_grad():
    return sj.SelectedRows(jnp.array([7, 2, 7]), jnp.asarray(GRAD), 9)


MERGED = {7: GRAD[0] + GRAD[2], 2: GRAD[1]}


def stepped(rule):
    """TABLE with its rows 7 and 2 stepped: `rule(w, g)` is the new row."""
    want = TABLE.copy()
    for row, g in MERGED.items():
        want[row] = rule(want[row], g)
    return want
