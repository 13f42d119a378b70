"""Examples in docstrings as blocks of code on the documentation's pages: Markdown would read >>> as quotations."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Docstring text with its doctests, from a line with >>> to the next empty one, as fenced code.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines, inside = [], False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>> ")
        if begins and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Examples(griffe.Extension):
    """Called for everything that has a docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
