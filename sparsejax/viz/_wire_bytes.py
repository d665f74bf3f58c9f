"""wire_bytes: counts the bytes that a compiled program sends, from its HLO text.

XLA decides which collectives a sharded program needs, so they are read from the
optimized program of one device, `jax.jit(f).lower(...).compile()`. With `g` devices in
a group and the usual ring or pairwise algorithms, each device sends

    all-reduce           2 B (g - 1) / g     B: bytes of the operand
    all-gather             B (g - 1) / g     B: bytes of the result
    reduce-scatter         B (g - 1) / g     B: bytes of the operand
    all-to-all             B (g - 1) / g     B: bytes of the operand, own part included
    ragged-all-to-all      B (g - 1) / g     B: bytes of the result buffer, a bound
    collective-permute     B                 B: bytes of the operand
    collective-broadcast   B                 B: bytes of the operand

Operands are padded buffers of static size, so empty slots are sent too.
"""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sparsejax import _arguments


_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HEAD = ("collective", "moves", "group", "times", "bytes", "made by")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Args:
      kind: its HLO name, for example `"all-to-all"`.
      shape: the shape of its result in HLO notation, `"f32[4,8]"`.
      group_size: how many devices exchange with each other.
      bytes: bytes that one device sends each time it runs.
      times: how often it runs.
      made_by: the JAX operation that it comes from, for example `"jit(f)/psum"`.
    """

    kind: str
    shape: str
    group_size: int
    bytes: int
    times: int
    made_by: str

    @property
    def total(self) -> int:
        """`bytes * times`."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True, repr=False)
