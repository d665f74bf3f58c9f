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


def execute(path: pathlib.Path, folder: str) -> nbformat.NotebookNode:
    """The notebook at `path`, run in `folder` by this Python, from its first cell on.

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
    client.execute(env=_environment())
    # Of the kernel only what does not change with the machine.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _environment() -> dict[str, str]:
    """A reader's: with this checkout on the path, without the tests' flags."""
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(HERE.parent), env.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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
