"""Allowed imports between packages, read from the source; the pure parts load without Trio and torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import ROOT, SRC, package_modules, parse, where


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@attrs.frozen
class Layer:
    """What the modules of one layer may import, beside each other and the standard library."""

    third_party: frozenset[str] = attrs.field(converter=words)
    ours: frozenset[str] = attrs.field(converter=words)


# From the ground up. A part of the package that is named neither here nor below may not exist.
LAYERS = {
    "errors": Layer("", ""),
    "nano": Layer("", ""),  # weights, and where they lie
    "core": Layer("attrs", "errors"),
    "config": Layer("attrs cattrs", "core errors"),
    "protocol": Layer("attrs cattrs", "core errors"),
    "ipc": Layer("attrs cattrs msgpack", "core config errors"),
    "kernels": Layer("attrs torch triton", "errors"),
    "model": Layer(
        "attrs huggingface_hub numpy safetensors tokenizers torch transformers", "kernels core config errors"
    ),
    "structured_outputs": Layer("attrs llguidance", "ipc core errors"),
    "observability": Layer("attrs prometheus_client opentelemetry trio", "core config errors"),
    "actors": Layer("attrs trio", "core ipc config errors"),
    "recording": Layer("attrs trio", "ipc core config errors"),
    "engine": Layer("attrs trio", "recording actors observability core ipc config errors"),
    "bridge": Layer("attrs trio", "engine observability core ipc config errors"),
    "aio": Layer("trio", "bridge engine core ipc config errors"),
    "blocking": Layer("trio", "bridge engine core ipc config errors"),
    # Engines for the tests of other programs.
    "testing": Layer("attrs trio", "aio blocking bridge engine actors model nano core config errors"),
    # The programs of child processes: what `actors` is to the engine's process, without Trio.
    "workers": Layer("attrs", "ipc model nano structured_outputs core config errors"),
    "client": Layer("attrs trio h11 wsproto", "triolet errors"),
    # The front of a fleet: it has the listener and the sockets of the server, and no engine.
    "router": Layer(
        "attrs trio h11 prometheus_client trio_websocket",
        "client server protocol observability core config errors",
    ),
    "server": Layer("attrs trio msgpack", "triolet engine protocol observability ipc core config errors"),
}

# These put the others together and may import what they need.
FREE_LAYERS = words("triolet __main__ cli compat")

# What a module, or a package of that name, may import beyond its layer.
EXCEPTIONS = {
    "triolet.core.chat_template": words(
        "jinja2"
    ),  # a template is a Jinja program; the rest of core is plain Python
    "triolet.actors.executors.grammar.grammars": words(
        "triolet.structured_outputs"
    ),  # follows grammars here, in tests
    "triolet.actors.adapters": words("triolet.model"),  # reads adapter folders
    "triolet.actors.prompt_adapters": words("triolet.model"),  # and those of soft prompts
    "triolet.engine.weights": words("triolet.model"),  # checks folders of new weights
    "triolet.actors.tokenizer": words("triolet.model triolet.nano"),  # starts the tokenizer
    "triolet.actors.executors.call_frames": words("triolet.model"),  # writes tensors as bytes
    "triolet.actors.executors.registry": words("triolet.model triolet.nano"),  # starts the runner
    "triolet.actors.executors.remote.ray_workers": words("ray"),  # an optional package
    "triolet.model.gguf.library": words("gguf"),  # an optional package, for writing
    "triolet.model.gguf.writer": words("gguf"),
    "triolet.model.gguf.write_tokenizer": words("gguf"),
    "triolet.testing.fixtures": words("pytest"),  # a plugin of pytest, loaded by pytest alone
    "triolet.server.routes": words("starlette"),
    "triolet.server.models.routing": words("starlette"),
    "triolet.server.responses": words("trio_websocket"),
    "triolet.server.transport": words("trio_websocket wsproto starlette hypercorn h11"),
}

# A pure module does not ask for the time, draw from shared randomness, or speak to the world.
PURE_LAYERS = words("core protocol ipc")
BARRED_FROM_PURE_LAYERS = words(
    "asyncio logging multiprocessing os random secrets selectors signal socket subprocess threading time uuid"
)


@attrs.frozen
class Import:
    """One import of the module `target` by the module `by`."""

    by: str
    target: str
    node: ast.AST
    only_for_types: bool


def imports_of(module: str, tree: ast.Module, *, is_package: bool = False) -> Iterator[Import]:
    for_types = {node for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        for target in imported_modules(node, package):
            yield Import(module, target, node, only_for_types=node in for_types)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_modules(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package[: len(package) - node.level + 1] if node.level else []
    origin = ".".join([*above, *filter(None, [node.module])])
    if origin != "triolet":
        return [origin]
    # `from triolet import errors` reaches a layer, `from triolet import Engine` the package itself.
    return [f"triolet.{name.name}" if name.name in LAYERS else "triolet" for name in node.names]


def layer_of(module: str) -> str:
    """`triolet.core.scheduling.scheduler` is in `core`, the package itself in `triolet`."""
    return module.split(".")[1] if "." in module else module


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_allowed(found: Import) -> bool:
    by, target, root = layer_of(found.by), layer_of(found.target), found.target.split(".")[0]
    if by in FREE_LAYERS:
        return True
    beyond = [name for module, names in EXCEPTIONS.items() if is_within(found.by, module) for name in names]
    if any(is_within(found.target, name) for name in beyond):
        return True
    if root == "triolet":
        # A type of `model` in an actor's signature couples nothing when the program runs.
        harmless = by == "actors" and target == "model" and found.only_for_types
        return target == by or target in LAYERS[by].ours or harmless
    if root in sys.stdlib_module_names:
        return by not in PURE_LAYERS or root not in BARRED_FROM_PURE_LAYERS
    return root in LAYERS[by].third_party


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(module) for module, _ in package_modules()} <= LAYERS.keys() | FREE_LAYERS


def test_no_module_needs_the_package_of_an_extra_to_be_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required, optional = (
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (project["dependencies"], chain.from_iterable(project["optional-dependencies"].values()))
    )
    distributions = {
        module: {canonicalize_name(name) for name in names}
        for module, names in packages_distributions().items()
    }
    needed = [
        (module, target)
        for module, path in package_modules()
        for statement in parse(path).body
        for target in imported_modules(statement, [])
        if distributions.get(target.split(".")[0], set()) & (optional - required)
    ]
    assert needed == [("triolet.testing.fixtures", "pytest")]


def test_every_import_stays_within_its_layer() -> None:
    strayed = [
        f"{where(path, found.node)}: {module} imports {found.target}"
        for module, path in package_modules()
        for found in imports_of(module, parse(path), is_package=path.name == "__init__.py")
        if not is_allowed(found)
    ]
    assert strayed == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("triolet.errors", "import attrs"),
        ("triolet.core.scheduling.scheduler", "import trio"),
        ("triolet.core.scheduling.scheduler", "import torch.nn"),
        ("triolet.core.scheduling.scheduler", "from time import monotonic"),
        ("triolet.core.scheduling.scheduler", "def late(): import random"),
        ("triolet.core.scheduling.scheduler", "import jinja2"),
        ("triolet.core.scheduling.scheduler", "from triolet.config.engine import EngineConfig"),
        ("triolet.core.scheduling.scheduler", "from triolet import config"),
        ("triolet.core.scheduling.scheduler", "from triolet import Engine"),
        ("triolet.core.scheduling.scheduler", "from ...config import EngineConfig"),
        ("triolet.core.scheduling.scheduler", "from ... import config"),
        ("triolet.kernels.rotary", "from triolet.model import decoder"),
        ("triolet.model.backends.torch_decoder", "import trio"),
        ("triolet.model.backends.torch_decoder", "if TYPE_CHECKING: import trio"),
        ("triolet.actors.scheduler", "import torch"),
        ("triolet.actors.scheduler", "from triolet.model.runner import ModelRunner"),
        ("triolet.actors.scheduler", "import starlette"),
        ("triolet.actors.scheduler", "import kernels"),
    ],
)
def test_an_import_out_of_its_layer_is_found(module: str, source: str) -> None:
    assert not all(is_allowed(found) for found in imports_of(module, ast.parse(source)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("triolet.core.scheduling.scheduler", "import heapq"),
        ("triolet.core.scheduling.scheduler", "from triolet.core.scheduling.sequence import Sequence"),
        ("triolet.core.scheduling.scheduler", "from ... import errors"),
        ("triolet.core.chat_template", "from jinja2.sandbox import ImmutableSandboxedEnvironment"),
        ("triolet.actors.scheduler", "if TYPE_CHECKING: import triolet.model.runner"),
        ("triolet.actors.executors.registry", "from triolet.model.runner import ModelRunner"),
        ("triolet.server.transport.hypercorn_adapter", "from starlette.routing import Route"),
        ("triolet.cli.chat", "import rich, trio, torch"),
    ],
)
def test_an_import_within_its_layer_is_let_through(module: str, source: str) -> None:
    assert all(is_allowed(found) for found in imports_of(module, ast.parse(source)))


def test_pure_modules_read_no_clock_through_datetime() -> None:
    readings = [
        where(path, node)
        for module, path in package_modules()
        if layer_of(module) in PURE_LAYERS
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
        if node.func.attr in ("now", "utcnow", "today")
    ]
    assert readings == []


# --------------------------------------------------------------- the same, seen from a running program


def modules_after(code: str) -> list[str]:
    """Run `code` in a fresh interpreter; the names in `sys.modules` afterwards."""
    program = textwrap.dedent(code) + "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    *said, modules = ran.stdout.splitlines()
    print(*said, sep="\n")
    loaded: list[str] = json.loads(modules)
    return loaded


BAR_THE_HEAVY = """
    import sys

    class Barred:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"trio", "torch", "transformers", "triton", "numpy"}:
                raise ImportError(f"{name} is barred here")

    sys.meta_path.insert(0, Barred())
