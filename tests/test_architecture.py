"""The import rule and the house numbers, so that they hold next year too. An exception stands here with its reason, or not at all."""

import ast
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
MAX_CHARACTERS = {  # of a room without those below it; a change that adds a capability raises its room's number and says why
    # 13,500 for the flags of vLLM and SGLang; 1,500 for --draft; 1,200 for stored responses and token ids; 2,500 for hosted.py; videos
    # 2,600: helpers that fork and clients that take turns, from engine/grammar; --trust-request-chat-template
    # text models: no image cache
    "engine": 146_000,  # 900: what a head and drafts of rows with states take of memory
    "engine/llm": 28_500,  # the engine within a Python program
    "engine/grammar": 16_100,  # Lark, as outlines and guidance write it: 2,500
    # 200: cached prompts start over several plans
    # 900: blocks behind rows for a head's guesses; 800: snapshots keep to their share, and lie where the next turn finds them
    # 1,500: a prompt is one step with its snapshots; 900, 500, 200, 1,200 below: the same
    "engine/scheduler": 91_500,
    "engine/scheduler/drafts": 25_400,  # guesses without a model: what stood before, kept, found and offered; 1,800: those of a head
    # 300: a backend's transfers
    "engine/worker": 143_200,  # 9,900: rows of several tokens, drafts are verified; 9,000: the model's own head behind a step
    "server": 27_100,
    # Videos 6,500: parts of content, fields of vLLM and SGLang, blocks of two more dialects. Custom tools and efforts of three dialects
    # 13,000, stored responses 9,500, token ids 3,500, SGLang's dialect 12,000, errors 1,000.
    "server/api": 167_000,
    "server/http": 113_900,  # 3,500: codes of errors, token ids, longer bodies; 3,400: what we count under the names of vLLM
    # 37,000 for videos: files by PyAV in processes of their own, lists of frames, tables of known pairs; 3,600 for token ids, the prompt's
    # log-probabilities and truncated prompts; 1,800: what is told of tokens waits for their text, and ends with it; 1,000:
    # a `uuid` stays with its content; 7,900: templates of requests, in a process of their own.
    # 600: frames are resized while others are decoded
    # 700 for text models: images are refused, parts of text are joined, a token before a text
    "server/processor": 178_200,
    # 600: copies of a step by kernels, 12 % of 2B's time per token
    # 1,900: the head of a model, drafts of rows with states; Qwen3.5's settings, its file; video; 5,000 for videos: the formulas of frames,
    # sizes and times, and their settings
    # 3,900 for text models: the decoder without a tower, what their config.json leaves out, llama3
    # 500: guesses from a float8 output matrix
    "models": 88_400,
    "models/attention": 9_100,
    # text models: heads without norms, frequencies of llama3
    "models/layers": 42_100,  # a head for drafts, Gated DeltaNet, gates, a shared expert
    "models/vision": 29_900,  # 4,300: images over all ranks; 4,300: images over all ranks; 600: frame pairs
    # text models: heads without norms
    "models/backends": 20_400,  # the delta rule's Protocol, with drafts that may be refused: 500
    # text models: the same
    "models/backends/torch": 25_800,  # the delta rule; 600: attention into memory that it has
    "models/backends/portable": 140_900,  # the delta rule's kernels; 600: they begin early; 500: few tokens of a small matrix
    "models/backends/hopper": 133_300,  # 1,300: float8 products of a token near the memory's speed, and parts of four rows merged at once
}

# The last three are plain Python: api and processor read a folder, count tokens and look at JPEGs by the code of the workers.
SERVER_MAY_IMPORT = {
    "engine.config",
    "engine.flags",
    "engine.messages",
    "engine.stats",
    "engine.params",
    "engine.grammar.client",
    "engine.grammar.schema",
    "engine.ipc",
    "engine.helper",
    "engine.arena",
    "engine.plain_jpeg",
    "models.config",
    "models.geometry",
    "models.video",
}
COMPOSITION_ROOTS = {"engine/serve.py", "engine/hosted.py", "engine/llm/session.py"}  # the last two have the api in the caller's process
ENVIRONMENT_ALLOWED = {"engine/config.py"}
GETATTR_ALLOWED = {"models/config.py"}
BROAD_EXCEPT_ALLOWED = {
    "engine/hosted.py": "the process's boundary: what was started is stopped, and the cause is raised again",
    "server/http/app.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/intake.py": "a request's boundary: becomes its client's error, and is logged if it is no client's fault",
    "server/processor/main.py": "the process's boundary: told to the launcher and raised again",
    "server/processor/pixels.py": "the boundary to image codecs, which raise anything: becomes the client's 422, the cause is kept",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    """Red if architecture code learns of processes."""
    for path in (ROOT / "models").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in ("engine", "server")], relative(path)


