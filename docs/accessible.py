"""What pages lack for those who read by keyboard, by ear or on a phone: levels of headings, focus, whole pictures."""

import pathlib
import re
from collections.abc import Callable


def _breaking(code: re.Match[str]) -> str:
    return code[1] + re.sub(r"(?<=\w[._])(?=\w)", "<wbr>", code[2]) + code[3]


# Each is applied once: what it writes does not match again.
CHANGES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # Captions of the tree of pages.
    (re.compile(r'role="heading">'), 'role="heading" aria-level="2">'),
    # Tables scroll sideways on a narrow screen.
    (re.compile(r"<pre>"), '<pre tabindex="0">'),
    (
        re.compile(r'<div class="(table-wrapper[^"]*)">'),
        r'<div class="\1" tabindex="0" role="region" aria-label="Table">',
    ),
    # A long name may go on in the next line, behind a dot or an underscore.
    (re.compile(r'(<span class="pre">)([^<]*)(</span>)'), _breaking),
    # A picture is a link to itself in its own size.
    (re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)'), r'<p><a href="\2">\1</a>'),
    # The parameters of a signature, one a line, are no definitions.
    (re.compile(r"<dl>(?=\s*<dd>)"), '<dl role="none">'),
)


def accessible(text: str) -> str:
    """A page with what it lacks; one that has it is the same."""
    for pattern, replacement in CHANGES:
        text = pattern.sub(replacement, text)
    return text


def change_pages(folder: pathlib.Path) -> None:
    """Writes those pages of a built site that lack something."""
    for path in folder.rglob("*.html"):
        old = path.read_text()
        if (new := accessible(old)) != old:
            path.write_text(new)
