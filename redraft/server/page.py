"""The web page, as files of the package. There is no build step, and the page loads nothing from other machines."""

from pathlib import Path

from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "static"
NAMES = frozenset(path.name for path in FOLDER.iterdir())
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
# HTML that a model writes is shown in a frame: it may have styles, but no scripts, and may load nothing from other machines.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def index() -> Response:
    """GET /."""
    return await file("index.html")


async def file(name: str) -> Response:
    """GET /page/NAME."""
    if name not in NAMES:
        raise HTTPException(404)
    return FileResponse(FOLDER / name, media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)
