# SPDX-License-Identifier: Apache-2.0
"""The live view of `llumnix top`."""

from __future__ import annotations

from typing import Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Static

from llumsched.top import rows
from llumsched.top.rows import Cells
from llumsched.top.source import Source

REFRESH_S: Final = 0.25
NUM_MOVES: Final = 50


class TopApp(App[None]):
    """The app, which opens and closes its `source`."""

    TITLE = "llumnix top"
    CSS = """
    #headline { height: auto; padding: 0 1 1 1; }
    #instances { height: 1fr; }
    #moves { height: 1fr; border-top: solid $primary; }
    """
    BINDINGS = [  # noqa: RUF012 - the framework's
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by id, KV cache, running, waiting"),
        Binding("space", "pause", "Pause"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._sort = rows.SORTS[0]
        self._paused = False

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield DataTable(id="instances", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="moves", cursor_type="none")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#instances", DataTable).add_columns(*rows.INSTANCE_COLUMNS)
        self.query_one("#moves", DataTable).add_columns(*rows.MOVE_COLUMNS)
        await self._source.__aenter__()
        self.set_interval(REFRESH_S, self.refresh_view)
        self.refresh_view()

    async def on_unmount(self) -> None:
        await self._source.__aexit__(None, None, None)

    def action_sort(self) -> None:
        self._sort = rows.SORTS[(rows.SORTS.index(self._sort) + 1) % len(rows.SORTS)]
        self.refresh_view()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self.refresh_view()

    def refresh_view(self) -> None:
        """Shows the present state."""
        if self._paused:
            return
        snapshot = self._source.snapshot()
        self.query_one("#headline", Static).update(rows.headline(snapshot))
        _show(self.query_one("#instances", DataTable), rows.instance_rows(snapshot, self._sort))
        moves = self.query_one("#moves", DataTable)
        moves.display = snapshot.moves is not None
        _show(moves, rows.move_rows(snapshot, NUM_MOVES))


def _show(table: DataTable[Text], wanted: dict[str, Cells]) -> None:
    """Updates only cells that differ, so that rows keep their place under the cursor."""
    if [key.value for key in table.rows] != list(wanted):
        line, scroll = table.cursor_row, table.scroll_y
        table.clear()
        for key, cells in wanted.items():
            table.add_row(*cells, key=key)
        table.move_cursor(row=line, scroll=False)
        table.scroll_to(y=scroll, animate=False)
        return
    for row, cells in enumerate(wanted.values()):
        for column, cell in enumerate(cells):
            place = Coordinate(row, column)
            if table.get_cell_at(place) != cell:
                table.update_cell_at(place, cell)
