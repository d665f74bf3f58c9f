"""Wrong calls of nn, data, store and parallel: see `error_table`.

A call stands for a message, not for each argument that could bring it about.
"""

from error_table import Section


_LAYERS = """
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
import sparsejax as sj

key = jax.random.key(0)
bags = sj.SegmentTensor.from_lists([[1, 2], [3]])
pairs = bags.map(lambda ids: {"index": ids, "value": jnp.ones(3)})
"""

_EMBEDDING = Section(
    "nn: Embedding and EmbeddingBag",
    _LAYERS
    + """
layer = sj.nn.Embedding(5, 2)
params = layer.init(key)
some = sj.SelectedRows([1], jnp.ones((1, 2)), 5)
bag = sj.nn.EmbeddingBag(5, 2)
""",
    [
        "sj.nn.Embedding(0, 2)",
        "sj.nn.Embedding(5, 2, dtype='int32')",
        "sj.nn.Embedding(5, 2, sparse_grad=None)",
        "sj.nn.Embedding(5, 2, padding_id='0')",
        "sj.nn.Embedding(5, 2, max_norm=-1.0)",
        "sj.nn.Embedding(5, 2, mode='wrap')",
        "sj.nn.EmbeddingBag(5, 2, mode='mean')",
        "sj.nn.Embedding(5, 2, embedding_init=lambda *a: jnp.ones((2, 5))).init(key)",
        "layer.init(0)",
        "layer.init(jax.random.split(key))",
        "layer(params, jnp.array([3.0]))",
        "layer(params, [[1], [2, 3]])",
        "layer(jnp.array([3, 0]), params)",
        "layer(jnp.ones((6, 2)), jnp.array([3]))",
        "layer(None, jnp.array([3]))",
        "layer({'table': jnp.ones((5, 2))}, jnp.array([3]))",
        "layer({'embedding': None}, jnp.array([3]))",
        "layer(params, pairs)",
        "sj.nn.Embedding(5, 2, mode='error')(params, jnp.array([5]))",
        "layer.attend(params, jnp.ones((3, 4)))",
        "layer.attend(some, jnp.ones(2))",
        "sj.nn.EmbeddingBag(5, 2, combiner='avg')",
        "bag(params, jnp.array([1, 2]))",
        "bag(params, jnp.array([1, 2]), jnp.array([0]), 1)",
        "bag(params, bags, weights=jnp.ones(2))",
        "bag(params, pairs, weights=jnp.ones(3))",
        "sj.nn.tables(params)",
        "sj.nn.tables(sj.nn.Embedding)",
        "sj.nn.flax.Layer(3).init(key)",
        "from flax.serialization import from_bytes, to_bytes\n"
        "sj.nn.flax\n"
        "from_bytes(bags, to_bytes(bags.map(lambda ids: jnp.ones((3, 2)))))",
        "sj.nn.equinox.Layer(sj.nn.Embedding, key=key)",
        "from flax import nnx\n"
        "module = nnx.Embed(5, 2, rngs=nnx.Rngs(0))\n"
        "sj.nn.nnx.value_and_grad(module, jnp.array([3]))",
        "from flax import nnx\n"
        "module = nnx.Embed(5, 2, rngs=nnx.Rngs(0))\n"
        "sj.nn.nnx.grad(module.attend)",
        "from flax import nnx\n"
        "module = nnx.Embed(5, 2, rngs=nnx.Rngs(0))\n"
        "loss = lambda module: jnp.sum(module(jnp.array([3])))\n"
        "sj.nn.nnx.grad(loss, has_aux=True)(module)",
        "sj.nn.Linear",
    ],
)

_DENSE = Section(
    "nn: Dense",
    _LAYERS
    + """
layer = sj.nn.Dense(1, 4)
params = layer.init(key)
some = sj.SelectedRows([1], jnp.ones((1, 1)), 4)
""",
    [
        "sj.nn.Dense(1, 4, use_bias=1)",
        "sj.nn.Dense(1, 4, sparse_grad='yes')",
        "sj.nn.Dense(1, 4, mode='skip')",
        "layer.row_ids(jnp.ones((2, 4)))",
        "sj.nn.Dense(1).row_ids(bags)",
        "sj.nn.Dense(1).init(key)",
        "sj.nn.Dense(1).init(key, bags)",
        "sj.nn.Dense(1).init(key, 3.0)",
        "layer(params, None)",
        "layer(params, jnp.ones((2, 4), bool))",
        "layer(params, jnp.ones((2, 3)))",
        "layer(params, sp.csr_matrix(np.ones((2, 6))))",
        "layer(params, sp.csc_matrix(np.ones((2, 4))))",
        "layer(jnp.ones((2, 4)), params)",
        "layer({'kernel': params['kernel']}, jnp.ones((2, 4)))",
        "layer({**params, 'kernel': jnp.ones(4)}, jnp.ones((2, 4)))",
        "layer({**params, 'kernel': some}, jnp.ones((2, 4)))",
    ],
)

