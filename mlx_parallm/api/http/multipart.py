"""Streaming reader of ``multipart/form-data`` (RFC 7578): fields whole, one file in pieces."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mlx_parallm.types.errors import InvalidRequestError

MAX_PARTS = 32
MAX_FIELD_BYTES = 4096
MAX_FILENAME_CHARS = 255
# LIST_MARK: the end of the names of parts that are the entries of a list.
LIST_MARK = "[]"
# NO_NAME: name of a file without a usable name.
NO_NAME = "file"


class FormReader:
    """Reads the body of a form piece by piece.

    Attributes:
        fields: the values of all parts but the file's, by name.
        lists: the values of parts whose names end in ``[]``, in order, by the names before it.
        filename: the file's name; None before the file begins.
    """

    def __init__(
        self, content_type: str, file_field: str, *, max_field_bytes: int = MAX_FIELD_BYTES
    ) -> None:
        """Prepare for a body.

        Args:
            content_type: the header, with its boundary.
            file_field: the name of the part that is a file.
            max_field_bytes: most bytes of any other part.

        Raises:
            InvalidRequestError: the type is another, or the boundary is missing.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError("The content type must be multipart/form-data.")
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.filename: str | None = None
        self._file_field = file_field
        self._max_field_bytes = max_field_bytes
        self._file_data: list[bytes] = []
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._value: bytearray | None = None
        self._name = ""
        self._num_parts = 0
        self._has_ended = False
        self._parser = self._make_parser(boundary)

    def feed(self, piece: bytes) -> bytes:
        """Read a piece of the body; return the file's bytes in it.

        Raises:
            InvalidRequestError: it is not a form, or has too many or too large fields.
        """
        try:
            self._parser.write(piece)
        except FormParserError as problem:
            raise InvalidRequestError(f"The form cannot be read: {problem}") from None
        data, self._file_data = b"".join(self._file_data), []
        return data

    def finish(self) -> None:
        """Check the form at the end of the body.

        Raises:
            InvalidRequestError: the form is incomplete, or has no file.
        """
        if not self._has_ended:
            raise InvalidRequestError("The form is incomplete: it ends in the middle.")
        if self.filename is None:
            raise InvalidRequestError(
                f"The form has no file named {self._file_field!r}.", param=self._file_field
            )

    def _make_parser(self, boundary: bytes) -> MultipartParser:
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as problem:
            raise InvalidRequestError(f"The form cannot be read: {problem}") from None

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"A form has at most {MAX_PARTS} parts.")
        self._disposition = b""

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header
        if bytes(name.lower()) == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise InvalidRequestError("A part of the form has no name.")
        self._name = _text(options[b"name"])
        self._value = bytearray()
        if self._name != self._file_field:
            return
        if self.filename is not None:
            raise InvalidRequestError("The form has several files.", param=self._file_field)
        if b"filename" not in options:
            raise InvalidRequestError(
                f"{self._file_field} must be a file with a name.", param=self._file_field
            )
        self.filename = base_name(_text(options[b"filename"]))
        self._value = None

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._file_data.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > self._max_field_bytes:
            raise InvalidRequestError(
                f"A field of the form has at most {self._max_field_bytes} bytes.",
                param=self._name[:64],
            )

    def _on_part_end(self) -> None:
        if self._value is not None:
            text, self._value = _text(bytes(self._value)), None
            if self._name.endswith(LIST_MARK):
                self.lists.setdefault(self._name.removesuffix(LIST_MARK), []).append(text)
            else:
                self.fields[self._name] = text

    def _on_end(self) -> None:
        self._has_ended = True


def base_name(path: str) -> str:
    """Return the name of a file without its folders; never empty, ``.`` or ``..``.

    Slashes and backslashes both end folders, on every machine. Characters that could break a log or
    a header become underscores.
    """
    name = path.replace("\\", "/").rpartition("/")[2]
    kept = "".join(char if char.isprintable() else "_" for char in name)[:MAX_FILENAME_CHARS]
    return kept if kept.strip(". ") else NO_NAME


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
