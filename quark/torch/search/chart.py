"""Chart of sizes and losses, as an SVG image.

Documents show it as a file. plotly.js, which draws the charts of pages, writes files only in a
browser; plotly for Python writes them by kaleido, which needs Chrome. Another library would be a
dependency for this image alone. A test fails when a dependency draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 520, 360, 66, 50, 20  # small, to be read on a phone
_NAME_WIDTH, _LINE = 104, 15  # pixels that a name takes

Point = tuple[float, float]  # bits per weight, loss


def render_chart(
    points: Iterable[Point], marked: Mapping[str, Point], loss: str, size: str = "bits per weight"
) -> str:
    """Return an SVG of loss over size, the loss on a logarithmic axis. Losses of 0 are left out.

    Args:
        points: A curve, such as the frontier of mixtures; none for marks alone.
        marked: Points to mark, by name.
        loss: Name of the loss, with its unit.
        size: Name of the size.

    Raises:
        ValueError: No loss is above 0.
    """
    curve = [(bits, loss) for bits, loss in points if loss > 0]
    marks = {name: point for name, point in marked.items() if point[1] > 0}
    shown = [*curve, *marks.values()]
    if not shown:
        raise ValueError("No loss is above 0: there is nothing to draw on a logarithmic axis.")
    scale = _Scale(shown)
    vertices = " ".join("{:.1f},{:.1f}".format(*scale(point)) for point in curve)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *scale.axes(loss, size),
        f'<polyline points="{vertices}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
        *_draw_marks(marks, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Scale:
    """Maps points to positions in the image."""

    def __init__(self, points: list[Point]) -> None:
        self.low = math.floor(min(bits for bits, _ in points))
        self.high = max(math.ceil(max(bits for bits, _ in points)), self.low + 1)
        self.least = math.floor(math.log10(min(loss for _, loss in points)))
        self.most = max(math.ceil(math.log10(max(loss for _, loss in points))), self.least + 1)

    def __call__(self, point: Point) -> Point:
        x = (point[0] - self.low) / (self.high - self.low)
        y = (math.log10(point[1]) - self.least) / (self.most - self.least)
        width, height = WIDTH - LEFT - MARGIN, HEIGHT - BOTTOM - MARGIN
        return LEFT + x * width, MARGIN + (1 - y) * height

    def axes(self, loss: str, size: str) -> Iterator[str]:
        """Iterate over the SVG elements of the grid and its labels."""
        for bits in range(self.low, self.high + 1):
            x, y = self((bits, 10**self.least))
            yield f'<line x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{bits}</text>'
        for power in range(self.least, self.most + 1):
            x, y = self((self.low, 10**power))
            end = WIDTH - MARGIN
            yield f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        middle = HEIGHT / 2
        yield (
            f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(size)}</text>'
        )
        yield (
            f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
            f"{escape(loss)}</text>"
        )


def _draw_marks(marks: Mapping[str, Point], scale: _Scale) -> Iterator[str]:
    """Iterate over the SVG elements of points with their names. Names lie below each other."""
    placed: list[Point] = []
    for name, point in sorted(marks.items(), key=lambda mark: scale(mark[1])[1]):
        x, y = scale(point)
        label = y - 5
        while any(abs(x - a) < _NAME_WIDTH and abs(label - b) < _LINE for a, b in placed):
            label += 1
        placed.append((x, label))
        text = escape(name)
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d1242f">'
            f"<title>{text}: {point[0]:.3f} bits, {point[1]:.4g}</title></circle>"
            f'<text x="{x + 7:.1f}" y="{label:.1f}">{text}</text>'
        )
