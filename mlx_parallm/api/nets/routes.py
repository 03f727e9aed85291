"""``POST /v1/predict`` and ``POST /v1/rl/act``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from mlx_parallm.api.http.auth import caller_of
from mlx_parallm.api.http.declared import TENSORS
from mlx_parallm.api.http.dependencies import get_requests
from mlx_parallm.api.http.json_body import tell_ignored
from mlx_parallm.api.http.offload import in_thread, on_body
from mlx_parallm.api.http.openapi import NETS as GROUP
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.http.uploads import validated
from mlx_parallm.api.nets.answer import act_fields, file_dtypes, predict_fields
from mlx_parallm.api.nets.bodies import (
    ACT,
    FILE_TYPE,
    JSON_TYPE,
    PREDICT,
    Form,
    Layout,
    answer_form,
    read_body,
    write_answer,
)
from mlx_parallm.api.nets.long_answers import num_numbers
from mlx_parallm.api.nets.request import act_request, predict_request
from mlx_parallm.api.nets.schema import (
    ActAnswer,
    ActRequest,
    NetFields,
    PredictAnswer,
    PredictRequest,
)
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.engine.models import name_for
from mlx_parallm.nets.client import NetClient
from mlx_parallm.nets.kind import NETS
from mlx_parallm.nets.model import NetModel
from mlx_parallm.types.nets import NetRequest, NetResults

T = TypeVar("T", bound=NetFields)
# FEW_NUMBERS: most numbers of an answer that is written on the event loop.
FEW_NUMBERS = 4096
_FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
#: ``FILES``: the other form of answers, in the API's document.
FILES: dict[int | str, dict[str, Any]] = {200: {"content": {FILE_TYPE: _FILE}}}

routes = Routes(GROUP, body_limit=TENSORS, in_any_process=True)


@dataclass(frozen=True, slots=True)
class Prelude:
    """A request before its body is read.

    Attributes:
        request: of HTTP.
        client: the nets, as the caller may use them.
        owner: the caller, whose sequences no other sees.
    """

    request: Request
    client: NetClient
    owner: str


async def get_prelude(request: Request) -> Prelude:
    """Return a request before its body is read."""
    client = NETS.client(await get_requests(request))
    return Prelude(request, client, caller_of(request).client)


PreludeDep = Annotated[Prelude, Depends(get_prelude)]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request whose body was read.

    Attributes:
        prelude: what was known before.
        body: the fields.
        model: the net that is meant.
        num_bytes: size of the body.
        form: of the answer.
    """

    prelude: Prelude
    body: T
    model: NetModel
    num_bytes: int
    form: Form

    @property
    def name(self) -> str:
        """The name of the net in the answer."""
        return name_for(self.model, self.body.model)

    async def answer(
        self,
        make: Callable[..., NetRequest],
        fields_of: Callable[[T, str, NetResults], Mapping[str, Any]],
        *,
        bare: str = "",
    ) -> Response:
        """Return the answer to the request that ``make`` returns, unless the client goes away.

        Args:
            make: from the body; see ``predict_request``.
            fields_of: returns the answer's fields, from the body, the net's name and the results.
            bare: see ``write_answer``.

        Raises:
            InvalidRequestError: the body does not suit the net.
            ParallmError: see ``NetClient.run``.
        """
        prelude = self.prelude
        request_id = f"net-{prelude.request.state.answer_id}"
        request = await on_body(
            self.num_bytes,
            lambda: make(self.body, self.model, request_id=request_id, owner=prelude.owner),
        )

        async def work() -> Response:
            results = await prelude.client.run(request)
            fields = fields_of(self.body, self.name, results)
            return await self._respond(fields, bare=bare)

        return await unless_disconnected(prelude.request, work())

    async def _respond(self, fields: Mapping[str, Any], *, bare: str) -> Response:
        """Return the answer with these fields; see ``write_answer``."""
        dtypes = file_dtypes(self.model.signature)
        write = partial(write_answer, fields, self.form, bare=bare, dtypes=dtypes)
        is_short = self.form is Form.FILE or num_numbers(fields) <= FEW_NUMBERS
        response = write() if is_short else await in_thread(write)
        tell_ignored(response, set(self.body.model_extra or ()))
        return response


async def read(prelude: Prelude, form: type[T], layout: Layout) -> Call[T]:
    """Return a request with its body, which was checked as far as that needs no net.

    Raises:
        ModelNotFoundError, ModelLoadingError: see ``NetClient.get``.
        InvalidRequestError: the body cannot be read.
    """
    headers = prelude.request.headers
    raw = await prelude.request.body()
    kind = headers.get("content-type", "")
    body = await on_body(len(raw), lambda: read_body(kind, raw, layout))
    fields = validated(form, body.fields)
    model = prelude.client.get(fields.model)
    return Call(prelude, fields, model, len(raw), answer_form(headers.get("accept", ""), body.form))


def _schema(form: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body."""
    content = {JSON_TYPE: {"schema": form.model_json_schema()}, FILE_TYPE: _FILE}
    return {"requestBody": {"required": True, "content": content}}


@routes.post(
    "/v1/predict",
    openapi_extra=_schema(PredictRequest),
    response_model=PredictAnswer,
    responses=FILES,
)
async def predict(prelude: PreludeDep) -> Response:
    """Return the outputs of a net."""
    call = await read(prelude, PredictRequest, PREDICT)
    return await call.answer(predict_request, predict_fields, bare="outputs")


@routes.post(
    "/v1/rl/act", openapi_extra=_schema(ActRequest), response_model=ActAnswer, responses=FILES
)
async def act(prelude: PreludeDep) -> Response:
    """Return a policy's actions, drawn, likeliest or judged, and what is known of them."""
    call = await read(prelude, ActRequest, ACT)
    return await call.answer(act_request, act_fields)