_COLLECTION = Section(
    "nn: EmbeddingCollection",
    _LAYERS
    + """
Collection = sj.nn.EmbeddingCollection
layer = Collection({"a": (5, 2), "b": (7, 2)})
most = Collection({"a": sj.nn.EmbeddingBag(5, 2, combiner="max")})
params = layer.init(key)
ids = {"a": jnp.array([4]), "b": jnp.array([[0, 6]])}
""",
    [
        "Collection({})",
        "Collection({'a': sj.nn.SparseEmbedding(5, 2)})",
        "Collection({'a': (0, 2)})",
        "Collection({'a': (5, 2)}, {'x': 'b'})",
        "Collection({'a': (5, 2)}, {'x': ('a', 'avg')})",
        "Collection({'a': (5, 2), 'b': (7, 2)}, {'x': 'a'})",
        "layer(params, {'c': jnp.array([1])})",
        "layer(params, {'a': jnp.array([1.0])})",
        "layer(params, {'a': bags.map(lambda ids: {'word': ids})})",
        "layer(params, {'a': bags.map(lambda ids: ids[:, None])})",
        "layer(params, ids, {'b': jnp.ones(3)})",
        "layer(params, ids, {'b': jnp.ones((1, 2), bool)})",
        "layer(params, {'a': jnp.array([4])}, {'b': jnp.ones(1)})",
        "layer(params, {'a': pairs}, {'a': jnp.ones(3)})",
        "most(most.init(key), {'a': bags}, {'a': jnp.ones(3)})",
        "layer({'a': jnp.ones((5, 2))}, ids)",
        "layer({'stack_width2_float32': jnp.ones((5, 2))}, ids)",
        "layer.set_table(params, 'a', jnp.ones((7, 2)))",
        "layer.stack({'a': jnp.ones((5, 2))})",
    ],
)

_MODELS_ONCE = """
import dataclasses

import jax
import jax.numpy as jnp
import optax
import scipy.sparse as sp
import sparsejax as sj

tx = optax.sgd(0.1)
"""

_MODELS = """\
store = sj.store.KVStore()
item = sj.nn.SparseEmbedding(5, 2, name="item")
checked = sj.nn.SparseEmbedding(5, 2, name="item", mode="error")
linear = sj.nn.SparseLinear(1, 4, name="w")
loss = lambda rows, batch: jnp.sum(rows**2)
Trainer = sj.nn.Trainer
"""

_BLOCKS = Section(
    "nn: blocks",
    _MODELS
    + """
@dataclasses.dataclass(frozen=True)
class Model(sj.nn.SparseBlock):
    user: sj.nn.SparseBlock = sj.nn.SparseEmbedding(9, 2, name="id")
    item: sj.nn.SparseBlock = sj.nn.SparseEmbedding(5, 2, name="id")

    def row_ids(self, batch):
        return self.user.row_ids(batch)

    def sparse_forward(self, tables, params, batch):
        return jnp.tanh(tables["id"])

class Plain(Model):
    def __init__(self):
        self.other = item

rows = sj.SelectedRows([1], jnp.ones((1, 2)), 9)
""",
    [
        "sj.nn.SparseEmbedding(5, 2, name=3)",
        "sj.nn.SparseEmbedding(5, 2, padding_id='0')",
        "sj.nn.SparseLinear(1)",
        "item.row_ids(jnp.array([1.0]))",
        "linear.row_ids(jnp.ones((2, 4)))",
        "linear.row_ids(sp.csr_matrix((2, 6)))",
        "item(jnp.ones((5, 2)), {}, jnp.array([1]))",
        "item({}, {}, jnp.array([1]))",
        "item.init(0)",
        "Model().tables()",
        "Plain().tables()",
        "Model()({'id': rows}, {}, jnp.array([1]))",
        "sj.nn.merge_row_ids({'a': [1]}, None)",
        "sj.nn.merge_row_ids({'a': [1.5]})",
    ],
    _MODELS_ONCE,
)

_TRAINER = Section(
    "nn: Trainer",
    _MODELS
    + """
class Named(sj.nn.SparseBlock):
    def row_ids(self, batch):
        return batch

    def sparse_forward(self, tables, params, batch):
        return tables["item"]
""",
    [
        "import copy\ncopy.copy(Trainer(item, store, loss, tx))",
        "Trainer(sj.nn.SparseEmbedding, store, loss, tx)",
        "Trainer(sj.nn.Embedding(5, 2), store, loss, tx)",
        "Trainer(item, sj.store.KVStore, loss, tx)",
        "Trainer(item, None, loss, tx)",
        "Trainer(item, store, tx, loss)",
        "Trainer(item, store, loss, 0.1)",
        "Trainer(item, store, loss, tx, table_tx='sgd')",
        "Trainer(item, store, loss, tx, table_tx={})",
        "Trainer(item, store, loss, tx, table_tx={'user': tx})",
        "Trainer(item, store, loss, tx, key=0.5)",
        "Trainer(item, store, loss, tx, clip_norm=-1.0)",
        "Trainer(item, store, loss, tx, mode='fill')",
        "Trainer(item, store, loss, tx, capacity={'itm': 4})",
        "Trainer(item, store, loss, tx, capacity={'item': 4.0})",
        "Trainer(item, store, loss, tx, params={'w': 'ones'})",
        "store.init('item', (9, 2), tx)\nTrainer(item, store, loss, tx)",
        "store.init('item', (5, 2), tx, dtype=jnp.bfloat16)\n"
        "Trainer(item, store, loss, tx)",
        "store.init('item', (5, 2), None)\nTrainer(item, store, loss, tx)",
        "store.init('item', (5, 2), tx)\n"
        "params = {'w': store.pull('item', [1])}\n"
        "Trainer(item, store, loss, tx, params=params)",
        "Trainer(item, store, loss, tx).step(jnp.array([1.0]))",
        "Trainer(item, store, loss, tx).step(jnp.array([1, 5]))",
        "Trainer(item, store, loss, tx).step(jnp.array([1, -1]))",
        "Trainer(item, store, loss, tx, capacity=1).step(jnp.array([1, 2]))",
        "Trainer(item, store, lambda rows, batch: rows, tx).step(jnp.array([1]))",
        "Trainer(checked, store, loss, tx).step(jnp.array([1]))",
        "trainer = Trainer(checked, store, loss, tx, checked=True, mode='drop')\n"
        "trainer.step(jnp.array([7]))",
        "Trainer(Named(), store, loss, tx).step(jnp.array([1]))",
        "Trainer(Named(), store, loss, tx).step({'item': jnp.array([1])})",
        "store.init('user', (5, 2), tx)\n"
        "Trainer(Named(), store, loss, tx).step({'user': jnp.array([1])})",
    ],
    _MODELS_ONCE,
)

