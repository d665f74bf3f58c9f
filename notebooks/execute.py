"""Runs the notebooks and keeps their outputs: `make notebooks`.

python notebooks/execute.py [NAME.ipynb ...]      all of them, if none is named
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat


HERE = pathlib.Path(__file__).parent
SECONDS_PER_CELL = 180


def execute(
    path: pathlib.Path, folder: str, xla_flags: str = ""
) -> nbformat.NotebookNode:
    """The notebook at `path`, run in `folder` by this Python, from its first cell on.

    Args:
      path: of the notebook.
      folder: where it runs.
      xla_flags: what its kernel has for XLA_FLAGS; by default nothing, as a reader's.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; its traceback is shown.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": folder}},
        record_timing=False,
    )
    client.execute(env=_environment(xla_flags))
    # Of the kernel only what does not change with the machine.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


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
            notebook = execute(path, folder)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
