"""Writes a small grey picture as PNG, for pages that must hold their pictures themselves."""

from __future__ import annotations

import base64
import struct
import zlib

from maecho.lab.charts import Image

EMPTY: Image = [[255]]


def png(image: Image) -> bytes:
    """The file of a grey picture of 8 bits. One without pixels is a white one."""
    rows = image if image and image[0] else EMPTY
    size = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(row) for row in rows)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", size) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def data_uri(image: Image) -> str:
    """The picture inside a link, so that nothing has to be fetched."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
