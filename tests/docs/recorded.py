"""A page whose cells are code, and what another system answered to the same.

docs/torch.md and docs/tensorflow.md are such pages: each row of a table whose section
has a number is a name of theirs and what to write here. `golden/NAME.json` and `.npz`,
which `tools/golden_NAME.py` made, hold the cases.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pages
import sparsejax as sj


TESTS = pages.ROOT / "tests"


class Recorded:
    """The page docs/NAME.md beside tests/golden/NAME.

    Args:
      name: of both.
      hidden: starts of the sections whose cells are no code.
    """

    def __init__(self, name: str, hidden: tuple[str, ...] = ()):
        self.page = pages.DOCS / f"{name}.md"
        self.cases = json.loads((TESTS / "golden" / f"{name}.json").read_text())[
            "cases"
        ]
        self._arrays = TESTS / "golden" / f"{name}.npz"
        self.differences = [c[0] for s, c in self.tables() if s.startswith("Where")]
        self.cells = {
            cells[0].strip("`"): cells[1].strip("`")
            for section, cells in self.tables()
            if section[:1].isdigit() and not section.startswith(hidden)
            if cells[1] != "—"
        }

    def tables(self):
        """(section, cells) of every row of the page's tables."""
        section, header = "", True
        for line in self.page.read_text().splitlines():
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
        """What the page's code blocks define; not to be run first inside of a trace."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return pages.run_page(self.page)

    def run(self, key: str, /, **names: Any) -> Any:
        """The value of the cell of `key`."""
        return eval(self.cells[key], {**self.blocks, **names})

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        with np.load(self._arrays) as found:
            return dict(found)

    def get(self, case: Any, field: str) -> dict[str, Any]:
        """The arrays of a case, "inputs" say, as JAX would have them."""
        found = {name: self.arrays[key] for name, key in case.get(field, {}).items()}
        narrow = lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
        return {name: narrow(x) for name, x in found.items()}

    def named(self, name: str) -> Any:
        """The case of that name."""
        (case,) = [case for case in self.cases if case["name"] == name]
        return case


def dense(x: Any) -> np.ndarray:
    return np.asarray(x.to_dense() if isinstance(x, sj.SelectedRows) else x)


def assert_answers(got: Any, want: Any) -> None:
    assert dense(got).shape == want.shape
    np.testing.assert_allclose(dense(got), want, rtol=1e-5, atol=1e-6)


def is_training(case: Any) -> bool:
    return "weights" in case.get("outputs", {})


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
