"""Runs the benchmarks of this folder: `python -m benchmarks [NAME...] [--out FOLDER]`."""

import argparse
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def main() -> int:
    runnable = [p.stem for p in sorted(HERE.glob("*.py")) if "def main(" in p.read_text()]
    names = [name for name in runnable if not name.startswith("_")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(names)}")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {names}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.names or names:
        result = options.out / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(result)]
        print("+", *command[1:], flush=True)
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"results are in {options.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
