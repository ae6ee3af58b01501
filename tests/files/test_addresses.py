"""Allowed and refused addresses, against local servers."""

import time

import pytest
from PIL import Image

from hf_vit.files import addresses, download
from hf_vit.files.addresses import UnsafeURLError, check_url, open_url
from hf_vit.files.download import SourceError, fetch, fetch_image
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.image_reading import ImageReadingError, read_image

from ..photographs import encode


def redirect_to(location):
    return lambda handler: handler.send_head(302, Location=location)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254",
     "100.64.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "[fe80::1]", "[fd00::1]", "[2002:7f00:1::]",
     "[64:ff9b::7f00:1]", "224.0.0.1", "localhost"],
)  # fmt: skip
def test_this_machine_and_private_networks_are_refused(address, monkeypatch):
    with pytest.raises(UnsafeURLError, match="HF_VIT_ALLOW=private"):
        check_url(f"https://{address}/x.png")
    monkeypatch.setenv("HF_VIT_ALLOW", "private")
    check_url(f"https://{address}/x.png")


def test_public_addresses_are_allowed():
    for address in ("8.8.8.8", "[2606:4700:4700::1111]", "[::ffff:8.8.8.8]", "[64:ff9b::808:808]"):
        check_url(f"https://{address}/x.png")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://8.8.8.8/x.png?key=secret", r"x\.png"),
        ("ftp://8.8.8.8/x", "ftp:"),
        ("file:///etc/passwd", "file:"),
        ("https:///x", "https:///x"),
    ],
)
def test_other_addresses_are_refused(url, message):
    with pytest.raises(UnsafeURLError, match=message) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


def test_a_refused_address_gets_no_request(serve, tmp_path, monkeypatch):
    server = serve(lambda handler: handler.send_error(404))
    for ask, error in ((fetch_image, ImageReadingError), (lambda url: fetch(url, tmp_path), SourceError)):
        monkeypatch.delenv("HF_VIT_ALLOW", raising=False)
        with pytest.raises(error, match="HF_VIT_ALLOW=http"):
            ask(f"{server.url}/picture.png")
        monkeypatch.setenv("HF_VIT_ALLOW", "http")
        with pytest.raises(error, match=r"127\.0\.0\.1"):
            ask(f"{server.url}/picture.png")
    assert server.requests == []


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://10.0.0.1/secret", "10.0.0.1"),
        ("https://127.0.0.1/secret", "127.0.0.1"),
        ("file:///etc/passwd", "file:"),
        ("ftp://8.8.8.8/x", "ftp:"),
    ],
)
def test_redirects_are_checked_too(serve, monkeypatch, location, message):
    def answer(handler):
        monkeypatch.setenv("HF_VIT_ALLOW", "http")  # the first request was allowed more
        redirect_to(location)(handler)

    server = serve(answer)
    with pytest.raises(UnsafeURLError, match=message), open_url(server.url, 5, {}):
        pass
    assert len(server.requests) == 1


def test_redirects_are_followed(serve, tmp_path):
    picture = encode(Image.new("RGB", (3, 2), "red"))
    answers = {"/picture.png": redirect_to("/file"), "/file": lambda handler: handler.send(picture)}
    server = serve(lambda handler: answers.get(handler.path, lambda handler: handler.send_error(404))(handler))
    assert fetch(f"{server.url}/picture.png", tmp_path).path.read_bytes() == picture
    assert read_image(fetch_image(f"{server.url}/picture.png"))[:, 0, 0].tolist() == [255, 0, 0]
    with pytest.raises(ImageReadingError, match="404"):
        fetch_image(f"{server.url}/nothing.png")


def test_the_number_of_redirects_is_limited(serve):
    server = serve(redirect_to("/picture.png"))
    with pytest.raises(ImageReadingError, match=" 5 "):
        fetch_image(f"{server.url}/picture.png")
    assert len(server.requests) == 6


def test_a_host_name_whose_address_changes_is_refused(serve, monkeypatch):
    """A name may resolve to another address after the check; nothing is sent to that address."""
    server = serve(lambda handler: handler.send(b"x" * 100))
    monkeypatch.setenv("HF_VIT_ALLOW", "http")
    monkeypatch.setattr(addresses, "check_url", lambda url: None)  # which has seen a public machine
    with pytest.raises(UnsafeURLError, match=r"127\.0\.0\.1"), open_url(server.url, 5, {}):
        pass
    assert server.requests == []


def test_a_large_body_is_refused(serve):
    def endless(handler):
        handler.send_head()
        for _ in range(10_000):
            handler.wfile.write(bytes(1 << 16))

    with pytest.raises(ImageReadingError, match="67,108,864"):
        fetch_image(f"{serve(endless).url}/picture.png")


def test_a_slow_body_is_refused(serve, monkeypatch):
    def trickles(handler):
        handler.send_head()
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.05)

    monkeypatch.setattr(download, "_IMAGE_TIME", 0.3)
    start = time.monotonic()
    with pytest.raises(ImageReadingError, match=r"0\.3"):
        fetch_image(f"{serve(trickles).url}/picture.png")
    assert time.monotonic() - start < 3


def test_a_large_checkpoint_is_refused(serve, tmp_path):
    server = serve(lambda handler: handler.send_head(Content_Length=str(10**12)))
    with pytest.raises(SourceError, match="1,000,000,000,000"):
        fetch(f"{server.url}/x.npz", tmp_path)
    assert not list(tmp_path.rglob("*.incomplete"))


SECRETS = [  # a message, and what is left of it
    (
        "cannot read https://me:hidden@host/x.npz?signature=hidden#token=hidden: no",
        "cannot read https://host/x.npz: no",
    ),
    ("see https://host/x?a=1,b=hidden;c=hidden, and more.", "see https://host/x, and more."),
    ("(https://host/x#token=hidden)", "(https://host/x)"),
    ("s3://bucket/x.npz?X-Amz-Signature=hidden#token=hidden", "s3://bucket/x.npz"),
    ("ftp://me:hidden@host/x.npz?X-Amz-Signature=hidden", "ftp://host/x.npz"),
    ("gs://bucket/x-{00..12}.tar?generation=5: no", "gs://bucket/x-{00..12}.tar: no"),
    *((text, text) for text in ("gs://bucket/train-?????.tar", "s3://bucket/c#1.png", "https://host/x#readme")),
]


@pytest.mark.parametrize(("text", "redacted"), SECRETS)
def test_no_secrets_in_messages(text, redacted):
    assert addresses.redact_secrets(text) == redacted


@pytest.mark.parametrize("address", ["https://example.org/a.png", "http://example.org/a.png"])
def test_the_image_processor_refuses_addresses_and_names_what_reads_them(address):
    with pytest.raises(ImageReadingError, match=r"hf_vit\.predict"):
        HfViTImageProcessor()(address)