_DATA = """
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
import sparsejax as sj

def write(text):
    pathlib.Path("file.txt").write_text(text)
    return "file.txt"
"""

_DATASETS = Section(
    "data: data sets",
    _DATA
    + """
Dataset = sj.data.ArrayDataset
dataset = Dataset([[1, 2], [3], [4, 5, 6], []], np.arange(4.0))
""",
    [
        "Dataset()",
        "Dataset([[1], [2]], {'y': [0, 1]})",
        "Dataset({'x': [1, 2], 'y': [1]})",
        "Dataset(['red', 'blue'])",
        "Dataset(3)",
        "Dataset(np.float32(3))",
        "Dataset(np.ma.zeros(2))",
        "Dataset(np.array([2**40]))",
        "Dataset(sp.coo_matrix(np.eye(2)))",
        "Dataset([1, [2, 3]])",
        "Dataset([[1, 2], 3])",
        "dataset['x']",
        "dataset[4]",
        "sj.data.SimpleDataset(iter([1, 2]))",
        "sj.data.SimpleDataset({'x': [1]})",
        "sj.data.SimpleDataset((np.ones(2), np.ones(2)))",
    ],
)

_LOADER = Section(
    "data: DataLoader",
    _DATA
    + """
import scipy.sparse

Dataset, Loader = sj.data.ArrayDataset, sj.data.DataLoader
ragged = Dataset([[1, 2], [3], [4, 5, 6], []])
both = Dataset([[1, 2], [3], [4, 5, 6], []], np.arange(4.0))
""",
    [
        "Loader(3, 2)",
        "Loader(scipy.sparse.eye(3).tocsr(), 2)",
        "Loader([], 2)",
        "Loader([(1, 2), (3,)], 2)",
        "Loader([{'a': 1}, {'b': 2}], 2)",
        "Loader(both, 0)",
        "Loader(both, 5, drop_remainder=True)",
        "Loader(both, 2, seed=-1)",
        "Loader(Dataset({'x': [1, 2], 'mask': [0, 1]}), 2, mask=True)",
        "Loader(both, 2, shard=(8, 8))",
        "Loader(both, 2, overflow='drop')",
        "Loader(ragged, 2, capacity=2)",
        "Loader(ragged, 2, capacity='max')",
        "Loader(both, 2, capacity=(4, None, 4))",
        "Loader(both, 2, capacity=(4, 4))",
        "Loader(ragged, 2, capacity=(4, 4, 4))",
        "Loader(both, 2).set_state({'epoch': 1})",
        "Loader(both, 4).set_state(Loader(both, 2).get_state())",
        "state = Loader(both, 2).get_state()\n"
        "Loader(both, 2).set_state({**state, 'batch': 7})",
    ],
)

_WORDS = Section(
    "data: ids of words",
    _DATA
    + """
Vocabulary, HashIds = sj.data.Vocabulary, sj.data.HashIds
columns = {"user": [7, 8, 7], "item": ["tea", "jam", "tea"]}
known = Vocabulary.build(columns)
""",
    [
        "Vocabulary.build('ratings.csv')",
        "Vocabulary.build(['tea', 'jam'])",
        "Vocabulary.build({})",
        "Vocabulary.build([])",
        "Vocabulary.build({0: ['tea']})",
        "Vocabulary.build(columns, ['film'])",
        "Vocabulary.build({'item': 'tea'})",
        "Vocabulary.build({'price': [0.5]})",
        "Vocabulary.build({'day': np.array(['2026-11-27'], 'M8[D]')})",
        "Vocabulary.build({'items': [[['tea', 'jam']], [['tea']]]})",
        "Vocabulary.build({'item': ['tea' * 1000]})",
        "Vocabulary.build({'item': ['tea\\0']})",
        "Vocabulary.build(columns, shared=['user', 'item'])",
        "Vocabulary.build(columns, shared=[['user', 'film']])",
        "Vocabulary.build(columns, min_count=0)",
        "Vocabulary.build(columns, max_size={'film': 9})",
        "limits = {'user': 2, 'item': 3}\n"
        "Vocabulary.build(columns, shared=True, min_count=limits)",
        "known.ids({'film': ['tea']})",
        "known.ids([columns, {'item': ['tea']}])",
        "known.encode('film', ['tea'])",
        "known.encode(2, ['tea'])",
        "known.encode('item', [['tea', 'jam']])",
        "known.decode('user', [0, 1])",
        "known.decode('user', [1], missing='?')",
        "known.decode('item', [3])",
        "known.decode('item', [0.5])",
        "known.words('user')",
        "known.align(['tea'], [[1.0]])",
        "known.align(['tea'], [1.0], column='item')",
        "known.align(['tea'], [[1.0]], column='item', table=np.zeros((2, 1)))",
        "Vocabulary.load(write('red'))",
        "words = np.array([b'red', b'blue'])\n"
        "names = np.array(['colour'])\n"
        "arrays = {'words 0': words, 'ids 0': np.array([1, 2]), 'names': names}\n"
        "np.savez('v.npz', **arrays)\n"
        "Vocabulary.load('v.npz')",
        "np.savez_compressed('v.npz', names=np.zeros(3 * 10**7, 'U1'))\n"
        "Vocabulary.load('v.npz')",
        "HashIds(1)",
        "HashIds(9, names='ad')",
        "HashIds(9, names=['ad', 'ad'])",
        "HashIds([9, 9], names=['ad'])",
        "HashIds(9).ids(columns)",
        "HashIds([9, 9]).encode(2, ['red'])",
    ],
)

