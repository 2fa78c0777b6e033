"""The package's modules import each other in one direction only."""

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import gradsync
import pytest

PACKAGE = pathlib.Path(gradsync.__file__).parent


def module_name(file, package):
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(package):
    """{module: modules of the package that it imports}, wherever in the file an import stands.

    That includes imports inside of functions and under TYPE_CHECKING. `from a import b` is an
    import of module a.b if there is one, else of a.
    """
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    graph = {}
    for name, file in files.items():
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: write the absolute name"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported.add(full if full in files else node.module)
        graph[name] = imported & files.keys()
    return graph


def circle(package):
    """Modules that import each other in a circle; [] if there are none."""
    try:
        graphlib.TopologicalSorter(imports(package)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    assert circle(PACKAGE) == []


def test_the_core_does_not_import_the_part_for_pytorch():
    for name, imported in imports(PACKAGE).items():
        if not name.startswith("gradsync.torch"):
            assert not [other for other in imported if other.startswith("gradsync.torch")], name


def test_importing_the_part_for_pytorch_loads_little_more_of_pytorch():
    pytest.importorskip("torch")
    # PyTorch's compiler, FSDP and sympy take seconds, in every rank.
    program = """if True:
        import sys, torch
        before = set(sys.modules)
        import gradsync.torch
        print(*sorted(set(sys.modules) - before))
    """
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    others = [name for name in loaded if name.startswith(("torch.", "sympy"))]
    assert len(others) < 20, others


@pytest.mark.parametrize(
    "line", ["import p.b", "from p import b", "from p.b import x", "def f():\n    from p import b"]
)
def test_a_circle_is_found(tmp_path, line):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(line)
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from p.a import y")
    assert set(circle(package)) == {"p.a", "p.b"}