def test_the_server_imports_only_what_it_may() -> None:
    """Red if the server reaches into the engine or the model."""
    for path in (ROOT / "server").rglob("*.py"):
        foreign = {name for name in imports(path) if name.split(".")[0] in ("engine", "models")}
        bad = {name for name in foreign if not any(name == allowed or name.startswith(allowed + ".") for allowed in SERVER_MAY_IMPORT)}
        assert not bad, f"{relative(path)} imports {bad}"


def test_only_the_launcher_sees_everything() -> None:
    """Red if an engine module other than the composition roots imports the server."""
    for path in (ROOT / "engine").rglob("*.py"):
        if relative(path) not in COMPOSITION_ROOTS:
            assert not [name for name in imports(path) if name.split(".")[0] == "server"], relative(path)


@pytest.mark.parametrize("module", ["server.http.app", "server.processor.main", "engine.scheduler.main", "engine.serve"])
def test_no_torch_outside_the_workers(module: str) -> None:
    """Red if a process that must start fast and stay small imports torch (2-3 s and 330 MB)."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_are_short() -> None:
    """Red if a file outgrows one reading."""
    for paths, limit in ((SOURCES, MAX_FILE_LINES), (TEST_SOURCES, MAX_TEST_FILE_LINES)):
        long = {relative(path): n for path in paths if (n := len(path.read_text().splitlines())) > limit}
        assert not long


def test_rooms_stay_small() -> None:
    """Red if a room grows by more than 5 % unnoticed."""
    found = dict.fromkeys(MAX_CHARACTERS, 0)
    for package in ("engine", "server", "models"):
        for path in (path for ending in ("py", "cu", "cuh") for path in (ROOT / package).rglob(f"*.{ending}")):
            name = relative(path)
            if not name.startswith(("models/demo/", "models/scaffold/")):
                found[max((room for room in MAX_CHARACTERS if name.startswith(f"{room}/")), key=len)] += len(path.read_text())
    assert not {room: size for room, size in found.items() if size > MAX_CHARACTERS[room]}


def test_functions_are_short() -> None:
    """Red if functions outgrow the house numbers."""
    lengths = {f"{relative(path)}:{node.lineno} {node.name}": length(node) for path, node in functions()}  # names may come twice
    assert not {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert statistics.median(lengths.values()) <= MAX_MEDIAN_FUNCTION_LINES
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= MAX_P90_FUNCTION_LINES


def test_classes_are_small() -> None:
    """Red if a class collects more than one job."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                public = [m.name for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and not m.name.startswith("_")]
                assert len(public) <= MAX_PUBLIC_METHODS, f"{relative(path)}:{node.name}"


def test_every_signature_is_typed_and_every_module_documented() -> None:
    """Red if a reader must guess."""
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
                assert relative(path) in GETATTR_ALLOWED, f"{relative(path)}:{node.lineno} getattr with a default"
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                assert relative(path) in ENVIRONMENT_ALLOWED, f"{relative(path)}:{node.lineno} reads the environment"


def test_broad_excepts_stand_at_a_boundary() -> None:
    """Red if an error of ours can vanish: a broad except must be listed above with its reason."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
                assert not broad or relative(path) in BROAD_EXCEPT_ALLOWED, f"{relative(path)}:{node.lineno}"


def test_nothing_imports_torchvision_or_flashinfer_at_the_top_of_a_shared_module() -> None:
    """Red if a machine without a GPU could no longer import the engine."""
    cuda_only = re.compile(r"(_cuda|backends/(portable|hopper)/)")
    for path in SOURCES:
        for node in tree_of(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & {"torchvision", "flashinfer", "triton", "nvidia"}:
                assert cuda_only.search(relative(path)), relative(path)


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_no_import_circles() -> None:
    """Red if two files need each other, also if one imports the other inside a function."""
    edges = {module_of(path): {name for name in imports(path)} for path in SOURCES}
    graph = {module: {name for name in names if name in edges and name != module} for module, names in edges.items()}
    while leaves := {module for module, names in graph.items() if not names}:
        graph = {module: names - leaves for module, names in graph.items() if module not in leaves}
    assert not graph, f"in or above a circle: {sorted(graph)}"


def test_the_engine_names_no_architecture() -> None:
    """Red if a file of the engine must be changed for a new model."""
    for path in (ROOT / "engine").rglob("*.py"):
        assert not re.search(r"Qwen3VL\b|qwen3_vl\b|Cosmos", path.read_text()), relative(path)


def test_the_scheduler_has_no_number_of_a_gpu() -> None:
    """Red if what was measured on one device decides for all: workers report their numbers."""
    for path in (ROOT / "engine" / "scheduler").rglob("*.py"):
        assert not re.search(r"\bH[12]00\b|[Hh]opper", path.read_text()), relative(path)
        assert not [name for name in imports(path) if name.startswith("models.backends")], relative(path)