_NEGATIVES = Section(
    "losses: NegativeSampler",
    """
import jax
import jax.numpy as jnp
import sparsejax as sj
from sparsejax.losses import NegativeSampler

key = jax.random.key(0)
sampler = NegativeSampler.uniform(5)
""",
    [
        "NegativeSampler.uniform(0)",
        "NegativeSampler.log_uniform(2.5)",
        "NegativeSampler(100, 'zipf')",
        "NegativeSampler.uniform(2**40)",
        "NegativeSampler.from_counts([])",
        "NegativeSampler.from_counts(['tea', 'jam'])",
        "NegativeSampler.from_counts([3, -1])",
        "NegativeSampler.from_counts([0, 0])",
        "NegativeSampler.from_counts([1, 2], power=-1)",
        "jax.jit(NegativeSampler.from_counts)(jnp.ones(3))",
        "sampler.sample(0, 3)",
        "sampler.sample(key, 0)",
        "sampler.sample(key, ())",
        "sampler.sample(key, 6, unique=True)",
        "sampler.sample(key, 3, unique=1)",
        "sampler.sample(key, (2, 3), labels=jnp.array([1, 2, 3]))",
        "sampler.sample(key, 3, labels=jnp.array([1.0]))",
        "sampler.sample(key, (2, 3), exclude=jnp.array([[1], [2], [3]]))",
    ],
)

_STORE_ONCE = """
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sparsejax as sj

tx = optax.sgd(0.1)
"""

_STORE = """\
store, new = sj.store.KVStore(), sj.store.KVStore()
store.init("item", (5, 2), tx)
rows = store.pull("item", [1, 3])
"""

_TABLES = Section(
    "store: tables are made",
    _STORE
    + """
ones = jax.nn.initializers.ones
array = np.ones((5, 2), np.float32)
""",
    [
        "store.init('item', (5, 2), tx)",
        "averaged = optax.chain(optax.sgd(0.1), sj.optim.ema(0.9))\n"
        "new.init('t', (5, 2), averaged)",
        "new.init(3, (5, 2), tx)",
        "sj.store.KVStore('x')",
        "import pickle\npickle.dumps(store)",
        "new.init('t', 5, tx)",
        "new.init('t', (5.0, 2), tx)",
        "new.init('t', (), tx)",
        "new.init('t', (2**40, 2), tx)",
        "new.init('t', (5, 2), 'adam')",
        "new.init('t', (5, 2), sj.optim.exact(optax.sgd(0.1)))",
        "capacity = {'t': 8, 'w': None}\n"
        "tx = sj.optim.accumulate(sj.optim.lazy(tx), 2, capacity)\n"
        "new.init('t', (5, 2), tx)",
        "new.init('t', (5, 2), tx, dtype='flot')",
        "new.init('t', (5, 2), tx, dtype=jnp.int32)",
        "new.init('t', (5, 2), tx, dtype=np.float64)",
        "new.init('t', array, tx, dtype=np.float16)",
        "new.init('t', array, tx, initializer=ones)",
        "new.init('t', (5, 2), tx, initializer='normal')",
        "new.init('t', (5, 2), tx, initializer=lambda key: key)",
        "new.init('t', (5, 2), tx, initializer=lambda *args: jnp.ones(5))",
        "new.init('t', (5, 2), tx, initializer=lambda k, shape, d: np.ones(shape))",
        "new.init('t', (5, 2), tx, key=0.5)",
        "new.init('t', (5, 2), tx, path=3)",
        "jax.jit(lambda: new.init('t', (5, 2), tx))()",
    ],
    _STORE_ONCE,
)

_PULLS = Section(
    "store: pull, push, prefetch",
    _STORE,
    [
        "store.pull('user', [1])",
        "store.pull('item', [1.0])",
        "store.pull('item', [1, 5])",
        "store.pull('item', [1], mode='fill')",
        "store.pull('item', [1, 2, 3], capacity=2)",
        "store.pull('item', [1], capacity=-1)",
        "jax.jit(lambda ids: store.pull('item', ids))(jnp.array([1]))",
        "store.push('item', jnp.ones((5, 2)))",
        "store.push('item', [])",
        "leaves = [0.1 * rows.rows, 0.1 * rows.values]\n"
        "store.push('item', jax.tree.unflatten(jax.tree.structure(rows), leaves))",
        "store.push('item', rows.map(lambda x: x.astype(complex)))",
        "store.push('item', sj.SelectedRows([1], jnp.ones((1, 3)), 5))",
        "new.init('t', (5, 2), None)\nnew.push('t', rows)",
        "store.assign('item', np.ones((5, 3)))",
        "store.assign('item', sj.SelectedRows([1, 1], jnp.ones((2, 2)), 5))",
        "store.pull_all('item', progress=3)",
        "store.prefetch([[1]], 3)",
        "store.prefetch([[1]], np.array, depth=-1)",
        "store.init('user', (9, 2), tx)\nnext(store.prefetch([[1]], np.array))",
        "next(store.prefetch([[7]], np.array))",
        "store.close()\nstore.pull('item', [1])",
    ],
    _STORE_ONCE,
)

