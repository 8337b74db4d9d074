"""Validate a tenant from REST, a file or a custom resource."""

from pydantic import Field

from glowplug.domain.access import AccessLimits, Priority, Tenant
from glowplug.domain.errors import BadRequest
from glowplug.runtime.model_files import Strict


class LimitsBody(Strict):
    """Limits; 0 sets none. Tokens are those of prompts and answers, days and months are UTC."""

    requests_per_minute: int = Field(0, ge=0, le=1 << 48)
    tokens_per_minute: int = Field(0, ge=0, le=1 << 48)
    tokens_per_day: int = Field(0, ge=0, le=1 << 48)
    tokens_per_month: int = Field(0, ge=0, le=1 << 48)
    concurrent: int = Field(0, ge=0, le=1 << 48, description="requests at once, waiting ones included")
    queued: int = Field(0, ge=0, le=1 << 48, description="requests that wait at once")

    def to_limits(self) -> AccessLimits:
        return AccessLimits(**self.model_dump())


class TenantBody(Strict):
    """A tenant; an omitted field has its default."""

    limits: LimitsBody = LimitsBody()
    model_limits: dict[str, LimitsBody] = Field(
        default_factory=dict, max_length=256, description="limits by name or pattern of a model"
    )
    priority: Priority = Field(Priority.STANDARD, description="class of its requests")
    weight: float = Field(1.0, ge=0.001, le=1000, description="its share of scarce resources, beside other tenants")

    def to_tenant(self, name: str, source: str = "") -> Tenant:
        """Raises BadRequest for a bad name."""
        try:
            return Tenant(
                name=name,
                limits=self.limits.to_limits(),
                model_limits={model: limits.to_limits() for model, limits in self.model_limits.items()},
                priority=self.priority,
                weight=self.weight,
                source=source,
            )
        except ValueError as error:
            raise BadRequest(str(error), param="name") from error
