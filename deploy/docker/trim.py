"""Make an environment fit for an image that is never written to: no installers, no build inputs, everything compiled.

python trim.py ENV [--newer MARK --into DIR]    with --newer: move what is younger than the file MARK below DIR
"""

import argparse
import compileall
import py_compile
import shutil
from pathlib import Path

INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel")
BUILD_INPUTS = ("*.pyx", "*.pxd", "*.pyi", "*.c", "*.cpp", "*.h", "*.a")
TEST_FOLDERS = ("tests", "test", "_testbase.py")


def trim(env: Path) -> Path:
    """Returns the site-packages of `env`, trimmed and compiled."""
    (site,) = env.glob("lib/python3*/site-packages")
    for name in INSTALLERS:
        for path in (site / name, *site.glob(f"{name}-*.dist-info")):
            shutil.rmtree(path, ignore_errors=True)
    (site / "distutils-precedence.pth").unlink(missing_ok=True)
    for pattern in ("pip*", "activate*", "Activate*"):
        for script in (env / "bin").glob(pattern):
            script.unlink()
    for pattern in BUILD_INPUTS:
        for path in site.rglob(pattern):
            path.unlink()
    for path in site.glob("*/*"):
        if path.name in TEST_FOLDERS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    compileall.compile_dir(site, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return site


def split(env: Path, mark: Path, into: Path) -> None:
    """Copy what is younger than `mark` to the same path below `into`, which exists afterwards even when nothing is."""
    into.mkdir(parents=True)
    for path in env.rglob("*"):
        if path.lstat().st_mtime > mark.stat().st_mtime and not path.is_dir():
            target = into / path.relative_to(env)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", type=Path)
    parser.add_argument("--newer", type=Path)
    parser.add_argument("--into", type=Path)
    told = parser.parse_args()
    trim(told.env)
    if told.newer:
        split(told.env, told.newer, told.into)


if __name__ == "__main__":
    main()
