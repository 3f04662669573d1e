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

from tests.clock_rules import violations

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
# The last three are plain Python: api and processor read a folder, count tokens and look at JPEGs by the code of the workers.
SERVER_MAY_IMPORT = {
    "engine.wire",
    "engine.launch.adapters",
    "engine.launch.config",
    "engine.launch.flags",
    "engine.launch.child",
    "engine.grammar.client",
    "engine.grammar.schema",
    "engine.guests",
    "engine.plain_jpeg",
    "models.config",
    "models.media.geometry",
    "models.media.video",
}
ENVIRONMENT_ALLOWED = {"engine/launch/config.py"}
BROAD_EXCEPT_ALLOWED = {
    "server/http/reply.py": "a request's boundary: an exception in the handling of an event ends its stream with an error",
    "server/processor/output.py": "a request's boundary: an exception in the conversion of an output becomes its client's error",
    "server/http/app.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/intake.py": "a request's boundary: becomes its client's error, and is logged if it is no client's fault",
    "server/processor/main.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/media/pixels.py": "the boundary to image codecs, which raise anything: becomes the client's 422, the cause is kept",
}
# Lines of tests with a clock or a sleep, each with its reason: at most five.
CLOCKS_ALLOWED = {
    "tests/gpu/test_memory.py: deadline = time.monotonic() + SECONDS": "the length of a load",
    "tests/gpu/test_memory.py: await asyncio.sleep(rng.random())": "a client of a load leaves at a random time; no verdict depends on it",
    "tests/gpu/test_memory.py: await asyncio.sleep(0.05)": "the interval at which free memory is sampled during a load",
    "tests/unit/server/in_process.py: await asyncio.sleep(1e-3)": "in a virtual loop, where it advances the clock",
    "tests/unit/server/test_bodies.py: await asyncio.sleep(pause)": "in a virtual loop, where it advances the clock",
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
    """Modules of this project that a file imports, anywhere in it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = not (ROOT / (node.module.replace(".", "/") + ".py")).exists()
            yield from (f"{node.module}.{alias.name}" if is_package else node.module for alias in node.names)


def test_models_import_neither_engine_nor_server() -> None:
    for path in (ROOT / "models").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("engine", "server")], relative(path)


def test_the_server_imports_only_what_it_may() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        foreign = {name for name in imports(path) if name.split(".")[0] in ("engine", "models")}
        bad = {name for name in foreign if not any(name == allowed or name.startswith(allowed + ".") for allowed in SERVER_MAY_IMPORT)}
        assert not bad, f"{relative(path)} imports {bad}"


def test_messages_import_no_process() -> None:
    for path in (ROOT / "engine" / "wire").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith(("engine.", "server.")) and not name.startswith("engine.wire.")], path


def test_only_the_launcher_sees_everything() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        if relative(path) != "engine/serve.py":
            assert not [name for name in imports(path) if name.split(".")[0] == "server"], relative(path)


@pytest.mark.parametrize("module", ["server.http.app", "server.processor.main", "engine.scheduler.main", "engine.serve"])
def test_no_torch_outside_the_workers(module: str) -> None:
    """It takes 2-3 s and 330 MB."""
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
    """Red for utils.py, `global`, getattr with a default, and environment variables outside the configuration."""
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


def test_nothing_imports_torchvision_or_flashinfer_at_the_top_of_a_shared_module() -> None:
    """A machine without a GPU could not import the engine."""
    cuda_only = re.compile(r"(_cuda|kernels/(triton|hopper)/)")
    for path in SOURCES:
        for node in tree_of(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & {"torchvision", "flashinfer", "triton", "nvidia"}:
                assert cuda_only.search(relative(path)), relative(path)


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_no_import_circles() -> None:
    edges = {module_of(path): {name for name in imports(path)} for path in SOURCES}
    graph = {module: {name for name in names if name in edges and name != module} for module, names in edges.items()}
    while leaves := {module for module, names in graph.items() if not names}:
        graph = {module: names - leaves for module, names in graph.items() if module not in leaves}
    assert not graph, f"in or above a circle: {sorted(graph)}"


def test_the_engine_names_no_architecture() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        assert not re.search(r"Qwen3VL\b|qwen3_vl\b|Cosmos", path.read_text()), relative(path)


# Words of an annex, its own files, and the number of other files with these words, which must only decrease.
ANNEXES = {
    "drafting": (r"draft|\bmtp\b", r"(launch|scheduler)/drafts|(worker|decoders|layers)/head|wire/details", 5),
    "video": (r"video", r"video", 8),
    "grammars": (r"grammar", r"grammar", 8),
    "LoRA": (r"lora|adapter", r"lora/|adapters\.py", 18),
    "pooling": (r"pool(ing|ed)|rerank", r"pooling", 6),
    "prompt log-probabilities": (r"prompt_?logprobs", r"sampling/prompt|/scores", 6),
    "Anthropic's dialect": (r"anthropic", r"anthropic", 1),
    "Responses": (r"/v1/responses|dialects\.responses", r"responses", 0),
    "SGLang's dialect": (r"sglang|dialects\.generate", r"generate|updates", 2),
    "weight updates": (r"weight.updates?|weight_version|\bupdates\.|parked", r"updates?[/.]", 6),
}


def test_annexes_do_not_spread() -> None:
    texts = {relative(path): path.read_text(encoding="utf-8") for path in SOURCES if not re.search("/(demo|kernels)/", str(path))}
    texts = {name: text for name, text in texts.items() if not name.startswith("bench/")}
    for annex, (words, own, most) in ANNEXES.items():
        others = [name for name, text in texts.items() if re.search(words, text, re.IGNORECASE) and not re.search(own, name)]
        assert len(others) <= most, f"{annex} is in {len(others)} files besides its own, {most} before: {others}"


def test_the_scheduler_has_no_number_of_a_gpu() -> None:
    for path in (ROOT / "engine" / "scheduler").rglob("*.py"):
        assert not re.search(r"\bH[12]00\b|[Hh]opper", path.read_text()), relative(path)
        assert not [name for name in imports(path) if name.startswith("models.kernels") and ".step_sizes" not in name], relative(path)


def test_no_verdict_depends_on_the_machines_speed() -> None:
    """Assertions with a clock or its time, and sleeps that wait for something: see `eventually`."""
    found = {}
    for path in TEST_SOURCES:
        source = path.read_text(encoding="utf-8").splitlines()
        found |= {f"{relative(path)}: {source[line - 1].strip()}": f"{relative(path)}:{line}" for line in violations(tree_of(path))}
    assert not [place for line, place in found.items() if line not in CLOCKS_ALLOWED and not place.startswith("tests/eventually.py")]
    assert CLOCKS_ALLOWED.keys() <= found.keys(), "an entry that is not needed"
    assert len(CLOCKS_ALLOWED) <= 5


def test_what_counts_as_a_verdict_by_speed() -> None:
    bad = (
        "assert perf_counter() - started < 1",
        "times.append(time.time())\n    assert times[1] - times[0] < 1",
        "if time.monotonic() > deadline:\n        raise AssertionError",
        "def slow():\n        return time.process_time()\n    assert slow() < 1",
        "time.sleep(0.5)",
        "asyncio.sleep(delay)",
    )
    good = ("times.append(time.time())", "asyncio.sleep(0)", "asyncio.sleep(3600)", "assert fake.time() == 3")
    assert [code for code in bad if not violations(ast.parse(f"def test():\n    {code}"))] == []
    assert [code for code in good if violations(ast.parse(f"def test():\n    {code}"))] == []
