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
      name, opcode, shape: as in the text; the shape may be of a tuple.
      operands: the text in the parentheses.
      rest: the attributes.
      is_root: True for the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    operands: str
    rest: str
    is_root: bool

    def operand_names(self) -> list[str]:
        """The names of the operands; older releases write shapes before names."""
        parts = split_tuple(re.sub(r"/\*.*?\*/", "", f"({self.operands})"))
        return [part.split()[-1].lstrip("%") for part in parts if part]

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
            operands, rest = _until_closed("(" + rest, "")
            inside.append(
                Instruction(
                    match[2], opcode, shape, operands[1:-1], rest, bool(match[1])
                )
            )
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


# ------------------------------------------------------------------ arguments

# A value of a program: the number of the argument that it is, or None, or a tuple.
Value = int | None | tuple["Value", ...]

_PASSES_ON = frozenset("bitcast reshape opt-barrier copy-done".split())
_READS = frozenset("gather dynamic-slice slice".split())
_WRITES = frozenset("scatter dynamic-update-slice".split())
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}(?:, [a-z]+-alias)?\)")


@dataclasses.dataclass
class Argument:
    """An argument of a program, and what the program does with it.

    Args:
      name: as JAX calls it, `params['table']`.
      shape: of its part on one device.
      donated: True if a result may take over its buffer.
      uses: "read" (some of it), "write" (some of it, in place), "copy", and "walk" (an
        operation on all of it).
      swapped: True if its buffer gets the new value of another argument.
    """

    name: str
    shape: str
    donated: bool
    uses: set[str] = dataclasses.field(default_factory=set)
    swapped: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes on one device."""
        return num_bytes(self.shape)


def arguments(module: Module) -> list[Argument]:
    """The arguments of a program with one entry, and its uses of each of them."""
    (entry,) = module.entries
    parameters = [i for i in module.computations[entry] if i.opcode == "parameter"]
    parameters.sort(key=lambda i: int(i.operands))
    aliases = [(place, int(k)) for place, k in _ALIAS.findall(module.head)]
    _, _, donors = module.head.partition("buffer_donor={")
    donated = {int(k) for k in re.findall(r"\((\d+), ", donors.partition("} ")[0])}
    donated |= {k for _, k in aliases}
    found = [
        Argument(i.op_name(), i.shape, int(i.operands) in donated) for i in parameters
    ]
    result = _Follow(module, found, {}).run(entry, tuple(range(len(found))))
    for place, k in aliases:
        new = result
        for index in re.findall(r"\d+", place):
            new = new[int(index)] if isinstance(new, tuple) else None
        found[k].swapped = new is not None and new != k
    return found


@dataclasses.dataclass(frozen=True)
class _Follow:
    """Follows the buffers of arguments through loops, branches and fusions."""

    module: Module
    found: Sequence[Argument]
    done: dict[tuple[str, tuple[Value, ...]], Value]

    def run(self, name: str, args: tuple[Value, ...]) -> Value:
        """The result of a computation."""
        key = name, args
        if key not in self.done:
            self.done[key] = None
            values: dict[str, Value] = {}
            for i in self.module.computations.get(name, ()):
                if i.opcode == "parameter":
                    values[i.name] = args[int(i.operands)]
                else:
                    inputs = [values.get(x) for x in i.operand_names()]
                    values[i.name] = self._result(i, inputs)
                if i.is_root:
                    self.done[key] = values[i.name]
        return self.done[key]

    def _result(self, i: Instruction, inputs: list[Value]) -> Value:
        opcode = i.opcode
        if opcode == "tuple":
            return tuple(inputs)
        if not any(x is not None for x in inputs):
            return None
        first = inputs[0]
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", i.rest)
            return first[int(index[1])] if isinstance(first, tuple) and index else None
        if opcode in _PASSES_ON:
            return first
        called = dict(i.called())
        if opcode == "while":
            self.run(called["condition"], (first,))
            return self.run(called["body"], (first,))
        if opcode == "conditional":
            runs = [self.run(c, (x,)) for (_, c), x in zip(i.called(), inputs[1:])]
            return next((x for x in runs if x is not None), None)
        if opcode in ("fusion", "call") or opcode.endswith("-start") and called:
            return self.run(next(iter(called.values())), tuple(inputs))
        if opcode.endswith("-done"):
            return first
        if opcode in ("copy", "copy-start"):
            self._use("copy", first)
            return first
        if opcode in _READS:
            self._use("read", first)
            return None
        if opcode in _WRITES:
            self._use("write", first)
            for x in inputs[1:]:
                self._use("walk", x)
            return first
        aliases = {int(number): place for place, number in _ALIAS.findall(i.rest)}
        for number, x in enumerate(inputs):
            self._use("write" if number in aliases else "walk", x)
        return next((inputs[n] for n, place in aliases.items() if not place), None)

    def _use(self, kind: str, value: Value) -> None:
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, tuple):
                self._use(kind, x)
            elif x is not None:
                self.found[x].uses.add(kind)
