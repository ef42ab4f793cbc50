"""Images that prompts show: read, checked and hashed; and the folder of those that come without a file.

    stored(value, ...) ──▶ path of a file ──▶ read_image(path) ──▶ RGB ──▶ digest_of(image)

Owns what is accepted as an image. Pillow, an optional package, is imported by the first image. Files are read as
`files.open_regular` does, and only in formats that Pillow decodes by itself: EPS would start another program.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import http.client
import io
import os
import re
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.files import atomic_write_bytes, did_you_mean_path, local_path, read_regular

MOST_BYTES = 1 << 26  # of an encoded image
MOST_PIXELS = 50_000_000
URL_TIMEOUT_S = 20.0  # of one read
DOWNLOAD_LIMIT_S = 60.0
_PART_BYTES = 1 << 16
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif"}  # of the others: the format's name
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<options>(?:;[\w.=+-]+)*),", re.ASCII)
_HOW_TO_INSTALL = "pip install 'rollover[vision]'"

_kept_in: list[Path] = []  # by those of `media_kept_in` that are open
_only_looks: ContextVar[bool] = ContextVar("only_looks", default=False)


class NotStored(OSError):
    """The machine failed to store an image: the disk is full, for instance."""


class BadImage(ValueError):
    """A value is no image that a prompt can show. The text says why, and how it is mended."""


@dataclass(frozen=True)
class Places:
    """Places that the values of a table may name. `folder`: base of relative paths; None: paths are refused, because
    the table is not on this machine. `urls`: http and https are fetched (tasks.allow_image_urls)."""

    folder: Path | None
    urls: bool = False


@contextlib.contextmanager
def media_kept_in(folder: Path) -> Iterator[None]:
    """Make `stored` write into `folder` within the block."""
    _kept_in.append(folder)
    try:
        yield
    finally:
        _kept_in.remove(folder)


@contextlib.contextmanager
def no_media_kept() -> Iterator[None]:
    """Make `stored` write and fetch nothing within the block: it checks, and returns where it would write."""
    token = _only_looks.set(True)
    try:
        yield
    finally:
        _only_looks.reset(token)


def stored(value: Any, places: Places) -> tuple[str, str]:
    """Return (absolute path, SHA-256 of the file's bytes or of its URL) of an image value.

    `value`: a path, a data URL, an http URL, bytes, Hugging Face's {"bytes", "path"}, or a PIL image. What has no file
    is written into the folder of `media_kept_in`, by default a temporary one, under the name of its SHA-256. The file's
    header is read. BadImage where it cannot be used.
    """
    looks_only = _only_looks.get()
    if isinstance(value, Mapping):
        value = _of_mapping(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and not re.match(r"(data|https?):", value, re.IGNORECASE):
        with _naming(f"{value!r:.200}"):
            path = _after_move(_located(value, places))
        return str(path), _checked_file(path)
    url = value if isinstance(value, str) and value[:5].lower() != "data:" else ""
    if url and places.urls and looks_only:
        return url, hashlib.sha256(url.encode()).hexdigest()
    content = _content(value, places)
    name = hashlib.sha256(content).hexdigest()
    with _naming(_short(value)):
        path = _folder() / f"{name}{_header(content)}"
    if not looks_only and not _holds(path, name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, content)
        except OSError as error:
            raise NotStored(error.errno, f"image {path} cannot be written: {error.strerror}") from error
    return str(path), hashlib.sha256(url.encode()).hexdigest() if url else name


def read_image(path: str, kept: Path | None = None) -> Any:
    """Return the image in a file as a PIL image in RGB: rotated as its EXIF data say, transparent parts on white.

    Where the file is gone, the one of its name in the folder `kept`, by default that of `media_kept_in`, is read: a
    run's directory may have been moved. BadImage where it cannot be used.
    """
    with _naming(path):
        return _decoded(_content_of(_after_move(Path(path), kept)))


def num_pixels(path: str) -> int:
    """Return width times height of the image in a file, by its header. BadImage where it cannot be used."""
    with _naming(path):
        width, height = _opened(_content_of(_after_move(Path(path)))).size
        return width * height


def read_unchanged(path: str, digest: str) -> Any:
    """Return the image in a file, as `read_image` does. BadImage if its `digest_of` is another one."""
    image = read_image(path)
    if digest_of(image) != digest:
        raise BadImage(f"image {path} has changed since it was put into a prompt: put the old one back")
    return image


def is_image(value: Any) -> bool:
    """Return whether the value is an image of Pillow, which need not be installed."""
    return hasattr(value, "tobytes") and hasattr(value, "getbands")


def digest_of(image: Any) -> str:
    """SHA-256 of the size and the pixels of a PIL image in RGB, hexadecimal."""
    return hashlib.sha256(b"%d x %d " % image.size + image.tobytes()).hexdigest()


# Private


def _after_move(path: Path, folder: Path | None = None) -> Path:
    """Return the path, or the file of its name in `folder` (by default that of `media_kept_in`) if the path is gone:
    the run's directory may have been moved."""
    moved = (folder or _folder()) / path.name
    return moved if not path.exists() and moved.is_file() else path


def _of_mapping(value: Mapping[str, Any]) -> Any:
    found = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), None)
    if found is None or not set(value) <= {"bytes", "path"}:
        raise BadImage(
            f"a table with {', '.join(map(str, value)) or 'nothing'} is no image: give one with bytes or path"
        )
    return found


def _holds(path: Path, name: str) -> bool:
    """Whether the file has the bytes with this SHA-256. BadImage where something else than a file lies there."""
    if not path.exists():
        return False
    if not path.is_file():
        raise BadImage(f"{path} is no regular file: remove it")
    try:
        return _checked_file(path) == name
    except BadImage:
        return False


