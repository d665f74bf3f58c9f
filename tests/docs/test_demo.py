"""The demo: what it prints and writes, and what it says where something is wrong."""

import functools
import gzip
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import sparsejax as sj
from sparsejax import _arguments, demo
from sparsejax.demo import _options, _output, _text, _train, timing


# optax's own schedules and moments promote types.
pytestmark = pytest.mark.loose_promotion

SENTENCE = "the cat saw a dog and the dog saw a bird while seven birds flew over "
QUICK = "--dim 4 --epochs 2 --batch-size 64 --negatives 2 --no-timing --quiet".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 20)
    return str(path)


def _complaint(capsys, argv):
    """What `main` says to a mistake of the user: exit code 2 and one line."""
    code = demo.main(argv)
    out, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("sparsejax.demo: ")
    assert err.count("\n") == 1
    assert out == ""
    return err


@pytest.fixture
def no_training(monkeypatch):
    def train(*args):
        pytest.fail("it trained first and complained then")

    monkeypatch.setattr(_train, "train", train)


# ------------------------------------------------------------------ end to end


@pytest.mark.slow
def test_end_to_end(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_train, "_TIMED_ROWS", (50, 40_000))
    save, picture = tmp_path / "vectors.npz", tmp_path / "picture.png"
    argv = ["--text", text, *QUICK, "--save", str(save), "--plot", str(picture)]
    argv.remove("--no-timing")
    argv.remove("--quiet")
    assert demo.main(argv) == 0
    out, err = capsys.readouterr()
    assert "loss=" in err and "words/s" in err  # tqdm's bar
    assert "Nearest neighbours" in out
    assert out.count("×") == 2  # the timing table
    assert picture.read_bytes().startswith(b"\x89PNG")
    with np.load(save) as file:
        assert set(file) == {"words", "vectors", "settings"}
        assert "birds" in file["words"]
        assert file["vectors"].shape == (len(file["words"]), 4)
        assert np.all(np.isfinite(file["vectors"]))
        settings = json.loads(str(file["settings"]))
    assert settings["dim"] == 4 and settings["learning_rate"] == 0.002
    assert sorted(os.listdir(tmp_path)) == ["picture.png", "text.txt", "vectors.npz"]


def _vectors(text, tmp_path, *options):
    path = str(tmp_path / "vectors.npz")
    assert demo.main(["--text", text, *QUICK, "--save", path, *options]) == 0
    with np.load(path) as file:
        return file["vectors"]


def test_time_is_limited_whatever_the_text(text, capsys, monkeypatch):
    """By default by a minute, by --seconds, or by --epochs alone."""
    assert _options.parse([]).limits == (60.0, 100)
    assert _options.parse(["--epochs", "7"]).limits == (np.inf, 7)
    assert _options.parse(["--epochs", "7", "--seconds", "9"]).limits == (9.0, 7)
    ticks = iter(range(10**6))  # a second for each look at the clock
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(_train, "time", clock)
    rates = []
    monkeypatch.setattr(_train, "make_train", lambda *args: fake)
    monkeypatch.setattr(_train, "with_rate", lambda state, r: rates.append(r) or state)

    def fake(state, key, chunk):
        return state, np.ones(len(chunk))

    options = ["--dim", "4", "--no-timing", "--quiet", "--batch-size", "2"]
    assert demo.main(["--text", text, *options, "--seconds", "12"]) == 0
    out = capsys.readouterr().out
    passes = float(out.split("Read ")[1].split(" times")[0])
    assert 0 < passes < 100
    assert len(rates) > 3 and rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.3 * rates[0]


