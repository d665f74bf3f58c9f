"""`sj.nn.keras` against stock Keras: `keras.Model` and Keras' own optimizers."""

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
layers = keras.layers


def _data(seed=0, n=N):
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (n, 2)), rng.normal(size=n).astype("float32")


def _functional(cls, seed=0, **embedding):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((2,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(V, D, name="items", **embedding)(ids))
    x = layers.Dropout(0.2)(layers.BatchNormalization()(x))
    return cls(ids, layers.Dense(1)(x))


def _weights(model):
    return [np.asarray(v.value) for v in model.variables]


def _assert_same(a, b, **tolerance):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, **{"rtol": 2e-5, "atol": 2e-6, **tolerance})


def _moved(model, before):
    table = model.get_layer("items").embeddings.numpy()
    return np.flatnonzero((table != before).any(1)).tolist()


# ------------------------------------------------------------------ optimizers

O = keras.optimizers
_RULES = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9),
    "nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: O.Adam(0.1, beta_1=0.8, epsilon=1e-3),
    "amsgrad": lambda: O.Adam(0.1, amsgrad=True, clipvalue=0.5),
    "adamw": lambda: O.AdamW(0.1, weight_decay=0.2, global_clipnorm=0.7),
    "adagrad": lambda: O.Adagrad(0.1, clipnorm=0.3),
    "rmsprop": lambda: O.RMSprop(0.1, rho=0.8, momentum=0.5),
    "centered": lambda: O.RMSprop(0.1, centered=True, loss_scale_factor=8.0),
    "adadelta": lambda: O.Adadelta(1.0),
    "adamax": lambda: O.Adamax(0.1),
    "lion": lambda: O.Lion(0.1),
    "nadam": lambda: O.Nadam(0.1, beta_2=0.9, clipnorm=0.7),
    "ftrl": lambda: O.Ftrl(0.1, l1_regularization_strength=0.3, beta=0.1),
    "ftrl power": lambda: O.Ftrl(
        O.schedules.ExponentialDecay(0.1, 1, 0.5),
        learning_rate_power=-0.7,
        initial_accumulator_value=0.3,
        l2_regularization_strength=0.2,
        l2_shrinkage_regularization_strength=0.1,
    ),
    "schedule": lambda: O.SGD(O.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9),
}


@pytest.mark.parametrize("name", _RULES)
def test_the_numbers_of_the_keras_optimizer(name):
    """A table of which every row is read, with duplicates, and a dense variable."""
    rng = np.random.default_rng(0)
    start = [rng.normal(size=s).astype("float32") for s in ((7, 3), (3,))]
    results = []
    for optimizer in (_RULES[name](), sj.nn.keras.Optimizer(_RULES[name]())):
        rng = np.random.default_rng(1)
        variables = [keras.Variable(x) for x in start]
        optimizer.build(variables)
        step = jax.jit(optimizer.stateless_apply)
        state = [v.value for v in optimizer.variables]
        weights = [v.value for v in variables]
        for _ in range(4):
            rows = jnp.array([*range(7), 3, 5])
            values = jnp.asarray(rng.normal(size=(9, 3)), jnp.float32)
            grad: Any = sj.SelectedRows(rows, values, 7)
            if not isinstance(optimizer, sj.nn.keras.Optimizer):
                grad = grad.to_dense()
            weights, state = step(state, [grad, jnp.ones(3)], weights)
        results.append(weights)
    _assert_same(*results, rtol=1e-4, atol=1e-6)


def test_rows_that_are_not_read_keep_weights_and_state():
    table = keras.Variable(np.ones((9, 2), "float32"))
    optimizer = sj.nn.keras.Optimizer("adamw")
    optimizer.apply([sj.SelectedRows([4], jnp.ones((1, 2)), 9)], [table])
    rest = np.arange(9) != 4
    assert (table.numpy()[rest] == 1).all() and (table.numpy()[4] < 1).all()
    tables = [v for v in optimizer.variables if v.shape == (9, 2)]
    assert len(tables) == 2 and all((v.numpy()[rest] == 0).all() for v in tables)
    assert int(optimizer.iterations) == 1


