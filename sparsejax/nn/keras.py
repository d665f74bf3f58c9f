"""Keras 3 on the JAX backend: `fit` with sparse gradients for embedding tables.

- `SparseModel`: a `keras.Model` whose training step has SelectedRows for tables.
- `Optimizer`: a Keras optimizer that runs an optax transformation on the rows read.

Each Keras optimizer in `_RULES` has an optax transformation that computes the same
numbers. The learning rate is a Keras variable, so callbacks can change it.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._rows import is_selected_rows
from sparsejax.optim import lazy
from sparsejax.optim._exact.exact import Exact
from sparsejax.transform.explain import explain
from sparsejax.transform.grad import value_and_grad


_CALL = "sparsejax.nn.keras"
_BACKEND = (
    "Set os.environ['KERAS_BACKEND'] = 'jax' before the first import of keras, or "
    '"backend": "jax" in ~/.keras/keras.json.'
)


def _import_keras() -> Any:
    try:
        module = importlib.import_module("keras")
    except ModuleNotFoundError as e:
        if e.name == "keras":
            raise
        missing = e.name
    else:
        missing = None
    if missing is not None:  # outside of `except`: without the traceback of keras
        raise RuntimeError(
            f"{_CALL} needs Keras 3 on the JAX backend, but keras was set up for "
            f"{missing}, which is not installed. {_BACKEND}"
        )
    if module.backend.backend() != "jax":
        raise RuntimeError(
            f"{_CALL} needs Keras 3 on the JAX backend, got keras {module.__version__} "
            f"on {module.backend.backend()}. {_BACKEND}"
        )
    return module


keras: Any = _import_keras()
_register = keras.saving.register_keras_serializable("sparsejax")


# ------------------------------------------------------------------ optimizer


@_register
class Optimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that updates the rows of a SelectedRows, in place.

    It runs an optax transformation, lifted by `sparsejax.optim.lazy`, on all variables
    of the model. Rows that a batch does not read keep their weights and their state.

    Args:
      optimizer: an `optax.GradientTransformation`; one of `sparsejax.optim`; or a Keras
        optimizer, its name or its config. SGD, RMSprop, Adam, AdamW, Nadam, Adagrad,
        Adadelta, Adamax, Ftrl and Lion, with momentum, schedules, clipping, weight
        decay and `loss_scale_factor`, compute what Keras computes for the rows read.
        To let callbacks change the learning rate of an optax transformation, pass
        `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`.
      name: the name of the optimizer.

    Raises:
      TypeError: `optimizer` is something else, for example an optimizer of tf.keras.
      ValueError: a Keras optimizer, or an option, has no row-wise form; `optimizer` was
        trained already; at `build`, `lazy` refuses the transformation.

    Warns:
      UserWarning: at `apply`, no gradient is sparse, since the model is not a
        SparseModel.

    Example:
      >>> import optax, sparsejax as sj
      >>> optimizer = sj.nn.keras.Optimizer(optax.adam(1e-3))
      >>> optimizer = sj.nn.keras.Optimizer("adagrad")
      >>> round(float(optimizer.learning_rate), 4)
      0.001

    References:
      Keras, `optimizers.Optimizer`; TensorFlow Addons, `LazyAdam`.
    """

    def __init__(self, optimizer: Any, *, name: str | None = None):
        given = _given(f"{_CALL}.Optimizer", optimizer)
        source = given.source
        learning_rate, loss_scale = float("nan"), None
        if source is not None:
            learning_rate, loss_scale = _learning_rate(source), source.loss_scale_factor
            name = name or source.name
        super().__init__(learning_rate, loss_scale_factor=loss_scale, name=name)
        self._given = given
        self._run: Any = None
        self._is_of_sparse_model = False

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state, a Keras variable for each array of `tx.init(params)`."""
        if self.built:
            return
        super().build(variables)
        variables = list(variables)
        source, tx = self._given.source, self._given.tx
        tx = tx if source is None else _from_keras(source, variables)
        params = _by_path(variables, [v.value for v in variables])
        leaves, shape = jax.tree_util.tree_flatten_with_path(tx.init(params))
        order = _order([path for path, _ in leaves], _paths(variables))
        taken = {id(x) for x in params.values()}
        state = []
        for path, leaf in (leaves[k] for k in order):
            value = jnp.asarray(leaf)
            if not jnp.issubdtype(value.dtype, jnp.number) and value.dtype != bool:
                raise ValueError(
                    f"{_CALL}.Optimizer: a Keras variable cannot hold the leaf "
                    f"{jax.tree_util.keystr(path)} of the optimizer state, which is "
                    "not an array of numbers (a key, or row ids). Train with "
                    "sparsejax.value_and_grad in a loop of your own."
                )
            if id(value) in taken:  # each array is donated once
                value = jnp.array(value, copy=True)
            taken.add(id(value))
            state.append(
                self.add_variable(
                    shape=value.shape,
                    initializer=lambda *args, value=value, **options: value,
                    dtype=value.dtype.name,
                    name="state" + "".join(map(_key, path)),
                )
            )
        state = [v for _, v in sorted(zip(order, state), key=lambda x: x[0])]
        plain = shape.unflatten([v.value for v in state])
        rates = optax.tree_utils.tree_get_all_with_path(plain, "learning_rate")
        has_rate = len(rates) == 1
        if has_rate and source is None and jnp.isnan(self.learning_rate.value):
            self._learning_rate.assign(rates[0][1])
        self._run = _Run(tx, variables, state, shape, has_rate)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Updates the variables with gradients that are arrays or SelectedRows."""
        given = trainable_variables
        if not self.built:
            if given is None:
                raise ValueError(
                    f"{_CALL}.Optimizer.apply: the optimizer has no variables yet. "
                    "Pass them: apply(grads, model.trainable_variables)."
                )
            self.build(list(given))
        run = self._run
        variables = run.variables if given is None else list(given)
        if list(map(id, variables)) != list(map(id, run.variables)):
            raise ValueError(
                f"{_CALL}.Optimizer.apply: the variables must be the "
                f"{len(run.variables)} for which the optimizer was built, got "
                f"{len(variables)} variables. Make a new optimizer (compile makes one "
                "from a name) after a change of `trainable`."
            )
        for v, g in zip(variables, grads):
            if v.constraint is not None and is_selected_rows(g):
                raise ValueError(
                    f"{_CALL}.Optimizer: the table {v.path} has a constraint, "
                    f"{type(v.constraint).__name__}, which reads the whole table at "
                    "every step. Remove embeddings_constraint=, or normalize the rows "
                    "that the model reads, or train with keras.Model."
                )
        has_table = any(len(v.shape) > 1 for v in variables)
        is_sparse = self._is_of_sparse_model or any(map(is_selected_rows, grads))
        if has_table and not is_sparse:
            warnings.warn(
                f"{_CALL}.Optimizer: no gradient is sparse, so each step goes through "
                "all rows. Train a SparseModel in place of the keras.Model: "
                "SparseModel(model.inputs, model.outputs) has the same weights.",
                stacklevel=2,
            )
        params = _by_path(variables, [v.value for v in variables])
        state = run.shape.unflatten([v.value for v in run.state])
        if run.has_rate:
            rate = jnp.asarray(keras.ops.convert_to_tensor(self.learning_rate))
            state = optax.tree_utils.tree_set(state, learning_rate=rate)
        updates, state = run.tx.update(_by_path(variables, grads), state, params)
        params: Any = optax.apply_updates(params, updates)
        for v, path in zip(variables, _paths(variables)):
            v.assign(params[path])
            if v.constraint is not None:
                v.assign(v.constraint(v))
        for v, x in zip(run.state, jax.tree.leaves(state)):
            v.assign(x)
        self.iterations.assign_add(1)

    @property
    def learning_rate(self) -> Any:
        """The learning rate; NaN if it is inside an optax transformation."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        run = self._run
        if self._given.source is None and run is not None and not run.has_rate:
            raise ValueError(
                f"{_CALL}.Optimizer: the learning rate is inside the optax "
                "transformation, and cannot be set. Use an optax schedule, or pass "
                "Optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))."
            )
        keras.optimizers.Optimizer.learning_rate.fset(self, value)

    def get_config(self) -> dict[str, Any]:
        """The config of the Keras optimizer. An optax transformation has none."""
        if self._given.source is None:
            raise ValueError(
                f"{_CALL}.Optimizer: an optax transformation cannot be saved in a "
                "config. Save weights, and compile with a new Optimizer(tx)."
            )
        config = keras.optimizers.serialize(self._given.source)
        rate = self._learning_rate
        if isinstance(rate, keras.Variable):
            config["config"]["learning_rate"] = float(rate.value)
        return {"optimizer": config, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The inverse of `get_config`."""
        optimizer = keras.optimizers.deserialize(config["optimizer"], custom_objects)
        return cls(optimizer, name=config["name"])


