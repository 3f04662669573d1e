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


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Pairs of target and value; what is appended to a list is a value of the list."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Call) and called(node) in ("append", "add") and isinstance(node.func, ast.Attribute):
        pairs = [(node.func.value, argument) for argument in node.args]
    else:
        return []
    found = []
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            found += list(zip(target.elts, value.elts, strict=True))
        else:
            found += [(part, value) for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return found


def measures(node: ast.AST, tainted: set[str]) -> bool:
    """Whether a value is a clock's, or comes by arithmetic from one or from a tainted name."""
    if is_clock(node) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in tainted):
        return True
    if isinstance(node, ast.Lambda) or (isinstance(node, ast.Call) and called(node) not in ARITHMETIC):
        return False
    return any(measures(child, tainted) for child in ast.iter_child_nodes(node))


def tainted_names(function: Function) -> set[str]:
    """Names of a function that hold times of a clock."""
    tainted = set()
    pairs = [pair for node in ast.walk(function) for pair in assignments(node)]
    while True:
        targets = [target for target, value in pairs if measures(value, tainted)]
        names = {ast.unparse(target.value if isinstance(target, ast.Subscript) else target) for target in targets}
        if names <= tainted:
            return tainted
        tainted |= names


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
    """Neither one turn of the event loop, nor a time that stands for something that never ends."""
    if not isinstance(node, ast.Call) or called(node) != "sleep" or not node.args:
        return False
    seconds = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return not isinstance(seconds, int | float) or 0 < seconds < FOREVER_S


def is_virtual(node: ast.AST) -> bool:
    """Whether a test runs in an event loop with a clock of its own, which sleeps advance."""
    return isinstance(node, Function) and any(isinstance(mark, ast.Name) and mark.id == "virtual" for mark in node.decorator_list)


def violations(tree: ast.Module) -> list[int]:
    """Line numbers."""
    virtual = {inner for node in ast.walk(tree) if is_virtual(node) for inner in ast.walk(node)}
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and is_short_sleep(node) and node not in virtual}
    functions = {node: tainted_names(node) for node in ast.walk(tree) if isinstance(node, Function)}
    timers = {node.name for node, tainted in functions.items() for part in ast.walk(node) if is_return_of(part, tainted)}
    for function, tainted in functions.items():
        for condition in verdicts(function):
            uses_timer = not timers.isdisjoint(map(called, ast.walk(condition)))
            lines |= {condition.lineno} if uses_timer or measures(condition, tainted) else set()
    return sorted(lines)


def is_return_of(node: ast.AST, tainted: set[str]) -> bool:
    return isinstance(node, ast.Return) and node.value is not None and measures(node.value, tainted)