def _located(text: str, places: Places) -> Path:
    if not text.strip() or "\0" in text:
        raise BadImage(f"{text!r} is no path")
    if text.startswith("file://"):
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    if "://" in text:
        raise BadImage(f"{text!r:.200} is none of a path, a data URL, and an http or https URL")
    if places.folder is None:
        raise BadImage(
            f"the path {text!r:.200} is refused, as the data are not on this machine: store the images themselves"
        )
    return Path(os.path.abspath(local_path(text, places.folder)))


@functools.lru_cache(maxsize=100_000)
def _hash_of(path: Path, size: int, modified_ns: int) -> str:
    """Return the hash of a file's content, after a look at its header."""
    content = _content_of(path)
    _header(content)
    return hashlib.sha256(content).hexdigest()


def _checked_file(path: Path) -> str:
    with _naming(path):
        stat = path.stat()
        return _hash_of(path, stat.st_size, stat.st_mtime_ns)


def _content_of(path: Path) -> bytes:
    return read_regular(path, MOST_BYTES)


def _content(value: Any, places: Places) -> bytes:
    """Return the encoded bytes of an image that has no file."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
    elif isinstance(value, str):
        content = _of_data_url(value) if value[:5].lower() == "data:" else _fetched(value, places)
    elif is_image(value):
        return _encoded(value)
    else:
        raise BadImage(
            f"a {type(value).__name__} is no image: give a path, bytes, a data URL or an image of Pillow (PIL.Image)"
        )
    if not content:
        raise BadImage("an image has 0 bytes")
    if len(content) > MOST_BYTES:
        raise BadImage(f"an image has {len(content):,} bytes: the most is {MOST_BYTES:,}. Make it smaller")
    return content


def _of_data_url(text: str) -> bytes:
    match = _DATA_URL.match(text[:200])
    if match is None or not match["options"].endswith(";base64"):
        raise BadImage(f"{text[:40]!r} is no data URL as data:image/png;base64,...")
    if len(text) > MOST_BYTES * 4 // 3 + 200:
        raise BadImage(f"a data URL has {len(text):,} characters: the most is an image of {MOST_BYTES:,} bytes")
    try:
        return base64.b64decode(text[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"a data URL's base64 is damaged ({error})") from error


class _SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https alone."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urllib.parse.urlsplit(newurl).scheme not in ("http", "https"):
            raise BadImage(f"a URL redirects to {newurl!r:.200}, which is not fetched")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str, places: Places) -> bytes:
    if not places.urls:
        raise BadImage(f"the URL {url!r:.200} is not fetched unless you set tasks.allow_image_urls = true")
    return _download(url)


@functools.lru_cache(maxsize=64)  # a row is read several times
def _download(url: str) -> bytes:
    handlers = urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.ProxyHandler, _SameScheme
    opener = urllib.request.OpenerDirector()  # the usual one also opens file: and ftp:
    for handler in (*handlers, urllib.request.HTTPErrorProcessor, urllib.request.HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    try:
        with opener.open(urllib.request.Request(url, headers={"User-Agent": "rollover"}), timeout=URL_TIMEOUT_S) as got:
            content, until = b"", time.monotonic() + DOWNLOAD_LIMIT_S
            while len(content) <= MOST_BYTES and (part := got.read1(min(_PART_BYTES, MOST_BYTES + 1 - len(content)))):
                content += part
                if time.monotonic() > until:
                    raise TimeoutError(f"it takes more than {DOWNLOAD_LIMIT_S:g} s")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(f"the URL {url!r:.200} cannot be fetched: {error}") from error
    return content


def _encoded(image: Any) -> bytes:
    """Encode a PIL image as PNG."""
    out = io.BytesIO()
    with _naming("the image of Pillow"):
        _as_rgb(image).save(out, format="PNG")
    return out.getvalue()


def _short(value: Any) -> str:
    return f"{value[:40]}..." if isinstance(value, str) else "the image"


@contextlib.contextmanager
def _naming(what: object) -> Iterator[None]:
    """Convert failures of the block to a BadImage that names the image."""
    try:
        yield
    except BadImage:
        raise
    except FileNotFoundError as error:
        near = did_you_mean_path(what) if isinstance(what, Path) else ""
        raise BadImage(f"there is no file {what}{near}") from error
    except Exception as error:  # boundary: decoders of damaged files raise errors of any kind
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadImage(f"{what} cannot be read as an image: {said}") from error


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise BadImage(f"images need the package Pillow: {_HOW_TO_INSTALL}") from error
    return Image


def _opened(content: bytes) -> Any:
    """Its header was read, its pixels not yet."""
    Image = _pillow()
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise ValueError(f"it has {width} x {height} pixels")
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels: the most is {MOST_PIXELS:,}. Make it smaller")
    # A camera's MPO is a JPEG with other views behind it.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise ValueError(f"it has {image.n_frames} frames: an animation or several pages. Choose one")
    return image


def _header(content: bytes) -> str:
    """Return the file suffix of the image's format."""
    form = _opened(content).format
    return _SUFFIXES.get(form, f".{form.lower()}")


def _decoded(content: bytes) -> Any:
    return _as_rgb(_opened(content))


def _as_rgb(image: Any) -> Any:
    from PIL import ImageOps

    Image = _pillow()
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown: convert it to 8 bits")
    if image.mode.startswith("I"):  # 16 bits, as Pillow reads them; its own conversion cuts off what is above 255
        import numpy as np

        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have 32 bits: convert it to 8 or 16")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rollover-media-")


def _folder() -> Path:
    """Return the folder that `stored` writes to."""
    return _kept_in[-1] if _kept_in else Path(_temporary().name)