# Keras tracks and saves what it finds in attributes and in tuples, not in dataclasses.
@dataclasses.dataclass(frozen=True)
class _Given:
    """A Keras optimizer and None, or None and a lifted transformation."""

    source: Any
    tx: Any


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a built optimizer runs; `has_rate` if the state has the learning rate."""

    tx: Any
    variables: list[Any]
    state: list[Any]
    shape: Any
    has_rate: bool


def _given(call: str, optimizer: Any) -> _Given:
    if isinstance(optimizer, Exact):
        raise ValueError(
            f"{call}: exact brings rows up to date before the model reads them, which "
            "fit cannot do. Pass the optax transformation itself, or train with "
            "sparsejax.optim.exact_value_and_grad in a loop of your own."
        )
    if isinstance(optimizer, optax.GradientTransformation):
        ours = getattr(optimizer.update, "__module__", "").startswith("sparsejax.")
        return _Given(None, optimizer if ours else lazy(optimizer))
    if isinstance(optimizer, str):
        optimizer = _by_name(call, optimizer)
    elif isinstance(optimizer, dict):
        optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer._given
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = optimizer if callable(optimizer) else type(optimizer)
        raise TypeError(
            f"{call}: optimizer must be an optax transformation, or an optimizer of "
            f"Keras 3 or its name, got {kind.__module__}.{kind.__qualname__}"
            f"{', which must be called' if callable(optimizer) else ''}. Write "
            "Optimizer(optax.adam(1e-3)) or Optimizer('adam')."
        )
    _check_keras(call, optimizer)
    return _Given(optimizer, None)


# What to call in place of an optimizer of Keras that has no row-wise form, or another.
_INSTEAD = {
    "Adafactor": "Optimizer(sparsejax.optim.rowwise_adagrad(0.01))",
    "Lamb": "Optimizer(sparsejax.optim.partial_rowwise_lamb(1e-3))",
    "Muon": "Optimizer(optax.partition(...)) with optax.adam for the tables",
    "MultiOptimizer": "Optimizer(optax.partition(...))",
    "LossScaleOptimizer": "its inner optimizer, with loss_scale_factor=",
    "ScheduleFreeAdamW": "Optimizer(optax.adamw(1e-3))",
}


def _by_name(call: str, name: str) -> Any:
    """`keras.optimizers.get`, which knows some optimizers by class only."""
    for refused in _INSTEAD:
        if refused.lower() == name.lower():
            raise _no_equal(call, refused)
    try:
        return keras.optimizers.get(name)
    except ValueError:
        known = ", ".join(sorted(f"'{kind.__name__.lower()}'" for kind in _RULES))
    raise ValueError(
        f"{call}: Keras has no optimizer {name!r}. Write one of {known}, or pass an "
        "optax transformation: Optimizer(optax.adam(1e-3))."
    )


def _no_equal(call: str, name: str) -> ValueError:
    instead = _INSTEAD.get(name, "Optimizer(tx) with an optax transformation")
    return ValueError(
        f"{call}: keras.optimizers.{name} has no equal in optax that updates rows. "
        f"Pass {instead}."
    )


def _check_keras(call: str, optimizer: Any) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in _RULES:
        raise _no_equal(call, name)
    if optimizer.use_ema:
        raise ValueError(
            f"{call}: use_ema=True averages every row of every table at each step. "
            "Pass an optax chain that ends with sparsejax.optim.ema, and read the "
            "averages with sparsejax.optim.ema_params."
        )
    if optimizer.gradient_accumulation_steps:
        steps = optimizer.gradient_accumulation_steps
        raise ValueError(
            f"{call}: gradient_accumulation_steps={steps} holds gradients of whole "
            f"tables. Use a batch {steps} times as large, or "
            "sparsejax.optim.accumulate in a loop of your own."
        )
    if optimizer.built and int(optimizer.iterations) > 0:
        raise ValueError(
            f"{call}: this {name} has trained for {int(optimizer.iterations)} steps. "
            "Its state is not taken over. Pass a new optimizer, for example "
            f"{name}.from_config(optimizer.get_config())."
        )


def _learning_rate(optimizer: Any) -> Any:
    """A float, a schedule or a function, as the constructor takes it."""
    rate = optimizer._learning_rate
    return float(rate.value) if isinstance(rate, keras.Variable) else rate


def _paths(variables: Sequence[Any]) -> list[str]:
    """A name for each variable: its path, with a number if it is not unique."""
    count = collections.Counter(v.path for v in variables)
    return [
        v.path if count[v.path] == 1 else f"{v.path}:{k}"
        for k, v in enumerate(variables)
    ]


def _by_path(variables: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_paths(variables), values))


def _order(leaves: Sequence[Any], paths: Sequence[str]) -> list[int]:
    """The leaves of a state in the order in which they are saved.

    JAX sorts the keys of a dict. Keras may give the layers of a loaded model other
    names, so leaves that follow variables are in the order of the variables.
    """
    index = {path: k for k, path in enumerate(paths)}
    first: dict[Any, int] = {}

    def rank(k):
        for i, entry in enumerate(leaves[k]):
            variable = index.get(getattr(entry, "key", ""))
            if variable is not None:
                return first.setdefault(leaves[k][:i], k), variable, k
        return k, 0, k

    return sorted(
        range(len(leaves)), key=[rank(k) for k in range(len(leaves))].__getitem__
    )


def _key(entry: Any) -> str:
    name = getattr(entry, "name", getattr(entry, "key", getattr(entry, "idx", entry)))
    return "_" + str(name).replace("/", "_")


# ------------------------------------------------------------------ Keras optimizers


def _from_keras(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Keras' clipping, rule and weight decay; the state has the learning rate."""
    o = optimizer
    before = []
    if o.loss_scale_factor is not None:
        before.append(optax.scale(1 / o.loss_scale_factor))
    if o.clipnorm:
        before.append(_clip_each_by_norm(o.clipnorm))
    if o.global_clipnorm:
        before.append(optax.clip_by_global_norm(o.global_clipnorm))
    if o.clipvalue:
        before.append(optax.clip(o.clipvalue))
    decayed = [o._use_weight_decay(v) for v in variables]
    mask = _by_path(variables, decayed)

    def make(learning_rate):
        chain = [*before, *_RULES[type(o)](o, learning_rate)]
        if o.weight_decay is not None:
            decay = -learning_rate * o.weight_decay
            chain.append(optax.add_decayed_weights(decay, mask))
        return optax.chain(*chain)

    return lazy(optax.inject_hyperparams(make)(learning_rate=0.0))


