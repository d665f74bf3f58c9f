"""The pages: their code runs, their links lead somewhere."""

import re

import pytest

import pages


PAGES = sorted(pages.DOCS.rglob("*.md"))
# These have tests of their own, which run their code on what other systems answered.
TESTED_ELSEWHERE = {"caffe2.md", "gluon.md", "scaling.md"}


def _name(page):
    return page.relative_to(pages.DOCS).as_posix()


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
