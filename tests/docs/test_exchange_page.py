"""docs/explain/exchange.md: its code runs, its formulas hold, its programs compile."""

import math
import os
import re
from typing import Any

import pytest

import exchange_page as page
from helpers import run_python
from sparsejax import _compat


pytestmark = [pytest.mark.usefixtures("eight_devices"), pytest.mark.slow]

TEXT = page.PAGE.read_text() + page.PLANNED.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


MESH = page.AbstractMesh(
    (page.PLAN["devices"],), ("x",), axis_types=(page.AxisType.Auto,)
)


def cells(first):
    """The rows of the table whose header starts with `first`, below its rule."""
    table = TEXT[TEXT.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def number(cell):
    return int(cell.replace(",", ""))


def run_block(code, name):
    found: dict[str, Any] = {"__name__": name}
    exec(compile(code, page.PAGE.name, "exec"), found)
    return found


# ------------------------------------------------------------------ moved rows


@pytest.mark.usefixtures("loose_promotion")  # dense optax
@pytest.mark.parametrize("row", cells("layout"), ids=lambda row: row[0])
def test_bytes_on_the_wire(row):
    layout, formula, told = row
    names = {"N": page.N, "V": page.V, "n": page.n, "d": 4 * page.D, **page.measured()}
    for name, value in {"U": names["U"], "C": names["C"], "n": page.n}.items():
        assert f"{name} = {value:,}" in TEXT
    sent = page.sent(layout).total
    assert number(told) == sent
    # A loss and the agreement about rounds are a few bytes more.
    assert eval(formula, names) == pytest.approx(sent, rel=1e-4)
    if layout == "row-sharded":
        assert sent <= 600_000


def test_every_layout_has_its_row():
    assert [row[0] for row in cells("layout")] == list(page.LAYOUTS)


def test_the_code_that_reads_a_program(capsys):
    run_block(BLOCKS[0], "wire")
    assert "all-to-all" in capsys.readouterr().out


# ------------------------------------------------------------------ the paper plan


def test_the_plan_adds_up():
    plan = page.PLAN
    assert plan["tables"] * plan["rows"] * plan["width"] == 10**12
    names = {
        "N": plan["devices"],
        "T": plan["tables"],
        "R": math.ceil(plan["rows"] / plan["devices"]),
        "n": plan["ids"],
        "d": 4 * plan["width"],
        "C": page.PLAN_CAPACITY,
        "min": min,
    }
    assert f"R = {names['R']:,}" in TEXT
    for what, formula, told in cells("of each device"):
        assert eval(formula, names) == number(told), what
    ids = (1024, plan["ids"], plan["tables"] * plan["ids"])
    counted = [page.measured_capacity(plan["devices"], n) for n in ids]
    assert counted == [9, page.PLAN_CAPACITY, 62]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_plan_is_lowered_for_an_abstract_mesh(platform):
    text = page.lower(MESH, platform)
    assert f"num_partitions = {page.PLAN['devices']}" in text
    assert text.count("all_to_all") == 4


def test_more_than_2_to_31_rows_need_64_bit_ids():
    lower = lambda: page.lower(MESH, "tpu", rows=7_812_500_000, ids=32_768)
    with pytest.raises(ValueError, match="needs 64-bit ids. Set jax_enable_x64"):
        lower()
    with _compat.enable_x64(True):
        assert "all_to_all" in lower()


def test_the_plan_is_compiled_for_32_devices():
    told = {row[1]: row for row in cells("compiled for") if row[0] == "CPU"}
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    printed = run_python(page.__file__, "devices", *told, env=env)
    for line in printed.splitlines():
        found = eval(line)
        _, devices, tables, arguments, temporaries, sent, _ = told[
            str(found["devices"])
        ]
        assert (devices, tables) == (str(found["devices"]), "1")
        assert found["tables"] == number(arguments)
        assert found["sent"] == number(sent)
        assert found["temporaries"] == pytest.approx(number(temporaries), rel=0.05)
        # All but the batch is aliased: ids and targets of 4 bytes.
        rest = found["tables"] - found["in_place"]
        assert rest == 2 * 4 * page.PLAN["ids"]