"""


def test_pure_modules_load_with_trio_and_torch_barred() -> None:
    pure = {
        module for module, _ in package_modules() if layer_of(module) in PURE_LAYERS | {"errors", "config"}
    }
    loaded = modules_after(BAR_THE_HEAVY + "".join(f"    import {module}\n" for module in sorted(pure)))
    assert pure <= set(loaded)


@pytest.mark.parametrize("heavy", ["trio", "torch"])
def test_the_bar_of_the_test_above_holds(heavy: str) -> None:
    with pytest.raises(AssertionError, match=f"{heavy} is barred here"):
        modules_after(BAR_THE_HEAVY + f"    import {heavy}")


def test_importing_triolet_loads_neither_torch_nor_transformers() -> None:
    loaded = modules_after("""
        import time
        began = time.perf_counter()
        import triolet
        print(f"import triolet: {time.perf_counter() - began:.3f} s (0.3 s is the aim)")
    """)
    assert "triolet" in loaded
    assert not {"torch", "transformers", "triton", "numpy"} & set(loaded)
    # Seconds depend on what else runs on the machine; modules do not. An interpreter has 50, Trio brings 200.
    assert len(loaded) < 400, f"import triolet loads {len(loaded)} modules"


def test_asking_the_command_for_help_loads_no_torch() -> None:
    loaded = modules_after("""
        from triolet.cli import main
        try:
            main(["--help"], standalone_mode=False)
        except SystemExit as left:
            assert left.code == 0
    """)
    assert "torch" not in loaded


def test_every_public_name_is_there_and_is_listed() -> None:
    import triolet

    assert all(getattr(triolet, name) is not None for name in triolet.__all__)


def test_dir_lists_the_public_names_and_the_packages_and_nothing_else() -> None:
    import triolet

    packages = {path.parent.name for path in (SRC / "triolet").glob("*/__init__.py")}
    assert {"actors", "compat", "kernels"} <= packages
    interfaces = {"aio", "blocking"}
    assert set(dir(triolet)) == {*triolet.__all__, *packages, *interfaces, "__version__"}
    assert all(getattr(triolet, name) is not None for name in dir(triolet))
