"""How hard the package is to read: decisions of each function, counted with what ruff's C901 leaves out.

A function begins with 1. Each `if`, `for`, `while`, `except`, `assert`, `case`, conditional expression, loop and
condition of a comprehension, and each further operand of `and` or `or` adds 1. Functions within it count too.

    python benchmarks/complexity.py            # functions above 15, and the totals
    python benchmarks/complexity.py --above 10
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hf_vit"
_DECISIONS = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case, ast.IfExp, ast.comprehension)


def complexity(function: ast.AST) -> int:
    """Count the decisions of a function, plus 1."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, _DECISIONS):
            count += 1
        if isinstance(node, ast.comprehension):
            count += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def is_multiple_assignment(node: ast.AST) -> bool:
    """Return whether a statement assigns several values to several names: `a, b = f(x), g(y)`."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def nodes_of_package() -> Iterator[tuple[Path, ast.AST]]:
    """Yield each node of each file of the package, with the file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(PACKAGE.parent), node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--above", type=int, default=15, help="list functions with more decisions (default 15)")
    arguments = parser.parse_args()
    functions = []
    totals = {"conditional expressions": 0, "multiple assignments": 0, "raise statements": 0}
    for path, node in nodes_of_package():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((complexity(node), f"{path}:{node.lineno} {node.name}"))
        totals["conditional expressions"] += isinstance(node, ast.IfExp)
        totals["multiple assignments"] += is_multiple_assignment(node)
        totals["raise statements"] += isinstance(node, ast.Raise)
    hard = sorted((one for one in functions if one[0] > arguments.above), reverse=True)
    for count, place in hard:
        print(f"{count:3}  {place}")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
    print(f"{len(hard)} of {len(functions):,} functions above {arguments.above}; {lines:,} lines")
    print(", ".join(f"{count} {name}" for name, count in totals.items()))


if __name__ == "__main__":
    main()
