"""Fields of a scenario file. Seconds and bytes.

Servers, models, policies and params take the fields of `ServerSetup`, `Model`, `ModelSetup`, `PolicyNames` and `Params`
(overlaid in scenario/load.py).
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from glowplug.domain.access import Priority


class Words(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LengthWords(Words):
    """Independent lognormal lengths in tokens."""

    prompt_mean: float = Field(1195.0, gt=0)  # defaults: means and CVs of azure_2023_conv
    prompt_cv: float = Field(0.97, ge=0)
    response_mean: float = Field(201.0, gt=0)
    response_cv: float = Field(0.8, ge=0)


class ClientWords(Words):
    """ServeGen clients, each a model (in order), scaled to `rps` together."""

    pick: Literal["popular", "bursty", "tail"]  # most requests; highest CV in the busier half; quieter half
    num: int = Field(ge=1)
    rps: float = Field(gt=0, le=1e6)


class TenantWords(Words):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")
    weight: float = Field(1.0, ge=0.001, le=1000)
    priority: Priority = Priority.STANDARD
    share: float = Field(1.0, gt=0)
    workload: "WorkloadWords | None" = None
    models: tuple[str, ...] = ()  # of its own workload; none: all

    @model_validator(mode="after")
    def _has_own(self) -> "TenantWords":
        if self.models and self.workload is None:
            raise ValueError(f"models: {self.name} has no workload of its own")
        return self


class WorkloadWords(Words):
    """`source`: a trace in the data folder, a path beside the scenario, "gamma" (renewal arrivals at `rps` with `cv`),
    or the generator fitted to traces: "generator" (conversations), "generator_code", "generator_fleet" (many
    tenants)."""

    source: str = "gamma"
    rps: float = Field(0.0, ge=0, le=1e6)  # mean of all models; 0: the trace's
    alpha: float = Field(0.0, ge=0)  # power law over models; 0: equal shares
    shares: Literal["power_law", "servegen", "functions"] = "power_law"
    # servegen: its clients' rates; functions: Azure's published popularity; both dealt round robin
    cv: float = Field(0.0, ge=0)  # of gaps; 0: the trace's (Poisson for "gamma")
    cv_of: Literal["model", "fleet"] = "model"  # scope of that CV
    keep: float = Field(1.0, gt=0, le=1)  # thinning
    squeeze: float = Field(1.0, gt=0)  # speed-up
    start_s: float = Field(0.0, ge=0)  # in the trace
    days: tuple[int, ...] = ()  # model i takes day days[i] of the trace, from 0, at start_s
    clients: tuple[ClientWords, ...] = ()  # of "servegen_clients_10min"
    lengths: str | LengthWords | None = None  # trace or distribution; None: the source's
    length_errors: bool = False  # expected lengths with the errors of PreServe's predictor
    max_prompt_tokens: int = Field(0, ge=0)  # 0: no bound
    min_response_tokens: int = Field(1, ge=1)
    max_total_tokens: int = Field(0, ge=0)
    tenants: tuple[TenantWords, ...] = ()

    @property
    def token_bounds(self) -> tuple[int, int, int]:
        """As `sampling.bounded` takes them."""
        return self.max_prompt_tokens, self.min_response_tokens, self.max_total_tokens

    @model_validator(mode="after")
    def _sound(self) -> "WorkloadWords":
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            raise ValueError("tenants: two have the same name")
        if any(tenant.workload is not None and tenant.workload.tenants for tenant in self.tenants):
            raise ValueError("tenants: the workload of one has tenants")
        if self.tenants and all(tenant.workload is not None for tenant in self.tenants):
            return self  # own requests are not served
        if self.source.startswith(("gamma", "generator")) and not self.rps:
            raise ValueError(f"rps: 0, and {self.source!r} has no rate of its own")
        if self.source == "servegen_clients_10min" and not self.clients:
            raise ValueError("clients: none, and they are what this source has")
        if any(day < 0 for day in self.days):
            raise ValueError("days: one is below 0")
        if self.max_total_tokens and self.max_total_tokens <= self.min_response_tokens:
            raise ValueError("max_total_tokens: leaves no room for a prompt")
        return self


class HistoryWords(Words):
    """The predictor's windows before the run, up to `seconds`."""

    seconds: float = Field(0.0, ge=0)
    window_s: float = Field(0.0, ge=0)
    request_s: float = Field(0.0, ge=0)  # in flight; 0: at a batch of 8, from costs and lengths


class ModelWords(BaseModel):
    """Other fields are those of `Model` and `ModelSetup`."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    copies: int = Field(1, ge=1, le=100_000)  # name-1, name-2, ...
    weights_bytes: int = Field(gt=0)
    kv_bytes: int | Literal["rest"] = "rest"  # "rest": beside the weights on the smallest fitting GPU
    kv_bytes_per_token: int = Field(500_000, gt=0)
    base: str | tuple[str, ...] = ""  # an adapter's base, or several in turn for its copies
    costs: Any = "llama-2-7b"  # profile, {profile, scale}, or one of these per kind of GPU
    lengths: str | LengthWords | None = None


class ScenarioWords(Words):
    name: str = ""  # also the run's folder
    title: str = ""
    seed: int = Field(0, ge=0)
    seconds: float = Field(gt=0, le=31_536_000)
    servers: tuple[dict[str, Any], ...] = Field(min_length=1)
    models: tuple[dict[str, Any], ...] = Field(min_length=1)
    model_defaults: dict[str, Any] = {}  # under every model
    slo: dict[str, Any] = {}  # under every model's slo
    policies: dict[str, Any] = {}
    params: dict[str, Any] = {}
    workload: WorkloadWords
    history: HistoryWords = HistoryWords()
    faults: tuple[dict[str, Any], ...] = ()  # fields of `Fault`
    drain_s: float = Field(300.0, ge=0)  # wait for the last answers

    @field_validator("name")
    @classmethod
    def _a_folder(cls, name: str) -> str:
        if name in (".", "..") or any(c in "/\\" or not c.isprintable() for c in name) or len(name.encode()) > 200:
            raise ValueError("is not a name for a folder")
        return name
