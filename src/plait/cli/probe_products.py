"""The table of products for people: which of torch's two libraries multiplies, by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.cluster.products import KINDS, MULTIPLICATIONS, ROWS, ProductClass, ProductTable

if TYPE_CHECKING:
    from rich.table import Table

TITLES = {
    "forward": "forward",
    "input_grad": "input's gradient",
    "weight_grad": "weight's gradient",
}


def product_view(table: ProductTable) -> Table:
    """A row for each range of rows and multiplications, a column for each kind of product.

    Beside each library stands the measured ratio: seconds of oneDNN over seconds of torch's own,
    the median of the rounds.
    """
    from rich.table import Table

    view = Table("rows from", "millions of multiplications from", box=None, pad_edge=False)
    for kind in KINDS:
        view.add_column(TITLES[kind], justify="right")
    for rows in ROWS:
        for multiplications in MULTIPLICATIONS:
            classes = [ProductClass(kind, rows, multiplications) for kind in KINDS]
            words = [_words(one, table) for one in classes]
            view.add_row(str(rows), f"{multiplications / 2**20:.0f}", *words)
    return view


def _words(one: ProductClass, table: ProductTable) -> str:
    library = "oneDNN" if one in table.onednn else "torch"
    ratio = table.ratios.get(one)
    return library if ratio is None else f"{library} {ratio[1]:.2f}"
