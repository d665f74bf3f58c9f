"""Shared by golden_torch.py and golden_tensorflow.py: the cases, and their files."""

import json
import pathlib
import platform

import numpy as np


GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
STEPS = 5  # of an optimizer
rng = np.random.default_rng(0)
cases, arrays = [], {}


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def keep(case, field, values):
    """Puts arrays in the file, and their keys in the case, which is the next one."""
    case[field] = {}
    for name, x in values.items():
        x = x.detach() if hasattr(x, "detach") else x  # PyTorch's
        arrays[f"{len(cases)}/{field}/{name}"] = np.asarray(x)
        case[field][name] = f"{len(cases)}/{field}/{name}"


def refusal(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def write(name, versions, kind):
    """Writes tests/golden/NAME.json and NAME.npz.

    Args:
      name: of the files.
      versions: of the systems that answered.
      kind: the type of their sparse gradients.
    """
    about = (
        f"What {versions} answered, on a CPU, Python {platform.python_version()}. "
        f"golden_{name}.py made it. Fields of a case name arrays in {name}.npz; "
        "`raises` is the error; `sparse` names the "
        f"gradients that were {kind}, `touched` the rows in them."
    )
    lines = ",\n".join(" " + json.dumps(case) for case in cases)
    text = f'{{\n"about": {json.dumps(about)},\n"cases": [\n{lines}\n]\n}}\n'
    (GOLDEN / f"{name}.json").write_text(text)
    np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
    print(len(cases), "cases;", sum("raises" in case for case in cases), "refused")
