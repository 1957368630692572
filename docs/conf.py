"""Sphinx settings; `make docs` builds."""

import importlib
import importlib.metadata
import os
import pathlib
import re
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from accessible import change_pages  # noqa: E402
from docstrings import as_rst, with_formulas  # noqa: E402
from other_libraries import DOCUMENTED, named_unions  # noqa: E402

project = "expertmesh"
author = "The expertmesh authors"
copyright = "The expertmesh authors; Apache License 2.0"
version = release = importlib.metadata.version("expertmesh-flax-moe")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"expertmesh {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
# Of both, text and background are at least 4.5 to 1, which the light theme's default is not.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["maxtext"]  # of expertmesh.maxtext; not installed here, so of no version
warnings.filterwarnings("ignore", "expertmesh.maxtext: maxtext should be")
maximum_signature_line_length = 72
python_use_unqualified_type_names = True
# Entries stand as they are written, "x, y" being one.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]

# The types of other libraries are links where their inventories can be read: DOCS_ONLINE=1, as on GitHub.
if os.environ.get("DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "jax": ("https://docs.jax.dev/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
    "linen": ("https://flax-linen.readthedocs.io/en/latest", None),
}
# A reference to a name of ours that is on no page is a warning. Types of others may have no link.
nitpicky = True
nitpick_ignore = [("py:class", "expertmesh.core.rule.Rule")]  # what an op's string says, parsed
nitpick_ignore_regex = [("py:.*", r"(?!expertmesh\.)[\w.]+")]


PUBLIC = {
    name: f"{module}.{name}"
    for module in ("expertmesh.flax_moe", "expertmesh.ep", "expertmesh.core")
    for name in importlib.import_module(module).__all__
}


def setup(app):
    def process(app, what, name, obj, options, lines):
        module = sys.modules.get(getattr(obj, "__module__", None))
        lines[:] = as_rst(with_formulas(lines, module and module.__doc__), PUBLIC)
        # An escaped space: Napoleon takes what stands before a property's first colon for its type.
        if what == "property":
            lines.insert(0, "\\ ")

    def skip(app, what, name, obj, skipped, options):
        """Fields are in the docstring: those of a NamedTuple ("Alias for field number 0"), and dtypes."""
        return True if type(obj).__name__ in ("_tuplegetter", "_ScalarMeta") else None

    def sign(app, what, name, obj, options, signature, returned):
        """Values as one would write them: `float32` for `<class 'jax.numpy.float32'>`."""
        named = re.compile(r"<(?:class|function) '?(?:[\w.]|<locals>)*?(\w+)(?:'| at \w+)>")
        other = re.compile(r"<(?:factory|[\w.]+ object at \w+)>")
        written = [
            text and named_unions(other.sub("...", named.sub(r"\1", text)))
            for text in (signature, returned)
        ]
        return tuple(written)

    def find(app, env, node, contnode):
        """Other libraries' pages are searched for the name that they have there; intersphinx comes next."""
        node["reftarget"] = DOCUMENTED.get(node["reftarget"], node["reftarget"])

    def finish(app, exception):
        if exception is None and app.builder.format == "html":
            change_pages(pathlib.Path(app.outdir))

    app.connect("build-finished", finish)
    app.connect("missing-reference", find, priority=400)  # before intersphinx's 500
    app.connect("autodoc-process-signature", sign)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", process, priority=400)  # before Napoleon's 500
