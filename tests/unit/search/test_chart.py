"""The picture of sizes and losses: well-formed, and with every point inside."""

from xml.etree import ElementTree

from quark.torch.search.chart import HEIGHT, WIDTH, render_chart

NAME = "{http://www.w3.org/2000/svg}"
POINTS = [(2.5, 1.6), (3.3, 0.27), (4.3, 0.07), (8.1, 0.0004)]
MARKED = {"int3 & <more>": (3.27, 0.36), "nothing lost": (16.0, 0.0)}


def drawn():
    root = ElementTree.fromstring(render_chart(POINTS, MARKED))
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
    assert circle.find(f"{NAME}title").text == "int3 & <more>: 3.270 bits, 0.36 nats"
    x, y = float(circle.get("cx")), float(circle.get("cy"))
    assert places[0][0] < x < places[1][0]
    assert places[0][1] < y < places[1][1]