@pytest.mark.slow
def test_a_seed_makes_it_reproducible(text, tmp_path):
    first = _vectors(text, tmp_path, "--seed", "3")
    np.testing.assert_array_equal(_vectors(text, tmp_path, "--seed", "3"), first)
    assert np.any(_vectors(text, tmp_path, "--seed", "4") != first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_trains_as_dense_optax_does(name):
    """SGD keeps no state, so sparse and dense are one thing; Adam starts as one."""
    vocabulary, steps = 50, 6 if name == "sgd" else 1
    tx = _options.OPTIMIZERS[name][0](0.05)
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, vocabulary, (steps, 32, 2)).astype(np.int32)
    sampler = sj.losses.NegativeSampler.uniform(vocabulary)
    insist = functools.partial(sj.value_and_grad, tables=True)
    runs = {}
    for how, optimizer, value_and_grad in (
        ("sparse", sj.optim.lazy(tx), insist),
        ("dense", tx, jax.value_and_grad),
    ):
        params = _train.init_params(jax.random.key(1), vocabulary, 8)
        step = _train.make_step(optimizer, value_and_grad)
        train = _train.make_train(step, sampler, 3)
        state = (params, optimizer.init(params))
        (params, _), losses = train(state, jax.random.key(2), pairs)
        runs[how] = (np.asarray(losses), params)
    (losses, params), (dense_losses, dense_params) = runs["sparse"], runs["dense"]
    assert losses[-1] < losses[0] or steps == 1
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-6)
    for table_name in params:
        np.testing.assert_allclose(
            params[table_name], dense_params[table_name], rtol=1e-5, atol=1e-7
        )


@pytest.mark.slow
def test_both_tables_get_sparse_gradients():
    params = _train.init_params(jax.random.key(0), 20, 4)
    pairs = np.zeros((8, 2), np.int32)
    negatives = np.zeros((8, 3), np.int32)
    grads = sj.grad(_train.loss_fn, tables=True)(params, pairs, negatives)
    assert {k: g.capacity for k, g in grads.items()} == {"words": 8, "contexts": 32}


@pytest.mark.parametrize("name", _options.OPTIMIZERS)
def test_every_optimizer_can_be_lifted(name):
    config = _options.Config(optimizer=name)
    assert sj.optim.is_row_separable(_train.make_optimizer(config))


def test_neighbours_are_words_of_the_same_contexts(capsys):
    vectors = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 2.0]])
    assert _output.nearest(vectors, 0, 1) == [1]
    assert _output.nearest(vectors, 2, 2) == [3, 1]


# ------------------------------------------------------------------ mistakes


def _make(tmp_path, name):
    """A file with something wrong about it."""
    path = tmp_path / name
    whole = gzip.compress(SENTENCE.encode() * 20)
    if name == "folder":
        path.mkdir()
    elif name != "missing":
        content = {
            "empty": b"",
            "blank": b" \n\n",
            "binary": bytes(range(256)) * 50,
            "latin1.txt": "größer und schöner ".encode("latin-1") * 50,
            "utf16.txt": SENTENCE.encode("utf-16"),
            "short": b"two words",
            "same": b"word " * 100,
            "plain.gz": SENTENCE.encode(),
            "cut.gz": whole[:-12],
            "broken.gz": whole[:20] + b"\xff" * 20 + whole[40:],
            "wrong_sum.gz": whole[:-8] + b"\0" * 8,
            "empty.gz": gzip.compress(b""),
        }
        path.write_bytes(content[name])
    return str(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"cannot read .*\(No such file or directory\): name a readable"),
        ("folder", r"it is a directory"),
        ("empty", r"is empty: name a file"),
        ("blank", r"is empty"),
        ("empty.gz", r"is empty"),
        ("binary", r"is not UTF-8 text but binary"),
        ("latin1.txt", r"is not UTF-8 text"),
        ("utf16.txt", r"is not UTF-8 text"),
        ("short", r"the text is too short: of its 2 words, 0 occur"),
        ("same", r"the text is too short: of its 100 words, 1 occur"),
        ("plain.gz", r"is not a whole gzip file"),
        ("cut.gz", r"is not a whole gzip file"),
        ("broken.gz", r"is not a whole gzip file"),
        ("wrong_sum.gz", r"is not a whole gzip file"),
    ],
)
def test_a_text_that_cannot_be_used(name, message, tmp_path, capsys, no_training):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(_complaint(capsys, ["--text", _make(tmp_path, name)]))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero here")
def test_a_device_that_never_ends_is_no_text(capsys, no_training):
    assert "it is not a file" in _complaint(capsys, ["--text", "/dev/zero"])


def test_an_unreadable_text(text, capsys, monkeypatch, no_training):
    def read_bytes(path):  # which root may read, whatever its mode is
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
    err = _complaint(capsys, ["--text", text])
    assert "(Permission denied): name a readable" in err


