"""``/v1/peers`` and ``/v1/contents``: what servers that change together ask each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from mlx_parallm import __version__
from mlx_parallm.api.http.declared import FORM_BYTES, Access, BodyLimit, Kept
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.replicas.frames import MAX_HEAD_BYTES, FrameReader, pieces
from mlx_parallm.replicas.peers import RELEASE_HEADER, other_release
from mlx_parallm.replicas.transport import StateQuery
from mlx_parallm.types.errors import ConflictError

if TYPE_CHECKING:
    from mlx_parallm.replicas.service import Replicas

Digest = Annotated[str, Query(max_length=128)]
CHANGE = BodyLimit(
    lambda config: (
        max(config.max_adapter_bytes, config.max_weights_bytes) + MAX_HEAD_BYTES + FORM_BYTES
    ),
    Kept.UPLOAD,
)
BINARY = "application/octet-stream"


async def check_release(request: Request, response: Response) -> None:
    """Refuse servers of another release; answers name this one."""
    release = request.headers.get(RELEASE_HEADER)
    if release is not None and release != __version__:
        raise ConflictError(other_release("The server that asks", release, __version__))
    response.headers[RELEASE_HEADER] = __version__


async def get_replicas(request: Request) -> Replicas:
    """Return this server's part in its fleet."""
    return request.app.state.replicas


ReplicasDep = Annotated[Any, Depends(get_replicas)]
routes = Routes(SERVER, access=Access.ADMIN, dependencies=[Depends(check_release)])


@routes.get("/v1/peers", is_polled=True, include_in_schema=False)
async def list_peers(replicas: ReplicasDep) -> dict[str, Any]:
    """List the servers of the fleet, with their versions, and why some are not ready."""
    part: Replicas = replicas
    await part.fleet.look()
    return dict(part.status())


@routes.get("/v1/peers/state", is_polled=True, include_in_schema=False)
async def peer_state(
    replicas: ReplicasDep,
    digest: Digest = "",
    holding: Annotated[str | None, Query(max_length=128)] = None,
) -> dict[str, Any]:
    """Return the state of this server's changes, as it relates to that of the one that asks."""
    part: Replicas = replicas
    state = part.fleet.own_state(StateQuery(digest, holding))
    return {name: getattr(state, name) for name in type(state).__dataclass_fields__}


@routes.get("/v1/peers/journal", include_in_schema=False)
async def peer_journal(replicas: ReplicasDep) -> dict[str, Any]:
    """Return the changes that a fresh server needs to be like this one."""
    part: Replicas = replicas
    return part.member.state.past.to_json()


@routes.get("/v1/contents/{digest}", response_class=Response, include_in_schema=False)
async def read_content(digest: str, replicas: ReplicasDep) -> Response:
    """Return the tensors of a change in the journal, by their SHA-256."""
    part: Replicas = replicas
    content = part.member.content(digest)
    headers = {RELEASE_HEADER: __version__, "content-length": str(len(content))}
    return StreamingResponse(pieces(b"", content), media_type=BINARY, headers=headers)


@routes.post("/v1/peers/stage", body_limit=CHANGE, include_in_schema=False)
async def stage_change(request: Request, replicas: ReplicasDep) -> dict[str, Any]:
    """Check and prepare a change, which is not served before its commit."""
    part: Replicas = replicas
    frame = FrameReader()
    async for piece in request.stream():
        frame.feed(piece)
    entry, content = frame.finish()
    await part.member.stage(entry, content)
    return {"staged": entry.digest}


@routes.post("/v1/peers/reserve", body_limit=CHANGE, include_in_schema=False)
async def reserve_change(request: Request, replicas: ReplicasDep) -> dict[str, Any]:
    """Let no other change be staged before this one, whose tensors are yet to come."""
    part: Replicas = replicas
    frame = FrameReader()
    async for piece in request.stream():
        frame.feed(piece)
    entry, _ = frame.finish()
    await part.member.reserve(entry)
    return {"reserved": entry.digest}


@routes.post("/v1/peers/commit", include_in_schema=False)
async def commit_change(replicas: ReplicasDep, digest: Digest) -> dict[str, Any]:
    """Serve the change that is staged."""
    part: Replicas = replicas
    await part.member.commit(digest)
    return {"number": part.member.state.number}


@routes.post("/v1/peers/drop", include_in_schema=False)
async def drop_change(replicas: ReplicasDep, digest: Digest) -> dict[str, Any]:
    """Forget the change that is staged, if it is this one."""
    part: Replicas = replicas
    await part.member.drop(digest)
    return {"dropped": digest}


@routes.post("/v1/peers/apply", include_in_schema=False)
async def apply(
    replicas: ReplicasDep, force: bool = False, everywhere: bool = True
) -> dict[str, Any]:
    """Make a split fleet alike; ``force`` lets it change without servers that do not answer."""
    part: Replicas = replicas
    await part.apply(force=force, everywhere=everywhere)
    return dict(part.status())


@routes.post("/v1/peers/drain", include_in_schema=False)
async def drain(replicas: ReplicasDep, draining: bool = True) -> dict[str, Any]:
    """Let ``/ready`` be 503 while requests go on, or end that."""
    part: Replicas = replicas
    part.fleet.is_draining = draining
    return {"draining": draining}
