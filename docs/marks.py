"""Between its marks stands what a script of this folder writes into a page."""

END = "<!-- end -->"


def filled(text: str, begin: str, content: str) -> str:
    """The text with what stands between `begin` and END replaced.

    Raises:
      ValueError: the text lacks one of the marks.
    """
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(
            f"marks: a page must have the line {begin} and behind it {END}; got a page without; put them in"
        )
    return f"{before}{begin}\n\n{content}\n\n{END}{after}"
