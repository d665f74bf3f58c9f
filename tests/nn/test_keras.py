"""`sj.nn.keras` against stock Keras."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax as sj


keras: Any = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("keras is set up for another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("loose_promotion")
V, D, N = 120, 4, 24
layers, optimizers = keras.layers, keras.optimizers
SparseModel, Optimizer = sj.nn.keras.SparseModel, sj.nn.keras.Optimizer


def _data(seed=0, n=N):
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (n, 2)), rng.normal(size=n).astype("float32")


def _functional(cls=SparseModel, seed=0, **embedding):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((2,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(V, D, name="items", **embedding)(ids))
    x = layers.Dropout(0.2)(layers.BatchNormalization()(x))
    return cls(ids, layers.Dense(1)(x))


def _compiled(optimizer, **embedding):
    model = _functional(**embedding)
    model.compile(optimizer, "mse")
    return model


@keras.saving.register_keras_serializable("sparsejax_tests")
class Towers(SparseModel):
    """A subclass with `call`, two tables and a loss of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.items = layers.Embedding(V, D, name="items")
        self.users = layers.Embedding(V, D)
        self.drop = layers.Dropout(0.3, seed=1)
        self.head = layers.Dense(1)

    def call(self, inputs):
        x = self.drop(self.items(inputs["item"]) * self.users(inputs["user"]))
        self.add_loss(1e-3 * keras.ops.mean(x**2))
        return self.head(x)


def _of_towers(x):
    return {"item": x[:, 0], "user": x[:, 1]}


def _table(model):
    return model.get_layer("items").embeddings.numpy().copy()


def _moved(model, before):
    return np.flatnonzero((_table(model) != before).any(1)).tolist()


def _weights(model):
    return [np.asarray(v.value) for v in model.variables]


def _assert_same(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 2e-5, "atol": 2e-6, **tolerance})


# ------------------------------------------------------------------ optimizers


def test_the_state_is_in_the_order_of_the_variables():
    """Not of their names, which a loaded model may have others of."""
    saved = []
    for names in (("b", "a"), ("a", "b")):
        variables = [
            keras.Variable(np.full(2, k + 1.0), name=n) for k, n in enumerate(names)
        ]
        optimizer = Optimizer(optax.adam(0.1))
        optimizer.apply([np.full(2, 1.0), np.full(2, 2.0)], variables)
        saved.append([v.numpy() for v in optimizer.variables])
    _assert_same(*saved, rtol=0, atol=0)


def test_wrong_optimizers():
    call: Any = Optimizer
    one = keras.Variable(np.ones((3, 2), "float32"))
    built, sgd, lion = call(optax.adam(0.1)), call(optax.sgd(0.1)), optimizers.Lion()
    built.build([one])
    for wrong, error, word in (
        (lambda: call(3), TypeError, "'int'"),
        (lambda: call(optax.adam), TypeError, "transformation"),
        (lambda: call(optimizers.Adam(0.05)), TypeError, r"optax.adam\(0.05\)"),
        (lambda: call(optimizers.serialize(lion)), TypeError, "optax.lion"),
        (lambda: call(sj.optim.exact(optax.sgd(0.1, 0.9))), ValueError, "exact"),
        (lambda: call(optax.lamb(0.1)).build([one]), ValueError, "lifted"),
        (lambda: sgd.apply([one.value]), ValueError, "variables"),
        (lambda: built.apply([one.value], [one, one]), ValueError, "others"),
        (lambda: setattr(built, "learning_rate", 0.2), ValueError, "inject_hyperparam"),
        (lambda: built.get_config(), ValueError, "config"),
    ):
        with pytest.raises(error, match=word):
            wrong()


@pytest.mark.slow
def test_every_optimizer_of_keras_is_refused_with_a_call_that_trains():
    kinds = [
        kind
        for name, kind in vars(optimizers).items()
        if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)
        if name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    assert len(kinds) >= 13
    model = _functional()
    names = {"Optimizer": Optimizer, "optax": optax, "sparsejax": sj}
    row, table = sj.SelectedRows([4], jnp.ones((1, 2)), 9), jnp.ones((9, 2))
    built = []
    for kind in kinds:
        with pytest.raises(TypeError, match="Optimizer") as caught:
            model.compile(kind.__name__.lower(), "mse")
        (instead,) = re.findall(r"Write (Optimizer\(.*\)),", str(caught.value))
        built.append(eval(instead, names))
        built[-1].build([keras.Variable(table)])

    @jax.jit
    def train(states):
        pairs = zip(built, states, strict=True)
        return [x.stateless_apply(state, [row], [table])[0] for x, state in pairs]

    for (trained,) in train([[v.value for v in x.variables] for x in built]):
        assert (np.asarray(trained)[4] != 1).all()