_STORED = Section(
    "store: functions of trees with its tables",
    _STORE
    + """
params = {"item": store["item"], "w": jnp.ones(2)}
ids = jnp.array([1, 3])
store.init("next", np.arange(5, dtype=np.int32), None, dtype=np.int32)

def loss(params, ids):
    return jnp.sum(params["item"][ids] * params["w"])

def hop(params, ids):
    ids = params["next"][ids]
    return jnp.sum(params["item"][ids])

step = store.train_step(loss, tx)
state = tx.init(params)
""",
    [
        "store['user']",
        "store['item'][ids]",
        "import pickle\npickle.dumps(store['item'])",
        "store.value_and_grad(loss)({'item': jnp.ones((5, 2)), 'w': jnp.ones(2)}, ids)",
        "new.init('item', (5, 2), tx)\nnew.value_and_grad(loss)(params, ids)",
        "jax.jit(store.value_and_grad(loss))(params, ids)",
        "store.value_and_grad(lambda p, x: loss(p, ids))(params, [bytearray()])",
        "store.value_and_grad(loss, capacity={'user': 3})",
        "store.value_and_grad(loss, capacity=1)(params, ids)",
        "store.value_and_grad(hop)(params | {'next': store['next']}, ids)",
        "store.forward(lambda p: jnp.mean(p['item']))(params)",
        "cache = sj.store.CachedTable(store, 'item', 2)\n"
        "store.value_and_grad(loss)(params | {'item': cache.table}, ids)",
        "cache = sj.store.CachedTable(store, 'item', 2)\ncache.table[ids]",
        "step = store.train_step(lambda p: loss(p, ids), 'adam')",
        "step(params, state, ids, {'user': rows})",
        "step(params, state, ids, 3)",
        "import pickle\npickle.dumps(step)",
        "by_w = lambda p, ids: loss(p, ids + p['w'][0].astype(int))\n"
        "next(store.train_step(by_w, tx).prefetch(params, [ids]))",
        "step.prefetch(params, [ids], depth=-1)",
    ],
    _STORE_ONCE,
)

_KEYS = Section(
    "store: keys",
    _STORE
    + """
keys = sj.store.KeyPolicy()
new.init('user', (2, 2), tx, keys=keys)
""",
    [
        "sj.store.KeyPolicy('fifo')",
        "sj.store.KeyPolicy(admit_after=0)",
        "sj.store.KeyPolicy(max_evictions=-1)",
        "sj.store.KeyPolicy(window=0)",
        "store.init('t', (5, 2), tx, keys='lru')",
        "store.init('t', np.ones((5, 2), np.float32), tx, keys=keys)",
        "store.insert('item', np.array([7]), 0)",
        "store.insert('user', np.array([7]), 0)",
        "new.insert('user', jnp.array([7]), 0)",
        "new.insert('user', np.array([0.5]), 0)",
        "new.insert('user', ['a', 3], 0)",
        "new.find('user', ['a', ['b', 'c']])",
        "new.insert('user', np.array([7]), -1)",
        "new.insert('user', np.array([7]), 2**63)",
        "new.insert('user', np.array([7]), 0, where=[1])",
        "steps = iter([0, 5])\n"
        "ids_of = lambda step: new.insert('user', np.array([7]), step)[0]\n"
        "list(new.prefetch(steps, ids_of))",
        "cache = sj.store.CachedTable(new, 'user', 2)\n"
        "new.insert('user', np.array([7, 8]), 0)\n"
        "new.insert('user', np.array([9]), 1)",
        "store.save('saved')\n"
        "store = sj.store.KVStore()\n"
        "store.init('item', (5, 2), tx, keys=keys)\n"
        "store.load('saved')",
    ],
    _STORE_ONCE,
)

_CACHED = Section(
    "store: CachedTable",
    _STORE
    + """
cache = sj.store.CachedTable(store, "item", 2)
lifted = sj.optim.lazy(tx)
params = {"item": cache.table}
state = lifted.init(params)
loss = lambda params, ids: params["item"][ids].sum()
step = store.train_step(loss, lifted)
ids = jnp.array([1])

def trained(path):
    new.init("t", (5, 2), tx, path=path)
    small = sj.store.CachedTable(new, "t", 1)
    table, state = small.table, lifted.init(small.table)
    step = new.train_step(lambda table, ids: table[ids].sum(), lifted)
    for k in range(4):
        table, state, _ = step(table, state, jnp.array([k]))
    new.close()
""",
    [
        "sj.store.CachedTable('item', store, 2)",
        "import copy\ncopy.deepcopy(cache)",
        "sj.store.CachedTable(store, 'user', 2)",
        "new.init('item', (5, 2), None)\nsj.store.CachedTable(new, 'item', 2)",
        "sj.store.CachedTable(store, 'item', 2.5)",
        "sj.store.CachedTable(store, 'item', 6)",
        "sj.store.CachedTable(store, 'item', 2)",
        "step = store.train_step(lambda p, ids: loss(p[0], ids), lifted)\n"
        "step([params, params], lifted.init([params, params]), ids)",
        "adam = sj.optim.lazy(optax.adam(0.1))\n"
        "store.train_step(loss, adam)(params, adam.init(params), ids)",
        "step(params, state, jnp.array([1, 2, 3]))",
        "step(params, state, ids)\nstep(params, state, ids)",
        "mesh = jax.sharding.Mesh(jax.devices()[:2], 'x')\n"
        "spec = jax.sharding.PartitionSpec('x')\n"
        "there = jax.sharding.NamedSharding(mesh, spec)\n"
        "step(jax.device_put(params, there), state, ids)",
        "cache.flush(params, state, step=-1)",
        "cache.close(discard=1)",
        "step(params, state, ids)\ncache.close()",
        "cache.close()\nstep(params, state, ids)",
        "step(params, state, ids)\nstore.pull('item', [1])",
        "store.push('item', rows)",
        "trained('t')\n"
        "pathlib.Path('t.journal').unlink()\n"
        "store.init('t', (5, 2), tx, path='t')",
        "trained('t')\n"
        "data = pathlib.Path('t.journal').read_bytes()\n"
        "pathlib.Path('t.journal').write_bytes(data[:-9] + b'too long, or not')\n"
        "store.init('t', (5, 2), tx, path='t')",
        "trained('t')\n"
        "data = pathlib.Path('t.journal').read_bytes()\n"
        "from sparsejax.store import _format\n"
        "with open('t.journal', 'wb') as file:\n"
        "    _format.write_header(file, b'sparsejax journal 1\\n', {'id': ''})\n"
        "store.init('t', (5, 2), tx, path='t')",
    ],
    _STORE_ONCE,
)

