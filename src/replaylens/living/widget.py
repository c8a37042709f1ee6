"""The explorer in a notebook, as a widget of anywidget, which the extra for notebooks installs."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from replaylens.engine.errors import MissingPackage
from replaylens.views.html import asset, style

if TYPE_CHECKING:
    from replaylens.living.state import LivingTree

_SHOWN: WeakKeyDictionary[LivingTree, Any] = WeakKeyDictionary()
"""the widget of each explorer: shown twice, it is one"""


@cache
def _kind() -> Any:
    """The widget's class, made when it is first shown; MissingPackage without anywidget."""
    try:
        import anywidget
    except ImportError:
        raise MissingPackage(
            "The tree in a notebook needs the package anywidget. Install it with `pip install 'replaylens[notebooks]'`; "
            "explorer.serve() and explorer.save('tree.html') work without it."
        ) from None
    code = asset("explore.js", "replaylens.living") + "\nexport default { render: replaylensExplore.render };\n"
    look = str(style()).removeprefix("<style>").removesuffix("</style>") + asset("explore.css", "replaylens.living")
    return type("ExplorerWidget", (anywidget.AnyWidget,), {"_esm": code, "_css": look})


def widget(explorer: LivingTree) -> Any:
    """The widget of an explorer, an `anywidget.AnyWidget`."""
    if explorer not in _SHOWN:
        made = _kind()()
        made.on_msg(lambda _, message, __: made.send(explorer.handle(message)))
        explorer.listen(made.send)
        _after_cells(explorer)
        _SHOWN[explorer] = made
    return _SHOWN[explorer]


def bundle(explorer: LivingTree) -> dict[str, Any]:
    """What a notebook shows: the widget where there is a kernel, and the static tree where there is none."""
    shown = dict(widget(explorer)._repr_mimebundle_()[0])
    return shown | {"text/plain": repr(explorer), "text/html": explorer.root.tree()._repr_html_()}


def _after_cells(explorer: LivingTree) -> None:
    """What Python does to the branches is shown after the cell that does it."""
    try:
        shell = import_module("IPython").get_ipython()
    except ImportError:
        shell = None
    if shell is not None:
        shell.events.register("post_run_cell", lambda _result=None: explorer.refresh())
