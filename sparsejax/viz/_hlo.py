"""Reads the text of a compiled program: `jax.jit(f).lower(...).compile().as_text()`.

It is an HLO module: computations of instructions, one a line, and an entry. A fusion, a
loop or a branch refers to other computations by name.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line, `name = shape opcode(operands), attributes`.

    Args:
      opcode, shape: as in the text; the shape may be of a tuple.
      rest: the attributes.
    """

    opcode: str
    shape: str
    rest: str

    def called(self) -> Iterator[tuple[str, str]]:
        """`(attribute, computation)` for each computation that it refers to."""
        for attribute, names in _CALLED.findall(self.rest):
            for name in names.strip("{}").split(","):
                yield attribute, name.strip().lstrip("%")

    def op_name(self) -> str:
        """The JAX operation, or the argument, that it comes from."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: `computations` by name, the names of its `entries`, its first line."""

    head: str
    entries: Sequence[str]
    computations: Mapping[str, Sequence[Instruction]]

    @property
    def num_devices(self) -> int:
        """Replicas times partitions."""
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.head)
        return math.prod(map(int, counts[:2]))


_NAME = r"%?([\w.\-]+)"
_HEADER = re.compile(rf"^\s*(ENTRY\s+)?{_NAME}\s*(?:\(.*)?\{{\s*$")
_LINE = re.compile(rf"^\s*(ROOT\s+)?{_NAME} = (.*)$")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


def parse(text: str) -> Module:
    """Reads the text of a module."""
    head = re.search(r"^HloModule .*$", text, re.MULTILINE)
    entries: list[str] = []
    computations: dict[str, list[Instruction]] = {}
    inside: list[Instruction] = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            shape, rest = _until_closed(match[3], " ")
            opcode, _, rest = rest.strip().partition("(")
            _, rest = _until_closed("(" + rest, "")  # without the operands
            inside.append(Instruction(opcode, shape, rest))
        elif match := _HEADER.match(line):
            inside = computations.setdefault(match[2], [])
            if match[1]:
                entries.append(match[2])
    return Module(head[0] if head else "", entries, computations)


def _until_closed(text: str, end: str) -> tuple[str, str]:
    """`text` up to the parenthesis that closes its first one, and the rest of it.

    Without a parenthesis at its start, up to `end`.
    """
    if not text.startswith("("):
        first, _, rest = text.partition(end)
        return first, rest
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    return text, ""


def split_tuple(shape: str) -> list[str]:
    """The members of a tuple shape."""
    parts, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def arrays(shape: str) -> list[tuple[str, str]]:
    """`(dtype, dimensions)` of each array in a shape: `("f32", "4,8")`."""
    return _ARRAY.findall(shape)


def num_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape."""
    return sum(_array_bytes(*array) for array in arrays(shape))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)
    width = 8 if dtype == "pred" else int(bits[1]) if bits else 0
    count = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return -(-count * width // 8)