_CHANGES = Section(
    "store: changes",
    _STORE
    + """
import io
import json
import zipfile

keys = sj.store.KeyPolicy()
store.push("item", rows)

def keyed():
    made = sj.store.KVStore()
    made.init("user", (4, 2), tx, keys=keys)
    return made

def exported(made, since=0, change=lambda header: None, rows=None):
    # A file of changes, with another header, or with other rows.
    made.export_changes("c", since=since)
    with zipfile.ZipFile("c") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
    if rows is not None:
        file = io.BytesIO()
        np.save(file, np.array(rows))
        members["0.rows.npy"] = file.getvalue()
    with zipfile.ZipFile("c", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
""",
    [
        "store.changed_since(-1)",
        "store.changed_since(2)",
        "new.init('t', (5, 2), tx, path='t')\n"
        "new.close()\n"
        "store.init('t', (5, 2), tx, path='t')\n"
        "store.changed_since(0)",
        "store.export_changes('c', since=1.5)",
        "store.export_changes('c', since=0, state=1)",
        "store.export_changes('.', since=0)",
        "new.init('t', (5, 2), tx, path='t')\nnew.export_changes('t', since=0)",
        "store.apply_changes(3)",
        "exported(store)\nnew.init('item', (5, 2), tx)\nnew.load('c')",
        "exported(store)\nnew.apply_changes('c')",
        "exported(store)\nnew.init('item', (9, 2), tx)\nnew.apply_changes('c')",
        "store.push('item', rows)\n"
        "exported(store, since=1)\n"
        "new.init('item', (5, 2), tx)\n"
        "new.apply_changes('c')",
        "store.push('item', rows)\n"
        "exported(store, since=1)\n"
        "new.init('item', (5, 2), tx)\n"
        "new.push('item', rows)\n"
        "new.apply_changes('c')",
        "exported(store, change=lambda header: "
        "header['tables']['item'].update(rows=1))\n"
        "new.init('item', (5, 2), tx)\n"
        "new.apply_changes('c')",
        "exported(store, rows=[3, 1])\n"
        "new.init('item', (5, 2), tx)\n"
        "new.apply_changes('c')",
        "exported(store, change=lambda header: header.update(version=2**62))\n"
        "new.init('item', (5, 2), tx)\n"
        "new.apply_changes('c')",
        "cache = sj.store.CachedTable(store, 'item', 2)\n"
        "exported(store)\n"
        "store.apply_changes('c')",
        "exported(keyed(), change=lambda header: "
        "header['tables']['user'].update(keyed=False))\n"
        "keyed().apply_changes('c')",
    ],
    _STORE_ONCE,
)

_FILES = Section(
    "store: files",
    _STORE
    + """
def change(path, at, size=None):
    data = bytearray(pathlib.Path(path).read_bytes())
    data[at] ^= 1
    pathlib.Path(path).write_bytes(data[:size])
""",
    [
        "store.save('.')",
        "store.load(3)",
        "store.pull({'item': [1]}, [1])",
        "store.pull({'item': [1], 'user': [1]})",
        "store.pull({'item': [1]}, capacity={'user': 1})",
        "store.pull('item')",
        "store.save('s', {'f': jnp.sin})",
        "store.save('s', {'step': 1})\nnew.init('item', (5, 2), tx)\n"
        "new.load('s', {'epoch': 1})",
        "store.save('s', {'w': jnp.ones(3)})\nstore.load('s', {'w': jnp.ones(2)})",
        "open('empty', 'w').close()\nstore.load('empty')",
        "store.save('s')\nnew.load('s')",
        "store.save('s')\nnew.init('item', (9, 2), tx)\nnew.load('s')",
        "store.save('s')\nnew.init('item', (5, 2), optax.adam(0.1))\nnew.load('s')",
        "store.save('s')\nchange('s', 0, 40)\nstore.load('s')",
        "store.save('s')\nchange('s', -1, 40)\nstore.load('s')",
        "store.save('s')\nchange('s', -1, -5)\nstore.load('s')",
        "store.save('s')\nchange('s', 60)\nstore.load('s')",
        "store.save('s')\nchange('s', -9)\nstore.load('s')",
        "new.init('t', (5, 2), tx, path='t')\nstore.init('t', (5, 2), tx, path='t')",
        "new.init('t', (5, 2), tx, path='t')\nnew.save('t')",
        "new.init('t', (5, 2), tx, path='t')\n"
        "new.close()\n"
        "store.init('t', (9, 2), tx, path='t')",
        "open('t', 'w').close()\n"
        "new.init('t', np.ones((5, 2), np.float32), tx, path='t')",
        "new.init('t', (5, 2), tx, path='t')\npathlib.Path('t').unlink()\nnew.flush()",
        "import dataclasses\n"
        "table = store.engine.tables['item']\n"
        "key = {'impl': 'threefry2x32', 'data': [0]}\n"
        "table.spec = dataclasses.replace(table.spec, key=key)\n"
        "store.save('s')\n"
        "store.load('s')",
        "new.init('t', (5, 2), tx, path='t')\n"
        "header = new.engine.tables['t'].description()\n"
        "new.engine.tables['t'].memory._start = 16\n"
        "new.engine.tables['t'].memory.describe(header)\n"
        "new.close()\n"
        "store.init('t', (5, 2), tx, path='t')",
        "new.init('t', (5, 2), tx, path='t')\n"
        "new.close()\n"
        "change('t', -1, -1)\n"
        "store.init('t', (5, 2), tx, path='t')",
    ],
    _STORE_ONCE,
)

_MESH = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sparsejax as sj

auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((8,), ("x",), axis_types=(auto,))
"""

_SHARDED = Section(
    "parallel: tables over devices",
    _MESH
    + """
shard_rows = sj.parallel.shard_rows
by_table = sj.parallel.TableWise
array = jnp.ones((20, 2))
table = shard_rows(array, mesh, "x")
ids = jnp.arange(8)
bags = sj.SegmentTensor.from_lists([[1, 2], [3]])

