"""Resolves the CUDA extras of each distribution for Linux, without installing them.

    ci/resolve_extras.py             to the pins of ci/constraints.txt alone, and without them
    ci/resolve_extras.py --tested    without pins to the newest tested versions of ci/matrix.toml

Without pins an index may already have a later patch than was tested; only --tested fails for that.
"""

import argparse
import re
import subprocess
import sys
import tomllib

import matrix

PINS = matrix.ROOT / "ci/constraints.txt"
NEWEST = {name: versions[-1] for name, versions in matrix.VERSIONS.items() if name != "nccl"}


def extras() -> list[tuple[str, str]]:
    """Each package with each of its CUDA extras."""
    found = []
    for package in matrix.MATRIX["axes"]["package"]:
        text = (matrix.ROOT / "packages" / package / "pyproject.toml").read_text()
        names = tomllib.loads(text)["project"]["optional-dependencies"]
        found += [(package, name) for name in names if name.startswith("cuda")]
    return found


def resolve(package: str, extra: str, *options: str) -> dict[str, str]:
    """The version of each distribution."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate"]
    command += ["--universal", "--python-version", "3.12", "--extra", extra, *options]
    command += [f"packages/{package}/pyproject.toml"]
    done = subprocess.run(command, cwd=matrix.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return pins(done.stdout)


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ ;\n]+)", text, re.MULTILINE))


def brought(extra: str, newest: dict[str, str]) -> dict[str, str]:
    """What an extra must bring: its versions, "" for any."""
    jax = {f"jax-{extra}-plugin": newest["jax"], f"jax-{extra}-pjrt": newest["jax"]}
    return newest | {"jaxlib": newest["jax"]} | jax | {f"nvidia-nccl-{extra.replace('da', '')}": ""}


def fits(got: str, want: str, tested: bool) -> bool:
    """Whether a version is the newest tested, or a later patch of it where that counts too."""
    if tested or not want:
        return got == want or not want
    numbers = [[int(part) for part in version.split(".")] for version in (got, want)]
    return numbers[0] >= numbers[1] and numbers[0][:2] == numbers[1][:2]


def problems(package: str, extra: str, tested: bool) -> list[str]:
    free = resolve(package, extra)
    found = []
    for name, want in brought(extra, NEWEST).items():
        got = free.get(name)
        if got is None or not fits(got, want, tested):
            found.append(f"without pins {name} must be {want or 'there'}; got {name}={got}")
        elif want and got != want:
            print(f"{package}[{extra}]: {name} {got} is later than what was tested, {want}")
    if tested:
        return found
    pinned, every = resolve(package, extra, "-c", str(PINS)), pins(PINS.read_text())
    oldest = {name: matrix.VERSIONS[name][0] for name in NEWEST}
    for name, want in brought(extra, oldest).items():
        if (got := pinned.get(name)) is None or not fits(got, want, tested=True):
            found.append(f"the pins must have {name} {want}; got {name}={got}")
    loose = sorted(pinned.keys() - every.keys())
    found += [f"{name} must have a pin; run `make constraints`" for name in loose]
    print(f"{package}[{extra}]: {len(pinned)} distributions, {len(loose)} of them without a pin")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tested", action="store_true", help="without pins, to tested versions")
    options = parser.parse_args()
    found = [
        f"{package}[{extra}]: {problem}"
        for package, extra in extras()
        for problem in problems(package, extra, options.tested)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
