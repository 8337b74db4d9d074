"""Compiles libs/glowplug/policies/prediction/length_native.c into a library beside it, where there is a C compiler. The
package works without: it is slower then at reading texts (length_native.py)."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "libs/glowplug/policies/prediction"
TARGET = "glowplug/policies/prediction/_length_native.so"


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, FOLDER, "length_native.c")
        target = source.with_name("_length_native.so")
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        made = target.with_name(f".{target.name}.{os.getpid()}")
        command = [*(compiler or "cc").split(), "-O3", "-shared", "-fPIC", "-o", str(made), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"texts are read by Python alone: {source.name} was not compiled: {error}")
            made.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            return
        made.replace(target)
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(target)] = TARGET
