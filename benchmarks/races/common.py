"""Shared by all races: environments of peers, turns, points on a curve, one table.

A race is a module of this package with these names:

  PEER, VERSION_OF   what pip installs for the peer; the package of its version
  ALONE              packages that are installed without those that they need
  EXAMPLE            the file of our side in `examples/`, as it stands there
  UNIT, SCORE        what is counted; the name of the score, of which more is better
  DATA, SETTINGS     the names of data, of which the first is the default; what else
                     a side is told
  LR, EPOCHS         the learning rate that each side has by default; epochs of each
  prepare(folder, data, peer)   writes the data into a folder, once; `peer` is a Python
  ours(task)         our side, in a process of its own
  score(data, part, file, end)  the score and the loss of the file of a point; `end`
                                is true for the last one

The peer's side is `NAME_peer.py`, which runs in the peer's environment and imports
nothing of ours. Each side runs in a fresh process with the task as JSON: `data`, `out`,
`seed`, `lr`, `epochs`, `threads` and the race's own settings. After each epoch it
prints a point, a line of JSON: `seconds` of training so far, compilation included and
scoring not; `samples` so far; `score` and `loss`, or `file` for `score(...)`. If the
score of an epoch is of few data, the last point also has `test`, for the table.

Both sides are tuned alike: with the part "valid" of the data, a run for each learning
rate, which is a third, once or three times the default of the side. The best score at
the last epoch wins. The races are on the part "test", which no choice has seen.
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np


ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build" / "races"
SIDES = "ours", "peer"
MULTIPLES = 1 / 3, 1, 3  # of a side's default learning rate
TUNING_SEED = 100


def data_folder(name):
    """A folder of the optional data sets, beside the checkout."""
    path = ROOT.parent / "shared" / "data" / name
    if not path.exists():
        sys.exit(f"races: {path} is not here. Pass another file: see --help.")
    return path


def environment(name, race):
    """The Python of the peer's environment, which is made if it is not there."""
    folder, alone = BUILD / name, getattr(race, "ALONE", [])
    python, mark = folder / "bin" / "python", folder / ".installed"
    if not mark.exists() or mark.read_text() != str([*race.PEER, *alone]):
        print(f"Making {folder} with {', '.join(race.PEER)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *race.PEER], check=True)
        for package in alone:
            subprocess.run([*pip, "--no-deps", package], check=True)
        mark.write_text(str([*race.PEER, *alone]))
    return python


def version_of(python, package):
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def run_side(side, name, race, python, task):
    """Runs a side in a fresh process; returns its points.

    The last point has `cpu`: the seconds on all cores of the whole process, reading and
    saving included. Where other programs run they say more than the clock.
    """
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"
    env = {**os.environ, **dict.fromkeys(names, str(task["threads"]))}
    env |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # each run compiles, on the clock
    command = [sys.executable, "-m", "benchmarks.races", name, "--side"]
    if side == "peer":
        env["PYTHONPATH"] = ""
        file = pathlib.Path(__file__).with_name(f"{name}_peer.py")
        command = [python, "-P", file]  # -P: no file here hides a peer
    pathlib.Path(task["out"]).mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))[: task["threads"]]
    before = cpu_seconds()
    run = subprocess.run(
        [*command, json.dumps(task)],
        env=env,
        cwd=task["out"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    cpu = cpu_seconds() - before
    points = [json.loads(x) for x in run.stdout.splitlines() if x.startswith("{")]
    if run.returncode or not points:
        sys.exit(f"races: {side} of {name} failed.\n{run.stdout[-2000:]}{run.stderr}")
    for point in points:
        if "file" in point:
            file, end = pathlib.Path(point.pop("file")), point is points[-1]
            scores = race.score(task["data"], task["part"], file, end)
            point |= {name: float(x) for name, x in scores.items()}
            file.unlink()
    points[-1]["cpu"] = cpu
    return points


def cpu_seconds():
    """The seconds that all processes of ours that have ended spent on cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tell(seconds, samples, **point):
    """Prints a point of the curve."""
    print(json.dumps({"seconds": seconds, "samples": samples, **point}), flush=True)


def printed(main, options, task, names, told=None):
    """The output of an example, run with `options` and `names` of the task."""
    told = io.StringIO() if told is None else told
    of_task = [x for name in names for x in (f"--{name}", str(task[name]))]
    with contextlib.redirect_stdout(told):
        main([*options, *of_task])
    return told.getvalue()


class Clock:
    """Seconds of training: time inside `with clock:` is not counted."""

    def __init__(self):
        self._began, self._paused = time.perf_counter(), 0.0

    def seconds(self):
        return time.perf_counter() - self._began - self._paused

    def __enter__(self):
        self._stopped = time.perf_counter()

    def __exit__(self, *error):
        self._paused += time.perf_counter() - self._stopped


def seconds_to(target, points):
    """The seconds after which a run has reached a score, or None."""
    return next((p["seconds"] for p in points if p["score"] >= target), None)


def spread(values, digits):
    """The median and the range of some numbers, of which None is `not reached`."""
    known = sorted(x for x in values if x is not None)
    if not known:
        return "not reached" if values else "-"
    text = f"{np.median(known):,.{digits}f}"
    if len(known) > 1:
        text += f" ({known[0]:,.{digits}f} to {known[-1]:,.{digits}f})"
    missing = len(values) - len(known)
    return text + (f", {missing} of {len(values)} not" if missing else "")


def table(race, runs, versions, rates):
    """One line a side: speed, seconds to the peer's final score, score, loss."""
    target = float(np.median([points[-1]["score"] for points in runs["peer"]]))
    heads = ["side", "version", "lr", f"{race.UNIT}/s", f"seconds to {target:.4f}"]
    heads += ["seconds", "CPU seconds", race.SCORE, "loss"]
    lines = [heads, ["---"] * len(heads)]
    for side in SIDES:
        ends = [points[-1] for points in runs[side]]
        losses = [end["loss"] for end in ends if end.get("loss") is not None]
        figures = (
            ([end["samples"] / end["seconds"] for end in ends], 0),
            ([seconds_to(target, points) for points in runs[side]], 1),
            ([end["seconds"] for end in ends], 1),
            ([end["cpu"] for end in ends], 1),
            ([end.get("test", end["score"]) for end in ends], 4),
            (losses, 4),
        )
        name = race.EXAMPLE if side == "ours" else race.VERSION_OF
        shown = [spread(values, digits) for values, digits in figures]
        lines.append([name, versions[side], f"{rates[side]:g}", *shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(race, runs, versions, path, title):
    """The score over the seconds of training: a line a seed, and their median."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    peer = f"{race.VERSION_OF} {versions['peer']}"
    names = {"ours": f"sparsejax, {race.EXAMPLE}", "peer": peer}
    for color, side in zip(("C0", "C1"), SIDES):
        curves = [[(p["seconds"], p["score"]) for p in points] for points in runs[side]]
        for curve in curves:
            ax.plot(*zip(*curve), color=color, alpha=0.3, linewidth=1)
        median = np.median(curves, axis=0)  # over the seeds, of each epoch
        ax.plot(*median.T, "o-", color=color, label=names[side])
    ax.set(xlabel="seconds of training, compilation included", ylabel=race.SCORE)
    ax.set_title(title, fontsize=10)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9)
    figure.savefig(path, dpi=150)


def race(name, args):
    """Tunes both sides, lets them take turns, and prints the table."""
    module = importlib.import_module(f"benchmarks.races.{name}")
    python = environment(name, module)
    data = BUILD / "data" / name / args.data.replace(os.sep, "_")  # it may be a path
    if not (data / ".made").exists():
        data.mkdir(parents=True, exist_ok=True)
        module.prepare(data, args.data, python)
        (data / ".made").touch()
    settings = module.SETTINGS | dict(args.set)
    epochs = dict(zip(SIDES, args.epochs or module.EPOCHS.values()))
    common = {"data": str(data), "out": str(data / "out"), "threads": args.threads}

    def run(side, part, seed, lr):
        task = {"part": part, "seed": seed, "lr": lr, "epochs": epochs[side]}
        return run_side(side, name, module, python, settings | common | task)

    rates = dict(zip(SIDES, args.lr or ()))
    for side in SIDES[len(rates) :]:
        grid = [multiple * module.LR[side] for multiple in MULTIPLES]
        scores = {lr: run(side, "valid", TUNING_SEED, lr)[-1]["score"] for lr in grid}
        rates[side] = max(scores, key=scores.__getitem__)
        print(
            f"{side}: {module.SCORE} on validation data by rate: {scores}", flush=True
        )
    runs = {side: [] for side in SIDES}
    for seed in range(args.seeds):
        for side in SIDES if seed % 2 else SIDES[::-1]:
            points = run(side, "test", seed, rates[side])
            runs[side].append(points)
            curve = [(round(p["seconds"], 1), round(p["score"], 4)) for p in points]
            print(f"{side}, seed {seed}: {curve}", flush=True)
    own, jax = (version_of(sys.executable, name) for name in ("sparsejax", "jax"))
    of_peer = version_of(python, module.VERSION_OF)
    versions = {"ours": f"{own}, jax {jax}", "peer": of_peer}
    load = os.getloadavg()[1]
    told = {**settings, "data": args.data, "epochs": epochs}
    print(f"{told}, {args.threads} threads, {args.seeds} seeds, load {load:.1f}")
    print(table(module, runs, versions, rates))
    if args.plot:
        plot(module, runs, versions, args.plot, str(module.__doc__).splitlines()[0])
    return 0
