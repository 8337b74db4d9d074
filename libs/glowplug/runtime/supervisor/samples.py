"""Copy sample model files into the state directory once, for people to edit."""

import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import glowplug
from glowplug.domain import extensions
from glowplug.domain.errors import GlowplugError
from glowplug.engines import samples, vllm_env, vllm_sample
from glowplug.engines.drivers import is_installed
from glowplug.runtime.errors import NotInstalled, WrongSetting
from glowplug.runtime.supervisor.statedir import disk_errors


def sample_files(engine: str) -> list[Path]:
    """Sample files of an engine. Raises WrongSetting naming the engines that have some."""
    package = Path(glowplug.__file__).parent
    roots = (
        package.parents[1] / "deploy" / "models",
        Path(sysconfig.get_path("data")) / "share" / "glowplug" / "models",
    )
    for root in roots:
        files = sorted((root / engine).glob("*.yaml"))
        if files:
            return files
    known = sorted({folder.name for root in roots if root.is_dir() for folder in root.iterdir() if folder.is_dir()})
    raise WrongSetting(
        f"no sample models for engine {engine!r}: --engine is one of {', '.join(known) or '(none found)'}"
    )


def prepare(engine: str, models_dir: Path, make: Callable[[], Path] = samples.prepare) -> None:
    """Check that `engine`, and sample weights needed in `models_dir`, are installed. Raises NotInstalled with a remedy.
    The first time derives weights: for llamacpp in eight bits (`make`), unless installed (some 3 s); for vllm its own
    (about 20 s, announced on stderr)."""
    needs_samples = _needs_samples(models_dir)
    try:
        if engine == "llamacpp":
            if find_spec("xllamacpp") is None:
                raise NotInstalled("the llama.cpp engine is not installed: pip install 'glowplug[llamacpp]'")
            if needs_samples:
                make()
        elif engine == "vllm":
            if reason := vllm_env.missing(vllm_env.interpreter()):
                raise NotInstalled(reason)
            if needs_samples:
                vllm_sample.prepare()
        elif not is_installed(engine):
            raise NotInstalled(f"the {engine} engine is not installed{extensions.hint()}")
    except GlowplugError as error:
        others = "`--engine emulated` needs no weights, and GLOWPLUG_MODELS_DIR names a folder of your own model files"
        raise NotInstalled(f"{error.message} ({others})") from error


def _needs_samples(models_dir: Path) -> bool:
    """Return whether models need sample weights; a missing folder will be filled with samples."""
    files = [path.read_text("utf-8", "replace") for path in models_dir.glob("*.y*ml")]
    return not models_dir.exists() or any("sample:" in text for text in files)


def place_samples(models_dir: Path, engine: str) -> None:
    """Copy the samples unless `models_dir` exists: deleted ones stay deleted."""
    if models_dir.exists():
        return
    files = sample_files(engine)
    with disk_errors(models_dir):
        staging = models_dir.with_name(f".{models_dir.name}.new")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for file in files:
            shutil.copyfile(file, staging / file.name)
        staging.rename(models_dir)
