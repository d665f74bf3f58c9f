"""The files around the code: the address, the citation, the README, workflows."""

import re
import subprocess
import tomllib

import pytest

import pages


yaml = pytest.importorskip("yaml")

SETTINGS = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
# Files that are read or run without pyproject.toml state the address again.
STATE_THE_ADDRESS = (
    r"pyproject\.toml|CITATION\.cff|README\.md|docs/install\.md|notebooks/.*"
)


def test_the_address_is_the_same_everywhere():
    """`sed -i s,OLD,NEW, $(git grep -l OLD)` changes it, and misses nothing."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=pages.ROOT, capture_output=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout of git")
    owner, name = REPOSITORY.split("/")[-2:]
    address = r"(?:github\.com|githubusercontent\.com)/([\w-]+)/sparsejax\b"
    for file in listed.stdout.decode().split("\0"):
        path = pages.ROOT / file
        if re.search(r"\.(md|py|toml|cff|ya?ml|ipynb)$", file) and path.exists():
            found = re.findall(address, path.read_text())
            assert {*found} <= {owner} and name == "sparsejax", file
            assert not found or re.fullmatch(STATE_THE_ADDRESS, file), file


def test_the_readme_of_a_release_has_no_relative_links():
    """Here they are relative, so that the site can follow them."""
    text = (pages.ROOT / "README.md").read_text()
    hooks = SETTINGS["tool"]["hatch"]["metadata"]["hooks"]
    for rule in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    assert len(links) > 15
    for image, link in links:
        base = f"{raw}/main/" if image else f"{REPOSITORY}/blob/main/"
        assert link.startswith(base), link
        assert (pages.ROOT / link.removeprefix(base).partition("#")[0]).exists(), link


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert cited["version"] == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == REPOSITORY


def test_workflows_run_what_a_contributor_runs():
    targets = re.findall(r"^([\w-]+):.*##", (pages.ROOT / "Makefile").read_text(), re.M)
    paths = [*(pages.ROOT / ".github" / "workflows").glob("*.yml")]
    assert len(paths) == 2
    for text in (path.read_text() for path in paths):
        jobs = yaml.safe_load(text)["jobs"].values()
        runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert runs
        assert {*re.findall(r"^make ([\w-]+)", "\n".join(runs), re.M)} <= {*targets}
        for pins in re.findall(r"-r (\S+\.txt)", text):
            assert (pages.ROOT / pins).exists()
        assert all(job["timeout-minutes"] for job in jobs)
        for job in jobs:  # only the job that publishes can ask for a token
            publishes = any("pypi" in step.get("uses", "") for step in job["steps"])
            assert ("id-token" in job.get("permissions", {})) == publishes


def test_the_site_is_built_elsewhere_as_here():
    config = yaml.safe_load((pages.ROOT / ".readthedocs.yaml").read_text())
    conf = {"configuration": "docs/conf.py", "fail_on_warning": True}
    assert config["sphinx"] == conf
    (install,) = config["python"]["install"]
    assert {*install["extra_requirements"]} <= PROJECT["optional-dependencies"].keys()
    python = config["build"]["tools"]["python"]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_the_page_states_the_window():
    text = (pages.ROOT / "docs" / "compatibility.md").read_text()
    python = re.search(r"\| 3\.(\d+) to 3\.(\d+) \|", text)
    named = [x.rpartition(".")[2] for x in PROJECT["classifiers"] if ":: 3." in x]
    assert python and [named[0], named[-1]] == [python[1], python[2]]
    assert f">=3.{python[1]}" == PROJECT["requires-python"]
    (jax,) = [x for x in PROJECT["dependencies"] if x.startswith("jax>=")]
    assert f"from {jax.removeprefix('jax>=')} on" in text
