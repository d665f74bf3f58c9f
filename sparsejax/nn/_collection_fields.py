"""What an EmbeddingCollection is made of: tables, and features that read them."""

from collections.abc import Mapping
from typing import Any

from sparsejax import _arguments
from sparsejax.nn._embedding import Embedding
from sparsejax.nn._embedding_bag import EmbeddingBag, check_combiner


CALL = "sparsejax.nn.EmbeddingCollection"


def as_pairs(field: str, given: Any, what: str) -> tuple[tuple[str, Any], ...]:
    try:
        named = dict(given)
        pairs = tuple(named.items())
        names = list(named if isinstance(given, Mapping) else (n for n, _ in given))
    except (TypeError, ValueError):
        pairs, names = (), []
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        raise TypeError(
            f"{CALL}: {field} must be a dict of names to {what}, of one at least, got "
            f"{_arguments.show(given)}."
        )
    if twice := [name for name in dict(pairs) if names.count(name) > 1]:
        raise ValueError(
            f"{CALL}: {field} has the name {twice[0]!r} twice. Give each a name of its "
            "own; several features may read one table."
        )
    return pairs


def as_layer(name: str, spec: Any) -> Any:
    if isinstance(spec, (Embedding, EmbeddingBag)):
        return spec
    if isinstance(spec, (tuple, list)) and len(spec) == 2:
        try:
            return EmbeddingBag(*spec)
        except (TypeError, ValueError) as error:
            # The table's name in the place of the class's, which nobody wrote.
            said = str(error).partition(": ")[2]
            raise type(error)(f"{CALL}, table {name!r}: {said}") from None
    raise TypeError(
        f"{CALL}: table {name!r} must be an Embedding, an EmbeddingBag, or "
        f"(num_embeddings, features), got {_arguments.show(spec)}."
    )


def as_read(name: str, given: Any, layers: dict[str, Any]) -> tuple[str, str]:
    """The table and the combiner of a feature."""
    table, *rest = given if isinstance(given, (tuple, list)) and given else (given,)
    if not isinstance(table, str) or len(rest) > 1:
        raise TypeError(
            f"{CALL}: feature {name!r} must be the name of its table, or (table, "
            f"combiner), got {_arguments.show(given)}."
        )
    check_known("table", table, list(layers))
    combiner = rest[0] if rest else getattr(layers[table], "combiner", "none")
    return table, check_combiner(f"{CALL}, feature {name!r}", combiner)


def is_triple(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3


def check_known(kind: str, name: Any, known: list[str]) -> None:
    if name not in known:
        shown = ", ".join(map(repr, known))
        raise ValueError(f"{CALL}: there is no {kind} {name!r}, only {shown}.")
