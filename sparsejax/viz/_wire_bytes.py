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
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sparsejax import _arguments
from sparsejax.viz import _hlo


_CALL = "sparsejax.viz.wire_bytes"
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
        found: dict[str, int] = {}
        for c in self.collectives:
            found[c.kind] = found.get(c.kind, 0) + c.total
        return found

    def __repr__(self) -> str:
        rows = [
            (
                c.kind,
                c.shape,
                f"{c.group_size}",
                f"{c.times}",
                f"{c.total:,}",
                c.made_by,
            )
            for c in self.collectives
        ]
        rows.append(("total", "", "", "", f"{self.total:,}", ""))
        return _arguments.show_table([_HEAD, *rows], right=(2, 3, 4))


def wire_bytes(
    compiled: jax.stages.Compiled | str,
    *,
    loop_trips: int = 1,
    branch: Callable[[Sequence[int]], int] = max,
) -> WireBytes:
    r"""The bytes that one device sends in one run of a compiled program.

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
      TypeError: `compiled` is not a compiled program, or `loop_trips` not an int.
      ValueError: the text is not an optimized HLO module, or `loop_trips` is negative.

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
    loop_trips = _arguments.static_int("loop_trips", loop_trips)
    text: Any = compiled
    if not isinstance(compiled, str):
        text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else None
    if text is None:
        raise _arguments.wrong_type(
            _CALL,
            "compiled",
            "a compiled program or its text",
            _arguments.kind_of(compiled),
            "Pass jax.jit(f).lower(*args).compile(), or its .as_text().",
        )
    module = _hlo.parse(text)
    if not module.entries:
        raise _arguments.wrong(
            _CALL,
            "compiled",
            "the text of an optimized HLO module",
            "text without an ENTRY computation",
            (
                "Pass jax.jit(f).lower(*args).compile(); the result of .lower() "
                "has no collectives yet."
            ),
        )
    walk = _Walk(module, loop_trips, branch)
    counted: collections.Counter[Collective] = collections.Counter()
    for entry in module.entries:
        for record in walk.run(entry):
            counted[dataclasses.replace(record, times=1)] += record.times
    found = [dataclasses.replace(c, times=n) for c, n in counted.items() if n]
    return WireBytes(tuple(sorted(found, key=lambda c: -c.total)))


# ------------------------------------------------------------------ counting


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Follows a program through its loops, branches and calls."""

    module: _hlo.Module
    loop_trips: int
    branch: Callable[[Sequence[int]], int]

    def run(self, name: str) -> list[Collective]:
        """The collectives in one run of a computation."""
        found: list[Collective] = []
        for instruction in self.module.computations.get(name, ()):
            found += self._one(instruction)
        return found

    def _one(self, instruction: _hlo.Instruction) -> list[Collective]:
        opcode, rest = instruction.opcode, instruction.rest
        if opcode.endswith(("-done", "-update")):  # counted at its start
            return []
        called = list(instruction.called())
        kind = opcode.removesuffix("-start")
        wrapped = opcode != kind and any(a == "calls" for a, _ in called)
        if kind in _KINDS and not wrapped:
            return [_collective(kind, instruction, self.module.num_devices)]
        if opcode == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
            turns = int(known[1]) if known else self.loop_trips
            runs = {"body": turns, "condition": turns + 1}
            return [
                dataclasses.replace(c, times=c.times * runs[attribute])
                for attribute, name in called
                if attribute in runs
                for c in self.run(name)
            ]
        runs = [self.run(name) for _, name in called]
        if opcode == "conditional" and runs:
            totals = [sum(c.total for c in run) for run in runs]
            return runs[totals.index(self.branch(totals))]
        return [c for run in runs for c in run]


def _collective(
    kind: str, instruction: _hlo.Instruction, num_devices: int
) -> Collective:
    shape = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", instruction.shape)  # layouts, comments
    started = instruction.opcode.endswith("-start") and kind != "all-reduce"
    if started and shape.startswith("("):
        shape = _hlo.split_tuple(shape)[1]  # (operand, result, ...)
    size = _hlo.num_bytes(shape)
    g = _group_size(instruction.rest, num_devices)
    if kind == "all-reduce":
        sent = -(-2 * size * (g - 1) // g)
    elif kind == "reduce-scatter":
        sent = size * (g - 1)  # the result is a g-th of the operand
    elif kind.startswith("collective-"):
        sent = size
    else:
        sent = -(-size * (g - 1) // g)
    return Collective(kind, _short(shape), g, sent, 1, instruction.op_name())


def _short(shape: str) -> str:
    """Equal arrays in a tuple as `4 x f32[8]`, different ones as `f32[8] + f32[3]`."""
    counts = collections.Counter(
        f"{dtype}[{dims}]" for dtype, dims in _hlo.arrays(shape)
    )
    return " + ".join(f"{n} x {s}" if n > 1 else s for s, n in counts.items())


def _group_size(rest: str, num_devices: int) -> int:
    """How many devices exchange: HLO writes groups as lists, as an iota, or as axes."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=", rest):
        return int(match[1].split(",")[-1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{([^{}]*)\}", rest):
        sizes = {name: int(n) for name, n in re.findall(r"'(.*?)'=(\d+)", match[1])}
        axes = re.findall(r"'(.*?)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return max(len(group.split(",")) for group in match[1].strip("{}").split("},{"))
    return num_devices
