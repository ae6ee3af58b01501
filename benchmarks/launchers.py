"""Every kind of training run with every launch template, on CPU processes over gloo, compared with one process.

    python benchmarks/launchers.py --write

The runs are those of tests/training/matrix.py, which test_matrix.py holds to a tolerance. Prints the difference
of the final weights from those of one process; --write puts the table into docs/hardware.md. Takes about ten minutes on
two cores.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from common import HERE, table, update_section

sys.path.insert(0, str(HERE.parent))
from tests.training import matrix

PRECISIONS = {"float32": "no", "bfloat16": "bf16"}


def measure(work: Path) -> str:
    """Train all kinds, and return the table of differences."""
    rows = []
    for name, precision in PRECISIONS.items():
        for launcher in matrix.LAUNCHERS:
            outputs = {kind: matrix.output_of(launcher, precision, kind, work) for kind in matrix.KINDS}
            if missing := [kind for kind, output in outputs.items() if not output.exists()]:
                print(f"{launcher}, {name}", file=sys.stderr, flush=True)
                matrix.train(launcher, precision, missing, work)
            if launcher != matrix.ONE:
                cells = [f"{matrix.difference(launcher, precision, kind, work):.0e}" for kind in matrix.KINDS]
                rows.append([f"{launcher}, {name}", *cells])
    columns = [*zip(*rows, strict=True)]  # a row for each kind: there are more kinds than launchers
    kinds = [[kind, *cells] for kind, cells in zip(matrix.KINDS, columns[1:], strict=True)]
    return table(["", *columns[0]], kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/hardware.md")
    parser.add_argument("--work", type=Path, help="folder of runs, which are not repeated (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        if not (work / "model").exists():
            matrix.write_inputs(work)
        text = f"{measure(work)}\n\nRun with torch {torch.__version__}, on CPU processes over gloo."
    print(text)
    if arguments.write:
        update_section(HERE.parent / "docs" / "hardware.md", "launchers", text)


if __name__ == "__main__":
    main()
