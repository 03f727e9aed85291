"""PDF files, written byte by byte: good ones, and ones that readers trip over."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
LETTER = (612, 792)


def pdf_of(
    *texts: str,
    size: tuple[int, int] = LETTER,
    catalog: bytes = b"",
    trailer: bytes = b"",
    red: bool = False,
) -> bytes:
    """Return a file with a page of each text; pages are red if ``red``.

    ``catalog`` and ``trailer`` are further entries of these.
    """
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(len(texts)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R %b >>" % catalog,
        b"<< /Type /Pages /Kids [%b] /Count %d >>" % (kids, len(texts)),
        FONT,
    ]
    box = b"[0 0 %d %d]" % size
    paint = b"1 0 0 rg 0 0 %d %d re f\n" % size if red else b""
    for number, text in enumerate(texts):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox %b /Contents %d 0 R "
            b"/Resources << /Font << /F 3 0 R >> >> >>" % (box, 5 + 2 * number)
        )
        shown = b"0 g BT /F 24 Tf 72 700 Td (%b) Tj ET" % text.encode("latin-1")
        objects.append(stream(paint + shown if text else paint))
    return file_of(objects, trailer)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    """Return a stream object."""
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(content), entries, content)


def file_of(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a file of objects 1, 2, …, the first of which is the catalog."""
    data = bytearray(b"%PDF-1.4\n")
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"trailer\n<< /Size %d /Root 1 0 R %b >>\n" % (len(objects) + 1, trailer)
    return bytes(data + b"startxref\n%d\n%%%%EOF\n" % start)


def encrypted() -> bytes:
    """Return a file that needs a password."""
    key = b"<%b>" % (b"41" * 32)
    entries = b"/Encrypt << /Filter /Standard /V 1 /R 2 /O %b /U %b /P -4 >> /ID [<41> <41>]"
    return pdf_of("secret", trailer=entries % (key, key))


def bomb(num_bytes: int) -> bytes:
    """Return a file whose page's content is that long, but for its compression."""
    packer = zlib.compressobj(1)
    piece = b"q Q " * 2**18
    packed = b"".join(packer.compress(piece) for _ in range(num_bytes // len(piece)))
    packed += packer.flush()
    return file_of(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R >>",
            stream(packed, b"/Filter /FlateDecode"),
        ]
    )


def looped() -> bytes:
    """Return a file whose tree of pages has itself as a branch."""
    return file_of(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>",
        ]
    )
