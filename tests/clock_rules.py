"""Find what makes a test depend on the machine's speed: clocks where verdicts are made, and sleeps that wait for something else."""

import ast
from collections.abc import Iterator

CLOCKS = {"perf_counter", "process_time", "thread_time", "monotonic"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
FOREVER_S = 60.0  # a sleep of this length stands for something that never ends

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""


def is_clock(node: ast.AST) -> bool:
    return called(node) in CLOCKS or (isinstance(node, ast.Call) and ast.unparse(node.func) == "time.time")


def is_verdict(node: ast.AST) -> bool:
    """Whether a statement fails a test, or returns what may."""
    is_error = isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node)
    return is_error or isinstance(node, ast.Assert) or called(node) == "fail" or (isinstance(node, ast.Return) and node.value is not None)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function):
            yield from own_nodes(child)


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
    """Line numbers of short sleeps, and of clocks in functions that assert or return something."""
    virtual = {inner for node in ast.walk(tree) if is_virtual(node) for inner in ast.walk(node)}
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and is_short_sleep(node) and node not in virtual}
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        nodes = list(own_nodes(function))
        lines |= {node.lineno for node in nodes if isinstance(node, ast.expr) and is_clock(node)} if any(map(is_verdict, nodes)) else set()
    return sorted(lines)
