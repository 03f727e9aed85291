"""Pictures that were prepared lately: the next turn of a conversation brings them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from mlx_parallm.pictures.processor import PreparedPicture


class PreparedCache:
    """Keeps prepared pictures by what they were prepared from, the latest used ones."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds their arrays."""
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[Hashable, PreparedPicture] = OrderedDict()
        #: The bytes of all arrays that are kept.
        self.num_bytes = 0

    def get(self, key: Hashable) -> PreparedPicture | None:
        """Return a picture; None if it is not kept."""
        picture = self._pictures.get(key)
        if picture is not None:
            self._pictures.move_to_end(key)
        return picture

    def put(self, key: Hashable, picture: PreparedPicture) -> None:
        """Keep a picture, unless it alone is too large; those used longest ago make room."""
        if key in self._pictures or picture.nbytes > self._max_bytes:
            return
        self._pictures[key] = picture
        self.num_bytes += picture.nbytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._pictures.popitem(last=False)
            self.num_bytes -= dropped.nbytes
