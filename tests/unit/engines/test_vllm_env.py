"""Where vLLM's environment is and what is said when it is not whole; and what a failed start names as its cause."""

from pathlib import Path

import pytest

from glowplug.domain.errors import EngineFailed, WeightsUnavailable
from glowplug.engines import vllm_env, vllm_sample, vllm_zygote
from glowplug.engines.vllm import root_cause


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(vllm_env.ENV_VARIABLE, str(tmp_path / "env"))
    return tmp_path / "env"


def install(env: Path, *names: str) -> None:
    library = env / "lib" / "python3.11" / "site-packages"
    (env / "bin").mkdir(parents=True, exist_ok=True)
    (env / "bin" / "python").touch()
    for name in names:
        (library / name).mkdir(parents=True)
        (library / name / "__init__.py").touch()


def test_the_variable_names_the_environment_and_a_setting_goes_before_it(env: Path) -> None:
    assert vllm_env.interpreter() == env / "bin" / "python"
    assert vllm_env.interpreter("/opt/py") == Path("/opt/py")


def test_each_missing_piece_is_named_with_the_command_that_mends_it(env: Path) -> None:
    python = vllm_env.interpreter()
    assert "make vllm-env" in vllm_env.missing(python) and "does not exist" in vllm_env.missing(python)
    install(env)
    assert "vLLM is not installed" in vllm_env.missing(python)
    install(env, "vllm")
    assert "glowplug-vllm is not installed" in vllm_env.missing(python)
    before = vllm_env.version(python)
    install(env, "glowplug_vllm-0.1.0.dist-info")
    assert vllm_env.missing(python) == ""
    assert vllm_env.version(python) != before


def test_elsewhere_than_on_linux_another_engine_is_named(env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "llamacpp" in vllm_env.missing(vllm_env.interpreter())


def test_the_sample_is_not_converted_without_an_environment(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(WeightsUnavailable, match="make vllm-env"):
        vllm_sample.prepare()
    assert vllm_sample.main([]) == 1


def test_a_converted_sample_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_CACHE_DIR", str(tmp_path))
    vllm_sample.sample_dir().mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert not vllm_sample.is_prepared()
        (vllm_sample.sample_dir() / name).touch()
    assert vllm_sample.prepare() == tmp_path / vllm_sample.NAME


def test_parked_processes_of_another_version_have_another_place() -> None:
    places = {vllm_zygote.default_dir(Path("/p"), v) for v in ("1", "2")} | {vllm_zygote.default_dir(Path("/q"), "1")}
    assert len(places) == 3
    assert all(len(str(place / "zygote.sock")) < 100 for place in places)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    vllm_zygote.make_private(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o077 == 0
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(EngineFailed, match="remove it"):
        vllm_zygote.make_private(tmp_path / "open")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("INFO fine\n(EngineCore pid=5) ERROR x] ValueError: no such dtype\nRuntimeError: ... See root cause above.",
         "ValueError: no such dtype"),
        ("vllm: error: unrecognized arguments: --foo", "error: unrecognized arguments: --foo"),
        ("torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("INFO all is well", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_first_error_is_the_cause(log: str, cause: str) -> None:
    assert root_cause(log) == cause
