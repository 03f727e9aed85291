"""Requests whose engine died while it may have computed them: one of them may have killed it."""

from __future__ import annotations

from collections import OrderedDict

from mlx_parallm.types.work import Request, RequestWork

# MAX_DEATHS: a request fails that has gone through so many deaths of engines. One death is no proof
# against a request, because others were computed beside it.
MAX_DEATHS = 2
# LEAST_SERVING: engines that must serve before one of them gets a suspect. The last one would take
# the whole server with it, so a suspect waits instead until a dead engine has been started anew.
LEAST_SERVING = 2
# MAX_CONTENTS: contents of suspects that are remembered, the latest ones.
MAX_CONTENTS = 1024


class Suspects:
    """Remembers what suspects ask, because clients repeat a request that was lost.

    Attributes:
        waiting: parts that no engine has until enough of them serve, by their ids; True if an
            engine has computed the prompt, as the reader knows.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, bool] = {}
        self._contents: OrderedDict[int | None, None] = OrderedDict()

    def add(self, request: Request) -> None:
        """Suspect requests of this content from now on."""
        content = _content(request.work())
        if content is not None:
            self._contents[content] = None
            self._contents.move_to_end(content)
            if len(self._contents) > MAX_CONTENTS:
                self._contents.popitem(last=False)

    def has(self, request: Request) -> bool:
        """True if a request of this content was a suspect, and none was answered since."""
        return bool(self._contents) and _content(request.work()) in self._contents

    def clear(self, request: Request) -> None:
        """Suspect this content no longer: an engine has answered it."""
        if self.has(request):
            self._contents.pop(_content(request.work()), None)


def _content(work: RequestWork) -> int | None:
    """Return a key of what is computed; None if the work does not say that.

    Different contents may have one key by accident; then a request waits longer than it must.
    """
    if not (work.prefix or work.inputs or work.sticky):
        return None
    return hash((work.cache_key, tuple(work.prefix), tuple(work.inputs), work.sticky))