def test_another_backend(monkeypatch):
    def missing():
        raise ModuleNotFoundError(name="tensorflow")

    monkeypatch.delattr(sj.nn, "keras")
    monkeypatch.delitem(sys.modules, "sparsejax.nn.keras")
    for backend in (missing, lambda: "tensorflow"):
        monkeypatch.setattr(keras.backend, "backend", backend)
        with pytest.raises(RuntimeError, match="tensorflow.*KERAS_BACKEND"):
            sj.nn.keras  # noqa: B018


# ------------------------------------------------------------------ training


def test_fit_is_that_of_keras(tmp_path):
    """Lazy Adagrad is dense: losses, metrics, statistics and weights are equal."""
    (x, y), weights = _data(), tmp_path / "m.weights.h5"
    results = []
    for cls, optimizer in (
        (keras.Model, optimizers.Adagrad(0.1, epsilon=1e-7)),
        (SparseModel, optax.adagrad(0.1, eps=1e-7)),
    ):
        model = _functional(cls)
        model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
        if not results:
            model.save_weights(weights)
        model.set_weights([np.zeros_like(x) for x in model.get_weights()])
        model.load_weights(weights)  # those of stock Keras
        keras.utils.set_random_seed(0)
        options = {"validation_data": _data(1), "sample_weight": np.linspace(0, 1, N)}
        history = model.fit(x, y, 8, epochs=3, verbose=0, **options).history
        tested = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        results.append(
            (sorted(history), [*history.values(), *tested, *_weights(model)])
        )
    (names, expected), (found_names, found) = results
    assert found_names == names
    _assert_same(found, expected)


@pytest.mark.slow
def test_a_subclass_however_it_runs():
    x, y = _data()
    results = []
    for options in (
        {},
        {"jit_compile": False},
        {"run_eagerly": True},
        {"steps_per_execution": 2},
    ):
        keras.utils.set_random_seed(0)
        model = Towers()
        model.compile(optax.adam(0.1), "mse", **options)
        model.fit(_of_towers(x), y, batch_size=8, epochs=1, verbose=0)
        results.append(_weights(model))
    for result in results[1:]:
        _assert_same(result, results[0], rtol=1e-4, atol=1e-5)


def test_tables_are_updated_in_place():
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    model = _compiled(chain)
    x, y = np.array([[3, 7], [7, 9], [0, 3]]), np.ones(3)
    model.train_on_batch(x, y)
    tables = [v for v in model.variables + model.optimizer.variables if V in v.shape]
    assert len(tables) == 3  # the table and its two moments
    before = _table(model)
    addresses = [v.value.unsafe_buffer_pointer() for v in tables]
    model.train_on_batch(x, y)
    assert [v.value.unsafe_buffer_pointer() for v in tables] == addresses
    assert _moved(model, before) == [0, 3, 7, 9]
    for moment in tables[1:]:
        assert np.flatnonzero(moment.numpy().any(1)).tolist() == [0, 3, 7, 9]
    assert int(model.optimizer.iterations) == 2


def test_explain():
    """Compiled or not, of a functional model and of a subclass."""
    x, _ = _data(n=4)
    model = _functional()
    sparse = lambda model, x: {
        v.name: v.rows_read for v in model.explain(x).leaves if v.sparse
    }
    assert sparse(model, x) == {"params['items/embeddings']": 8}
    model.compile(optax.adam(0.1), "mse")
    assert sparse(model, x) == {"params['items/embeddings']": 8}
    assert [*sparse(Towers(), {"item": x, "user": x}).values()] == [8, 8]


def test_tables_that_are_not_sparse_or_not_trained():
    """A tied table has a dense gradient; constraints hold; a frozen one stays."""
    x, y = np.array([[3], [7]]), np.array([[1], [2]])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = []
    for cls, optimizer in ((keras.Model, "sgd"), (SparseModel, optax.sgd(0.01))):
        keras.utils.set_random_seed(0)
        ids = keras.Input((1,), dtype="int32")
        embed = layers.Embedding(V, D, name="items")
        scores = keras.ops.matmul(embed(ids), keras.ops.transpose(embed.embeddings))
        model = cls(ids, scores)
        model.compile(optimizer, loss)
        model.fit(x, y, epochs=2, verbose=0)
        results.append(_weights(model))
    _assert_same(*results)
    unit = keras.constraints.UnitNorm(1)
    model = _compiled(optax.sgd(0.1), embeddings_constraint=unit)
    model.fit(*_data(n=4), verbose=0)
    norms = np.linalg.norm(_table(model), axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)
    # Labels are keyed by the paths of the variables.
    labels = lambda p: {k: "frozen" if "items" in k else "dense" for k in p}
    parts: Any = {"frozen": optax.set_to_zero(), "dense": optax.adam(0.1)}
    model = _functional()
    table = _table(model)
    for trainable, tx in (
        (True, optax.partition(parts, labels)),
        (False, parts["dense"]),
    ):
        dense = model.layers[-1].kernel.numpy().copy()
        model.get_layer("items").trainable = trainable
        model.compile(tx, "mse")
        model.fit(*_data(), verbose=0)
        assert _moved(model, table) == []
        assert (model.layers[-1].kernel.numpy() != dense).any()


