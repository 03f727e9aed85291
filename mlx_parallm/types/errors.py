"""Every error this project raises on purpose.

    ParallmError
    ├── ConfigError                 a setting is wrong; the process does not start
    ├── ModelLoadError              a model could not be loaded
    ├── OutOfMemoryError            the device or machine lacks the memory         (HTTP 503)
    ├── InvalidRequestError         the caller's fault; names the field            (HTTP 400)
    │   ├── ContextLengthError      prompt (+ max_tokens) does not fit the model   (HTTP 400)
    │   ├── ModelNotFoundError      no served model has this name                  (HTTP 404)
    │   ├── NotFoundError           no file, batch or response of the caller's    (HTTP 404)
    │   ├── AuthenticationError     no key, or a wrong one                         (HTTP 401)
    │   ├── PermissionDeniedError   the key or the origin may not do this          (HTTP 403)
    │   ├── MisdirectedRequestError the request names a host that is not served    (HTTP 421)
    │   ├── ConflictError           the state of what is named does not allow it   (HTTP 409)
    │   │   ├── NotFiniteError      a training step would not be finite            (HTTP 409)
    │   │   └── PeerRefusedError    a server of the fleet refused                  (HTTP 409)
    │   ├── VersionMismatchError    the weights are of another version than expected (HTTP 412)
    │   ├── RequestTimeoutError     the body did not arrive in time                (HTTP 408)
    │   └── RequestTooLargeError    the body is over the route's limit             (HTTP 413)
    ├── NotImplementedRouteError    a known route that nothing loaded can serve     (HTTP 501)
    ├── OverloadedError             the waiting queue is full; try again later     (HTTP 429)
    ├── ShuttingDownError           the server is draining                         (HTTP 503)
    ├── ModelLoadingError           the model is not loaded yet; routes of JSON wait (HTTP 503)
    ├── NoRoomError                 a model waits for memory that others use       (HTTP 503)
    ├── PausedError                 generation is paused; try again later          (HTTP 503)
    ├── EngineDeadError             no engine is there; try again later            (HTTP 503)
    │   ├── DeviceLostError         the device computes nothing any more           (HTTP 503)
    │   ├── RequestLostError        the engine died that had this request          (HTTP 503)
    │   └── RankLostError           another process of the model is gone or hangs  (HTTP 503)
    ├── PeerSilentError             a server of the fleet does not answer          (HTTP 503)
    ├── NotReadyError               this server is not like its fleet, or drained  (HTTP 503)
    ├── SessionLostError            the engine has no such training session        (HTTP 503)
    ├── StorageError                the data folder does not work                  (HTTP 500)
    │   └── StorageInUseError       another process has the data folder            (HTTP 503)
    ├── RequestAbortedError         aborted by an operator or by shutdown          (HTTP 503)
    ├── ControlError                the engine could not do what an operator asked (HTTP 500)
    └── StepError                   a step failed for this request only            (HTTP 500)
        └── EarlierStepError        the step before could not be submitted

The table of HTTP statuses is ``api/http/errors.py``; nothing below ``api`` knows HTTP.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

#: MAX_LISTED_MODELS keeps "model does not exist" messages short on servers with many adapters.
MAX_LISTED_MODELS = 10


class ParallmError(Exception):
    """Base of every error in this project."""

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to pickle it: subclasses take other arguments than ``args`` holds."""
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[ParallmError], args: tuple[object, ...]) -> ParallmError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigError(ParallmError):
    """A setting is missing, contradictory or out of range."""


class OutOfMemoryError(ParallmError):
    """The device or the machine does not have enough memory.

    Attributes:
        needed_bytes: what was to be allocated beside what is in use; None if unknown.
        free_bytes: what was free; None if unknown.
    """

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ModelLoadError(ParallmError):
    """A model folder or hub id could not be loaded."""


class InvalidRequestError(ParallmError):
    """The request cannot be served as it is.

    Attributes:
        param: the request field at fault, or None.
        code: a machine-readable reason, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and the requested output, exceed the context length.

    Attributes:
        prompt_tokens: the prompt's number of tokens, as text; None if the prompt alone fits.
    """

    def __init__(
        self,
        max_model_len: int,
        detail: str,
        *,
        param: str | None = "messages",
        prompt_tokens: str | None = None,
    ) -> None:
        # LiteLLM, Goose and others match on this first sentence.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. {detail}",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens


