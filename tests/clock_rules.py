"""Find what makes a test depend on the machine's speed: clocks in or feeding assertions, and sleeps that wait for something else."""

import ast
from collections.abc import Iterator

CLOCKS = {"perf_counter", "process_time", "thread_time", "monotonic"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
ARITHMETIC = {"min", "max", "sum", "abs", "round", "sorted", "median", "mean", "quantiles", "len", "any", "all"}
FOREVER_S = 60.0  # a sleep of this length stands for something that never ends

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""


def is_clock(node: ast.AST) -> bool:
    is_time = called(node) == "time" and isinstance(node, ast.Call) and ast.unparse(node.func) == "time.time"
    return called(node) in CLOCKS or is_time


def target_names(node: ast.AST) -> set[str]:
    """Names and attributes that an assignment, or the `append` of a list, changes."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.Call) and called(node) in ("append", "add") and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    else:
        return set()
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {ast.unparse(part.value if isinstance(part, ast.Subscript) else part) for part in parts}


def measures(node: ast.AST, tainted: set[str]) -> bool:
    """Whether a value is a clock's, or comes by arithmetic from one or from a tainted name."""
    if is_clock(node) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in tainted):
        return True
    if isinstance(node, ast.Lambda):
        return False
    if isinstance(node, ast.Call) and called(node) not in ARITHMETIC:
        return any(is_clock(child) for argument in node.args for child in ast.walk(argument)) and called(node) in ("append", "add")
    return any(measures(child, tainted) for child in ast.iter_child_nodes(node))


def tainted_names(function: Function) -> set[str]:
    """Names of a function that hold times of a clock."""
    tainted: set[str] = set()
    while True:
        found = set(tainted)
        for node in ast.walk(function):
            value = node if isinstance(node, ast.Call) else getattr(node, "value", None)
            if (names := target_names(node)) and isinstance(value, ast.AST):
                values = value.args if isinstance(value, ast.Call) and called(value) in ("append", "add") else [value]
                found |= names if any(measures(part, tainted) for part in values) else set()
        if found == tainted:
            return tainted
        tainted = found


def fails(statement: ast.stmt) -> bool:
    """Whether a statement fails a test by itself."""
    nodes = list(ast.walk(statement))
    return any(isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node) for node in nodes) or "fail" in map(called, nodes)


def verdicts(function: Function) -> Iterator[ast.expr]:
    """Conditions of assertions, and those under which a function fails by itself."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and any(map(fails, node.body))):
            yield node.test


def is_short_sleep(node: ast.AST) -> bool:
    """Whether a call sleeps for a while: neither one turn of the event loop, nor a time that stands for something that never ends."""
    if not isinstance(node, ast.Call) or called(node) != "sleep" or not node.args:
        return False
    seconds = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return not isinstance(seconds, int | float) or 0 < seconds < FOREVER_S


def violations(tree: ast.Module) -> list[int]:
    """Line numbers."""
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and is_short_sleep(node)}
    functions = {node: tainted_names(node) for node in ast.walk(tree) if isinstance(node, Function)}
    timers = {node.name for node, tainted in functions.items() for part in ast.walk(node) if is_return_of(part, tainted)}
    for function, tainted in functions.items():
        for condition in verdicts(function):
            uses_timer = not timers.isdisjoint(map(called, ast.walk(condition)))
            lines |= {condition.lineno} if uses_timer or measures(condition, tainted) else set()
    return sorted(lines)


def is_return_of(node: ast.AST, tainted: set[str]) -> bool:
    return isinstance(node, ast.Return) and node.value is not None and measures(node.value, tainted)
