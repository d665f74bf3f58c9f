"""Keras 3 on the JAX backend: `fit` with sparse gradients for embedding tables.

- `SparseModel`: a `keras.Model` whose training step has SelectedRows for tables.
- `Optimizer`: a Keras optimizer that runs an optax transformation on the rows read.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.optim import lazy
from sparsejax.optim._exact.exact import Exact
from sparsejax.transform.explain import explain
from sparsejax.transform.grad import value_and_grad


def _import_keras() -> Any:
    try:
        module = importlib.import_module("keras")
        backend = module.backend.backend()
    except ModuleNotFoundError as e:  # of the package of another backend
        if e.name == "keras":
            raise
        module, backend = None, f"{e.name}, which is not installed"
    if backend != "jax":
        raise RuntimeError(
            f"sparsejax.nn.keras needs Keras 3 on the JAX backend, got {backend}. Set "
            "os.environ['KERAS_BACKEND'] = 'jax' before the first import of keras, or "
            '"backend": "jax" in ~/.keras/keras.json.'
        )
    return module


keras: Any = _import_keras()
# The class of `keras.Model(inputs, outputs)` has no public name.
_Functional: Any = importlib.import_module("keras.src.models").Functional
_register = keras.saving.register_keras_serializable("sparsejax")


# ------------------------------------------------------------------ optimizer

# The replacement for Keras' optimizers that are not row-separable or not in optax.
# The others are in optax under their names in lower case.
_INSTEAD = {
    "adafactor": "sparsejax.optim.rowwise_adagrad",
    "ftrl": "sparsejax.optim.ftrl",
    "lamb": "sparsejax.optim.partial_rowwise_lamb",
    "muon": "optax.adam",
    "schedulefreeadamw": "optax.adamw",
}


@_register
class Optimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that updates the rows of a SelectedRows, in place.

    It runs an optax transformation, lifted by `sparsejax.optim.lazy`, on all variables
    of the model. Rows that a batch does not read keep their weights and their state.

    Args:
      tx: an `optax.GradientTransformation`, for example one of `sparsejax.optim`. To
        let callbacks change the learning rate, pass
        `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`.
      name: the name of the optimizer.

    Raises:
      TypeError: `tx` is something else, for example an optimizer of Keras.
      ValueError: `tx` is `sparsejax.optim.exact`; at `build`, `lazy` refuses it.

    Example:
      >>> import optax, sparsejax as sj
      >>> optimizer = sj.nn.keras.Optimizer(optax.adam(1e-3))

    References:
      Keras, `optimizers.Optimizer`; TensorFlow Addons, `LazyAdam`.
    """

    def __init__(self, tx: optax.GradientTransformation, *, name: str | None = None):
        _check_transformation(tx)
        super().__init__(float("nan"), name=name)
        # sparsejax's own wrappers go around a lazy transformation, not inside of one.
        is_ours = getattr(tx.update, "__module__", "").startswith("sparsejax.")
        self._built = _Built(tx if is_ours else lazy(tx))

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state, a Keras variable for each array of `tx.init(params)`."""
        if self.built:
            return
        super().build(variables)
        paths, tx = _paths(variables), self._built.tx
        state = tx.init({path: v.value for path, v in zip(paths, variables)})
        leaves, shape = jax.tree_util.tree_flatten_with_path(state)
        slots: list[Any] = [None] * len(leaves)
        for k in _saved_order([path for path, _ in leaves], paths):
            value = jnp.array(leaves[k][1])  # a copy: each array is donated once
            slots[k] = self.add_variable(
                shape=value.shape,
                initializer=lambda *args, value=value, **options: value,
                dtype=value.dtype.name,
                name="state" + jax.tree_util.keystr(leaves[k][0]).replace("/", "_"),
            )
        rates = optax.tree_utils.tree_get_all_with_path(state, "learning_rate")
        if has_rate := len(rates) == 1:
            self._learning_rate.assign(rates[0][1])
        self._built = _Built(tx, list(variables), slots, shape, has_rate)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Updates the variables with gradients that are arrays or SelectedRows."""
        variables = trainable_variables
        if not self.built:
            if variables is None:
                raise ValueError(
                    "Optimizer.apply: the optimizer has no variables yet. Pass them: "
                    "apply(grads, model.trainable_variables)."
                )
            self.build(list(variables))
        built = self._built
        variables = built.variables if variables is None else list(variables)
        if list(map(id, variables)) != list(map(id, built.variables)):
            raise ValueError(
                f"Optimizer.apply: the variables must be the {len(built.variables)} "
                "for which the optimizer was built, got others. Compile the model with "
                "a new optimizer after a change of `trainable`."
            )
        paths = _paths(variables)
        params: Any = {path: v.value for path, v in zip(paths, variables)}
        state = built.shape.unflatten([v.value for v in built.state])
        if built.has_rate:
            rate = jnp.asarray(self._learning_rate.value)
            state = optax.tree_utils.tree_set(state, learning_rate=rate)
        updates, state = built.tx.update(dict(zip(paths, grads)), state, params)
        params = optax.apply_updates(params, updates)
        for path, v in zip(paths, variables):
            v.assign(params[path])
            if v.constraint is not None:
                v.assign(v.constraint(v))
        for v, x in zip(built.state, jax.tree.leaves(state)):
            v.assign(x)
        self.iterations.assign_add(1)

    @property
    def learning_rate(self) -> Any:
        """The learning rate; NaN if it is inside the optax transformation."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if self.built and not self._built.has_rate:
            raise ValueError(
                "Optimizer: the learning rate is inside the optax transformation, and "
                "cannot be set. Use an optax schedule, or pass "
                "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        keras.optimizers.Optimizer.learning_rate.fset(self, value)

    def get_config(self) -> dict[str, Any]:
        """Raises a ValueError: an optax transformation has no config."""
        raise ValueError(
            "Optimizer: an optax transformation cannot be saved in a config. Save "
            "weights, and compile with a new Optimizer(tx)."
        )


# Keras tracks what it finds in attributes and in tuples, but not in dataclasses.
@dataclasses.dataclass(frozen=True)
class _Built:
    """The transformation; once it is built, its variables and its state.

    Args:
      tx: a lifted optax transformation.
      variables: the variables of the model, in order.
      state: a Keras variable for each leaf of the state.
      shape: the tree of the state.
      has_rate: True if the state has the learning rate.
    """

    tx: Any
    variables: Sequence[Any] = ()
    state: Sequence[Any] = ()
    shape: Any = None
    has_rate: bool = False


def _check_transformation(tx: Any) -> None:
    if isinstance(tx, Exact):
        raise ValueError(
            "Optimizer: exact brings rows up to date before the model reads them, "
            "which fit cannot do. Pass the optax transformation itself, or train with "
            "sparsejax.optim.exact_value_and_grad in a loop of your own."
        )
    if isinstance(tx, optax.GradientTransformation):
        return
    name = tx["class_name"] if isinstance(tx, dict) else tx
    name = name if isinstance(name, str) else type(tx).__name__
    known = name.lower() if hasattr(optax, name.lower()) else "adam"
    instead = _INSTEAD.get(name.lower(), f"optax.{known}")
    rate: Any = getattr(tx, "_learning_rate", 1e-3)
    rate = f"{float(rate.value):g}" if isinstance(rate, keras.Variable) else "1e-3"
    raise TypeError(
        f"Optimizer: tx must be an optax transformation, got {name!r}. Write "
        f"Optimizer({instead}({rate})), with its other options by optax's names."
    )


def _paths(variables: Sequence[Any]) -> list[str]:
    """Names each variable by its path, with a number if it is not unique."""
    count = collections.Counter(v.path for v in variables)
    return [
        v.path if count[v.path] == 1 else f"{v.path}:{k}"
        for k, v in enumerate(variables)
    ]


def _saved_order(leaves: Sequence[Any], paths: Sequence[str]) -> list[int]:
    """Returns the leaves of a state in the order in which they are saved.

    JAX sorts the keys of a dict. Keras may give the layers of a loaded model other
    names, so leaves that follow variables are in the order of the variables.
    """
    place = {path: k for k, path in enumerate(paths)}
    seen: dict[Any, int] = {}

    def rank(leaf):
        entries = [leaf[: i + 1] for i in range(len(leaf))]
        key = lambda entry: str(getattr(entry[-1], "key", ""))
        return [place.get(key(e), seen.setdefault(e, len(seen))) for e in entries]

    return sorted(range(len(leaves)), key=[rank(x) for x in leaves].__getitem__)


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
      TypeError: the arguments are a model or layers, not inputs and outputs; at
        `compile`, the optimizer is not an optax transformation.
      ValueError: at `compile`, the policy is mixed_float16.

    Example:
      >>> import keras, numpy as np, optax, sparsejax as sj
      >>> ids = keras.Input((2,), dtype="int32")
      >>> rows = keras.layers.Embedding(1000, 4, name="items")(ids)
      >>> x = keras.layers.Flatten()(rows)
      >>> model = sj.nn.keras.SparseModel(ids, keras.layers.Dense(1)(x))
      >>> model.compile(optax.adam(1e-3), "mse")
      >>> x, y = np.array([[3, 7], [7, 9]]), np.ones(2)
      >>> history = model.fit(x, y, batch_size=2, verbose=0)
      >>> model.explain(x)["params['items/embeddings']"].rows_read
      4

    References:
      Keras, `Model`; PaddlePaddle, `embedding(is_sparse=True)`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a functional model from inputs and outputs, as `keras.Model` does."""
        is_functional = cls is SparseModel and _is_functional(args, kwargs)
        return super().__new__(SparseFunctional if is_functional else cls)

    def __init__(self, *args: Any, **kwargs: Any):
        if not _is_functional(args, kwargs):
            if args:
                raise TypeError(
                    "SparseModel takes inputs and outputs, got a "
                    f"{type(args[0]).__name__}. Write SparseModel(model.inputs, "
                    "model.outputs), which shares the weights of the model; for "
                    "layers, first model = keras.Sequential([keras.Input((10,), "
                    "dtype='int32'), *layers])."
                )
            keras.Model.__init__(self, **kwargs)
            return
        if not isinstance(self, SparseFunctional):
            raise TypeError(
                f"{type(self).__name__}: a subclass of SparseModel has a method call. "
                "To make it from inputs and outputs, subclass "
                "sparsejax.nn.keras.SparseFunctional."
            )
        # `model.inputs` is a list. With one input, `fit(x)` would warn of it.
        inputs = args[0] if args else kwargs.pop("inputs")
        is_single = isinstance(inputs, list) and len(inputs) == 1
        _Functional.__init__(
            self, inputs[0] if is_single else inputs, *args[1:], **kwargs
        )

    def compile(
        self,
        optimizer: Any,
        *args: Any,
        auto_scale_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """`keras.Model.compile` with an optax transformation or an `Optimizer`."""
        if auto_scale_loss and self.dtype_policy.name == "mixed_float16":
            raise ValueError(
                "SparseModel.compile: the dynamic loss scale of mixed_float16 reads "
                "every row of every gradient. Use the policy mixed_bfloat16, or pass "
                "auto_scale_loss=False."
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = Optimizer(optimizer)
        super().compile(optimizer, *args, auto_scale_loss=False, **kwargs)

    def get_compile_config(self) -> None:
        """Returns None: a file cannot hold an optax transformation."""
        if self.compiled:
            warnings.warn(
                "SparseModel: a file cannot hold an optax transformation. After "
                "load_model, call compile again. To restore the state of the optimizer "
                "too, call model.optimizer.build(model.trainable_variables) and then "
                "model.load_weights of the same file.",
                stacklevel=2,
            )

    def train_step(self, state: Any, data: Any) -> Any:
        """Takes one step; Keras jits it and donates the state."""
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
            # Unchanged values are not outputs, so XLA does not copy them.
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

    def explain(self, x: Any) -> Any:
        """Shows which variables have sparse gradients on a batch, and why others not.

        Args:
          x: the inputs of one batch. The loss is the sum of the outputs and of the
            losses that layers add, so the model need not be compiled.

        Returns:
          The result of `sparsejax.explain`; it prints as a table.
        """
        x = jax.tree.map(jnp.asarray, x)
        self(x, training=False)  # builds what is not built yet
        variables = self.trainable_variables
        paths = _paths(variables)

        def loss_fn(params):
            mapping = [(v, params[path]) for v, path in zip(variables, paths)]
            with keras.StatelessScope(mapping, collect_losses=True):
                outputs = self(x, training=True)
                leaves = jax.tree.leaves([outputs, self.losses])
            return sum(map(jnp.sum, leaves))

        return explain(loss_fn)(dict(zip(paths, [v.value for v in variables])))


@_register
class SparseFunctional(SparseModel, _Functional):
    """A functional `SparseModel`, from `SparseModel(inputs, outputs)`."""


def _is_functional(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tells `Model(inputs, outputs)` from `Model(name=...)`, as Keras does."""
    if len(args) == 2 or (len(args) == 1 and "outputs" in kwargs):
        return True
    return "inputs" in kwargs and "outputs" in kwargs