def test_mixed_precision():
    x, y = _data(n=4)
    policy = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = _compiled(optax.adagrad(0.1))
        model.fit(x, y, verbose=0)
        assert len([v for v in model.explain(x).leaves if v.sparse]) == 1
        keras.config.set_dtype_policy("mixed_float16")
        model = _functional()
        with pytest.raises(ValueError, match="mixed_float16"):
            model.compile(optax.adam(0.1), "mse")
        model.compile(optax.adam(0.1), "mse", auto_scale_loss=False)
        before = _table(model)
        model.fit(x, y, verbose=0)
        assert _moved(model, before) == sorted(set(x.ravel()))
    finally:
        keras.config.set_dtype_policy(policy)


def test_learning_rates_of_callbacks():
    """Set by a callback with `inject_hyperparams`, or a schedule of optax."""
    x, y = _data()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / 2**epoch)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    by_callback = _compiled(Optimizer(tx))
    by_callback.fit(x, y, 8, epochs=3, verbose=0, callbacks=[schedule])
    assert float(by_callback.optimizer.learning_rate) == pytest.approx(0.025)
    model = _compiled(optax.sgd(optax.exponential_decay(0.1, 3, 0.5, staircase=True)))
    model.fit(x, y, 8, epochs=3, verbose=0)
    _assert_same(_weights(by_callback), _weights(model))
    with pytest.raises(ValueError, match="cannot be set"):
        model.fit(x, y, verbose=0, callbacks=[schedule])


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", ["functional", "subclass"])
def test_save_and_load_a_model(tmp_path, kind):
    """Then train on: as the model that was not saved."""
    x, y = _data()
    tx = optax.adam(optax.exponential_decay(0.1, 3, 0.5))
    model = _functional() if kind == "functional" else Towers()
    x = x if kind == "functional" else _of_towers(x)

    def without_dropout(model):
        for layer in model.layers:
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0

    without_dropout(model)
    model.compile(tx, "mse", metrics=["mae"])
    model.fit(x, y, batch_size=8, verbose=0)
    path = str(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="call compile again"):
        model.save(path)
    loaded: Any = keras.saving.load_model(path)
    assert isinstance(loaded, SparseModel) and not loaded.compiled
    without_dropout(loaded)
    loaded.compile(tx, "mse", metrics=["mae"])
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    assert int(loaded.optimizer.iterations) == 3
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    _assert_same(_weights(model)[:4], _weights(loaded)[:4])
    state = [[v.numpy() for v in m.optimizer.variables] for m in (model, loaded)]
    _assert_same(*state)


@pytest.mark.slow
def test_functional_models():
    """A functional model leaves `SparseModel` and its other subclasses alone."""

    def build(self):
        ids = keras.Input((2,), dtype="int32")
        x = layers.Flatten()(layers.Embedding(V, D, name="items")(ids))
        self.__class__.__mro__[1].__init__(self, inputs=ids, outputs=layers.Dense(1)(x))

    Built = type("Built", (sj.nn.keras.SparseFunctional,), {"__init__": build})
    x, y = _data()
    for model in (Built(), Towers(), Built()):
        model.compile(optax.adam(0.1), "mse")
        given = _of_towers(x) if isinstance(model, Towers) else x
        model.fit(given, y, verbose=0)
    with pytest.raises(TypeError, match="SparseFunctional"):
        type("Wrong", (SparseModel,), {"__init__": build})()
    for wrong in ([layers.Embedding(V, D), layers.Dense(1)], _functional(keras.Model)):
        with pytest.raises(TypeError, match="model.inputs"):
            SparseModel(wrong)
    inner = [layers.Input((2,), dtype="int32"), layers.Embedding(V, D)]
    sequential = keras.Sequential([*inner, layers.Flatten()])
    model = SparseModel(sequential.inputs, sequential.outputs)
    model.compile(optax.adam(0.1), "mse")
    model.fit(x, np.zeros((N, 2 * D)), verbose=0)
    assert model.variables[0] is sequential.variables[0]


def test_distributed_embedding_of_keras_rs():
    rs = pytest.importorskip("keras_rs")
    table = rs.layers.TableConfig(
        name="items", vocabulary_size=V, embedding_dim=D, placement="default_device"
    )
    feature = rs.layers.FeatureConfig("item", table, (8, 3), (8, D))
    ids = keras.Input((3,), batch_size=8, dtype="int32", name="item")
    embedded = rs.layers.DistributedEmbedding({"item": feature})({"item": ids})
    model = SparseModel(ids, layers.Dense(1)(embedded["item"]))
    model.compile(optax.adagrad(0.1), "mse")
    x = np.arange(24).reshape(8, 3)
    model.fit(x, np.ones(8), batch_size=8, verbose=0)
    assert [v.rows_read for v in model.explain(x).leaves if v.sparse] == [24]
