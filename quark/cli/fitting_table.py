"""A table that a narrow terminal shows as a list, so that no word is broken or cut."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

GAP = "   "  # between the figures of a row
MARGIN = 2


class FittingTable(Table):
    """A table; where its words do not fit, each row is its first cell and a list of the others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or the list."""
        widths = self._widths(console, options)
        if widths is None:
            yield self._list(console, options.max_width)
            return
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width  # Rich's own choice cuts words although they would fit
        yield from super().__rich_console__(console, options)

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return whether the table can be shown without breaking a word."""
        return self._widths(console, options) is not None

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """Return widths of columns that break no word; None if there are none."""
        ranges = [_range(column, console, options) for column in self.columns]
        lines = 2 * self.padding[1] * len(self.columns) + self._extra_width
        rest = options.max_width - lines - sum(size.minimum for size in ranges)
        if rest < 0:
            return None
        wanted = sum(size.span for size in ranges)
        share = min(1.0, rest / wanted) if wanted else 0.0
        return [size.minimum + int(share * size.span) for size in ranges]

    def _list(self, console: Console, width: int) -> RenderableType:
        heads = [_one_line(_text(column.header, console)) for column in self.columns]
        lines: list[RenderableType] = []
        if self.title is not None:
            title = console.render_str(str(self.title))
            title.stylize(self.title_style or "")
            lines.append(title)
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = (_text(cell, console) for cell in cells)
            if not any(text.plain for text in (first, *others)):
                continue  # space between groups of rows
            lines.append(Padding(first, (0, 0, 0, MARGIN)))
            figures = [
                Text.assemble((f"{head.plain} ", "dim"), _one_line(other))
                for head, other in zip(heads[1:], others, strict=True)
                if other.plain.strip()
            ]
            for line in _filled(figures, width - 2 * MARGIN):
                lines.append(Padding(line, (0, 0, 0, 2 * MARGIN)))
        return Group(*lines, Text())


def _range(column: Column, console: Console, options: ConsoleOptions) -> Measurement:
    """Return the width of a column in which no word is broken, and that without line breaks."""
    wide = options.update(max_width=10_000)
    sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    longest = max(size.maximum for size in sizes)
    least = longest if column.no_wrap else max(size.minimum for size in sizes)
    least = max(least, column.min_width or 0)
    return Measurement(least, max(least, longest))


def _text(cell: RenderableType, console: Console) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _one_line(text: Text) -> Text:
    """Return a text without line breaks: ``bits/⏎weight`` is ``bits/weight``."""
    joined = re.sub(r"-\n|(?<=/)\n|\n(?=/)", "", text.plain)
    return Text(" ".join(joined.split()), style=text.style)


def _filled(figures: list[Text], width: int) -> Iterator[Text]:
    """Yield lines of as many figures as fit; a longer figure has a line alone."""
    line = Text()
    for figure in figures:
        if line and line.cell_len + cell_len(GAP) + figure.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, GAP if line else "", figure)
    if line:
        yield line