def _sgd(o: Any, learning_rate: Any) -> list[Any]:
    momentum = [optax.trace(o.momentum, o.nesterov)] if o.momentum else []
    return [optax.scale(-learning_rate), *momentum]


def _rmsprop(o: Any, learning_rate: Any) -> list[Any]:
    scale = optax.scale_by_stddev if o.centered else optax.scale_by_rms
    momentum = [optax.trace(o.momentum)] if o.momentum else []
    return [scale(decay=o.rho, eps=o.epsilon), optax.scale(-learning_rate), *momentum]


def _adagrad(o: Any, learning_rate: Any) -> list[Any]:
    scale = optax.scale_by_rss(o.initial_accumulator_value, o.epsilon)
    return [scale, optax.scale(-learning_rate)]


def _adadelta(o: Any, learning_rate: Any) -> list[Any]:
    return [optax.scale_by_adadelta(o.rho, o.epsilon), optax.scale(-learning_rate)]


def _lion(o: Any, learning_rate: Any) -> list[Any]:
    return [optax.scale_by_lion(o.beta_1, o.beta_2), optax.scale(-learning_rate)]


class _Moments(NamedTuple):
    count: Any
    first: Any
    second: Any
    largest: Any


def _moments(
    o: Any,
    learning_rate: Any,
    second: Callable[[Any, Any], Any],
    step: Callable[[Any, Any, Any, Any], Any],
    amsgrad: bool = False,
) -> list[Any]:
    """A rule of a mean m of gradients, and of v = second(v, g).

    `step(m, v, p1, p2)` is the update, with p1 = beta_1^t and p2 = beta_2^t. With
    `amsgrad`, v is the largest so far.
    """

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        largest = zeros() if amsgrad else ()
        return _Moments(jnp.zeros((), jnp.int32), zeros(), zeros(), largest)

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        mean = lambda m, g: m + (g - m) * (1 - o.beta_1)
        m = jax.tree.map(mean, state.first, updates)
        v = jax.tree.map(second, state.second, updates)
        largest = jax.tree.map(jnp.maximum, state.largest, v) if amsgrad else ()

        def one(m, v):
            powers = (jnp.power(jnp.asarray(b, m.dtype), count) for b in betas)
            return step(m, v, *powers)

        updates = jax.tree.map(one, m, largest if amsgrad else v)
        return updates, _Moments(count, m, v, largest)

    betas = o.beta_1, o.beta_2
    scale: Any = optax.GradientTransformation(init, update)
    return [scale, optax.scale(-learning_rate)]