def test_a_null_in_the_name(capsys, no_training):
    assert "cannot read" in _complaint(capsys, ["--text", "a\0b"])
    assert "cannot write" in _complaint(capsys, ["--save", "a\0b"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--dim", "0"),
        ("--dim", "many"),
        ("--dim", "1.5"),
        ("--dim", "99999999999"),
        ("--window", "0"),
        ("--negatives", "-1"),
        ("--epochs", "0"),
        ("--seconds", "0"),
        ("--seed", "-1"),
        ("--min-count", "0"),
        ("--max-vocab", "1"),
        ("--batch-size", "0"),
        ("--learning-rate", "0"),
        ("--learning-rate", "nan"),
        ("--learning-rate", "inf"),
        ("--optimizer", "lamb"),
        ("--colour", "red"),
    ],
)
def test_options_out_of_range(option, value, capsys, no_training):
    assert option in _complaint(capsys, [option, value])


@pytest.mark.slow
def test_a_learning_rate_that_is_too_high(text, capsys):
    argv = ["--text", text, *QUICK, "--optimizer", "sgd", "--learning-rate", "1e30"]
    assert demo.main(argv) == 2
    err = capsys.readouterr().err
    assert "take a lower --learning-rate than 1e+30" in err and err.count("\n") == 1


def test_too_little_memory(text, capsys, monkeypatch, no_training):
    monkeypatch.setattr(timing, "free_bytes", lambda: 1000)
    assert demo.main(["--text", text]) == 2
    assert "lower --dim, --max-vocab or --batch-size" in capsys.readouterr().err


def test_a_timing_that_needs_too_much_memory_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(timing, "free_bytes", lambda: 1000)
    _train.print_timing(_options.Config(big=True))
    assert capsys.readouterr().out.count("left out: needs") == 4


# ------------------------------------------------------------------ files written


@pytest.mark.parametrize("option", ["--save", "--plot"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("folder.png", "is there and not a regular file"),
        ("none/file.png", "No such file or directory"),
        ("text.png/file.png", "Not a directory"),
        ("text.png", "is named for two things"),
        ("link.png", "is named for two things"),
        ("x" * 300 + ".png", "File name too long"),
    ],
)
def test_targets_that_cannot_be_written(
    option, target, message, tmp_path, capsys, no_training
):
    (tmp_path / "folder.png").mkdir()
    text = tmp_path / "text.png"
    text.write_text(SENTENCE)
    (tmp_path / "link.png").symlink_to(text)
    before = sorted(os.listdir(tmp_path))
    argv = ["--text", str(text), option, str(tmp_path / target)]
    err = _complaint(capsys, argv)
    assert message in err and option in err
    assert sorted(os.listdir(tmp_path)) == before
    assert text.read_text() == SENTENCE


def test_a_device_is_not_replaced(capsys, no_training):
    assert "not a regular file" in _complaint(capsys, ["--save", os.devnull])


def test_save_and_plot_need_files_of_their_own(tmp_path, capsys, no_training):
    path = str(tmp_path / "both.png")
    err = _complaint(capsys, ["--save", path, "--plot", path])
    assert "is named for two things" in err


def test_plot_without_matplotlib(tmp_path, capsys, monkeypatch, no_training):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    err = _complaint(capsys, ["--plot", str(tmp_path / "x.png")])
    assert "pip install 'sparsejax[demo]'" in err