class WireBytes:
    """The result of `wire_bytes`; prints as a table."""

    collectives: tuple[Collective, ...]

    @property
    def total(self) -> int:
        """Bytes that one device sends in one run of the program."""
        return sum(c.total for c in self.collectives)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of collective, for the kinds in the program."""
        totals: collections.Counter[str] = collections.Counter()
        for c in self.collectives:
            totals[c.kind] += c.total
        return dict(totals)

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEAD]
        for c in self.collectives:
            group, times = str(c.group_size), str(c.times)
            rows.append((c.kind, c.shape, group, times, f"{c.total:,}", c.made_by))
        rows.append(("total", "", "", "", f"{self.total:,}", ""))
        return _arguments.show_table(rows, right=(2, 3, 4))


def wire_bytes(
    compiled: jax.stages.Compiled | str,
    *,
    loop_trips: int = 1,
    branch: Callable[[Sequence[int]], int] = max,
) -> WireBytes:
    r"""Counts the bytes that one device sends in one run of a compiled program.

    The sum over the program's collectives, each by its formula in the module's
    docstring, for example `2 B (g - 1) / g` for an all-reduce of B bytes in groups of g
    devices. A collective in a loop counts once for each iteration.

    Args:
      compiled: the result of `jax.jit(f).lower(*args).compile()`, or its `as_text()`.
      loop_trips: the number of iterations to assume for a loop if it is not known at
        compile time, such as the rounds of an exchange; 0 ignores such loops.
      branch: how to choose the branch of a conditional that counts, by bytes: `max` or
        `min`.

    Returns:
      `WireBytes`. It prints as a table; `.total` is an int, `.by_kind` a dict, and
      `.collectives` a tuple of records.

    Raises:
      ValueError: `compiled` is not a compiled program or the text of one, or
        `loop_trips` is negative.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax as sj
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(8)).compile()
      >>> sj.viz.wire_bytes(compiled).total  # one device sends nothing
      0
      >>> text = "ENTRY %main {"
      >>> text += "\n %r = f32[100]{0} all-reduce(%x), replica_groups={{0,1,2,3}}\n}"
      >>> sj.viz.wire_bytes(text)
      collective  moves     group  times  bytes  made by
      --------------------------------------------------
      all-reduce  f32[100]      4      1    600
      total                                 600

    References:
      R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
      operations in MPICH", 2005; NVIDIA, nccl-tests, "bus bandwidth".
    """
    if operator.index(loop_trips) < 0:
        raise ValueError(f"wire_bytes: loop_trips must not be negative: {loop_trips}.")
    text: Any = compiled
    if isinstance(compiled, jax.stages.Compiled):
        text = compiled.as_text()
    if not isinstance(text, str) or not (program := _Program(text)).entries:
        raise ValueError(
            "compiled must be jax.jit(f).lower(*args).compile() or its text, got "
            f"{_arguments.kind_of(compiled)} without an ENTRY computation."
        )
    counted: collections.Counter[Collective] = collections.Counter()
    for entry in program.entries:
        for record in program.run(entry, loop_trips, branch):
            counted[dataclasses.replace(record, times=1)] += record.times
    collectives = [dataclasses.replace(c, times=n) for c, n in counted.items() if n]
    return WireBytes(tuple(sorted(collectives, key=lambda c: -c.total)))


# ------------------------------------------------------------------ the program

# A program is an HLO module: computations of instructions, one a line, and an entry. A
# fusion, a loop or a branch refers to other computations by name.

_NAME = r"%?([\w.\-]+)"
_HEADER = re.compile(rf"^\s*(ENTRY\s+)?{_NAME}\s*(?:\(.*)?\{{\s*$")
_LINE = re.compile(rf"^\s*(?:ROOT\s+)?{_NAME} = (.*?) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"\b(to_apply|calls|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


class _Instruction(NamedTuple):
    """One line, `name = shape opcode(operands), attributes`; a shape may be a tuple."""

    opcode: str
    shape: str
    attributes: str  # after the operands

    def called(self) -> list[tuple[str, str]]:
        """Returns `(attribute, computation)` for each computation that it refers to."""
        return [
            (attribute, name.strip().lstrip("%"))
            for attribute, names in _CALLED.findall(self.attributes)
            for name in names.strip("{}").split(",")
        ]


class _Program:
    """The computations of a module by name, and the names of its entries."""

    def __init__(self, text: str):
        head = re.search(r"^HloModule .*$", text, re.MULTILINE)
        counts = r"\b(?:replica_count|num_partitions)=(\d+)"
        sizes = re.findall(counts, head[0]) if head else []
        self.num_devices = math.prod(map(int, sizes[:2]))
        self.entries: list[str] = []
        self.computations: dict[str, list[_Instruction]] = {}
        inside: list[_Instruction] = []
        for line in text.splitlines():
            if match := _LINE.match(line):
                inside.append(_Instruction(match[3], match[2], match[4]))
            elif match := _HEADER.match(line):
                inside = self.computations.setdefault(match[2], [])
                self.entries += [match[2]] if match[1] else []

    def run(
        self, name: str, loop_trips: int, branch: Callable[[Sequence[int]], int]
    ) -> list[Collective]:
        """Counts collectives in one run of a computation: loops, branches, calls."""
        collectives: list[Collective] = []
        for instruction in self.computations.get(name, ()):
            opcode, _, attributes = instruction
            if opcode.endswith(("-done", "-update")):  # counted at its start
                continue
            called = instruction.called()
            kind = opcode.removesuffix("-start")
            wrapped = opcode != kind and any(a == "calls" for a, _ in called)
            if kind in _KINDS and not wrapped:
                collectives.append(_collective(kind, instruction, self.num_devices))
                continue
            runs = [self.run(inner, loop_trips, branch) for _, inner in called]
            if opcode == "while":
                trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
                trips = int(trip_count[1]) if trip_count else loop_trips
                times = {"body": trips, "condition": trips + 1}
                runs = [
                    [dataclasses.replace(c, times=c.times * times[a]) for c in run]
                    for (a, _), run in zip(called, runs)
                    if a in times
                ]
            elif opcode == "conditional" and runs:
                totals = [sum(c.total for c in run) for run in runs]
                runs = [runs[totals.index(branch(totals))]]
            collectives += [c for run in runs for c in run]
        return collectives


def _collective(kind: str, instruction: _Instruction, num_devices: int) -> Collective:
    shape = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", instruction.shape)  # layouts, comments
    arrays = _ARRAY.findall(shape)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # Operands, as many results, and contexts.
        arrays = [array for array in arrays if array != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    size = sum(_num_bytes(*array) for array in arrays)
    g = _group_size(instruction.attributes, num_devices)
    if kind == "all-reduce":
        sent = -(-2 * size * (g - 1) // g)
    elif kind == "reduce-scatter":
        sent = size * (g - 1)  # the result is a g-th of the operand
    elif kind.startswith("collective-"):
        sent = size
    else:
        sent = -(-size * (g - 1) // g)
    counts = collections.Counter(f"{dtype}[{dims}]" for dtype, dims in arrays)
    short = " + ".join(f"{n} x {s}" if n > 1 else s for s, n in counts.items())
    made_by = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    name = re.sub(r"\\(.)", r"\1", made_by[1]) if made_by else ""
    return Collective(kind, short, g, sent, 1, name)


def _num_bytes(dtype: str, dims: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)
    width = 8 if dtype == "pred" else int(bits[1]) if bits else 0
    count = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return -(-count * width // 8)


def _group_size(attributes: str, num_devices: int) -> int:
    """Counts a group's devices; HLO writes groups as lists, as an iota, or as axes."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=", attributes):
        return int(match[1].split(",")[-1])
    axes = r"replica_groups=mesh\[(.*?)\][^{]*\{([^{}]*)\}"
    if match := re.search(axes, attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(.*?)'=(\d+)", match[1])}
        parts = re.findall(r"'(.*?)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
        return max(len(group.split(",")) for group in match[1].strip("{}").split("},{"))
    return num_devices
