"""HTML that is safe by its type: text becomes escaped when it is added to an element, Markup does not.

Names of topics, groups and producers come from users, so all text must reach the page through `element`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# HTML elements without an end tag.
_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


# Text to escape, finished HTML, nothing, or any nesting of these.
Child = str | None | Iterable["Child"]


def element(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Make an element: `class_` becomes class, `data_plot` data-plot; True makes it bare, None and False omit it."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    return Markup("".join(_each(children)))


def _each(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str):
            yield escape(child)
        elif child is not None:
            yield from _each(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