def test_plot_of_an_unknown_format(tmp_path, capsys, no_training):
    err = _complaint(capsys, ["--plot", str(tmp_path / "x.xyz")])
    assert "must end in one of .png, .pdf, .svg" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "disk full"), 2)]
)
def test_a_save_that_fails_leaves_the_old_file(
    error, code, text, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "vectors.npz"
    path.write_bytes(b"old")

    def savez(file, **arrays):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(np, "savez", savez)
    assert demo.main(["--text", text, *QUICK, "--save", str(path)]) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["text.txt", "vectors.npz"]


def test_interrupted(text, capsys, monkeypatch):
    def train(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(_train, "train", train)
    assert demo.main(["--text", text, *QUICK]) == 130
    assert capsys.readouterr().err == "sparsejax.demo: interrupted before the end\n"


def test_a_link_keeps_pointing_to_the_file(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with _output.atomic_write(str(link)) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


# ------------------------------------------------------------------ progress


def test_without_tqdm_there_are_lines(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with _arguments.progress_reporter("", True, " words") as report:
        report(10.0, 100, loss="2.500")
        report(100.0, 100, loss="1.500")
    err = capsys.readouterr().err
    assert err.startswith("100%  loss 1.500  ") and err.endswith(" words/s\n")


def test_quiet_is_quiet(capsys):
    with _arguments.progress_reporter("", False, " words") as report:
        report(100.0, 100, loss="1.500")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_it_can_be_imported_without_its_extras():
    code = (
        "import sys; sys.modules['tqdm'] = sys.modules['matplotlib'] = None\n"
        "from sparsejax import demo; sys.exit(demo.main(['--dim', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------ the text


def test_the_default_text_is_english_prose():
    corpus = _text.make_corpus(_text.read_text(None), 5, 10**6)
    assert corpus.words[0] == "the"
    assert corpus.tokens.size > 40_000 and len(corpus.words) > 1000
    words = {corpus.words[i] for i in _text.content_words(corpus, 20)}
    assert {"class", "function", "exception"} <= words
    assert "the" not in words


@pytest.mark.parametrize("name", ["plain.txt", "packed.gz", "packed_without_suffix"])
def test_texts_plain_and_packed(name, tmp_path):
    content = "größe naïve слово".encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if "packed" in name else content)
    assert _text.read_text(str(path)) == "größe naïve слово"


def test_corpus_numbers_words_by_frequency():
    corpus = _text.make_corpus("Bee ant bee, a cow ant BEE! dog", 2, 10)
    assert corpus.words == ["bee", "ant"]
    assert corpus.counts.tolist() == [3, 2]
    assert corpus.tokens.tolist() == [0, 1, 0, 1, 0]
    assert _text.make_corpus("aa bb cc dd", 1, 2).words == ["aa", "bb"]


def test_skip_grams_are_neighbours_both_ways():
    rng = np.random.default_rng(0)
    tokens = np.arange(6, dtype=np.int32)
    pairs = _text.skip_grams(tokens, np.ones(6), 1, rng)
    expected = {(i, i + 1) for i in range(5)} | {(i + 1, i) for i in range(5)}
    assert {tuple(p) for p in pairs.tolist()} == expected
    wide = _text.skip_grams(tokens, np.ones(6), 3, rng)
    assert np.abs(wide[:, 0] - wide[:, 1]).max() <= 3
    assert len(_text.skip_grams(tokens[:1], np.ones(6), 3, rng)) == 0


def test_frequent_words_are_thinned_out():
    corpus = _text.make_corpus("often " * 999 + "rare " * 1, 1, 10)
    keep = _text.keep_probability(corpus, 1e-3)
    assert keep[1] == 1 and 0.03 < keep[0] < 0.04
    tokens = np.zeros(20_000, np.int32)
    pairs = _text.skip_grams(tokens, np.array([0.5]), 4, np.random.default_rng(0))
    assert abs(len(pairs) / (20_000 * 0.5 * 5) - 1) < 0.05  # as expected_pairs says


def test_batches_use_every_pair():
    pairs = np.arange(22, dtype=np.int32).reshape(11, 2)
    chunks = list(_text.batches(iter([pairs[:7], pairs[7:]]), 2, 2))
    assert [c.shape for c in chunks] == [(2, 2, 2), (2, 2, 2), (2, 2, 2)]
    flat = np.concatenate([c.reshape(-1, 2) for c in chunks])
    np.testing.assert_array_equal(flat[:11], pairs)


def test_principal_axes_are_those_of_greatest_variance():
    rng = np.random.default_rng(0)
    angle = rng.uniform(-1, 1, 30)
    vectors = np.stack([np.cos(angle), 0.01 * rng.normal(size=30), np.sin(angle)], 1)
    points = _output.principal_axes(5 * vectors)
    assert abs(np.corrcoef(points[:, 0], np.sin(angle))[0, 1]) > 0.99
    assert points[:, 0].var() > points[:, 1].var()
