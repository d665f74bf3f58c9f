"""Each way to wrap an optimizer works in each place, or is refused with a way out."""

import re

import pytest

import pairs


def _cases():
    for pair in ((wrap, place) for wrap in pairs.WRAPS for place in pairs.PLACES):
        marks = () if pair in pairs.QUICK else pytest.mark.slow
        yield pytest.param(*pair, marks=marks)


@pytest.mark.usefixtures("loose_promotion", "eight_devices")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap, place", list(_cases()))
def test_pair(wrap, place, tmp_path):
    words = pairs.REFUSED.get((wrap, place))
    if words is None:
        pairs.PLACES[place].run(wrap, tmp_path)
    else:
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            pairs.PLACES[place].run(wrap, tmp_path)
