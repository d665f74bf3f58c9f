"""What an EmbeddingCollection is made of: tables, and features that read them."""

from collections.abc import Mapping
from typing import Any

from sparsejax import _ids
from sparsejax.nn._embedding import Embedding
from sparsejax.nn._embedding_bag import EmbeddingBag, check_combiner


CALL = "sparsejax.nn.EmbeddingCollection"

_NAMED = (
    "{call}: {field} must be a dict of names to {what}, of one at least, got {found}."
)
_SPEC = (
    "{call}: table {name!r} must be an Embedding, an EmbeddingBag, or (num_embeddings, "
    "features), got {found}."
)
_FEATURE = (
    "{call}: feature {name!r} must be the name of its table, or (table, combiner), got "
    "{found}."
)
_TWICE = (
    "{call}: {field} has the name {found!r} twice. Give each a name of its own; "
    "several features may read one table."
)
_UNKNOWN = "{call}: there is no {kind} {found!r}, only {known}."


def as_pairs(field: str, given: Any, what: str) -> tuple[tuple[str, Any], ...]:
    try:
        named = dict(given)
        pairs = tuple(named.items())
        names = list(named if isinstance(given, Mapping) else (n for n, _ in given))
    except (TypeError, ValueError):
        pairs, names = (), []
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        raise TypeError(
            _NAMED.format(call=CALL, field=field, what=what, found=_ids.show(given))
        )
    if twice := [name for name in dict(pairs) if names.count(name) > 1]:
        raise ValueError(_TWICE.format(call=CALL, field=field, found=twice[0]))
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
    raise TypeError(_SPEC.format(call=CALL, name=name, found=_ids.show(spec)))


def as_read(name: str, given: Any, layers: dict[str, Any]) -> tuple[str, str]:
    """The table and the combiner of a feature."""
    table, *rest = given if isinstance(given, (tuple, list)) and given else (given,)
    if not isinstance(table, str) or len(rest) > 1:
        raise TypeError(_FEATURE.format(call=CALL, name=name, found=_ids.show(given)))
    check_known("table", table, list(layers))
    combiner = rest[0] if rest else getattr(layers[table], "combiner", "none")
    return table, check_combiner(f"{CALL}, feature {name!r}", combiner)


def is_triple(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3


def check_known(kind: str, name: Any, known: list[str]) -> None:
    if name not in known:
        shown = ", ".join(map(repr, known))
        raise ValueError(_UNKNOWN.format(call=CALL, kind=kind, found=name, known=shown))
