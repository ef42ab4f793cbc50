"""What is accepted as an image, how it is read, and what is said of all else."""

import base64
import hashlib
import http.server
import io
import os
import threading

import numpy as np
import pytest
from PIL import Image

from rollover import images
from rollover.images import BadImage, Places, digest_of, media_kept_in, no_media_kept, read_image, stored

PIXELS = np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8)


def picture(mode="RGB", size=(6, 4), colour=None):
    image = Image.fromarray(PIXELS).resize(size) if colour is None else Image.new(mode, size, colour)
    return image.convert(mode)


def encoded(image, form="PNG", **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@pytest.fixture
def kept(tmp_path):
    with media_kept_in(tmp_path / "media"):
        yield tmp_path / "media"


def places(folder, urls=False):
    return Places(folder, urls)


# What is accepted


def test_path_begins_in_folder_and_stays_where_it_is(tmp_path, kept):
    content = encoded(picture())
    (tmp_path / "a.png").write_bytes(content)
    expected = str(tmp_path / "a.png"), hashlib.sha256(content).hexdigest()
    for value in ("a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", tmp_path / "a.png", {"path": "a.png"}):
        assert stored(value, places(tmp_path)) == expected
    assert not kept.exists()


def test_bytes_and_data_urls_are_kept_once_by_content(tmp_path, kept):
    content = encoded(picture(), "JPEG")
    name = hashlib.sha256(content).hexdigest()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"  # of another type than it says
    for value in (content, bytearray(content), {"bytes": content, "path": "gone.png"}, url):
        assert stored(value, places(None)) == (str(kept / f"{name}.jpg"), name)
    assert [path.read_bytes() for path in kept.iterdir()] == [content]


def test_image_of_pillow_is_kept_as_its_pixels(tmp_path, kept):
    path, _ = stored(picture(), places(None))
    assert np.array_equal(np.asarray(read_image(path)), PIXELS)


def test_looking_writes_nothing_and_names_the_same(kept):
    content = encoded(picture())
    with no_media_kept():
        looked = stored(content, places(None))
    assert not kept.exists()
    assert looked == stored(content, places(None))


def test_without_a_run_images_go_to_a_temporary_folder():
    path, _ = stored(encoded(picture()), places(None))
    assert "rollover-media-" in path and read_image(path).size == (6, 4)


def test_kept_image_of_a_moved_run_is_found(tmp_path):
    with media_kept_in(tmp_path / "run" / "media"):
        path, _ = stored(encoded(picture(colour="teal")), places(None))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(BadImage, match="there is no file"):
        read_image(path)
    with media_kept_in(tmp_path / "moved" / "media"):
        assert read_image(path).size == (6, 4)
    assert read_image(path, tmp_path / "moved" / "media").size == (6, 4)


# How it is read


def test_exif_rotation_is_applied(tmp_path):
    image, exif = picture(), Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    (tmp_path / "a.png").write_bytes(encoded(image, exif=exif))
    assert np.array_equal(np.asarray(read_image(str(tmp_path / "a.png"))), np.rot90(PIXELS, k=-1))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    form = "TIFF" if mode == "CMYK" else "PNG"
    image = picture(mode)
    (tmp_path / "a").write_bytes(encoded(image, form))
    found = read_image(str(tmp_path / "a"))
    assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_transparent_parts_are_white(tmp_path):
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 127))
    palette = Image.new("P", (1, 1), 0)
    (tmp_path / "a.png").write_bytes(encoded(image))
    (tmp_path / "p.png").write_bytes(encoded(palette, transparency=0))
    assert [read_image(str(tmp_path / "a.png")).getpixel((x, 0)) for x in (0, 1)] == [(255,) * 3, (128,) * 3]
    assert read_image(str(tmp_path / "p.png")).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_become_eight(tmp_path):
    values = np.array([[0, 256, 0x8000, 0xFFFF]], dtype=np.uint16)
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(values)))
    assert np.asarray(read_image(str(tmp_path / "a.png")))[0, :, 0].tolist() == [0, 1, 0x80, 0xFF]


def test_digest_is_of_pixels_and_size(tmp_path):
    a, b = picture(), picture()
    (tmp_path / "a.png").write_bytes(encoded(a))
    (tmp_path / "b.bmp").write_bytes(encoded(a, "BMP"))
    assert digest_of(read_image(str(tmp_path / "a.png"))) == digest_of(read_image(str(tmp_path / "b.bmp")))
    b.putpixel((0, 0), (1, 2, 3))
    assert digest_of(a) != digest_of(b)
    assert digest_of(Image.new("RGB", (2, 3))) != digest_of(Image.new("RGB", (3, 2)))


# What is refused

CONTENT = encoded(picture())


def sized(pixels):
    """A small file that says it has so many pixels a side."""
    content = encoded(picture(), "BMP")
    return content[:18] + pixels.to_bytes(4, "little") * 2 + content[26:]


