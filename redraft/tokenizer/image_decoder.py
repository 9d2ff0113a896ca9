"""Image decoder: the bytes of a picture file -> RGB pixels of the size that the model takes. Runs in a helper process.

A picture is a stranger's file, and its decoder is C code: a small file may describe 10 gigapixels, or take an hour. The
helper process limits time and memory, and a decoder that crashes takes no server with it. Only Pillow is imported here.

The steps are those of transformers 5.22.2 for an image file: `load_image` turns the picture upright (EXIF) and converts it
to RGB, which drops an alpha channel; Gemma4ImageProcessorPil makes a transparent color of a palette white and resizes with
Pillow's bicubic filter, on 8-bit RGB values.
"""

import json
import math
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any

from redraft.tokenizer.helper_process import answer_calls

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # what browsers show; each further decoder is more code to attack
FORMAT_WORDS = "PNG, JPEG, WebP, GIF or BMP"
MAX_PIXELS = 50_000_000  # 8064 x 6048, the largest picture of a common telephone, is below it


class PictureError(ValueError):
    """A file that gives no picture; the message says why, as the end of a sentence that begins with its name."""


def fit_size(height: int, width: int, patch_size: int, max_patches: int, kernel: int) -> tuple[int, int]:
    """The height and width to which a picture is resized: about its proportions, in whole squares of `kernel` patches.

    As `get_aspect_ratio_preserving_size` of transformers: the largest sides that give at most `max_patches` patches, each
    rounded down. A picture so narrow that a side would be 0 is one square high or wide.
    """
    square = kernel * patch_size
    factor = math.sqrt(max_patches * patch_size**2 / (height * width))
    rows = math.floor(factor * height / square)
    columns = math.floor(factor * width / square)
    longest = max_patches // kernel**2
    if rows == 0:
        rows = 1
        columns = min(width // height, longest)
    elif columns == 0:
        columns = 1
        rows = min(height // width, longest)
    return rows * square, columns * square


def decode_picture(data: bytes, patch_size: int, max_patches: int, kernel: int) -> tuple[dict[str, Any], bytes]:
    """The format, sizes and number of frames of a picture, and its resized pixels, row by row in RGB."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is a warning first; `_open_picture` has one limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata, which is not used
        picture = _open_picture(data)
        described: dict[str, Any] = {"format": picture.format, "has_frames": bool(getattr(picture, "is_animated", False))}
        picture = _to_upright_rgb(picture)
    width, height = picture.size
    new_height, new_width = fit_size(height, width, patch_size, max_patches, kernel)
    if (new_width, new_height) != picture.size:
        picture = picture.resize((new_width, new_height), Image.Resampling.BICUBIC)
    described |= {"width": width, "height": height, "new_width": new_width, "new_height": new_height}
    return described, picture.tobytes()


def _open_picture(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PictureError(f"is no {FORMAT_WORDS} file: it begins with {data[:16]!r}") from None
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise PictureError(f"has {width} x {height} pixels, and redraft reads {MAX_PIXELS:,} at most: make it smaller")
    return picture


def _to_upright_rgb(picture: "Image") -> "Image":
    """Decodes the first frame, turned as its EXIF data say, in RGB."""
    from PIL import Image, ImageOps

    kind = picture.format
    try:
        picture.load()
    except MemoryError:
        raise
    except Exception as error:  # decoders fail in many ways: OSError, SyntaxError, ValueError, struct.error, ...
        raise PictureError(f"is a {kind} file that is damaged or cut short ({error}): send it whole") from None
    ImageOps.exif_transpose(picture, in_place=True)
    picture = picture if picture.mode == "RGB" else picture.convert("RGB")
    if picture.info.get("transparency") is not None:  # pixels of one color are transparent: there is no alpha channel
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture).convert("RGB")
    return picture


def answer_decode_call(message: bytes) -> bytes:
    """In the helper process: decodes one picture. Messages and answers are a line of JSON, then bytes."""
    header, _, data = message.partition(b"\n")
    try:
        described, pixels = decode_picture(data, **json.loads(header))
    except MemoryError:
        raise
    except PictureError as error:
        return json.dumps({"error": str(error)}).encode() + b"\n"
    except Exception as error:  # a decoder met a file that its authors did not think of
        return json.dumps({"error": f"cannot be read ({type(error).__name__}: {error})"[:500]}).encode() + b"\n"
    return json.dumps(described).encode() + b"\n" + pixels


if __name__ == "__main__":
    import PIL.Image  # before the time of the first call runs

    PIL.Image.preinit()
    answer_calls(answer_decode_call)
