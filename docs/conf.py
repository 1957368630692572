"""Sphinx settings; `make docs` builds."""

import re
import warnings

project = "expertmesh"
author = "the expertmesh authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "expertmesh"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["maxtext"]  # of expertmesh.maxtext; not installed here, so of no version
warnings.filterwarnings("ignore", "expertmesh.maxtext: maxtext should be")


def plain_docstring(app, what, name, obj, options, lines):
    """Keeps docstrings as they are written: a sentence, then preformatted text.

    They hold formulas and array shapes, which reStructuredText would read as markup.
    """
    end = lines.index("") if "" in lines else len(lines)
    code = re.split(r"`+", " ".join(lines[:end]))
    text = [re.sub(r"([*|_\\:<])", r"\\\1", part) for part in code]
    text[1::2] = [f"``{part}``" for part in code[1::2]]
    rest = lines[end:]
    while rest and not rest[0].strip():
        rest.pop(0)
    block = ["", ".. code-block:: none", "", *(f"   {line}" for line in rest)] if rest else []
    lines[:] = ["".join(text), *block, ""]


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstring)
