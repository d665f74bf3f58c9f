"""The pages: their code runs, their links lead somewhere."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import pages
import sparsejax as sj


PAGES = sorted(pages.DOCS.rglob("*.md"))
PACKAGES = ["data", "desc", "extend", "nn", "optim", "parallel", "store", "viz"]
# These have tests of their own, which run their code on what other systems answered.
TESTED_ELSEWHERE = {
    "caffe2.md",
    "gluon.md",
    "paddle.md",
    "scaling.md",
    "tensorflow.md",
    "torch.md",
    "tour.md",
    "tutorial.md",
}


def _name(page):
    return page.relative_to(pages.DOCS).as_posix()


@pytest.mark.once
@pytest.mark.loose_promotion  # as in a reader's session
@pytest.mark.multidevice
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in TESTED_ELSEWHERE], ids=_name
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run_page(page)


@pytest.mark.parametrize(
    "page", [*PAGES, *pages.ROOT.glob("*.md")], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file = target.partition("#")[0]
        if not file or re.match(r"[a-z]+:", target):
            continue
        assert (page.parent / file).exists(), f"{page.name} links to {target}"


@pytest.mark.once
@pytest.mark.loose_promotion
def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = pages.run_page(pages.ROOT / "README.md")
    moved = np.flatnonzero(np.any(np.asarray(found["params"]["items"]) != 0, axis=1))
    assert moved.tolist() == [4, 7]
    assert float(found["loss"]) == 1.0


def test_the_readme_is_short():
    assert len((pages.ROOT / "README.md").read_text().splitlines()) < 200


@pytest.mark.once
@pytest.mark.loose_promotion
def test_the_programs_of_the_tutorial_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pages.run_page(pages.DOCS / "tutorial.md")
    errors = re.findall(r"epoch \d: ([\d.]+) off", capsys.readouterr().out)
    assert len(errors) == 5 and float(errors[-1]) < float(errors[0])


@pytest.mark.once
@pytest.mark.loose_promotion
@pytest.mark.multidevice
@pytest.mark.slow
def test_the_code_of_the_tour_runs(tmp_path, monkeypatch):
    """What is the reader's own there, models, batches and files, is made here."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = scipy.sparse.random(512, 126, 0.2, "csr", np.float32, rng)
    sj.data.write_libsvm("agaricus.txt.train", x, rng.integers(0, 2, 512))
    ids = rng.integers(0, 1_000, (3, 4, 5))
    table = jnp.ones((1_000, 8))
    model = lambda rows, batch: jnp.mean(rows**2)
    found = pages.run_page(
        pages.DOCS / "tour.md",
        step=jax.jit(
            sj.value_and_grad(lambda p, b: jnp.mean(sj.lookup(p["items"], b["ids"])))
        ),
        batches=[{"ids": x} for x in ids],
        table=table,
        model=model,
        padded_ids=jnp.array([[1, 2], [3, -1]]),
        w=jnp.ones((2, 2)),
        edge_scores=jnp.ones(6),
        receivers=jnp.array([0, 0, 1, 2, 2, 2]),
        num_nodes=3,
    )
    assert found["grads"]["items"].height == 20_000_000
    found["store"].close()
    params = {"items": found["params"]["items"]}
    batch = {"ids": jnp.asarray(ids[0])}
    grads = jax.jit(sj.grad(found["loss_fn"]))(params, batch)["items"]
    expected = jax.grad(lambda t: model(t[ids[0]], None))(table)
    np.testing.assert_allclose(grads.to_dense(), expected, rtol=1e-6)


def test_every_public_name_is_in_the_reference():
    listed = set()
    for page in (pages.DOCS / "reference").glob("*.md"):
        module = None
        for line in page.read_text().splitlines():
            if found := re.match(r"\.\. (currentmodule|auto\w+):: (\S+)", line):
                if found[1] == "currentmodule":
                    module = found[2]
                else:
                    listed.add(f"{module}.{found[2]}")
    packages = [sj, *(getattr(sj, name) for name in PACKAGES)]
    public = {
        f"{package.__name__}.{name}"
        for package in packages
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value)
        if getattr(value, "__module__", "").startswith("sparsejax.")
    }
    assert public <= listed, public - listed
