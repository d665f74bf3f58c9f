"""The optimizers that the tests of `sparsejax.optim` run over, and a small problem.

`SEPARABLE` may be lifted to rows, `REFUSED` may not. Each entry makes a new
transformation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import sparsejax as sj
from helpers import assert_trees_close, is_rows, to_dense
from sparsejax import testing


LR = 0.1
SCHEDULE = optax.linear_schedule(LR, 0.01, 5)


def user_written():
    """State in a dict: a [V] and a [V, 1] leaf, a [D] vector, a count, a None."""

    def init(params):
        rows = lambda p: jnp.zeros(p.shape[:1], jnp.float32)
        column = lambda p: jnp.full((*p.shape[:1], 1), 0.5, jnp.float32)
        vector = lambda p: jnp.arange(p.shape[-1], dtype=jnp.float32)
        return {
            "rows": jax.tree.map(rows, params),
            "column": jax.tree.map(column, params),
            "vector": jax.tree.map(vector, params),
            "count": (jnp.zeros((), jnp.int32), None),
        }

    def update(updates, state, params=None):
        del params
        mean = lambda g: jnp.mean(g * g, axis=tuple(range(1, g.ndim)))
        rows = jax.tree.map(lambda g, r: r + mean(g), updates, state["rows"])
        column = lambda g, c: 0.9 * c + mean(g)[:, None]
        column = jax.tree.map(column, updates, state["column"])

        def scaled(g, r, c):
            squares = (r + c[:, 0]).reshape(-1, *[1] * (g.ndim - 1))
            return -LR * g / jnp.sqrt(squares)

        count, none = state["count"]
        new = {**state, "rows": rows, "column": column, "count": (count + 1, none)}
        return jax.tree.map(scaled, updates, rows, column), new

    return optax.GradientTransformation(init, update)


SEPARABLE = {
    "sgd": lambda: optax.sgd(LR),
    "momentum": lambda: optax.sgd(LR, momentum=0.9),
    "nesterov": lambda: optax.sgd(LR, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(LR),
    "adam_bfloat16_mu": lambda: optax.adam(LR, mu_dtype=jnp.bfloat16),
    "adamw": lambda: optax.adamw(LR, weight_decay=0.1),
    "amsgrad": lambda: optax.amsgrad(LR),
    "adamax": lambda: optax.adamax(LR),
    "adamaxw": lambda: optax.adamaxw(LR),
    "nadam": lambda: optax.nadam(LR),
    "nadamw": lambda: optax.nadamw(LR),
    "radam": lambda: optax.radam(LR),
    "adagrad": lambda: optax.adagrad(LR, initial_accumulator_value=0.3),
    "rmsprop": lambda: optax.rmsprop(LR, initial_scale=0.2),
    "rmsprop_centered": lambda: optax.rmsprop(LR, centered=True, momentum=0.9),
    "adadelta": lambda: optax.adadelta(LR),
    "yogi": lambda: optax.yogi(LR),
    "adabelief": lambda: optax.adabelief(LR),
    "lion": lambda: optax.lion(LR),
    "novograd": lambda: optax.novograd(LR),
    "sign_sgd": lambda: optax.sign_sgd(LR),
    "signum": lambda: optax.signum(LR),
    "rprop": lambda: optax.rprop(LR),
    "adan": lambda: optax.adan(LR),
    "optimistic": lambda: optax.optimistic_gradient_descent(LR),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(LR),
    "acprop": lambda: contrib.acprop(LR),
    "adopt": lambda: contrib.adopt(LR),
    "cocob": lambda: contrib.cocob(LR),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(LR),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "ademamix": lambda: contrib.ademamix(LR),
    "madgrad": lambda: contrib.madgrad(LR),
    "schedule_free": lambda: contrib.schedule_free_sgd(LR, b1=0.9),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.adam(LR)),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(LR)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 3),
    "masked_decay": lambda: optax.adamw(
        LR, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    "named_chain": lambda: optax.named_chain(
        ("zero_nans", optax.zero_nans()),
        ("centralize", optax.centralize()),
        ("adam", optax.adam(SCHEDULE)),
    ),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-LR)),
    "user_written": user_written,
}

# Separable by its parts: the dense clip sees rows that lifting does not touch.
CLIPPED_LAST = {
    "adam_clip": lambda: optax.chain(optax.adam(LR), optax.clip_by_global_norm(0.1)),
    "adamw_clip": lambda: optax.chain(
        optax.adamw(LR, weight_decay=0.5), optax.clip_by_global_norm(0.1)
    ),
    "injected_adamw_clip": lambda: optax.inject_hyperparams(
        lambda learning_rate: CLIPPED_LAST["adamw_clip"]()
    )(LR),
}

# With the words by which the message names the cause.
REFUSED = {
    "lamb": (lambda: optax.lamb(LR), "scale_by_trust_ratio .*lamb"),
    "lars": (lambda: optax.lars(LR), "scale_by_trust_ratio .*lars"),
    "fromage": (lambda: optax.fromage(LR), "scale_by_trust_ratio .*fromage"),
    "injected_lamb": (
        lambda: optax.inject_hyperparams(optax.lamb)(LR),
        "scale_by_trust_ratio",
    ),
    "adaptive_grad_clip": (
        lambda: optax.adaptive_grad_clip(0.01),
        "adaptive_grad_clip",
    ),
    "adafactor": (lambda: optax.adafactor(LR), "scale_by_factored_rms .*adafactor"),
    "muon": (lambda: contrib.muon(LR), "scale_by_muon"),
    "clip_by_block_rms": (lambda: optax.clip_by_block_rms(1.0), "clip_by_block_rms"),
    "param_block_rms": (optax.scale_by_param_block_rms, "scale_by_param_block_rms"),
    "flatten": (lambda: optax.flatten(optax.adam(LR)), "flatten"),
    "lbfgs": (lambda: optax.lbfgs(), "scale_by_lbfgs"),
    "prodigy": (lambda: contrib.prodigy(), "prodigy"),
    "dadapt_adamw": (lambda: contrib.dadapt_adamw(), "dadapt_adamw"),
    "dog": (lambda: contrib.dog(), "scale_by_dog"),
    "dowg": (lambda: contrib.dowg(), "scale_by_dowg"),
    "sm3": (lambda: optax.sm3(LR), "scale_by_sm3"),
    "momo": (lambda: contrib.momo(), "momo"),
    "momo_adam": (lambda: contrib.momo_adam(), "momo_adam"),
    "galore": (lambda: contrib.galore(LR), "galore"),
    "sophia": (lambda: contrib.sophia(LR), "hutchinson_estimator"),
    "noisy_sgd": (lambda: optax.noisy_sgd(LR, key=0), "add_noise .*noisy_sgd"),
    "mechanize": (lambda: contrib.mechanize(optax.sgd(LR)), "mechanize"),
    "multi_steps": (
        lambda: optax.MultiSteps(optax.adam(LR), 4),
        "MultiSteps: it accumulates gradients",
    ),
    "multi_steps_transformation": (
        lambda: optax.MultiSteps(optax.adam(LR), 4).gradient_transformation(),
        "MultiSteps: it accumulates gradients",
    ),
    "apply_every": (
        lambda: optax.chain(optax.apply_every(4), optax.adam(LR)),
        "apply_every: it accumulates gradients",
    ),
    "add_noise": (
        lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(LR)),
        "add_noise",
    ),
    "lookahead": (lambda: optax.lookahead(optax.sgd(LR), 5, 0.5), "lookahead"),
}


# `make test` runs these entries; `make test-all` runs all.
QUICK_REFUSED = ["lamb", "adafactor", "muon", "prodigy", "sm3", "multi_steps"]


# ------------------------------------------------------------------ the problem

V, D = 23, 5  # no other leaf has an axis of 23


def make_params(dtype=jnp.float32, cube=False):
    rng = np.random.default_rng(7)
    shapes = {"bias": (D,), "table": (V, D), **({"cube": (V, 2, 3)} if cube else {})}
    draw = lambda shape: rng.standard_normal(shape).astype(dtype)
    return {name: jnp.asarray(draw(shape), dtype) for name, shape in shapes.items()}


def row_gradient(seed, row_shape, dtype=jnp.float32, n=9):
    """Duplicates, an empty slot with NaN in it, and another one named -1."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, V, n)
    rows[1], rows[4], rows[6] = rows[0], V, -1
    values = rng.standard_normal((n, *row_shape)).astype(np.float32)
    values[4] = np.nan
    values = jnp.asarray(values.astype(dtype), dtype)
    return sj.SelectedRows(jnp.asarray(rows), values, V)