def inside(f, *args):
    specs = jax.sharding.PartitionSpec()
    run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)
    return run(*args)
""",
    [
        "import pickle\npickle.dumps(table)",
        "from flax.serialization import to_bytes\nsj.nn.flax\nto_bytes(table)",
        "jax.export.export(jax.jit(lambda t: t[ids]))(table).serialize()",
        "shard_rows(jnp.array(1.0), mesh, 'x')",
        "shard_rows(array, mesh, 'y')",
        "shard_rows(array, mesh, 'x', layout='cyclic')",
        "shard_rows(array, mesh, 'x', layout=by_table((7, 8), (0, 1), 8))",
        "shard_rows(array, mesh, 'x', layout=by_table((20,), (0,), 2))",
        "shard_rows(jax.ShapeDtypeStruct((10**9 + 9, 2), jnp.float32), mesh, 'x', "
        "layout=by_table((10**9, 9), (0, 1), 8))",
        "by_table((), (), 8)",
        "by_table((7, 13), (0,), 8)",
        "by_table((7, 13), (0, 8), 8)",
        "by_table((7, -13), (0, 1), 8)",
        "by_table((7, 13), (0, 1), 0)",
        "sj.parallel.top_k(shard_rows(array, mesh, 'x', "
        "layout=by_table((7, 13), (0, 1), 8)), jnp.ones(2), 3)",
        "shard_rows(array, mesh, 'x', height=20)",
        "shard_rows(lambda ids: jnp.ones((len(ids), 2)), mesh, 'x')",
        "shard_rows(lambda ids: jnp.ones(2), mesh, 'x', height=20)",
        "shard_rows(array, mesh.abstract_mesh, 'x')",
        "inside(lambda x: shard_rows(x, jax.sharding.get_abstract_mesh(), 'x'), array)",
        "sj.parallel.shard_columns(jnp.ones(8), mesh, 'x')",
        "sj.parallel.shard_columns(jnp.ones((20, 6)), mesh, 'x')",
        "sj.parallel.shard_columns(jnp.ones((8, 8)), mesh, 'y')",
        "jnp.asarray(table)",
        "np.asarray(table)",
        "jnp.take(table, 1, axis=0)",
        "sj.grad(lambda t: jnp.sum(jnp.asarray(t)))(table)",
        "sj.parallel.forward(lambda t: jnp.asarray(t))(table)",
        "sj.parallel.forward(lambda t: jax.lax.while_loop(lambda x: x < 1, "
        "lambda x: x + jnp.take(t, 3, axis=0).sum(), 0.0))(table)",
        "table + array",
        "table / table",
        "1 / table",
        "table + shard_rows(jnp.ones((9, 2)), mesh, 'x')",
        "shard_rows(array, mesh, 'x', layout=3)",
        "shard_rows(array, mesh, 'x', capacity=0)",
        "shard_rows(array, mesh, 'x', capacity='auto')",
        "shard_rows(array, mesh, 'x', wire_dtype=jnp.float16)",
        "shard_rows(array, mesh, 'x', wire_dtype=jnp.int8)",
        "shard_rows(jnp.ones((20, 2), int), mesh, 'x', wire_dtype=jnp.bfloat16)",
        "shard_rows(lambda ids: np.ones((len(ids), 2), np.float16), mesh, 'x', "
        "height=20, wire_dtype=jnp.bfloat16)",
        "sj.lookup(table, bags)",
        "sj.lookup(table, jnp.array([1, 20]), mode='error')",
        "inside(lambda ids: sj.lookup(table, ids), ids)",
        "sj.embedding_bag(table, ids)",
        "sj.parallel.exchange_metrics(array, ids)",
        "sj.parallel.exchange_metrics(table, jnp.ones(8))",
        "inside(lambda ids: sj.parallel.exchange_metrics(table, ids), ids)",
        "sj.parallel.measure_capacity(table, [])",
        "sj.parallel.measure_capacity(table, ids, margin=0)",
        "jax.jit(lambda ids: sj.parallel.measure_capacity(table, ids))(ids)",
    ],
)

_GRADIENTS = Section(
    "parallel: gradients and steps",
    _MESH
    + """
def grad_of(height):
    table = sj.parallel.shard_rows(jnp.ones((height, 2)), mesh, "x")
    loss = lambda t: jnp.sum(sj.lookup(t, jnp.arange(8)))
    return sj.grad(loss)(table).values

def inside(f, *args):
    specs = jax.sharding.PartitionSpec()
    run = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)
    return run(*args)

data_parallel, psum = sj.parallel.data_parallel, sj.parallel.psum
rows = sj.SelectedRows([1], jnp.ones((1, 2)), 5)
params, batch = {"w": jnp.ones(2)}, jnp.ones((8, 2))
step = lambda params, state, batch: (params, state)
""",
    [
        "grad_of(80).coalesce(4)",
        "jnp.ones((20, 2)) + grad_of(80)",
        "grad_of(80) + grad_of(80).coalesce()",
        "grad_of(80) + grad_of(90)",
        "psum(rows, 'x')",
        "inside(lambda x: psum(x, 'x', capacity=0), rows)",
        "inside(lambda x: psum(x, 'x'), grad_of(80))",
        "sj.parallel.pmean(rows, 'x', capacity=-1)",
        "data_parallel(step, mesh, 'y')",
        "data_parallel(step, mesh, 'x')(params, (), jnp.ones((7, 2)))",
        "data_parallel(step, mesh, 'x')(params, (), [jnp.ones(3), jnp.ones(10)])",
        "bad = lambda params, state, batch: (params,)\n"
        "data_parallel(bad, mesh, 'x')(params, (), batch)",
        "bad = lambda params, state, batch: params\n"
        "data_parallel(bad, mesh, 'x')(params, (), batch)",
    ],
)

_CHECKPOINTS = Section(
    "parallel: save and restore",
    _MESH
    + """
