"""Empty stand-ins for CUDA's libraries, so that a CUDA build of torch loads without them.

    python tests/packaging/cuda_stand_ins.py

The package index has some versions of torch only as a CUDA build, and no CUDA is needed to test them on a CPU.
Each library that torch.s are linked against is made next to them, from the symbols that they take from it.
Needs gcc and readelf; nothing is imported from torch, which would not load yet.
"""

import re
import subprocess
import tempfile
from importlib.metadata import distribution
from pathlib import Path

_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_TEXT = re.compile("Error(String|Name)")  # of functions that return a message
_NVSHMEM = "libnvshmem_host.so.3"


def main() -> None:
    """Write the stand-ins next to torch's own libraries."""
    folder = Path(str(distribution("torch").locate_file("torch/lib")))
    files = [file for file in folder.glob("lib*.so*") if not _LIBRARY.match(file.name) and "gomp" not in file.name]
    symbols = missing_symbols(files)
    for library, names in symbols.items():
        build(folder / library, names)
    print(f"{len(symbols)} stand-ins in {folder}")


def missing_symbols(files: list[Path]) -> dict[str, set[str]]:
    """The CUDA libraries that `files` are linked against, and what they take from each."""
    libraries = {name for file in files for name in re.findall(r"NEEDED.*\[(.*)\]", _readelf("-d", file))}
    symbols: dict[str, set[str]] = {name: set() for name in sorted(libraries) if _LIBRARY.match(name)}
    unversioned, defined = set(), set()
    for file in files:
        for row in _readelf("--dyn-syms", file).splitlines():
            words = row.split()
            if len(words) < 8:
                continue
            name, _, version = words[7].partition("@")
            library = _NVSHMEM if version.strip("@") == "NVSHMEM" else version.strip("@")
            if words[6] != "UND":
                defined.add(name)
            elif library in symbols:
                symbols[library].add(name)
            elif not version and words[4] != "WEAK" and re.match(r"_*(cu|nv|nccl|Nv)", name):
                unversioned.add(name)
    nccl = next(library for library in symbols if library.startswith("libnccl"))
    symbols[nccl] |= unversioned - defined  # it can be any library's: the loader looks into all
    return symbols


def build(path: Path, names: set[str]) -> None:
    """Compile a library whose functions all fail: they return 100, CUDA's "no device"."""
    functions = [
        f'const char*{name}(void){{return "no CUDA";}}' if _TEXT.search(name) else f"long {name}(void){{return 100;}}"
        for name in sorted(names)
    ]
    version = "NVSHMEM" if path.name == _NVSHMEM else path.name
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "library.c"), Path(folder, "library.map")
        source.write_text("\n".join([*functions, "int stand_in;", ""]))
        script.write_text(f"{version if names else ''} {{ global: *; }};\n")
        options = ["-shared", "-fPIC", "-O0", "-w", "-fno-builtin"]
        options += [f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}"]
        subprocess.run(["gcc", *options, "-o", path, source], check=True)


def _readelf(option: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", option, file], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
