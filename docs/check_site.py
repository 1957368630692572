"""Checks the built site: every local link and anchor leads somewhere, and the search finds what people look for.

python docs/check_site.py FOLDER      exit status 1, and a line for each fault
"""

import argparse
import html.parser
import json
import pathlib
import sys
import urllib.parse
from collections.abc import Iterator

from sphinx.search import languages

# Words that are typed together, and a page that must be among what is found.
SEARCHES = {
    "fp8": "quantization",
    "aux loss": "flax_moe",
    "MaxText": "maxtext",
    "LoRA": "fine-tuning",
    "expert parallelism": "expert-parallelism",
    "NVLink": "ep",
}
ATTRIBUTES = {"a": "href", "img": "src", "link": "href", "script": "src"}


class Page(html.parser.HTMLParser):
    """What a page links to, and where in it one can link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if anchor := found.get("id") or (found.get("name") if tag == "a" else None):
            self.anchors.add(anchor)
        if link := found.get(ATTRIBUTES.get(tag, "")):
            self.links.append(link)


def broken_links(site: pathlib.Path) -> Iterator[str]:
    """A line for each local link to a file or an anchor that is not there."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = urllib.parse.unquote(parts.path)
            target = (path.parent / name).resolve() if name else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                yield f"{path.relative_to(site.resolve())}: no file {link}"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{path.relative_to(site.resolve())}: no anchor {link}"


def found_by(words: str, index: dict) -> set[str]:
    """The pages that have all the words, in their text or their title, as the site's search finds them."""
    stem = languages["en"]({}).stem
    pages = None
    for word in words.lower().split():
        numbers = set()
        for terms in (index["terms"], index["titleterms"]):
            at = terms.get(stem(word), [])
            numbers |= set(at if isinstance(at, list) else [at])
        pages = numbers if pages is None else pages & numbers
    return {index["docnames"][number] for number in pages or ()}


def lost_searches(site: pathlib.Path) -> Iterator[str]:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    for words, page in SEARCHES.items():
        if page not in found_by(words, index):
            yield f"search: {words} must find {page}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    site = parser.parse_args().folder
    faults = [*broken_links(site), *lost_searches(site)]
    print("\n".join(faults) or f"{site}: links and searches lead somewhere")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
