"""Limits on the cost of images, and on where they may come from."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.types.errors import ConfigError, InvalidRequestError
from mlx_parallm.units import readable_bytes

#: The entry of ``allowed_domains`` that stands for every public host.
ANY_PUBLIC_HOST = "*"
#: Pillow refuses more pixels than this, whatever the settings say.
MOST_PIXELS = 178_956_970
#: Most pixels along a side of an image, and most times that one side is as long as the other:
#: long screenshots stay within these. Rows of a few pixels take decoders and resizing far more time
#: and memory than their number of pixels says.
MOST_SIDE, MOST_RATIO = 32_768, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits on the cost of images, and on where they may come from.

    Attributes:
        max_images: most images of one request.
        max_bytes: most bytes of an image's file.
        max_pixels: most pixels of an image, as it is sent and as image processors resize it.
        max_pixels_in_flight: most decoded pixels that are in use at once in the process; an image
            waits until it fits. A decoded pixel takes 3 bytes, and up to 16 while it is decoded.
        max_fetched_bytes: most bytes of fetched files that are in use at once in the process.
        timeout_s: seconds that fetching an image may take, redirects included.
        allowed_domains: host names that images may be fetched from; ``*`` is every public host.
            Hosts must have public addresses even if they are named.
        allowed_local_path: folder below which ``file:`` URLs may lead; None refuses them.
    """

    max_images: int = 16
    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    max_pixels_in_flight: int = 80_000_000
    max_fetched_bytes: int = 256_000_000
    timeout_s: float = 10.0
    allowed_domains: tuple[str, ...] = ()
    allowed_local_path: str | None = None

    def __post_init__(self) -> None:
        """Check the limits against one another.

        Raises:
            ConfigError: an image within its own limit could never be decoded.
        """
        if not 0 < self.max_pixels <= MOST_PIXELS:
            raise ConfigError(f"Images can have between 1 and {MOST_PIXELS} pixels.")
        if self.max_pixels_in_flight < self.max_pixels or self.max_fetched_bytes < self.max_bytes:
            raise ConfigError("The process must have room for the largest image of a request.")

    def check_count(self, num_images: int, *, param: str) -> None:
        """Refuse a request with too many images; call it before any of them is looked at.

        Raises:
            InvalidRequestError: there are more images than allowed.
        """
        if num_images > self.max_images:
            raise InvalidRequestError(
                f"The request has {num_images} images; at most {self.max_images} are allowed.",
                param=param,
            )

    def check_bytes(self, num_bytes: int) -> None:
        """Refuse a file that is too large.

        Raises:
            InvalidRequestError: it has more bytes than allowed.
        """
        if num_bytes > self.max_bytes:
            raise InvalidRequestError(
                f"The image's file is larger than {readable_bytes(self.max_bytes)}."
            )

    def check_pixels(self, width: int, height: int) -> None:
        """Refuse an image without pixels, with too many, or of a shape that is costly to resize.

        Raises:
            InvalidRequestError: the size is not allowed.
        """
        if not width or not height:
            raise InvalidRequestError("The image has no pixels.")
        size = f"The image has {width} x {height} pixels"
        if width * height > self.max_pixels:
            raise InvalidRequestError(f"{size}; at most {self.max_pixels} pixels are allowed.")
        longer, shorter = max(width, height), min(width, height)
        if longer > MOST_SIDE:
            raise InvalidRequestError(f"{size}; at most {MOST_SIDE} are allowed along a side.")
        if longer > MOST_RATIO * shorter:
            raise InvalidRequestError(
                f"{size}; one side may be at most {MOST_RATIO} times as long as the other."
            )

    def check_resized(self, num_pixels: int) -> None:
        """Refuse an image that its model's image processor would make too large.

        Raises:
            InvalidRequestError: it would have more pixels than an image may have.
        """
        if num_pixels > self.max_pixels:
            raise InvalidRequestError(
                f"The model's image processor would resize the image to {num_pixels} pixels; at "
                f"most {self.max_pixels} pixels are allowed."
            )
