"""examples/two_towers.py retrieves real purchases, from ids, a country and words."""

import re

import numpy as np
import pytest

from benchmarks.races import implicit
from examples import two_towers


pytestmark = pytest.mark.usefixtures("loose_promotion", "freed_pages")


@pytest.mark.slow
def test_purchases_are_retrieved(tmp_path, shared_data, capsys):
    folder = shared_data / "online_retail"
    data = {k: x[:60_000] for k, x in np.load(folder / "online_retail.npz").items()}
    frequent = np.argsort(-np.bincount(data["item"]), kind="stable")[:400]
    data = {k: x[np.isin(data["item"], frequent)] for k, x in data.items()}
    items = [x.split("\t") for x in (folder / "items.tsv").read_text().splitlines()]
    path, names = tmp_path / "purchases.csv", ("invoice", "customer", "country", "item")
    with path.open("w") as file:
        file.write("invoice,customer,country,item,text\n")
        for invoice, customer, country, item in zip(*(data[k].tolist() for k in names)):
            code, text = items[item]
            file.write(f'{invoice},{customer},{country},{code},"{text}"\n')
    options = "--user customer,country --item item --text text --basket invoice"
    options += " --dim 32 --epochs 3"
    two_towers.main([str(path), *options.split()])
    found = capsys.readouterr().out.splitlines()
    assert re.match(r"1,5\d\d users, 401 items, 3\d,\d+ lines", found[0])
    epochs = [re.findall(implicit.LINE, x)[0][0] for x in found[1:-1]]
    assert epochs == [*"123"]
    recall, popular = map(float, re.findall(r"0\.\d+", found[-1]))
    assert popular == pytest.approx(0.097, abs=0.002), found
    assert recall > 1.25 * popular


def test_a_history_ends_before_the_basket():
    users = np.array([1, 1, 2, 1, 2, 1])
    items = np.array([10, 11, 20, 12, 21, 13])
    baskets = np.array([1, 1, 2, 3, 2, 4])
    found, is_last = two_towers.histories(users, items, baskets)
    rows = [row[row > 0].tolist() for row in found]
    assert rows == [[], [], [], [10, 11], [], [10, 11, 12]]
    assert is_last.tolist() == [False, False, True, False, True, True]
    alone, _ = two_towers.histories(np.ones(30, int), np.arange(1, 31), np.arange(30))
    assert alone[-1].tolist() == list(range(10, 30))  # the latest