def test_wrong_optimizers():
    call = sj.nn.keras.Optimizer
    trained = O.SGD(0.1)
    trained.apply([np.ones(2)], [keras.Variable(np.ones(2))])
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    one = keras.Variable(np.ones((3, 2), "float32"))
    built = call(optax.adam(0.1))
    built.build([one])
    bad: Any = 3
    for wrong, error, said in (
        (lambda: call(bad), TypeError, "got builtins.int"),
        (lambda: call(optax.adam), TypeError, "adam, which must be called"),
        (lambda: call("lamb"), ValueError, r"Lamb .*sparsejax\.optim\.partial_rowwise"),
        (lambda: call("sdg"), ValueError, "no optimizer 'sdg'.*'rmsprop', 'sgd'"),
        (lambda: call(O.Adam(use_ema=True)), ValueError, "use_ema=True averages"),
        (lambda: call(O.SGD(gradient_accumulation_steps=2)), ValueError, "holds grad"),
        (lambda: call(trained), ValueError, "has trained for 1 steps"),
        (
            lambda: call(sj.optim.exact(optax.sgd(0.1, 0.9))),
            ValueError,
            "fit cannot do",
        ),
        (lambda: call(optax.lamb(0.1)).build([one]), ValueError, "cannot be lifted"),
        (lambda: call(noise).build([one]), ValueError, "cannot be lifted|cannot hold"),
        (lambda: call("sgd").apply([one.value]), ValueError, "has no variables yet"),
        (lambda: built.apply([one.value], [one, one]), ValueError, "the 1 for which"),
        (
            lambda: setattr(built, "learning_rate", 0.2),
            ValueError,
            "inject_hyperparams",
        ),
        (lambda: built.get_config(), ValueError, "cannot be saved in a config"),
    ):
        with pytest.raises(error, match=said):
            wrong()


def test_every_optimizer_of_keras_is_mapped_or_refused_with_a_call():
    """The calls that the errors name train a model."""
    source = sj.nn.keras
    kinds = {
        name: kind
        for name, kind in vars(O).items()
        if isinstance(kind, type) and issubclass(kind, O.Optimizer)
        if name not in ("Optimizer", "OptimizerMap")
    }
    mapped = {kind.__name__ for kind in source._RULES}
    assert mapped | source._INSTEAD.keys() >= kinds.keys()
    assert not mapped & source._INSTEAD.keys()
    for name in mapped:
        config: Any = source.Optimizer(name.lower()).get_config()
        assert config["optimizer"]["class_name"] == name
    names = {"Optimizer": source.Optimizer, "optax": optax, "sparsejax": sj}
    called = 0
    for name, instead in source._INSTEAD.items():
        if name in kinds:
            with pytest.raises(ValueError, match=f"{name} has no equal"):
                source.Optimizer(name.lower())
        if "..." in instead or not instead.startswith("Optimizer("):
            continue
        model = _functional(source.SparseModel)
        model.compile(eval(instead, names), "mse")
        model.fit(*_data(n=4), verbose=0)
        called += 1
    assert called == 3


def test_a_model_that_is_not_sparse():
    x, y = _data()
    model = _functional(keras.Model)
    model.compile(sj.nn.keras.Optimizer("adam"), "mse")
    with pytest.warns(UserWarning, match=r"Train a SparseModel in place of the keras"):
        model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 1
    sparse = sj.nn.keras.SparseModel(model.inputs, model.outputs)
    sparse.compile("adam", "mse")
    sparse.fit(x, y, verbose=0)  # a warning would be an error


def test_a_list_of_layers_is_refused():
    with pytest.raises(TypeError, match=r"a list of Embedding\. .*keras\.Sequential"):
        sj.nn.keras.SparseModel([layers.Embedding(V, D), layers.Dense(1)])


def test_explain_without_targets():
    """Compiled or not: the leaves that `explain` with targets calls sparse."""
    x, y = _data(n=4)
    model = _functional(sj.nn.keras.SparseModel)
    leaves = lambda *batch: [
        (x.name, x.sparse, x.rows_read) for x in model.explain(*batch).leaves
    ]
    found = leaves(x)
    assert ("params['items/embeddings']", True, 8) in found
    model.compile("adam", "mse")
    assert leaves(x) == leaves(x, y) == found
    model = Towers()
    assert [rows for _, sparse, rows in leaves({"item": x, "user": x}) if sparse] == [
        8,
        8,
    ]


