"""Prepare an environment for a read-only image: no installers, no build inputs, everything compiled.

python trim.py ENV [--newer MARK --into DIR]    copies files younger than MARK below DIR
"""

import argparse
import compileall
import py_compile
import shutil
from pathlib import Path

INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel")
BUILD_INPUTS = ("*.pyx", "*.pxd", "*.pyi", "*.c", "*.cpp", "*.h", "*.a")
TESTS = ("tests", "test", "_testbase.py")
SCRIPTS = ("pip*", "activate*", "Activate*")


def trim(env: Path, mark: Path | None = None) -> list[Path]:
    """Trim the files younger than `mark`, or all. Returns those that stay, compiled ones included."""
    since = mark.stat().st_mtime if mark else 0.0
    (site,) = env.glob("lib/python3*/site-packages")
    for name in INSTALLERS:
        for path in (site / name, *site.glob(f"{name}-*.dist-info")):
            shutil.rmtree(path, ignore_errors=True)
    (site / "distutils-precedence.pth").unlink(missing_ok=True)
    useless = [*(found for pattern in SCRIPTS for found in (env / "bin").glob(pattern))]
    useless += [found for pattern in BUILD_INPUTS for found in site.rglob(pattern)]
    useless += [found for found in site.glob("*/*") if found.name in TESTS]
    for path in useless:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    stays = [path for path in env.rglob("*") if path.lstat().st_mtime > since and not path.is_dir()]
    for path in [path for path in stays if path.suffix == ".py" and site in path.parents]:
        compileall.compile_file(path, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        stays += path.parent.glob(f"__pycache__/{path.stem}.*.pyc")
    return stays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", type=Path)
    parser.add_argument("--newer", type=Path)
    parser.add_argument("--into", type=Path)
    told = parser.parse_args()
    stays = trim(told.env, told.newer)
    for path in stays if told.into else ():
        target = told.into / path.relative_to(told.env)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)


if __name__ == "__main__":
    main()