def _adam(o: Any, learning_rate: Any) -> list[Any]:
    """Keras adds epsilon to the root of v without the correction of its bias."""
    second = lambda v, g: v + (g * g - v) * (1 - o.beta_2)

    def step(m, v, p1, p2):
        return m * (jnp.sqrt(1 - p2) / (1 - p1)) / (jnp.sqrt(v) + o.epsilon)

    return _moments(o, learning_rate, second, step, o.amsgrad)


def _adamax(o: Any, learning_rate: Any) -> list[Any]:
    second = lambda v, g: jnp.maximum(o.beta_2 * v, jnp.abs(g))
    step = lambda m, v, p1, p2: m / ((1 - p1) * (v + o.epsilon))
    return _moments(o, learning_rate, second, step)


def _nadam(o: Any, learning_rate: Any) -> list[Any]:
    """Keras' momentum has a schedule, u_t = beta_1 (1 - 0.96^t / 2)."""

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return _NadamState(jnp.zeros((), jnp.int32), jnp.ones(()), zeros(), zeros())

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        momentum = lambda t: o.beta_1 * (1 - 0.5 * jnp.power(0.96, t))
        now, following = momentum(count), momentum(count + 1)
        product = state.product * now
        mean = lambda m, g: m + (g - m) * (1 - o.beta_1)
        m = jax.tree.map(mean, state.first, updates)
        square = lambda v, g: v + (g * g - v) * (1 - o.beta_2)
        v = jax.tree.map(square, state.second, updates)
        of_m = following / (1 - product * following)
        of_g = (1 - now) / (1 - product)
        power = jnp.power(o.beta_2, count)

        def one(m, v, g):
            m = m * of_m.astype(m.dtype) + g * of_g.astype(m.dtype)
            return m / (jnp.sqrt(v / (1 - power).astype(v.dtype)) + o.epsilon)

        updates = jax.tree.map(one, m, v, updates)
        return updates, _NadamState(count, product, m, v)

    scale: Any = optax.GradientTransformation(init, update)
    return [scale, optax.scale(-learning_rate)]


