"""Who changes what: the policy decides, the core follows the life of requests, the state changes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine.scheduler

FOLDER = Path(engine.scheduler.__file__).parent
CHANGES = {"append", "extend", "insert", "remove", "pop", "add", "discard", "clear", "update", "popleft", "appendleft", "setdefault"}


def changed(tree: ast.Module) -> Iterator[str]:
    """What assignments and the methods of collections change, as it stands in the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else node.targets
            flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
            yield from (ast.unparse(part) for part in flat if isinstance(part, ast.Attribute | ast.Subscript))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield ast.unparse(node.func.value)


@pytest.mark.parametrize("module", ["policy", "core", "budget", "main"])
def test_only_the_state_changes_what_all_decide_on(module: str) -> None:
    found = set(changed(ast.parse((FOLDER / f"{module}.py").read_text())))
    owners = ("request.", "victim.", "other.", "state.", "self.state.")
    theirs = {text for text in found if text.startswith(owners) and "stages" not in text}
    assert not theirs - {"self.state.wanted"}, "`take_outputs` alone hands over what has gathered"
