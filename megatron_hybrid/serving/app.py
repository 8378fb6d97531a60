"""The routes."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.inference.async_stream import AsyncStream
from megatron_hybrid.inference.metrics.prometheus import CONTENT_TYPE, PREFIX
from megatron_hybrid.inference.requests.options import LoadedAdapter
from megatron_hybrid.serving.admission import Ticket
from megatron_hybrid.serving.http.changes import HEADER, header_of
from megatron_hybrid.serving.http.errors import ApiError, refusal_of_field
from megatron_hybrid.serving.http.json_response import in_turn, json_response
from megatron_hybrid.serving.http.slow_clients import cancel_on_disconnect
from megatron_hybrid.serving.page_routes import add_page
from megatron_hybrid.serving.prepared_request import (
    num_prompts_of,
    prepare,
    prompts_of,
    rendered_chat,
)
from megatron_hybrid.serving.protocols import schemas
from megatron_hybrid.serving.protocols.answers import Answer
from megatron_hybrid.serving.protocols.fields import (
    AbortFields,
    AnyGeneration,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ExplainFields,
    GenerationFields,
    LoadAdapterFields,
    OtherFields,
    TokenizeFields,
    UnloadAdapterFields,
)
from megatron_hybrid.serving.protocols.messages import MessageAnswer, MessageFields, PromptFields
from megatron_hybrid.serving.protocols.request_mapping import (
    refusal_of_text,
    request_options,
)
from megatron_hybrid.serving.protocols.responses import ResponseAnswer, ResponseFields
from megatron_hybrid.serving.request_middleware import RequestMiddleware, refusal
from megatron_hybrid.serving.routes import EVENTS, Answers, errors, keyed_routes, operator_routes
from megatron_hybrid.serving.service import Service
from megatron_hybrid.serving.trainer_routes import add_trainer
from megatron_hybrid.utils.other_names import attributes_of
from megatron_hybrid.version import __version__

logger = logging.getLogger(__name__)
AnyAnswer = Answer | ResponseAnswer | MessageAnswer


def create_app(service: Service) -> FastAPI:
    """Create the application: OpenAI's routes, those around them, and those of the cache."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        admission = service.admission
        jobs = service.history.run(), admission.watch(), admission.trim_when_idle()
        tasks = [asyncio.create_task(job) for job in jobs]
        yield
        for task in tasks:
            task.cancel()

    config = service.config
    app = FastAPI(
        title="megatron_hybrid",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.budget = service.budget
    app.add_middleware(RequestMiddleware, service=service)
    if config.cors_origins:  # outermost: a browser's request before the real one has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", HEADER],
        )
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_cache(app, service)
    if service.engine_config.max_adapters:
        _add_adapters(app, service)
    add_page(app, service)
    if config.takes_weights:
        add_trainer(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return refusal(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            error = ApiError(400, f"the body cannot be read as JSON: {first['ctx']['error']}")
            return refusal(error, request.scope)
        is_read = request.method == "POST" and first["loc"][0] == "body"
        if is_read and "json" not in request.headers.get("content-type", ""):
            error = ApiError(400, "the body is JSON: send Content-Type: application/json")
            return refusal(error, request.scope)
        return refusal(refusal_of_field(error.errors()), request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        advised = attributes_of("path") if error.status_code == 404 else {}
        remedy = advised.get(request.scope["path"].strip("/"))
        text = f"{error.detail}: {remedy}" if remedy else str(error.detail)
        answer = refusal(ApiError(error.status_code, text), request.scope)
        answer.headers.update(error.headers or {})  # such as Allow
        return answer

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return refusal(ApiError(500, f"{type(error).__name__}: {error}"), request.scope)


_UNWELL: Answers = {
    503: {
        "description": "the server ends, a rank has failed, or no request goes on",
        "content": {"text/plain": {}},
    }
}


# Completions and chats --------------------------------------------------------------------------


def _add_generation(app: FastAPI, service: Service) -> None:
    statuses = 400, 401, 404, 413, 429, 499, 503, 504
    answers = EVENTS | errors(*statuses)
    anthropic_answers = EVENTS | errors(*statuses, model=schemas.MessageError)
    routes = keyed_routes()

    @routes.post("/v1/completions", response_model=schemas.Completion, responses=answers)
    async def completions(fields: CompletionFields, request: Request):
        return await _answer(service, request, fields, "cmpl-")

    @routes.post("/v1/chat/completions", response_model=schemas.Chat, responses=answers)
    async def chat_completions(fields: ChatFields, request: Request):
        return await _answer(service, request, fields, "chatcmpl-")

    @routes.post(
        "/invocations", response_model=schemas.Chat | schemas.Completion, responses=answers
    )
    async def invocations(fields: AnyGeneration, request: Request):
        prefix = "chatcmpl-" if isinstance(fields, ChatFields) else "cmpl-"
        return await _answer(service, request, fields, prefix)

    @routes.post("/v1/responses", response_model=schemas.Responded, responses=answers)
    async def responses(fields: ResponseFields, request: Request):
        form = partial(ResponseAnswer, fields=fields)
        return await _respond(service, request, fields, "resp_", form)

    @routes.post("/v1/messages", response_model=schemas.Message, responses=anthropic_answers)
    async def messages(fields: MessageFields, request: Request):
        return await _respond(service, request, fields, "msg_", MessageAnswer)

    @routes.post(
        "/v1/messages/count_tokens",
        response_model=schemas.InputTokens,
        responses=errors(400, 401, 404, 413, model=schemas.MessageError),
    )
    async def count_tokens(fields: PromptFields, request: Request):
        service.adapter_of(fields.model)
        fields.check()
        changes: list[str] = []

        def counted() -> schemas.InputTokens:
            chat = fields.to_chat()
            chat.check()
            count = len(rendered_chat(service, chat).tokens)
            changes.extend(chat.changes)
            return {"input_tokens": count}

        with rename_error_fields(fields):
            return await json_response(counted, request, changes=changes)

    @routes.post("/abort", responses=errors(400, 401, 413))
    async def abort(fields: AbortFields, request: Request) -> schemas.Aborted:
        fields.check()
        return {"aborted": service.admission.abort(fields.request_id, request.state.key)}

    app.include_router(routes)


async def _respond(
    service: Service,
    request: Request,
    fields: OtherFields,
    prefix: str,
    form: Callable[[Answer], AnyAnswer],
):
    """Answer a body as a chat, in the form of another route."""
    fields.check()
    with rename_error_fields(fields):
        chat = await in_turn(fields.to_chat, request)
        return await _answer(service, request, chat, prefix, form)


@contextmanager
def rename_error_fields(fields: OtherFields) -> Iterator[None]:
    """Let a chat's errors name the route's own fields."""
    try:
        yield
    except ApiError as error:
        if (name := fields.chat.own_names.get(error.param)) is not None:
            error.args = (re.sub(rf"^{error.param}\b", name, str(error)),)
            error.param = name
        raise


async def _answer(
    service: Service,
    request: Request,
    fields: GenerationFields,
    prefix: str,
    form: Callable[[Answer], AnyAnswer] = lambda answer: answer,
):
    """Return a whole answer, or a stream. `prefix` begins its id; `form` writes it."""
    adapter = service.adapter_of(fields.model)
    fields.check()
    state = request.state
    request_id = fields.request_id or state.request_id
    async with AsyncExitStack() as undo:
        num_prompts = num_prompts_of(fields)
        service.admission.check_count(num_prompts, fields.n)
        num_samples = num_prompts * fields.n
        admitted = service.admission.admitted(request_id, state.key, num_samples)
        ticket = state.ticket = undo.enter_context(admitted)
        ticket.names = fields.caller_names
        preparing = service.prepared(ticket, partial(prepare, service, fields), state.num_bytes)
        prepared = await cancel_on_disconnect(request.receive, preparing)
        prompts, params, guide = prepared.prompts, prepared.params, None
        if prepared.guide is not None:
            compiling = service.compiled(ticket, *prepared.guide)
            guide = await cancel_on_disconnect(request.receive, compiling)
        salt = service.auth.salt_of(state.key, fields.cache_salt)
        tenant = service.auth.tenant_of(state.key)
        options = request_options(fields, salt, tenant, guide, request.headers, adapter)
        id, model = prefix + ticket.request_id, fields.model or service.config.model_name
        style, thinks = prepared.style, prepared.is_thinking
        answer = form(Answer(service.tokenizer, fields, id, model, style, thinks, prompts))
        headers = header_of(fields.changes)
        for change in headers.values():
            logger.info("request %s: %s", ticket.request_id, change)
        if not fields.stream:
            work = service.generate_all(ticket, prompts, params, options)
            results = await cancel_on_disconnect(request.receive, work)
            body = await json_response(lambda: answer.whole(results), request, ticket.num_tokens)
            body.headers.update(headers)
            return body
        streams = service.streams(prompts, params, options)
        for stream in streams:
            await undo.enter_async_context(stream)
        # An error before the first token has a status of HTTP.
        await cancel_on_disconnect(request.receive, service.wait_for_first_output(ticket, streams))
        return _EventStream(_events(service, ticket, answer, streams), undo.pop_all(), headers)


class _EventStream(StreamingResponse):
    """A response that ends its requests.

    Args:
        events: its content.
        undo: contexts that are left at the end.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], undo: AsyncExitStack, headers: dict[str, str]):
        super().__init__(events, headers={"Cache-Control": "no-cache", **headers})
        self._undo = undo

    async def __call__(self, scope, receive, send) -> None:
        async with self._undo:
            await super().__call__(scope, receive, send)


async def _events(
    service: Service, ticket: Ticket, answer: AnyAnswer, streams: Sequence[AsyncStream]
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream. An error after the first is an event, too."""
    try:
        for number, stream in enumerate(streams):
            choices = answer.growing(number)
            async for outputs in service.outputs(ticket, stream):
                if events := b"".join([choices[o.sample_index].add(o) for o in outputs]):
                    yield events
        for chunk in answer.last([*ticket.prefixes.values()], ticket.num_generated):
            yield answer.encode(chunk)
    except ApiError as error:
        yield answer.encode(answer.error(error))
    if answer.end_mark:
        yield answer.end_mark


# Tokens ------------------------------------------------------------------------------------------


def _add_tokens(app: FastAPI, service: Service) -> None:
    routes = keyed_routes(400, 401, 404, 413)
    own = operator_routes(service.auth, 400, 401, 403, 404, 413)

    def tokens_of(fields: TokenizeFields) -> list[int]:
        if (fields.prompt is None) == (fields.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if fields.prompt is not None:
            try:
                return service.tokenizer.tokenize(fields.prompt, fields.add_special_tokens)
            except ValueError as error:
                raise refusal_of_text(error) from error
        return list(rendered_chat(service, fields).tokens)

    def tokenized(fields: TokenizeFields) -> schemas.Tokenized:
        tokens, names = tokens_of(fields), None
        if fields.return_token_strs:
            names = [service.tokenizer.shown_bytes(t).decode(errors="replace") for t in tokens]
        return {
            "count": len(tokens),
            "max_model_len": service.engine_config.max_sequence_length,
            "tokens": tokens,
            "token_strs": names,
        }

    def detokenized(fields: DetokenizeFields) -> schemas.Detokenized:
        size, most = service.tokenizer.vocab_size, service.engine_config.max_sequence_length
        if len(fields.tokens) > most:
            text = f"there are {len(fields.tokens)} tokens, and the context has {most}: send fewer"
            raise ApiError(400, text, "tokens", "context_length_exceeded")
        if outside := [token for token in fields.tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {outside[0]} is outside of [0, {size})", "tokens")
        return {"prompt": service.tokenizer.detokenize(fields.tokens, fields.skip_special_tokens)}

    def rendered(fields: GenerationFields) -> schemas.TokenIds | list[schemas.TokenIds]:
        service.admission.check_count(num_prompts_of(fields), fields.n)
        prompts = prompts_of(service, fields)
        if isinstance(fields, ChatFields):
            return {"token_ids": list(prompts[0].tokens)}
        return [{"token_ids": list(prompt)} for prompt in prompts]

    async def answer(job: Callable[[Any], Any], fields: Any, request: Request) -> Response:
        service.adapter_of(fields.model)
        fields.check()
        return await json_response(partial(job, fields), request, changes=fields.changes)

    @routes.post("/tokenize", response_model=schemas.Tokenized)
    async def tokenize(fields: TokenizeFields, request: Request):
        return await answer(tokenized, fields, request)

    @routes.post("/detokenize", response_model=schemas.Detokenized)
    async def detokenize(fields: DetokenizeFields, request: Request):
        return await answer(detokenized, fields, request)

    @own.get("/tokenizer_info", response_model=schemas.Json)
    async def tokenizer_info(request: Request):
        return await json_response(service.tokenizer.info, request)

    @routes.post("/v1/completions/render", response_model=list[schemas.TokenIds])
    async def render_completion(fields: CompletionFields, request: Request):
        return await answer(rendered, fields, request)

    @routes.post("/v1/chat/completions/render", response_model=schemas.TokenIds)
    async def render_chat(fields: ChatFields, request: Request):
        return await answer(rendered, fields, request)

    @own.post("/cache/explain")
    async def explain(fields: ExplainFields, request: Request) -> schemas.Explanation:
        adapter = service.adapter_of(fields.model)
        fields.check()
        key = request.state.key
        if fields.api_key is not None and (key := service.auth.known_key(fields.api_key)) is None:
            raise ApiError(400, "this is none of the server's keys: use one of them", "api_key")
        salt = service.auth.salt_of(key, fields.cache_salt)
        tokens = await in_turn(partial(tokens_of, fields), request)
        try:
            explanation = await service.engine.explain(tokens, salt=salt, adapter=adapter)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), "prompt") from error
        return {
            "prompt_tokens": explanation.match.prompt_tokens,
            "shared_tokens": explanation.match.shared_tokens,
            "skipped_tokens": explanation.match.skipped_tokens,
            "known_tokens": explanation.known_tokens,
            "reason": explanation.reason,
            "edge": explanation.edge,
            "text": "\n".join([str(explanation), *dict.fromkeys(fields.changes)]),
            "changes": [*dict.fromkeys(fields.changes)],
        }

    app.include_router(routes)
    app.include_router(own)


# State -------------------------------------------------------------------------------------------


def _add_state(app: FastAPI, service: Service) -> None:
    routes = keyed_routes(401)
    state = {"response_class": PlainTextResponse, "responses": errors() | _UNWELL}

    @app.get("/health", **state)
    @app.get("/ready", **state)
    @app.get("/ping", **state)
    @app.post("/ping", **state)
    async def health() -> PlainTextResponse:
        failure = service.engine.rank_failure or service.admission.stall
        is_well = failure is None and not service.admission.is_draining
        told = (failure or "").partition(" with ")[0]  # an error's own words are for the log
        return PlainTextResponse(told, 200 if is_well else 503)

    @app.get("/live", **state)
    async def live() -> PlainTextResponse:
        failed = service.engine.rank_failure is not None
        return PlainTextResponse("", 503 if failed else 200)

    @app.get("/version", responses=errors())
    async def version() -> schemas.Version:
        return {"version": __version__}

    @routes.get("/load")
    async def load() -> schemas.Load:
        return {"server_load": service.admission.load}

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors())
    async def metrics() -> PlainTextResponse:
        text = await service.engine.metrics()
        if service.auth.separates_keys:  # it would answer guesses; the operator has /cache/history
            hidden = f'{{reason="{MissReason.SALT.value}"}}'
            text = "".join(line for line in text.splitlines(True) if hidden not in line)
        return PlainTextResponse(text + _http_metrics(service), media_type=CONTENT_TYPE)

    @routes.get("/v1/models")
    async def models() -> schemas.Models:
        adapters = [_model(service, each) for each in service.engine.adapters]
        return {"object": "list", "data": [_model(service), *adapters]}

    @routes.get("/v1/models/{name:path}", responses=errors(404))
    async def model(
        name: Annotated[str, Path(description="The name of the served model.")],
    ) -> schemas.Model:
        found = service.adapter_of(name)
        loaded = (each for each in service.engine.adapters if each.name == found)
        return _model(service, next(loaded, None))

    app.include_router(routes)


def _model(service: Service, adapter: LoadedAdapter | None = None) -> schemas.Model:
    served = service.config.model_name
    return {
        "id": served if adapter is None else adapter.name,
        "object": "model",
        "created": service.created,
        "owned_by": "megatron_hybrid",
        "root": served,
        "parent": None if adapter is None else served,
        "max_model_len": service.engine_config.max_sequence_length,
        "description": service.config.description,
        "has_chat_template": service.tokenizer.chat_template is not None,
        "sampling_defaults": service.sampling_defaults,
    }


def _http_metrics(service: Service) -> str:
    name = f"{PREFIX}http_responses_total"
    lines = [f"# HELP {name} Answers of HTTP.", f"# TYPE {name} counter"]
    lines += [
        f'{name}{{route="{route}",status="{status}"}} {count}'
        for (route, status), count in sorted(service.num_responses.items())
    ]
    return "".join(f"{line}\n" for line in lines)


# The cache ---------------------------------------------------------------------------------------


def _add_cache(app: FastAPI, service: Service) -> None:
    async def refusals() -> AsyncIterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise ApiError(409, str(error)) from error

    statuses = 400, 401, 403, 409, 413
    routes = operator_routes(service.auth, *statuses, dependencies=[Depends(refusals)])

    @routes.post("/cache/reset")
    async def reset() -> schemas.Reset:
        await service.engine.clear_cache()
        return {"reset": True}

    @routes.post("/cache/save")
    async def save() -> schemas.Saved:
        await service.engine.save_cache()
        return {"saved": True}

    app.include_router(routes)


# Adapters ----------------------------------------------------------------------------------------


def _add_adapters(app: FastAPI, service: Service) -> None:
    routes = operator_routes(service.auth, 400, 401, 403, 413)

    @routes.post("/v1/load_lora_adapter")
    async def load(fields: LoadAdapterFields) -> schemas.Adapter:
        name = fields.lora_name
        if name == service.config.model_name:
            raise ApiError(400, f"lora_name is {name!r}: use a name of its own", "lora_name")
        try:
            await service.engine.load_adapter(name, fields.lora_path)
        except ValueError as error:
            param = "lora_path" if isinstance(error, CheckpointError) else "lora_name"
            raise ApiError(400, str(error), param) from error
        return {"lora_name": fields.lora_name}

    @routes.post("/v1/unload_lora_adapter", responses=errors(404))
    async def unload(fields: UnloadAdapterFields) -> schemas.Adapter:
        try:
            await service.engine.unload_adapter(fields.lora_name)
        except ValueError as error:
            raise ApiError(404, str(error), "lora_name") from error
        return {"lora_name": fields.lora_name}

    app.include_router(routes)
