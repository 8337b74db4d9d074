"""Define typed errors, each with the OpenAI error code and HTTP status shown to clients."""


class GlowplugError(Exception):
    """Base of user-visible errors. `message` names the wrong field or thing."""

    status = 500
    type = "server_error"
    code = "internal_error"
    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(GlowplugError):
    status, type, code = 400, "invalid_request_error", "bad_request"


class InvalidModelFile(BadRequest):
    """A field is missing or wrong; `message` names it (400)."""

    code = "invalid_model_file"


class EngineMisconfigured(BadRequest):
    """Every start of the model would fail by its engine settings (400)."""

    code = "engine_misconfigured"


class Unauthorized(GlowplugError):
    """API key or admin token missing or wrong (401)."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class RoleRequired(GlowplugError):
    status, type, code = 403, "permission_error", "role_required"


class ModelNotFound(GlowplugError):
    status, type, code = 404, "invalid_request_error", "model_not_found"


class NotFound(GlowplugError):
    status, type, code = 404, "invalid_request_error", "not_found"


class Conflict(GlowplugError):
    """The request contradicts the present state (409)."""

    status, type, code = 409, "invalid_request_error", "conflict"


class TooLarge(GlowplugError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class Contended(GlowplugError):
    """Capacity is taken: the queue is full (429)."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class NoCapacity(GlowplugError):
    """Cold and refused, no capacity, or failed (503)."""

    status, type, code = 503, "service_unavailable", "no_capacity"


class NotLeader(GlowplugError):
    """Another process leads, or none does now: ask again (503)."""

    status, type, code = 503, "service_unavailable", "not_leader"


class EngineFailed(GlowplugError):
    """The engine answered badly or not at all, without another instance to try (502)."""

    status, type, code = 502, "server_error", "engine_failed"


class EngineUnable(EngineFailed):
    """This kind of engine cannot serve the request (502)."""

    code = "engine_unable"


class WeightsDropped(EngineFailed):
    """Weights were dropped while an engine read them; another start reads them again (502)."""

    code = "weights_dropped"


class WeightsUnavailable(GlowplugError):
    """Weights are missing, corrupt or unreadable, and never served."""

    status, type, code = 503, "service_unavailable", "weights_unavailable"


class ChecksumMismatch(WeightsUnavailable):
    """Bytes differ from the model's checksum, and are never served."""

    code = "weights_corrupt"


class NoSpace(WeightsUnavailable):
    """Host memory or disk is full."""

    code = "no_space"


WEIGHTS_CODES = frozenset({WeightsUnavailable.code, ChecksumMismatch.code, NoSpace.code})  # possibly of one node only


class StaleEpoch(GlowplugError):
    """The command's controller has been replaced."""

    status, type, code = 409, "conflict", "stale_epoch"


class OutOfMemory(GlowplugError):
    """A GPU's ledger cannot grant the bytes."""

    status, type, code = 503, "service_unavailable", "out_of_memory"
