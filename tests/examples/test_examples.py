"""Each example is one short file that a reader copies, and says what it needs."""

import importlib

import pytest

import pages


EXAMPLES = sorted(path.stem for path in (pages.ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_help(name, capsys):
    main = importlib.import_module(f"examples.{name}").main
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_and_shown_to_readers(name):
    text = (pages.ROOT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 155
    assert f"    python examples/{name}.py" in text.split('"""')[1]
    assert any(
        f"examples/{name}.py)" in p.read_text() for p in pages.DOCS.rglob("*.md")
    )


@pytest.mark.parametrize(
    "name", ["knowledge_graph", "node2vec", "sequence", "two_towers"]
)
@pytest.mark.parametrize("option", ["--epochs", "--dim"])
def test_options_must_be_positive(name, option, capsys):
    main = importlib.import_module(f"examples.{name}").main
    with pytest.raises(SystemExit):
        main(["no such file", option, "0"])
    assert "must be positive" in capsys.readouterr().err