class _NadamState(NamedTuple):
    count: Any
    product: Any
    first: Any
    second: Any


def _ftrl(o: Any, learning_rate: Any) -> list[Any]:
    """Keras' FTRL, which has a power and starts the sum of squares at a number."""
    power, l1 = -o.learning_rate_power, o.l1_regularization_strength
    shrinkage = 2 * o.l2_shrinkage_regularization_strength

    def init(params):
        start = lambda p: jnp.full_like(p, o.initial_accumulator_value)
        return _FtrlState(
            jax.tree.map(start, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update(updates, state, params=None):
        rate = learning_rate
        l2 = o.l2_regularization_strength + o.beta / (2 * rate)
        squares = jax.tree.map(lambda n, g: n + g * g, state.squares, updates)

        def linear(z, g, n, old, w):
            grown = (jnp.power(n, power) - jnp.power(old, power)) / rate
            return z + g + shrinkage * w - grown.astype(w.dtype) * w

        z = jax.tree.map(linear, state.linear, updates, squares, state.squares, params)

        def change(z, n, w):
            quadratic = jnp.power(n, power) / rate + 2 * l2
            return ((jnp.clip(z, -l1, l1) - z) / quadratic).astype(w.dtype) - w

        return jax.tree.map(change, z, squares, params), _FtrlState(squares, z)

    scale: Any = optax.GradientTransformation(init, update)
    return [scale]


class _FtrlState(NamedTuple):
    squares: Any
    linear: Any


def _clip_each_by_norm(limit: float) -> Any:
    """Keras' `clipnorm`: bounds the norm of the gradient of each variable."""

    def clip(g):
        square = jnp.sum(g * g)
        norm = jnp.sqrt(jnp.where(square > 0, square, 1))
        return g * (limit / jnp.maximum(jnp.where(square > 0, norm, 0), limit))

    def update(updates, state, params=None):
        del params
        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


_RULES: dict[Any, Callable[[Any, Any], list[Any]]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Lion: _lion,
    keras.optimizers.Nadam: _nadam,
    keras.optimizers.Ftrl: _ftrl,
}


# ------------------------------------------------------------------ model


@_register
class SparseModel(keras.Model):
    """A `keras.Model` that trains embedding tables at the cost of the rows read.

    The training step differentiates with `sparsejax.value_and_grad`, so the gradient of
    each `keras.layers.Embedding` that a batch reads by rows is a SelectedRows. The
    optimizer updates these rows in place. Everything else is Keras': `fit`, metrics,
    callbacks, `evaluate`, `predict`, `save`, and the loss.

    Make it as a `keras.Model`: from inputs and outputs, or as a subclass with `call`. A
    functional or Sequential model becomes one by
    `SparseModel(model.inputs, model.outputs)`, with the same weights.

    Args:
      *args: the arguments of `keras.Model`, by position or by name.

    Raises:
      TypeError: the arguments are a model or layers, not inputs and outputs.
      ValueError: at `compile`, `Optimizer` refuses the optimizer, or the policy is
        mixed_float16 without a loss scale; at `fit`, a table has a constraint.

    Example:
      >>> import keras, numpy as np, sparsejax as sj
      >>> ids = keras.Input((2,), dtype="int32")
      >>> rows = keras.layers.Embedding(1000, 4, name="items")(ids)
      >>> x = keras.layers.Flatten()(rows)
      >>> model = sj.nn.keras.SparseModel(ids, keras.layers.Dense(1)(x))
      >>> model.compile("adam", "mse")
      >>> x, y = np.array([[3, 7], [7, 9]]), np.ones(2)
      >>> history = model.fit(x, y, batch_size=2, verbose=0)
      >>> model.explain(x, y)["params['items/embeddings']"].rows_read
      4

    References:
      Keras, `Model`; PaddlePaddle, `embedding(is_sparse=True)`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A functional model if inputs and outputs are given, as of `keras.Model`."""
        if cls is SparseModel and _is_functional(args, kwargs):
            cls = SparseFunctional
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        if len(args) == 1 and isinstance(args[0], keras.Model):
            raise TypeError(
                f"{_CALL}.SparseModel: got one argument, a {type(args[0]).__name__}. "
                "Write SparseModel(model.inputs, model.outputs), which shares the "
                "layers and the weights of the model. For a subclass of keras.Model, "
                "subclass SparseModel in place of it."
            )
        if args and not _is_functional(args, kwargs):
            kind = type(args[0])
            of = f" of {type(args[0][0]).__name__}" if kind is list and args[0] else ""
            raise TypeError(
                f"{_CALL}.SparseModel takes inputs and outputs, got a "
                f"{kind.__name__}{of}. For a list of layers, write model = "
                "keras.Sequential([keras.Input((10,), dtype='int32'), *layers]) and "
                "then SparseModel(model.inputs, model.outputs)."
            )
        if _is_functional(args, kwargs):
            # `model.inputs` is a list. With one input, `fit(x)` would warn of it.
            inputs = args[0] if args else kwargs.pop("inputs")
            if isinstance(inputs, list) and len(inputs) == 1:
                inputs = inputs[0]
            args = inputs, *args[1:]
            _make_functional(type(self))
            _Functional.__init__(self, *args, **kwargs)
        else:
            keras.Model.__init__(self, *args, **kwargs)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        auto_scale_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """`keras.Model.compile`; the optimizer is any that `Optimizer` accepts."""
        if auto_scale_loss and self.dtype_policy.name == "mixed_float16":
            raise ValueError(
                f"{_CALL}.SparseModel.compile: the dynamic loss scale of mixed_float16 "
                "reads every row of every gradient. Use the policy mixed_bfloat16, or "
                "pass auto_scale_loss=False and a fixed scale: "
                "keras.optimizers.Adam(loss_scale_factor=1024.0)."
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = Optimizer(optimizer)
        super().compile(optimizer, *args, auto_scale_loss=False, **kwargs)
        if optimizer is not None:
            self.optimizer._is_of_sparse_model = True

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Called by `keras.saving.load_model`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def get_compile_config(self) -> Any:
        """None for an optax transformation, which cannot be saved in a config."""
        optimizer: Any = getattr(self, "optimizer", None)
        if isinstance(optimizer, Optimizer) and optimizer._given.source is None:
            warnings.warn(
                f"{_CALL}: the model was compiled with an optax transformation, which "
                "a file cannot hold. After load_model, call compile with "
                "Optimizer(tx) again. To restore the state of the optimizer too, call "
                "model.optimizer.build(model.trainable_variables) and then "
                "model.load_weights of the same file.",
                stacklevel=2,
            )
            return None
        return super().get_compile_config()

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """`keras.Model.export`; needs the package of its format."""
        try:
            super().export(filepath, *args, **kwargs)
        except ImportError as e:  # which names the package that is missing
            e.add_note(
                f"{_CALL}.SparseModel.export: install the package of the format, or "
                "write a program for JAX: jax.export of model.stateless_call, with the "
                "weights as arguments, as on the page 'Train a Keras model'."
            )
            raise

    def train_step(self, state: Any, data: Any) -> Any:
        """One step; Keras jits it and donates the state."""
        trainable, others, optimizer_variables, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        paths = _paths(self.trainable_variables)

        def loss_fn(params):
            loss, aux = self.compute_loss_and_updates(
                [params[path] for path in paths],
                others,
                metrics,
                x,
                y,
                sample_weight,
                training=True,
                optimizer_variables=optimizer_variables,
            )
            unscaled, y_pred, new_others, new_metrics = aux
            # What did not change stays out of the outputs of the program.
            changed = [None if a is b else a for a, b in zip(new_others, others)]
            return loss, (unscaled, y_pred, changed, new_metrics)

        params = dict(zip(paths, trainable))
        (_, aux), grads = value_and_grad(loss_fn, has_aux=True)(params)
        unscaled, y_pred, changed, metrics = aux
        others = [b if a is None else a for a, b in zip(changed, others)]
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, [grads[path] for path in paths], trainable
        )
        logs, metrics = self._update_metrics_variables(
            metrics, unscaled, x, y, y_pred, sample_weight
        )
        return logs, (trainable, others, optimizer_variables, metrics)

    def explain(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Which variables have sparse gradients on a batch, and why the others do not.

        Args:
          x, y, sample_weight: one batch, as for `train_on_batch`. Without `y`, the
            loss is the sum of the outputs, and the model need not be compiled.

        Returns:
          What `sparsejax.explain` returns; it prints as a table.
        """
        of_outputs = y is None and (not self.compiled or self.loss is not None)
        if of_outputs:
            self(x, training=False)  # builds what is not built yet
        else:
            self.test_on_batch(x, y, sample_weight)
            self.reset_metrics()
            self.optimizer.build(self.trainable_variables)
        values = lambda variables: [v.value for v in variables]
        x, y, sample_weight = jax.tree.map(jnp.asarray, (x, y, sample_weight))

        trainable = self.trainable_variables
        paths = _paths(trainable)

        def outputs_loss(params):
            outputs, _, losses = self.stateless_call(
                [params[path] for path in paths],
                values(self.non_trainable_variables),
                x,
                training=True,
                return_losses=True,
            )
            return sum(jnp.sum(each) for each in jax.tree.leaves([outputs, losses]))

        def params_loss(params):
            return self.compute_loss_and_updates(
                [params[path] for path in paths],
                values(self.non_trainable_variables),
                values(self.metrics_variables),
                x,
                y,
                sample_weight,
                training=True,
                optimizer_variables=values(self.optimizer.variables),
            )[0]

        loss = outputs_loss if of_outputs else params_loss
        return explain(loss)(_by_path(trainable, values(trainable)))


def _functional_class() -> Any:
    """`keras.Model(inputs, outputs)` is of a class without a public name."""
    x = keras.Input((1,), name="sparsejax_input")
    y = keras.layers.Identity(name="sparsejax_identity")(x)
    return type(keras.Model(x, y, name="sparsejax_functional"))


_Functional: Any = _functional_class()


@_register
class SparseFunctional(SparseModel, _Functional):
    """What `SparseModel(inputs, outputs)` returns."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """As Keras makes its functional models."""
        return _Functional.__new__(cls, *args, **kwargs)


def _is_functional(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """As Keras tells `Model(inputs, outputs)` from `Model(name=...)`."""
    if len(args) == 2 or (len(args) == 1 and "outputs" in kwargs):
        return True
    return "inputs" in kwargs and "outputs" in kwargs


def _make_functional(cls: Any) -> Any:
    """Puts `SparseFunctional` in the place of `SparseModel` among the bases."""
    if cls is SparseModel:
        return SparseFunctional
    if issubclass(cls, SparseModel) and not issubclass(cls, SparseFunctional):
        cls.__bases__ = tuple(map(_make_functional, cls.__bases__))
    return cls