AT_HEIGHT = CONTENT.index(b"IHDR") + 4
# kind -> (the value, what is said of it)
VALUES = {
    "device": ("/dev/zero", "/dev/zero is no file, but a folder, a device or a pipe"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "it is none of PNG, JPEG"),
    "zero size": (CONTENT[:AT_HEIGHT] + bytes(4) + CONTENT[AT_HEIGHT + 4 :], "cannot be read as an image"),
    "animated": (
        encoded(picture(), "GIF", save_all=True, append_images=[picture(colour="red")]),
        "it has 2 frames: an animation or several pages. Choose one",
    ),
    "pages": (encoded(picture(), "TIFF", save_all=True, append_images=[picture()]), "it has 2 frames"),
    "many pixels": (sized(9000), "9,000 x 9,000 pixels: the most is 50,000,000"),
    "bomb": (sized(1 << 20), "decompression bomb"),
    "no bytes": (b"", "an image has 0 bytes"),
    "URL": ("https://example.org/a.png", "is not fetched unless you set tasks.allow_image_urls = true"),
    "other scheme": ("s3://bucket/a.png", "is none of a path, a data URL, and an http or https URL"),
    "bad base64": ("data:image/png;base64,$$$$", "a data URL's base64 is damaged"),
    "no base64": ("data:image/png,abc", "is no data URL as data:image/png;base64,..."),
    "empty path": (" ", "' ' is no path"),
    "number": (7, "a int is no image: give a path, bytes"),
    "table": ({"url": "a.png"}, "a table with url is no image: give one with bytes or path"),
    "empty table": ({"bytes": None, "path": None}, "a table with bytes, path is no image"),
    "floats": (Image.new("F", (2, 2)), "its pixels are floating-point numbers"),
}
# kind -> (what is made at the path of a.png, what is said of that path)
MADE = {
    "missing": (
        lambda path: path.with_name("aa.png").write_bytes(CONTENT),
        "there is no file .*/a.png. Did you mean .*/aa",
    ),
    "folder": (lambda path: path.mkdir(), "a.png cannot be read as an image: .*is no file, but a folder"),
    "pipe": (os.mkfifo, "is no file, but a folder, a device or a pipe"),
    "text": (lambda path: path.write_text("no image"), "a.png cannot be read as an image: it is none of PNG, JPEG"),
    "empty file": (lambda path: path.touch(), "a.png cannot be read as an image: it is none of PNG"),
}


def refuse(value, said, folder, kept):
    with pytest.raises(BadImage, match=said) as caught:
        stored(value, places(folder))
    assert "\n" not in str(caught.value)
    assert not kept.exists()


@pytest.mark.parametrize("kind", VALUES)
def test_bad_value_is_refused_in_one_sentence(tmp_path, kept, kind):
    refuse(*VALUES[kind], tmp_path, kept)


@pytest.mark.parametrize("kind", MADE)
def test_bad_file_is_refused_in_one_sentence(tmp_path, kept, kind):
    make, said = MADE[kind]
    make(tmp_path / "a.png")
    refuse("a.png", said, tmp_path, kept)


def test_closed_image_is_refused(tmp_path, kept):
    image = Image.open(io.BytesIO(CONTENT))
    image.close()
    refuse(image, "the image of Pillow cannot be read as an image", tmp_path, kept)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_refused(tmp_path, kept):
    (tmp_path / "a.png").touch(0)
    refuse("a.png", "a.png cannot be read as an image: Permission denied", tmp_path, kept)


def test_large_file_and_large_bytes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MOST_BYTES", 10)
    (tmp_path / "a.png").write_bytes(CONTENT)
    with pytest.raises(BadImage, match="has more than 10 bytes"):
        stored("a.png", places(tmp_path))
    with pytest.raises(BadImage, match=f"an image has {len(CONTENT)} bytes: the most is 10"):
        stored(CONTENT, places(tmp_path))


def test_path_in_data_of_another_machine_is_refused():
    with pytest.raises(BadImage, match="the path 'a.png' is refused, as the data are not on this machine"):
        stored("a.png", places(None))


@pytest.mark.parametrize("cut", [60, len(CONTENT) - 30])
def test_truncated_image_is_refused_when_it_is_read(tmp_path, cut):
    (tmp_path / "a.png").write_bytes(CONTENT[:cut])
    with pytest.raises(BadImage, match="a.png cannot be read as an image"):
        read_image(str(tmp_path / "a.png"))


# URLs


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == "/gone.png":
            self.send_error(404)
        elif self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?"))
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        found.asked = []
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def test_url_is_fetched_if_it_may_be(server, kept):
    url = f"http://127.0.0.1:{server.server_port}"
    path, name = stored(f"{url}/to?{url}/a.png", places(None, urls=True))
    assert open(path, "rb").read() == CONTENT
    assert server.asked == [f"/to?{url}/a.png", "/a.png"]
    with no_media_kept():
        assert stored(f"{url}/to?{url}/a.png", places(None, urls=True))[1] == name
        stored(f"{url}/never.png", places(None, urls=True))
    assert "/never.png" not in server.asked


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gone.png", "cannot be fetched: HTTP Error 404"),
        ("/to?file:///etc/hostname", "cannot be fetched: .* 'file:///etc/hostname' is not allowed"),
        ("/to?ftp://127.0.0.1/a.png", "redirects to 'ftp://127.0.0.1/a.png', which is not fetched"),
    ],
)
def test_url_that_fails_is_refused(server, kept, path, said):
    with pytest.raises(BadImage, match=said):
        stored(f"http://127.0.0.1:{server.server_port}{path}", places(None, urls=True))


def test_large_answer_of_url_is_refused(server, kept, monkeypatch):
    monkeypatch.setattr(images, "MOST_BYTES", 10)
    with pytest.raises(BadImage, match="an image has 11 bytes: the most is 10"):
        stored(f"http://127.0.0.1:{server.server_port}/large.png", places(None, urls=True))
