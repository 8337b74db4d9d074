"""The paths of files and batches, and the error of a fleet without them."""

from typing import Final

from glowplug.domain.errors import GlowplugError

FILES: Final = b"/v1/files"
BATCHES: Final = b"/v1/batches"


class FilesNotConfigured(GlowplugError):
    """This fleet keeps no files (501)."""

    status, type, code = 501, "invalid_request_error", "files_not_configured"


def not_configured() -> GlowplugError:
    return FilesNotConfigured("This fleet keeps no files and batches: its operator has not set GLOWPLUG_FILES_URL.")


def is_path(path: bytes) -> bool:
    return path in (FILES, BATCHES) or path.startswith((FILES + b"/", BATCHES + b"/"))