def test_another_backend(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name="tensorflow")

    with monkeypatch.context() as m, pytest.raises(RuntimeError) as caught:
        m.setattr(sj.nn.keras.importlib, "import_module", missing)
        sj.nn.keras._import_keras()
    assert "set up for tensorflow, which is not installed" in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(RuntimeError, match="on tensorflow.*'KERAS_BACKEND'.* = 'jax'"):
        sj.nn.keras._import_keras()


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_fit_is_that_of_keras(optimizer):
    """For these, lazy is dense: losses, metrics, statistics and weights are equal."""
    x, y = _data()
    results = []
    for cls in (keras.Model, sj.nn.keras.SparseModel):
        model = _functional(cls)
        model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
        options = {"validation_data": _data(1), "sample_weight": np.linspace(0, 1, N)}
        history = model.fit(x, y, 8, epochs=3, verbose=0, **options).history
        tested = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
        numbers = [*history.values(), *tested]
        results.append((sorted(history), numbers, _weights(model)))
    assert results[0][0] == results[1][0]
    _assert_same(results[0][1], results[1][1])
    _assert_same(results[0][2], results[1][2])


@keras.saving.register_keras_serializable("sparsejax_tests")
class Towers(sj.nn.keras.SparseModel):
    """A subclass with `call`, two tables and a loss of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.items = layers.Embedding(V, D, name="items")
        self.users = layers.Embedding(V, D)
        self.drop = layers.Dropout(0.3, seed=1)
        self.head = layers.Dense(1)

    def call(self, inputs, training=False):
        x = self.items(inputs["item"]) * self.users(inputs["user"])
        x = self.drop(x, training=training)
        self.add_loss(1e-3 * keras.ops.mean(x**2))
        return self.head(x)


@pytest.mark.parametrize("how", ["jit_compile", "run_eagerly", "steps_per_execution"])
def test_a_subclass_however_it_runs(how):
    x, y = _data()
    inputs = {"item": x[:, 0], "user": x[:, 1]}
    results = []
    other = {"jit_compile": False, "run_eagerly": True, "steps_per_execution": 2}[how]
    for options in ({}, {how: other}):
        keras.utils.set_random_seed(0)
        model = Towers()
        model.compile(O.Adam(0.1), "mse", **options)
        model.fit(inputs, y, batch_size=8, epochs=1, verbose=0)
        results.append(_weights(model))
    _assert_same(*results, rtol=1e-4, atol=1e-5)


def test_tables_are_updated_in_place():
    model = _functional(sj.nn.keras.SparseModel)
    model.compile(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "mse")
    x, y = np.array([[3, 7], [7, 9], [0, 3]]), np.ones(3)
    model.train_on_batch(x, y)
    tables = [v for v in model.variables + model.optimizer.variables if V in v.shape]
    assert len(tables) == 3  # the table and its two moments
    before = model.get_layer("items").embeddings.numpy().copy()
    addresses = [v.value.unsafe_buffer_pointer() for v in tables]
    model.train_on_batch(x, y)
    assert [v.value.unsafe_buffer_pointer() for v in tables] == addresses
    assert _moved(model, before) == [0, 3, 7, 9]
    rows = {
        leaf.name: leaf.rows_read for leaf in model.explain(x, y).leaves if leaf.sparse
    }
    assert rows == {"params['items/embeddings']": 6}


def test_tables_that_are_not_sparse_or_not_trained():
    """A tied table has a dense gradient; a frozen one stays as it is."""
    x, y = np.array([[3], [7]]), np.array([[1], [2]])

    def tied(cls):
        keras.utils.set_random_seed(0)
        ids = keras.Input((1,), dtype="int32")
        embed = layers.Embedding(V, D, name="items")
        scores = keras.ops.matmul(embed(ids), keras.ops.transpose(embed.embeddings))
        return cls(ids, scores)

    results = []
    for cls in (keras.Model, sj.nn.keras.SparseModel):
        model = tied(cls)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        model.fit(x, y, epochs=2, verbose=0)
        results.append(_weights(model))
    _assert_same(*results)
    model = _functional(sj.nn.keras.SparseModel)
    model.get_layer("items").trainable = False
    before = model.get_layer("items").embeddings.numpy().copy()
    model.compile("sgd", "mse")
    model.fit(*_data(), verbose=0)
    assert _moved(model, before) == []


def test_mixed_precision():
    policy = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = _functional(sj.nn.keras.SparseModel)
        model.compile("adagrad", "mse")
        x, y = _data(n=4)
        model.fit(x, y, verbose=0)
        assert len([x for x in model.explain(x, y).leaves if x.sparse]) == 1
        keras.config.set_dtype_policy("mixed_float16")
        model = _functional(sj.nn.keras.SparseModel)
        with pytest.raises(ValueError, match="dynamic loss scale of mixed_float16"):
            model.compile("adam", "mse")
        scaled = O.Adam(1e-3, loss_scale_factor=64.0)
        model.compile(scaled, "mse", auto_scale_loss=False)
        before = model.get_layer("items").embeddings.numpy().copy()
        model.fit(x, y, verbose=0)
        assert _moved(model, before) == sorted(set(x.ravel()))
    finally:
        keras.config.set_dtype_policy(policy)


def test_a_constraint_on_a_table():
    model = _functional(
        sj.nn.keras.SparseModel, embeddings_constraint=keras.constraints.UnitNorm(1)
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="items/embeddings has a constraint, UnitNorm"):
        model.fit(*_data(n=4), verbose=0)


def test_learning_rates_of_callbacks():
    """By name, and of an optax transformation with `inject_hyperparams`."""
    x, y = _data()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / 2**epoch)
    weights = []
    for optimizer in (
        O.SGD(0.1),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.sgd(optax.exponential_decay(0.1, 3, 0.5, staircase=True)),
    ):
        model = _functional(sj.nn.keras.SparseModel)
        model.compile(optimizer, "mse")
        own = isinstance(optimizer, optax.GradientTransformation) and len(weights) == 2
        callbacks = [] if own else [schedule]
        model.fit(x, y, 8, epochs=3, verbose=0, callbacks=callbacks)
        weights.append(_weights(model))
        if not own:
            assert float(model.optimizer.learning_rate) == pytest.approx(0.025)
    _assert_same(weights[0], weights[1])
    _assert_same(weights[0], weights[2])
    with pytest.raises(ValueError, match="cannot be set"):
        model.fit(x, y, verbose=0, callbacks=[schedule])


def test_an_optimizer_for_each_table():
    """Labels are keyed by the paths of the variables."""
    x, y = _data()
    model = _functional(sj.nn.keras.SparseModel)
    labels = lambda p: {k: "frozen" if "items" in k else "dense" for k in p}
    parts: Any = {"frozen": optax.set_to_zero(), "dense": optax.adam(0.1)}
    model.compile(optax.partition(parts, labels), "mse")
    before = model.get_layer("items").embeddings.numpy().copy()
    dense = model.layers[-1].kernel.numpy().copy()
    model.fit(x, y, verbose=0)
    assert _moved(model, before) == []
    assert (model.layers[-1].kernel.numpy() != dense).any()
    with pytest.raises(TypeError, match=r"Write SparseModel\(model\.inputs"):
        sj.nn.keras.SparseModel(model)


def test_the_state_is_in_the_order_of_the_variables():
    """Not of their names, which a loaded model may have others of."""
    saved = []
    for names in (("b", "a"), ("a", "b")):
        variables = [
            keras.Variable(np.full(2, k + 1.0), name=n) for k, n in enumerate(names)
        ]
        optimizer = sj.nn.keras.Optimizer(O.Adam(0.1))
        optimizer.apply([np.full(2, 1.0), np.full(2, 2.0)], variables)
        saved.append([v.numpy() for v in optimizer.variables])
    _assert_same(*saved, rtol=0, atol=0)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", ["functional", "subclass"])
def test_save_and_load_a_model(tmp_path, kind):
    """Then train on: as the model that was not saved."""
    x, y = _data()
    if kind == "subclass":
        keras.utils.set_random_seed(0)
        model, x = Towers(), {"item": x[:, 0], "user": x[:, 1]}
        model.drop.rate = 0.0
    else:
        model = _functional(sj.nn.keras.SparseModel)
        model.layers[-2].rate = 0.0
    model.compile(
        O.Adam(O.schedules.ExponentialDecay(0.1, 3, 0.5)), "mse", metrics=["mae"]
    )
    model.fit(x, y, batch_size=8, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded: Any = keras.saving.load_model(path)
    assert isinstance(loaded, sj.nn.keras.SparseModel)
    if kind == "subclass":
        loaded.drop.rate = 0.0
    assert int(loaded.optimizer.iterations) == 3
    for each in (model, loaded):
        each.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    _assert_same(_weights(model)[:4], _weights(loaded)[:4])
    state = [[v.numpy() for v in m.optimizer.variables] for m in (model, loaded)]
    _assert_same(*state)


def test_weights_and_optax(tmp_path):
    """A transformation is not saved; its state is, and comes back."""
    x, y = _data()
    model = _functional(sj.nn.keras.SparseModel)
    model.compile(optax.adam(0.1), "mse")
    model.fit(x, y, verbose=0)
    path, weights = str(tmp_path / "model.keras"), str(tmp_path / "m.weights.h5")
    with pytest.warns(UserWarning, match="call compile with Optimizer.tx. again"):
        model.save(path)
    loaded: Any = keras.saving.load_model(path)
    assert not loaded.compiled
    loaded.compile(optax.adam(0.1), "mse")
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    assert int(loaded.optimizer.iterations) == 1
    state = [[v.numpy() for v in m.optimizer.variables] for m in (model, loaded)]
    _assert_same(*state)
    # Weights of a stock Keras model, in both directions.
    stock = _functional(keras.Model, seed=3)
    stock.compile("sgd", "mse")
    stock.save_weights(weights)
    other = sj.nn.keras.SparseModel(stock.input, stock.output)
    other.compile("sgd", "mse")
    other.load_weights(weights)
    other.fit(x, y, verbose=0)
    _assert_same(_weights(stock), _weights(other), rtol=0, atol=0)  # shared


def test_export_without_the_package_of_the_format(tmp_path, monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError("This requires the tensorflow module.")

    model = _functional(sj.nn.keras.SparseModel)
    monkeypatch.setattr(keras.Model, "export", missing)
    with pytest.raises(ImportError, match="tensorflow module") as caught:
        model.export(tmp_path / "model")
    assert "jax.export of model" in caught.value.__notes__[0]


def test_subclasses_that_are_functional():
    """`super().__init__(inputs, outputs)` in one subclass leaves the others alone."""

    class Built(sj.nn.keras.SparseModel):
        def __init__(self):
            ids = keras.Input((2,), dtype="int32")
            x = layers.Flatten()(layers.Embedding(V, D, name="items")(ids))
            super().__init__(inputs=ids, outputs=layers.Dense(1)(x))

    x, y = _data()
    for model in (Built(), Towers(), Built()):
        model.compile("adam", "mse")
        given = {"item": x[:, 0], "user": x[:, 1]} if isinstance(model, Towers) else x
        model.fit(given, y, verbose=0)
    assert Towers.__mro__[1] is sj.nn.keras.SparseModel
    sequential = keras.Sequential(
        [layers.Input((2,), dtype="int32"), layers.Embedding(V, D), layers.Flatten()]
    )
    model = sj.nn.keras.SparseModel(sequential.inputs, sequential.outputs)
    model.compile("adam", "mse")
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
    model = sj.nn.keras.SparseModel(ids, layers.Dense(1)(embedded["item"]))
    model.compile("adagrad", "mse")
    x = np.arange(24).reshape(8, 3)
    model.fit(x, np.ones(8), batch_size=8, verbose=0)
    assert [x.rows_read for x in model.explain(x, np.ones(8)).leaves if x.sparse] == [
        24
    ]
