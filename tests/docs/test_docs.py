"""The pages: their code runs, their links lead somewhere."""

import gc
import importlib.util
import re
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import pages
import sparsejax as sj


PAGES = sorted(pages.DOCS.rglob("*.md"))
# Other tests run these pages.
TESTED_ELSEWHERE = {
    "data.md",
    "graphs.md",
    "pretrained_vectors.md",
    "tensorflow.md",
    "torch.md",
}


def _name(page):
    return page.relative_to(pages.DOCS).as_posix()


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")  # as in a reader's session
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in TESTED_ELSEWHERE], ids=_name
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "keras.md":
        pytest.importorskip("keras")
    pages.run_page(page)


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
# gensim does not close the files that it reads.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_pretrained_vectors_are_tuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run_page(pages.DOCS / "howto" / "pretrained_vectors.md")
    gc.collect()


@pytest.mark.parametrize(
    "page",
    [*PAGES, *pages.ROOT.glob("*.md"), *(pages.ROOT / "tests" / "docs").glob("*.md")],
    ids=lambda p: p.name,
)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file = target.partition("#")[0]
        if not file or re.match(r"[a-z]+:", target):
            continue
        assert (page.parent / file).exists(), f"{page.name} links to {target}"


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "README.md"  # with fewer rows, for the dense step
    text = (pages.ROOT / "README.md").read_text()
    page.write_text(text.replace("1_000_000", "10_000"))
    found = pages.run_page(page)
    moved = np.flatnonzero(np.any(np.asarray(found["params"]["items"]) != 0, axis=1))
    assert moved.tolist() == [4, 7]
    assert float(found["loss"]) == 1.0
    (diff,) = [b for b in pages.blocks(page) if b.language == "diff"]
    before: Any = {}
    exec(pages.side(diff, "-"), before)
    np.testing.assert_allclose(before["params"]["items"], found["params"]["items"])


def test_the_readme_is_one_screen():
    """Its explain output is real, and it has the length of optax's."""
    page = pages.ROOT / "README.md"
    assert len(page.read_text().split()) <= 700
    shown = next(b.code for b in pages.blocks(page) if "rows read" in b.code)
    like = jax.ShapeDtypeStruct
    params = {
        "items": like((1_000_000, 64), jnp.float32),
        "w": like((64,), jnp.float32),
    }
    batch = {"ids": jnp.array([7, 4, 7]), "y": jnp.ones(3)}

    def loss_fn(params, batch):
        rows = params["items"][batch["ids"]]
        return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)

    printed = str(sj.explain(loss_fn)(params, batch))
    place = r"at \S+\.py:\d+"
    same = lambda text: re.sub("-{9,}", "-", re.sub(place, "at", text)).strip()
    assert same(printed) == same(shown)


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_clicks_are_predicted(tmp_path, monkeypatch):
    """Trains on rows like the rows of a9a, whose best accuracy is known."""
    monkeypatch.chdir(tmp_path)
    given: Any = {}  # without scikit-learn, the page does not read the files
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 1.5, 123)
    for name, split, n in (("a9a", "train", 8_000), ("a9a.t", "test", 4_000)):
        x = scipy.sparse.random(n, 123, 0.11, "csr", np.float32, rng)
        x.data[:] = 1
        y = rng.random(n) < 1 / (1 + np.exp(-2 * (x @ weights)))
        best = np.mean((x @ weights > 0) == y)
        given |= {f"{split}_x": x, f"{split}_y": y.astype(np.float32)}
        if importlib.util.find_spec("sklearn"):
            datasets: Any = importlib.import_module("sklearn.datasets")
            datasets.dump_svmlight_file(x, np.where(y, 1, -1), name, zero_based=False)
    found = pages.run_page(pages.DOCS / "howto" / "data.md", **given)
    assert best - 0.02 < found["accuracy"] < best + 0.01
    assert found["score"].shape == found["test_y"].shape


@pytest.mark.slow
@pytest.mark.usefixtures("loose_promotion")
def test_a_knowledge_graph_is_learned(tmp_path, monkeypatch, shared_data):
    """On the most frequent entities of a real one, in the files that the page reads."""
    monkeypatch.chdir(tmp_path)
    graph = np.load(shared_data / "codex_m" / "codex_m.npz")
    counts = np.bincount(graph["train"][:, [0, 2]].ravel())
    frequent = np.argsort(-counts, kind="stable")[:250]
    for name in ("train", "valid", "test"):
        triples = graph[name]
        kept = triples[np.isin(triples[:, [0, 2]], frequent).all(1)]
        np.savetxt(f"{name}.txt", kept, "%d", delimiter="\t")
    found = pages.run_page(pages.DOCS / "howto" / "graphs.md")
    assert found["mrr"] > 0.75


@pytest.mark.parametrize("folder", ["howto", "explain", "reference"])
def test_every_page_is_on_the_home_page(folder):
    home = (pages.DOCS / "index.md").read_text()
    for page in (pages.DOCS / folder).glob("*.md"):
        line = f"({folder}/{page.name})"
        assert line in home, f"docs/index.md has no line for {folder}/{page.name}"


def test_returns_are_not_cut_on_the_site():
    """At a colon, napoleon cuts the first line: `[V:]` came out as `[V -- ]`."""
    napoleon = pytest.importorskip("sphinx.ext.napoleon")
    conf = runpy.run_path(str(pages.DOCS / "conf.py"))
    config = napoleon.Config(napoleon_use_rtype=conf["napoleon_use_rtype"])
    lines = ["One.", "", "Returns:", "  The rows `[V:]`: those of `w`."]
    conf["_returns_have_no_type"](None, None, None, None, None, lines)
    made = napoleon.GoogleDocstring(lines, config).lines()
    assert ":returns: The rows `[V:]`: those of `w`." in made


def test_the_matrix_names_what_is_tested():
    text = (pages.DOCS / "install.md").read_text()
    for pins in (pages.ROOT / "tests").glob("*.txt"):
        version = re.search(r"^jax==(.*)$", pins.read_text(), re.MULTILINE)
        assert version and f"| {version[1]}" in text, pins.name
