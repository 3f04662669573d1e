"""The import rule and the house numbers, so that they hold next year too. An exception stands here with its reason, or not at all."""

import ast
import functools
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "server", "models", "bench")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEST_SOURCES = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 10
MAX_P90_FUNCTION_LINES = 30
MAX_PUBLIC_METHODS = 15
# Packages in order: a module may import its own package and those that its line names. Entry points may import everything.
MAY_IMPORT = {
    "engine.wire": (),
    "engine.grammar": ("engine.wire",),
    "engine.scheduler": ("engine.wire",),
    "engine.worker": ("engine.wire", "engine.grammar"),
    "engine.launch": ("engine.wire",),
    "engine.llm": ("engine.wire", "engine.launch"),
    "server": ("engine.wire",),
    "server.api.http": ("engine.wire", "server"),
    "server.api.schema": ("engine.wire", "server", "server.api.http"),
    "server.api.chat": ("engine.wire", "server", "server.api.http", "server.api.schema"),
    "server.api.dialects": ("engine.wire", "server", "server.api.http", "server.api.schema", "server.api.chat"),
    "server.api.page": ("server.api.chat",),
    "server.processor": ("engine.wire", "server"),
    "models": (),
}
ENTRY_POINTS = ("engine.serve", "engine.launch.replicas", "server.api.main", "server.proxy", "bench")
PLAIN_MODELS = ("models.config", "models.media")  # they import no torch
ENVIRONMENT_ALLOWED = {"engine/wire/config.py", "models/kernels/hopper/build.py"}  # the latter is a command of its own
BROAD_EXCEPT_ALLOWED = {
    "server/api/http/reply.py": "a request's boundary: an exception in the handling of an event ends its stream with an error",
    "server/processor/output.py": "a request's boundary: an exception in the conversion of an output becomes its client's error",
    "server/api/main.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/intake.py": "a request's boundary: becomes its client's error, and is logged if it is no client's fault",
    "server/processor/main.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/media/decoder.py": "the boundary to image codecs, which raise anything: becomes the client's 422, the cause is kept",
}
# Files of tests with a clock or a sleep. In a `virtual` event loop a sleep advances the loop's own clock.
CLOCK = re.compile(r"(?<!def )\b(?:(?:perf_counter|process_time|thread_time|monotonic)(?:_ns)?|time\.time|sleep)\((?!0\)|\d{4})")
CLOCKS_ALLOWED = {
    "tests/eventually.py": "the hang guard",
    "tests/unit/server/stack.py": "heartbeats and times of the stand-in for the scheduler",
    "tests/gpu/test_memory.py": "the length of a load",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = not (ROOT / (node.module.replace(".", "/") + ".py")).exists()
            yield from (f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names)


def test_packages_import_in_one_direction() -> None:
    def package_of(module: str) -> str:
        return max((package for package in MAY_IMPORT if f"{module}.".startswith(f"{package}.")), key=len)

    for path in SOURCES:
        module = module_of(path)
        if module.startswith(ENTRY_POINTS) or module in ("engine", "models"):
            continue
        package = package_of(module)
        for name in (name for name in imports(path) if name.startswith(("engine.", "server.", "models."))):
            if name.startswith("models.") and (package.startswith("engine.") or name.startswith(PLAIN_MODELS)):
                continue
            assert package_of(name) in (package, *MAY_IMPORT[package]), f"{relative(path)} imports {name}"


@pytest.mark.parametrize("module", ["server.api.main", "server.processor.main", "engine.scheduler.main", "engine.serve"])
def test_no_torch_outside_the_workers(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_are_short() -> None:
    for paths, limit in ((SOURCES, MAX_FILE_LINES), (TEST_SOURCES, MAX_TEST_FILE_LINES)):
        long = {relative(path): n for path in paths if (n := len(path.read_text().splitlines())) > limit}
        assert not long


def test_functions_are_short() -> None:
    lengths = {f"{relative(path)}:{node.lineno} {node.name}": length(node) for path, node in functions()}  # names may come twice
    assert not {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN_FUNCTION_LINES
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= MAX_P90_FUNCTION_LINES


def test_classes_are_small() -> None:
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                public = [m.name for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and not m.name.startswith("_")]
                assert len(public) <= MAX_PUBLIC_METHODS, f"{relative(path)}:{node.name}"


def test_every_signature_is_typed_and_every_module_documented() -> None:
    for path in SOURCES:
        source = path.read_text()
        assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{relative(path)} has no docstring"
    for path, node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not untyped and (node.returns is not None or node.name == "__init__"), f"{relative(path)}:{node.name}"


def test_no_grab_bags_and_no_hidden_state() -> None:
    for path in SOURCES:
        assert path.name not in ("utils.py", "helpers.py", "common.py"), relative(path)
        for node in ast.walk(tree_of(path)):
            assert not isinstance(node, ast.Global), f"{relative(path)} uses global"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3:
                raise AssertionError(f"{relative(path)}:{node.lineno} getattr with a default")
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                assert relative(path) in ENVIRONMENT_ALLOWED, f"{relative(path)}:{node.lineno} reads the environment"


def test_broad_excepts_stand_at_a_boundary() -> None:
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
                assert not broad or relative(path) in BROAD_EXCEPT_ALLOWED, f"{relative(path)}:{node.lineno}"


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_no_import_circles() -> None:
    edges = {module_of(path): {name for name in imports(path)} for path in SOURCES}
    graph = {module: {name for name in names if name in edges and name != module} for module, names in edges.items()}
    while leaves := {module for module, names in graph.items() if not names}:
        graph = {module: names - leaves for module, names in graph.items() if module not in leaves}
    assert not graph, f"in or above a circle: {sorted(graph)}"


def test_no_verdict_depends_on_the_machines_speed() -> None:
    """Wait for conditions by `tests/eventually.py`."""
    sources = {relative(path): path.read_text(encoding="utf-8") for path in TEST_SOURCES if path != Path(__file__)}
    found = {name for name, text in sources.items() if CLOCK.search(text) and "@virtual" not in text and "VirtualLoop" not in text}
    assert found == CLOCKS_ALLOWED.keys()
