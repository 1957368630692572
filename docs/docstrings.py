"""Docstrings as reStructuredText: the pages of the API show them through Napoleon.

Docstrings are prose with Google's sections. They hold array shapes and formulas, whose stars and bars reStructuredText
would read as markup; what stands between backticks is code; a block indented by four, after an empty line, is
preformatted; lines that begin with a bar are a table.
"""

import inspect
import re
from collections.abc import Iterator, Mapping

SECTION = re.compile(r"(Args|Attributes|Raises|Warns|Returns):$")
LISTED = re.compile(r"\s*[*-] ")
TICKED = re.compile(r"(`+)(.+?)\1", re.DOTALL)
MARKUP = re.compile(r"[*|\\]|(?<=\w)_(?!\w)|(?<=\b\w)\.(?= )")  # "r. " begins a list


def as_rst(lines: list[str], public: Mapping[str, str]) -> list[str]:
    """A docstring's lines, without the indentation that all share, as Napoleon reads them.

    Args:
      public: what a name between backticks is a link to, by the name.
    """
    found = []
    for block in blocks(lines):
        head = block[0]
        if head.startswith("    "):
            found += [".. code-block:: none", "", *block]
        elif head.startswith("|"):
            found += _table(block, public)
        elif SECTION.match(head):
            found += _section(head, block[1:], public)
        else:
            found += inline("\n".join(block), public).split("\n")
        found.append("")
    return found


def with_formulas(lines: list[str], module: str | None) -> list[str]:
    """A docstring that names its module's formulas, with that module's docstring behind its summary."""
    if module is None or not any("the module's " in line for line in lines):
        return lines
    _, _, rest = inspect.cleandoc(module).partition("\n\n")
    return [lines[0], "", *rest.split("\n"), *lines[1:]]


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """What empty lines part; a section is one block, with the empty lines in it, and so is what is indented by four."""
    block: list[str] = []
    for line in [*lines, ""]:
        deep = block and (SECTION.match(block[0]) or block[0].startswith("    "))
        if line.strip():
            least = "  " if block and SECTION.match(block[0]) else "    "
            if block and not block[-1] and not (deep and line.startswith(least)):
                yield _stripped(block)
                block = []
            # A list begins behind an empty line.
            if block and LISTED.match(line) and not LISTED.match(block[-1]) and not deep:
                if not any(LISTED.match(each) for each in block):
                    yield block
                    block = []
            block.append(line)
        elif block:
            block.append("")
    if block:
        yield _stripped(block)


def _stripped(block: list[str]) -> list[str]:
    while not block[-1]:
        block.pop()
    return block


def _section(head: str, body: list[str], public: Mapping[str, str]) -> list[str]:
    """Returns is a field: Napoleon would take what stands before a colon for a type."""
    text = inline("\n".join(body), public).split("\n")
    if head == "Returns:":
        return [f":returns: {text[0].strip()}", *text[1:]]
    return [head, *text]


def _table(block: list[str], public: Mapping[str, str]) -> list[str]:
    """The second row is the line below the head."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block]
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in (row for i, row in enumerate(rows) if i != 1):
        for i, cell in enumerate(row):
            found.append(f"   {'  ' if i else '* '}- {inline(cell, public)}")
    return found


def inline(text: str, public: Mapping[str, str]) -> str:
    """Code where backticks are, a link where it is a public name; else no character is markup, but a list's star."""
    parts, end = [], 0
    for match in TICKED.finditer(text):
        parts.append(_escaped(text[end : match.start()], begins=not end))
        code, after = match[2], text[match.end() : match.end() + 1]
        target = code if code.startswith("expertmesh.") else public.get(code)
        parts.append(f":py:obj:`{code} <{target}>`" if target else f"``{code}``")
        parts.append("\\ " if after.isalnum() else "")
        end = match.end()
    return "".join([*parts, _escaped(text[end:], begins=not end)])


def _escaped(text: str, *, begins: bool) -> str:
    """No markup but the stars of a list; `begins`: whether the first line is whole."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        bullet = LISTED.match(line) if i or begins else None
        start = bullet.end() if bullet else 0
        lines[i] = line[:start] + MARKUP.sub(lambda m: "\\" + m[0], line[start:])
    return "\n".join(lines)
