"""Runs the notebooks and keeps their outputs: `make notebooks`.

python notebooks/execute.py [NAME.ipynb ...]      all of them, if none is named
"""

import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator

import nbclient
import nbformat


HERE = pathlib.Path(__file__).parent
SECONDS_PER_CELL = 180


def execute(
    paths: Iterable[pathlib.Path], folder: str, xla_flags: str = ""
) -> Iterator[nbformat.NotebookNode]:
    """The notebooks at `paths`, run in `folder` by this Python, from the first cell on.

    All run in one kernel, which imports JAX once. Each begins without names.

    Args:
      paths: of the notebooks.
      folder: where they run.
      xla_flags: what the kernel has for XLA_FLAGS; by default nothing, as a reader's.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; its traceback is shown.
    """
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    )
    with client.setup_kernel(env=_environment(xla_flags)):
        for path in paths:
            client.nb = notebook = nbformat.read(path, as_version=4)
            forget = nbformat.v4.new_code_cell("%reset -f")
            client.execute_cell(forget, -1, store_history=False)
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
            # The cells count from 1, as in a kernel of their own.
            code = [cell for cell in notebook.cells if cell.cell_type == "code"]
            for number, cell in enumerate(code, 1):
                cell.execution_count = number
                for output in cell.outputs:
                    if "execution_count" in output:
                        output["execution_count"] = number
            # The rest of the kernel's metadata changes with the machine.
            notebook.metadata["language_info"] = {"name": "python"}
            yield notebook


def _environment(xla_flags: str) -> dict[str, str]:
    """This one's, with this checkout on the path."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "XLA_FLAGS": xla_flags, "PYTHONPATH": path}


def main() -> None:
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(
        HERE.glob("*.ipynb")
    )
    for path in paths:
        print("running", path.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            (notebook,) = execute([path], folder)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
