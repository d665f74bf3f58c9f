"""A trainer's folder: the store's file, the dense leaves, and which pair counts.

Store and dense parameters are two files, and a crash may come between them. So each
save writes a new pair, named by a number, and then replaces the small file `current`,
which names the pair. Whoever loads follows `current`, which always names a whole pair;
the one before is removed after that.
"""

import json
import os
import pathlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax._files import read_npz, replacing


_CALL = "sparsejax.nn.Trainer.load"
_CURRENT = "current"

_SAVE = "sparsejax.nn.Trainer.save"
_A_FILE = "{call}: {path} is a file. Name the folder to save in."


def save(path: str | os.PathLike[str], tree: Any, store: Any) -> None:
    """Writes `tree` and all tables of `store` into a folder, and makes them current."""
    folder = pathlib.Path(path)
    if folder.is_file():
        raise NotADirectoryError(_A_FILE.format(call=_SAVE, path=folder))
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + (_current(folder) or 0)
    store.save(_store_file(folder, number))
    with replacing(_dense_file(folder, number)) as file:
        _write(file, tree)
    with replacing(folder / _CURRENT) as file:
        file.write(json.dumps({"number": number}).encode())
    keep = {_store_file(folder, number), _dense_file(folder, number)}
    for pattern in ("store-*", "dense-*.npz"):
        for old in set(folder.glob(pattern)) - keep:
            old.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], like: Any, store: Any) -> Any:
    """The tree that was saved, with the structure of `like`; fills `store`."""
    folder = pathlib.Path(path)
    if folder.is_file():
        raise NotADirectoryError(_A_FILE.format(call=_CALL, path=folder))
    number = _current(folder)
    if number is None:
        raise FileNotFoundError(
            f"{_CALL}: nothing was saved in {folder}: it has no file 'current'. Name "
            "the folder that Trainer.save was given."
        )
    tree = _read(_dense_file(folder, number), like)  # before anything is changed
    store.load(_store_file(folder, number))
    return tree


# ------------------------------------------------------------------ private


def _current(folder: pathlib.Path) -> int | None:
    try:
        return json.loads((folder / _CURRENT).read_bytes())["number"]
    except FileNotFoundError:
        return None


def _store_file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"store-{number}"


def _dense_file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"dense-{number}.npz"


def _write(file: BinaryIO, tree: Any) -> None:
    leaves = [_as_numpy(leaf) for leaf in jax.tree.leaves(tree)]
    # As bytes: NumPy does not know bfloat16 and the like.
    arrays: dict[str, Any] = {f"leaf{i}": _bytes_of(x) for i, x in enumerate(leaves)}
    header = np.frombuffer(json.dumps(_describe(tree)).encode(), np.uint8)
    np.savez(file, header=header, **arrays)


def _read(path: pathlib.Path, like: Any) -> Any:
    found = read_npz(_CALL, path, "a file that Trainer.save wrote", ["header"])
    header = json.loads(found["header"].tobytes())
    want = _describe(like)
    if header != want:
        there = [x for x in header if x not in want][:3]
        here = [x for x in want if x not in header][:3]
        raise ValueError(
            f"{_CALL}: {path} is of another model or optimizer: there the dense "
            f"leaves have {there}, and here {here}. Make the trainer with the "
            "block and the tx that were saved."
        )
    stored = [found[f"leaf{i}"] for i in range(len(header))]
    leaves, tree = jax.tree.flatten(like)
    return tree.unflatten(map(_restore, stored, leaves))


def _restore(stored: np.ndarray, like: Any) -> Any:
    template = _as_numpy(like)
    x = stored.view(template.dtype).reshape(template.shape)
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like))
    return x if isinstance(like, np.generic) else jnp.asarray(x)


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _describe(tree: Any) -> list[list[Any]]:
    """The place, type and shape of each leaf."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        x = _as_numpy(leaf)
        found.append([jax.tree_util.keystr(path), x.dtype.name, list(x.shape)])
    return found


def _as_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
