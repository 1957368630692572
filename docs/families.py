"""Writes the table of model families of docs/checkpoints.md, from the rows of `families.py` and docs/families.json.

python docs/families.py            write it
python docs/families.py --check    exit status 1 if the page is not what would be written

The CI cell `transformers` measures the errors: EXPERTMESH_FAMILIES=docs/families.json pytest -m transformers ...
"""

import argparse
import dataclasses
import json
import pathlib
import runpy
import sys

from marks import filled

from expertmesh.core import Activation
from expertmesh.flax_moe import MoEConfig, hf
from expertmesh.flax_moe.models.families import FAMILIES

DOCS = pathlib.Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "tests/flax_moe/hf_oracle.py"
BEGIN = "<!-- docs/families.py -->"
SIZES = {"num_experts", "top_k", "expert_dim"}
# What a config's numbers decide is named without a value.
BY_CONFIG = {"num_groups", "group_topk", "shared_expert_dim", "scaling_factor"}


def shown(value: object) -> str:
    if not isinstance(value, Activation):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    fields = ", ".join(
        f"{k}={shown(v)}" for k, v in value.to_dict().items() if k not in ("gated", "limit")
    )
    return f"Activation({fields}, limit=swiglu_limit)"


def options(hf_config: dict) -> str:
    """The fields of MoEConfig that are not the defaults."""
    config = hf.moe_config(hf_config)
    said = []
    for field in dataclasses.fields(MoEConfig):
        value = getattr(config, field.name)
        if field.name not in SIZES and value != field.default:
            said.append(field.name if field.name in BY_CONFIG else f"{field.name}={shown(value)}")
    return f"`{', '.join(said)}`" if said else "the defaults"


def errors(measured: dict, model_type: str) -> str:
    if model_type not in measured:
        return "| not in `transformers` | |"
    return "| {y:.0e} | {gradients:.0e} |".format(**measured[model_type])


def table(measured: dict) -> str:
    """A row for each family, of its first example; worst errors of all examples."""
    examples: dict[str, dict] = {}
    for hf_config in runpy.run_path(str(EXAMPLES))["MODELS"].values():
        examples.setdefault(hf_config["model_type"], hf_config)
    lines = ["| family | `model_type` | options of the block | error of y | of gradients |"]
    lines += ["|---|---|---|---|---|"]
    for model_type, family in FAMILIES.items():
        row = f"| {family.title} | `{model_type}` | {options(examples[model_type])} "
        lines.append(row + errors(measured, model_type))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    page = DOCS / "checkpoints.md"
    old = page.read_text()
    new = filled(old, BEGIN, table(json.loads((DOCS / "families.json").read_text())))
    if check:
        return int(new != old)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
