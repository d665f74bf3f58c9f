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
    "name", ["knowledge_graph", "node2vec", "sequence", "two_towers", "word2vec"]
)
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_options_must_be_positive(name, value, capsys):
    main = importlib.import_module(f"examples.{name}").main
    arguments = ["--dim", value] + ["no such file"] * (name != "word2vec")
    with pytest.raises(SystemExit) as error:
        main(arguments)
    said = str(error.value) + capsys.readouterr().err
    assert ("invalid" if value == "many" else "must be positive") in said


@pytest.mark.usefixtures("freed_pages")
@pytest.mark.parametrize(
    "name, lines, message",
    [
        ("sequence", "user,item\n1,2\n1,3\n1,4\n", "no user has 4 items"),
        ("two_towers", "user,item\n1,a\n2,b\n2,b\n3,c\n", "no user of"),
    ],
)
def test_a_file_that_cannot_be_used(name, lines, message, tmp_path, capsys):
    path = tmp_path / "lines.csv"
    path.write_text(lines)
    with pytest.raises(SystemExit) as error:
        importlib.import_module(f"examples.{name}").main([str(path), "--dim", "2"])
    assert message in str(error.value) + capsys.readouterr().err