import pathlib
import orbax.checkpoint as ocp

save, restore = sj.parallel.save, sj.parallel.restore
manager = ocp.CheckpointManager(pathlib.Path("saved").absolute())
tree = {"w": jnp.ones((4, 2))}
spec = jax.ShapeDtypeStruct((20, 2), jnp.float32)
abstract = sj.parallel.shard_rows(spec, mesh.abstract_mesh, "x")
""",
    [
        "save('one', tree, step=1)",
        "save(manager, tree)",
        "save(manager, tree, step=2)\nsave(manager, tree, step=1)",
        "save('one', {'name': 'model'})",
        "save('one', {'w': spec})",
        "save('one', {'w': abstract})",
        "restore('one', {'w': abstract})",
        "restore(manager, tree)",
        "restore('one', tree)",
        "save('one', {'w': jnp.zeros((4, 2))})\n"
        "save('two', tree)\n"
        "name = '_CHECKPOINT_METADATA'\n"
        "pathlib.Path('one', name).replace(pathlib.Path('two', name))\n"
        "restore('two', tree)",
        "save('one', tree)\nrestore('one', {'w': jnp.ones((4, 3))})",
        "save('one', tree)\nrestore('one', {'v': jnp.ones((4, 2))})",
        "with ocp.StandardCheckpointer() as checkpointer:\n"
        "    checkpointer.save(pathlib.Path('theirs').absolute(), tree)\n"
        "restore('theirs', tree)",
    ],
)

_COSTS = Section(
    "parallel: costs",
    _MESH
    + """
plan, wire_bytes = sj.parallel.plan, sj.viz.wire_bytes
total = jax.jit(jnp.sum).lower(jnp.ones(3))
""",
    [
        "plan({}, mesh, 8)",
        "plan({'t': ()}, mesh, 8)",
        "plan({'t': (20, 2)}, mesh, jnp.ones(3))",
        "plan({'t': (20, 2)}, mesh, 8, axis='y')",
        "plan({'t': (20, 2)}, mesh, 8, layouts={'u': 'row-sharded'})",
        "plan((20, 2), mesh, 8, layouts={'tables': 'column-sharded'})",
        "plan((20, 2), mesh, 8, layouts={'tables': 'table-wise'})",
        "plan({'t': (20, 2)}, mesh, 8, stacks={'u': (7, 13)})",
        "plan({'t': (20, 2)}, mesh, 8, stacks={'t': (7, 8)})",
        "plan(jnp.ones((20, 2)), mesh, jnp.arange(8), "
        "loss=lambda table, ids: jnp.sum(table[ids] @ table.T))",
        "wire_bytes(jax.jit(jnp.sum))",
        "wire_bytes(total)",
        "wire_bytes(total.as_text())",
        "wire_bytes(total.compile(), loop_trips=-1)",
        "wire_bytes(total.compile(), loop_trips='2')",
        "wire_bytes(total.compile(), loop_trips=1.5)",
    ],
)

_LOSSES = Section(
    "losses",
    """
import jax
import jax.numpy as jnp
import sparsejax as sj
from sparsejax.losses import *

table, inputs = jnp.ones((9, 4)), jnp.ones((2, 4))
labels, negatives = jnp.array([1, 2]), jnp.array([3, 4, 5])
samples = sj.losses.NegativeSampler.uniform(9).sample(jax.random.key(0), 3)
args = table, inputs, labels
""",
    [
        "sampled_softmax_loss([[1.0]], inputs, labels, negatives)",
        "sampled_softmax_loss(labels, inputs, labels, negatives)",
        "sampled_softmax_loss(table, labels, labels, negatives)",
        "sampled_softmax_loss(table, jnp.ones((2, 3)), labels, negatives)",
        "sampled_softmax_loss(table, inputs, jnp.array([1]), negatives)",
        "sampled_softmax_loss(table, inputs, jnp.array([1.0, 2.0]), negatives)",
        "sampled_softmax_loss(*args, jnp.ones((5, 3), int))",
        "sampled_softmax_loss(*args, samples)",
        "sampled_softmax_loss(*args, sj.losses.NegativeSampler.uniform(9))",
        "nce_loss(*args, samples._replace(label_log_q=jnp.ones(5)))",
        "nce_loss(*args, negatives, bias=jnp.ones(4))",
        "nce_loss(*args, negatives, remove_accidental_hits='yes')",
        "in_batch_softmax_loss(inputs, jnp.ones((2, 3)))",
        "in_batch_softmax_loss(inputs, table[:1])",
        "in_batch_softmax_loss(inputs, table, candidate_ids=labels)",
        "in_batch_softmax_loss(inputs, table, log_q=jnp.ones((9, 1)))",
        "in_batch_softmax_loss(inputs, table, where=jnp.ones(9))",
        "in_batch_softmax_loss(inputs, table, where=jnp.ones(5, bool))",
        "in_batch_softmax_loss(inputs, table, temperature=0)",
        "in_batch_softmax_loss(inputs, table, num_hard_negatives=0)",
        "bpr_loss(labels, negatives)",
        "bpr_loss(jnp.ones(2), jnp.ones(3))",
        "margin_ranking_loss(jnp.ones(2), jnp.ones(2), jnp.ones(2))",
        "margin_ranking_loss(jnp.ones(2), jnp.ones(2), hardest=None)",
    ],
)

SECTIONS: list[Section] = [
    _EMBEDDING,
    _DENSE,
    _COLLECTION,
    _BLOCKS,
    _TRAINER,
    _DATASETS,
    _LOADER,
    _WORDS,
    _NEGATIVES,
    _TABLES,
    _PULLS,
    _STORED,
    _KEYS,
    _CACHED,
    _CHANGES,
    _FILES,
    _SHARDED,
    _GRADIENTS,
    _CHECKPOINTS,
    _COSTS,
    _LOSSES,
]
