"""Typed errors. Each carries the OpenAI error code and HTTP status with which it is shown to a client."""


class GlowplugError(Exception):
    """Base of every error a user can see. `message` names the field or thing that is wrong."""

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
    """The request is not understood (400)."""

    status, type, code = 400, "invalid_request_error", "bad_request"


class InvalidModelFile(BadRequest):
    """A model file lacks a field or has a wrong one; `message` names the field (400)."""

    code = "invalid_model_file"


class EngineMisconfigured(BadRequest):
    """A model's settings for its engine are wrong, so that every start of it would fail in the same way (400)."""

    code = "engine_misconfigured"


class Unauthorized(GlowplugError):
    """The API key or admin token is missing or wrong (401)."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class RoleRequired(GlowplugError):
    """Who asks is known, and has too small a role for it (403)."""

    status, type, code = 403, "permission_error", "role_required"


class ModelNotFound(GlowplugError):
    """No model has this name or alias (404)."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class NotFound(GlowplugError):
    """Nothing has this id (404)."""

    status, type, code = 404, "invalid_request_error", "not_found"


class Conflict(GlowplugError):
    """The request contradicts the present state (409)."""

    status, type, code = 409, "invalid_request_error", "conflict"


class TooLarge(GlowplugError):
    """The request has more bytes than allowed (413)."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class Contended(GlowplugError):
    """Capacity exists but is taken: the queue is full (429)."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class NoCapacity(GlowplugError):
    """No instance can serve the model now: cold and refused, no capacity, or failed (503)."""

    status, type, code = 503, "service_unavailable", "no_capacity"


class NotLeader(GlowplugError):
    """This process does not lead its service: another one does, or none does now and the client should ask again
    (503)."""

    status, type, code = 503, "service_unavailable", "not_leader"


class EngineFailed(GlowplugError):
    """The engine answered badly or not at all, and no other instance could be tried (502)."""

    status, type, code = 502, "server_error", "engine_failed"


class EngineUnable(EngineFailed):
    """This kind of engine cannot do what the request asks (502)."""

    code = "engine_unable"


class WeightsDropped(EngineFailed):
    """Weights were dropped while an engine was still reading them: another start reads them again (502)."""

    code = "weights_dropped"


class WeightsUnavailable(GlowplugError):
    """A weight file is missing, corrupt or unreadable; it is never served."""

    status, type, code = 503, "service_unavailable", "weights_unavailable"


class ChecksumMismatch(WeightsUnavailable):
    """The bytes are not the ones that the model names; they are never served."""

    code = "weights_corrupt"


class NoSpace(WeightsUnavailable):
    """Host memory or disk cannot take the bytes."""

    code = "no_space"


WEIGHTS_CODES = frozenset({WeightsUnavailable.code, ChecksumMismatch.code, NoSpace.code})  # may concern one node


class StaleEpoch(GlowplugError):
    """A command came from a controller that has been replaced."""

    status, type, code = 409, "conflict", "stale_epoch"


class OutOfMemory(GlowplugError):
    """The ledger of a GPU cannot grant the requested bytes."""

    status, type, code = 503, "service_unavailable", "out_of_memory"
