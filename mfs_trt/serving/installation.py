"""Finding a tritonserver and setting up what it needs: stub for this Python, library paths,
backends.

Two sources, in this order: `tritonserver` on PATH (as in NVIDIA's container) and the one inside the
`nvidia-pytriton` package. The package's folders are left untouched: backends are linked into a
scratch folder, with the stub of the running Python beside them.
"""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from mfs_trt.errors import ServerError

STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started: the binary, its backends and its environment."""

    binary: Path
    backend_dir: Path  # for --backend-directory
    environment: dict[str, str]


def find_installation(scratch: Path) -> Installation:
    """Set up a tritonserver; `scratch` is an empty folder that must outlive it.

    Raises `ServerError` when there is none, or when it cannot run here: in one line, naming the
    package that brings what is missing.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        binary = Path(on_path).resolve()
        backends = binary.parent.parent / "backends"
        stub = backends / "python" / STUB_NAME
        library_dirs: list[Path] = []
        if not stub.exists():
            raise ServerError(f"{binary}: expected the Python backend in {backends}, found none")
    else:
        package = _pytriton_folder()
        binary = package / "tritonserver" / "bin" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = package / "tritonserver" / "python_backend_stubs" / version / STUB_NAME
        if not stub.exists():
            known = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
            raise ServerError(f"nvidia-pytriton has no stub for Python {version}, only {known}")
        backends = _link_backends(package / "tritonserver" / "backends", stub, scratch)
        library_dirs = [package.parent / "nvidia_pytriton.libs"]
    environment = _environment(library_dirs)
    _check_libraries((binary, backends / "python" / STUB_NAME), environment)
    return Installation(binary, backends, environment)


def _pytriton_folder() -> Path:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "no tritonserver: none on PATH, and nvidia-pytriton is not installed "
            "(pip install nvidia-pytriton)"
        )
    return Path(spec.submodule_search_locations[0])


def _link_backends(source: Path, stub: Path, scratch: Path) -> Path:
    """A backend folder of links to `source`, with `stub` as the Python backend's stub."""
    folder = scratch / "backends"
    (folder / "python").mkdir(parents=True)
    for entry in (source / "python").iterdir():
        if entry.name != STUB_NAME:
            (folder / "python" / entry.name).symlink_to(entry)
    # A copy: the stub finds its Python files beside itself, where a link would lead away.
    shutil.copy2(stub, folder / "python" / STUB_NAME)
    (folder / "python" / STUB_NAME).chmod(0o755)
    return folder


def _environment(library_dirs: list[Path]) -> dict[str, str]:
    """This process's environment, changed so that the stub embeds this Python with its packages."""
    environment = dict(os.environ)
    library_dirs = [*library_dirs, *_libpython_dirs()]
    _prepend(environment, "LD_LIBRARY_PATH", [str(path) for path in library_dirs])
    _prepend(environment, "PYTHONPATH", _package_dirs())
    # An embedded Python looks for its standard library from the first `python3` on PATH.
    _prepend(environment, "PATH", [str(Path(sys.executable).parent)])
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def _libpython_dirs() -> list[Path]:
    name = sysconfig.get_config_var("INSTSONAME") or ""
    candidates = (Path(sysconfig.get_config_var("LIBDIR") or "/"), Path(sys.base_prefix) / "lib")
    return [folder for folder in candidates if (folder / name).is_file()][:1]


def _package_dirs() -> list[str]:
    """Folders that the stub imports from: this process's own, in its order."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    found = [*site.getsitepackages(), *sys.path]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [
        folder
        for folder in dict.fromkeys(found)
        if folder
        and Path(folder).is_dir()
        and folder not in standard
        and not folder.endswith("lib-dynload")
    ]


def _prepend(environment: dict[str, str], key: str, values: list[str]) -> None:
    old = environment.get(key)
    environment[key] = os.pathsep.join([*values, old] if old else values)


def _check_libraries(binaries: tuple[Path, ...], environment: dict[str, str]) -> None:
    """Raise `ServerError` if the loader cannot find a shared library of one of `binaries`."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return
    for binary in binaries:
        result = subprocess.run(
            [ldd, str(binary)], env=environment, capture_output=True, text=True, check=False
        )
        missing = re.findall(r"^\s*(\S+) => not found", result.stdout, re.MULTILINE)
        if missing:
            raise ServerError(missing_library_text(binary, missing[0]))


def missing_library_text(binary: Path, library: str) -> str:
    """One line that says what is missing and which package brings it."""
    python = re.fullmatch(r"libpython(\d+\.\d+)\.so.*", library)
    hint = ""
    if python:
        hint = f"; install the package libpython{python[1]} (apt-get install libpython{python[1]})"
    return f"{binary.name} needs {library}, which is not installed{hint}"
