"""Reduce the file system of a base image to the needs of a running service: the interpreter, its libraries,
certificates, and a shell with coreutils for inspection. Removes compiler, package managers, perl, setuid programs and
documentation.

Packages are removed whole, with their dpkg records, so that a scanner sees the real contents.

    python prune.py [ROOT]      ROOT defaults to /
"""

import compileall
import py_compile
import re
import shutil
import sys
import sysconfig
from pathlib import Path

KEEP = re.compile(
    r"base-files|base-passwd|ca-certificates|coreutils|dash|media-types|netbase|tzdata"
    r"|gcc-\d+-base|libgcc-s1|libstdc\+\+6|libc6|libc-bin|libcrypt1"
    r"|libssl3|libffi8|libsqlite3-0|libbz2-1\.0|liblzma5|libexpat1|zlib1g|libuuid1|libmpdec3"
    r"|libreadline8|libncursesw6|libtinfo6|libdb5\.3"
    r"|libacl1|libattr1|libselinux1|libpcre2-8-0|libgmp10"  # coreutils links these
    r"|(lib)?python3(\.\d+)?(-minimal|-stdlib)?"
)
LEAVES = (
    "etc/apt etc/cron.daily etc/init.d etc/pam.d etc/pip.conf etc/skel etc/systemd root/.cache root/.config "
    "usr/games usr/include usr/lib/apt usr/lib/dpkg usr/lib/python3/dist-packages usr/lib/systemd "
    "usr/local/include usr/lib/x86_64-linux-gnu/gconv usr/lib/aarch64-linux-gnu/gconv usr/local/share/man "
    "usr/share/bash-completion usr/share/bug usr/share/debconf usr/share/info usr/share/lintian "
    "usr/share/locale usr/share/man usr/share/perl5 usr/share/pixmaps usr/share/python-wheels "
    "usr/share/zoneinfo/posix usr/share/zoneinfo/right usr/src var/backups var/cache var/lib/apt var/lib/pam "
    "var/lib/systemd var/log "
)
STDLIB_LEAVES = ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tkinter", "turtledemo")


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def drop_packages(root: Path) -> None:
    """Remove every package that is not kept, with its files and record."""
    dpkg = root / "var/lib/dpkg"
    kept_stanzas: list[tuple[str, str]] = []
    dropped: list[tuple[str, str]] = []
    for stanza in (dpkg / "status").read_text().split("\n\n"):
        if match := re.match(r"Package: (\S+)", stanza):
            (kept_stanzas if KEEP.fullmatch(match[1]) else dropped).append((match[1], stanza))
    lists = {path.name.removesuffix(".list").partition(":")[0]: path for path in (dpkg / "info").glob("*.list")}
    needed = {line for name, _ in kept_stanzas if name in lists for line in lists[name].read_text().splitlines()}
    for name, _ in dropped:
        for line in lists[name].read_text().splitlines() if name in lists else ():
            path = root / line.lstrip("/")
            if line not in needed and not (path.is_dir() and not path.is_symlink()):
                remove(path)
        for record in (dpkg / "info").glob(f"{name}[.:]*"):
            record.unlink()
    (dpkg / "status").write_text("".join(f"{stanza.strip()}\n\n" for _, stanza in kept_stanzas))
    remove(dpkg / "status-old")


def drop_paths(root: Path) -> None:
    for name in LEAVES.split():
        remove(root / name)
    for path in (root / "usr/share/doc").glob("*/*"):
        if path.name != "copyright":
            remove(path)
    for folder in ("usr/bin", "usr/sbin", "usr/local/bin", "etc/alternatives"):
        for path in (root / folder).glob("*"):
            if path.is_symlink() and not path.exists():
                path.unlink()  # pointed into a removed package
    for path in (root / "usr/local/bin").glob("*"):
        if re.match(r"(pip|wheel|idle|2to3|pydoc)", path.name):
            remove(path)


def prune_python(stdlib: Path) -> None:
    """Remove installers, tests and Windows files, and compile the rest, because the root will be read-only."""
    for path in (*(stdlib / name for name in STDLIB_LEAVES), *stdlib.glob("config-3*")):
        remove(path)
    compileall.compile_dir(stdlib, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "/")
    prune_python(root / sysconfig.get_path("stdlib").lstrip("/"))
    drop_packages(root)
    drop_paths(root)


if __name__ == "__main__":
    main()
