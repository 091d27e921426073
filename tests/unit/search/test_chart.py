"""The picture of sizes and losses: well-formed, and with every point inside."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from quark.torch.search.chart import HEIGHT, WIDTH, render_chart

NAME = "{http://www.w3.org/2000/svg}"
POINTS = [(2.5, 1.6), (3.3, 0.27), (4.3, 0.07), (8.1, 0.0004)]
MARKED = {"int3 & <more>": (3.27, 0.36), "nothing lost": (16.0, 0.0)}


def drawn():
    root = ElementTree.fromstring(render_chart(POINTS, MARKED, "loss < 1 & more"))
    (line,) = root.iter(f"{NAME}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    return root, places


def test_the_curve_goes_right_and_down():
    _, places = drawn()
    assert len(places) == len(POINTS)
    assert places == sorted(places)
    assert [y for _, y in places] == sorted(y for _, y in places)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_marks_are_named_and_lossless_ones_left_out():
    root, places = drawn()
    (circle,) = root.iter(f"{NAME}circle")
    assert circle.find(f"{NAME}title").text == "int3 & <more>: 3.270 bits, 0.36"
    x, y = float(circle.get("cx")), float(circle.get("cy"))
    assert places[0][0] < x < places[1][0]
    assert places[0][1] < y < places[1][1]


def test_marks_alone_are_a_picture_with_the_name_of_the_loss():
    root = ElementTree.fromstring(render_chart((), {"one": (4.0, 2.0)}, "increase, % & more"))
    (circle,) = root.iter(f"{NAME}circle")
    assert 0 < float(circle.get("cx")) < WIDTH
    assert 0 < float(circle.get("cy")) < HEIGHT
    assert "increase, % & more" in {text.text for text in root.iter(f"{NAME}text")}


def test_no_loss_is_refused():
    with pytest.raises(ValueError, match="No loss is above 0"):
        render_chart((), {"same": (4.0, 0.0)}, "loss")


def test_names_of_close_points_lie_apart():
    marked = {"one": (8.1, 0.30), "two": (8.13, 0.30), "three": (8.0, 0.31), "far": (4.0, 0.3)}
    root = ElementTree.fromstring(render_chart((), marked, "loss"))
    named = {t.text: float(t.get("y")) for t in root.iter(f"{NAME}text") if t.text in marked}
    heights = sorted(named[name] for name in ("one", "two", "three"))
    assert all(b - a >= 12 for a, b in pairwise(heights))