def make_grads(step, dtype=jnp.float32, cube=False):
    grads = {
        "bias": jnp.asarray(np.full(D, 0.1 * (step + 1)).astype(dtype), dtype),
        "table": row_gradient(step, (D,), dtype),
    }
    return {**grads, "cube": row_gradient(10 + step, (2, 3), dtype)} if cube else grads


# ------------------------------------------------------------------ the oracle


def step(tx, params, state, grads) -> Any:
    """One step of an optimizer: the new parameters and state."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def check_steps(txs, params, steps, rtol=1e-5):
    """Jitted steps of `lazy(tx)` are steps of `tx`, with the rows not read put back.

    All transformations, by their names, are compiled in one program.
    """
    lifted, traces = {name: sj.optim.lazy(tx) for name, tx in txs.items()}, []
    leaves = functools.partial(jax.tree.leaves, is_leaf=is_rows)

    @jax.jit
    def sparse(carry, grads):
        traces.append(1)
        new = {}
        for name, (params, state) in carry.items():
            updates, state = lifted[name].update(grads, state, params)
            for g, u in zip(leaves(grads), leaves(updates)):
                if is_rows(g):
                    assert is_rows(u) and u.capacity == min(g.capacity, g.height)
            new[name] = optax.apply_updates(params, updates), state
        return new

    @jax.jit
    def dense(carry, grads):
        run = lambda tx, params, state: step(tx, params, state, to_dense(grads))
        return {name: run(tx, *carry[name]) for name, tx in txs.items()}

    start = lambda txs: {name: (params, tx.init(params)) for name, tx in txs.items()}
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    carry = start(lifted)
    assert_trees_close(carry, start(txs), rtol=0, atol=0)
    for grads in steps:
        new, after = sparse(carry, grads), dense(carry, grads)
        for name, tx in txs.items():
            unread = testing._unread(tx, params, leaves(grads))
            trees = new[name], after[name], carry[name], unread
            for what, *compared in zip(("params", "state"), *trees):
                testing._compare(name, rtol, 0.0, False, what, *compared)
        assert kinds(new) == kinds(carry)
        carry = new
    assert len(traces) == 1
    for params, _ in carry.values():
        assert all(np.all(np.isfinite(p)) for p in jax.tree.leaves(params))