class ModelNotFoundError(InvalidRequestError):
    """No served model has the requested name."""

    def __init__(self, name: str, served: Collection[str] = ()) -> None:
        """Build the message; it lists the first names of ``served``, the models that exist."""
        message = f"The model `{name}` does not exist."
        if served:
            more = len(served) - MAX_LISTED_MODELS
            listed = ", ".join(islice(served, MAX_LISTED_MODELS))
            message += f" Served here: {listed}{f' and {more} more' if more > 0 else ''}."
        super().__init__(message, param="model", code="model_not_found")


class NotFoundError(InvalidRequestError):
    """The caller owns nothing of this id."""


class AuthenticationError(InvalidRequestError):
    """No API key was given, or it is wrong."""


class PermissionDeniedError(InvalidRequestError):
    """The caller is known but may not do this."""


class MisdirectedRequestError(InvalidRequestError):
    """The request names a host that this server does not answer for."""


class ConflictError(InvalidRequestError):
    """The state of what the request names does not allow this."""


class NotFiniteError(ConflictError):
    """A loss, a gradient or the parameters after a training step are not finite."""


class PeerRefusedError(ConflictError):
    """A peer refused a request; nothing was changed anywhere.

    Attributes:
        status: of its answer; None if it was not asked.
    """

    def __init__(self, message: str, *, status: int | None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status


class VersionMismatchError(InvalidRequestError):
    """The weights are not of the version that an update expected; nothing was changed."""


class RequestTimeoutError(InvalidRequestError):
    """The body did not arrive in time."""


class RequestTooLargeError(InvalidRequestError):
    """The body exceeds the route's size limit."""


class UpgradeRequiredError(InvalidRequestError):
    """A request that must offer a WebSocket offers none."""


class NotImplementedRouteError(ParallmError):
    """None of the loaded models can serve this route of the API."""


class OverloadedError(ParallmError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: seconds after which the client should retry.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(ParallmError):
    """The server no longer admits requests."""


class NoRoomError(ParallmError):
    """There is no memory for a model now, because requests of others have not ended.

    Attributes:
        retry_after_s: when it may be worth another try, in seconds.
    """

    retry_after_s: float = 30.0


class ModelLoadingError(ParallmError):
    """The model is loaded for the first time, and nothing is known about it yet.

    Attributes:
        name: the model's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"The model {name!r} is being loaded.")
        self.name = name


class PausedError(ParallmError):
    """Generation is paused in a mode that admits no requests.

    Attributes:
        retry_after_s: when it may be worth another try, in seconds.
    """

    retry_after_s: float = 1.0

    def __init__(self) -> None:
        super().__init__("Generation is paused.")


class EngineDeadError(ParallmError):
    """The engine thread died; its cause is chained."""


class DeviceLostError(EngineDeadError):
    """The device computes nothing any more for this process, which ends its engine."""


class EngineSilentError(EngineDeadError):
    """An engine does not answer a query: its process hangs, and may be killed soon."""


class RequestLostError(EngineDeadError):
    """The engine died that had this request, which may be what it died of."""


class RankLostError(EngineDeadError):
    """Another process of a model that several compute is gone, or does not go on.

    Attributes:
        rank: its number; 0 is the one that decides.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"Rank {rank} {why}.")
        self.rank = rank


class PeerSilentError(ParallmError):
    """A peer does not answer, or not as a server of this kind."""


class NotReadyError(ParallmError):
    """A server should get no requests now, though it would answer them."""


class SessionLostError(ParallmError):
    """The engine does not have a training session: the model was loaded anew since."""


class StorageError(ParallmError):
    """The data folder cannot be read or written."""


class StorageInUseError(StorageError):
    """Another process uses the data folder; the message names it."""


class RequestAbortedError(ParallmError):
    """The request was aborted before it finished."""


class ControlError(ParallmError):
    """A command failed by no fault of its caller; the state before it stays in effect."""


class StepError(ParallmError):
    """A step failed for this request; others go on."""


class EarlierStepError(StepError):
    """A step was not begun, because the one before it could not be submitted to the device."""
